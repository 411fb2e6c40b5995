// Two consumers alike, of a CTA that takes tokens in turn. For persistent.cuh alone.
#pragma once

#include "backend/cuda/attend/mainloop.cuh"

namespace kv4::cuda {
namespace {

/// It keeps O for its half of the channels, the left one (0) or the right one (1), and scores and weighs every other
/// tile; both add the values of every tile. So one turns scores into weights while the other multiplies. Its own
/// weights it has in registers, the other's it reads from shared memory, where one lot is enough: a consumer writes
/// there after it has added what the other wrote.
class Consumer : public Weigher {
 public:
  __device__ Consumer(const AttendParams& p, Shared& s, int half)
      : Weigher(p, s),
        half_(half),
        weights_at_(shared_address(s.weights[0]) + panel_offset(head_of_thread(), 0) + quad_of_thread() * 4) {}

  /// Tiles are counted through all rounds of a CTA.
  __device__ void run(float (&o)[kWidth / 4], int first, int end) {
    int tile = first + (first + half_) % 2;
    for (; tile < end; tile += 2) {
      if (tile > first) add(o, tile - 1, false);
      take(o, tile, end);
    }
    if (tile == end) add(o, tile - 1, first + 1 == end);
  }

 private:
  static_assert(kStages == 2);

  __device__ int own_stage() const { return half_; }
  __device__ int other_stage() const { return half_ ^ 1; }
  __device__ int first_panel() const { return half_ * (kPanels / 2); }

  /// A tile of its own.
  __device__ void take(float (&o)[kWidth / 4], int tile, int end) {
    score<false>(tile, 1);
    score<false>(tile, 0);
    mma_commit();
    const RowsOfTile rows(s_, own_stage());
    mma_wait<0>();
    if (tile + 2 >= end) leave_queries();
    float past[2];
    std::uint32_t weights[kScores / 2];
    std::uint32_t to = weights_at_;
    asm volatile("" : "+r"(to));  // else all places are found ahead of the loop, and there are no registers for them
    weigh(own_stage(), rows, past, [&](int i, std::uint32_t pair) {
      weights[i / 2] = pair;
      shared_store((to ^ i / 4 << 4) + i / 2 % 2 * 8 * kPanelRowBytes, pair);
    });
    if (quad_of_thread() == 0) {
      s_.past[own_stage()][head_of_thread()] = base_[0];
      s_.past[own_stage()][head_of_thread() + 8] = base_[1];
    }
    publish_to_mma();
    if (arrives_for_warp(threadIdx.x % 32)) barrier_arrive(shared_address(&s_.weighted[own_stage()]));
    if (__any_sync(kAllLanes, past[0] != 1.0f || past[1] != 1.0f)) scale_heads(o, past[0], past[1]);
    const std::uint32_t values =
        panel_place(shared_address(s_.rows[own_stage()]) + first_panel() * kPanelBytes, kPanelBytes);
    mma_begin();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      multiply_rows_128<0>(o, weights + 4 * k, panel_descriptor(values, k * 16 * kPanelRowBytes));
      multiply_rows_128<64>(o, weights + 4 * k, panel_descriptor(values, k * 16 * kPanelRowBytes + 2 * kPanelBytes));
    }
    mma_commit();
    mma_wait<0>();
    release_half(own_stage());
  }

  /// A tile of the other's.
  __device__ void add(float (&o)[kWidth / 4], int tile, bool is_only) {
    if (is_only) leave_queries();
    const int parity = tile / kStages & 1;
    barrier_wait(shared_address(&s_.full[other_stage()][1]), parity);
    barrier_wait(shared_address(&s_.full[other_stage()][0]), parity);
    publish_to_mma();
    barrier_wait(shared_address(&s_.weighted[other_stage()]), parity);
    const int head = head_of_thread();
    const float base[2] = {s_.past[other_stage()][head], s_.past[other_stage()][head + 8]};
    if (__any_sync(kAllLanes, base[0] != base_[0] || base[1] != base_[1])) {
      float past[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        past[half] = base[half] == base_[half] ? 1.0f : exp2_fast(base_[half] - base[half]);
        sum_[half] *= past[half];
        base_[half] = base[half];
      }
      scale_heads(o, past[0], past[1]);
    }
    add_values(o, s_, other_stage(), first_panel(), 0);
    mma_wait<0>();
    release_half(other_stage());
  }

  /// Its half of a tile is no longer read by this warp, nor is the tile by the one that scores it.
  __device__ void release_half(int stage) const {
    if (arrives_for_warp(threadIdx.x % 32)) barrier_arrive(shared_address(&s_.empty[stage][half_]));
  }

  const int half_;
  const std::uint32_t weights_at_;
};

}  // namespace
}  // namespace kv4::cuda
