// Single-pass window kernel: attend over windows only, one or two tokens per SM. A CTA takes 64 heads of a token and
// all of its rows, at most 128, in a single pass. There is no loop over tiles, and the warpgroups differ only in which
// of them compute S: instruction fetches bound code that runs once, so there are few instructions (3,100;
// attend_split_kv has 7,000).
//
// 512 threads load the queries, which need no conversion, into shared memory and convert a quarter of a row each. Two
// warpgroups each compute S of one half of the rows (m64n64k16), agree on the row maximum of each head and store P in
// shared memory; all four compute PV of a quarter of the channels over all rows (m64n128k16). If SMs would be idle, two
// CTAs share a token: both compute S, and each computes PV of one half of the channels.
//
// Clocks since the grid dependency wait, H200, 2026-11-16, 64 tokens: rows and queries loaded 4,300 (137 KB at 33 bytes
// a clock, which is the rate of the load units), converted 5,200, S 7,500 (2,048 are multiplies), P 8,600, PV 11,600
// (2,048), stored 14,100; the next kernel passes its wait 3,500 later. 128 tokens: the kernel's first 4,400 clocks are
// added, because no CTA fits beside the preceding kernel, and the loads are waited for.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "backend/cuda/append/window_begin.cuh"
#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/rows.cuh"
#include "backend/cuda/attend/single_pass_window.cuh"
#include "backend/cuda/attend/speculative.cuh"
#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace attend_wgmma::single_pass_window {

inline constexpr int kWindowSharedBytes = sizeof(WindowTiles) + 1024;
static_assert(kThreads == 4 * kMaxWindowRows);
static_assert(kWindowSharedBytes <= 227 * 1024);

/// A quarter of a row, 16 of every 64 bytes: 7 chunks of codes, one of each scale's panel, and 2 chunks of bf16.
class RowQuarter {
 public:
  __device__ RowQuarter(WindowTiles& s, int thread) : row_(thread / 4), chunk_(thread % 4) {
    to_ = shared_address(s.rows[row_ / kTile]);
    codes_at_ = panel_offset(row_ % kTile, 2 * chunk_);
    tail_at_ = kCodeChunks * kPanelBytes + panel_offset(row_ % kTile, row_ % 2 * 4 + chunk_);
  }

  __device__ RowPointers find(const AttendParams& p, const QueryRows& rows) const {
    if (row_ >= rows.window) return {};
    const int position = rows.first + row_;
    return rows.place<true>(p, 0, position, rows.block<true>(p, 0, position));
  }
  /// Into L2.
  __device__ void prefetch_inputs(const RowPointers& place) const {
    if (place.payload == nullptr) return;
    prefetch_l2(place.payload + chunk_ * kLine);
    if (chunk_ == 0) prefetch_l2(place.payload + 4 * kLine);
    if (chunk_ == 1) prefetch_l2(place.scale);
  }

  __device__ void load(const RowPointers& place) {
    if (place.payload == nullptr) {
#pragma unroll
      for (uint4& raw : raw_) raw = make_uint4(0, 0, 0, 0);
      scales_ = make_uint2(0, 0);
      return;
    }
    scales_ = cuda::load<uint2, L2Priority::normal>(place.scale);
    const std::uint8_t* from = place.payload + chunk_ * 16;
    // Odd rows swap the halves of the last panel: otherwise stores of adjacent rows would meet in the same banks.
    const int odd = row_ % 2 * 64;
    raw_[kCodeChunks] = cuda::load<uint4, L2Priority::normal>(from + kCodeChunks * 64 + odd);
    raw_[kCodeChunks + 1] = cuda::load<uint4, L2Priority::normal>(from + kCodeChunks * 64 + (odd ^ 64));
#pragma unroll
    for (int j = kCodeChunks - 1; j >= 0; --j) raw_[j] = cuda::load<uint4, L2Priority::normal>(from + j * 64);
  }

  __device__ void convert() const {
    store_shared16(to_ + tail_at_, raw_[kCodeChunks]);
    store_shared16(to_ + (tail_at_ ^ 64), raw_[kCodeChunks + 1]);
#pragma unroll
    for (int j = kCodeChunks - 1; j >= 0; --j) {
      const float scale = codec::ue8m0_value(static_cast<std::uint8_t>((j < 4 ? scales_.x : scales_.y) >> (j % 4 * 8)));
      const uint4& raw = raw_[j];
      store_shared16(to_ + codes_at_ + j * kPanelBytes, eight(raw.x, raw.y, scale));
      store_shared16(to_ + (codes_at_ ^ 16) + j * kPanelBytes, eight(raw.z, raw.w, scale));
    }
  }

 private:
  static constexpr int kCodeChunks = 7;

  __device__ static uint4 eight(std::uint32_t low, std::uint32_t high, float scale) {
    float x[kOctet];
    scaled_e4m3(make_uint2(low, high), scale, x);
    return make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
  }

  const int row_, chunk_;
  std::uint32_t to_, codes_at_, tail_at_;
  uint2 scales_;
  uint4 raw_[kCodeChunks + 2];
};

/// O += P V over a warpgroup's channels.
template <int kSize>
__device__ void add_values(WindowTiles& s, float (&o)[kSize], int first_channel) {
  wgmma_fence();
#pragma unroll
  for (int side = 0; side < kSides; ++side) {
    const std::uint32_t p_tile = panel_place(shared_address(s.p_tile[side]));
    const std::uint32_t values =
        panel_place(shared_address(s.rows[side]) + first_channel / kTile * kPanelBytes, kPanelBytes);
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      const std::uint64_t a = panel_descriptor(p_tile, k * 32), b = panel_descriptor(values, k * 16 * kPanelRowBytes);
      if constexpr (kSize == 64)
        wgmma<MmaType::bf16, 128, true>(o, a, b, side > 0 || k > 0);
      else
        wgmma<MmaType::bf16, 64, true>(o, a, b, side > 0 || k > 0);
    }
  }
  wgmma_commit();
}

template <int kChannelSplits>
__global__ void __launch_bounds__(kThreads, 1)
    attend_single_pass_window(const __grid_constant__ AttendParams p, int head_tiles) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  WindowTiles& s = *reinterpret_cast<WindowTiles*>(base + (1024 - shared_address(base) % 1024) % 1024);
  launch_dependents();
  touch(p);
  const int thread = thread_here(), warpgroup = thread / kWarpgroupThreads;
  Job job(1, kChannelSplits, 1, head_tiles, false);
  RowQuarter quarter(s, thread);
  if (job.first_head + thread * kLine / (kWidth * 2) < p.num_heads)
    prefetch_l2(queries_of(p, job.token, job.first_head) + thread * kLine);
  QueryRows rows(p, job.token, speculative_record_to_load(p, job.token));
  const RowPointers place = quarter.find(p, rows);
  quarter.prefetch_inputs(place);
  grid_dependency_wait();

  // Validation: the speculative row addresses hold if the record is unchanged.
  const ops::StepRecord record = load_record_l2(p.step.tokens + job.token);
  quarter.load(place);
  copy_queries<kThreads, kTile * kQueryChunks / kThreads>(p, s, job.token, job.first_head, thread);
  const int head = head_of_thread();
  float sinks[2];
  for (int half = 0; half < 2; ++half) sinks[half] = sink_of(p, job.first_head + head + 8 * half);
  if (!is_same(record, rows.at) || window_begin(p.step, record) != rows.begin) {
    rows = QueryRows(p, job.token, record);
    quarter.load(quarter.find(p, rows));
  }
  job.take_rows(rows);
  quarter.convert();
  wait_for_all_copies();
  fence_async_proxy();
  cta_sync();
  const float scale = p.softmax_scale * codec::kLog2e;
  if (warpgroup < kSides) {
    float z[kScores], base[2];
    score_side(s, z, warpgroup);
    wgmma_wait<0>();
    if (rows.window < kMaxWindowRows) {
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (warpgroup * kTile + row_of_score(i) >= rows.window) z[i] = -INFINITY;
    }
    softmax_side(s, z, warpgroup, scale, base);
  }
  cta_sync();
  constexpr int kChannels = kWidth / kChannelSplits / 4;
  const int first_channel = (job.channel_split * 4 + warpgroup) * kChannels;
  float o[kChannels / 2], factor[2];
  add_values(s, o, first_channel);
  const bool has_lse = warpgroup == 0 && job.channel_split == 0 && quad_of_thread() == 0;
  for (int half = 0; half < 2; ++half) {
    const int at = head + 8 * half;
    const float row_max = fmaxf(s.row_max[0][at], s.row_max[1][at]);
    factor[half] =
        finish_head(s, at, row_max == -INFINITY ? 0.0f : row_max * scale, job.padded ? -INFINITY : sinks[half],
                    has_lse ? lse_of(p, job.token, job.first_head + at) : nullptr);
  }
  wgmma_wait<0>();
  scale_heads(o, factor[0], factor[1]);
  if (first_channel + kChannels == kWidth) inverse_rope_last(p, job, o);
  store_output(p, job, o, first_channel);
#endif
}

template <int kChannelSplits>
cudaError_t launch_variant(const AttendParams& p, cudaStream_t stream) {
  const auto kernel = attend_single_pass_window<kChannelSplits>;
  const int head_tiles = head_tiles_of(p);
  return launch<kWindowSharedBytes>(kernel, static_cast<unsigned>(p.step.num_tokens * head_tiles * kChannelSplits),
                                    kThreads, stream, p, head_tiles);
}

}  // namespace attend_wgmma::single_pass_window

cudaError_t launch_single_pass_window(const ops::AttendParams& p, const AttendSplit& split, cudaStream_t stream) {
  using namespace attend_wgmma::single_pass_window;
  return split.channel_splits == 1 ? launch_variant<1>(p, stream) : launch_variant<2>(p, stream);
}

}  // namespace kv4::cuda
