// Index scores of mxfp4 keys of 128 channels on Hopper: integer matrix products, exact, so that the bits are those of
// ops/score_row.h.
//
// A key's codes times 2 are whole numbers up to 12. With its largest group scale as the measure, a group d binades
// below it is shifted left by 3 - d: even numbers up to 96. A query's head likewise, odd ones too. Their products add
// up to less than 2^22, in integers, which fp32 holds exactly: what the defined group sums in fp32 give, too. Powers of
// two come off: a head's goes into its weight, a key's is applied to the total. Groups of zeros fit any scale. Keys
// that do not keep to two binades, and tokens whose heads do not keep to three or whose scales and weights come near
// the ends of fp32, are left to score_odd, at the end of a warp's share of a token.
//
// A warpgroup takes 128 keys at a time, 32 of each warp, as two tiles of 64 keys x 64 heads: 4 wgmma of m64n64k32 each.
// Keys are the register operand: lane c of a quad loads the 16 bytes of its row's group c and supplies them as the
// k-steps' channels 4c .. 4c + 3 and 16 + 4c .. 16 + 4c + 3; queries lie in shared memory with their channels in that
// order. Two byte permutes look up four codes: the packed nibbles are the selector, whose top bit (the sign) turns the
// looked-up byte into zero. Heads are ordered so that the accumulators of a lane are one chain of heads in its order.
// An accumulator's bits, read as a float, are its value times 2^-149, or NaN if it is negative: one saturating addition
// of zero is the relu.
//
// Pipeline: a CTA of four warpgroups per SM, of two where rows are short and nothing is selected
// (key_pipeline.cuh, crews), each warpgroup on its own keys. While the products of a tile are under way the keys of the
// next are expanded, so that a warpgroup hardly waits for the tensor cores; one set of accumulators, weights from
// shared memory, or registers would not do. Each warp has three units' keys on their way into its own ring (cp.async),
// no barrier but the warp's own. All blocks take an equal run of units from the list of all tokens' units.
//
// Products under way in a loop need a trip count that the compiler knows to be the same in all of a warp's lanes, or it
// waits after each wgmma.
//
// Bound by power, at 1.72 GHz of 1.98 (docs/performance.md), and by no pipe alone: about 235 instructions per warp and
// 16 keys, of which 64 add heads and 72 look up codes, at 2.5 per clock; 7 % fewer of them gave 0 to 3 %. Permutes and
// shifts share a pipe of 16 lanes, so complements and sums are multiplications, on another.
#include <cstdint>

#include "backend/cuda/index/key_pipeline.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/topk/exact_select.cuh"
#include "backend/cuda/topk/fast_select.cuh"

namespace kv4::cuda {
namespace {

constexpr int kGroups = kQuad, kKeyBytes = kWidth / 2;
constexpr int kStages = 4;
template <class Crew>
using Keys = KeyStream<Crew, kKeyBytes, kStages, true>;
using FewKeys = KeyStream<WholeCrew, kKeyBytes, kStages, false>;
constexpr int kSteps = 4, kLookups = 4;
constexpr int kKeyShift = 2, kQueryShift = 3;
constexpr std::uint32_t kSigns = 0x88888888u;
constexpr std::uint32_t kLowCodes = 0x03020100u, kHighCodes = 0x0C080604u;  // e2m1_double of codes 0 to 3, 4 to 7
static_assert(kWidth * (24 << kKeyShift) * (12 << kQueryShift) < 1 << 22, "negative ones are NaN");
static_assert((24 << kKeyShift) < 128, "a looked-up byte has no sign");

// Within these every intermediate result is a normal number and no sum overflows: a key's largest scale byte, a head's,
// and its weight with the head's scale in it.
constexpr std::uint32_t kLeastKeyScale = 64, kKeyScales = 128;
constexpr std::uint32_t kLeastQueryScale = 82, kMostQueryScale = 172;
constexpr float kLeastWeight = 0x1p-45f, kMostWeight = 0x1p35f;
// Heads are added up times 2^-kSumShift, so that weights times kWeightFactor, against accumulators read as floats, are
// floats too.
constexpr int kSumShift = 59;
constexpr float kWeightFactor = 0x1p90f;  // 2^(149 - kSumShift)

// --- codes to bytes

/// The permute reads 16 bits of its selector; __byte_perm would mask them once more.
__device__ std::uint32_t permute(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  std::uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

/// Twice the value of each code under one scale, as a signed byte, in two parts of which one is zero, whatever the
/// code: a permute makes zero of a byte without its top bit where the selector's is set. So it looks up positive codes'
/// bytes with the codes, negative ones' with their complements, which count from 7 down; the latter lie in 7 bits, one
/// to the right of their place.
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

/// a * b + c on the pipe that the permutes do not need.
__device__ std::uint32_t multiply_add(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t out;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

/// Two quads of bytes from 8 codes.
__device__ void expand(const Lookup& t, std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  const auto quad = [&](std::uint32_t selector) {
    const std::uint32_t complement = multiply_add(selector, 0xFFFF, 0xFFFF);  // of its 16 bits
    return multiply_add(permute(t.negative_low, t.negative_high, complement), 2,
                        permute(t.positive_low, t.positive_high, selector));
  };
  low = quad(codes);
  high = quad(codes >> 16);
}

/// Signed bytes of 4 codes, odd ones too.
__device__ std::uint32_t signed_quad(std::uint32_t codes, std::uint32_t times) {
  const std::uint32_t magnitudes = permute(kLowCodes * times, kHighCodes * times, codes & ~kSigns);
  const std::uint32_t signs = permute(0x0000FF00u, 0, codes >> 3 & 0x1111u);
  return __vsub4(magnitudes ^ signs, signs);
}

__device__ bool any_code(const uint4& codes) { return ((codes.x | codes.y | codes.z | codes.w) & ~kSigns) != 0; }

// --- shared memory

struct Queries {
  std::uint8_t q[kHeads * kWidth];               // a matrix operand, 128-byte rows with swizzled chunks
  float weights[kGroups][ops::kChainHeads + 4];  // [chain]: the head's weight times its scale; no bank conflicts
  std::uint32_t codes[kHeads][kKeyBytes / 4];    // as encoded, for sum_slowly
  std::uint32_t scales[kHeads];
  float given_weights[kHeads];
  Lookup lookups[kLookups];  // Lookup of groups so many binades below
};
static_assert(offsetof(Queries, q) == 0 && offsetof(Queries, weights) % 16 == 0 &&
              offsetof(Queries, lookups) % 16 == 0);

template <class Crew>
struct alignas(16) Shared : Queries {
  alignas(16) typename Keys<Crew>::Ring ring;
  ShareRoom share;
};

// --- the defined arithmetic, for what does not fit the fast one

/// One chain of a key's heads.
__device__ __noinline__ float sum_slowly(const Queries& s, const std::uint8_t* key, const std::uint8_t* scale,
                                         int chain, int num_heads) {
  constexpr Lookup plain(1);
  float sum = 0.0f;
  for (int head = chain * ops::kChainHeads; head < min((chain + 1) * ops::kChainHeads, num_heads); ++head) {
    float dot = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      int products = 0;  // of bytes that are four times the values
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

// --- queries

// kLanes lanes prepare a head: four, a group each, in half of the block's warps; or eight in all of them, which takes
// less time, but then blocks that read the same keys run in step and ask for them at the same time.
template <int kLanes>
constexpr int kLaneWords = kKeyBytes / 4 / kLanes;

/// Codes of a lane's channels and their group's scale.
template <int kLanes>
struct Part {
  std::uint32_t codes[kLaneWords<kLanes>], scale;
};

template <int kLanes>
using RawPart = RawChannels<kWidth / kLanes>;

/// codec::e2m1_bits of two numbers times 2^14, in the halves of a word: e2m1 is how fp16 begins, and 2^-14 the least
/// normal number of both. No bf16 from 0.25 on loses bits here. NaN: +6.
__device__ std::uint32_t e2m1_codes(float low, float high) {
  std::uint32_t halves;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  const std::uint32_t magnitudes = halves & 0x7FFF7FFFu;
  const std::uint32_t rounded = magnitudes + 0x00FF00FFu + (magnitudes >> 9 & 0x00010001u);
  return __vminu2(rounded >> 9 & 0x007F007Fu, 0x00070007u) | (halves >> 12 & 0x00080008u);
}

/// Mxfp4::encode of a group, made by its lanes. x is rounded to bf16 first.
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
    part.codes[i] = permute(permute(bytes[0], bytes[1], 0x0040u), permute(bytes[2], bytes[3], 0x0040u), 0x5410u);
  }
  part.scale = static_cast<std::uint32_t>(exponent + 127);
  return part;
}

/// A head of a token into shared memory, made by its lanes. Whether the fast arithmetic holds for it.
template <int kLanes>
__device__ bool prepare_head(Queries& s, const IndexTile& tile, const RawPart<kLanes>& raw, int head, int part) {
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
  std::uint32_t most = group.scale, scales = group.scale << (8 * c);
  bool any_in_head = any;
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) {
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

// --- products

template <bool kAdd>
__device__ void multiply(std::int32_t (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, %37;"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),
        "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]),
        "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]),
        "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
#endif
}

using Operand = std::uint32_t[kSteps][4];
using Products = std::int32_t[32];

/// Starts the products of a tile; neither they nor the keys may be touched before wait_for_products.
__device__ void start_products(Products& d, const Operand& a, std::uint64_t queries) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply<false>(d, a[0], queries);
#pragma unroll
  for (int i = 1; i < kSteps; ++i) multiply<true>(d, a[i], queries + (32 >> 4) * i);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

__device__ void wait_for_products(Products& d) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(d[i])::"memory");
#endif
}

/// One chain of heads of two keys.
__device__ void add_heads(const Products& d, std::uint32_t shared, int chain, float& first, float& second) {
  const std::uint32_t from = shared + offsetof(Queries, weights) + sizeof(Queries::weights[0]) * chain;

  const auto add = [](float& sum, std::int32_t product, float weight) {
    float relu;
    asm("add.rn.sat.f32 %0, %1, 0f00000000;" : "=f"(relu) : "f"(__int_as_float(product)));
    sum = codec::fused(weight, relu, sum);
  };
  first = second = 0.0f;
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; i += 4) {
    const uint4 four = load_shared16(from + sizeof(float) * i);
    const float weights[4] = {codec::bits_float(four.x), codec::bits_float(four.y), codec::bits_float(four.z),
                              codec::bits_float(four.w)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = (i + j) / 2 * 4 + j % 2;
      add(first, d[at], weights[j]);
      add(second, d[at + 2], weights[j]);
    }
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

/// Whether a key's largest scale byte is out of bounds.
__device__ bool is_extreme(std::uint32_t most) { return most - kLeastKeyScale >= kKeyScales; }

/// The scales of a warp's unit: of the lane's own key, and what they say of its group of the quad's four keys.
struct UnitScales {
  std::uint32_t most, below;  // the largest scale byte, how far each one is below
  std::uint32_t lookups;      // offsets of lookups, a byte per key

  UnitScales() = default;
  __device__ UnitScales(std::uint32_t scales, int c)
      : most(largest_byte(scales)),
        below(most * 0x01010101u - scales),
        // If a group is further below, any lookup does: its codes are zeros or its unit is odd.
        lookups(transpose_quad((below & 0x03030303u) * sizeof(Lookup), c)) {}

  __device__ bool are_odd() const {
    static_assert(kKeyShift == 2 && kLookups == 4);
    return (((below & 0x7F7F7F7Fu) + 0x7D7D7D7Du) | below) & 0x80808080u || is_extreme(most);
  }
};

/// A lane's part of a tile of a unit, of which this lane's codes begin at `stage`. is_wanted: always; what the compiler
/// takes for a branch it does not move behind the wait for products that follows.
__device__ void expand_tile(std::uint32_t shared, std::uint32_t stage, const UnitScales& scales, int tile,
                            bool is_wanted, Operand& a) {
  if (is_wanted) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = 2 * tile + k;
      const uint4 codes = load_shared16(stage + 512 * row);
      const Lookup lookup(
          load_shared16(shared + offsetof(Queries, lookups) + permute(scales.lookups, 0, 0x4440u + row)));
      expand(lookup, codes.x, a[0][k], a[0][2 + k]);
      expand(lookup, codes.y, a[1][k], a[1][2 + k]);
      expand(lookup, codes.z, a[2][k], a[2][2 + k]);
      expand(lookup, codes.w, a[3][k], a[3][2 + k]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) asm volatile("" : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3]));
  }
}

/// A warp's keys of `units` units, every kStep-th from first_key on, that may not fit the fast arithmetic: the score it
/// left, or the defined sum if a group that counts is out of bounds, or everywhere. Keys of zeros are zero whatever
/// their scales.
template <class Crew>
__device__ void score_odd(const Queries& s, const IndexTile& tile, const Pages& pages, const Share& share,
                          float* scores, int first_key, int units, bool everywhere) {
  const int scored = share.scored;
  const int lane = static_cast<int>(threadIdx.x % 32), c = lane % kGroups;
  const int own = static_cast<int>(Keys<Crew>::own_key());
  const std::int32_t* table = pages.table + std::int64_t{share.request} * pages.blocks_per_request;
  const std::uint32_t row = pages.row_of(first_key);
  float* const maxima = maxima_of(tile, share.token, scored);
  for (; units > 0 && first_key < scored; --units, first_key += Crew::kStep) {
    const std::int32_t block = table[first_key >> pages.block_shift];
    if (block < 0) continue;
    const std::uint8_t* keys = pages.payload_of(static_cast<std::uint32_t>(block)) + kKeyBytes * row;
    const std::uint8_t* scales = pages.scale_of(static_cast<std::uint32_t>(block)) + kGroups * row;
    const auto most_of = [&](int key) {
      return largest_byte(*reinterpret_cast<const std::uint32_t*>(scales + kGroups * key));
    };
    bool slow = everywhere;
    for (int key = lane / kGroups; key < min(scored - first_key, kWarpKeys); key += 8) {
      const std::uint32_t most = most_of(key);
      slow |= (most - scales[kGroups * key + c] > kKeyShift || is_extreme(most)) &&
              any_code(*reinterpret_cast<const uint4*>(keys + kKeyBytes * key + 16 * c));
    }
    const bool is_seen = first_key + own < scored;
    float* const to = scores + first_key + own;
    float total = 0.0f;
    if (__any_sync(kAllLanes, slow)) {
      float sum[kRows];
      for (int i = 0; i < kRows; ++i) {
        const int key = lane / kGroups + 8 * i;
        sum[i] = sum_slowly(s, keys + kKeyBytes * key, scales + kGroups * key, c, tile.p.num_heads);
      }
      total = codec::canonical_nan(add_chains(sum, c));
    } else if (is_seen && !is_extreme(most_of(own))) {
      total = *to;
    }
    if (is_seen) *to = total;
    if (maxima != nullptr) write_maxima(maxima, first_key, group_size(scored), is_seen ? total : kNoScore);
  }
}

/// Units of one token, its scores into `row`: the queries' part of Shared is written anew. Where the share was guessed,
/// and not rightly, renew(share) makes it right, or returns false: its token is another one, too.
template <class Keys, int kLanes, class Renew>
__device__ bool score_units(Shared<typename Keys::Crew>& s, const IndexTile& tile, const Pages& pages, Share& share,
                            const Guess& guess, float* row, Renew&& renew) {
  using Crew = typename Keys::Crew;
  static_assert(Crew::kThreads >= kHeads * kLanes && kHeads * kLanes % 32 == 0);
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));  // or addresses would be kept in registers from token to token
  const int warpgroup = thread / 128, lane = thread % 32, c = lane % kGroups, head = thread / kLanes;
  Keys keys = keys_of<Keys>(s.ring, pages, share, warpgroup);
  // Loads come back in order. Half crews gain by it (16 tokens of 8,192 keys 8.1 to 7.4 us), whole ones with a
  // selection lose (32,768 keys 25.2 to 25.9).
  constexpr bool kSmallFirst = Crew::kThreads < WholeCrew::kThreads;
  RawPart<kLanes> raw[1];
  QueryPlace<kKeyBytes, kWidth / kLanes>(tile, share.token, head, thread % kLanes).load(tile.p, raw);
  if constexpr (!kSmallFirst) keys.begin(guess.is_there ? guess.ids : keys.first_ids());
  SecondLook look(tile, keys, guess);
  if constexpr (kSmallFirst) keys.begin(guess.is_there ? guess.ids : keys.first_ids());
  const bool fits = head >= kHeads || prepare_head<kLanes>(s, tile, raw[0], head, thread % kLanes);
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  const bool holds = look.confirms(guess);
  bool fast = __syncthreads_and(fits && holds);
  if (guess.is_there && !fast) {
    fast = __syncthreads_and(fits);
    if (!__syncthreads_and(holds)) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      if (!renew(share)) return false;
      keys = keys_of<Keys>(s.ring, pages, share, warpgroup);
      keys.begin(keys.first_ids());
    }
  }
  const int scored = share.scored, units = units_of_warpgroup<Crew>(share, warpgroup);
  std::uint32_t shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(&s));
  asm("" : "+r"(shared));  // kept, not made anew where it is needed
  const std::uint64_t queries = operand_at(shared);
  float* const maxima = maxima_of(tile, share.token, scored);
  const int fast_units = __shfl_sync(kAllLanes, fast ? units : 0, 0);
  int first_odd = fast_units;  // the first unit with keys that do not fit
  // While the products of a tile are under way, the keys of the next are expanded.
  Products products = {};
  std::uint32_t most = 0;
  float sum[kRows];
  const auto finish_unit = [&](int i) {
    add_heads(products, shared, c, sum[2], sum[3]);
    const float total = add_chains(sum, c) * codec::bits_float((most + (kSumShift - kKeyShift - 2)) << 23);
    const int key = keys.first_key(i) + static_cast<int>(Keys::own_key());
    if (key < scored) row[key] = total;
    if (maxima != nullptr) write_maxima(maxima, keys.first_key(i), group_size(scored), key < scored ? total : kNoScore);
  };
  for (int i = 0; i < fast_units; ++i) {
    Operand a, b;
    const std::uint32_t stage = keys.take() + 16 * lane;
    const UnitScales scales(keys.scales(), c);
    keys.refill(i);
    if (__any_sync(kAllLanes, scales.are_odd() && keys.first_key(i) + static_cast<int>(Keys::own_key()) < scored))
      first_odd = min(first_odd, i);
    expand_tile(shared, stage, scales, 0, pages.block_shift >= 0, a);
    wait_for_products(products);
    if (i > 0) finish_unit(i - 1);
    most = scales.most;
    start_products(products, a, queries);
    expand_tile(shared, stage, scales, 1, pages.block_shift >= 0, b);
    wait_for_products(products);
    add_heads(products, shared, c, sum[0], sum[1]);
    start_products(products, b, queries);
  }
  wait_for_products(products);
  if (fast_units > 0) finish_unit(fast_units - 1);
  asm volatile("cp.async.wait_all;" ::: "memory");
  if (first_odd < units)
    score_odd<Crew>(s, tile, pages, share, row, keys.first_key(first_odd), units - first_odd, !fast);
  __syncthreads();  // the queries may change
  return true;
}

constexpr int kPreparing = kHeads * kGroups / 32;  // warps; with four lanes a head the others wait for them anyway

template <class Crew, int kLanes>
__global__ void __launch_bounds__(Crew::kThreads, WholeCrew::kThreads / Crew::kThreads)
    score_mxfp4_keys(const __grid_constant__ IndexTile tile, const __grid_constant__ Pages pages) {
  constexpr int kHelpers = Crew::kWarps - kPreparing;
  extern __shared__ __align__(1024) unsigned char bytes[];
  Shared<Crew>& s = *reinterpret_cast<Shared<Crew>*>(bytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  Guess guess;
  Share first = guess_share<Crew>(s.share, tile, guess);
  const Keys<Crew> keys = keys_of<Keys<Crew>>(s.ring, pages, first, warp / 4);
  if constexpr (kHelpers == 0) guess.ids = keys.guess_ids();
  touch(tile);
  touch(pages);
  fetch_queries(tile, first.token);
  if constexpr (kHelpers == 0) {
    keys.template fetch<kStages - 1>(guess.ids);
  } else {
    if (warp >= kPreparing) fetch_first_keys<Crew, kKeyBytes, kStages - 1, kHelpers>(first, pages, warp - kPreparing);
    guess.ids = keys.guess_ids();
  }
  if (thread < kLookups) s.lookups[thread] = Lookup((1u << kKeyShift) >> thread);
  grid_dependency_wait();
  launch_dependents();
  // Early, where the others would else do nothing.
  if (kHelpers > 0 && tile.fill && warp >= kPreparing) fill_rest(tile, thread - 32 * kPreparing, 32 * kHelpers);
  if (!guess.is_there) first = find_share_anew<Crew>(s.share, tile);
  for_each_share<Crew>(
      s.share, tile, first, guess, [&](int token) { fetch_queries(tile, token); },
      [&](Share& share, const Guess& guess) {
        return score_units<Keys<Crew>, kLanes>(s, tile, pages, share, guess, tile.row(share.token),
                                               [](Share&) { return false; });
      });
  if (kHelpers == 0 && tile.fill) fill_rest(tile, thread, Crew::kThreads);
}

// --- scores and selection

// A cluster takes a token of up to kRowNumbers keys. Scores go straight into the shared memory of its first block,
// which selects from them: no second launch, and nothing waits for memory between the two. For as many tokens as keep
// more than half of the SMs busy; fewer tokens' keys are better shared out over all of them (8,192 keys on
// an H200, 2026-11-16, in us: of 12 tokens 15.1 to 12.0, of 24 19.4 to 15.0, of 40 23.6 to 20.4, of 64 26.0 to 22.2, of
// 128 39.5 to 34.8, but of 8 10.8 to 11.8 and one by 16 blocks 8.8 to 9.5).

struct TopkShared {
  static constexpr int kThreads = kScoreThreads, kHeld = kRowNumbers / kThreads;
  Shared<WholeCrew> scorer;
  Selection<kThreads> selection;
  alignas(16) float row[kRowNumbers];
};
static_assert(sizeof(TopkShared) <= 227 << 10);

/// What take_best selects with, its lists where the scorer was.
struct TopkLists {
  static constexpr int kThreads = kScoreThreads, kHeld = TopkShared::kHeld, kWarpRoom = kListRoom / kScoreWarps;
  using Scores = float[kScoreWarps][kWarpRoom];
  using Entries = std::int32_t[kScoreWarps][kWarpRoom];
  static_assert(sizeof(Scores) + sizeof(Entries) <= sizeof(Shared<WholeCrew>));
  Selection<kThreads>& selection;
  Scores& scores;
  Entries& entries;

  __device__ explicit TopkLists(TopkShared& s)
      : selection(s.selection),
        scores(*reinterpret_cast<Scores*>(&s.scorer)),
        entries(*reinterpret_cast<Entries*>(reinterpret_cast<unsigned char*>(&s.scorer) + sizeof(Scores))) {}
};

__global__ void __launch_bounds__(kScoreThreads, 1)
    topk_of_mxfp4_keys(const __grid_constant__ IndexTile tile, const __grid_constant__ Pages pages, int blocks) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  TopkShared& s = *reinterpret_cast<TopkShared*>(bytes);
  arrive_first();
  const int token = static_cast<int>(blockIdx.x) / blocks, warp = static_cast<int>(threadIdx.x / 32);
  Guess guess;
  Share share = guess_share_of_cluster(tile, blocks, token, guess);
  touch(tile);
  touch(pages);
  fetch_queries(tile, token);
  if (warp >= kPreparing)
    fetch_first_keys<WholeCrew, kKeyBytes, kStages - 1, kScoreWarps - kPreparing>(share, pages, warp - kPreparing);
  guess.ids = keys_of<FewKeys>(s.scorer.ring, pages, share, warp / 4).guess_ids();
  s.selection.clear();
  if (threadIdx.x < kLookups) s.scorer.lookups[threadIdx.x] = Lookup((1u << kKeyShift) >> threadIdx.x);
  grid_dependency_wait();
  launch_dependents();
  wait_cluster();
  if (!guess.is_there) share = find_share_of_cluster(tile, blocks, token);
  if (share.count > 0)
    score_units<FewKeys, kGroups>(s.scorer, tile, pages, share, guess, shared_of(s, 0).row, [&](Share& anew) {
      anew = find_share_of_cluster(tile, blocks, token);
      return true;
    });
  arrive_cluster();
  if (block_in_cluster() > 0) return;
  wait_cluster();

  if (share.scored == 0) return take_whole_anew(tile, token);
  const int count = share.scored, top = tile.p.top;
  const Choice choice{tile, token, share.request};
  float held[TopkShared::kHeld];
  load_fours<kScoreThreads>(s.row, count, true, held);
  if (count % 4 != 0) leave_out_rest_of_fours<TopkLists>(count, held);
  TopkLists lists(s);
  const FoursSource<TopkLists> source{held, count};
  if (take_best(lists, source, find_top_bounds(lists, source, top), choice)) return;
  select_from_row(s.selection, s.row, count, Bounds(), choice);
}

}  // namespace

bool can_score_mxfp4(const ops::IndexParams& p) {
  return p.layer.kinds[p.kind].page.format == Format::mxfp4 && can_stream_keys(p, kKeyBytes);
}

namespace {

template <class Crew, int kLanes>
cudaError_t start(const IndexTile& tile, unsigned blocks, cudaStream_t stream) {
  return launch_scorer<Shared<Crew>>(score_mxfp4_keys<Crew, kLanes>, blocks, Crew::kThreads, tile, make_pages(tile),
                                     stream);
}

}  // namespace

cudaError_t score_mxfp4(const IndexTile& tile, cudaStream_t stream) {
  const unsigned blocks = score_blocks(tile);
  constexpr int kFewTokens = 4;
  const std::int64_t units = units_of(tile), few_units = tile.fill ? 1 : 32;  // of a block; filling delays helpers
  if (tile.count <= kFewTokens && units <= few_units * blocks && tile.p.step.num_items == tile.p.step.num_tokens)
    return start<WholeCrew, 2 * kGroups>(tile, blocks, stream);
  // Scores alone: a selection would leave room for two half crews on some SMs and for none on others. Of 16
  // units a block and more whole ones are as fast or faster.
  if (tile.fill && can_halve(tile, 8)) return start<HalfCrew, kGroups>(tile, blocks, stream);
  return start<WholeCrew, kGroups>(tile, blocks, stream);
}

int topk_blocks(const IndexTile& tile) { return can_score_mxfp4(tile.p) ? cluster_blocks(tile) : 0; }

cudaError_t topk_mxfp4(const IndexTile& tile, int blocks, cudaStream_t stream) {
  const cudaError_t status = cudaFuncSetAttribute(topk_of_mxfp4_keys, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(sizeof(TopkShared)));
  if (status != cudaSuccess) return status;
  const unsigned size = static_cast<unsigned>(blocks);
  return launch_clusters<sizeof(TopkShared)>(topk_of_mxfp4_keys, size, size * static_cast<unsigned>(tile.count),
                                             kScoreThreads, stream, tile, make_pages(tile), blocks);
}

}  // namespace kv4::cuda
