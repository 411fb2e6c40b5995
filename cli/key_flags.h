// Cache keys for commands that read or write protected records: --key-file, or the variable KV4_KEY_FILE.
#pragma once

#include <string>
#include <vector>

#include "kv4/cache_keys.h"
#include "kv4/session.h"

namespace CLI {
class App;
}

namespace kv4::cli {

struct KeyFlags {
  std::string file;
  bool accept_unauthenticated = false;  // of sessions

  /// --key-file, else KV4_KEY_FILE; empty: none.
  std::string path() const;
  /// The keys of that file; none without a file. Throws as read_key_file().
  std::vector<CacheKey> read() const;
  /// The identity for reading a session of unknown origin.
  SessionIdentity of_session() const;
};
void add_flags(CLI::App& app, KeyFlags& flags);
/// The same flags and --accept-unauthenticated.
void add_session_flags(CLI::App& app, KeyFlags& flags);

/// The warning about tiers and sessions without a key.
inline constexpr const char* kNoKeyText =
    "no cache key: records on disk, servers and in sessions are checked for damage, not for who wrote them";

/// A sentence on the protection of a session's file. `authentic`: one of the given keys made it.
std::string describe(Protection protection, bool authentic);

}  // namespace kv4::cli
