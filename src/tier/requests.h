// What is asked of any place that keeps records by key, in batches; each request tells what became of it. No answer is
// ever an error of the caller's: whatever went wrong, the caller computes the bytes again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tier/little_endian.h"
#include "tier/record_format.h"

namespace kv4::tier {

/// Keys are digests already.
struct RecordIdHash {
  std::size_t operator()(const RecordId& id) const {
    return static_cast<std::size_t>(load_le<std::uint64_t>(id.key.data()) ^ (id.tenant * 0x9e3779b97f4a7c15u));
  }
};

enum class PutStatus : std::uint8_t { stored, too_large, no_space, failed };
enum class GetStatus : std::uint8_t {
  found,
  missing,
  too_small,  // `to` is shorter than the payload; `bytes` says how long that is
  damaged,    // a miss; the record is set aside
  failed      // a miss; no answer, or not in time
};

struct PutRequest {
  RecordId id;
  std::span<const std::byte> payload;
  PutStatus status = PutStatus::failed;  // out
};

struct GetRequest {
  RecordId id;
  std::span<std::byte> to;
  GetStatus status = GetStatus::failed;  // out
  std::int64_t bytes = 0;                // out
};

struct ExistsRequest {
  RecordId id;
  std::int64_t bytes = -1;  // out: of the payload; -1: not there, as far as is known
  bool answered = false;    // out: -1 is no failure
};

struct RemoveRequest {
  RecordId id;
  bool removed = false;   // out: it was there
  bool answered = false;  // out, of a Tier: it is not there any more
};

}  // namespace kv4::tier
