// Index scores of mxfp4 keys of 128 channels on Hopper: integer matrix products, exact, so that the bits are those of
// ops/score_row.h.
//
// A key's codes times 2 are whole numbers up to 12. With its largest group scale as the measure, a group d binades
// below it is shifted left by 2 - d: up to 48, and 2 .. 98 with a bias of 50, which makes them unsigned. A query's head
// likewise, 3 - d and up to 96, signed. Their products add up to less than 2^22, in integers, which fp32 holds exactly:
// what the defined group sums in fp32 give, too. Powers of two come off: a head's goes into its weight, a key's is
// applied to the total. Groups of zeros fit any scale. A warp whose 32 keys do not keep to two binades, or a token
// whose heads do not keep to three or whose scales and weights come near the ends of fp32, takes sum_slowly instead.
//
// A warpgroup takes 128 keys at a time, 32 of each warp, as two tiles of 64 keys x 64 heads: 5 wgmma of m64n64k32 each,
// the first of which takes off what the bias will add. Keys are the register operand: lane c of a quad loads the 16
// bytes of its row's group c and supplies them as the k-steps' channels 4c .. 4c + 3 and 16 + 4c .. 16 + 4c + 3;
// queries lie in shared memory with their channels in that order. Two byte permutes look up four codes: the packed
// nibbles are the selector, whose top bit (the sign) turns the looked-up byte into zero. Heads are ordered so that the
// accumulators of a lane are one chain of heads in its order. An accumulator's bits, read as a float, are its value
// times 2^-149, or NaN if it is negative: one saturating addition of zero is the relu.
//
// Pipeline: a thread block of four warpgroups per multiprocessor, each warpgroup on its own keys: while one's products
// are under way, others expand keys or add heads. Each warp has three units' keys on their way into its own ring
// (cp.async), no barrier but the warp's own. All blocks take an equal run of units from the list of all tokens' units.
//
// Bound by instructions: about 240 per warp and 16 keys, of which 64 add heads and 72 look up codes, at 2.3 per clock;
// the matrix unit is busy 35 % of the time and takes its share of the registers' ports. 18 % of the warps' time was
// waiting at the ends of tokens, for warpgroups do not run equally fast. 32,768 keys of each of 128 requests: 117 us on
// an H200 at 1.75 GHz, 2026-11-15, 6.4 clocks a key where the memory would allow one in 4.
#include <cstdint>

#include "backend/cuda/index_units.cuh"

namespace kv4::cuda {
namespace {

constexpr int kGroups = kQuad, kGroupChannels = kWidth / kGroups, kKeyBytes = kWidth / 2;
constexpr int kStages = 4;
using Keys = KeyStream<kKeyBytes, kStages>;
constexpr int kSteps = 4;
constexpr int kKeyShift = 2, kQueryShift = 3, kBias = 50;
constexpr std::uint32_t kBiases = kBias * 0x01010101u, kSigns = 0x88888888u;
constexpr std::uint32_t kLowCodes = 0x03020100u, kHighCodes = 0x0C080604u;  // e2m1_double of codes 0 to 3, 4 to 7
// The bias adds kBias times the sum of a query's head. A k-step of its own takes it off: keys of kBias and, in the
// other half of its channels, of 5 * kBias, against bytes that add up to minus the sum, five times the latter counted.
constexpr int kMostSum = 6 * 16 * 125;
static_assert(kWidth * (12 << kKeyShift) * (12 << kQueryShift) < 1 << 22, "negative ones are NaN");
static_assert((12 << kKeyShift) < kBias && kBias + (12 << kKeyShift) < 128, "a looked-up byte has no sign");

// Within these every intermediate result is a normal number and no sum overflows: a key's largest scale byte, a head's,
// and its weight with the head's scale in it.
constexpr std::uint32_t kLeastKeyScale = 64, kKeyScales = 128;
constexpr std::uint32_t kLeastQueryScale = 82, kMostQueryScale = 172;
constexpr float kLeastWeight = 0x1p-45f, kMostWeight = 0x1p35f;
// Heads are added up times 2^-kSumShift, so that weights times kWeightFactor, against accumulators read as floats, are
// floats too.
constexpr int kSumShift = 59;
constexpr float kWeightFactor = 0x1p90f;  // 2^(149 - kSumShift)

struct Shared {
  std::uint8_t q[2][kHeads * kWidth];  // matrix operands, 128-byte rows with swizzled chunks: queries; bias (2 chunks)
  std::uint8_t ring[kScoreWarps][kStages][Keys::kStageBytes];
  float weights[kGroups][ops::kChainHeads];    // [chain]: the head's weight times its scale
  std::uint32_t codes[kHeads][kKeyBytes / 4];  // as encoded, for sum_slowly
  std::uint32_t scales[kHeads];
  float given_weights[kHeads];
  ShareRoom share;
};
static_assert(offsetof(Shared, q) == 0 && offsetof(Shared, ring) % 16 == 0);

// --- codes to bytes

/// The permute reads 16 bits of its selector; __byte_perm would mask them once more.
__device__ std::uint32_t permute(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  std::uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

/// kBias + value of each code, under one scale.
struct Lookup {
  std::uint32_t positive_low, positive_high, negative_low, negative_high;

  /// times: a power of two.
  __device__ explicit Lookup(std::uint32_t times)
      : positive_low(kBiases + kLowCodes * times),
        positive_high(kBiases + kHighCodes * times),
        negative_low(kBiases - kLowCodes * times),
        negative_high(kBiases - kHighCodes * times) {}
};

/// Two quads of bytes from 8 codes.
__device__ void expand(const Lookup& t, std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  const std::uint32_t flipped = codes ^ kSigns;
  // Of two bytes one is zero. A sum: on either pipe.
  low = permute(t.positive_low, t.positive_high, codes) + permute(t.negative_low, t.negative_high, flipped);
  high =
      permute(t.positive_low, t.positive_high, codes >> 16) + permute(t.negative_low, t.negative_high, flipped >> 16);
}

/// Signed bytes of 4 codes, without a bias: up to 96 would not fit beside one.
__device__ std::uint32_t signed_quad(std::uint32_t codes, std::uint32_t times) {
  const std::uint32_t magnitudes = permute(kLowCodes * times, kHighCodes * times, codes & ~kSigns);
  const std::uint32_t signs = permute(0x0000FF00u, 0, codes >> 3 & 0x1111u);
  return __vsub4(magnitudes ^ signs, signs);
}

__device__ bool any_code(const uint4& codes) { return ((codes.x | codes.y | codes.z | codes.w) & ~kSigns) != 0; }

// --- the defined arithmetic, for what does not fit the fast one

/// One chain of a key's heads.
__device__ __noinline__ float sum_slowly(const Shared& s, const std::uint8_t* key, const std::uint8_t* scale, int chain,
                                         int num_heads) {
  const Lookup plain(1);
  float sum = 0.0f;
  for (int head = chain * ops::kChainHeads; head < min((chain + 1) * ops::kChainHeads, num_heads); ++head) {
    float dot = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      std::uint32_t products = 0, k_sum = 0, q_sum = 0;
      for (int i = 0; i < 4; ++i) {
        std::uint32_t k[2], q[2];
        expand(plain, reinterpret_cast<const std::uint32_t*>(key)[4 * g + i], k[0], k[1]);
        expand(plain, s.codes[head][4 * g + i], q[0], q[1]);
        for (int half = 0; half < 2; ++half) {
          products = __dp4a(k[half], q[half], products);
          k_sum = __dp4a(k[half], 0x01010101u, k_sum);
          q_sum = __dp4a(q[half], 0x01010101u, q_sum);
        }
      }
      // (k + bias) (q + bias), 32 of them
      const int exact = static_cast<int>(products) - kBias * static_cast<int>(k_sum + q_sum) + 32 * kBias * kBias;
      const float q_scale = codec::ue8m0_value(static_cast<std::uint8_t>(s.scales[head] >> (8 * g)));
      dot = dot + static_cast<float>(exact) * (codec::ue8m0_value(scale[g]) * 0.25f) * q_scale;
    }
    sum = codec::fused(s.given_weights[head], ops::relu(dot), sum);
  }
  return sum;
}

// --- queries

// A quad prepares a head, a lane its group c: half of the block's warps. If all of them did, by eight lanes a head,
// blocks that read the same keys would run in step and ask for them at the same time.
using RawGroup = RawChannels<kGroupChannels>;

struct Group {
  uint4 codes;
  std::uint32_t scale;
};

/// load_channels, or a lane's encoded ones.
__device__ RawGroup load_query(const ops::IndexParams& p, std::int64_t token, int head, int c) {
  RawGroup raw = load_channels<kGroupChannels>(p, token, head, c);
  if (p.q.dtype != DType::u8 || head >= p.num_heads) return raw;
  const std::int64_t at = token * p.q.row_stride + head * kKeyBytes + 16 * c;
  raw.words[0] = *reinterpret_cast<const uint4*>(static_cast<const std::uint8_t*>(p.q.data) + at);
  raw.scale = static_cast<const std::uint8_t*>(p.q_scale.data)[token * p.q_scale.row_stride + head * kGroups + c];
  return raw;
}

/// codec::e2m1_bits of two numbers times 2^14, in the halves of a word: e2m1 is how fp16 begins, and 2^-14 the least
/// normal number of both. No bf16 from 0.25 on loses bits here. NaN: +6.
__device__ std::uint32_t e2m1_codes(float low, float high) {
  std::uint32_t halves;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  const std::uint32_t magnitudes = halves & 0x7FFF7FFFu;
  const std::uint32_t rounded = magnitudes + 0x00FF00FFu + (magnitudes >> 9 & 0x00010001u);
  return __vminu2(rounded >> 9 & 0x007F007Fu, 0x00070007u) | (halves >> 12 & 0x00080008u);
}

/// Mxfp4::encode. x is rounded to bf16 first.
__device__ Group encode(const float (&x)[kGroupChannels]) {
  std::uint32_t pairs[kGroupChannels / 2];
  const int exponent = exponent_over_6(round_channels(x, pairs));
  // 2^(-14 - exponent), which may be a denormal
  const float by = exponent <= 112 ? pow2_normal(-14 - exponent) : codec::bits_float(1u << (135 - exponent));
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t bytes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::uint32_t pair = pairs[4 * i + j];
      const std::uint32_t codes = e2m1_codes(low_value(pair) * by, high_value(pair) * by);
      bytes[j] = codes | codes >> 12;
    }
    words[i] = permute(permute(bytes[0], bytes[1], 0x0040u), permute(bytes[2], bytes[3], 0x0040u), 0x5410u);
  }
  return {{words[0], words[1], words[2], words[3]}, static_cast<std::uint32_t>(exponent + 127)};
}

/// Word c of the 16 bytes that `sum` is spread over, as evenly as can be.
__device__ std::uint32_t spread(int sum, int c) {
  const int each = sum >> 4, rest = sum & 15;
  std::uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= static_cast<std::uint32_t>((each + (4 * c + i < rest)) & 0xFF) << (8 * i);
  return word;
}

/// A head of a token into shared memory, made by a quad. Whether the fast arithmetic holds for it.
__device__ bool prepare_head(Shared& s, const IndexTile& tile, const RawGroup& raw, int head, int c) {
  const float weight = raw.weight;
  Group group{raw.words[0], raw.scale};
  if (tile.p.q.dtype != DType::u8) {
    float x[kGroupChannels];
    channels_of(raw, tile.p.q.dtype, x);
    if (tile.kind().hadamard) transform(x);
    group = encode(x);
  }

  const bool any = any_code(group.codes);
  std::uint32_t most = group.scale, scales = group.scale << (8 * c);
  bool any_in_head = any;
#pragma unroll
  for (int lane = 1; lane < kGroups; lane *= 2) {
    most = max(most, __shfl_xor_sync(kAllLanes, most, lane));
    scales |= __shfl_xor_sync(kAllLanes, scales, lane);
    any_in_head |= static_cast<bool>(__shfl_xor_sync(kAllLanes, static_cast<int>(any_in_head), lane));
  }
  const int below = static_cast<int>(most - group.scale);
  bool fits = !any || (below <= kQueryShift && most >= kLeastQueryScale && most <= kMostQueryScale);
  const float scaled =
      any_in_head && fits ? weight * pow2_normal(static_cast<int>(most) - 127 - kQueryShift - 1) : 0.0f;
  const float size = fabsf(scaled);
  fits = fits && fabsf(weight) < __builtin_huge_valf() &&
         (weight == 0.0f || !any_in_head || (size >= kLeastWeight && size <= kMostWeight));

  const std::uint32_t times = (1u << kQueryShift) >> min(below, kQueryShift);
  const std::uint32_t words[kSteps] = {group.codes.x, group.codes.y, group.codes.z, group.codes.w};
  const int row = operand_row(head);
  const auto at = [&](int operand, int chunk) {
    return reinterpret_cast<std::uint32_t*>(&s.q[operand][row * kWidth + 16 * (chunk ^ (row % 8)) + 4 * c]);
  };
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) {
    const std::uint32_t quad = signed_quad(words[i / 2] >> (16 * (i % 2)), times);
    *at(0, i) = quad;
    sum = __dp4a(static_cast<int>(quad), 0x01010101, sum);
  }
#pragma unroll
  for (int lane = 1; lane < kGroups; lane *= 2) sum += __shfl_xor_sync(kAllLanes, sum, lane);
  const int five_times = -sum / 6;
  *at(1, 0) = spread(-sum - 5 * five_times, c);
  *at(1, 1) = spread(five_times, c);
  fits = fits && abs(sum) <= kMostSum;
  *reinterpret_cast<uint4*>(&s.codes[head][4 * c]) = group.codes;
  if (c == 0) {
    s.weights[head / ops::kChainHeads][head % ops::kChainHeads] = kWeightFactor * scaled;
    s.scales[head] = scales;
    s.given_weights[head] = weight;
  }
  return fits;
}

// --- products

template <bool kAdd>
__device__ void multiply(std::int32_t (&d)[32], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                         std::uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, %37;"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),
        "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]),
        "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]),
        "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kAdd ? 1 : 0));
#endif
}

__device__ void multiply_tile(std::int32_t (&d)[32], const std::uint32_t (&a)[kSteps][4], std::uint64_t queries,
                              std::uint64_t bias) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply<false>(d, kBiases, kBiases, 5 * kBiases, 5 * kBiases, bias);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) multiply<true>(d, a[i][0], a[i][1], a[i][2], a[i][3], queries + (32 >> 4) * i);
  asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(d[i])::"memory");
#endif
}

/// One chain of heads of two keys.
__device__ void add_heads(const std::int32_t (&d)[32], const float (&weights)[ops::kChainHeads], float& first,
                          float& second) {
  const auto add = [](float& chain, std::int32_t product, float weight) {
    float relu;
    asm("add.rn.sat.f32 %0, %1, 0f00000000;" : "=f"(relu) : "f"(__int_as_float(product)));
    chain = codec::fused(weight, relu, chain);
  };
  first = second = 0.0f;
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; ++i) {
    const int at = i / 2 * 4 + i % 2;
    add(first, d[at], weights[i]);
    add(second, d[at + 2], weights[i]);
  }
}
/// Lane c of a quad gets byte c of each lane's word.
__device__ std::uint32_t transpose_quad(std::uint32_t word, int c) {
  const std::uint32_t pairs = permute(word, __shfl_xor_sync(kAllLanes, word, 1), c % 2 == 0 ? 0x6240u : 0x3715u);
  return permute(pairs, __shfl_xor_sync(kAllLanes, pairs, 2), c < 2 ? 0x5410u : 0x3276u);
}

__device__ std::uint32_t largest_byte(std::uint32_t word) {
  const std::uint32_t pair = __vmaxu2(word & 0x00FF00FFu, word >> 8 & 0x00FF00FFu);
  return max(pair & 0xFFFFu, pair >> 16);
}

/// Totals of a warp whose keys may not fit the fast arithmetic: the one it made, or the defined sum if a group that
/// counts is out of bounds. Keys of zeros are zero whatever their scales.
__device__ __noinline__ float score_odd(const Shared& s, const std::uint8_t* stage, int seen, float total, bool fast,
                                        int num_heads) {
  const int lane = static_cast<int>(threadIdx.x % 32), c = lane % kGroups;
  const std::uint8_t* scales = stage + Keys::kPayloadBytes;
  bool slow = !fast;
  for (int key = lane / kGroups; key < min(seen, kWarpKeys); key += 8) {
    const std::uint32_t most = largest_byte(*reinterpret_cast<const std::uint32_t*>(scales + kGroups * key));
    slow |= (most - scales[kGroups * key + c] > kKeyShift || most - kLeastKeyScale >= kKeyScales) &&
            any_code(*reinterpret_cast<const uint4*>(stage + kKeyBytes * key + 16 * c));
  }
  if (__any_sync(kAllLanes, slow)) {
    float sum[kRows];
    for (int i = 0; i < kRows; ++i) {
      const int key = lane / kGroups + 8 * i;
      sum[i] = sum_slowly(s, stage + kKeyBytes * key, scales + kGroups * key, c, num_heads);
    }
    return codec::canonical_nan(add_chains(sum, c));
  }
  const int mine = lane / kGroups + 8 * c;
  const std::uint32_t most = largest_byte(*reinterpret_cast<const std::uint32_t*>(scales + kGroups * mine));
  return most - kLeastKeyScale >= kKeyScales ? 0.0f : total;
}

/// Units [first, first + count) of a token: the queries' part of Shared is written anew.
__device__ void score_units(Shared& s, const IndexTile& tile, const Pages& pages, int token, int first, int count,
                            int request, int scored) {
  const int warp = static_cast<int>(threadIdx.x / 32), warpgroup = warp / 4;
  const int lane = static_cast<int>(threadIdx.x % 32), c = lane % kGroups;
  const int units = (count - warpgroup + kWarpgroups - 1) / kWarpgroups;
  Keys keys(s.ring[warp][0], pages, request, first + warpgroup, units, scored);
  static_assert(kScoreThreads >= kHeads * kGroups && kHeads * kGroups % 32 == 0);
  const int head = static_cast<int>(threadIdx.x) / kGroups;
  const RawGroup raw = load_query(tile.p, tile.first + token, head, c);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) keys.issue(i);
  const bool fits = head >= kHeads || prepare_head(s, tile, raw, head, c);
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  const bool fast = __syncthreads_and(fits);
  const std::uint64_t queries = operand_of(s.q[0]), bias = operand_of(s.q[1]);
  float weights[ops::kChainHeads];
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; ++i) weights[i] = s.weights[c][i];
  int key = keys.first_key(0) + lane / kGroups + 8 * c;  // whose score this lane writes
  float* to = tile.row(token) + key;
  float* const maxima = tile.has_maxima && scored > kRowNumbers ? tile.maxima(token) : nullptr;
  const int group = group_size(scored);

  for (int i = 0; i < units; ++i, key += kStep, to += kStep) {
    Keys::wait();
    keys.issue(i + kStages - 1);
    const std::uint32_t stage = keys.stage(i);
    const std::uint32_t scales = load_shared4(stage + Keys::kPayloadBytes + kGroups * (lane / kGroups + 8 * c));
    const std::uint32_t most = largest_byte(scales), below = most * 0x01010101u - scales;
    static_assert(kKeyShift == 2 && kKeyScales == 128);
    const bool odd =
        ((((below & 0x7F7F7F7Fu) + 0x7D7D7D7Du) | below) & 0x80808080u) != 0 || most - kLeastKeyScale >= kKeyScales;
    const std::uint32_t shifts = transpose_quad(below, c);

    float sum[kRows];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t a[kSteps][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int row = 2 * half + k;
        const uint4 codes = load_shared16(stage + 512 * row + 16 * lane);
        const Lookup lookup((1u << kKeyShift) >> (shifts >> (8 * row) & 31u));
        expand(lookup, codes.x, a[0][k], a[0][2 + k]);
        expand(lookup, codes.y, a[1][k], a[1][2 + k]);
        expand(lookup, codes.z, a[2][k], a[2][2 + k]);
        expand(lookup, codes.w, a[3][k], a[3][2 + k]);
      }
      std::int32_t products[32] = {};  // no instruction: the first step does not read them
      multiply_tile(products, a, queries, bias);
      add_heads(products, weights, sum[2 * half], sum[2 * half + 1]);
    }
    float total = add_chains(sum, c) * codec::bits_float((most + (kSumShift - kKeyShift - 1)) << 23);
    if (__any_sync(kAllLanes, odd || !fast))
      total = score_odd(s, s.ring[warp][i % kStages], scored - keys.first_key(i), total, fast, tile.p.num_heads);
    if (key < scored) *to = total;
    if (maxima != nullptr) write_maxima(maxima, keys.first_key(i), group, key < scored ? total : kNoScore);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();  // the queries may change
}
__global__ void __launch_bounds__(kScoreThreads, 1)
    score_mxfp4_keys(const __grid_constant__ IndexTile tile, const __grid_constant__ Pages pages) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  touch(tile);
  touch(pages);
  wait_for_previous();
  let_next_start();
  // Those it would begin with if all tokens were equally long, while it looks for its share.
  prefetch_queries(tile, static_cast<int>(std::int64_t{blockIdx.x} * tile.count / gridDim.x));
  Share share = find_share(s.share, tile);
  while (share.count > 0) {
    const ops::StepRecord record = tile.p.step.tokens[tile.first + share.token];
    const int scored = tile.scored(record);
    const int count = min(share.count, (scored + kUnitKeys - 1) / kUnitKeys - share.unit);
    if (count < share.count) prefetch_queries(tile, share.token + 1);
    if (count > 0) score_units(s, tile, pages, share.token, share.unit, count, record.row, scored);
    share = {share.token + 1, 0, share.count - count};
  }
  if (tile.fill) fill_rest(tile);
}

}  // namespace

bool can_score_mxfp4(const ops::IndexParams& p) {
  return p.layer.kinds[p.kind].page.format == Format::mxfp4 && can_stream_keys(p, kKeyBytes);
}

cudaError_t score_mxfp4(const IndexTile& tile, cudaStream_t stream) {
  const cudaError_t status = cudaFuncSetAttribute(score_mxfp4_keys, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(sizeof(Shared)));
  if (status != cudaSuccess) return status;
  return launch<sizeof(Shared)>(score_mxfp4_keys, score_blocks(tile), kScoreThreads, stream, tile, make_pages(tile));
}

}  // namespace kv4::cuda
