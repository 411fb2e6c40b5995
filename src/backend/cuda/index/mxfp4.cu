// Index scores of mxfp4 keys of 128 channels on Hopper. Integer matrix products are exact, so the scores have the bits
// of ops/score_row.h.
//
// A key's codes times 2 are whole numbers up to 12. The largest group scale of the key is the reference: a group d
// binades below it is shifted left by 3 - d, which gives even numbers up to 96. A query's head is shifted likewise, and
// its numbers may be odd. The products add up to less than 2^22 in integers. fp32 holds such sums exactly, so the group
// sums of ops/score_row.h in fp32 give the same. Powers of two are factored out: the power of a head goes into its
// weight, the power of a key multiplies the total. Groups of zeros fit any scale. A key is out of range if
// its groups span more than two binades, a token if its heads span more than three or its scales and weights are near
// the ends of fp32; score_out_of_range scores them after a warp's KV tiles of the token.
//
// A warpgroup takes a KV tile of 128 keys at a time, 32 of each warp, in two halves of 64 keys x 64 heads: 4 wgmma of
// m64n64k32 each. Keys are the register operand: lane c of a quad loads the 16 bytes of its row's group c and supplies
// them as channels 4c .. 4c + 3 and 16 + 4c .. 16 + 4c + 3 of the k-steps; queries lie in shared memory with their
// channels in that order. Two byte permutes look up four codes: the packed nibbles are the selector, and their top bit
// (the sign) turns the looked-up byte into zero. The order of heads makes the accumulators of a lane one chain of
// heads. The bits of an accumulator, read as a float, are its value times 2^-149, or NaN if the value is negative; one
// saturating addition of zero is the relu.
//
// Pipeline: one CTA of four warpgroups per SM; two warpgroups if rows are short and nothing is selected
// (warpgroups.cuh). Each warpgroup has its own keys. While the tensor cores multiply one half of a KV tile, the warps
// expand the codes of the next half, so a warpgroup hardly waits for the tensor cores. There is one set of accumulators
// and the weights stay in shared memory, because registers are short. Each warp copies keys of three KV tiles ahead
// into its own ring (cp.async) and needs no barrier but its own. All CTAs take equal ranges of the work tiles of all
// tokens.
//
// For wgmma in flight across loop iterations, the compiler must know that the trip count is the same in all lanes of a
// warp; otherwise it waits after each wgmma.
//
// Bound by power, at 1.72 GHz of 1.98 (docs/performance.md), and by no single pipe: about 235 instructions per warp and
// 16 keys at 2.5 per clock, of which 64 add heads and 72 look up codes; 7 % fewer instructions gave 0 to 3 %. Permutes
// and shifts share a pipe of 16 lanes, so complements and sums are multiplications, which use another pipe.
#include <cstdint>

#include "backend/cuda/index/epilogue.cuh"
#include "backend/cuda/index/grid.cuh"
#include "backend/cuda/index/kernels.h"
#include "backend/cuda/index/key_pipeline.cuh"
#include "backend/cuda/index/pages.cuh"
#include "backend/cuda/index/queries.cuh"
#include "backend/cuda/index/scheduler.cuh"
#include "backend/cuda/index/speculative_record.cuh"
#include "backend/cuda/index/warpgroups.cuh"
#include "backend/cuda/ptx/arithmetic.cuh"
#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/topk/radix_select.cuh"
#include "backend/cuda/topk/single_pass_select.cuh"

namespace kv4::cuda {
namespace {

constexpr int kGroups = kQuad, kKeyBytes = kWidth / 2;
constexpr int kStages = 4;
template <class Cta>
using Keys = KeyPipeline<Cta, kKeyBytes, kStages, true>;
using FewKeys = KeyPipeline<FourWarpgroups, kKeyBytes, kStages, false>;
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
__device__ void expand(const Lookup& t, std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  const auto quad = [&](std::uint32_t selector) {
    const std::uint32_t complement = multiply_add(selector, 0xFFFF, 0xFFFF);  // of the selector's 16 bits
    return multiply_add(permute_bytes(t.negative_low, t.negative_high, complement), 2,
                        permute_bytes(t.positive_low, t.positive_high, selector));
  };
  low = quad(codes);
  high = quad(codes >> 16);
}

/// Expands 4 codes to signed bytes, which may be odd.
__device__ std::uint32_t signed_quad(std::uint32_t codes, std::uint32_t times) {
  const std::uint32_t magnitudes = permute_bytes(kLowCodes * times, kHighCodes * times, codes & ~kSigns);
  const std::uint32_t signs = permute_bytes(0x0000FF00u, 0, codes >> 3 & 0x1111u);
  return __vsub4(magnitudes ^ signs, signs);
}

__device__ bool any_code(const uint4& codes) { return ((codes.x | codes.y | codes.z | codes.w) & ~kSigns) != 0; }

// --- shared memory

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

template <class Cta>
struct alignas(16) Shared : Queries {
  alignas(16) typename Keys<Cta>::Ring ring;
  SchedulerShared scheduler;
};

// --- exact scores of keys and tokens that are out of range

/// Adds one chain of heads for a key, in the order of ops/score_row.h.
__device__ __noinline__ float exact_chain(const Queries& s, const std::uint8_t* key, const std::uint8_t* scale,
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

// --- queries

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
__device__ std::uint32_t e2m1_codes(float low, float high) {
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

// --- products

using Operand = std::uint32_t[kSteps][4];
using Products = std::int32_t[32];

/// Starts the wgmma of half a KV tile. Neither products nor keys may be touched before wait_for_products.
__device__ void start_products(Products& d, const Operand& a, std::uint64_t queries) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_fence();
  wgmma<MmaType::s8, 64>(d, a[0], queries, false);
#pragma unroll
  for (int i = 1; i < kSteps; ++i) wgmma<MmaType::s8, 64>(d, a[i], queries + (32 >> 4) * i, true);
  wgmma_commit();
#endif
}

__device__ void wait_for_products(Products& d) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_wait<0>();
  keep_behind_wait(d);
#endif
}

/// Adds one chain of heads for two keys.
__device__ void add_heads(const Products& d, std::uint32_t shared, int chain, float& first, float& second) {
  const std::uint32_t from = shared + offsetof(Queries, weights) + sizeof(Queries::weights[0]) * chain;

  const auto add = [](float& sum, std::int32_t product, float weight) {
    sum = codec::fused(weight, saturate(__int_as_float(product)), sum);
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
  const std::uint32_t pairs = permute_bytes(word, __shfl_xor_sync(kAllLanes, word, 1), c % 2 == 0 ? 0x6240u : 0x3715u);
  return permute_bytes(pairs, __shfl_xor_sync(kAllLanes, pairs, 2), c < 2 ? 0x5410u : 0x3276u);
}

__device__ std::uint32_t largest_byte(std::uint32_t word) {
  const std::uint32_t pair = __vmaxu2(word & 0x00FF00FFu, word >> 8 & 0x00FF00FFu);
  return max(pair & 0xFFFFu, pair >> 16);
}

/// Whether a key's largest scale byte is out of range.
__device__ bool is_extreme(std::uint32_t largest) { return largest - kMinKeyScale >= kKeyScales; }

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

/// Expands a lane's part of one half of a KV tile; the lane's codes begin at `stage`. is_wanted is always true, but the
/// compiler takes it for a branch and therefore does not move the code behind the next wait for products.
__device__ void expand_tile(std::uint32_t shared, std::uint32_t stage, const KVTileScales& scales, int tile,
                            bool is_wanted, Operand& a) {
  if (is_wanted) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = 2 * tile + k;
      const uint4 codes = load_shared16(stage + 512 * row);
      const Lookup lookup(
          load_shared16(shared + offsetof(Queries, lookups) + permute_bytes(scales.lookups, 0, 0x4440u + row)));
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

/// Goes over a warp's keys in `kv_tiles` KV tiles, kStep keys apart from first_key on. If a group with nonzero codes is
/// out of range, or `everywhere`, it writes exact sums; otherwise the score stays. Keys of zeros score zero whatever
/// their scales.
template <class Cta>
__device__ void score_out_of_range(const Queries& s, const TokenTile& tile, const Pages& pages,
                                   const Assignment& assignment, float* scores, int first_key, int kv_tiles,
                                   bool everywhere) {
  const int scored = assignment.scored;
  const int lane = static_cast<int>(threadIdx.x % 32), c = lane % kGroups;
  const int own = static_cast<int>(Keys<Cta>::own_key());
  const std::int32_t* table = pages.table + std::int64_t{assignment.request} * pages.blocks_per_request;
  const std::uint32_t row = pages.row_of(first_key);
  float* const maxima = maxima_of(tile, assignment.token, scored);
  for (; kv_tiles > 0 && first_key < scored; --kv_tiles, first_key += Cta::kStep) {
    const std::int32_t block = table[first_key >> pages.block_shift];
    if (block < 0) continue;
    const std::uint8_t* keys = pages.payload_of(static_cast<std::uint32_t>(block)) + kKeyBytes * row;
    const std::uint8_t* scales = pages.scale_of(static_cast<std::uint32_t>(block)) + kGroups * row;
    const auto largest_of = [&](int key) {
      return largest_byte(*reinterpret_cast<const std::uint32_t*>(scales + kGroups * key));
    };
    bool out_of_range = everywhere;
    for (int key = lane / kGroups; key < min(scored - first_key, kWarpKeys); key += 8) {
      const std::uint32_t largest = largest_of(key);
      out_of_range |= (largest - scales[kGroups * key + c] > kKeyShift || is_extreme(largest)) &&
                      any_code(*reinterpret_cast<const uint4*>(keys + kKeyBytes * key + 16 * c));
    }
    const bool is_seen = first_key + own < scored;
    float* const to = scores + first_key + own;
    float total = 0.0f;
    if (__any_sync(kAllLanes, out_of_range)) {
      float sum[kKeysPerQuad];
      for (int i = 0; i < kKeysPerQuad; ++i) {
        const int key = lane / kGroups + 8 * i;
        sum[i] = exact_chain(s, keys + kKeyBytes * key, scales + kGroups * key, c, tile.p.num_heads);
      }
      total = codec::canonical_nan(add_chains(sum, c));
    } else if (is_seen && !is_extreme(largest_of(own))) {
      total = *to;
    }
    if (is_seen) *to = total;
    if (maxima != nullptr) write_maxima(maxima, first_key, group_size(scored), is_seen ? total : kNoScore);
  }
}

/// Scores the assigned KV tiles of one token into `row`, and overwrites the queries in Shared. If the validation of a
/// speculative assignment fails, renew(assignment) corrects it, or returns false because the token has changed too.
template <class Keys, int kLanes, class Renew>
__device__ bool score_kv_tiles(Shared<typename Keys::Cta>& s, const TokenTile& tile, const Pages& pages,
                               Assignment& assignment, const SpeculativeRecord& speculative, float* row,
                               Renew&& renew) {
  using Cta = typename Keys::Cta;
  static_assert(Cta::kThreads >= kHeads * kLanes && kHeads * kLanes % 32 == 0);
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));  // keeps addresses out of registers from token to token
  const int warpgroup = thread / 128, lane = thread % 32, c = lane % kGroups, head = thread / kLanes;
  Keys keys = keys_of<Keys>(s.ring, pages, assignment, warpgroup);
  // Loads return in order. Small loads first are faster with two warpgroups (16 tokens of 8,192 keys went from 8.1 to
  // 7.4 us) and slower with four and a selection (32,768 keys went from 25.2 to 25.9).
  constexpr bool kSmallFirst = Cta::kThreads < FourWarpgroups::kThreads;
  RawPart<kLanes> raw[1];
  QueryAddress<kKeyBytes, kWidth / kLanes>(tile, assignment.token, head, thread % kLanes).load(tile.p, raw);
  if constexpr (!kSmallFirst) keys.begin(speculative.is_there ? speculative.ids : keys.first_ids());
  Validation validation(tile, keys, speculative);
  if constexpr (kSmallFirst) keys.begin(speculative.is_there ? speculative.ids : keys.first_ids());
  const bool fits = head >= kHeads || prepare_head<kLanes>(s, tile, raw[0], head, thread % kLanes);
#if __CUDA_ARCH__ >= 900
  fence_async_proxy();
#endif
  const bool holds = validation.holds(speculative);
  bool in_range = __syncthreads_and(fits && holds);
  if (speculative.is_there && !in_range) {
    in_range = __syncthreads_and(fits);
    if (!__syncthreads_and(holds)) {
      wait_for_all_copies();
      if (!renew(assignment)) return false;
      keys = keys_of<Keys>(s.ring, pages, assignment, warpgroup);
      keys.begin(keys.first_ids());
    }
  }
  const int scored = assignment.scored, kv_tiles = kv_tiles_of_warpgroup<Cta>(assignment, warpgroup);
  std::uint32_t shared = shared_address(&s);
  asm("" : "+r"(shared));  // kept in a register, not recomputed at each use
  const std::uint64_t queries = operand_at(shared);
  float* const maxima = maxima_of(tile, assignment.token, scored);
  const int in_range_tiles = __shfl_sync(kAllLanes, in_range ? kv_tiles : 0, 0);
  int first_out_of_range = in_range_tiles;  // the first KV tile with keys out of range
  // While the tensor cores multiply half a KV tile, the codes of the next half are expanded.
  Products products = {};
  std::uint32_t largest = 0;
  float sum[kKeysPerQuad];
  const auto finish_kv_tile = [&](int i) {
    add_heads(products, shared, c, sum[2], sum[3]);
    const float total = add_chains(sum, c) * codec::bits_float((largest + (kSumShift - kKeyShift - 2)) << 23);
    const int key = keys.first_key(i) + static_cast<int>(Keys::own_key());
    if (key < scored) row[key] = total;
    if (maxima != nullptr) write_maxima(maxima, keys.first_key(i), group_size(scored), key < scored ? total : kNoScore);
  };
  for (int i = 0; i < in_range_tiles; ++i) {
    Operand a, b;
    const std::uint32_t stage = keys.wait_next() + 16 * lane;
    const KVTileScales scales(keys.scales(), c);
    keys.refill(i);
    if (__any_sync(kAllLanes,
                   scales.are_out_of_range() && keys.first_key(i) + static_cast<int>(Keys::own_key()) < scored))
      first_out_of_range = min(first_out_of_range, i);
    expand_tile(shared, stage, scales, 0, pages.block_shift >= 0, a);
    wait_for_products(products);
    if (i > 0) finish_kv_tile(i - 1);
    largest = scales.largest;
    start_products(products, a, queries);
    expand_tile(shared, stage, scales, 1, pages.block_shift >= 0, b);
    wait_for_products(products);
    add_heads(products, shared, c, sum[0], sum[1]);
    start_products(products, b, queries);
  }
  wait_for_products(products);
  if (in_range_tiles > 0) finish_kv_tile(in_range_tiles - 1);
  wait_for_all_copies();
  if (first_out_of_range < kv_tiles)
    score_out_of_range<Cta>(s, tile, pages, assignment, row, keys.first_key(first_out_of_range),
                            kv_tiles - first_out_of_range, !in_range);
  __syncthreads();  // queries may be overwritten
  return true;
}

// Warps that prepare queries. With four lanes per head the other warps would wait for them.
constexpr int kPreparing = kHeads * kGroups / 32;

template <class Cta, int kLanes>
__global__ void __launch_bounds__(Cta::kThreads, FourWarpgroups::kThreads / Cta::kThreads)
    score_mxfp4_keys(const __grid_constant__ TokenTile tile, const __grid_constant__ Pages pages) {
  constexpr int kHelpers = Cta::kWarps - kPreparing;
  extern __shared__ __align__(1024) unsigned char bytes[];
  Shared<Cta>& s = *reinterpret_cast<Shared<Cta>*>(bytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  SpeculativeRecord speculative;
  Assignment first = assign_tiles_speculatively<Cta>(s.scheduler, tile, speculative);
  const Keys<Cta> keys = keys_of<Keys<Cta>>(s.ring, pages, first, warp / 4);
  if constexpr (kHelpers == 0) speculative.ids = keys.speculative_ids();
  touch(tile);
  touch(pages);
  prefetch_queries(tile, first.token);
  if constexpr (kHelpers == 0) {
    keys.template prefetch<kStages - 1>(speculative.ids);
  } else {
    if (warp >= kPreparing) prefetch_first_keys<Cta, kKeyBytes, kStages - 1, kHelpers>(first, pages, warp - kPreparing);
    speculative.ids = keys.speculative_ids();
  }
  if (thread < kLookups) s.lookups[thread] = Lookup((1u << kKeyShift) >> thread);
  grid_dependency_wait();
  launch_dependents();
  // Warps that do not prepare queries have nothing else to do now.
  if (kHelpers > 0 && tile.fill && warp >= kPreparing) fill_tail(tile, thread - 32 * kPreparing, 32 * kHelpers);
  if (!speculative.is_there) first = assign_tiles_after_wait<Cta>(s.scheduler, tile);
  for_each_assignment<Cta>(
      s.scheduler, tile, first, speculative, [&](int token) { prefetch_queries(tile, token); },
      [&](Assignment& assignment, const SpeculativeRecord& speculative) {
        return score_kv_tiles<Keys<Cta>, kLanes>(s, tile, pages, assignment, speculative, tile.row(assignment.token),
                                                 [](Assignment&) { return false; });
      });
  if (kHelpers == 0 && tile.fill) fill_tail(tile, thread, Cta::kThreads);
}

// --- scores and selection

// A cluster takes a token of up to kRowNumbers keys. Scores go straight to the shared memory of its first CTA, which
// selects from them: there is no second launch, and nothing waits for memory between scoring and selection. It is used
// for as many tokens as keep more than half of the SMs busy; the keys of fewer tokens are better split over all SMs.
// 8,192 keys on an H200, 2026-11-16, us of two launches and of one: 12 tokens 15.1 and 12.0, 24 tokens 19.4 and 15.0,
// 40 tokens 23.6 and 20.4, 64 tokens 26.0 and 22.2, 128 tokens 39.5 and 34.8; but 8 tokens 10.8 and 11.8, and one token
// by 16 CTAs 8.8 and 9.5.

struct TopkShared {
  static constexpr int kThreads = kScoreThreads, kHeld = kRowNumbers / kThreads;
  Shared<FourWarpgroups> scoring;
  Selection<kThreads> selection;
  alignas(16) float row[kRowNumbers];
};
static_assert(sizeof(TopkShared) <= 227 << 10);

/// The memory that take_best works in; its lists overlay the memory of scoring.
struct TopkLists {
  static constexpr int kThreads = kScoreThreads, kHeld = TopkShared::kHeld, kWarpRoom = kListRoom / kScoreWarps;
  using Scores = float[kScoreWarps][kWarpRoom];
  using Entries = std::int32_t[kScoreWarps][kWarpRoom];
  static_assert(sizeof(Scores) + sizeof(Entries) <= sizeof(Shared<FourWarpgroups>));
  Selection<kThreads>& selection;
  Scores& scores;
  Entries& entries;

  __device__ explicit TopkLists(TopkShared& s)
      : selection(s.selection),
        scores(*reinterpret_cast<Scores*>(&s.scoring)),
        entries(*reinterpret_cast<Entries*>(reinterpret_cast<unsigned char*>(&s.scoring) + sizeof(Scores))) {}
};

__global__ void __launch_bounds__(kScoreThreads, 1)
    topk_of_mxfp4_keys(const __grid_constant__ TokenTile tile, const __grid_constant__ Pages pages, int ctas) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  TopkShared& s = *reinterpret_cast<TopkShared*>(bytes);
  cluster_arrive_relaxed();
  const int token = static_cast<int>(blockIdx.x) / ctas, warp = static_cast<int>(threadIdx.x / 32);
  SpeculativeRecord speculative;
  Assignment assignment = assign_cluster_tiles_speculatively(tile, ctas, token, speculative);
  touch(tile);
  touch(pages);
  prefetch_queries(tile, token);
  if (warp >= kPreparing)
    prefetch_first_keys<FourWarpgroups, kKeyBytes, kStages - 1, kScoreWarps - kPreparing>(assignment, pages,
                                                                                          warp - kPreparing);
  speculative.ids = keys_of<FewKeys>(s.scoring.ring, pages, assignment, warp / 4).speculative_ids();
  s.selection.clear();
  if (threadIdx.x < kLookups) s.scoring.lookups[threadIdx.x] = Lookup((1u << kKeyShift) >> threadIdx.x);
  grid_dependency_wait();
  launch_dependents();
  cluster_wait_diverged();
  if (!speculative.is_there) assignment = assign_cluster_tiles_after_wait(tile, ctas, token);
  if (assignment.count > 0)
    score_kv_tiles<FewKeys, kGroups>(s.scoring, tile, pages, assignment, speculative, shared_of_cta(s, 0).row,
                                     [&](Assignment& anew) {
                                       anew = assign_cluster_tiles_after_wait(tile, ctas, token);
                                       return true;
                                     });
  cluster_arrive_diverged();
  if (cta_rank() > 0) return;
  cluster_wait_diverged();

  if (assignment.scored == 0) return take_whole_after_wait(tile, token);
  const int count = assignment.scored, top = tile.p.top;
  const Choice choice{tile, token, assignment.request};
  float held[TopkShared::kHeld];
  load_fours<kScoreThreads>(s.row, count, true, held);
  if (count % 4 != 0) mask_last_four<TopkLists>(count, held);
  TopkLists lists(s);
  const FoursSource<TopkLists> source{held, count};
  if (take_best(lists, source, find_top_bounds(lists, source, top), choice)) return;
  select_from_row(s.selection, s.row, count, Bounds(), choice);
}

template <class Cta, int kLanes>
cudaError_t launch_variant(const TokenTile& tile, unsigned ctas, cudaStream_t stream) {
  return launch_score_kernel<Shared<Cta>>(score_mxfp4_keys<Cta, kLanes>, ctas, Cta::kThreads, tile, make_pages(tile),
                                          stream);
}

}  // namespace

// The thresholds were chosen on an H200, 2026-11-15 and 16; to check them, change one and compare
// `kv4_gpu_bench --only index`.
cudaError_t score_mxfp4(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  const unsigned ctas = score_ctas(tile, device);
  constexpr int kFewTokens = 4;
  const std::int64_t kv_tiles = total_kv_tiles(tile),
                     few_kv_tiles = tile.fill ? 1 : 32;  // per CTA; filling delays helpers
  if (tile.count <= kFewTokens && kv_tiles <= few_kv_tiles * ctas && tile.p.step.num_items == tile.p.step.num_tokens)
    return launch_variant<FourWarpgroups, 2 * kGroups>(tile, ctas, stream);
  // Two warpgroups only without a selection, which would leave room for two such CTAs on some SMs and for none on
  // others. From 16 KV tiles per CTA on, four warpgroups are as fast or faster.
  if (tile.fill && can_use_two_warpgroups(tile, device, 8))
    return launch_variant<TwoWarpgroups, kGroups>(tile, ctas, stream);
  return launch_variant<FourWarpgroups, kGroups>(tile, ctas, stream);
}

cudaError_t topk_mxfp4(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  return launch_topk<TopkShared>(topk_of_mxfp4_keys, cluster_ctas(tile, device), tile, make_pages(tile), stream);
}

}  // namespace kv4::cuda
