// The rows of a saved session, decoded one after the other. The layout's text in the file says how; no model is needed.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cache/session_file.h"
#include "kv4/schema.h"
#include "kv4/session.h"

namespace kv4::checks {

/// Pending: compressor rows that wait for their entry (or key), kv and gate of a token each; without overlap the open
/// span's maximum, denominator and numerator.
enum class RowPart : std::uint8_t { window, entries, keys, pending, pending_keys };
constexpr const char* kRowPartNames[] = {"window", "entries", "keys", "pending", "pending-keys"};

struct DecodedRow {
  const LayerSpec* layer = nullptr;
  RowPart part = RowPart::window;
  std::int64_t index = 0;     // position of a window or pending row, number of an entry or key
  std::int64_t position = 0;  // the first token it covers
  std::int64_t tokens = 1;    // how many it covers
  std::span<const float> values = {};
};

struct SessionContents {
  CacheSchema schema;
  std::vector<std::int64_t> lengths;
  std::string weights_id;
  std::int64_t missing_blocks = 0;
  Protection protection = Protection::none;  // of its first record
  bool authentic = false;                    // a key of those given made it
};

/// "; it is text, not a session of save_session_file", where the file does not begin as one; else nothing.
std::string what_it_is(const std::string& path);
/// "; give its key with --key-file or KV4_KEY_FILE", where it begins with a sealed record and there is no key; else
/// nothing.
std::string what_it_needs(const std::string& path, bool has_keys);

/// Told how far it is, now and then.
using ReadProgress = std::function<void(std::int64_t done_bytes, std::int64_t total_bytes)>;

/// Calls `take` for every row: windows, pending rows and those of the open block first, then block by block as they lie
/// in the file. Of the identity only its keys count. Throws Error(bad_file) at the first damage.
SessionContents read_session_rows(const std::string& path, const SessionIdentity& identity,
                                  const std::function<void(const DecodedRow&)>& take,
                                  const ReadProgress& progress = {});
SessionContents read_session_rows(SessionFileSource& source, const SessionIdentity& identity,
                                  const std::function<void(const DecodedRow&)>& take,
                                  const ReadProgress& progress = {});

}  // namespace kv4::checks
