// Trims values: runs of one repeated word of 8 bytes, zeros above all, are stored as their length and the word.
//
//   trimmed payload: literal bytes of all runs, one after the other; then the runs; then their number, 4 bytes
//
//   run, 16 bytes: literal bytes 4, bytes of the repeated word 4, the word 8
//
// Literal bytes come first, so that a payload can be expanded in the memory that it was read to. Numbers are
// little-endian. The repeated bytes of a run are a multiple of 8, and may be 0 for the last run only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tier/chunk_key.h"

namespace kv4::tier {

struct TrimmedRun {
  std::uint32_t literal_bytes = 0, repeated_bytes = 0;
  std::uint64_t word = 0;
};
inline constexpr std::int64_t kTrimmedRunBytes = 16, kTrimmedCountBytes = 4;
/// Shorter repetitions stay as they are. A run of so many bytes at a multiple of 8 is always found.
inline constexpr std::int64_t kLeastRepeatedBytes = 1024;
/// A value is trimmed only where that saves one part in so many: a trimmed value is copied once more.
inline constexpr std::int64_t kLeastTrimmedPart = 16;

/// The runs of a value and the size of its trimmed payload.
struct TrimPlan {
  std::vector<TrimmedRun> runs;
  std::int64_t payload_bytes = 0;
};
/// Looks at an eighth of the value's cache lines where nothing repeats. nullopt: trimming does not pay.
std::optional<TrimPlan> plan_trim(std::span<const std::byte> value);
/// Writes plan.payload_bytes to `to`.
void trim(std::span<const std::byte> value, const TrimPlan& plan, std::span<std::byte> to);
/// Expands the first `payload_bytes` of `value` to the whole of it, in place. False: the payload is not that of a value
/// of this size, and `value` holds no particular bytes. Throws std::bad_alloc.
bool expand(std::span<std::byte> value, std::int64_t payload_bytes);

}  // namespace kv4::tier
