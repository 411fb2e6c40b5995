// Layout of an attend workspace: arrival counters of a token's CTAs, then a partial output of each CTA: 64 heads of
// rows of that width. A cache's memory plan and the kernels share it.
#pragma once

#include <cstdint>

namespace kv4::ops {

constexpr std::int32_t kAttendPartialWidth = 512;
constexpr std::int64_t kAttendCounterBytes = 2048;   // of all arrival counters
constexpr std::int64_t kAttendPartialBytes = 67072;  // of one partial output, with its softmax statistics

}  // namespace kv4::ops
