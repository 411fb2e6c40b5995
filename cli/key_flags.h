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
  /// Of that file; none without one. Throws as read_key_file().
  std::vector<CacheKey> read() const;
  /// To read a session that anybody may have made.
  SessionIdentity of_session() const;
};
void add_flags(CLI::App& app, KeyFlags& flags);
/// And --accept-unauthenticated.
void add_session_flags(CLI::App& app, KeyFlags& flags);

/// The warning about tiers and sessions without a key.
inline constexpr const char* kNoKeyText =
    "no cache key: records on disk, servers and in sessions are checked for damage, not for who wrote them";

/// Of a session's file, as a sentence. `authentic`: a key of those given made it.
std::string describe(Protection protection, bool authentic);

}  // namespace kv4::cli
