// The epilogue of the wgmma kernels: denominators, combination over the cluster, output.
#pragma once

#include "backend/cuda/attend/cta.cuh"

namespace kv4::cuda::attend_wgmma {

/// Over all KV splits and the sink.
__device__ inline Stats total_of(const Shared& s, const Job& job, int head) {
  const float sink = s.sink[job.sinks()][head];
  const auto* stats = job.persistent ? s.work_stats + job.work % 2 : s.stats;
  Stats total{sink, 0.0f};
#pragma unroll 1
  for (int kv_split = 0; kv_split < job.kv_splits; ++kv_split)
    total.row_max = fmaxf(total.row_max, stats[kv_split][head].row_max);
  const float base = total.row_max == -INFINITY ? 0.0f : total.row_max;
  total.sum = exp2_approx(sink - base);
  if (job.ping_pong) {
    const Stats& left = stats[0][head];
    total.sum += (left.sum + s.sink[kSinks / 2 + job.work % 2][head]) * exp2_approx(left.row_max - base);
    return total;
  }
#pragma unroll 1
  for (int kv_split = 0; kv_split < job.kv_splits; ++kv_split)
    total.sum += stats[kv_split][head].sum * exp2_approx(stats[kv_split][head].row_max - base);
  return total;
}

/// The factor of a KV split's O.
__device__ inline float factor_of(const Shared& s, const Job& job, int head, int kv_split) {
  const Stats total = total_of(s, job, head);
  if (total.sum == 0.0f) return 0.0f;
  return __fdividef(exp2_approx((job.persistent ? s.work_stats[job.work % 2] : s.stats[kv_split])[head].row_max -
                                (total.row_max == -INFINITY ? 0.0f : total.row_max)),
                    total.sum);
}

__device__ inline void store_lse(const AttendParams& p, const Shared& s, const Job& job) {
  const int head = job.kv_split * job.own_heads() + static_cast<int>(threadIdx.x);
  if (p.lse == nullptr || job.channel_split != 0 || static_cast<int>(threadIdx.x) >= job.own_heads() || head >= kTile ||
      job.first_head + head >= p.num_heads)
    return;
  const Stats total = total_of(s, job, head);
  p.lse[std::int64_t{job.token} * p.num_heads + job.first_head + head] =
      total.sum == 0.0f ? -INFINITY : (total.row_max + log2f(total.sum)) * kLn2;
}

__device__ inline void inverse_rope(const Rotation& rotation, float& x, float& y) {
  if (!rotation.active) return;
  const float a = x, b = y;
  x = codec::fused(a, rotation.cos, b * rotation.sin);
  y = codec::fused(b, rotation.cos, -(a * rotation.sin));
}

/// The output of a head.
template <class Out>
__device__ Out* output_of(const AttendParams& p, const Job& job, int head) {
  return static_cast<Out*>(p.out.data) + (std::int64_t{job.token} * p.num_heads + job.first_head + head) * kWidth;
}

/// For a warpgroup that has the last channels.
template <int kSize>
__device__ void inverse_rope_last(const AttendParams& p, const Job& job, float (&o)[kSize]) {
  if (p.inverse_rope.rope_dim == 0 || job.padded) return;
#pragma unroll
  for (int i = kSize - kTail / 2; i < kSize; i += 4) {
    const int channel = kWidth - (kSize - i) * 2 + 2 * quad_of_thread();
    const Rotation rotation = load_rotation(p.inverse_rope, job.position, channel, kWidth);
    inverse_rope(rotation, o[i], o[i + 1]);
    inverse_rope(rotation, o[i + 2], o[i + 3]);
  }
}

/// Stores O from registers, 32 channels of 8 heads at a time.
template <int kSize>
__device__ void store_output(const AttendParams& p, const Job& job, const float (&o)[kSize], int first_channel) {
  const int quad = quad_of_thread();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = head_of_thread() + 8 * half;
    const bool there = job.first_head + head < p.num_heads;
    if (p.out.dtype == DType::f32) {
      float* out = output_of<float>(p, job, head) + first_channel + 2 * quad;
#pragma unroll
      for (int i = 2 * half; i < kSize; i += 4)
        if (there) *reinterpret_cast<float2*>(out + i / 4 * 8) = make_float2(o[i], o[i + 1]);
      continue;
    }
    std::uint16_t* out = output_of<std::uint16_t>(p, job, head) + first_channel + 8 * quad;
#pragma unroll
    for (int i = 2 * half; i < kSize; i += 16) {
      // The four lanes of a head exchange words until each lane has 8 adjacent channels.
      std::uint32_t word[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) word[b] = bf16_pair(o[i + 4 * b], o[i + 4 * b + 1]);
#pragma unroll
      for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          if ((b & step) != 0) continue;
          const bool high = (quad & step) != 0;
          const std::uint32_t other = __shfl_xor_sync(kAllLanes, high ? word[b] : word[b + step], step);
          (high ? word[b] : word[b + step]) = other;
        }
      if (there) store16(out + i / 16 * 32, word[0], word[1], word[2], word[3]);
    }
  }
}

/// A CTA's partial output of a head, after Q and the rows are no longer needed: channels in fp16, then one factor for
/// the channels of each warpgroup, a power of two. The bytes between CTAs determine the cost of combining, hence not
/// fp32; errors stay below 2^-12 of the largest channel.
template <int kChannelSplits>
struct PartialOutput {
  static constexpr int kChannels = kWidth / kChannelSplits;
  static constexpr int kScalesAt = kChannels * 2, kBytes = kScalesAt + 16;  // heads begin in different banks
  static_assert(kTile * kBytes <= (1 + kStages) * kTileBytes);

  __device__ static std::uint32_t address(const Shared& s, int head) {
    return shared_address(s.q) + static_cast<std::uint32_t>(head * kBytes);
  }
};

template <int kChannelSplits, int kWarpgroupIndex, int kSize>
__device__ void store_partials(Shared& s, const float (&o)[kSize]) {
  constexpr std::uint32_t kTop = 14;  // the largest channel gets this exponent
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 2 * half; i < kSize; i += 4) amax = fmaxf(amax, fmaxf(fabsf(o[i]), fabsf(o[i + 1])));
    amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 2));
    const std::uint32_t exponent = max(codec::float_bits(amax) >> 23, kTop + 1);
    const float up = codec::bits_float((254 + kTop - exponent) << 23);
    const std::uint32_t to = PartialOutput<kChannelSplits>::address(s, head_of_thread() + 8 * half);
    if (quad_of_thread() == 0)
      store_shared4(to + PartialOutput<kChannelSplits>::kScalesAt + kWarpgroupIndex * 4, (exponent - kTop) << 23);
    const std::uint32_t channels = to + (kWarpgroupIndex * kSize * 2 + 2 * quad_of_thread()) * 2;
#pragma unroll
    for (int i = 2 * half; i < kSize; i += 4) {
      const __half2 pair = __floats2half2_rn(o[i] * up, o[i + 1] * up);
      std::uint32_t bits;
      memcpy(&bits, &pair, 4);
      store_shared4(channels + i / 4 * 16, bits);
    }
  }
}

/// Adds eight channels of a partial output, of this CTA or another.
__device__ inline void add_partial(uint4 channels, float scale, float (&sum)[kOctet]) {
  const std::uint32_t words[4] = {channels.x, channels.y, channels.z, channels.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __half2 pair;
    memcpy(&pair, &words[i], 4);
    const float2 x = __half22float2(pair);
    sum[2 * i] = codec::fused(x.x, scale, sum[2 * i]);
    sum[2 * i + 1] = codec::fused(x.y, scale, sum[2 * i + 1]);
  }
}

/// Stores eight combined channels of a head.
__device__ inline void store_octet(const AttendParams& p, const Job& job, int head, int channel, float (&sum)[kOctet]) {
  if (job.first_head + head >= p.num_heads) return;
  if (!job.padded && channel + kOctet > kWidth - p.inverse_rope.rope_dim) {
#pragma unroll
    for (int pair = 0; pair < kOctet; pair += 2)
      inverse_rope(load_rotation(p.inverse_rope, job.position, channel + pair, kWidth), sum[pair], sum[pair + 1]);
  }
  if (p.out.dtype == DType::f32) {
    float4* out = reinterpret_cast<float4*>(output_of<float>(p, job, head) + channel);
    out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  } else {
    store16(output_of<std::uint16_t>(p, job, head) + channel, bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]),
            bf16_pair(sum[4], sum[5]), bf16_pair(sum[6], sum[7]));
  }
}

/// All threads: exchanges the partial outputs and reduces them for this CTA's heads, eight channels per thread and
/// iteration.
template <int kChannelSplits>
__device__ void finish_heads(const AttendParams& p, Shared& s, const Job& job) {
  constexpr int kChunks = PartialOutput<kChannelSplits>::kChannels / kOctet, kAtOnce = 4;
  const int first = job.kv_split * job.own_heads(), heads = min(job.own_heads(), kTile - first);
  cluster_arrive();
  cluster_wait();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < heads * job.kv_splits)
    s.factors[thread] = factor_of(s, job, first + thread / job.kv_splits, thread % job.kv_splits);
  store_lse(p, s, job);
  cta_sync();
#pragma unroll 1
  for (int i = thread; i < heads * kChunks; i += kThreads) {
    const int head = first + i / kChunks, chunk = i % kChunks;
    const std::uint32_t at = PartialOutput<kChannelSplits>::address(s, head) + chunk * 16;
    const std::uint32_t scale_at = PartialOutput<kChannelSplits>::address(s, head) +
                                   PartialOutput<kChannelSplits>::kScalesAt + chunk / (kChunks / 2) * 4;
    float sum[kOctet] = {};
#pragma unroll 1
    for (int kv_split = 0; kv_split < job.kv_splits; kv_split += kAtOnce) {
      uint4 channels[kAtOnce];
      float scale[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        channels[k] = make_uint4(0, 0, 0, 0);
        scale[k] = 0.0f;
        if (kv_split + k >= job.kv_splits) continue;
        int from = job.kv_split + kv_split + k;  // so that the CTAs do not all read the same CTA at once
        if (from >= job.kv_splits) from -= job.kv_splits;
        const std::uint32_t rank = job.rank_of(from);
        channels[k] = cluster_load(map_to_cta(at, rank));
        scale[k] = cluster_load_float(map_to_cta(scale_at, rank)) * s.factors[(head - first) * job.kv_splits + from];
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) add_partial(channels[k], scale[k], sum);
    }
    store_octet(p, job, head, job.channel_split * PartialOutput<kChannelSplits>::kChannels + chunk * kOctet, sum);
  }
  cluster_done_reading();  // other CTAs may still be reading here
}

}  // namespace kv4::cuda::attend_wgmma
