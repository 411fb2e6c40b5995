// mxfp4 keys and queries as integers for the score kernels: codes to bytes, scales, the encoding of queries, and exact
// scores of what is out of range. mxfp4.cu explains the arithmetic.
#pragma once

#include <cstdint>

#include "backend/cuda/index/queries.cuh"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/arithmetic.cuh"
#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/rows/encode.cuh"
#include "codec/mxfp4.h"
#include "ops/score_row.h"

namespace kv4::cuda::mxfp4 {

constexpr int kGroups = kQuad, kKeyBytes = kWidth / 2;
constexpr int kSteps = 4, kLookups = 4;
constexpr int kKeyShift = 2, kQueryShift = 3;
constexpr std::uint32_t kSigns = 0x88888888u;
constexpr std::uint32_t kLowCodes = 0x03020100u, kHighCodes = 0x0C080604u;  // e2m1_double of codes 0 to 3, 4 to 7
static_assert(kWidth * (24 << kKeyShift) * (12 << kQueryShift) < 1 << 22, "negative ones are NaN");
static_assert((24 << kKeyShift) < 128, "a looked-up byte has no sign");

// The ranges of a key's largest scale byte, of a head's largest scale byte, and of a weight times its head's scale.
// Within them every intermediate result is a normal number and no sum overflows.
constexpr std::uint32_t kMinKeyScale = 64, kKeyScales = 128;
constexpr std::uint32_t kMinQueryScale = 82, kMaxQueryScale = 172;
constexpr float kMinWeight = 0x1p-45f, kMaxWeight = 0x1p35f;
// Sums over heads are scaled by 2^-kSumShift, so that weights times kWeightFactor, which multiply accumulators read as
// floats, stay in the range of fp32.
constexpr int kSumShift = 59;
constexpr float kWeightFactor = 0x1p90f;  // 2^(149 - kSumShift)

using Operand = std::uint32_t[kSteps][4];  // a lane's part of 64 keys

// --- codes to bytes

/// A table of twice the value of each code under one scale, as a signed byte. The byte comes in two parts, one of which
/// is zero for every code: a permute returns zero for a byte without its top bit if the top bit of the selector is set.
/// The bytes of positive codes are looked up with the codes, those of negative codes with the complements, which count
/// from 7 down; the bytes of negative codes are stored shifted right by one, in 7 bits.
struct alignas(16) Lookup {
  std::uint32_t positive_low, positive_high, negative_low, negative_high;

  /// times: a power of two, or 0.
  __host__ __device__ constexpr explicit Lookup(std::uint32_t times)
      : positive_low(2 * kLowCodes * times),
        positive_high(2 * kHighCodes * times),
        negative_low(reversed(0x80808080u - kHighCodes * times) & 0x7F7F7F7Fu),
        negative_high(reversed(0x80808080u - kLowCodes * times) & 0x7F7F7F7Fu) {}

  __device__ explicit Lookup(const uint4& words)
      : positive_low(words.x), positive_high(words.y), negative_low(words.z), negative_high(words.w) {}

 private:
  __host__ __device__ static constexpr std::uint32_t reversed(std::uint32_t x) {
    return x << 24 | (x & 0xFF00u) << 8 | (x >> 8 & 0xFF00u) | x >> 24;
  }
};

/// Expands 8 codes to two words of four bytes.
__device__ inline void expand(const Lookup& t, std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  const auto quad = [&](std::uint32_t selector) {
    const std::uint32_t complement = multiply_add(selector, 0xFFFF, 0xFFFF);  // of the selector's 16 bits
    return multiply_add(permute_bytes(t.negative_low, t.negative_high, complement), 2,
                        permute_bytes(t.positive_low, t.positive_high, selector));
  };
  low = quad(codes);
  high = quad(codes >> 16);
}

/// Expands 4 codes to signed bytes, which may be odd.
__device__ inline std::uint32_t signed_quad(std::uint32_t codes, std::uint32_t times) {
  const std::uint32_t magnitudes = permute_bytes(kLowCodes * times, kHighCodes * times, codes & ~kSigns);
  const std::uint32_t signs = permute_bytes(0x0000FF00u, 0, codes >> 3 & 0x1111u);
  return __vsub4(magnitudes ^ signs, signs);
}

__device__ inline bool any_code(const uint4& codes) { return ((codes.x | codes.y | codes.z | codes.w) & ~kSigns) != 0; }

// --- queries of a token

struct Queries {
  std::uint8_t q[kHeads * kWidth];               // wgmma operand, 128-byte rows with swizzled chunks
  float weights[kGroups][ops::kChainHeads + 4];  // [chain]: the head's weight times its scale; no bank conflicts
  std::uint32_t codes[kHeads][kKeyBytes / 4];    // as encoded, for exact_chain
  std::uint32_t scales[kHeads];
  float given_weights[kHeads];
  Lookup lookups[kLookups];  // [d]: for groups d binades below the largest scale
};
static_assert(offsetof(Queries, q) == 0 && offsetof(Queries, weights) % 16 == 0 &&
              offsetof(Queries, lookups) % 16 == 0);

/// Lane c of a quad gets byte c of each lane's word.
__device__ inline std::uint32_t transpose_quad(std::uint32_t word, int c) {
  const std::uint32_t pairs = permute_bytes(word, __shfl_xor_sync(kAllLanes, word, 1), c % 2 == 0 ? 0x6240u : 0x3715u);
  return permute_bytes(pairs, __shfl_xor_sync(kAllLanes, pairs, 2), c < 2 ? 0x5410u : 0x3276u);
}

__device__ inline std::uint32_t largest_byte(std::uint32_t word) {
  const std::uint32_t pair = __vmaxu2(word & 0x00FF00FFu, word >> 8 & 0x00FF00FFu);
  return max(pair & 0xFFFFu, pair >> 16);
}

/// Whether a key's largest scale byte is out of range.
__device__ inline bool is_extreme(std::uint32_t largest) { return largest - kMinKeyScale >= kKeyScales; }

/// The scales of a warp's keys in a KV tile: of the lane's own key, and the lookups for its group of the quad's four
/// keys.
struct KVTileScales {
  std::uint32_t largest, below;  // the largest scale byte; the distance of each byte below it
  std::uint32_t lookups;         // offsets in Queries::lookups, a byte per key

  KVTileScales() = default;
  __device__ KVTileScales(std::uint32_t scales, int c)
      : largest(largest_byte(scales)),
        below(largest * 0x01010101u - scales),
        // For a group further below any lookup does: its codes are zeros, or the KV tile is scored again.
        lookups(transpose_quad((below & 0x03030303u) * sizeof(Lookup), c)) {}

  __device__ bool are_out_of_range() const {
    static_assert(kKeyShift == 2 && kLookups == 4);
    return (((below & 0x7F7F7F7Fu) + 0x7D7D7D7Du) | below) & 0x80808080u || is_extreme(largest);
  }
};

// --- exact scores of keys and tokens that are out of range

/// Adds one chain of heads for a key, in the order of ops/score_row.h.
__device__ inline __noinline__ float exact_chain(const Queries& s, const std::uint8_t* key, const std::uint8_t* scale,
                                          int chain, int num_heads) {
  constexpr Lookup plain(1);
  float sum = 0.0f;
  for (int head = chain * ops::kChainHeads; head < min((chain + 1) * ops::kChainHeads, num_heads); ++head) {
    float dot = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      int products = 0;  // of bytes, which together are four times the value
      for (int i = 0; i < 4; ++i) {
        std::uint32_t k[2], q[2];
        expand(plain, reinterpret_cast<const std::uint32_t*>(key)[4 * g + i], k[0], k[1]);
        expand(plain, s.codes[head][4 * g + i], q[0], q[1]);
        for (int half = 0; half < 2; ++half)
          products = __dp4a(static_cast<int>(k[half]), static_cast<int>(q[half]), products);
      }
      const float q_scale = codec::ue8m0_value(static_cast<std::uint8_t>(s.scales[head] >> (8 * g)));
      dot = dot + static_cast<float>(products / 4) * (codec::ue8m0_value(scale[g]) * 0.25f) * q_scale;
    }
    sum = codec::fused(s.given_weights[head], ops::relu(dot), sum);
  }
  return sum;
}

// --- encoding

// kLanes lanes prepare a head. With four lanes, a group each, half of the CTA's warps prepare the queries. With eight
// lanes, all warps do, in less time; but then CTAs that read the same keys run in step and request them simultaneously.
template <int kLanes>
constexpr int kLaneWords = kKeyBytes / 4 / kLanes;

/// Codes of a lane's channels, and the scale of their group.
template <int kLanes>
struct Part {
  std::uint32_t codes[kLaneWords<kLanes>], scale;
};

template <int kLanes>
using RawPart = RawChannels<kWidth / kLanes>;

/// codec::e2m1_bits of two numbers, given times 2^-14, in the halves of a word. e2m1 has the leading bits of fp16, and
/// the scaling makes the smallest normal numbers of both coincide. No bf16 from 0.25 on loses bits here. NaN gives +6.
__device__ inline std::uint32_t e2m1_codes(float low, float high) {
  const std::uint32_t halves = fp16_pair(low, high);
  const std::uint32_t magnitudes = halves & 0x7FFF7FFFu;
  const std::uint32_t rounded = magnitudes + 0x00FF00FFu + (magnitudes >> 9 & 0x00010001u);
  return __vminu2(rounded >> 9 & 0x007F007Fu, 0x00070007u) | (halves >> 12 & 0x00080008u);
}

/// Mxfp4::encode of a group by its lanes. x is rounded to bf16 first.
template <int kLanes>
__device__ Part<kLanes> encode(const float (&x)[kWidth / kLanes]) {
  std::uint32_t pairs[kWidth / kLanes / 2];
  float amax = round_channels(x, pairs);
  if constexpr (kLanes > kGroups) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 1));
  const int exponent = exponent_over_6(amax);
  // 2^(-14 - exponent), which may be a denormal
  const float by = exponent <= 112 ? pow2_normal(-14 - exponent) : codec::bits_float(1u << (135 - exponent));
  Part<kLanes> part;
#pragma unroll
  for (int i = 0; i < kLaneWords<kLanes>; ++i) {
    std::uint32_t bytes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::uint32_t pair = pairs[4 * i + j];
      const std::uint32_t codes = e2m1_codes(low_value(pair) * by, high_value(pair) * by);
      bytes[j] = codes | codes >> 12;
    }
    part.codes[i] =
        permute_bytes(permute_bytes(bytes[0], bytes[1], 0x0040u), permute_bytes(bytes[2], bytes[3], 0x0040u), 0x5410u);
  }
  part.scale = static_cast<std::uint32_t>(exponent + 127);
  return part;
}

/// Encodes a head of a token into shared memory; the lanes of the head work together. Returns whether it is in range.
template <int kLanes>
__device__ bool prepare_head(Queries& s, const TokenTile& tile, const RawPart<kLanes>& raw, int head, int part) {
  static_assert(kLanes == kGroups || kLanes == 2 * kGroups);
  constexpr int kWords = kLaneWords<kLanes>;
  const float weight = raw.weight;
  Part<kLanes> group;
  if (tile.p.q.dtype != DType::u8) {
    float x[kWidth / kLanes];
    channels_of(raw, x);
    if (tile.kind().hadamard) transform(x);
    group = encode<kLanes>(x);
  } else {
    const std::uint32_t words[4] = {raw.words[0].x, raw.words[0].y, raw.words[0].z, raw.words[0].w};
#pragma unroll
    for (int i = 0; i < kWords; ++i) group.codes[i] = words[i];
    group.scale = raw.scale;
  }

  const int c = part * kGroups / kLanes;  // the group
  std::uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) all |= group.codes[i];
  const bool any = (all & ~kSigns) != 0;
  std::uint32_t largest = group.scale, scales = group.scale << (8 * c);
  bool any_in_head = any;
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, lane));
    scales |= __shfl_xor_sync(kAllLanes, scales, lane);
    any_in_head |= static_cast<bool>(__shfl_xor_sync(kAllLanes, static_cast<int>(any_in_head), lane));
  }
  const int below = static_cast<int>(largest - group.scale);
  bool fits = !any || (below <= kQueryShift && largest >= kMinQueryScale && largest <= kMaxQueryScale);
  const float scaled =
      any_in_head && fits ? weight * pow2_normal(static_cast<int>(largest) - 127 - kQueryShift - 1) : 0.0f;
  const float size = fabsf(scaled);
  fits = fits && fabsf(weight) < __builtin_huge_valf() &&
         (weight == 0.0f || !any_in_head || (size >= kMinWeight && size <= kMaxWeight));

  const std::uint32_t times = (1u << kQueryShift) >> min(below, kQueryShift);
  const int row = operand_row(head), first = part * kWords;  // of the head's words
#pragma unroll
  for (int i = 0; i < 2 * kWords; ++i) {
    const int chunk = 2 * (first % kSteps) + i;
    *reinterpret_cast<std::uint32_t*>(&s.q[row * kWidth + 16 * (chunk ^ (row % 8)) + 4 * c]) =
        signed_quad(group.codes[i / 2] >> (16 * (i % 2)), times);
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) s.codes[head][first + i] = group.codes[i];
  if (part == 0) {
    s.weights[head / ops::kChainHeads][head % ops::kChainHeads] = kWeightFactor * scaled;
    s.scales[head] = scales;
    s.given_weights[head] = weight;
  }
  return fits;
}

}  // namespace kv4::cuda::mxfp4
