// Vector version of ops/attend_row.h for a tile of rows and all heads: QK with a head per lane, one step of the online
// softmax, then PV with a channel per lane. Every head's sums run over channels and rows in order, whatever the tile.
// Included once per instruction set.
#if defined(KV4_SIMD_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KV4_SIMD_ATTEND_INL_H_
#undef KV4_SIMD_ATTEND_INL_H_
#else
#define KV4_SIMD_ATTEND_INL_H_
#endif

#include <algorithm>

#include "backend/cpu/row_kernels.h"
#include "backend/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kv4::cpu::HWY_NAMESPACE {

// Register tiles: accumulators, the vectors they share and one broadcast fit the vector registers (32, or 16 of AVX2).
// Every loop over a tile is unrolled: g++ keeps arrays of vectors in memory otherwise, at a third of the speed.
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3
constexpr int kTileRows = 6, kTileHeads = 6;
#else
constexpr int kTileRows = 8, kTileHeads = 8;
#endif
constexpr int kTileVectors = 2;
constexpr int kTileElements = 128;  // of q, which then stay in the L1 cache while all rows pass
static_assert(padded_heads(1) % 16 == 0, "an array over heads holds whole vectors of 16 lanes");

HWY_INLINE bool attends_in_vectors(int width) {
  const std::size_t lanes = hn::Lanes(DF());
  return lanes <= 16 && width % (kTileVectors * lanes) == 0;
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
#define KV4_BF16_DOTS 1
/// Whether this processor has the instruction: not all processors of these targets have it.
HWY_INLINE bool has_bf16_dots() {
  static const bool has = __builtin_cpu_supports("avx512bf16") != 0;
  return has;
}
// acc + x0 * y0 + x1 * y1, both pairs of bf16. Through assembly, as older Highways do not enable the intrinsic.
HWY_INLINE VF add_pairs(VU x, VU y, VF acc) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc.raw) : "v"(x.raw), "v"(y.raw));
  return acc;
}
#else
#define KV4_BF16_DOTS 0
HWY_INLINE bool has_bf16_dots() { return false; }
#endif

// The upper halves of two floats, which are all there is of bf16 values.
HWY_INLINE VU bf16_pair(VF even, VF odd) {
  return hn::Or(hn::ShiftRight<16>(bits(even)), hn::And(bits(odd), set_bits(0xFFFF0000u)));
}

// As bf16 pairs the queries are exact, and unscaled: [width / 2, heads] words.
inline void prepare_heads(const PrepareHeadsArgs& a) {
  if (!attends_in_vectors(a.width)) return plain_row_kernels().prepare_heads(a);
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d)), heads = padded_heads(a.num_heads);
  const auto index = hn::Mul(hn::Iota(DI(), 0), hn::Set(DI(), a.width));
  for (int h = 0; h < heads; h += lanes) {
    const float* from = a.q + static_cast<std::ptrdiff_t>(h) * a.width;
    if (a.all_bf16 && has_bf16_dots())
      for (int c = 0; c < a.width; c += 2)
        hn::StoreU(bf16_pair(hn::GatherIndex(d, from + c, index), hn::GatherIndex(d, from + c + 1, index)), DU(),
                   reinterpret_cast<std::uint32_t*>(a.out) + c / 2 * heads + h);
    else
      for (int c = 0; c < a.width; ++c)
        hn::StoreU(hn::Mul(hn::GatherIndex(d, from + c, index), set(a.scale)), d, a.out + c * heads + h);
  }
}

/// Products of fp32 values, an element each.
struct Fp32Products {
  using Element = float;
  static constexpr int kChannels = 1;  // of an element
  static HWY_INLINE VF load(const float* at) { return hn::LoadU(DF(), at); }
  static HWY_INLINE VF broadcast(const float* at) { return set(*at); }
  static HWY_INLINE VF add(VF x, VF y, VF acc) { return hn::MulAdd(x, y, acc); }
};
#if KV4_BF16_DOTS
struct Bf16Products {
  using Element = std::uint32_t;
  static constexpr int kChannels = 2;
  static HWY_INLINE VU load(const std::uint32_t* at) { return hn::LoadU(DU(), at); }
  static HWY_INLINE VU broadcast(const std::uint32_t* at) { return set_bits(*at); }
  static HWY_INLINE VF add(VU x, VU y, VF acc) { return add_pairs(x, y, acc); }
};
#endif

// z += q . row for kRows rows and kVectors vectors of heads over `count` elements. q [count, heads]; z [kRows, heads]
template <class Products, int kRows, int kVectors>
HWY_INLINE void qk_tile(int count, std::ptrdiff_t heads, std::ptrdiff_t stride, const typename Products::Element* q,
                        const typename Products::Element* rows, float* z) {
  const DF d;
  const std::ptrdiff_t lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  VF sums[kRows][kVectors];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r)
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::LoadU(d, z + r * heads + v * lanes);
  for (int c = 0; c < count; ++c) {
    decltype(Products::load(q)) x[kVectors];
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) x[v] = Products::load(q + c * heads + v * lanes);
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const auto row = Products::broadcast(rows + r * stride + c);
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Products::add(x[v], row, sums[r][v]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r)
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, z + r * heads + v * lanes);
}

// z [num_rows, heads] = q . rows; num_rows is a multiple of kTileRows.
template <class Products>
HWY_INLINE void qk(int width, std::ptrdiff_t heads, const typename Products::Element* q,
                   const typename Products::Element* rows, std::ptrdiff_t stride, int num_rows, float* z) {
  const std::ptrdiff_t lanes = static_cast<std::ptrdiff_t>(hn::Lanes(DF()));
  const int elements = width / Products::kChannels;
  std::fill_n(z, num_rows * heads, 0.0f);
  for (int c = 0; c < elements; c += kTileElements) {
    const int count = std::min(kTileElements, elements - c);
    for (int r = 0; r < num_rows; r += kTileRows) {
      const auto* tile = rows + r * stride + c;
      const auto* part = q + c * heads;
      std::ptrdiff_t h = 0;
      for (; h + kTileVectors * lanes <= heads; h += kTileVectors * lanes)
        qk_tile<Products, kTileRows, kTileVectors>(count, heads, stride, part + h, tile, z + r * heads + h);
      for (; h < heads; h += lanes)
        qk_tile<Products, kTileRows, 1>(count, heads, stride, part + h, tile, z + r * heads + h);
    }
  }
}

#if KV4_BF16_DOTS
// As qk of fp32, with rows converted to pairs first. pairs: [kAttendRows, attend_stride(width / 2)] words
HWY_INLINE void qk_bf16(const AttendArgs& a, int num_rows, std::ptrdiff_t heads, std::uint32_t* pairs, float* z) {
  const std::ptrdiff_t from = attend_stride(a.width), to = attend_stride(a.width / 2);
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int r = 0; r < num_rows; ++r)
    for (int c = 0; c < a.width; c += 2 * lanes) {
      VF even, odd;
      hn::LoadInterleaved2(d, a.rows + r * from + c, even, odd);
      hn::StoreU(bf16_pair(even, odd), DU(), pairs + r * to + c / 2);
    }
  qk<Bf16Products>(a.width, heads, reinterpret_cast<const std::uint32_t*>(a.q), pairs, to, num_rows, z);
}
#endif

// Converts the logits z [count, heads], times `scale`, to P, in place, and writes the accumulators' rescale factors.
HWY_INLINE void softmax_step(const AttendArgs& a, std::ptrdiff_t heads, float scale, float* z, float* rescale) {
  const DF d;
  for (std::ptrdiff_t h = 0; h < heads; h += static_cast<std::ptrdiff_t>(hn::Lanes(d))) {
    const VF before = hn::LoadU(d, a.max + h);
    VF max = before;
    for (int r = 0; r < a.count; ++r) {
      const VF x = hn::Mul(hn::LoadU(d, z + r * heads + h), set(scale));
      hn::StoreU(x, d, z + r * heads + h);
      max = hn::IfThenElse(hn::Gt(x, max), x, max);
    }
    const VF factor = exp_nonpositive(hn::Sub(before, max));
    VF sum = hn::Mul(hn::LoadU(d, a.sum + h), factor);
    for (int r = 0; r < a.count; ++r) {
      const VF p = exp_nonpositive(hn::Sub(hn::LoadU(d, z + r * heads + h), max));
      sum = hn::Add(sum, p);
      hn::StoreU(p, d, z + r * heads + h);
    }
    hn::StoreU(max, d, a.max + h);
    hn::StoreU(sum, d, a.sum + h);
    hn::StoreU(factor, d, rescale + h);
  }
}

// acc = acc * rescale + P . rows for kHeads heads and kTileVectors vectors of channels. p [count, heads]
template <int kHeads>
HWY_INLINE void pv_tile(int count, std::ptrdiff_t heads, std::ptrdiff_t stride, const float* rows, const float* p,
                        const float* rescale, float* acc) {
  const DF d;
  const std::ptrdiff_t lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  VF sums[kHeads][kTileVectors];
  HWY_UNROLL(8)
  for (int h = 0; h < kHeads; ++h)
    HWY_UNROLL(8)
    for (int v = 0; v < kTileVectors; ++v)
      sums[h][v] = hn::Mul(hn::LoadU(d, acc + h * stride + v * lanes), set(rescale[h]));
  for (int r = 0; r < count; ++r) {
    VF x[kTileVectors];
    HWY_UNROLL(8)
    for (int v = 0; v < kTileVectors; ++v) x[v] = hn::LoadU(d, rows + r * stride + v * lanes);
    HWY_UNROLL(8)
    for (int h = 0; h < kHeads; ++h) {
      const VF weight = set(p[r * heads + h]);
      HWY_UNROLL(8)
      for (int v = 0; v < kTileVectors; ++v) sums[h][v] = hn::MulAdd(weight, x[v], sums[h][v]);
    }
  }
  HWY_UNROLL(8)
  for (int h = 0; h < kHeads; ++h)
    HWY_UNROLL(8)
    for (int v = 0; v < kTileVectors; ++v) hn::StoreU(sums[h][v], d, acc + h * stride + v * lanes);
}

HWY_INLINE void pv(const AttendArgs& a, std::ptrdiff_t heads, const float* p, const float* rescale) {
  const std::ptrdiff_t stride = attend_stride(a.width);
  for (int c = 0; c < a.width; c += kTileVectors * static_cast<int>(hn::Lanes(DF()))) {
    int h = 0;
    for (; h + kTileHeads <= a.num_heads; h += kTileHeads)
      pv_tile<kTileHeads>(a.count, heads, stride, a.rows + c, p + h, rescale + h, a.acc + h * stride + c);
    for (; h < a.num_heads; ++h)
      pv_tile<1>(a.count, heads, stride, a.rows + c, p + h, rescale + h, a.acc + h * stride + c);
  }
}

inline void attend(const AttendArgs& a) {
  if (!attends_in_vectors(a.width)) return plain_row_kernels().attend(a);
  const std::ptrdiff_t heads = padded_heads(a.num_heads), stride = attend_stride(a.width);
  const int rows = (a.count + kTileRows - 1) / kTileRows * kTileRows;
  for (int r = a.count; r < rows; ++r) std::fill_n(a.rows + r * stride, a.width, 0.0f);
  float* rescale = a.tmp;
  float* z = a.tmp + heads;
#if KV4_BF16_DOTS
  if (a.all_bf16 && has_bf16_dots()) {
    qk_bf16(a, rows, heads, reinterpret_cast<std::uint32_t*>(z + kAttendRows * heads), z);
    softmax_step(a, heads, a.scale, z, rescale);
    return pv(a, heads, z, rescale);
  }
#endif
  qk<Fp32Products>(a.width, heads, a.q, a.rows, stride, rows, z);
  softmax_step(a, heads, 1.0f, z, rescale);
  pv(a, heads, z, rescale);
}

}  // namespace kv4::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#undef KV4_BF16_DOTS
#endif
