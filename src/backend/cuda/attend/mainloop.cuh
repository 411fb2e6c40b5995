// What scorer and adder of dispatch.cu do with a tile, or two consumers alike, and how queries get there. For
// dispatch.cu, persistent.cuh and persistent_window.cu.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/speculative.cuh"

namespace kv4::cuda {
namespace {

/// Queries in shared memory as fp16. kWarps warps take part, a head each at a time, kAtOnce of them side by side; lanes
/// convert what they have copied.
template <int kWarps, int kAtOnce>
class Queries {
 public:
  __device__ Queries(const AttendParams& p, Shared& s, const Job& job)
      : p_(p), s_(s), job_(job), thread_(thread_here() % (kWarps * 32)) {}

  __device__ void begin() const {
    const auto* q = static_cast<const std::uint8_t*>(p_.q.data) +
                    (std::int64_t{job_.token} * p_.q.row_stride + job_.first_head * kWidth) * 2;
#pragma unroll
    for (int i = 0; i < kHeads; ++i)
#pragma unroll
      for (int j = 0; j < kUnits / 32; ++j) {
        const int unit = lane() + 32 * j;
        const bool there = job_.first_head + head(i) < p_.num_heads;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place(head(i), unit)),
                     "l"(q + (there ? (head(i) * kUnits + unit) * 16 : 0)), "r"(there ? 16 : 0)
                     : "memory");
      }
    if (thread_ < kTile) {
      const int head = job_.first_head + thread_;
      const bool sinks = p_.sink != nullptr && !job_.padded && head < p_.num_heads;
      s_.sink[job_.sinks()][thread_] = sinks ? p_.sink[head] * codec::kLog2e : -INFINITY;
    }
  }

  __device__ void finish() const {
    asm volatile("cp.async.wait_all;" ::: "memory");
    convert();
  }
  /// Once what the thread has copied is there.
  __device__ void convert() const {
#pragma unroll kAtOnce
    for (int i = 0; i < kHeads; ++i) {
      const uint4 left = load_shared(place(head(i), lane())), right = load_shared(place(head(i), lane() + 32));
      const int exponent = exponent_of(__reduce_max_sync(kAllLanes, max(top_of_pairs(left), top_of_pairs(right))));
      store_shared(place(head(i), lane()), to_fp16(left, power_of_two(-exponent)));
      store_shared(place(head(i), lane() + 32), to_fp16(right, power_of_two(-exponent)));
      if (lane() == 0) s_.q_unit[head(i)] = power_of_two(exponent);
    }
    publish_to_mma();
  }

 private:
  static constexpr int kUnits = kWidth * 2 / 16, kHeads = kTile / kWarps;

  __device__ int lane() const { return thread_ % 32; }
  __device__ int head(int i) const { return thread_ / 32 + i * kWarps; }
  __device__ std::uint32_t place(int head, int unit) const {
    return shared_address(s_.q) + unit / 8 * kPanelBytes + panel_offset(head, unit % 8);
  }

  const AttendParams& p_;
  Shared& s_;
  const Job& job_;
  const int thread_;  // of those that take part
};

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

/// O += P V over the channels of a group, from its first panel on. `lot`: of weights.
template <int kSize>
__device__ void add_values(float (&o)[kSize], Shared& s, int stage, int panel, int lot) {
  const std::uint32_t values = panel_place(shared_address(s.rows[stage]) + panel * kPanelBytes, kPanelBytes);
  const std::uint32_t weights = panel_place(shared_address(s.weights[lot]));
  mma_begin();
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    const std::uint64_t a = panel_descriptor(weights, k * 32), b = panel_descriptor(values, k * 16 * kPanelRowBytes);
    if constexpr (kSize == 32) {
      multiply_rows_64<0>(o, a, b);
    } else {
      multiply_rows_128<0>(o, a, b);
      if constexpr (kSize == 128)
        multiply_rows_128<64>(o, a, panel_descriptor(values, k * 16 * kPanelRowBytes + 2 * kPanelBytes));
    }
  }
  mma_commit();
}

/// Whether scorer and adder each add up one half of the panels, so that a half is free when one of them is done with
/// it.
template <int kSize>
constexpr bool kOwnHalf = kSize == kWidth / 4;

/// A tile is no longer read by this warp, of the scorer (0) or the adder (1); `to_mate` is 0 where there is none.
template <int kSize>
__device__ void release(Shared& s, int stage, int group, std::uint32_t to_mate) {
  if (!arrives_for_warp(threadIdx.x % 32)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (kOwnHalf<kSize> && half != group) continue;
    const std::uint32_t empty = shared_address(&s.empty[stage][half]);
    barrier_arrive(empty);
    if (to_mate != 0) barrier_arrive_in_cluster(empty + to_mate);
  }
}

/// Scores and weights of 64 heads over a tile, by a warpgroup.
class Weigher {
 public:
  /// Of the thread's upper or lower head; all lanes call it.
  __device__ Stats stats(int half) const {
    float sum = sum_[half];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    return {base_[half], sum};
  }

 protected:
  /// Queries are in place.
  __device__ Weigher(const AttendParams& p, Shared& s) : s_(s) {
    for (int half = 0; half < 2; ++half)
      scale_[half] = p.softmax_scale * codec::kLog2e * s.q_unit[head_of_thread() + 8 * half];
  }

  /// Of a tile.
  struct RowsOfTile {
    bool plain, all_there;

    __device__ RowsOfTile(const Shared& s, int stage) {
      const uint4 a = *reinterpret_cast<const uint4*>(&s.fours[stage][0]);
      const uint4 b = *reinterpret_cast<const uint4*>(&s.fours[stage][1]);
      plain = (a.x | a.y | b.x | b.y) == 0;
      all_there = (a.z & a.w & b.z & b.w) == 0x0F0F0F0Fu;
    }
  };

  /// The products of half of the channels; right ones first.
  template <bool kPaired>
  __device__ void score(int tile, int half) {
    const int stage = tile % kStages, parity = tile / kStages & 1;
    const std::uint32_t q = panel_place(shared_address(s_.q)), rows = panel_place(shared_address(s_.rows[stage]));
    barrier_wait(shared_address(&s_.full[stage][half]), parity);
    if (!kPaired) publish_to_mma();  // else the loaders have done it
    mma_begin();
#pragma unroll
    for (int i = 0; i < kPanels / 2; ++i)
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k) {
        const std::uint32_t at = (half * kPanels / 2 + i) * kPanelBytes + k * 32;
        multiply_channels(z_, panel_descriptor(q, at), panel_descriptor(rows, at), half == 0 || i > 0 || k > 0);
      }
  }

  /// Scores to weights relative to a base; O must be multiplied by `past`. The base stays while no logit is far above
  /// it: to find the largest, lanes would wait for each other behind the loaders' stores. Weights include the power of
  /// two that a row's values lack, so that the largest is about 1 in fp16 however rows differ; the sum does not.
  /// `store` gets them by twos.
  template <class Store>
  __device__ void weigh(int stage, const RowsOfTile& rows, float (&past)[2], Store store) {
    // Read again where they matter, hardly ever.
    const auto byte_of_score = [&](int word, int i) {
      const auto* words = reinterpret_cast<const std::uint32_t*>(&s_.fours[stage][i / 16]);
      return words[word + i / 8 % 2] >> (i / 4 % 2 * 16 + quad_of_thread() / 2 * 8);
    };
    const auto exponent_of_score = [&](int i) { return static_cast<int>(byte_of_score(0, i) << 24) >> 24; };
    const auto is_there = [&](int i) { return (byte_of_score(2, i) >> (quad_of_thread() % 2 * 2 + i % 2) & 1) != 0; };
    float factor[2] = {scale_[0], scale_[1]};
    if (!rows.plain) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int exponent = exponent_of_score(i);
        const float unit = exponent == kNanExponent ? NAN : power_of_two(exponent);
        z_[i] = codec::fused(z_[i], scale_[i / 2 % 2] * unit, static_cast<float>(exponent));
      }
      factor[0] = factor[1] = 1.0f;
    }
    if (!rows.all_there) {
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (!is_there(i)) z_[i] = -INFINITY;
    }
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fmaxf(z_[i], z_[i + 1]));
    most[0] *= factor[0];
    most[1] *= factor[1];
    past[0] = past[1] = 1.0f;
    if (__any_sync(kAllLanes, most[0] > base_[0] + kSlack || most[1] > base_[1] + kSlack)) raise_base(most, past);
    const float base[2] = {base_[0] == -INFINITY ? 0.0f : base_[0], base_[1] == -INFINITY ? 0.0f : base_[1]};
    const auto store_weights = [&](auto inverse_unit) {
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        const int half = i / 2 % 2;
        const float x = exp2_fast(codec::fused(z_[i], factor[half], -base[half]));
        const float y = exp2_fast(codec::fused(z_[i + 1], factor[half], -base[half]));
        sum_[half] = codec::fused(x + y, inverse_unit(i), sum_[half]);
        store(i, pack_fp16(x, y));
      }
    };
    if (rows.plain)
      store_weights([](int) { return 1.0f; });
    else
      store_weights([&](int i) { return power_of_two(-exponent_of_score(i)); });
  }

  /// No more scores of this round are needed.
  __device__ void leave_queries() const {
    if (arrives_for_warp(threadIdx.x % 32)) barrier_arrive(shared_address(&s_.queries_used));
  }

  static constexpr int kScores = kTile / 2;

  Shared& s_;
  float z_[kScores];
  float base_[2] = {-INFINITY, -INFINITY}, sum_[2] = {0.0f, 0.0f};

 private:
  static constexpr float kSlack = 8.0f;                      // weights are below 2^8
  static constexpr int kNanExponent = 255 + 9 - kTopInFp16;  // of rows with a scale that is NaN

  /// To the largest logits so far; lanes of a head agree on them.
  __device__ void raise_base(float (&most)[2], float (&past)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = fmaxf(most[half], __shfl_xor_sync(kAllLanes, most[half], 1));
      most[half] = fmaxf(most[half], __shfl_xor_sync(kAllLanes, most[half], 2));
      most[half] = fmaxf(most[half], base_[half]);
      past[half] = exp2_fast(base_[half] - (most[half] == -INFINITY ? 0.0f : most[half]));
      base_[half] = most[half];
      sum_[half] *= past[half];
    }
  }

  float scale_[2];  // of the thread's heads
};

class Scorer : public Weigher {
 public:
  __device__ Scorer(const AttendParams& p, Shared& s) : Weigher(p, s) {}

  /// The values of a tile are multiplied while the next one's scores become weights, because the loaders bound it.
  /// Paired loaders are faster and would wait: there it is done before the next one's scores, so that the left panels
  /// can be filled again sooner. Tiles are counted through all rounds of a CTA.
  template <bool kPaired, bool kInRounds, int kSize>
  __device__ void run(float (&o)[kSize], int first, int end, int panel, std::uint32_t to_mate) {
    for (int tile = first; tile < end; ++tile) {
      const int stage = tile % kStages;
      score<kPaired>(tile, 1);
      if (kPaired) mma_commit();
      if (kPaired && tile > first) {
        mma_wait<1>();
        release<kSize>(s_, stage ^ 1, 0, to_mate);
      }
      score<kPaired>(tile, 0);
      mma_commit();
      const RowsOfTile rows(s_, stage);
      if (!kPaired && tile > first) {
        add_values(o, s_, stage ^ 1, panel, stage ^ 1);
        mma_wait<1>();
      } else {
        mma_wait<0>();
      }
      if (kInRounds && tile + 1 == end) leave_queries();
      float past[2];
      weigh_into(stage, rows, past);
      publish_to_mma();
      named_barrier(2, kGroup);
      if (arrives_for_group(threadIdx.x)) barrier_arrive(shared_address(&s_.weighted[stage]));
      if (!kPaired) {
        mma_wait<0>();
        if (tile > first) release<kSize>(s_, stage ^ 1, 0, to_mate);
      }
      if (__any_sync(kAllLanes, past[0] != 1.0f || past[1] != 1.0f)) scale_heads(o, past[0], past[1]);
      if (kPaired) add_values(o, s_, stage, panel, stage);
    }
    if (!kPaired && end > first) add_values(o, s_, (end - 1) % kStages, panel, (end - 1) % kStages);
    mma_wait<0>();
    if (kInRounds) release<kSize>(s_, (end - 1) % kStages, 0, to_mate);
  }

 private:
  /// Into shared memory.
  __device__ void weigh_into(int stage, const RowsOfTile& rows, float (&past)[2]) {
    const int head = head_of_thread(), quad = quad_of_thread();
    const std::uint32_t to = shared_address(s_.weights[stage]) + quad * 4;
    weigh(stage, rows, past,
          [&](int i, std::uint32_t pair) { shared_store(to + panel_offset(head + 8 * (i / 2 % 2), i / 4), pair); });
    if (quad == 0) {
      s_.past[stage][head] = past[0];
      s_.past[stage][head + 8] = past[1];
    }
  }
};

/// Into L2: the loaders have registers for one tile, less than what must be under way.
__device__ void prefetch(const Found& row) {
#pragma unroll
  for (int at = 0; at < kWidth + kTail; at += kLine) fetch(row.payload + at);
  fetch(row.scale);
}

template <bool kPaired, int kSize, class RowFinder>
__device__ void run_adder(float (&o)[kSize], Shared& s, RowFinder& finder, int first, int end, int panel,
                          std::uint32_t to_mate) {
  for (int tile = first; tile < end; ++tile) {
    const int stage = tile % kStages, parity = tile / kStages & 1;
    barrier_wait(shared_address(&s.full[stage][0]), parity);
    barrier_wait(shared_address(&s.full[stage][1]), parity);
    if (!kPaired) publish_to_mma();
    finder.advance(tile);
    barrier_wait(shared_address(&s.weighted[stage]), parity);
    const float upper = s.past[stage][head_of_thread()], lower = s.past[stage][head_of_thread() + 8];
    if (__any_sync(kAllLanes, upper != 1.0f || lower != 1.0f)) scale_heads(o, upper, lower);
    add_values(o, s, stage, panel, stage);
    mma_wait<0>();
    release<kSize>(s, stage, 1, to_mate);
  }
}

template <int kRegisters>
__device__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace
}  // namespace kv4::cuda
