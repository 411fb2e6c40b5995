// Decodes a saved session's rows one after the other. The layout's text in the file says how; no model is needed.
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

/// Pending: compressor rows that wait for their entry or key, kv and gate of one token each. Without overlap: the open
/// span's maximum, denominator and numerator.
enum class RowPart : std::uint8_t { window, entries, keys, pending, pending_keys };
constexpr const char* kRowPartNames[] = {"window", "entries", "keys", "pending", "pending-keys"};

struct DecodedRow {
  const LayerSpec* layer = nullptr;
  RowPart part = RowPart::window;
  std::int64_t index = 0;     // position of a window or pending row; number of an entry or key
  std::int64_t position = 0;  // first covered token
  std::int64_t tokens = 1;    // number of covered tokens
  std::span<const float> values = {};
};

struct SessionContents {
  CacheSchema schema;
  std::vector<std::int64_t> lengths;
  std::string weights_id;
  std::int64_t missing_blocks = 0;
  Protection protection = Protection::none;  // of its first record
  bool authentic = false;                    // one of the given keys made it
};

/// "; it is text, not a session of save_session_file" where the file has another kind's first bytes; else "".
std::string what_it_is(const std::string& path);
/// "; give its key with --key-file or KV4_KEY_FILE" where the file begins with a sealed record and no key is given;
/// else "".
std::string what_it_needs(const std::string& path, bool has_keys);

/// Called now and then.
using ReadProgress = std::function<void(std::int64_t done_bytes, std::int64_t total_bytes)>;

/// Calls `take` for every row: first windows, pending rows and rows of the open block, then block by block in the
/// file's order. Uses only the identity's keys. Throws Error(bad_file) at the first damage.
SessionContents read_session_rows(const std::string& path, const SessionIdentity& identity,
                                  const std::function<void(const DecodedRow&)>& take,
                                  const ReadProgress& progress = {});
SessionContents read_session_rows(SessionFileSource& source, const SessionIdentity& identity,
                                  const std::function<void(const DecodedRow&)>& take,
                                  const ReadProgress& progress = {});

}  // namespace kv4::checks
