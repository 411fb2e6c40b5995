// Vector versions of ops/compress_row.h. Included once per instruction set.
#if defined(KV4_SIMD_COMPRESS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KV4_SIMD_COMPRESS_INL_H_
#undef KV4_SIMD_COMPRESS_INL_H_
#else
#define KV4_SIMD_COMPRESS_INL_H_
#endif

#include "backend/cpu/row_kernels.h"
#include "backend/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kv4::cpu::HWY_NAMESPACE {

struct PoolVector {
  VF max, den, num;
};

// ops::larger_gate: x86's instruction is exactly that comparison; other instruction sets treat NaN differently.
HWY_INLINE VF larger_gate(VF gate, VF max) {
#if HWY_ARCH_X86
  return hn::Max(gate, max);
#else
  return hn::IfThenElse(hn::Gt(gate, max), gate, max);
#endif
}

HWY_INLINE PoolVector pool_add(PoolVector p, VF gate, VF kv) {
  const VF sign = from_bits(set_bits(0x80000000u));
  const VF e = exp_nonpositive(hn::Or(hn::Sub(gate, p.max), sign));
  const auto higher = hn::Gt(gate, p.max);
  const VF one = set(1.0f);
  const VF rescale = hn::IfThenElse(higher, e, one);
  const VF own = hn::IfThenElse(higher, one, e);
  return {larger_gate(gate, p.max), hn::MulAdd(p.den, rescale, own), hn::MulAdd(own, kv, hn::Mul(p.num, rescale))};
}

// Prefetches into L2: rows a page apart share a few sets of L1 and would evict each other.
HWY_INLINE void fetch_later(const ops::SourceRow& row, std::size_t byte) {
  const std::size_t at = byte * row.fetch_pace;
  for (const void* later : row.fetch) __builtin_prefetch(static_cast<const std::uint8_t*>(later) + at, 0, 2);
}

// Folds kRows rows over all channels: rows stream, the accumulator stays in L1.
template <int kRows, ops::RowType kType>
void fold_some(std::size_t width, const ops::SourceRow* rows, bool fresh, float* acc) {
  constexpr std::size_t kElement = kType == ops::RowType::bf16 ? 2 : 4;
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t c = 0; c < width; c += lanes) {
    PoolVector p{set(ops::kLowestGate), hn::Zero(d), hn::Zero(d)};
    if (!fresh) p = {hn::LoadU(d, acc + c), hn::LoadU(d, acc + width + c), hn::LoadU(d, acc + 2 * width + c)};
    for (int r = 0; r < kRows; ++r) {
      fetch_later(rows[r], c * kElement);
      const VF gate = hn::Add(load_row<kType>(rows[r].gate, c), hn::LoadU(d, rows[r].bias + c));
      const VF kv = load_row<kType>(rows[r].kv, c);
      if (fresh && r == 0 && hn::AllTrue(d, hn::Gt(gate, p.max)))
        p = {gate, set(1.0f), hn::Add(kv, p.num)};  // as pool_add for the first row, without the exp
      else
        p = pool_add(p, gate, kv);
    }
    hn::StoreU(p.max, d, acc + c);
    hn::StoreU(canonical_nan(p.den), d, acc + width + c);
    hn::StoreU(canonical_nan(p.num), d, acc + 2 * width + c);
  }
}

template <int kRows>
void fold_typed(std::size_t width, const ops::SourceRow* rows, bool fresh, float* acc) {
  switch (rows[0].type) {
    case ops::RowType::f32: return fold_some<kRows, ops::RowType::f32>(width, rows, fresh, acc);
    case ops::RowType::bf16: return fold_some<kRows, ops::RowType::bf16>(width, rows, fresh, acc);
    case ops::RowType::f32_as_bf16: return fold_some<kRows, ops::RowType::f32_as_bf16>(width, rows, fresh, acc);
  }
}

// Folds rows of one type four at a time. The type changes at most once, where stored rows end and the step's rows
// begin.
void fold(int width, const ops::SourceRow* rows, int count, bool fresh, float* acc) {
  if (count == 0 || width % hn::Lanes(DF()) != 0) return plain_row_kernels().fold(width, rows, count, fresh, acc);
  const std::size_t w = width;
  while (count > 0) {
    const bool four =
        count >= 4 && rows[0].type == rows[1].type && rows[0].type == rows[2].type && rows[0].type == rows[3].type;
    four ? fold_typed<4>(w, rows, fresh, acc) : fold_typed<1>(w, rows, fresh, acc);
    fresh = false;
    count -= four ? 4 : 1;
    rows += four ? 4 : 1;
  }
}

// Readers of rows: all as one type, or each as its own type.
template <ops::RowType kType>
struct OneType {
  static HWY_INLINE std::size_t element(ops::RowType) { return kType == ops::RowType::bf16 ? 2 : 4; }
  static HWY_INLINE VF load(ops::RowType, const void* row, std::size_t c) { return load_row<kType>(row, c); }
};
struct OwnType {
  static HWY_INLINE std::size_t element(ops::RowType type) { return type == ops::RowType::bf16 ? 2 : 4; }
  static HWY_INLINE VF load(ops::RowType type, const void* row, std::size_t c) {
    if (type == ops::RowType::bf16) return load_row<ops::RowType::bf16>(row, c);
    return type == ops::RowType::f32 ? load_row<ops::RowType::f32>(row, c)
                                     : load_row<ops::RowType::f32_as_bf16>(row, c);
  }
};

void mean(int width_in, const float* acc, float* row) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d), width = width_in;
  if (width % lanes != 0) return plain_row_kernels().mean(width_in, acc, row);
  for (std::size_t c = 0; c < width; c += lanes)
    hn::StoreU(round_bf16(hn::Div(hn::LoadU(d, acc + 2 * width + c), hn::LoadU(d, acc + width + c))), d, row + c);
}

// Gates stay in registers between the search for the largest and the sum. The division is free here, because this loop
// waits for memory.
template <int kRows, class Type>
void pool_some(std::size_t width, const ops::SourceRow* rows, float* out) {
  const DF d;
  for (std::size_t c = 0; c < width; c += hn::Lanes(d)) {
    VF gate[kRows], max = set(ops::kLowestGate), den = hn::Zero(d), num = hn::Zero(d);
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const ops::SourceRow& row = rows[r];
      fetch_later(row, c * Type::element(row.type));
      gate[r] = hn::Add(Type::load(row.type, row.gate, c), hn::LoadU(d, row.bias + c));
      max = larger_gate(gate[r], max);
    }
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const VF e = exp_nonpositive(hn::Sub(gate[r], max));
      den = hn::Add(den, e);
      num = hn::MulAdd(e, Type::load(rows[r].type, rows[r].kv, c), num);
    }
    hn::StoreU(round_bf16(hn::Div(num, den)), d, out + c);
  }
}

template <int kRows>
void pool_typed(std::size_t width, const ops::SourceRow* rows, float* out) {
  for (int r = 1; r < kRows; ++r)
    if (rows[r].type != rows[0].type) return pool_some<kRows, OwnType>(width, rows, out);
  switch (rows[0].type) {
    case ops::RowType::f32: return pool_some<kRows, OneType<ops::RowType::f32>>(width, rows, out);
    case ops::RowType::bf16: return pool_some<kRows, OneType<ops::RowType::bf16>>(width, rows, out);
    case ops::RowType::f32_as_bf16: return pool_some<kRows, OneType<ops::RowType::f32_as_bf16>>(width, rows, out);
  }
}

// An entry of V4's overlapping layers pools eight rows, a request's first entry four; V4.1's entry of ratio 2 two.
void pool(int width, const ops::SourceRow* rows, int count, float* acc, float* out) {
  const std::size_t w = width;
  if ((count != 8 && count != 4 && count != 2) || w % hn::Lanes(DF()) != 0)
    return plain_row_kernels().pool(width, rows, count, acc, out);
  count == 8 ? pool_typed<8>(w, rows, out) : count == 4 ? pool_typed<4>(w, rows, out) : pool_typed<2>(w, rows, out);
}

void angles(const RopeAngles& table, std::int64_t position, float* cos, float* sin) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const std::size_t pairs = table.pairs, lanes = hn::Lanes(d);
  if (pairs % lanes != 0) return plain_row_kernels().angles(table, position, cos, sin);
  const double* high = table.high + 2 * (position >> RopeAngles::kLowBits) * table.pairs;
  const double* low = table.low + 2 * (position & ((1 << RopeAngles::kLowBits) - 1)) * table.pairs;
  for (std::size_t i = 0; i < pairs; i += lanes) {
    hn::Vec<decltype(d)> ca, sa, cb, sb;
    hn::LoadInterleaved2(d, high + 2 * i, ca, sa);
    hn::LoadInterleaved2(d, low + 2 * i, cb, sb);
    hn::StoreU(hn::DemoteTo(df, hn::MulAdd(ca, cb, hn::Neg(hn::Mul(sa, sb)))), df, cos + i);
    hn::StoreU(hn::DemoteTo(df, hn::MulAdd(sa, cb, hn::Mul(ca, sb))), df, sin + i);
  }
}

// Sum of squares of n values by adjacent pairs, n a power of two of at least two vectors.
HWY_INLINE float square_sum(const float* x, std::size_t n, float* tmp) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  const auto add_pairs = [&](std::size_t i, VF low, VF high) {
    hn::StoreU(hn::Add(hn::ConcatEven(d, high, low), hn::ConcatOdd(d, high, low)), d, tmp + i);
  };
  n /= 2;
  for (std::size_t i = 0; i < n; i += lanes) {
    const VF low = hn::LoadU(d, x + 2 * i), high = hn::LoadU(d, x + 2 * i + lanes);
    add_pairs(i, hn::Mul(low, low), hn::Mul(high, high));
  }
  for (; n > lanes; n /= 2)
    for (std::size_t i = 0; i < n / 2; i += lanes)
      add_pairs(i, hn::LoadU(d, tmp + 2 * i), hn::LoadU(d, tmp + 2 * i + lanes));
  VF v = hn::LoadU(d, tmp);
  for (std::size_t left = lanes; left > 1; left /= 2) v = hn::Add(hn::ConcatEven(d, v, v), hn::ConcatOdd(d, v, v));
  return hn::GetLane(v);
}

HWY_INLINE void rotate_vectors(std::size_t pairs, const float* cos_in, const float* sin_in, float* channels) {
  const DF d;
  for (std::size_t i = 0; i < pairs; i += hn::Lanes(d)) {
    VF x0, x1;
    hn::LoadInterleaved2(d, channels + 2 * i, x0, x1);
    const VF cos = hn::LoadU(d, cos_in + i), sin = hn::LoadU(d, sin_in + i);
    const VF y0 = round_bf16(hn::MulAdd(x0, cos, hn::Neg(hn::Mul(x1, sin))));
    const VF y1 = round_bf16(hn::MulAdd(x1, cos, hn::Mul(x0, sin)));
    hn::StoreInterleaved2(y0, y1, d, channels + 2 * i);
  }
}

void rotate(int pairs, const float* cos, const float* sin, float* channels) {
  if (pairs % hn::Lanes(DF()) != 0) return plain_row_kernels().rotate(pairs, cos, sin, channels);
  rotate_vectors(pairs, cos, sin, channels);
}

// An output per lane: every sum runs over the channels in order. A square of weights at a time is turned.
void project(const ProjectArgs& a) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d), width = a.width, rows = a.rows;
  if (width % lanes != 0 || rows % lanes != 0) return plain_row_kernels().project(a);
  HWY_ALIGN float square[HWY_MAX_BYTES / 4 * HWY_MAX_BYTES / 4];
  const auto column = hn::Mul(hn::Iota(DI(), 0), hn::Set(DI(), static_cast<std::int32_t>(lanes)));
  for (std::size_t r = 0; r < rows; r += lanes) {
    VF sum = hn::Zero(d);
    for (std::size_t c = 0; c < width; c += lanes) {
      for (std::size_t i = 0; i < lanes; ++i)
        hn::StoreU(load_bf16(a.weight + (r + i) * width + c), d, square + i * lanes);
      for (std::size_t j = 0; j < lanes; ++j)
        sum = hn::MulAdd(set(a.latent[c + j]), hn::GatherIndex(d, square + j, column), sum);
    }
    hn::StoreU(round_bf16(sum), d, a.out + r);
  }
}

// A row with an infinity or a NaN takes the plain code.
void finish(const FinishArgs& a) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d), width = a.width, pairs = a.pairs;
  if ((width & (width - 1)) != 0 || width < 2 * lanes || pairs % lanes != 0) return plain_row_kernels().finish(a);
  const float sum = square_sum(a.row, width, a.tmp);
  if (!(sum < INFINITY)) return plain_row_kernels().finish(a);
  const VF factor = set(ops::norm_factor(sum, a.width, a.eps));
  for (std::size_t c = 0; c < width; c += lanes)
    hn::StoreU(round_bf16(hn::Mul(hn::Mul(hn::LoadU(d, a.row + c), factor), hn::LoadU(d, a.norm_weight + c))), d,
               a.row + c);
  rotate_vectors(pairs, a.cos, a.sin, a.row + width - 2 * pairs);
}

// Butterflies at strides below the vector length, in one register: lane i is combined with lane i ^ h, and the upper of
// the two is subtracted.
struct InnerStages {
  static constexpr std::size_t kMaxLanes = 16;
  std::int32_t partner[4][kMaxLanes];
  std::uint32_t sign[4][kMaxLanes];
  InnerStages() {
    for (std::size_t s = 0; s < 4; ++s)
      for (std::size_t i = 0; i < kMaxLanes; ++i) {
        partner[s][i] = static_cast<std::int32_t>((i ^ (std::size_t{1} << s)) % hn::Lanes(DF()));
        sign[s][i] = (i >> s & 1) != 0 ? 0x80000000u : 0;
      }
  }
};

void hadamard(int width_in, float* x) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d), width = width_in;
  if (width < lanes || lanes > InnerStages::kMaxLanes) return plain_row_kernels().hadamard(width_in, x);
  static const InnerStages stages;
  for (std::size_t c = 0; c < width; c += lanes) {
    VF v = hn::LoadU(d, x + c);
    for (std::size_t s = 0; std::size_t{1} << s < lanes; ++s) {
      const VF partner = hn::TableLookupLanes(v, hn::SetTableIndices(d, stages.partner[s]));
      v = hn::Add(partner, hn::Xor(v, from_bits(hn::LoadU(DU(), stages.sign[s]))));
    }
    hn::StoreU(v, d, x + c);
  }
  for (std::size_t h = lanes; h < width; h *= 2)
    for (std::size_t block = 0; block < width; block += 2 * h)
      for (std::size_t i = block; i < block + h; i += lanes) {
        const VF a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + h);
        hn::StoreU(hn::Add(a, b), d, x + i);
        hn::StoreU(hn::Sub(a, b), d, x + i + h);
      }
  const VF scale = set(codec::quotient(1.0f, codec::square_root(static_cast<float>(width))));
  for (std::size_t c = 0; c < width; c += lanes) hn::StoreU(round_bf16(hn::Mul(hn::LoadU(d, x + c), scale)), d, x + c);
}

}  // namespace kv4::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
