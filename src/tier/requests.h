// What is asked of any place that keeps records by key, in batches; each request tells what became of it. No answer is
// ever an error of the caller's: whatever went wrong, the caller computes the bytes again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tier/record_format.h"

namespace kv4::tier {

enum class PutStatus : std::uint8_t { stored, too_large, no_space, failed };
enum class GetStatus : std::uint8_t {
  found,
  missing,
  too_small,  // `to` is shorter than the payload; `bytes` says how long that is
  damaged,    // a miss; the record is set aside
  failed      // a miss; the disk did not answer
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
  std::int64_t bytes = -1;  // out: of the payload; -1: not there
};

struct RemoveRequest {
  RecordId id;
  bool removed = false;  // out: it was there
};

}  // namespace kv4::tier
