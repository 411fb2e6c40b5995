// Vector versions of the codecs. A format without one here runs the plain code. Included once per instruction set.
#if defined(KV4_SIMD_CODEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KV4_SIMD_CODEC_INL_H_
#undef KV4_SIMD_CODEC_INL_H_
#else
#define KV4_SIMD_CODEC_INL_H_
#endif

#include <cstring>

#include "backend/cpu/row_kernels.h"
#include "backend/cpu/simd_math-inl.h"
#include "codec/codec.h"

HWY_BEFORE_NAMESPACE();
namespace kv4::cpu::HWY_NAMESPACE {

void convert(const void* from, DType from_type, std::int64_t count_in, void* to, DType to_type) {
  const std::size_t lanes = hn::Lanes(DF()), count = static_cast<std::size_t>(count_in);
  if (count % lanes != 0) return plain_row_kernels().convert(from, from_type, count_in, to, to_type);
  for (std::size_t c = 0; c < count; c += lanes) {
    const VF x =
        from_type == DType::bf16 ? load_row<ops::RowType::bf16>(from, c) : load_row<ops::RowType::f32>(from, c);
    if (to_type == DType::bf16)
      store_bf16_bits(round_bf16_bits(x), static_cast<std::uint16_t*>(to) + c);
    else
      hn::StoreU(canonical_nan(x), DF(), static_cast<float*>(to) + c);
  }
}

void load_as_bf16(const void* from, DType type, int count_in, float* to) {
  const std::size_t lanes = hn::Lanes(DF()), count = static_cast<std::size_t>(count_in);
  if (count % lanes != 0) return plain_row_kernels().load_as_bf16(from, type, count_in, to);
  for (std::size_t c = 0; c < count; c += lanes) {
    const VF x =
        type == DType::bf16 ? load_row<ops::RowType::bf16>(from, c) : load_row<ops::RowType::f32_as_bf16>(from, c);
    hn::StoreU(x, DF(), to + c);
  }
}

// --- encoders
// ----------------------------------------------------------------------------------------------------------------
// Scales are found on the bits of the largest magnitude. A row with an infinity or a NaN takes the plain code, which
// says how they clamp.

// Exponent of pow2_ceil(amax / 448) and of pow2_ceil(amax / 6): the carry out of the mantissa says whether amax is
// above 1.75 * 2^n (448 = 1.75 * 2^8) or 1.5 * 2^n (6 = 1.5 * 2^2).
HWY_INLINE int exponent_over_448(std::uint32_t amax) {
  constexpr std::uint32_t kFloor = 0x38D1B717u;  // bits of kAmaxFloor = 1e-4f
  return static_cast<int>(((amax > kFloor ? amax : kFloor) + 0x1FFFFFu) >> 23) - (127 + 8);
}
HWY_INLINE int exponent_over_6(std::uint32_t amax) {
  constexpr std::uint32_t kFloor = 0x01C00000u;  // bits of 6 * 2^-126
  return static_cast<int>(((amax > kFloor ? amax : kFloor) + 0x3FFFFFu) >> 23) - (127 + 2);
}

HWY_INLINE void encode_e4m3_scaled(const float* x, std::size_t count, float inverse, std::uint8_t* out) {
  const VF factor = set(inverse);
  for (std::size_t c = 0; c < count; c += hn::Lanes(DF()))
    store_bytes(e4m3_bits(hn::Mul(hn::LoadU(DF(), x + c), factor)), out + c);
}

// amax / (amax / 448) may round to just above 448, hence the clamp.
HWY_INLINE void encode_e4m3_divided(const float* x, std::size_t count, float divisor, std::uint8_t* out) {
  const VF by = set(divisor), most = set(448.0f);
  for (std::size_t c = 0; c < count; c += hn::Lanes(DF())) {
    const VF v = hn::Div(hn::LoadU(DF(), x + c), by);
    store_bytes(e4m3_bits(hn::Min(hn::Max(v, hn::Neg(most)), most)), out + c);
  }
}

HWY_INLINE void encode_bf16(const float* x, std::size_t count, std::uint8_t* out) {
  for (std::size_t c = 0; c < count; c += hn::Lanes(DF()))
    store_bf16_bits(round_bf16_bits(hn::LoadU(DF(), x + c)), reinterpret_cast<std::uint16_t*>(out) + c);
}

// One group of e2m1 codes, one per byte.
template <bool kDivide>
HWY_INLINE void encode_e2m1(const float* x, std::size_t count, float by, std::uint8_t* codes) {
  const VF factor = set(by);
  for (std::size_t c = 0; c < count; c += hn::Lanes(DF())) {
    const VF v = hn::LoadU(DF(), x + c);
    store_bytes(e2m1_bits(kDivide ? hn::Div(v, factor) : hn::Mul(v, factor)), codes + c);
  }
}

constexpr std::size_t kMaxTiles = 16;  // longer rows and wider keys take the plain code
constexpr std::size_t kMaxKeyWidth = 1024;

using D16 = hn::ScalableTag<std::uint16_t>;
using DI16 = hn::ScalableTag<std::int16_t>;
using D8Half = hn::Rebind<std::uint8_t, D16>;

// Byte codes -> two per byte, the even one low.
HWY_INLINE void pack_nibbles(const std::uint8_t* codes, std::size_t count, std::uint8_t* out) {
  const D16 d;
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= count / 2; i += hn::Lanes(d)) {
    const auto pair =
        hn::BitCast(d, hn::LoadU(hn::Repartition<std::uint8_t, D16>(), codes + 2 * i));  // the even code low
    const auto packed = hn::Or(hn::And(pair, hn::Set(d, 0x0F)), hn::And(hn::ShiftRight<4>(pair), hn::Set(d, 0xF0)));
    hn::StoreU(hn::DemoteTo(D8Half(), hn::BitCast(DI16(), packed)), D8Half(), out + i);
  }
  for (; i < count / 2; ++i) out[i] = static_cast<std::uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

// Largest and smallest of 15-bit magnitudes.
HWY_INLINE std::uint32_t largest16(hn::Vec<D16> v) {
  const VU pair = hn::BitCast(DU(), v);
  return hn::GetLane(hn::MaxOfLanes(DU(), hn::Max(hn::ShiftRight<16>(pair), hn::And(pair, set_bits(0xFFFF)))));
}
HWY_INLINE std::uint32_t smallest16(hn::Vec<D16> v) {
  const VU pair = hn::BitCast(DU(), v);
  return hn::GetLane(hn::MinOfLanes(DU(), hn::Min(hn::ShiftRight<16>(pair), hn::And(pair, set_bits(0xFFFF)))));
}

struct TileRange {
  std::uint32_t most, least;
};

HWY_INLINE TileRange magnitude_range(const std::uint16_t* x, std::size_t count) {
  const D16 d;
  const auto magnitude = hn::Set(d, 0x7FFF);
  auto most = hn::And(hn::LoadU(d, x), magnitude), least = most;
  for (std::size_t c = hn::Lanes(d); c < count; c += hn::Lanes(d)) {
    const auto m = hn::And(hn::LoadU(d, x + c), magnitude);
    most = hn::Max(most, m);
    least = hn::Min(least, m);
  }
  return {largest16(most), smallest16(least)};
}

// bf16 -> e4m3 for values that stay normal: the scale is a power of two, so only the exponent moves and the mantissa is
// rounded from 7 to 3 bits. All in 16-bit integers. base: (120 + scale exponent) << 3.
HWY_INLINE void encode_e4m3_normal(const std::uint16_t* x, std::size_t count, std::uint16_t base, std::uint8_t* out) {
  const D16 d;
  for (std::size_t c = 0; c < count; c += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, x + c);
    const auto m = hn::And(v, hn::Set(d, 0x7FFF));
    const auto odd = hn::And(hn::ShiftRight<4>(m), hn::Set(d, 1));
    const auto code = hn::Sub(hn::ShiftRight<4>(hn::Add(hn::Add(m, odd), hn::Set(d, 7))), hn::Set(d, base));
    const auto sign = hn::And(hn::ShiftRight<8>(v), hn::Set(d, 0x80));
    hn::StoreU(hn::DemoteTo(D8Half(), hn::BitCast(DI16(), hn::Or(code, sign))), D8Half(), out + c);
  }
}

// x: bf16 bits. False if there is an infinity or a NaN.
HWY_INLINE bool encode_fp8_tile64(codec::RowShape shape, const std::uint16_t* x, std::uint8_t* payload,
                                  std::uint8_t* scale) {
  constexpr std::size_t kTile = codec::Fp8Tile64::kTile;
  const std::size_t tail = static_cast<std::size_t>(shape.tail), body = static_cast<std::size_t>(shape.width) - tail,
                    tiles = body / kTile;
  if (tiles > kMaxTiles || tail % hn::Lanes(D16()) != 0) return false;
  TileRange range[kMaxTiles];
  std::uint32_t most = tail > 0 ? magnitude_range(x + body, tail).most : 0;
  for (std::size_t t = 0; t < tiles; ++t) {
    range[t] = magnitude_range(x + t * kTile, kTile);
    most = most > range[t].most ? most : range[t].most;
  }
  if (most >= 0x7F80) return false;
  for (std::size_t t = 0; t < tiles; ++t) {
    const std::uint16_t* tile = x + t * kTile;
    const int e = exponent_over_448(range[t].most << 16);
    scale[t] = static_cast<std::uint8_t>(e + 127);
    if (range[t].least >= static_cast<std::uint32_t>(121 + e) << 7) {
      encode_e4m3_normal(tile, kTile, static_cast<std::uint16_t>((120 + e) << 3), payload + t * kTile);
      continue;
    }
    const VF factor = set(codec::pow2(-e));  // some value is zero or becomes a subnormal
    for (std::size_t c = 0; c < kTile; c += hn::Lanes(DF()))
      store_bytes(e4m3_bits(hn::Mul(load_bf16(tile + c), factor)), payload + t * kTile + c);
  }
  for (int t = codec::Fp8Tile64::tiles(shape); t < codec::Fp8Tile64::scale_bytes(shape); ++t) scale[t] = 0;
  std::memcpy(payload + body, x + body, 2 * tail);
  return true;
}

constexpr std::size_t kMaxRowWidth = 2048;

// The same from floats that hold bf16 values.
HWY_INLINE bool encode_fp8_tile64(codec::RowShape shape, const float* x, std::uint8_t* payload, std::uint8_t* scale) {
  std::uint16_t row[kMaxRowWidth];
  const std::size_t width = static_cast<std::size_t>(shape.width);
  if (width > kMaxRowWidth) return false;
  for (std::size_t c = 0; c < width; c += hn::Lanes(DF())) store_bf16_bits(bits(hn::LoadU(DF(), x + c)), row + c);
  return encode_fp8_tile64(shape, row, payload, scale);
}

HWY_INLINE bool encode_fp8_row(codec::RowShape shape, const float* x, std::uint8_t* payload, std::uint8_t* scale) {
  const std::size_t tail = static_cast<std::size_t>(shape.tail), body = static_cast<std::size_t>(shape.width) - tail;
  const std::uint32_t amax = amax_bits(x, body);
  if (amax > kFiniteBits) return false;
  const float inverse = codec::Fp8Row::inverse_scale(codec::bits_float(amax));
  encode_e4m3_divided(x, body, inverse, payload);
  encode_bf16(x + body, tail, payload + body);
  std::memcpy(scale, &inverse, 4);
  return true;
}

HWY_INLINE bool encode_fp8_key(std::size_t width, const float* x, std::uint8_t* payload, std::uint8_t* scale) {
  const std::uint32_t amax = amax_bits(x, width);
  if (amax > kFiniteBits) return false;
  const int e = exponent_over_448(amax);
  const float value = codec::pow2(e);
  encode_e4m3_scaled(x, width, codec::pow2(-e), payload);
  std::memcpy(scale, &value, 4);
  return true;
}

HWY_INLINE bool encode_mxfp4(std::size_t width, const float* x, std::uint8_t* payload, std::uint8_t* scale) {
  constexpr std::size_t kGroup = codec::Mxfp4::kGroup;
  std::uint8_t codes[kMaxKeyWidth];
  for (std::size_t t = 0; t < width / kGroup; ++t) {
    const std::uint32_t amax = amax_bits(x + t * kGroup, kGroup);
    if (amax > kFiniteBits) return false;
    const int e = exponent_over_6(amax);
    encode_e2m1<false>(x + t * kGroup, kGroup, codec::pow2(-e), codes + t * kGroup);
    scale[t] = static_cast<std::uint8_t>(e + 127);
  }
  pack_nibbles(codes, width, payload);
  return true;
}

HWY_INLINE bool encode_nvfp4(std::size_t width, const float* x, std::uint8_t* payload, std::uint8_t* scale,
                             float global) {
  constexpr std::size_t kGroup = codec::Nvfp4::kGroup;
  std::uint8_t codes[kMaxKeyWidth];
  for (std::size_t t = 0; t < width / kGroup; ++t) {
    const std::uint32_t amax = amax_bits(x + t * kGroup, kGroup);
    if (amax > kFiniteBits) return false;
    scale[t] = codec::Nvfp4::scale_byte(codec::bits_float(amax), global);
    const float step = codec::e4m3_value(scale[t]) * global;
    if (step == 0.0f)
      std::memset(codes + t * kGroup, 0, kGroup);
    else
      encode_e2m1<true>(x + t * kGroup, kGroup, step, codes + t * kGroup);
  }
  pack_nibbles(codes, width, payload);
  return true;
}

void encode(Format format, codec::RowShape shape, const float* x, std::uint8_t* payload, std::uint8_t* scale,
            float global) {
  const std::size_t lanes = hn::Lanes(DF()), width = static_cast<std::size_t>(shape.width);
  const std::size_t tail = static_cast<std::size_t>(shape.tail), body = width - tail;
  const bool whole = body % lanes == 0 && tail % lanes == 0 && body > 0;
  bool done = false;
  switch (format) {
    case Format::fp8_tile64: done = whole && encode_fp8_tile64(shape, x, payload, scale); break;
    case Format::fp8_row: done = whole && encode_fp8_row(shape, x, payload, scale); break;
    case Format::fp8: done = whole && encode_fp8_key(width, x, payload, scale); break;
    case Format::mxfp4:
      done = width <= kMaxKeyWidth && codec::Mxfp4::kGroup % lanes == 0 && encode_mxfp4(width, x, payload, scale);
      break;
    case Format::nvfp4:
      done =
          width <= kMaxKeyWidth && codec::Nvfp4::kGroup % lanes == 0 && encode_nvfp4(width, x, payload, scale, global);
      break;
    case Format::bf16:
      done = whole;
      if (whole) encode_bf16(x, width, payload);
      break;
  }
  if (!done) plain_row_kernels().encode(format, shape, x, payload, scale, global);
}

void encode_input(Format format, codec::RowShape shape, const void* x, DType type, std::uint8_t* payload,
                  std::uint8_t* scale, float* tmp) {
  const bool done = format == Format::fp8_tile64 && type == DType::bf16 && shape.width > shape.tail &&
                    encode_fp8_tile64(shape, static_cast<const std::uint16_t*>(x), payload, scale);
  if (done) return;
  load_as_bf16(x, type, shape.width, tmp);
  encode(format, shape, tmp, payload, scale, 1.0f);
}

// --- decoders
// ----------------------------------------------------------------------------------------------------------------

template <DType kOut>
HWY_INLINE void store_value(VF x, void* out, std::size_t c) {
  if constexpr (kOut == DType::f32)
    hn::StoreU(x, DF(), static_cast<float*>(out) + c);
  else
    store_bf16_bits(round_bf16_bits(x), static_cast<std::uint16_t*>(out) + c);
}

template <DType kOut>
HWY_INLINE void decode_e4m3(const std::uint8_t* payload, std::size_t first, std::size_t count, float scale, void* out) {
  const VF factor = set(scale);
  for (std::size_t c = first; c < first + count; c += hn::Lanes(DF()))
    store_value<kOut>(hn::Mul(e4m3_value(hn::PromoteTo(DU(), hn::LoadU(DU8(), payload + c))), factor), out, c);
}

// e4m3 -> bf16 where every code is normal and stays so: only the exponent moves, in 16-bit integers. False: nothing is
// written that counts.
HWY_INLINE bool decode_e4m3_normal(const std::uint8_t* payload, std::size_t count, std::uint8_t scale,
                                   std::uint16_t* out) {
  const D16 d;
  if (scale < 7 || scale > 246) return false;  // else exponent fields stay within 1 and 254
  const auto base = hn::Set(d, static_cast<std::uint16_t>((scale - 7) << 7));
  auto least = hn::Set(d, 0x7F), most = hn::Zero(d);
  for (std::size_t c = 0; c < count; c += hn::Lanes(d)) {
    const auto v = hn::PromoteTo(d, hn::LoadU(D8Half(), payload + c));
    const auto m = hn::And(v, hn::Set(d, 0x7F));
    least = hn::Min(least, m);
    most = hn::Max(most, m);
    hn::StoreU(hn::Or(hn::Add(hn::ShiftLeft<4>(m), base), hn::ShiftLeft<8>(hn::Xor(v, m))), d, out + c);
  }
  const DI16 di;
  return hn::AllFalse(
      di, hn::Or(hn::Lt(hn::BitCast(di, least), hn::Set(di, 8)), hn::Gt(hn::BitCast(di, most), hn::Set(di, 0x7E))));
}

template <DType kOut>
HWY_INLINE void decode_bf16(const std::uint8_t* from, std::size_t first, std::size_t count, void* out) {
  if constexpr (kOut == DType::bf16)
    std::memcpy(static_cast<std::uint16_t*>(out) + first, from, 2 * count);
  else
    for (std::size_t c = 0; c < count; c += hn::Lanes(DF()))
      store_value<kOut>(load_bf16(reinterpret_cast<const std::uint16_t*>(from) + c), out, first + c);
}

HWY_INLINE VF e2m1_value(VU code) {
  const VU m = hn::And(code, set_bits(7));
  const VU sign = hn::ShiftLeft<28>(hn::And(code, set_bits(8)));
  const VU large = hn::Or(hn::ShiftLeft<23>(hn::Add(hn::ShiftRight<1>(m), set_bits(126))),
                          hn::ShiftLeft<22>(hn::And(m, set_bits(1))));
  const VF small = hn::Mul(hn::ConvertTo(DF(), hn::BitCast(DI(), m)), set(0.5f));
  return hn::Or(hn::IfThenElse(hn::RebindMask(DF(), hn::Lt(m, set_bits(2))), small, from_bits(large)), from_bits(sign));
}

// factor(group): what the group's codes are multiplied by.
template <DType kOut, class Factor>
HWY_INLINE void decode_e2m1(const std::uint8_t* payload, std::size_t width, std::size_t group, void* out,
                            Factor factor) {
  std::uint8_t codes[kMaxKeyWidth];
  for (std::size_t i = 0; i < width / 2; ++i) {
    codes[2 * i] = payload[i] & 15;
    codes[2 * i + 1] = payload[i] >> 4;
  }
  for (std::size_t g = 0; g < width / group; ++g) {
    const VF by = set(factor(g));
    for (std::size_t c = g * group; c < (g + 1) * group; c += hn::Lanes(DF()))
      store_value<kOut>(hn::Mul(e2m1_value(hn::PromoteTo(DU(), hn::LoadU(DU8(), codes + c))), by), out, c);
  }
}

template <DType kOut>
void decode_as(Format format, codec::RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale,
               float global, void* out, float* tmp) {
  const std::size_t lanes = hn::Lanes(DF()), width = static_cast<std::size_t>(shape.width),
                    tail = static_cast<std::size_t>(shape.tail);
  const std::size_t body = width - tail;
  const bool fits = body % lanes == 0 && tail % lanes == 0;
  if (format == Format::fp8_tile64 && fits) {
    constexpr std::size_t kTile = codec::Fp8Tile64::kTile;
    for (std::size_t t = 0; t < body / kTile; ++t) {
      if constexpr (kOut == DType::bf16)
        if (decode_e4m3_normal(payload + t * kTile, kTile, scale[t], static_cast<std::uint16_t*>(out) + t * kTile))
          continue;
      decode_e4m3<kOut>(payload, t * kTile, kTile, codec::ue8m0_value(scale[t]), out);
    }
    decode_bf16<kOut>(payload + body, body, tail, out);
  } else if ((format == Format::fp8_row || format == Format::fp8) && fits) {
    float factor;
    std::memcpy(&factor, scale, 4);
    decode_e4m3<kOut>(payload, 0, body, factor, out);
    decode_bf16<kOut>(payload + body, body, tail, out);
  } else if (format == Format::bf16 && fits) {
    decode_bf16<kOut>(payload, 0, width, out);
  } else if (format == Format::mxfp4 && width <= kMaxKeyWidth && codec::Mxfp4::kGroup % lanes == 0) {
    decode_e2m1<kOut>(payload, width, codec::Mxfp4::kGroup, out,
                      [&](std::size_t g) { return codec::ue8m0_value(scale[g]); });
  } else if (format == Format::nvfp4 && width <= kMaxKeyWidth && codec::Nvfp4::kGroup % lanes == 0) {
    decode_e2m1<kOut>(payload, width, codec::Nvfp4::kGroup, out,
                      [&](std::size_t g) { return codec::e4m3_value(scale[g]) * global; });
  } else {
    plain_row_kernels().decode(format, shape, payload, scale, global, out, kOut, tmp);
  }
}

void decode(Format format, codec::RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale, float global,
            void* out, DType out_type, float* tmp) {
  if (out_type == DType::f32)
    decode_as<DType::f32>(format, shape, payload, scale, global, out, tmp);
  else
    decode_as<DType::bf16>(format, shape, payload, scale, global, out, tmp);
}

}  // namespace kv4::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
