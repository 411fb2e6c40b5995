// A window of at most 128 rows in shared memory as bf16, and the warpgroups' work on it: S, P and PV. For
// persistent_window.cu and single_pass_window.cu.
//
// bf16, because a row and a query are exact in it without a separate exponent; P keeps only 8 bits there.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/ptx/async_copy.cuh"

namespace kv4::cuda::attend_wgmma {

inline constexpr int kSides = 2;  // halves of the rows
inline constexpr int kScoreThreads = kSides * kWarpgroupThreads;
inline constexpr int kScores = kTile / 2;  // of a thread
static_assert(kMaxWindowRows == kSides * kTile);

struct WindowTiles {
  std::uint8_t q[kTileBytes];             // [8 panels, 64 heads]
  std::uint8_t rows[kSides][kTileBytes];  // [8 panels, 64 rows]
  std::uint8_t p_tile[kSides][kPanelBytes];
  float row_max[kSides][kTile], sum[kSides][kTile];  // of a head over half of the rows
};

/// The queries of a token, from the CTA's first head on.
__device__ inline const std::uint8_t* queries_of(const AttendParams& p, int token, int first_head) {
  return static_cast<const std::uint8_t*>(p.q.data) + (std::int64_t{token} * p.q.row_stride + first_head * kWidth) * 2;
}

/// Copies the queries with kWorkers threads, kAtOnce copies of each in flight; zeros for heads that do not exist. The
/// caller waits for the copies.
inline constexpr int kQueryChunks = kWidth * 2 / 16;  // of a head
template <int kWorkers, int kAtOnce>
__device__ void copy_queries(const AttendParams& p, WindowTiles& s, int token, int first_head, int worker) {
  static_assert(kWorkers % kQueryChunks == 0);
  constexpr int kHeads = kWorkers / kQueryChunks;  // at a time
  const int heads = min(kTile, p.num_heads - first_head), chunk = worker % kQueryChunks;
  const std::uint8_t* q = queries_of(p, token, first_head);
  const std::uint32_t to = shared_address(s.q) + chunk / 8 * kPanelBytes;
#pragma unroll kAtOnce
  for (int i = 0; i < kTile / kHeads; ++i) {
    const int head = worker / kQueryChunks + i * kHeads;
    const bool there = head < heads;
    copy_async_or_zero<16>(to + panel_offset(head, chunk % 8), q + (there ? (head * kQueryChunks + chunk) * 16 : 0),
                           there ? 16 : 0);
  }
}

/// Times log2 e. A constant, except for padded tokens, which have no sink.
__device__ inline float sink_of(const AttendParams& p, int head) {
  return p.sink != nullptr && head < p.num_heads ? p.sink[head] * codec::kLog2e : -INFINITY;
}

/// S of one side's rows.
__device__ inline void score_side(const WindowTiles& s, float (&z)[kScores], int side) {
  const std::uint32_t q = panel_place(shared_address(s.q)), keys = panel_place(shared_address(s.rows[side]));
  wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      const std::uint32_t at = panel * kPanelBytes + k * 32;
      wgmma<MmaType::bf16, 64, false>(z, panel_descriptor(q, at), panel_descriptor(keys, at), panel > 0 || k > 0);
    }
  wgmma_commit();
}

/// The row of a side that a thread's score belongs to.
__device__ inline int row_of_score(int i) { return i / 4 * 8 + 2 * quad_of_thread() + i % 2; }

/// Converts S (-infinity where there is no row) to P relative to the row maximum of both sides; their warpgroups agree
/// on it.
__device__ inline void softmax_side(WindowTiles& s, const float (&z)[kScores], int side, float scale,
                                    float (&base)[2]) {
  const int head = head_of_thread(), quad = quad_of_thread();
  float row_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < kScores; i += 2) row_max[i / 2 % 2] = fmaxf(row_max[i / 2 % 2], fmaxf(z[i], z[i + 1]));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_max[half] = fmaxf(row_max[half], __shfl_xor_sync(kAllLanes, row_max[half], 1));
    row_max[half] = fmaxf(row_max[half], __shfl_xor_sync(kAllLanes, row_max[half], 2));
    if (quad == 0) s.row_max[side][head + 8 * half] = row_max[half];
  }
  named_barrier_sync(1, kScoreThreads);
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float larger = fmaxf(row_max[half], s.row_max[side ^ 1][head + 8 * half]);
    base[half] = larger == -INFINITY ? 0.0f : larger * scale;
  }
  const std::uint32_t to = shared_address(s.p_tile[side]) + quad * 4;
#pragma unroll
  for (int i = 0; i < kScores; i += 2) {
    const int half = i / 2 % 2;
    const float x = exp2_approx(codec::fused(z[i], scale, -base[half]));
    const float y = exp2_approx(codec::fused(z[i + 1], scale, -base[half]));
    sum[half] += x + y;
    store_shared4(to + panel_offset(head + 8 * half, i / 4), bf16_pair(x, y));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 1);
    sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 2);
    if (quad == 0) s.sum[side][head + 8 * half] = sum[half];
  }
  fence_async_proxy();
}

/// The factor of O for a head whose P is relative to `base`. `lse`: the address of the log of its denominator, or null.
__device__ inline float finish_head(const WindowTiles& s, int head, float base, float sink, float* lse) {
  const float rows = s.sum[0][head] + s.sum[1][head];
  const float top = rows == 0.0f ? sink : fmaxf(base, sink);  // rows == 0: the head has no rows
  const float shift = top == -INFINITY ? 0.0f : top;
  const float total = rows * exp2_approx(base - shift) + exp2_approx(sink - shift);
  if (lse != nullptr) *lse = total == 0.0f ? -INFINITY : (shift + log2f(total)) * kLn2;
  return total == 0.0f ? 0.0f : __fdividef(exp2_approx(base - shift), total);
}

/// The address of a head's LSE, or null.
__device__ inline float* lse_of(const AttendParams& p, int token, int head) {
  if (p.lse == nullptr || head >= p.num_heads) return nullptr;
  return p.lse + std::int64_t{token} * p.num_heads + head;
}

}  // namespace kv4::cuda::attend_wgmma
