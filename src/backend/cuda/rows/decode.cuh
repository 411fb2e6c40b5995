// Stored rows decoded in registers. A lane decodes octets (8 consecutive channels), octet j at channel
// 8 * (lane + j * kLanes), so that the lanes of a row read and write contiguous memory. The values equal the codecs'
// (codec/): code * scale in fp32, then bf16 by bf16_bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/rows/lanes.cuh"
#include "codec/numeric.h"
#include "kv4/params.h"

namespace kv4::cuda {

constexpr int kOctet = 8;

/// The addresses of a row. payload null: there is no row, and its channels are zero.
struct RowPointers {
  const std::uint8_t* payload = nullptr;
  const std::uint8_t* scale = nullptr;
  const std::uint8_t* global = nullptr;  // null: 1
};

__device__ inline RowPointers pointers_of(const ops::RowPlanes& rows, std::int64_t block, std::int64_t row) {
  return {rows.payload.at(block, row), rows.scale.at(block, row),
          rows.global.data == nullptr ? nullptr : rows.global.at(block, 0)};
}

/// A kernel that started early is here while rows are written, hence not through the read-only path.
template <class T, L2Priority kPriority>
__device__ T load(const std::uint8_t* at) {
  const Words<4> words = load_global<static_cast<int>(sizeof(T)), kPriority>(at);
  T value;
  memcpy(&value, words.w, sizeof(T));
  return value;
}

// --- eight channels: codes to values

/// Whether a product with these factors can be NaN; only then it must get the canonical NaN.
__device__ inline bool not_finite(float scale) { return (codec::float_bits(scale) & 0x7F800000u) == 0x7F800000u; }
__device__ inline bool has_nan_e4m3(uint2 codes) {
  const std::uint32_t next = ((codes.x & 0x7F7F7F7Fu) + 0x01010101u) | ((codes.y & 0x7F7F7F7Fu) + 0x01010101u);
  return (next & 0x80808080u) != 0;
}
__device__ inline bool has_nan_bf16(const std::uint32_t (&pairs)[4]) {
  std::uint32_t next = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) next |= (pairs[i] & 0x7FFF7FFFu) + 0x007F007Fu;
  return (next & 0x80008000u) != 0;
}

__device__ inline void scaled_e4m3(uint2 codes, float scale, float (&x)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; i += 2) {
    const std::uint32_t pair = (i < 4 ? codes.x : codes.y) >> (i % 4 * 8);
    // One instruction on sm_89 and later; every e4m3 is exact in fp16.
    const float2 code =
        __half22float2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair & 0xFFFFu), __NV_E4M3));
    x[i] = code.x * scale;
    x[i + 1] = code.y * scale;
  }
}

/// Eight e2m1 codes as bf16: permutes look up the bytes of the magnitudes in tables of eight, four at a time.
__device__ inline void e2m1_pairs(std::uint32_t codes, std::uint32_t (&pairs)[4]) {
  const std::uint32_t even_on_top = codes << 4;  // of each byte; the odd codes stand there already
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const std::uint32_t magnitudes = (codes >> (8 * i)) & 0x7777u;
    const std::uint32_t lower = permute_bytes(0xC0800000u, 0xC0804000u, magnitudes);
    const std::uint32_t upper = permute_bytes(0x3F3F3F00u, 0x40404040u, magnitudes);
    const std::uint32_t signs = permute_bytes(even_on_top, codes, 0xC080u + 0x1010u * i);
    const std::uint32_t next_signs = permute_bytes(even_on_top, codes, 0xC080u + 0x1010u * (i + 1));
    pairs[i] = permute_bytes(lower, upper, 0x5140u) | (signs & 0x80008000u);
    pairs[i + 1] = permute_bytes(lower, upper, 0x7362u) | (next_signs & 0x80008000u);
  }
}

__device__ inline void bf16_values(const std::uint32_t (&pairs)[4], float (&x)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; i += 2) {
    x[i] = codec::bits_float(pairs[i / 2] << 16);
    x[i + 1] = codec::bits_float(pairs[i / 2] & 0xFFFF0000u);
  }
}

// --- eight channels: values as they are written, bf16 pairs or fp32. NaN in bf16 becomes the canonical NaN; NaN in
// fp32 only if a product made it.

template <class Out>
struct Octet {
  static constexpr int kWords = kOctet * static_cast<int>(sizeof(Out)) / 4;
  std::uint32_t words[kWords];
};

__device__ inline void fix_nan(std::uint32_t (&pairs)[4]) {
#pragma unroll
  for (std::uint32_t& pair : pairs) {
    const std::uint32_t nan = ((((pair & 0x7FFF7FFFu) + 0x007F007Fu) & 0x80008000u) >> 15) * 0xFFFFu;
    pair = (pair & ~nan) | (nan & (codec::kBf16Nan * 0x00010001u));
  }
}

template <class Out>
__device__ Octet<Out> pack(const float (&x)[kOctet], bool maybe_nan) {
  Octet<Out> out;
  if constexpr (sizeof(Out) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      memcpy(&out.words[i], &pair, 4);
    }
    if (maybe_nan) fix_nan(out.words);
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) out.words[i] = codec::float_bits(maybe_nan ? codec::canonical_nan(x[i]) : x[i]);
  }
  return out;
}

template <class Out>
__device__ Octet<Out> unpack_bf16(uint4 raw) {
  const std::uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
  if constexpr (sizeof(Out) == 2) {
    Octet<Out> out{raw.x, raw.y, raw.z, raw.w};
    if (has_nan_bf16(pairs)) fix_nan(out.words);
    return out;
  } else {
    float x[kOctet];
    bf16_values(pairs, x);
    return pack<Out>(x, false);
  }
}

template <class Out>
__device__ Octet<Out> unpack_e4m3(uint2 codes, float scale) {
  float x[kOctet];
  scaled_e4m3(codes, scale, x);
  return pack<Out>(x, has_nan_e4m3(codes) || not_finite(scale));
}

/// kPowerOfTwo: the scale is a power of two, and exact in bf16.
template <class Out, bool kPowerOfTwo>
__device__ Octet<Out> unpack_e2m1(std::uint32_t codes, float scale) {
  std::uint32_t pairs[4];
  e2m1_pairs(codes, pairs);
  if constexpr (kPowerOfTwo && sizeof(Out) == 2) {
    Octet<Out> out;
    const __nv_bfloat162 factor = __float2bfloat162_rn(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      __nv_bfloat162 pair;
      memcpy(&pair, &pairs[i], 4);
      pair = __hmul2_rn(pair, factor);
      memcpy(&out.words[i], &pair, 4);
    }
    if (not_finite(scale)) fix_nan(out.words);
    return out;
  } else {
    float x[kOctet];
    bf16_values(pairs, x);
#pragma unroll
    for (float& value : x) value *= scale;
    return pack<Out>(x, not_finite(scale));
  }
}

// --- eight channels: to memory. All lanes of the warp call these; `exists`: the lane's row exists.

__device__ inline void store_octet(std::uint16_t* out, const Octet<std::uint16_t>& x, bool exists) {
  if (exists) store16(out, x.words[0], x.words[1], x.words[2], x.words[3]);
}

/// Adjacent lanes exchange halves, so that each store fills whole 32-byte sectors: first the even lane's octet, then
/// the odd lane's.
__device__ inline void store_octet(float* out, const Octet<float>& x, bool exists) {
  const bool odd = threadIdx.x % 2 != 0;
  std::uint32_t of_even[4], of_odd[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t low = x.words[i], high = x.words[4 + i];
    const std::uint32_t swapped = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
    of_even[i] = odd ? swapped : low;
    of_odd[i] = odd ? high : swapped;
  }
  float* first = odd ? out - 4 : out;
  if (!exists) return;
  store16(first, of_even[0], of_even[1], of_even[2], of_even[3]);
  store16(first + kOctet, of_odd[0], of_odd[1], of_odd[2], of_odd[3]);
}

// --- rows. `Raw` is the part of a row that a lane loads. A Raw of zeros decodes to zeros, so a row that does not exist
// needs no branch. Payloads are aligned to 16 bytes, scales to kScaleAlign (0: there are no scales).

/// fp8_tile64 and fp8_row: 448 e4m3, then 64 bf16.
template <Format kFormat>
struct Fp8RowReader {
  static constexpr int kWidth = 512, kTail = 64, kLanes = 32, kOctets = 2;
  static constexpr bool kTiles = kFormat == Format::fp8_tile64, kGlobal = false;
  static constexpr int kScaleAlign = kTiles ? 8 : 4;
  static constexpr int kTailLane = (kWidth - kTail) / kOctet - kLanes;  // from here on octet 1 is bf16
  static_assert(kTailLane == 24);

  struct Raw {
    uint2 low;
    uint4 high;
    uint2 scale;  // 7 UE8M0; or one fp32, in x
  };

  template <L2Priority kPriority>
  __device__ static Raw load_raw(const RowPointers& place, int lane) {
    Raw raw{};
    raw.low = load<uint2, kPriority>(place.payload + kOctet * lane);
    if (lane < kTailLane) {
      const uint2 codes = load<uint2, kPriority>(place.payload + kOctet * (kLanes + lane));
      raw.high = make_uint4(codes.x, codes.y, 0, 0);
    } else {
      raw.high = load<uint4, kPriority>(place.payload + kWidth - kTail + 2 * kOctet * (lane - kTailLane));
    }
    if constexpr (kTiles)
      raw.scale = load<uint2, kPriority>(place.scale);
    else
      raw.scale.x = load<std::uint32_t, kPriority>(place.scale);
    return raw;
  }

  template <class Out>
  __device__ static Octet<Out> decode(const Raw& raw, int lane, int octet) {
    if (octet == 1 && lane >= kTailLane) return unpack_bf16<Out>(raw.high);
    // 8 lanes share a tile, and octet 1 begins at tile 4.
    const std::uint32_t tiles = octet == 0 ? raw.scale.x : raw.scale.y;
    const float scale = kTiles ? codec::ue8m0_value(static_cast<std::uint8_t>(tiles >> (lane / 8 * 8)))
                               : codec::bits_float(raw.scale.x);
    return unpack_e4m3<Out>(octet == 0 ? raw.low : make_uint2(raw.high.x, raw.high.y), scale);
  }
};

/// mxfp4 and nvfp4 keys.
template <Format kFormat>
struct Fp4KeyReader {
  static constexpr int kWidth = 128, kTail = 0, kLanes = 16, kOctets = 1;
  static constexpr bool kGlobal = kFormat == Format::nvfp4;
  static constexpr int kScaleAlign = kGlobal ? 4 : 1;  // the global scale is fp32
  static constexpr int kLanesPerScale = kGlobal ? 2 : 4;

  struct Raw {
    std::uint32_t codes;
    std::uint8_t scale;
    float global;
  };

  template <L2Priority kPriority>
  __device__ static Raw load_raw(const RowPointers& place, int lane) {
    Raw raw{load<std::uint32_t, kPriority>(place.payload + kOctet / 2 * lane),
            load<std::uint8_t, kPriority>(place.scale + lane / kLanesPerScale), 1.0f};
    if (kGlobal && place.global != nullptr) raw.global = load<float, kPriority>(place.global);
    return raw;
  }

  template <class Out>
  __device__ static Octet<Out> decode(const Raw& raw, int, int) {
    const float scale = kGlobal ? codec::e4m3_value(raw.scale) * raw.global : codec::ue8m0_value(raw.scale);
    return unpack_e2m1<Out, !kGlobal>(raw.codes, scale);
  }
};

struct Fp8KeyReader {
  static constexpr int kWidth = 128, kTail = 0, kLanes = 16, kOctets = 1, kScaleAlign = 4;
  static constexpr bool kGlobal = false;

  struct Raw {
    uint2 codes;
    float scale;
  };

  template <L2Priority kPriority>
  __device__ static Raw load_raw(const RowPointers& place, int lane) {
    return {load<uint2, kPriority>(place.payload + kOctet * lane), load<float, kPriority>(place.scale)};
  }

  template <class Out>
  __device__ static Octet<Out> decode(const Raw& raw, int, int) {
    return unpack_e4m3<Out>(raw.codes, raw.scale);
  }
};

/// bf16 rows and keys, with or without a tail.
template <int kChannels>
struct Bf16Reader {
  static constexpr int kWidth = kChannels, kTail = -1, kScaleAlign = 0;
  static constexpr int kLanes = kWidth / kOctet < 32 ? kWidth / kOctet : 32;
  static constexpr int kOctets = kWidth / kOctet / kLanes;
  static constexpr bool kGlobal = false;
  static_assert(kWidth == kOctet * kLanes * kOctets);

  struct Raw {
    uint4 pairs[kOctets];
  };

  template <L2Priority kPriority>
  __device__ static Raw load_raw(const RowPointers& place, int lane) {
    Raw raw;
#pragma unroll
    for (int j = 0; j < kOctets; ++j)
      raw.pairs[j] = load<uint4, kPriority>(place.payload + 2 * kOctet * (lane + j * kLanes));
    return raw;
  }

  template <class Out>
  __device__ static Octet<Out> decode(const Raw& raw, int, int octet) {
    return unpack_bf16<Out>(raw.pairs[octet]);
  }
};

}  // namespace kv4::cuda
