// Symmetric ping-pong consumers of a persistent CTA.
#pragma once

#include "backend/cuda/attend/mainloop.cuh"

namespace kv4::cuda::attend_wgmma {

/// A consumer keeps O for its half of the channels, the left (0) or the right one (1). It computes S and P of every
/// other tile, and both consumers compute PV of every tile. So one consumer computes the softmax while the other
/// multiplies. A consumer keeps its own P in registers and reads the other's P from shared memory. One buffer is enough
/// there: a consumer writes its P after it has added the other's.
class PingPongConsumer : public Softmax {
 public:
  __device__ PingPongConsumer(const AttendParams& p, Shared& s, int half)
      : Softmax(p, s),
        half_(half),
        p_at_(shared_address(s.p_tile[0]) + panel_offset(head_of_thread(), 0) + quad_of_thread() * 4) {}

  /// Tile numbers continue through all work tiles of a CTA.
  __device__ void run(float (&o)[kWidth / 4], int first, int end) {
    int tile = first + (first + half_) % 2;
    for (; tile < end; tile += 2) {
      if (tile > first) add_other(o, tile - 1, false);
      process_own(o, tile, end);
    }
    if (tile == end) add_other(o, tile - 1, first + 1 == end);
  }

 private:
  static_assert(kStages == 2);

  __device__ int own_stage() const { return half_; }
  __device__ int other_stage() const { return half_ ^ 1; }
  __device__ int first_panel() const { return half_ * (kPanels / 2); }

  /// A tile whose scores this consumer computes.
  __device__ void process_own(float (&o)[kWidth / 4], int tile, int end) {
    score<false>(tile, 1);
    score<false>(tile, 0);
    wgmma_commit();
    const TileRows rows(s_, own_stage());
    wgmma_wait<0>();
    if (tile + 2 >= end) release_queries();
    float rescale[2];
    std::uint32_t p_words[kScores / 2];
    std::uint32_t to = p_at_;
    asm volatile(""
                 : "+r"(to));  // otherwise the compiler computes all addresses ahead of the loop, and there are no
                               // registers for them
    softmax_tile(own_stage(), rows, rescale, [&](int i, std::uint32_t pair) {
      p_words[i / 2] = pair;
      store_shared4((to ^ i / 4 << 4) + i / 2 % 2 * 8 * kPanelRowBytes, pair);
    });
    if (quad_of_thread() == 0) {
      s_.rescale[own_stage()][head_of_thread()] = base_[0];
      s_.rescale[own_stage()][head_of_thread() + 8] = base_[1];
    }
    fence_async_proxy();
    if (arrives_for_warp(threadIdx.x % 32)) mbarrier_arrive(shared_address(&s_.p_full[own_stage()]));
    if (__any_sync(kAllLanes, rescale[0] != 1.0f || rescale[1] != 1.0f)) scale_heads(o, rescale[0], rescale[1]);
    const std::uint32_t values =
        panel_place(shared_address(s_.rows[own_stage()]) + first_panel() * kPanelBytes, kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      wgmma<MmaType::fp16, 128, true>(o, p_words + 4 * k, panel_descriptor(values, k * 16 * kPanelRowBytes), true);
      wgmma<MmaType::fp16, 128, true, 64>(o, p_words + 4 * k,
                                          panel_descriptor(values, k * 16 * kPanelRowBytes + 2 * kPanelBytes), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    release_half(own_stage());
  }

  /// A tile whose scores the other consumer computes.
  __device__ void add_other(float (&o)[kWidth / 4], int tile, bool is_only) {
    if (is_only) release_queries();
    const int parity = tile / kStages & 1;
    mbarrier_wait(shared_address(&s_.full[other_stage()][1]), parity);
    mbarrier_wait(shared_address(&s_.full[other_stage()][0]), parity);
    fence_async_proxy();
    mbarrier_wait(shared_address(&s_.p_full[other_stage()]), parity);
    const int head = head_of_thread();
    const float base[2] = {s_.rescale[other_stage()][head], s_.rescale[other_stage()][head + 8]};
    if (__any_sync(kAllLanes, base[0] != base_[0] || base[1] != base_[1])) {
      float rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rescale[half] = base[half] == base_[half] ? 1.0f : exp2_approx(base_[half] - base[half]);
        sum_[half] *= rescale[half];
        base_[half] = base[half];
      }
      scale_heads(o, rescale[0], rescale[1]);
    }
    add_values(o, s_, other_stage(), first_panel(), 0);
    wgmma_wait<0>();
    release_half(other_stage());
  }

  /// This warp no longer reads its half of a tile as V, and the scoring consumer no longer reads the tile as K.
  __device__ void release_half(int stage) const {
    if (arrives_for_warp(threadIdx.x % 32)) mbarrier_arrive(shared_address(&s_.empty[stage][half_]));
  }

  const int half_;
  const std::uint32_t p_at_;
};

}  // namespace kv4::cuda::attend_wgmma
