// Stored rows decoded in registers. A lane makes octets: 8 consecutive channels, octet j at channel
// 8 * (lane + j * kLanes), so that the lanes of a row read and write one run of memory. The values are the codecs' own
// (codec/): code * scale in fp32, then bf16 by bf16_bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "codec/numeric.h"
#include "kv4/params.h"

namespace kv4::cuda {

constexpr int kOctet = 8;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

/// Where a row lies; payload null: there is none, and its channels are zero.
struct RowPlace {
  const std::uint8_t* payload = nullptr;
  const std::uint8_t* scale = nullptr;
  const std::uint8_t* global = nullptr;  // null: 1
};

__device__ inline RowPlace place_of(const ops::RowPlanes& rows, std::int64_t block, std::int64_t row) {
  return {rows.payload.at(block, row), rows.scale.at(block, row),
          rows.global.data == nullptr ? nullptr : rows.global.at(block, 0)};
}

/// Not through the read-only path: a kernel that started early is there while rows are written.
template <class T>
__device__ T load(const std::uint8_t* at) {
  return *reinterpret_cast<const T*>(at);
}

// --- eight channels: codes to values

/// To bf16, NaN gets its one pattern when it is stored.
template <class Out>
__device__ float product(float code, float scale) {
  const float x = code * scale;
  return sizeof(Out) == 4 ? codec::canonical_nan(x) : x;
}

template <class Out>
__device__ void scaled_e4m3(uint2 codes, float scale, float (&x)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; i += 2) {
    const std::uint32_t pair = (i < 4 ? codes.x : codes.y) >> (i % 4 * 8);
    // One instruction from sm_89 on; every e4m3 is exact in fp16.
    const float2 code =
        __half22float2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair & 0xFFFFu), __NV_E4M3));
    x[i] = product<Out>(code.x, scale);
    x[i + 1] = product<Out>(code.y, scale);
  }
}

/// e2m1 bits at the top of an fp32's exponent and mantissa are the value times 2^-126, its denormals included.
template <class Out>
__device__ void scaled_e2m1(std::uint32_t codes, float scale, float (&x)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const std::uint32_t top = codes << (28 - 4 * i);
    const float tiny = codec::bits_float((top & 0x80000000u) | ((top >> 6) & 0x01C00000u));
    x[i] = product<Out>(tiny * 0x1p126f, scale);
  }
}

__device__ inline void bf16_values(uint4 pairs, float (&x)[kOctet]) {
  const std::uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
  for (int i = 0; i < kOctet; i += 2) {
    x[i] = codec::bits_float(words[i / 2] << 16);
    x[i + 1] = codec::bits_float(words[i / 2] & 0xFFFF0000u);
  }
}

// --- eight channels: values to memory. All lanes of the warp call these; `there` says whether a lane's row is.

/// Spelled out: the compiler splits vector stores whose value comes out of a branch, and gives those of __stwb and
/// __stcg a stronger order than needed.
__device__ inline void store16(void* at, std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)), "r"(x), "r"(y), "r"(z),
               "r"(w)
               : "memory");
}

__device__ inline void store_octet(std::uint16_t* out, const float (&x)[kOctet], bool there) {
  std::uint32_t words[4], magnitudes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    memcpy(&words[i], &pair, 4);
    magnitudes[i] = (words[i] & 0x7FFF7FFFu) + 0x007F007Fu;  // the top bit of a half: it is NaN
  }
  if (((magnitudes[0] | magnitudes[1] | magnitudes[2] | magnitudes[3]) & 0x80008000u) != 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t nan = ((magnitudes[i] & 0x80008000u) >> 15) * 0xFFFFu;
      words[i] = (words[i] & ~nan) | (nan & (codec::kBf16Nan * 0x00010001u));
    }
  }
  if (there) store16(out, words[0], words[1], words[2], words[3]);
}

/// Neighbour lanes swap halves, so that each store fills whole 32-byte sectors: first the even lane's octet, then the
/// odd one's.
__device__ inline void store_octet(float* out, const float (&x)[kOctet], bool there) {
  const bool odd = threadIdx.x % 2 != 0;
  std::uint32_t of_even[4], of_odd[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t low = codec::float_bits(x[i]), high = codec::float_bits(x[4 + i]);
    const std::uint32_t swapped = __shfl_xor_sync(kFullWarp, odd ? low : high, 1);
    of_even[i] = odd ? swapped : low;
    of_odd[i] = odd ? high : swapped;
  }
  float* first = odd ? out - 4 : out;
  if (!there) return;
  store16(first, of_even[0], of_even[1], of_even[2], of_even[3]);
  store16(first + kOctet, of_odd[0], of_odd[1], of_odd[2], of_odd[3]);
}

// --- rows. `Raw` is what a lane loads of a row; all zero it decodes to zeros, so a row that is not there needs no
// branch. Payloads lie at multiples of 16 bytes, scales of kScaleAlign (0: there are none).

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

  __device__ static Raw load_raw(const RowPlace& place, int lane) {
    Raw raw{};
    raw.low = load<uint2>(place.payload + kOctet * lane);
    if (lane < kTailLane) {
      const uint2 codes = load<uint2>(place.payload + kOctet * (kLanes + lane));
      raw.high = make_uint4(codes.x, codes.y, 0, 0);
    } else {
      raw.high = load<uint4>(place.payload + kWidth - kTail + 2 * kOctet * (lane - kTailLane));
    }
    if constexpr (kTiles)
      raw.scale = load<uint2>(place.scale);
    else
      raw.scale.x = load<std::uint32_t>(place.scale);
    return raw;
  }

  template <class Out>
  __device__ static void decode(const Raw& raw, int lane, int octet, float (&x)[kOctet]) {
    if (octet == 1 && lane >= kTailLane) return bf16_values(raw.high, x);
    // 8 lanes share a tile, and octet 1 begins at tile 4.
    const std::uint32_t tiles = octet == 0 ? raw.scale.x : raw.scale.y;
    const float scale = kTiles ? codec::ue8m0_value(static_cast<std::uint8_t>(tiles >> (lane / 8 * 8)))
                               : codec::bits_float(raw.scale.x);
    scaled_e4m3<Out>(octet == 0 ? raw.low : make_uint2(raw.high.x, raw.high.y), scale, x);
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

  __device__ static Raw load_raw(const RowPlace& place, int lane) {
    Raw raw{load<std::uint32_t>(place.payload + kOctet / 2 * lane),
            load<std::uint8_t>(place.scale + lane / kLanesPerScale), 1.0f};
    if (kGlobal && place.global != nullptr) raw.global = load<float>(place.global);
    return raw;
  }

  template <class Out>
  __device__ static void decode(const Raw& raw, int, int, float (&x)[kOctet]) {
    scaled_e2m1<Out>(raw.codes, kGlobal ? codec::e4m3_value(raw.scale) * raw.global : codec::ue8m0_value(raw.scale), x);
  }
};

struct Fp8KeyReader {
  static constexpr int kWidth = 128, kTail = 0, kLanes = 16, kOctets = 1, kScaleAlign = 4;
  static constexpr bool kGlobal = false;

  struct Raw {
    uint2 codes;
    float scale;
  };

  __device__ static Raw load_raw(const RowPlace& place, int lane) {
    return {load<uint2>(place.payload + kOctet * lane), load<float>(place.scale)};
  }

  template <class Out>
  __device__ static void decode(const Raw& raw, int, int, float (&x)[kOctet]) {
    scaled_e4m3<Out>(raw.codes, raw.scale, x);
  }
};

/// bf16 rows and keys; the tail makes no difference.
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

  __device__ static Raw load_raw(const RowPlace& place, int lane) {
    Raw raw;
#pragma unroll
    for (int j = 0; j < kOctets; ++j) raw.pairs[j] = load<uint4>(place.payload + 2 * kOctet * (lane + j * kLanes));
    return raw;
  }

  template <class Out>
  __device__ static void decode(const Raw& raw, int, int octet, float (&x)[kOctet]) {
    bf16_values(raw.pairs[octet], x);
  }
};

}  // namespace kv4::cuda
