// Vector versions of codec/numeric.h: the same operations in the same order. Included once per instruction set.
#if defined(KV4_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KV4_SIMD_MATH_INL_H_
#undef KV4_SIMD_MATH_INL_H_
#else
#define KV4_SIMD_MATH_INL_H_
#endif

#include <hwy/highway.h>

#include "codec/numeric.h"
#include "kv4/tensor.h"
#include "ops/compress_row.h"

HWY_BEFORE_NAMESPACE();
namespace kv4::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::ScalableTag<std::uint32_t>;
using DI = hn::ScalableTag<std::int32_t>;
using DU16 = hn::Rebind<std::uint16_t, DF>;  // as many lanes as DF
using DU8 = hn::Rebind<std::uint8_t, DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;

HWY_INLINE VU bits(VF x) { return hn::BitCast(DU(), x); }
HWY_INLINE VF from_bits(VU b) { return hn::BitCast(DF(), b); }
HWY_INLINE VF set(float x) { return hn::Set(DF(), x); }
HWY_INLINE VU set_bits(std::uint32_t x) { return hn::Set(DU(), x); }
HWY_INLINE auto is_nan(VF x) { return hn::IsNaN(x); }  // Ne(x, x) is an ordered comparison on x86
HWY_INLINE VF canonical_nan(VF x) { return hn::IfThenElse(is_nan(x), from_bits(set_bits(codec::kNanBits)), x); }

// bf16 bits in the upper half, lower half zero; for finite x.
HWY_INLINE VF round_bf16_finite(VF x) {
  const VU b = bits(x);
  const VU odd = hn::And(hn::ShiftRight<16>(b), set_bits(1));
  return from_bits(hn::And(hn::Add(b, hn::Add(odd, set_bits(0x7FFF))), set_bits(0xFFFF0000u)));
}
HWY_INLINE VF round_bf16(VF x) {
  return hn::IfThenElse(is_nan(x), from_bits(set_bits(codec::kNanBits)), round_bf16_finite(x));
}
HWY_INLINE VU round_bf16_bits(VF x) { return bits(round_bf16(x)); }

HWY_INLINE VF load_bf16(const std::uint16_t* p) {
  return from_bits(hn::ShiftLeft<16>(hn::PromoteTo(DU(), hn::LoadU(DU16(), p))));
}

// upper: bf16 bits in the upper half of each lane
HWY_INLINE void store_bf16_bits(VU upper, std::uint16_t* p) {
  hn::StoreU(hn::DemoteTo(DU16(), hn::BitCast(DI(), hn::ShiftRight<16>(upper))), DU16(), p);
}

template <ops::RowType kType>
HWY_INLINE VF load_row(const void* row, std::size_t c) {
  if constexpr (kType == ops::RowType::bf16) return load_bf16(static_cast<const std::uint16_t*>(row) + c);
  const VF x = hn::LoadU(DF(), static_cast<const float*>(row) + c);
  return kType == ops::RowType::f32 ? x : round_bf16(x);
}

// Max takes x second: where it is NaN, x86 returns it and others return NaN.
HWY_INLINE VF exp_nonpositive(VF x_in) {
  const VF x = hn::Max(set(codec::kExpFloor), x_in);
  const VF magic = set(codec::kRoundMagic), log2e = set(codec::kLog2e);
  const VF shifted = hn::MulAdd(x, log2e, magic);
  const VF r = hn::MulSub(x, log2e, hn::Sub(shifted, magic));
  VF p = hn::MulAdd(set(codec::kExp5), r, set(codec::kExp4));
  p = hn::MulAdd(p, r, set(codec::kExp3));
  p = hn::MulAdd(p, r, set(codec::kExp2));
  p = hn::MulAdd(p, r, set(codec::kExp1));
  p = hn::MulAdd(p, r, set(1.0f));
  return hn::Mul(p, from_bits(hn::ShiftLeft<23>(bits(shifted))));
}

// Codes in the low byte of each lane, for |x| <= 448 and no NaN.
HWY_INLINE VU e4m3_bits(VF x) {
  const VU sign = hn::And(hn::ShiftRight<24>(bits(x)), set_bits(0x80));
  const VF a = hn::Abs(x);
  const VU small = hn::Sub(bits(hn::Add(a, set(16384.0f))), bits(set(16384.0f)));
  const VU b = bits(a);
  const VU odd = hn::And(hn::ShiftRight<20>(b), set_bits(1));
  const VU large = hn::ShiftRight<20>(hn::Add(hn::Add(b, odd), set_bits(0x7FFFFu - (120u << 23))));
  return hn::Or(hn::IfThenElse(hn::RebindMask(DU(), hn::Lt(a, set(0.015625f))), small, large), sign);
}

HWY_INLINE VF e4m3_value(VU byte) {
  const VU m = hn::And(byte, set_bits(0x7F));
  const VU sign = hn::ShiftLeft<24>(hn::And(byte, set_bits(0x80)));
  const VF large = from_bits(hn::Add(hn::ShiftLeft<20>(m), set_bits(120u << 23)));
  const VF small = hn::Mul(hn::ConvertTo(DF(), hn::BitCast(DI(), m)), set(0.001953125f));
  const VF a = hn::IfThenElse(hn::RebindMask(DF(), hn::Lt(m, set_bits(8))), small, large);
  const VF value = hn::Or(a, from_bits(sign));
  return hn::IfThenElse(hn::RebindMask(DF(), hn::Eq(m, set_bits(0x7F))), from_bits(set_bits(codec::kNanBits)), value);
}

// For finite x.
HWY_INLINE VU e2m1_bits(VF x) {
  const VU sign = hn::And(hn::ShiftRight<28>(bits(x)), set_bits(8));
  const VF a = hn::Min(hn::Abs(x), set(6.0f));
  const VF magic = set(4194304.0f);  // 2^22: its ulp is .5
  const VU small = hn::Sub(bits(hn::Add(a, magic)), bits(magic));
  const VU b = bits(a);
  const VU odd = hn::And(hn::ShiftRight<22>(b), set_bits(1));
  const VU large = hn::ShiftRight<22>(hn::Add(hn::Add(b, odd), set_bits(0x1FFFFFu - (126u << 23))));
  return hn::Or(hn::IfThenElse(hn::RebindMask(DU(), hn::Lt(a, set(1.0f))), small, large), sign);
}

// Largest magnitude as bits. Above kFiniteBits the row contains an infinity or a NaN.
constexpr std::uint32_t kFiniteBits = 0x7F7FFFFFu;
HWY_INLINE VU magnitude_bits(VF x) { return hn::And(bits(x), set_bits(0x7FFFFFFFu)); }

HWY_INLINE std::uint32_t amax_bits(const float* x, std::size_t count) {
  const std::size_t lanes = hn::Lanes(DF());
  VU largest = magnitude_bits(hn::LoadU(DF(), x));
  for (std::size_t c = lanes; c < count; c += lanes) largest = hn::Max(largest, magnitude_bits(hn::LoadU(DF(), x + c)));
  return hn::GetLane(hn::MaxOfLanes(DU(), largest));
}

HWY_INLINE void store_bytes(VU codes, std::uint8_t* p) {
  hn::StoreU(hn::DemoteTo(DU8(), hn::BitCast(DI(), codes)), DU8(), p);
}

}  // namespace kv4::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
