// Merging through global memory, where more CTAs share a token's rows than a cluster has. For dispatch.cu alone.
//
// Each block leaves its share of O and its statistics in the workspace and then comes to the token's meeting. When all
// have come, each adds up some of the half heads, parts in a fixed order, so that bits do not depend on who was first.
// Waiting is an offer, not a condition, since nothing promises that all blocks run at once: who has waited for long
// gives up and leaves, and if any did, the last to come adds up everything. So blocks never depend on later ones.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"

namespace kv4::cuda {
namespace {

/// Of the blocks with the same heads of a token. Zero before and after.
struct Meeting {
  std::uint32_t come;  // blocks that have left their share; in the upper half: that gave up
  std::uint32_t gone;  // blocks that will not look at `come` again

  static constexpr std::uint32_t kGaveUp = 1u << 16, kOnes = kGaveUp - 1;
};
constexpr int kMostMeetings = ops::kAttendMeetingBytes / sizeof(Meeting), kMostMemoryParts = 160;

/// What a block leaves.
struct LeftShare {
  std::uint8_t heads[kTile * Share<1>::kBytes];
  Stats stats[kTile];
};
static_assert(sizeof(LeftShare) == ops::kAttendShareBytes && kWidth == ops::kAttendShareWidth);

// Past the first cache level, which may hold what lay there before.
__device__ uint4 load_left(const uint4* at) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
__device__ float load_left(const float* at) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
  return x;
}
__device__ Stats load_left(const Stats* at) {
  Stats x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.most), "=f"(x.sum) : "l"(at) : "memory");
  return x;
}

class MemoryMerge {
 public:
  __device__ MemoryMerge(const AttendParams& p, Shared& s, const Job& job) : p_(p), s_(s), job_(job) {}

  /// Scorer and adder: the loaders have no registers for it.
  __device__ void run() const {
    sync();  // shares are in shared memory
    leave();
    sync();
    if (threadIdx.x == 0) s_.shares_to_add = meet();
    sync();
    const int shares = s_.shares_to_add;
    for (int i = 0; i < shares; ++i) {
      if (i > 0) sync();  // shared memory is used again
      add_up(shares == 1 ? job_.part : i);
    }
    if (threadIdx.x == kMergers - 1) go();
  }

 private:
  static constexpr int kHalves = 2 * kTile, kMergers = 2 * kGroup, kWarps = kMergers / 32, kAtOnce = 8;
  static constexpr int kMostPerLane = kMostMemoryParts / 32;
  static constexpr long long kPatience = 1 << 17;  // clocks

  __device__ static void sync() { named_barrier(1, kMergers); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  /// Half heads that a block adds up, the last ones fewer or none.
  __device__ int own() const { return (kHalves + job_.parts - 1) / job_.parts; }

  /// Blocks stand in the workspace as in the grid.
  __device__ LeftShare& share(int part) const {
    auto* shares = reinterpret_cast<LeftShare*>(p_.workspace + ops::kAttendMeetingBytes);
    return shares[static_cast<int>(blockIdx.x) + (part - job_.part) * job_.part_blocks];
  }
  __device__ Meeting& meeting() const {
    return reinterpret_cast<Meeting*>(p_.workspace)[static_cast<int>(blockIdx.x) - job_.part * job_.part_blocks];
  }

  __device__ void leave() const {
    constexpr int kUnits = sizeof(LeftShare::heads) / 16, kStatUnits = sizeof(LeftShare::stats) / 16;
    LeftShare& mine = share(job_.part);
    for (int i = static_cast<int>(threadIdx.x); i < kUnits + kStatUnits; i += kMergers) {
      const std::uint32_t from =
          i < kUnits ? Share<1>::address(s_, 0) + i * 16 : shared_address(s_.stats[0]) + (i - kUnits) * 16;
      reinterpret_cast<uint4*>(&mine)[i] = load_shared(from);
    }
  }

  /// Of how many parts this block is to add up the half heads: its own, all, or none.
  __device__ int meet() const {
    std::uint32_t* const come = &meeting().come;
    const std::uint32_t parts = static_cast<std::uint32_t>(job_.parts);
    std::uint32_t seen = add(come, 1) + 1;
    const bool last = (seen & Meeting::kOnes) == parts;
    for (const long long start = clock64(); (seen & Meeting::kOnes) < parts;) {
      if (clock64() - start > kPatience) {
        seen = add(come, Meeting::kGaveUp);
        if ((seen & Meeting::kOnes) < parts) return 0;
      } else {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(come) : "memory");
      }
    }
    return last && seen >= Meeting::kGaveUp ? job_.parts : 1;
  }

  /// The value before. What the block did before comes first, what it does next comes after.
  __device__ static std::uint32_t add(std::uint32_t* at, std::uint32_t x) {
    std::uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(x) : "memory");
    return before;
  }

  /// The last to go leaves the meeting as it was.
  __device__ void go() const {
    Meeting& m = meeting();
    if (add(&m.gone, 1) + 1 < static_cast<std::uint32_t>(job_.parts)) return;
    m.come = 0;
    m.gone = 0;
  }

  /// What each part's channels of half a head are multiplied by; a warp per half head.
  __device__ void find_factors(int half, float* factors) const {
    const int head = half / 2, group = half % 2;
    const float sink = s_.sink[0][head];
    Stats stats[kMostPerLane];
    float scale[kMostPerLane], most = sink;
#pragma unroll
    for (int i = 0; i < kMostPerLane; ++i) {
      const int part = lane() + 32 * i;
      if (part >= job_.parts) break;
      const LeftShare& left = share(part);
      stats[i] = load_left(&left.stats[head]);
      scale[i] =
          load_left(reinterpret_cast<const float*>(left.heads + head * Share<1>::kBytes + Share<1>::kScalesAt) + group);
    }
#pragma unroll
    for (int i = 0; i < kMostPerLane; ++i)
      if (lane() + 32 * i < job_.parts) most = fmaxf(most, stats[i].most);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
    const float base = most == -INFINITY ? 0.0f : most;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMostPerLane; ++i)
      if (lane() + 32 * i < job_.parts) sum += stats[i].sum * exp2_fast(stats[i].most - base);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    sum += exp2_fast(sink - base);
#pragma unroll
    for (int i = 0; i < kMostPerLane; ++i)
      if (lane() + 32 * i < job_.parts)
        factors[lane() + 32 * i] = sum == 0.0f ? 0.0f : scale[i] * __fdividef(exp2_fast(stats[i].most - base), sum);
    if (p_.lse != nullptr && lane() == 0 && group == 0 && job_.first_head + head < p_.num_heads)
      p_.lse[std::int64_t{job_.token} * p_.num_heads + job_.first_head + head] =
          sum == 0.0f ? -INFINITY : (most + log2f(sum)) * kLn2;
  }

  /// A part's half heads. A lane has eight channels. Of few half heads several warps share each, every one some of the
  /// parts: an order that does not depend on who adds up.
  __device__ void add_up(int part) const {
    const int first = part * own(), count = min(own(), kHalves - first);
    auto* const factors = reinterpret_cast<float*>(s_.rows[1]);        // [half head, part]
    auto* const sums = reinterpret_cast<float4*>(s_.q) + warp() * 64;  // [warp, 2, lane]
    for (int h = warp(); h < count; h += kWarps) find_factors(first + h, factors + h * job_.parts);
    sync();
    int sharers = kWarps;
    while (sharers > 1 && sharers * count > kWarps) sharers /= 2;
    float sum[kOctet] = {};
#pragma unroll 1
    for (int h = warp() / sharers; h < count; h += kWarps / sharers) {
      add_parts(first + h, factors + h * job_.parts, warp() % sharers, sharers, sum);
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

  __device__ void add_parts(int half, const float* factors, int part, int step, float (&sum)[kOctet]) const {
    const int at = half / 2 * Share<1>::kBytes + half % 2 * (kWidth / 2) * 2 + lane() * 16;
#pragma unroll
    for (int c = 0; c < kOctet; ++c) sum[c] = 0.0f;
#pragma unroll 1
    for (; part < job_.parts; part += kAtOnce * step) {
      uint4 channels[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int from = min(part + k * step, job_.parts - 1);
        channels[k] = load_left(reinterpret_cast<const uint4*>(share(from).heads + at));
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (part + k * step < job_.parts) add_share(channels[k], factors[part + k * step], sum);
    }
  }

  __device__ void store_half(int half, float (&sum)[kOctet]) const {
    store_octet(p_, job_, half / 2, half % 2 * (kWidth / 2) + lane() * kOctet, sum);
  }

  const AttendParams& p_;
  Shared& s_;
  const Job& job_;
};

}  // namespace
}  // namespace kv4::cuda
