// A window of at most 128 rows in shared memory as bf16, and what warpgroups do with it: scores, weights, values. For
// persistent_window.cu and single_pass_window.cu.
//
// bf16, because a row and a query are exact in it without an exponent kept apart; weights lose all but 8 bits there.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/mma.cuh"

namespace kv4::cuda {
namespace {

constexpr int kSides = 2;  // halves of the rows
constexpr int kScorers = kSides * kGroup;
constexpr int kScores = kTile / 2;  // of a thread
static_assert(kMostRunWindow == kSides * kTile);

struct WindowTiles {
  std::uint8_t q[kTileBytes];             // [8 panels, 64 heads]
  std::uint8_t rows[kSides][kTileBytes];  // [8 panels, 64 rows]
  std::uint8_t weights[kSides][kPanelBytes];
  float most[kSides][kTile], sum[kSides][kTile];  // of a head over half of the rows
};

/// Of a token, from its first head of the CTA on.
__device__ const std::uint8_t* queries_of(const AttendParams& p, int token, int first_head) {
  return static_cast<const std::uint8_t*>(p.q.data) + (std::int64_t{token} * p.q.row_stride + first_head * kWidth) * 2;
}

/// By so many threads, kAtOnce copies of each side by side; zeros for heads that are not there. They are to be waited
/// for.
constexpr int kQueryUnits = kWidth * 2 / 16;  // of a head
template <int kWorkers, int kAtOnce>
__device__ void copy_queries(const AttendParams& p, WindowTiles& s, int token, int first_head, int worker) {
  static_assert(kWorkers % kQueryUnits == 0);
  constexpr int kHeads = kWorkers / kQueryUnits;  // at a time
  const int heads = min(kTile, p.num_heads - first_head), unit = worker % kQueryUnits;
  const std::uint8_t* q = queries_of(p, token, first_head);
  const std::uint32_t to = shared_address(s.q) + unit / 8 * kPanelBytes;
#pragma unroll kAtOnce
  for (int i = 0; i < kTile / kHeads; ++i) {
    const int head = worker / kQueryUnits + i * kHeads;
    const bool there = head < heads;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + panel_offset(head, unit % 8)),
                 "l"(q + (there ? (head * kQueryUnits + unit) * 16 : 0)), "r"(there ? 16 : 0)
                 : "memory");
  }
}

/// Times log2 e. A constant, but for padded tokens, which have none.
__device__ float sink_of(const AttendParams& p, int head) {
  return p.sink != nullptr && head < p.num_heads ? p.sink[head] * codec::kLog2e : -INFINITY;
}

/// Of one side's rows.
__device__ void score_side(const WindowTiles& s, float (&z)[kScores], int side) {
  const std::uint32_t q = panel_place(shared_address(s.q)), keys = panel_place(shared_address(s.rows[side]));
  mma_begin();
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      const std::uint32_t at = panel * kPanelBytes + k * 32;
      multiply_bf16_channels(z, panel_descriptor(q, at), panel_descriptor(keys, at), panel > 0 || k > 0);
    }
  mma_commit();
}

/// A thread's scores are of which rows of a side.
__device__ int row_of_score(int i) { return i / 4 * 8 + 2 * quad_of_thread() + i % 2; }

/// Scores, -infinity where there is no row, to weights relative to the largest of both sides, whose warpgroups agree on
/// it.
__device__ void weigh_side(WindowTiles& s, const float (&z)[kScores], int side, float scale, float (&base)[2]) {
  const int head = head_of_thread(), quad = quad_of_thread();
  float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < kScores; i += 2) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fmaxf(z[i], z[i + 1]));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    most[half] = fmaxf(most[half], __shfl_xor_sync(kAllLanes, most[half], 1));
    most[half] = fmaxf(most[half], __shfl_xor_sync(kAllLanes, most[half], 2));
    if (quad == 0) s.most[side][head + 8 * half] = most[half];
  }
  named_barrier(1, kScorers);
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float larger = fmaxf(most[half], s.most[side ^ 1][head + 8 * half]);
    base[half] = larger == -INFINITY ? 0.0f : larger * scale;
  }
  const std::uint32_t to = shared_address(s.weights[side]) + quad * 4;
#pragma unroll
  for (int i = 0; i < kScores; i += 2) {
    const int half = i / 2 % 2;
    const float x = exp2_fast(codec::fused(z[i], scale, -base[half]));
    const float y = exp2_fast(codec::fused(z[i + 1], scale, -base[half]));
    sum[half] += x + y;
    shared_store(to + panel_offset(head + 8 * half, i / 4), pack_bf16(x, y));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 1);
    sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 2);
    if (quad == 0) s.sum[side][head + 8 * half] = sum[half];
  }
  publish_to_mma();
}

/// What O is multiplied by, of a head whose weights are relative to `base`. `lse`: where the log of its denominator
/// goes, or null.
__device__ float finish_head(const WindowTiles& s, int head, float base, float sink, float* lse) {
  const float rows = s.sum[0][head] + s.sum[1][head];
  const float top = rows == 0.0f ? sink : fmaxf(base, sink);  // rows == 0: there are none
  const float shift = top == -INFINITY ? 0.0f : top;
  const float total = rows * exp2_fast(base - shift) + exp2_fast(sink - shift);
  if (lse != nullptr) *lse = total == 0.0f ? -INFINITY : (shift + log2f(total)) * kLn2;
  return total == 0.0f ? 0.0f : __fdividef(exp2_fast(base - shift), total);
}

/// Of a head's, where it is wanted.
__device__ float* lse_of(const AttendParams& p, int token, int head) {
  if (p.lse == nullptr || head >= p.num_heads) return nullptr;
  return p.lse + std::int64_t{token} * p.num_heads + head;
}

}  // namespace
}  // namespace kv4::cuda
