// Combination through global memory, where more CTAs share a token's rows than a cluster has.
//
// Each CTA stores its partial output and its softmax statistics in the workspace, and then arrives at the token's
// arrival counter. After all CTAs have arrived, each reduces some of the half heads over the splits in a fixed order,
// so that the bits do not depend on the order of arrival. CTAs may not be co-resident, so the rendezvous times out: a
// CTA that has waited for long leaves, and if any CTA did, the last arrival reduces all splits. So no CTA depends on a
// later one.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/ptx/load_store.cuh"

namespace kv4::cuda::attend_wgmma {

/// For the CTAs with the same heads of a token. Zero before and after each call.
struct ArrivalCounter {
  std::uint32_t arrived;   // CTAs that have stored their partial output; in the upper half: CTAs that timed out
  std::uint32_t departed;  // CTAs that will not read `arrived` again

  static constexpr std::uint32_t kTimedOut = 1u << 16, kOnes = kTimedOut - 1;
};
static_assert(kMaxArrivalCounters == ops::kAttendCounterBytes / sizeof(ArrivalCounter));

/// The result of one CTA.
struct StoredPartial {
  std::uint8_t heads[kTile * PartialOutput<1>::kBytes];
  Stats stats[kTile];
};
static_assert(sizeof(StoredPartial) == ops::kAttendPartialBytes && kWidth == ops::kAttendPartialWidth);

// Past L1, which may hold older bytes of the same place.
__device__ inline uint4 load_partial(const uint4* at) {
  const Words<4> x = load_l2<4>(at);
  return make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
}
__device__ inline float load_partial(const float* at) { return __uint_as_float(load_l2<1>(at).w[0]); }
__device__ inline Stats load_partial(const Stats* at) {
  const Words<2> x = load_l2<2>(at);
  Stats stats;
  stats.row_max = __uint_as_float(x.w[0]);
  stats.sum = __uint_as_float(x.w[1]);
  return stats;
}

class MemoryCombine {
 public:
  __device__ MemoryCombine(const AttendParams& p, Shared& s, const Job& job) : p_(p), s_(s), job_(job) {}

  /// Called by the softmax and the PV warpgroup: the producers have no registers for it.
  __device__ void run() const {
    sync();  // partial outputs are in shared memory
    store_partial();
    sync();
    if (threadIdx.x == 0) s_.partials_to_reduce = arrive();
    sync();
    const int partials = s_.partials_to_reduce;
    for (int i = 0; i < partials; ++i) {
      if (i > 0) sync();  // shared memory is reused
      reduce(partials == 1 ? job_.kv_split : i);
    }
    if (threadIdx.x == kCombineThreads - 1) depart();
  }

 private:
  static constexpr int kHalves = 2 * kTile, kCombineThreads = 2 * kWarpgroupThreads, kWarps = kCombineThreads / 32,
                       kAtOnce = 8;
  static constexpr int kMaxPerLane = kMaxMemorySplits / 32;
  static constexpr long long kTimeoutClocks = 1 << 17;  // clocks

  __device__ static void sync() { named_barrier_sync(1, kCombineThreads); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  /// Half heads that a CTA reduces; the last CTAs have fewer or none.
  __device__ int own() const { return (kHalves + job_.kv_splits - 1) / job_.kv_splits; }

  /// CTAs have the same order in the workspace as in the grid.
  __device__ StoredPartial& partial(int kv_split) const {
    auto* partials = reinterpret_cast<StoredPartial*>(p_.workspace + ops::kAttendCounterBytes);
    return partials[static_cast<int>(blockIdx.x) + (kv_split - job_.kv_split) * job_.ctas_per_split];
  }
  __device__ ArrivalCounter& arrival_counter() const {
    return reinterpret_cast<ArrivalCounter*>(
        p_.workspace)[static_cast<int>(blockIdx.x) - job_.kv_split * job_.ctas_per_split];
  }

  __device__ void store_partial() const {
    constexpr int kChunks = sizeof(StoredPartial::heads) / 16, kStatChunks = sizeof(StoredPartial::stats) / 16;
    StoredPartial& mine = partial(job_.kv_split);
    for (int i = static_cast<int>(threadIdx.x); i < kChunks + kStatChunks; i += kCombineThreads) {
      const std::uint32_t from =
          i < kChunks ? PartialOutput<1>::address(s_, 0) + i * 16 : shared_address(s_.stats[0]) + (i - kChunks) * 16;
      reinterpret_cast<uint4*>(&mine)[i] = load_shared16_ordered(from);
    }
  }

  /// The number of KV splits whose half heads this CTA reduces: its own (1), all, or none.
  __device__ int arrive() const {
    std::uint32_t* const arrived = &arrival_counter().arrived;
    const std::uint32_t kv_splits = static_cast<std::uint32_t>(job_.kv_splits);
    std::uint32_t seen = add_acquire_release(arrived, 1) + 1;
    const bool last = (seen & ArrivalCounter::kOnes) == kv_splits;
    for (const long long start = clock64(); (seen & ArrivalCounter::kOnes) < kv_splits;) {
      if (clock64() - start > kTimeoutClocks) {
        seen = add_acquire_release(arrived, ArrivalCounter::kTimedOut);
        if ((seen & ArrivalCounter::kOnes) < kv_splits) return 0;
      } else {
        seen = load_acquire(arrived);
      }
    }
    return last && seen >= ArrivalCounter::kTimedOut ? job_.kv_splits : 1;
  }

  /// The last CTA to depart resets the counter.
  __device__ void depart() const {
    ArrivalCounter& m = arrival_counter();
    if (add_acquire_release(&m.departed, 1) + 1 < static_cast<std::uint32_t>(job_.kv_splits)) return;
    m.arrived = 0;
    m.departed = 0;
  }

  /// The factors of each KV split's channels of half a head; one warp per half head.
  __device__ void find_rescale_factors(int half, float* factors) const {
    const int head = half / 2, warpgroup = half % 2;
    const float sink = s_.sink[0][head];
    Stats stats[kMaxPerLane];
    float scale[kMaxPerLane], row_max = sink;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      const int kv_split = lane() + 32 * i;
      if (kv_split >= job_.kv_splits) break;
      const StoredPartial& left = partial(kv_split);
      stats[i] = load_partial(&left.stats[head]);
      scale[i] = load_partial(
          reinterpret_cast<const float*>(left.heads + head * PartialOutput<1>::kBytes + PartialOutput<1>::kScalesAt) +
          warpgroup);
    }
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i)
      if (lane() + 32 * i < job_.kv_splits) row_max = fmaxf(row_max, stats[i].row_max);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) row_max = fmaxf(row_max, __shfl_xor_sync(kAllLanes, row_max, step));
    const float base = row_max == -INFINITY ? 0.0f : row_max;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i)
      if (lane() + 32 * i < job_.kv_splits) sum += stats[i].sum * exp2_approx(stats[i].row_max - base);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    sum += exp2_approx(sink - base);
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i)
      if (lane() + 32 * i < job_.kv_splits)
        factors[lane() + 32 * i] =
            sum == 0.0f ? 0.0f : scale[i] * __fdividef(exp2_approx(stats[i].row_max - base), sum);
    if (p_.lse != nullptr && lane() == 0 && warpgroup == 0 && job_.first_head + head < p_.num_heads)
      p_.lse[std::int64_t{job_.token} * p_.num_heads + job_.first_head + head] =
          sum == 0.0f ? -INFINITY : (row_max + log2f(sum)) * kLn2;
  }

  /// Reduces the half heads of one KV split. A lane has eight channels. If there are few half heads, several warps
  /// share each of them and take some of the splits; the order of additions does not depend on the CTA that reduces.
  __device__ void reduce(int kv_split) const {
    const int first = kv_split * own(), count = min(own(), kHalves - first);
    auto* const factors = reinterpret_cast<float*>(s_.rows[1]);        // [half head, KV split]
    auto* const sums = reinterpret_cast<float4*>(s_.q) + warp() * 64;  // [warp, 2, lane]
    for (int h = warp(); h < count; h += kWarps) find_rescale_factors(first + h, factors + h * job_.kv_splits);
    sync();
    int sharers = kWarps;
    while (sharers > 1 && sharers * count > kWarps) sharers /= 2;
    float sum[kOctet] = {};
#pragma unroll 1
    for (int h = warp() / sharers; h < count; h += kWarps / sharers) {
      reduce_splits(first + h, factors + h * job_.kv_splits, warp() % sharers, sharers, sum);
      if (sharers == 1) store_half(first + h, sum);
    }
    if (sharers == 1) return;
    sums[lane()] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    sums[lane() + 32] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    sync();
    if (warp() % sharers != 0 || warp() / sharers >= count) return;
    for (int i = 1; i < sharers; ++i) {
      const float4 low = sums[i * 64 + lane()], high = sums[i * 64 + lane() + 32];
      const float more[kOctet] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int c = 0; c < kOctet; ++c) sum[c] += more[c];
    }
    store_half(first + warp() / sharers, sum);
  }

  __device__ void reduce_splits(int half, const float* factors, int kv_split, int step, float (&sum)[kOctet]) const {
    const int at = half / 2 * PartialOutput<1>::kBytes + half % 2 * (kWidth / 2) * 2 + lane() * 16;
#pragma unroll
    for (int c = 0; c < kOctet; ++c) sum[c] = 0.0f;
#pragma unroll 1
    for (; kv_split < job_.kv_splits; kv_split += kAtOnce * step) {
      uint4 channels[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int from = min(kv_split + k * step, job_.kv_splits - 1);
        channels[k] = load_partial(reinterpret_cast<const uint4*>(partial(from).heads + at));
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (kv_split + k * step < job_.kv_splits) add_partial(channels[k], factors[kv_split + k * step], sum);
    }
  }

  __device__ void store_half(int half, float (&sum)[kOctet]) const {
    store_octet(p_, job_, half / 2, half % 2 * (kWidth / 2) + lane() * kOctet, sum);
  }

  const AttendParams& p_;
  Shared& s_;
  const Job& job_;
};

}  // namespace kv4::cuda::attend_wgmma
