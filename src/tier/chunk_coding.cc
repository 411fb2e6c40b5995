#include "tier/chunk_coding.h"

#include <algorithm>
#include <cstring>

#include "tier/little_endian.h"

namespace kv4::tier {
namespace {

constexpr std::int64_t kWordBytes = 8;
constexpr std::int64_t kProbeBytes = 512;  // every run of kLeastRepeatedBytes covers a whole aligned piece of this size
static_assert(kLeastRepeatedBytes >= 2 * kProbeBytes);

std::uint64_t word_at(std::span<const std::byte> value, std::int64_t at) {
  std::uint64_t word;
  std::memcpy(&word, value.data() + at, sizeof word);
  return word;
}

/// The end of the run of this word that begins at `at`, at most `limit`.
std::int64_t end_of_run(std::span<const std::byte> value, std::int64_t at, std::int64_t limit, std::uint64_t word) {
  constexpr std::int64_t kStep = 8 * kWordBytes;
  for (; at + kStep <= limit; at += kStep) {
    std::uint64_t differs = 0;
    for (std::int64_t i = 0; i < kStep; i += kWordBytes) differs |= word_at(value, at + i) ^ word;
    if (differs != 0) break;
  }
  while (at + kWordBytes <= limit && word_at(value, at) == word) at += kWordBytes;
  return at;
}

}  // namespace

std::optional<TrimPlan> plan_trim(std::span<const std::byte> value) {
  TrimPlan plan;
  const std::int64_t size = std::ssize(value), last_word = size / kWordBytes * kWordBytes;
  std::int64_t literal_from = 0, repeated = 0;
  for (std::int64_t at = 0; at + kProbeBytes <= size; at += kProbeBytes) {
    const std::uint64_t word = word_at(value, at);
    if (end_of_run(value, at, at + kProbeBytes, word) != at + kProbeBytes) continue;
    std::int64_t from = at;
    while (from - kWordBytes >= literal_from && word_at(value, from - kWordBytes) == word) from -= kWordBytes;
    const std::int64_t to = end_of_run(value, at, last_word, word);
    if (to - from < kLeastRepeatedBytes) continue;
    plan.runs.push_back({static_cast<std::uint32_t>(from - literal_from), static_cast<std::uint32_t>(to - from), word});
    repeated += to - from;
    literal_from = to;
    at = to / kProbeBytes * kProbeBytes - (to % kProbeBytes == 0 ? kProbeBytes : 0);
  }
  if (plan.runs.empty()) return std::nullopt;
  if (literal_from < size) plan.runs.push_back({static_cast<std::uint32_t>(size - literal_from), 0, 0});
  plan.payload_bytes = size - repeated + std::ssize(plan.runs) * kTrimmedRunBytes + kTrimmedCountBytes;
  if ((size - plan.payload_bytes) * kLeastTrimmedPart < size) return std::nullopt;
  return plan;
}

void trim(std::span<const std::byte> value, const TrimPlan& plan, std::span<std::byte> to) {
  std::byte* at = to.data();
  for (const TrimmedRun& run : plan.runs) {
    if (run.literal_bytes > 0) std::memcpy(at, value.data(), run.literal_bytes);
    at += run.literal_bytes;
    value = value.subspan(std::size_t{run.literal_bytes} + run.repeated_bytes);
  }
  for (const TrimmedRun& run : plan.runs) {
    store_le(at, run.literal_bytes);
    store_le(at + 4, run.repeated_bytes);
    std::memcpy(at + 8, &run.word, sizeof run.word);  // as it lies in the value
    at += kTrimmedRunBytes;
  }
  store_le(at, static_cast<std::uint32_t>(plan.runs.size()));
}

bool expand(std::span<std::byte> value, std::int64_t payload_bytes) {
  const std::int64_t size = std::ssize(value);
  if (payload_bytes < kTrimmedCountBytes || payload_bytes > size) return false;
  const std::int64_t count = load_le<std::uint32_t>(value.data() + payload_bytes - kTrimmedCountBytes);
  if (count > (payload_bytes - kTrimmedCountBytes) / kTrimmedRunBytes) return false;
  const std::int64_t literals = payload_bytes - kTrimmedCountBytes - count * kTrimmedRunBytes;
  std::vector<TrimmedRun> runs(count);
  std::int64_t literal = 0, whole = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::byte* at = value.data() + literals + i * kTrimmedRunBytes;
    TrimmedRun& run = runs[i];
    run = {load_le<std::uint32_t>(at), load_le<std::uint32_t>(at + 4), 0};
    std::memcpy(&run.word, at + 8, sizeof run.word);
    if (run.repeated_bytes % kWordBytes != 0 || (run.repeated_bytes == 0 && i + 1 < count)) return false;
    literal += run.literal_bytes;
    whole += std::int64_t{run.literal_bytes} + run.repeated_bytes;
  }
  if (literal != literals || whole != size) return false;

  // From the end: a run's place is never before its literal bytes, and all later bytes are in place already.
  std::int64_t end = size;
  for (auto run = runs.rbegin(); run != runs.rend(); ++run) {
    end -= run->repeated_bytes;
    literal -= run->literal_bytes;
    const std::int64_t from = end - run->literal_bytes;
    if (run->literal_bytes > 0) std::memmove(value.data() + from, value.data() + literal, run->literal_bytes);
    for (std::int64_t at = end; at < end + run->repeated_bytes; at += kWordBytes)
      std::memcpy(value.data() + at, &run->word, sizeof run->word);
    end = from;
  }
  return true;
}

}  // namespace kv4::tier
