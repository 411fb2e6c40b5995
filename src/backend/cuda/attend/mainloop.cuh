// The consumers' work on a KV tile: for the softmax and the PV warpgroup, and for ping-pong consumers.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/mma.cuh"

namespace kv4::cuda::attend_wgmma {

template <int kSize>
__device__ void scale_heads(float (&o)[kSize], float upper, float lower) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    o[i] *= upper;
    o[i + 1] *= upper;
    o[i + 2] *= lower;
    o[i + 3] *= lower;
  }
}

/// O += P V over the channels of a warpgroup, from its first panel on.
template <int kSize>
__device__ void add_values(float (&o)[kSize], Shared& s, int stage, int panel, int p_buffer) {
  const std::uint32_t values = panel_place(shared_address(s.rows[stage]) + panel * kPanelBytes, kPanelBytes);
  const std::uint32_t p_tile = panel_place(shared_address(s.p_tile[p_buffer]));
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    const std::uint64_t a = panel_descriptor(p_tile, k * 32), b = panel_descriptor(values, k * 16 * kPanelRowBytes);
    if constexpr (kSize == 32) {
      wgmma<MmaType::fp16, 64, true>(o, a, b, true);
    } else {
      wgmma<MmaType::fp16, 128, true>(o, a, b, true);
      if constexpr (kSize == 128)
        wgmma<MmaType::fp16, 128, true, 64>(o, a, panel_descriptor(values, k * 16 * kPanelRowBytes + 2 * kPanelBytes),
                                            true);
    }
  }
  wgmma_commit();
}

/// Whether each consumer warpgroup reads only its own half of the panels for PV, so that a half is free when one
/// warpgroup has released it.
template <int kSize>
constexpr bool kOwnHalf = kSize == kWidth / 4;

/// This warp of the softmax (0) or the PV warpgroup (1) no longer reads a tile. `to_peer` is 0 if there is no peer.
template <int kSize>
__device__ void release(Shared& s, int stage, int warpgroup, std::uint32_t to_peer) {
  if (!arrives_for_warp(threadIdx.x % 32)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (kOwnHalf<kSize> && half != warpgroup) continue;
    const std::uint32_t empty = shared_address(&s.empty[stage][half]);
    mbarrier_arrive(empty);
    if (to_peer != 0) mbarrier_arrive_remote(empty + to_peer);
  }
}

/// S and P of 64 heads over a tile, by one warpgroup.
class Softmax {
 public:
  /// Statistics of the thread's upper or lower head; all lanes call it.
  __device__ Stats stats(int half) const {
    float sum = sum_[half];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    return {base_[half], sum};
  }

 protected:
  /// The queries must be in place.
  __device__ Softmax(const AttendParams& p, Shared& s) : s_(s) {
    for (int half = 0; half < 2; ++half)
      scale_[half] = p.softmax_scale * codec::kLog2e * s.q_scale[head_of_thread() + 8 * half];
  }

  /// Properties of a tile.
  struct TileRows {
    bool plain, all_present;

    __device__ TileRows(const Shared& s, int stage) {
      const uint4 a = *reinterpret_cast<const uint4*>(&s.quads[stage][0]);
      const uint4 b = *reinterpret_cast<const uint4*>(&s.quads[stage][1]);
      plain = (a.x | a.y | b.x | b.y) == 0;
      all_present = (a.z & a.w & b.z & b.w) == 0x0F0F0F0Fu;
    }
  };

  /// S = Q K^T over half of the channels; the right half comes first.
  template <bool kCtaPair>
  __device__ void score(int tile, int half) {
    const int stage = tile % kStages, parity = tile / kStages & 1;
    const std::uint32_t q = panel_place(shared_address(s_.q)), rows = panel_place(shared_address(s_.rows[stage]));
    mbarrier_wait(shared_address(&s_.full[stage][half]), parity);
    if (!kCtaPair) fence_async_proxy();  // otherwise the producers have issued the fence
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPanels / 2; ++i)
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k) {
        const std::uint32_t at = (half * kPanels / 2 + i) * kPanelBytes + k * 32;
        wgmma<MmaType::fp16, 64, false>(z_, panel_descriptor(q, at), panel_descriptor(rows, at),
                                        half == 0 || i > 0 || k > 0);
      }
  }

  /// Converts S to P relative to a reference (`base_`); the caller must multiply O by `rescale`. The reference stays
  /// while no logit is far above it, because the lanes that search for the row maximum would wait for each other behind
  /// the producers' stores. P includes the power of two that a row's values lack, so that the largest P is about 1 in
  /// fp16 for any size of rows; the sum does not include it. `store` receives pairs of P.
  template <class Store>
  __device__ void softmax_tile(int stage, const TileRows& rows, float (&rescale)[2], Store store) {
    // These bytes are read again where they matter, which is rare.
    const auto byte_of_score = [&](int word, int i) {
      const auto* words = reinterpret_cast<const std::uint32_t*>(&s_.quads[stage][i / 16]);
      return words[word + i / 8 % 2] >> (i / 4 % 2 * 16 + quad_of_thread() / 2 * 8);
    };
    const auto exponent_of_score = [&](int i) { return static_cast<int>(byte_of_score(0, i) << 24) >> 24; };
    const auto is_present = [&](int i) { return (byte_of_score(2, i) >> (quad_of_thread() % 2 * 2 + i % 2) & 1) != 0; };
    float factor[2] = {scale_[0], scale_[1]};
    if (!rows.plain) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int exponent = exponent_of_score(i);
        const float scale = exponent == kNanExponent ? NAN : power_of_two(exponent);
        z_[i] = codec::fused(z_[i], scale_[i / 2 % 2] * scale, static_cast<float>(exponent));
      }
      factor[0] = factor[1] = 1.0f;
    }
    if (!rows.all_present) {
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (!is_present(i)) z_[i] = -INFINITY;
    }
    float row_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) row_max[i / 2 % 2] = fmaxf(row_max[i / 2 % 2], fmaxf(z_[i], z_[i + 1]));
    row_max[0] *= factor[0];
    row_max[1] *= factor[1];
    rescale[0] = rescale[1] = 1.0f;
    if (__any_sync(kAllLanes, row_max[0] > base_[0] + kSlack || row_max[1] > base_[1] + kSlack))
      raise_base(row_max, rescale);
    const float base[2] = {base_[0] == -INFINITY ? 0.0f : base_[0], base_[1] == -INFINITY ? 0.0f : base_[1]};
    const auto exponentiate = [&](auto inverse_scale) {
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        const int half = i / 2 % 2;
        const float x = exp2_approx(codec::fused(z_[i], factor[half], -base[half]));
        const float y = exp2_approx(codec::fused(z_[i + 1], factor[half], -base[half]));
        sum_[half] = codec::fused(x + y, inverse_scale(i), sum_[half]);
        store(i, fp16_pair(x, y));
      }
    };
    if (rows.plain)
      exponentiate([](int) { return 1.0f; });
    else
      exponentiate([&](int i) { return power_of_two(-exponent_of_score(i)); });
  }

  /// This work tile needs no further scores.
  __device__ void release_queries() const {
    if (arrives_for_warp(threadIdx.x % 32)) mbarrier_arrive(shared_address(&s_.queries_empty));
  }

  static constexpr int kScores = kTile / 2;

  Shared& s_;
  float z_[kScores];
  float base_[2] = {-INFINITY, -INFINITY}, sum_[2] = {0.0f, 0.0f};

 private:
  static constexpr float kSlack = 8.0f;                      // P is below 2^8
  static constexpr int kNanExponent = 255 + 9 - kTopInFp16;  // of rows whose scale is NaN

  /// Raises the reference to the row maximum so far; the lanes of a head agree on it.
  __device__ void raise_base(float (&row_max)[2], float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[half] = fmaxf(row_max[half], __shfl_xor_sync(kAllLanes, row_max[half], 1));
      row_max[half] = fmaxf(row_max[half], __shfl_xor_sync(kAllLanes, row_max[half], 2));
      row_max[half] = fmaxf(row_max[half], base_[half]);
      rescale[half] = exp2_approx(base_[half] - (row_max[half] == -INFINITY ? 0.0f : row_max[half]));
      base_[half] = row_max[half];
      sum_[half] *= rescale[half];
    }
  }

  float scale_[2];  // of the thread's heads
};

class SoftmaxWarpgroup : public Softmax {
 public:
  __device__ SoftmaxWarpgroup(const AttendParams& p, Shared& s) : Softmax(p, s) {}

  /// PV of a tile runs while S of the next tile becomes P, because the producers are the bottleneck. The producers of a
  /// 2-CTA pair are faster and would wait. There PV comes before the next tile's S, so that the left panels can be
  /// filled again sooner. Tile numbers continue through all work tiles of a CTA.
  template <bool kCtaPair, bool kPersistent, int kSize>
  __device__ void run(float (&o)[kSize], int first, int end, int panel, std::uint32_t to_peer) {
    for (int tile = first; tile < end; ++tile) {
      const int stage = tile % kStages;
      score<kCtaPair>(tile, 1);
      if (kCtaPair) wgmma_commit();
      if (kCtaPair && tile > first) {
        wgmma_wait<1>();
        release<kSize>(s_, stage ^ 1, 0, to_peer);
      }
      score<kCtaPair>(tile, 0);
      wgmma_commit();
      const TileRows rows(s_, stage);
      if (!kCtaPair && tile > first) {
        add_values(o, s_, stage ^ 1, panel, stage ^ 1);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      if (kPersistent && tile + 1 == end) release_queries();
      float rescale[2];
      store_p(stage, rows, rescale);
      fence_async_proxy();
      named_barrier_sync(2, kWarpgroupThreads);
      if (arrives_for_group(threadIdx.x)) mbarrier_arrive(shared_address(&s_.p_full[stage]));
      if (!kCtaPair) {
        wgmma_wait<0>();
        if (tile > first) release<kSize>(s_, stage ^ 1, 0, to_peer);
      }
      if (__any_sync(kAllLanes, rescale[0] != 1.0f || rescale[1] != 1.0f)) scale_heads(o, rescale[0], rescale[1]);
      if (kCtaPair) add_values(o, s_, stage, panel, stage);
    }
    if (!kCtaPair && end > first) add_values(o, s_, (end - 1) % kStages, panel, (end - 1) % kStages);
    wgmma_wait<0>();
    if (kPersistent) release<kSize>(s_, (end - 1) % kStages, 0, to_peer);
  }

 private:
  /// Stores P in shared memory.
  __device__ void store_p(int stage, const TileRows& rows, float (&rescale)[2]) {
    const int head = head_of_thread(), quad = quad_of_thread();
    const std::uint32_t to = shared_address(s_.p_tile[stage]) + quad * 4;
    softmax_tile(stage, rows, rescale, [&](int i, std::uint32_t pair) {
      store_shared4(to + panel_offset(head + 8 * (i / 2 % 2), i / 4), pair);
    });
    if (quad == 0) {
      s_.rescale[stage][head] = rescale[0];
      s_.rescale[stage][head + 8] = rescale[1];
    }
  }
};

template <bool kCtaPair, int kSize, class Locator>
__device__ void run_pv_warpgroup(float (&o)[kSize], Shared& s, Locator& locator, int first, int end, int panel,
                                 std::uint32_t to_peer) {
  for (int tile = first; tile < end; ++tile) {
    const int stage = tile % kStages, parity = tile / kStages & 1;
    mbarrier_wait(shared_address(&s.full[stage][0]), parity);
    mbarrier_wait(shared_address(&s.full[stage][1]), parity);
    if (!kCtaPair) fence_async_proxy();
    locator.advance(tile);
    mbarrier_wait(shared_address(&s.p_full[stage]), parity);
    const float upper = s.rescale[stage][head_of_thread()], lower = s.rescale[stage][head_of_thread() + 8];
    if (__any_sync(kAllLanes, upper != 1.0f || lower != 1.0f)) scale_heads(o, upper, lower);
    add_values(o, s, stage, panel, stage);
    wgmma_wait<0>();
    release<kSize>(s, stage, 1, to_peer);
  }
}

}  // namespace kv4::cuda::attend_wgmma
