// Vector versions of ops/score_row.h, one key per lane: every lane adds channels, groups and heads in the exact order.
// Included once per instruction set.
#if defined(KV4_SIMD_SCORE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KV4_SIMD_SCORE_INL_H_
#undef KV4_SIMD_SCORE_INL_H_
#else
#define KV4_SIMD_SCORE_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "backend/cpu/row_kernels.h"
#include "backend/cpu/simd_math-inl.h"
#include "ops/score_row.h"

HWY_BEFORE_NAMESPACE();
namespace kv4::cpu::HWY_NAMESPACE {

using VI = hn::Vec<DI>;

constexpr int kGroup = codec::Mxfp4::kGroup;
constexpr int kQuads = kGroup / 4;  // of a group: a lane's part of one multiplication is four channels
// Sums of so many heads stay in registers where every loop over them is unrolled (see simd_attend-inl.h).
constexpr int kHeadsAtOnce = 4;
constexpr int kCodeBias = 12;  // keys are stored unsigned: twice their value plus this

/// An mxfp4 query as the integer kernel reads it. In each group the even channels come first, then the odd channels, as
/// the nibbles of 16 bytes are separated.
struct IntQuery {
  const std::int8_t* codes;     // [groups, 32] twice their value
  const float* scales;          // [groups]
  const std::int32_t* surplus;  // [groups] the part of a sum that the keys' bias adds
};

HWY_INLINE IntQuery int_query(const std::uint8_t* at, int width) {
  const float* scales = reinterpret_cast<const float*>(at + width);
  return {reinterpret_cast<const std::int8_t*>(at), scales,
          reinterpret_cast<const std::int32_t*>(scales + width / kGroup)};
}

inline void prepare_query(Format format, codec::RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale,
                          float global, std::uint8_t* out) {
  if (format != Format::mxfp4) return plain_row_kernels().prepare_query(format, shape, payload, scale, global, out);
  const int groups = shape.width / kGroup;
  for (int g = 0; g < groups; ++g) {
    int sum = 0;
    for (int c = 0; c < kGroup; ++c) {
      const int code = payload[g * kGroup / 2 + c % 16] >> (c < 16 ? 0 : 4) & 15;
      const int value = ops::e2m1_double(static_cast<std::uint32_t>(code));
      out[g * kGroup + c] = static_cast<std::uint8_t>(value);
      sum += value;
    }
    const float group_scale = codec::ue8m0_value(scale[g]);
    const std::int32_t surplus = kCodeBias * sum;
    std::memcpy(out + shape.width + 4 * g, &group_scale, 4);
    std::memcpy(out + shape.width + 4 * groups + 4 * g, &surplus, 4);
  }
}

// Lowest byte of k, unsigned, times the highest of q, signed.
HWY_INLINE VI byte_product(VI k, VI q) { return hn::Mul(hn::And(k, hn::Set(DI(), 255)), hn::ShiftRight<24>(q)); }

// acc + the four products of each lane; k unsigned bytes, q signed.
HWY_INLINE VI add_quads(VI acc, VI k, VI q) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
  // The intrinsic needs a compiler option that older Highways leave out of this target; all its processors support it.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.raw) : "v"(k.raw), "v"(q.raw));
  return acc;
#elif HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  const __m512i pairs = _mm512_maddubs_epi16(k.raw, q.raw);  // at most 2 * 24 * 12: no saturation
  return VI{_mm512_add_epi32(acc.raw, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#elif HWY_ARCH_X86
  const __m256i pairs = _mm256_maddubs_epi16(k.raw, q.raw);
  return VI{_mm256_add_epi32(acc.raw, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
#else
  acc = hn::Add(acc, byte_product(k, hn::ShiftLeft<24>(q)));
  acc = hn::Add(acc, byte_product(hn::ShiftRight<8>(k), hn::ShiftLeft<16>(q)));
  acc = hn::Add(acc, byte_product(hn::ShiftRight<16>(k), hn::ShiftLeft<8>(q)));
  return hn::Add(acc, byte_product(hn::ShiftRight<24>(k), q));
#endif
}

HWY_INLINE VF relu(VF x) { return hn::IfThenElseZero(hn::Gt(x, hn::Zero(DF())), x); }

// Chains of heads, one key per lane.
struct ScoreVector {
  VF chain0, chain1, chain2, chain3;

  HWY_INLINE VF& chain(int head) {
    const int c = head / ops::kChainHeads;
    return c == 0 ? chain0 : c == 1 ? chain1 : c == 2 ? chain2 : chain3;
  }
  HWY_INLINE void add(int head, float weight, VF dot) {
    VF& to = chain(head);
    to = hn::MulAdd(set(weight), relu(dot), to);
  }
  HWY_INLINE VF total() const { return hn::Add(hn::Add(chain0, chain1), hn::Add(chain2, chain3)); }
};
HWY_INLINE ScoreVector empty_scores() {
  const VF zero = hn::Zero(DF());
  return {zero, zero, zero, zero};
}

// Lane i's key; lanes from `count` on repeat the last key.
HWY_INLINE std::int64_t key_row(const ScoreArgs& a, int first, std::size_t lane) {
  return a.row + std::min(first + static_cast<int>(lane), a.count - 1);
}

// Columns of `words` words from `lanes` rows: out [words, lanes]. rows: [lanes, words]
HWY_INLINE void transpose_words(const std::int32_t* rows, int words, std::int32_t* out) {
  const DI d;
  const std::size_t lanes = hn::Lanes(d);
  const VI index = hn::Mul(hn::Iota(d, 0), hn::Set(d, words));
  for (int j = 0; j < words; ++j) hn::StoreU(hn::GatherIndex(d, rows + j, index), d, out + j * lanes);
}

// kHeads heads from `head` on against one vector of keys. quads: [width / 4, lanes]; scales: [groups, lanes]
template <int kHeads>
HWY_INLINE void score_heads(const ScoreQuery& query, int head, int width, const std::int32_t* quads,
                            const float* scales, ScoreVector& sum) {
  const DI di;
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  VF dots[kHeads];
  IntQuery q[kHeads];
  HWY_UNROLL(8)
  for (int h = 0; h < kHeads; ++h) {
    dots[h] = hn::Zero(d);
    q[h] = int_query(query.heads + (head + h) * query_bytes(width), width);
  }
  for (int g = 0; g < width / kGroup; ++g) {
    VI acc[kHeads];
    HWY_UNROLL(8)
    for (int h = 0; h < kHeads; ++h) acc[h] = hn::Zero(di);
    for (int j = 0; j < kQuads; ++j) {
      const VI k = hn::LoadU(di, quads + (g * kQuads + j) * lanes);
      HWY_UNROLL(8)
      for (int h = 0; h < kHeads; ++h) {
        std::int32_t four;
        std::memcpy(&four, q[h].codes + g * kGroup + 4 * j, 4);
        acc[h] = add_quads(acc[h], k, hn::Set(di, four));
      }
    }
    const VF key_scale = hn::LoadU(d, scales + g * lanes);
    HWY_UNROLL(8)
    for (int h = 0; h < kHeads; ++h) {
      const VF group = hn::ConvertTo(d, hn::Sub(acc[h], hn::Set(di, q[h].surplus[g])));
      dots[h] = hn::Add(dots[h], hn::Mul(hn::Mul(group, key_scale), set(q[h].scales[g])));
    }
  }
  HWY_UNROLL(8)
  for (int h = 0; h < kHeads; ++h) sum.add(head + h, query.weights[head + h], dots[h]);
}

// Twice the value of each nibble plus the bias.
HWY_INLINE void expand_key(const std::uint8_t* payload, int width, std::uint8_t* out) {
  const hn::Full128<std::uint8_t> d;
  HWY_ALIGN static constexpr std::uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  const auto table = hn::Load(d, kTable);
  for (int g = 0; g < width / kGroup; ++g) {
    const auto codes = hn::LoadU(d, payload + g * kGroup / 2);
    hn::StoreU(hn::TableLookupBytes(table, hn::And(codes, hn::Set(d, 15))), d, out + g * kGroup);
    hn::StoreU(hn::TableLookupBytes(table, hn::ShiftRight<4>(codes)), d, out + g * kGroup + kGroup / 2);
  }
}

// Writes a vector of scores, of the keys from `first` on, as far as the query sees them.
HWY_INLINE void store_scores(VF scores, const ScoreQuery& query, int first) {
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  if (first + lanes <= query.count) return hn::StoreU(scores, d, query.out + first);
  HWY_ALIGN float some[HWY_MAX_BYTES / 4];
  hn::Store(scores, d, some);
  std::copy_n(some, query.count - first, query.out + first);
}

// Calls score(query, head count constant, head, sum) for all heads of all queries that see a key from `first` on.
template <int kMany, class Score>
HWY_INLINE void score_queries(const ScoreArgs& a, int first, Score&& score) {
  for (int t = 0; t < a.num_queries; ++t) {
    const ScoreQuery& query = a.queries[t];
    if (query.count <= first) continue;
    ScoreVector sum = empty_scores();
    int head = 0;
    for (; head + kMany <= a.num_heads; head += kMany) score(query, std::integral_constant<int, kMany>(), head, sum);
    for (; head < a.num_heads; ++head) score(query, std::integral_constant<int, 1>(), head, sum);
    store_scores(sum.total(), query, first);
  }
}

// Keys first .. first + lanes - 1 of the arguments.
inline void score_mxfp4(const ScoreArgs& a, int first) {
  const std::size_t lanes = hn::Lanes(DF());
  const int width = a.page.shape.width, groups = width / kGroup, words = width / 4;
  std::int32_t* rows = reinterpret_cast<std::int32_t*>(a.tmp);
  std::int32_t* quads = rows + words * lanes;
  float* scales = reinterpret_cast<float*>(quads + words * lanes);
  for (std::size_t i = 0; i < lanes; ++i) {
    const std::int64_t row = key_row(a, first, i);
    expand_key(a.page.payload.at(a.block, row), width, reinterpret_cast<std::uint8_t*>(rows + i * words));
    const std::uint8_t* scale = a.page.scale.at(a.block, row);
    for (int g = 0; g < groups; ++g) scales[g * lanes + i] = codec::ue8m0_value(scale[g]) * 0.25f;
  }
  transpose_words(rows, words, quads);
  score_queries<kHeadsAtOnce>(a, first, [=](const ScoreQuery& query, auto many, int head, ScoreVector& sum) {
    score_heads<many>(query, head, width, quads, scales, sum);
  });
}

// channels: [width, lanes]
template <int kHeads>
HWY_INLINE void score_values(const ScoreQuery& query, int head, int width, const float* channels, ScoreVector& sum) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  VF dots[kHeads];
  const float* q[kHeads];
  HWY_UNROLL(8)
  for (int h = 0; h < kHeads; ++h) {
    dots[h] = hn::Zero(d);
    q[h] = reinterpret_cast<const float*>(query.heads + (head + h) * query_bytes(width));
  }
  for (int c = 0; c < width; ++c) {
    const VF k = hn::LoadU(d, channels + c * lanes);
    HWY_UNROLL(8)
    for (int h = 0; h < kHeads; ++h) dots[h] = hn::MulAdd(set(q[h][c]), k, dots[h]);
  }
  HWY_UNROLL(8)
  for (int h = 0; h < kHeads; ++h) sum.add(head + h, query.weights[head + h], dots[h]);
}

inline void score_decoded(const ScoreArgs& a, int first) {
  const std::size_t lanes = hn::Lanes(DF());
  const int width = a.page.shape.width;
  float* channels = a.tmp + width * lanes;
  const float global = page_scale(a.page, a.block);
  for (std::size_t i = 0; i < lanes; ++i) {
    const std::int64_t row = key_row(a, first, i);
    decode(a.page.format, a.page.shape, a.page.payload.at(a.block, row), a.page.scale.at(a.block, row), global,
           a.tmp + i * width, DType::f32, nullptr);
  }
  transpose_words(reinterpret_cast<const std::int32_t*>(a.tmp), width, reinterpret_cast<std::int32_t*>(channels));
  constexpr int kMany = 8;  // enough sums in flight to hide an addition's latency
  score_queries<kMany>(a, first, [=](const ScoreQuery& query, auto many, int head, ScoreVector& sum) {
    score_values<many>(query, head, width, channels, sum);
  });
}

inline void score(const ScoreArgs& a) {
  const int lanes = static_cast<int>(hn::Lanes(DF()));
  static_assert(2 * HWY_MAX_BYTES / 4 <= kScoreKeys || HWY_MAX_BYTES > 64, "tmp holds two arrays of a vector of keys");
  for (int first = 0; first < a.count; first += lanes)
    a.page.format == Format::mxfp4 ? score_mxfp4(a, first) : score_decoded(a, first);
}

}  // namespace kv4::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
