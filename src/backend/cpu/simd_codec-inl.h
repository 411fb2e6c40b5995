// Vector versions of the codecs. Formats without a vector version run the plain code. Included once per instruction
// set.
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

template <ops::RowType kFrom, DType kTo>
void convert_some(const ConvertArgs& a) {
  constexpr std::size_t kFromBytes = kFrom == ops::RowType::bf16 ? 2 : 4, kToBytes = kTo == DType::bf16 ? 2 : 4;
  const std::size_t lanes = hn::Lanes(DF()), count = a.count;
  const auto* read_later = static_cast<const std::uint8_t*>(a.read_later == nullptr ? a.from : a.read_later);
  const auto* write_later = static_cast<const std::uint8_t*>(a.write_later == nullptr ? a.to : a.write_later);
  for (std::size_t c = 0; c < count; c += lanes) {
    __builtin_prefetch(read_later + c * kFromBytes, 0, 2);
    __builtin_prefetch(write_later + c * kToBytes, 1, 2);
    const VF x = load_row<kFrom>(a.from, c);
    if constexpr (kTo == DType::bf16)
      store_bf16_bits(round_bf16_bits(x), static_cast<std::uint16_t*>(a.to) + c);
    else
      hn::StoreU(canonical_nan(x), DF(), static_cast<float*>(a.to) + c);
  }
}

void convert(const ConvertArgs& a) {
  if (a.count % hn::Lanes(DF()) != 0) return plain_row_kernels().convert(a);
  using ops::RowType;
  if (a.from_type == DType::bf16)
    return a.to_type == DType::bf16 ? convert_some<RowType::bf16, DType::bf16>(a)
                                    : convert_some<RowType::bf16, DType::f32>(a);
  a.to_type == DType::bf16 ? convert_some<RowType::f32, DType::bf16>(a) : convert_some<RowType::f32, DType::f32>(a);
}

void load_as_bf16(const void* from, DType type, int count_in, float* to) {
  const std::size_t lanes = hn::Lanes(DF()), count = count_in;
  if (count % lanes != 0) return plain_row_kernels().load_as_bf16(from, type, count_in, to);
  for (std::size_t c = 0; c < count; c += lanes) {
    const VF x =
        type == DType::bf16 ? load_row<ops::RowType::bf16>(from, c) : load_row<ops::RowType::f32_as_bf16>(from, c);
    hn::StoreU(x, DF(), to + c);
  }
}

// --- encoders
// ----------------------------------------------------------------------------------------------------------------
// Scales are computed from the bits of the largest magnitude. A row with an infinity or a NaN takes the plain code,
// which defines how they clamp.

// Exponent of pow2_ceil(amax / 448) and of pow2_ceil(amax / 6): the carry out of the mantissa tells whether amax is
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

constexpr std::size_t kMaxKeyWidth = 1024;  // wider keys take the plain code

using D16 = hn::ScalableTag<std::uint16_t>;
using DI16 = hn::ScalableTag<std::int16_t>;
using D8Half = hn::Rebind<std::uint8_t, D16>;

// Byte codes -> two per byte, the even code low.
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

HWY_INLINE auto magnitudes(const std::uint16_t* x) { return hn::And(hn::LoadU(D16(), x), hn::Set(D16(), 0x7FFF)); }

HWY_INLINE std::uint32_t largest_magnitude(const std::uint16_t* x, std::size_t count) {
  auto most = magnitudes(x);
  for (std::size_t c = hn::Lanes(D16()); c < count; c += hn::Lanes(D16())) most = hn::Max(most, magnitudes(x + c));
  const VU pair = hn::BitCast(DU(), most);
  return hn::GetLane(hn::MaxOfLanes(DU(), hn::Max(hn::ShiftRight<16>(pair), hn::And(pair, set_bits(0xFFFF)))));
}

constexpr std::size_t kTile = codec::Fp8Tile64::kTile;  // fp8_row is processed in the same tiles
constexpr std::size_t kSmallTile = codec::Fp8Tile32::kTile;

// bf16 -> e4m3 in 16-bit integers, for values that become normal: exponents move, mantissas are rounded from 7 to 3
// bits. Among eight consecutive mantissas the code grows at most once; with i the upper 4 bits of the mantissa,
// code = (exponent * 128 + the lower 3 bits + round[i]) / 16 - base(tile). False if a code is below the normal codes.
template <std::size_t kTile, class Base>
HWY_INLINE bool encode_e4m3_normal(const std::uint16_t* x, std::size_t count, const std::uint8_t* round, Base base,
                                   std::uint8_t* out) {
  const D16 d;
  const DI16 di;
  const hn::Repartition<std::uint8_t, D16> d8;
  const auto table = hn::LoadDup128(d8, round);
  auto smallest = hn::Set(di, 0x7E);
  for (std::size_t t = 0; t < count / kTile; ++t) {
    const auto less = hn::Set(d, static_cast<std::uint16_t>(base(t)));
    for (std::size_t c = t * kTile; c < (t + 1) * kTile; c += hn::Lanes(d)) {
      const auto v = hn::LoadU(d, x + c);
      const auto i =
          hn::Or(hn::And(hn::ShiftRight<3>(v), hn::Set(d, 0x0F)), hn::Set(d, 0x8000));  // upper byte: no lookup
      const auto step = hn::BitCast(d, hn::TableLookupBytesOr0(table, hn::BitCast(d8, i)));
      const auto code = hn::Sub(hn::ShiftRight<4>(hn::Add(hn::And(v, hn::Set(d, 0x7F87)), step)), less);
      const auto sign = hn::And(hn::ShiftRight<8>(v), hn::Set(d, 0x80));
      smallest = hn::Min(smallest, hn::BitCast(di, code));
      hn::StoreU(hn::DemoteTo(D8Half(), hn::BitCast(di, hn::Or(code, sign))), D8Half(), out + c);
    }
  }
  return hn::AllTrue(di, hn::Gt(smallest, hn::Set(di, 7)));
}

// The same for any finite values. scaled(tile, x): the value to round.
template <std::size_t kTile, class Base, class Scaled>
HWY_INLINE void encode_e4m3(const std::uint16_t* x, std::size_t count, const std::uint8_t* round, Base base,
                            Scaled scaled, std::uint8_t* out) {
  if (encode_e4m3_normal<kTile>(x, count, round, base, out)) return;
  for (std::size_t t = 0; t < count / kTile; ++t) {
    const auto same = [&](std::size_t) { return base(t); };
    if (encode_e4m3_normal<kTile>(x + t * kTile, kTile, round, same, out + t * kTile)) continue;
    for (std::size_t c = t * kTile; c < (t + 1) * kTile; c += hn::Lanes(DF()))
      store_bytes(e4m3_bits(scaled(t, load_bf16(x + c))), out + c);
  }
}

// Rounds to nearest even, for a scale that is a power of two.
alignas(16) constexpr std::uint8_t kRoundEven[16] = {0, 15, 16, 32, 32, 47, 48, 64, 64, 79, 80, 96, 96, 111, 112, 128};

// x: bf16 bits. False if x contains an infinity or a NaN.
HWY_INLINE bool encode_fp8_tile64(codec::RowShape shape, const std::uint16_t* x, std::uint8_t* payload,
                                  std::uint8_t* scale) {
  const std::size_t tail = shape.tail, body = shape.width - tail;
  if (tail % hn::Lanes(D16()) != 0) return false;
  std::uint32_t most = tail > 0 ? largest_magnitude(x + body, tail) : 0;
  for (std::size_t t = 0; t < body / kTile; ++t) {
    const std::uint32_t amax = largest_magnitude(x + t * kTile, kTile);
    scale[t] = static_cast<std::uint8_t>(exponent_over_448(amax << 16) + 127);
    most = most > amax ? most : amax;
  }
  if (most >= 0x7F80) return false;
  encode_e4m3<kTile>(
      x, body, kRoundEven, [&](std::size_t t) { return (scale[t] - 7) << 3; },
      [&](std::size_t t, VF v) { return hn::Mul(v, set(codec::pow2(127 - scale[t]))); }, payload);
  for (int t = codec::Fp8Tile64::tiles(shape); t < codec::Fp8Tile64::scale_bytes(shape); ++t) scale[t] = 0;
  std::memcpy(payload + body, x + body, 2 * tail);
  return true;
}

// The same in smaller tiles, without a tail.
HWY_INLINE bool encode_fp8_tile32(codec::RowShape shape, const std::uint16_t* x, std::uint8_t* payload,
                                  std::uint8_t* scale) {
  const std::size_t width = shape.width;
  if (hn::Lanes(D16()) > kSmallTile) return false;
  std::uint32_t most = 0;
  for (std::size_t t = 0; t < width / kSmallTile; ++t) {
    const std::uint32_t amax = largest_magnitude(x + t * kSmallTile, kSmallTile);
    scale[t] = static_cast<std::uint8_t>(exponent_over_448(amax << 16) + 127);
    most = most > amax ? most : amax;
  }
  if (most >= 0x7F80) return false;
  encode_e4m3<kSmallTile>(
      x, width, kRoundEven, [&](std::size_t t) { return (scale[t] - 7) << 3; },
      [&](std::size_t t, VF v) { return hn::Mul(v, set(codec::pow2(127 - scale[t]))); }, payload);
  return true;
}

// Codes of x / (amax / 448) for every mantissa of x and of amax: powers of two move exponents only.
struct DividedRounding {
  struct Row {
    alignas(16) std::uint8_t round[16];
    int first;  // code of 1 / (amax / 448), for amax in [256, 512)
  } of[128];    // by the mantissa of amax

  DividedRounding() {
    for (std::uint32_t a = 0; a < 128; ++a) {
      const float inverse = codec::Fp8Row::inverse_scale(codec::bits_float((135u << 23) + (a << 16)));
      const auto code = [&](std::uint32_t mantissa) {
        return codec::e4m3_bits(codec::bits_float((127u << 23) + (mantissa << 16)) / inverse);
      };
      of[a].first = code(0);
      for (std::uint32_t i = 0; i < 16; ++i) {
        std::uint32_t same = 1;
        while (same < 8 && code(8 * i + same) == code(8 * i)) ++same;
        of[a].round[i] = static_cast<std::uint8_t>(16 * (code(8 * i) - code(0)) + (same < 8 ? 16 - same : 0));
      }
    }
  }
};

HWY_INLINE bool encode_fp8_row(codec::RowShape shape, const std::uint16_t* x, std::uint8_t* payload,
                               std::uint8_t* scale) {
  static const DividedRounding divided;
  const std::size_t tail = shape.tail, body = shape.width - tail;
  if (body % kTile != 0 || tail % hn::Lanes(D16()) != 0) return false;
  const std::uint32_t amax = largest_magnitude(x, body);
  if (amax >= 0x7F80 || (tail > 0 && largest_magnitude(x + body, tail) > 0x7F80)) return false;
  const float inverse = codec::Fp8Row::inverse_scale(codec::bits_float(amax << 16));
  const DividedRounding::Row& by = divided.of[amax & 0x7F];
  const int base = 8 * (static_cast<int>(amax >> 7) - 8) - by.first;
  if (base < 8) return false;    // amax is tiny: zero would not be below the normal codes
  const VF limit = set(448.0f);  // amax / (amax / 448) may round to just above it
  encode_e4m3<kTile>(
      x, body, by.round, [&](std::size_t) { return base; },
      [&](std::size_t, VF v) { return hn::Min(hn::Max(hn::Div(v, set(inverse)), hn::Neg(limit)), limit); }, payload);
  std::memcpy(payload + body, x + body, 2 * tail);
  std::memcpy(scale, &inverse, 4);
  return true;
}

constexpr std::size_t kMaxRowWidth = 2048;

HWY_INLINE bool encode_fp8(Format format, codec::RowShape shape, const std::uint16_t* x, std::uint8_t* payload,
                           std::uint8_t* scale) {
  if (format == Format::fp8_tile32) return encode_fp8_tile32(shape, x, payload, scale);
  return format == Format::fp8_row ? encode_fp8_row(shape, x, payload, scale)
                                   : encode_fp8_tile64(shape, x, payload, scale);
}

// The same for floats that hold bf16 values.
HWY_INLINE bool encode_fp8(Format format, codec::RowShape shape, const float* x, std::uint8_t* payload,
                           std::uint8_t* scale) {
  std::uint16_t row[kMaxRowWidth];
  const std::size_t width = shape.width;
  if (width > kMaxRowWidth) return false;
  for (std::size_t c = 0; c < width; c += hn::Lanes(DF())) store_bf16_bits(bits(hn::LoadU(DF(), x + c)), row + c);
  return encode_fp8(format, shape, row, payload, scale);
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

// The scale is no power of two, so each channel is divided by it. A NaN changes the whole group: the plain code.
HWY_INLINE bool encode_nvfp4_row(std::size_t width, const float* x, std::uint8_t* payload, std::uint8_t* scale) {
  constexpr std::size_t kGroup = codec::Nvfp4Row::kGroup;
  std::uint8_t codes[kMaxKeyWidth];
  for (std::size_t t = 0; t < width / kGroup; ++t) {
    const std::uint32_t amax = amax_bits(x + t * kGroup, kGroup);
    if (amax > kFiniteBits) return false;
    scale[t] = codec::Nvfp4Row::scale_byte(codec::bits_float(amax));
    encode_e2m1<true>(x + t * kGroup, kGroup, codec::e4m3_value(scale[t]), codes + t * kGroup);
  }
  pack_nibbles(codes, width, payload);
  return true;
}

void encode(Format format, codec::RowShape shape, const float* x, std::uint8_t* payload, std::uint8_t* scale,
            float global) {
  const std::size_t lanes = hn::Lanes(DF()), width = shape.width;
  const std::size_t tail = shape.tail, body = width - tail;
  const bool whole = body % lanes == 0 && tail % lanes == 0 && body > 0;
  bool done = false;
  switch (format) {
    case Format::fp8_tile64:
    case Format::fp8_tile32:
    case Format::fp8_row: done = whole && encode_fp8(format, shape, x, payload, scale); break;
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
    case Format::nvfp4_row:
      done =
          width <= kMaxKeyWidth && codec::Nvfp4Row::kGroup % lanes == 0 && encode_nvfp4_row(width, x, payload, scale);
      break;
  }
  if (!done) plain_row_kernels().encode(format, shape, x, payload, scale, global);
}

void encode_input(Format format, codec::RowShape shape, const void* x, DType type, std::uint8_t* payload,
                  std::uint8_t* scale, float global, float* tmp) {
  const bool in_tiles =
      format == Format::fp8_tile64 || format == Format::fp8_row || format == Format::fp8_tile32;
  const bool done = in_tiles && type == DType::bf16 &&
                    shape.width > shape.tail &&
                    encode_fp8(format, shape, static_cast<const std::uint16_t*>(x), payload, scale);
  if (done) return;
  load_as_bf16(x, type, shape.width, tmp);
  encode(format, shape, tmp, payload, scale, global);
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

template <std::size_t kTile>
HWY_INLINE bool all_normal(const std::uint8_t* e4m3, std::size_t count) {
  const hn::CappedTag<std::uint8_t, kTile> d;
  auto largest = hn::Zero(d);  // of code - 8: zero and subnormals wrap
  for (std::size_t c = 0; c < count; c += hn::Lanes(d))
    largest = hn::Max(largest, hn::Sub(hn::And(hn::LoadU(d, e4m3 + c), hn::Set(d, 0x7F)), hn::Set(d, 8)));
  return hn::AllTrue(d, hn::Lt(largest, hn::Set(d, 0x7F - 8)));
}

// e4m3 -> bf16 in 16-bit integers, for normal codes whose products are normal. base(tile): in every 128 bits, the 8
// mantissas times the scale as bf16 with exponents less by 7; the code's exponent is added.
template <std::size_t kTile, class Base>
HWY_INLINE void decode_e4m3_normal(const std::uint8_t* payload, std::size_t count, Base base, std::uint16_t* out) {
  const D16 d;
  const hn::Repartition<std::uint8_t, D16> d8;
  for (std::size_t t = 0; t < count / kTile; ++t) {
    const auto table = hn::BitCast(d8, base(t));
    for (std::size_t c = t * kTile; c < (t + 1) * kTile; c += hn::Lanes(d)) {
      const auto v = hn::PromoteTo(d, hn::LoadU(D8Half(), payload + c));
      const auto at = hn::Or(hn::And(hn::Mul(v, hn::Set(d, 0x0202)), hn::Set(d, 0x0E0E)), hn::Set(d, 0x0100));
      const auto mantissa = hn::BitCast(d, hn::TableLookupBytes(table, hn::BitCast(d8, at)));
      const auto value = hn::Add(mantissa, hn::And(hn::ShiftLeft<4>(v), hn::Set(d, 0x0780)));
      hn::StoreU(hn::Or(value, hn::And(hn::ShiftLeft<8>(v), hn::Set(d, 0x8000))), d, out + c);
    }
  }
}

alignas(16) constexpr std::uint16_t kMantissas[8] = {0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70};

// base [8] for a scale. False if some product with a normal code may not be normal.
HWY_INLINE bool e4m3_base(float scale, std::uint16_t* base) {
  alignas(32) static constexpr float kValues[8] = {1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875};
  const std::uint32_t exponent = codec::float_bits(scale) >> 23;  // with the sign above it
  if (exponent < 7 || exponent > 245) return false;               // products: exponent - 6 to exponent + 9
  const hn::CappedTag<float, 8> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<std::uint16_t, decltype(d)> d16;
  for (std::size_t k = 0; k < 8; k += hn::Lanes(d)) {
    const auto b = hn::BitCast(du, hn::Mul(hn::Load(d, kValues + k), hn::Set(d, scale)));
    const auto odd = hn::And(hn::ShiftRight<16>(b), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(b, hn::Add(odd, hn::Set(du, 0x7FFF - (7u << 23)))));
    hn::Store(hn::DemoteTo(d16, hn::BitCast(hn::RebindToSigned<decltype(d)>(), rounded)), d16, base + k);
  }
  return true;
}

// fp8_tile64, and fp8_tile32 with its tiles.
template <DType kOut, std::size_t kTile>
HWY_INLINE void decode_fp8_tiles(const std::uint8_t* payload, const std::uint8_t* scale, std::size_t body, void* out) {
  const auto is_good = [&](std::size_t t) { return scale[t] >= 7 && scale[t] <= 245; };  // see e4m3_base
  bool good = false;
  if constexpr (kOut == DType::bf16) {
    const auto mantissas = hn::LoadDup128(D16(), kMantissas);
    decode_e4m3_normal<kTile>(
        payload, body,
        [&](std::size_t t) {
          return hn::Add(mantissas, hn::Set(D16(), static_cast<std::uint16_t>((scale[t] - 7) << 7)));
        },
        static_cast<std::uint16_t*>(out));
    good = all_normal<kTile>(payload, body);
    for (std::size_t t = 0; t < body / kTile; ++t) good &= is_good(t);
  }
  if (good) return;
  for (std::size_t t = 0; t < body / kTile; ++t)
    if (kOut == DType::f32 || !is_good(t) || !all_normal<kTile>(payload + t * kTile, kTile))
      decode_e4m3<kOut>(payload, t * kTile, kTile, codec::ue8m0_value(scale[t]), out);
}

template <DType kOut>
HWY_INLINE void decode_fp8_row(const std::uint8_t* payload, const std::uint8_t* scale, std::size_t body, void* out) {
  float factor;
  std::memcpy(&factor, scale, 4);
  if constexpr (kOut == DType::bf16) {
    alignas(16) std::uint16_t base[8];
    if (body % kTile == 0 && e4m3_base(factor, base)) {
      const auto table = hn::LoadDup128(D16(), base);
      decode_e4m3_normal<kTile>(
          payload, body, [&](std::size_t) { return table; }, static_cast<std::uint16_t*>(out));
      if (all_normal<kTile>(payload, body)) return;
      for (std::size_t c = 0; c < body; c += kTile)
        if (!all_normal<kTile>(payload + c, kTile)) decode_e4m3<kOut>(payload, c, kTile, factor, out);
      return;
    }
  }
  decode_e4m3<kOut>(payload, 0, body, factor, out);
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

// factor(group): the multiplier of the group's codes.
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

// e2m1 -> bf16 where all products are normal: they are one of {.5, 1, 2, 4} * scale and {1.5, 3, 6} * scale, so two
// roundings make a group's table of magnitudes. pairs: per group bf16(scale) and, above it, bf16(1.5 * scale).
template <std::size_t kGroup>
struct PairBytes {  // source bytes, in four pairs, of the magnitudes of every eight channels; zero has no source
  alignas(64) std::uint8_t at[8 * kGroup];
  constexpr PairBytes() : at() {
    for (std::size_t i = 0; i < sizeof(at); ++i) {
      const std::size_t group = i / 16 * 8 / kGroup, code = i % 16 / 2;
      at[i] = static_cast<std::uint8_t>(code == 0 ? 0x80 : 4 * group + (code > 1 ? code % 2 * 2 : 0) + i % 2);
    }
  }
};

struct FourTimes {  // 16 bytes, each four times: one byte of codes becomes two bf16
  alignas(64) std::uint8_t at[64];
  constexpr FourTimes() : at() {
    for (std::size_t i = 0; i < sizeof(at); ++i) at[i] = static_cast<std::uint8_t>(i / 4);
  }
};

template <std::size_t kGroup>
HWY_INLINE void decode_e2m1_normal(const std::uint8_t* payload, std::size_t width, const std::uint32_t* pairs,
                                   std::uint16_t* out) {
  const hn::CappedTag<std::uint16_t, 32> d;
  const hn::Repartition<std::uint8_t, decltype(d)> d8;
  const hn::Repartition<std::uint32_t, decltype(d)> d32;
  static constexpr PairBytes<kGroup> kPairBytes;
  alignas(16) static constexpr std::uint16_t kExponents[8] = {0, 0xFF80, 0, 0, 0x80, 0x80, 0x100, 0x100};
  static constexpr FourTimes kFourTimes;
  const auto exponents = hn::LoadDup128(d, kExponents);
  for (std::size_t c = 0; c < width; c += hn::Lanes(d)) {
    const auto four_pairs = hn::BitCast(d8, hn::LoadDup128(d32, pairs + c / (4 * kGroup) * 4));
    const auto base = hn::TableLookupBytesOr0(four_pairs, hn::Load(d8, kPairBytes.at + c % (4 * kGroup) * 2));
    const auto table = hn::BitCast(d8, hn::Add(hn::BitCast(d, base), exponents));
    const auto codes = hn::LoadDup128(d8, payload + c / 32 * 16);
    const auto bytes = hn::BitCast(d, hn::TableLookupBytes(codes, hn::Load(d8, kFourTimes.at + c % 32 * 2)));
    const auto code = hn::OddEven(hn::ShiftRight<4>(bytes), bytes);  // in the lower half of both bytes
    const auto at = hn::Or(hn::And(hn::ShiftLeft<1>(code), hn::Set(d, 0x0E0E)), hn::Set(d, 0x0100));
    const auto magnitude = hn::BitCast(d, hn::TableLookupBytes(table, hn::BitCast(d8, at)));
    hn::StoreU(hn::Or(magnitude, hn::And(hn::ShiftLeft<4>(code), hn::Set(d, 0x8000))), d, out + c);
  }
}

constexpr std::uint32_t kMinExponent = 2, kMaxExponent = 251;  // of a scale, so that .5 and 6 times it are normal

HWY_INLINE bool decode_mxfp4(const std::uint8_t* payload, const std::uint8_t* scale, std::size_t width,
                             std::uint16_t* out) {
  const hn::FixedTag<std::uint32_t, 4> d;
  alignas(16) std::uint32_t pairs[kMaxKeyWidth / codec::Mxfp4::kGroup];
  if (width % (4 * codec::Mxfp4::kGroup) != 0) return false;
  for (std::size_t g = 0; g < width / codec::Mxfp4::kGroup; g += 4) {
    const auto exponent = hn::PromoteTo(d, hn::LoadU(hn::Rebind<std::uint8_t, decltype(d)>(), scale + g));
    const auto above = hn::Sub(exponent, hn::Set(d, kMinExponent));
    if (!hn::AllFalse(d, hn::Gt(above, hn::Set(d, kMaxExponent - kMinExponent)))) return false;
    const auto one = hn::Or(hn::ShiftLeft<7>(exponent), hn::ShiftLeft<23>(exponent));
    hn::Store(hn::Or(one, hn::Set(d, 0x00400000u)), d, pairs + g);
  }
  decode_e2m1_normal<codec::Mxfp4::kGroup>(payload, width, pairs, out);
  return true;
}

HWY_INLINE bool decode_nvfp4(const std::uint8_t* payload, const std::uint8_t* scale, float global, std::size_t width,
                             std::uint16_t* out) {
  const hn::CappedTag<std::uint32_t, 8> d;
  const hn::RebindToFloat<decltype(d)> df;
  const std::size_t groups = width / codec::Nvfp4::kGroup;
  if (groups % 8 != 0) return false;
  const auto round = [&](auto b) {
    return hn::Add(b, hn::Add(hn::And(hn::ShiftRight<16>(b), hn::Set(d, 1)), hn::Set(d, 0x7FFF)));
  };
  alignas(32) std::uint32_t pairs[kMaxKeyWidth / codec::Nvfp4::kGroup];
  for (std::size_t g = 0; g < groups; g += hn::Lanes(d)) {
    const auto code = hn::PromoteTo(d, hn::LoadU(hn::Rebind<std::uint8_t, decltype(d)>(), scale + g));
    const auto by =
        hn::Mul(hn::BitCast(df, hn::Add(hn::ShiftLeft<20>(code), hn::Set(d, 120u << 23))), hn::Set(df, global));
    const auto b = hn::BitCast(d, by);
    const auto bad_code = hn::Gt(hn::Sub(code, hn::Set(d, 8)), hn::Set(d, 0x7E - 8));  // zero, subnormal, negative, NaN
    const auto bad_value =
        hn::Gt(hn::Sub(b, hn::Set(d, kMinExponent << 23)), hn::Set(d, (kMaxExponent - kMinExponent) << 23));
    if (!hn::AllFalse(d, hn::Or(bad_code, bad_value))) return false;
    const auto b3 = hn::BitCast(d, hn::Mul(by, hn::Set(df, 1.5f)));
    hn::Store(hn::Or(hn::ShiftRight<16>(round(b)), hn::And(round(b3), hn::Set(d, 0xFFFF0000u))), d, pairs + g);
  }
  decode_e2m1_normal<codec::Nvfp4::kGroup>(payload, width, pairs, out);
  return true;
}

// The pairs of decode_e2m1_normal for every scale byte of nvfp4_row, whose products have at most 6 bits and are normal.
// 0 for other bytes: NaN, and zero and negative scales, which no encoder writes.
struct EntryPairs {
  std::uint32_t of[256] = {};
  EntryPairs() {
    for (std::uint32_t byte = 1; byte < codec::kE4m3Nan; ++byte) {
      const float scale = codec::e4m3_value(static_cast<std::uint8_t>(byte));
      of[byte] = codec::float_bits(scale) >> 16 | codec::float_bits(1.5f * scale);
    }
  }
};

template <DType kOut>
HWY_INLINE bool decode_nvfp4_row(const std::uint8_t* payload, const std::uint8_t* scale, std::size_t width, void* out) {
  constexpr std::size_t kGroup = codec::Nvfp4Row::kGroup;
  static const EntryPairs all;
  if (width > kMaxRowWidth || width % (4 * kGroup) != 0) return false;
  alignas(32) std::uint32_t pairs[kMaxRowWidth / kGroup];
  bool known = true;
  for (std::size_t g = 0; g < width / kGroup; ++g) {
    pairs[g] = all.of[scale[g]];
    known = known && pairs[g] != 0;
  }
  if (!known) return false;
  if constexpr (kOut == DType::bf16) {
    decode_e2m1_normal<kGroup>(payload, width, pairs, static_cast<std::uint16_t*>(out));
  } else {
    alignas(64) std::uint16_t row[kMaxRowWidth];
    decode_e2m1_normal<kGroup>(payload, width, pairs, row);
    for (std::size_t c = 0; c < width; c += hn::Lanes(DF()))
      hn::StoreU(load_bf16(row + c), DF(), static_cast<float*>(out) + c);
  }
  return true;
}

template <DType kOut>
void decode_as(Format format, codec::RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale,
               float global, void* out, float* tmp) {
  const std::size_t lanes = hn::Lanes(DF()), width = shape.width, tail = shape.tail;
  const std::size_t body = width - tail;
  const bool fits = body % lanes == 0 && tail % lanes == 0;
  [[maybe_unused]] std::uint16_t* out16 = static_cast<std::uint16_t*>(out);
  if (format == Format::fp8_tile64 && fits) {
    decode_fp8_tiles<kOut, kTile>(payload, scale, body, out);
    decode_bf16<kOut>(payload + body, body, tail, out);
  } else if (format == Format::fp8_tile32 && hn::Lanes(D16()) <= kSmallTile) {
    decode_fp8_tiles<kOut, kSmallTile>(payload, scale, width, out);
  } else if (format == Format::nvfp4_row && decode_nvfp4_row<kOut>(payload, scale, width, out)) {
    return;
  } else if ((format == Format::fp8_row || format == Format::fp8) && fits) {
    decode_fp8_row<kOut>(payload, scale, body, out);
    decode_bf16<kOut>(payload + body, body, tail, out);
  } else if (format == Format::bf16 && fits) {
    decode_bf16<kOut>(payload, 0, width, out);
  } else if (format == Format::mxfp4 && width <= kMaxKeyWidth && codec::Mxfp4::kGroup % lanes == 0) {
    if constexpr (kOut == DType::bf16)
      if (decode_mxfp4(payload, scale, width, out16)) return;
    decode_e2m1<kOut>(payload, width, codec::Mxfp4::kGroup, out,
                      [&](std::size_t g) { return codec::ue8m0_value(scale[g]); });
  } else if (format == Format::nvfp4 && width <= kMaxKeyWidth && codec::Nvfp4::kGroup % lanes == 0) {
    if constexpr (kOut == DType::bf16)
      if (decode_nvfp4(payload, scale, global, width, out16)) return;
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
