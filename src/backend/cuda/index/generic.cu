// Index scores of any format, width, alignment and head count.
//
// First the queries are encoded like keys, into the workspace. Then a CTA takes KV tiles of 64 or 128 keys of a token:
// it decodes 128 channels at a time of queries and keys into shared memory, each thread computes 4 x 4 or 8 x 8 dot
// products, and one thread per key and chain adds the heads (ops/score_row.h).
//
// Bound by fp32 fma: 8,192 per key of 128 channels and 64 heads are 64 clocks of an SM. Exact scores fix the order of
// the fma, so tensor cores, whose order is unknown, cannot do them. Measured for fp8 keys, whose next KV tile is loaded
// meanwhile: 123 clocks, on an H200, 2026-11-16 (220 with 4 x 4 dot products and rows loaded one by one).
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "backend/cuda/index/kernels.h"
#include "backend/cuda/index/token_tile.cuh"
#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/rows/cta_group.cuh"
#include "backend/cuda/runtime/aligned.h"
#include "backend/cuda/runtime/launch.cuh"
#include "codec/codec.h"
#include "ops/compress_row.h"
#include "ops/score_row.h"

namespace kv4::cuda {
namespace {

constexpr int kEncodeThreads = 64;

/// One CTA per head and token.
template <class Codec>
__global__ void encode_queries(const __grid_constant__ TokenTile tile) {
  extern __shared__ float shared[];  // [1 + width]
  grid_dependency_wait();
  const ops::IndexParams& p = tile.p;
  const int head = static_cast<int>(blockIdx.x), token = static_cast<int>(blockIdx.y);
  if (p.step.tokens[tile.first + token].padded()) return;
  const RowShape shape = tile.kind().page.shape;
  const CtaGroup group(shared);
  float* x = shared + 1;
  const std::int64_t at = (tile.first + token) * p.q.row_stride + std::int64_t{head} * shape.width;
  for (int c = group.lane(); c < shape.width; c += group.size())
    x[c] = p.q.dtype == DType::bf16 ? codec::bf16_value(static_cast<const std::uint16_t*>(p.q.data)[at + c])
                                    : codec::round_bf16(static_cast<const float*>(p.q.data)[at + c]);
  group.sync();
  if (tile.kind().hadamard) ops::hadamard_row(group, shape.width, x);
  std::uint8_t* to = tile.queries + token * tile.query_stride + head * query_row_bytes(shape.width);
  Codec::encode(group, shape, x, to, to + 2 * shape.width, tile.kind().global_scale);
}

struct WarpLanes {
  __device__ int lane() const { return static_cast<int>(threadIdx.x % 32); }
  __device__ int size() const { return 32; }
};

constexpr int kHeads = ops::kMaxIndexHeads, kSlice = 128, kPitch = kSlice + 4;

/// The division of a CTA's dot products: a thread has kSide x kSide of them, for heads kHeadsApart apart and keys
/// kKeysApart apart. mxfp4 also needs registers for the sums of a group.
template <class Codec>
struct Tiling {
  static constexpr bool kHasGroups = std::is_same_v<Codec, codec::Mxfp4>;
  static constexpr int kSide = kHasGroups ? 4 : 8, kKeys = kHasGroups ? 64 : 128;
  static constexpr int kHeadsApart = kHeads / kSide, kKeysApart = kKeys / kSide;
  static constexpr int kThreads = kHeadsApart * kKeysApart, kWarps = kThreads / 32;
  static constexpr int kCtas = kHasGroups ? 6 : 2;  // per SM; 2 run at once
  // A warp has 4 x 8 of the threads, so that its lanes load from different banks.
  static constexpr int kWarpHeads = 4, kWarpKeys = 32 / kWarpHeads, kWarpsByKeys = kKeysApart / kWarpKeys;

  __device__ static int first_head() {
    return static_cast<int>(threadIdx.x) / 32 / kWarpsByKeys * kWarpHeads +
           static_cast<int>(threadIdx.x) % 32 / kWarpKeys;
  }
  __device__ static int first_key() {
    return static_cast<int>(threadIdx.x) / 32 % kWarpsByKeys * kWarpKeys + static_cast<int>(threadIdx.x) % kWarpKeys;
  }
};

/// A slice of the channels of query or key rows, in shared memory.
template <class Codec, int kRows>
struct Slice {
  float x[kRows][kPitch];
};
/// mxfp4 keeps codes times 2, and the scales beside them.
template <int kRows>
struct Slice<codec::Mxfp4, kRows> {
  float x[kRows][kPitch];
  float scale[kRows][kSlice / codec::Mxfp4::kGroup];
};

template <class Codec>
struct Shared {
  Slice<Codec, kHeads> q;
  union {
    Slice<Codec, Tiling<Codec>::kKeys> k;
    float dots[kHeads][Tiling<Codec>::kKeys + 1];
  };
};

/// A warp decodes channels [begin, begin + count) of a row. A slice of whole groups is itself a row.
template <class Codec, int kRows>
__device__ void load_slice(Slice<Codec, kRows>& to, int row, const std::uint8_t* payload, const std::uint8_t* scale,
                           float global, int begin, int count) {
  const WarpLanes g;
  payload += Codec::payload_bytes({begin, 0});
  if constexpr (std::is_same_v<Codec, codec::Mxfp4>) {
    for (int c = g.lane(); c < count; c += g.size())
      to.x[row][c] = static_cast<float>(ops::e2m1_double(payload[c / 2] >> (4 * (c & 1))));
    for (int i = g.lane(); i < count / Codec::kGroup; i += g.size())
      to.scale[row][i] = codec::ue8m0_value(scale[begin / Codec::kGroup + i]);
  } else {
    if constexpr (!std::is_same_v<Codec, codec::Fp8Key>) scale += Codec::scale_bytes({begin, 0});
    Codec::decode(g, {count, 0}, payload, scale, global, to.x[row]);
  }
}

template <class Codec, int kRows>
__device__ void clear_slice(Slice<Codec, kRows>& to, int row) {
  for (int c = static_cast<int>(threadIdx.x % 32); c < kSlice; c += 32) to.x[row][c] = 0.0f;
  if constexpr (Tiling<Codec>::kHasGroups)
    if (threadIdx.x % 32 < kSlice / codec::Mxfp4::kGroup) to.scale[row][threadIdx.x % 32] = 0.0f;
}

/// The address of a key or query row.
struct KeyAddress {
  const std::uint8_t *payload = nullptr, *scale = nullptr;
  float global = 1.0f;

  KeyAddress() = default;
  __device__ KeyAddress(const TokenTile& tile, const std::int32_t* table, int entry) {
    const ops::KindDesc& kind = tile.kind();
    const std::int32_t block = table[entry / kind.rows_per_block];
    if (block < 0) return;
    if (kind.page.global.data != nullptr) memcpy(&global, kind.page.global.at(block, 0), 4);
    payload = kind.page.payload.at(block, entry % kind.rows_per_block);
    scale = kind.page.scale.at(block, entry % kind.rows_per_block);
  }
  __device__ KeyAddress of_lane(int lane) const {
    const auto pointer = [lane](const std::uint8_t* p) {
      return reinterpret_cast<const std::uint8_t*>(
          __shfl_sync(0xFFFFFFFFu, reinterpret_cast<unsigned long long>(p), lane));
    };
    KeyAddress other;
    other.payload = pointer(payload);
    other.scale = pointer(scale);
    other.global = __shfl_sync(0xFFFFFFFFu, global, lane);
    return other;
  }
};

/// Decodes four e4m3 codes.
__device__ float4 four_values(std::uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  const auto pair = [](std::uint32_t codes) {
    const std::uint32_t bits = fp16_pair_of_e4m3(static_cast<std::uint16_t>(codes));
    __half2 halves;
    memcpy(&halves, &bits, 4);
    return __half22float2(halves);
  };
  const float2 low = pair(codes), high = pair(codes >> 16);
  return make_float4(low.x, low.y, high.x, high.y);
#else
  const auto value = [codes](int i) { return codec::e4m3_value(static_cast<std::uint8_t>(codes >> (8 * i))); };
  return make_float4(value(0), value(1), value(2), value(3));
#endif
}

constexpr int kAtOnce = 8;

__device__ void store_four(float* to, std::uint32_t codes, float scale) {
  const float4 x = four_values(codes);
  *reinterpret_cast<float4*>(to) = make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
}

/// Loads kAtOnce fp8 rows of 128 channels, four channels per lane; all loads are issued before the first row is
/// decoded. Absent rows are zero.
template <int kRows, class AddressOf>
__device__ void fill_words(Slice<codec::Fp8Key, kRows>& to, int first, AddressOf address_of) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t codes[kAtOnce];
  float scales[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const KeyAddress row = address_of(i);
    codes[i] = row.payload == nullptr ? 0 : reinterpret_cast<const std::uint32_t*>(row.payload)[lane];
    scales[i] = row.payload == nullptr ? 0.0f : *reinterpret_cast<const float*>(row.scale);
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) store_four(&to.x[first + i][4 * lane], codes[i], scales[i]);
}

/// A warp loads kAtOnce rows from `first` on.
template <class Codec, int kRows, class AddressOf>
__device__ void fill(Slice<Codec, kRows>& to, int first, AddressOf address_of, int begin, int count) {
#pragma unroll 1
  for (int i = 0; i < kAtOnce; ++i) {
    const KeyAddress row = address_of(i);
    clear_slice(to, first + i);
    __syncwarp();
    if (row.payload != nullptr) load_slice(to, first + i, row.payload, row.scale, row.global, begin, count);
  }
}

/// The keys of a token, one KV tile at a time.
template <class Codec, bool kWords>
class Keys {
 public:
  using T = Tiling<Codec>;
  __device__ Keys(const TokenTile& tile, const std::int32_t* table, int scored)
      : tile_(tile), table_(table), scored_(scored) {}

  /// Announces the next KV tile, whose keys begin at `first`.
  __device__ void issue(int) {}
  __device__ void fill_in(Slice<Codec, T::kKeys>& to, int first, int begin, int count) const {
    for (int row = warp() * kAtOnce; row < T::kKeys; row += T::kWarps * kAtOnce) {
      KeyAddress mine;
      if (lane() < kAtOnce && first + row + lane() < scored_) mine = KeyAddress(tile_, table_, first + row + lane());
      fill(
          to, row, [&](int i) { return mine.of_lane(i); }, begin, count);
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }

  const TokenTile& tile_;
  const std::int32_t* table_;
  const int scored_;
};

/// fp8 keys of 128 channels: the words of the next KV tile are loaded while the current one is multiplied.
template <>
class Keys<codec::Fp8Key, true> {
 public:
  using T = Tiling<codec::Fp8Key>;
  __device__ Keys(const TokenTile& tile, const std::int32_t* table, int scored)
      : tile_(tile), table_(table), scored_(scored) {}

  __device__ void issue(int first) {
    KeyAddress mine;
    if (first + own_row() < scored_) mine = KeyAddress(tile_, table_, first + own_row());
    scale_ = mine.scale == nullptr ? 0.0f : *reinterpret_cast<const float*>(mine.scale);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const KeyAddress row = mine.of_lane(i);
      codes_[i] = 0;
      if (row.payload != nullptr) codes_[i] = reinterpret_cast<const std::uint32_t*>(row.payload)[lane()];
    }
  }
  __device__ void fill_in(Slice<codec::Fp8Key, T::kKeys>& to, int, int, int) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float scale = __shfl_sync(0xFFFFFFFFu, scale_, i);
      store_four(&to.x[own_row() - lane() + i][4 * lane()], codes_[i], scale);
    }
  }

 private:
  static constexpr int kRows = 32;
  static_assert(T::kWarps * kRows == T::kKeys);

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int own_row() { return static_cast<int>(threadIdx.x); }  // the lane's row of the KV tile

  const TokenTile& tile_;
  const std::int32_t* table_;
  const int scored_;
  std::uint32_t codes_[kRows];
  float scale_;
};

/// Whether keys and queries are fp8 of 128 channels and aligned to words.
bool has_fp8_words(const ops::IndexParams& p) {
  const ops::RowPlanes& page = p.layer.kinds[p.kind].page;
  return page.format == Format::fp8 && page.shape.width == kSlice && is_aligned(page.payload, 4) &&
         is_aligned(page.scale, 4) &&
         (p.q.dtype != DType::u8 ||
          (is_aligned(p.q.data, p.q.row_stride, 4) && is_aligned(p.q_scale.data, p.q_scale.row_stride, 4)));
}

template <class Codec, bool kWords>
__global__ void __launch_bounds__(Tiling<Codec>::kThreads) score_keys(const __grid_constant__ TokenTile tile) {
  using T = Tiling<Codec>;
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared<Codec>& s = *reinterpret_cast<Shared<Codec>*>(bytes);
  grid_dependency_wait();
  const ops::IndexParams& p = tile.p;
  const ops::KindDesc& kind = tile.kind();
  const int width = kind.page.shape.width, warp = static_cast<int>(threadIdx.x / 32);
  const int at_key = T::first_key(), at_head = T::first_head();
  const int kv_splits = static_cast<int>(gridDim.x) / tile.count, token = static_cast<int>(blockIdx.x) / kv_splits;
  const ops::StepRecord record = p.step.tokens[tile.first + token];
  const int scored = tile.scored(record);
  const QueryRows queries = query_rows<Codec>(tile, token);
  const std::int32_t* table = p.step.block_table + std::int64_t{record.row} * p.step.blocks_per_request;
  const float* weights = static_cast<const float*>(p.weights.data) + (tile.first + token) * p.weights.row_stride;

  bool has_queries = false;  // all channels are in shared memory
  Keys<Codec, kWords> keys(tile, table, scored);
  const int begin_key = static_cast<int>(blockIdx.x) % kv_splits * T::kKeys;
  keys.issue(begin_key);
  for (int first = begin_key; first < scored; first += kv_splits * T::kKeys) {
    float dot[T::kSide][T::kSide] = {};  // [head, key]
    for (int begin = 0; begin < width; begin += kSlice) {
      const int count = min(kSlice, width - begin);
      __syncthreads();
      for (int row = warp * kAtOnce; !has_queries && row < kHeads; row += T::kWarps * kAtOnce) {
        const auto address_of = [&](int i) {
          KeyAddress head;
          if (row + i >= p.num_heads) return head;
          head.payload = queries.payload + (row + i) * queries.payload_stride;
          head.scale = queries.scale + (row + i) * queries.scale_stride;
          head.global = kind.global_scale;
          return head;
        };
        if constexpr (kWords)
          fill_words(s.q, row, address_of);
        else
          fill(s.q, row, address_of, begin, count);
      }
      keys.fill_in(s.k, first, begin, count);
      __syncthreads();
      has_queries = width <= kSlice;
      keys.issue(first + kv_splits * T::kKeys);
      constexpr int kGroup = T::kHasGroups ? codec::Mxfp4::kGroup : kSlice;
      for (int group = 0; group < kSlice / kGroup; ++group) {
        float sum[T::kSide][T::kSide] = {};
        float(&to)[T::kSide][T::kSide] = T::kHasGroups ? sum : dot;
#pragma unroll 2
        for (int c = group * kGroup; c < (group + 1) * kGroup; c += 4) {
          float4 q[T::kSide], k[T::kSide];
#pragma unroll
          for (int i = 0; i < T::kSide; ++i) {
            q[i] = *reinterpret_cast<const float4*>(&s.q.x[at_head + i * T::kHeadsApart][c]);
            k[i] = *reinterpret_cast<const float4*>(&s.k.x[at_key + i * T::kKeysApart][c]);
          }
#pragma unroll
          for (int i = 0; i < T::kSide; ++i)
#pragma unroll
            for (int j = 0; j < T::kSide; ++j) {
              to[i][j] = codec::fused(q[i].x, k[j].x, to[i][j]);
              to[i][j] = codec::fused(q[i].y, k[j].y, to[i][j]);
              to[i][j] = codec::fused(q[i].z, k[j].z, to[i][j]);
              to[i][j] = codec::fused(q[i].w, k[j].w, to[i][j]);
            }
        }
        if constexpr (T::kHasGroups) {
#pragma unroll
          for (int i = 0; i < T::kSide; ++i)
#pragma unroll
            for (int j = 0; j < T::kSide; ++j)
              dot[i][j] = dot[i][j] + sum[i][j] * (s.k.scale[at_key + j * T::kKeysApart][group] * 0.25f) *
                                          s.q.scale[at_head + i * T::kHeadsApart][group];
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < T::kSide; ++i)
#pragma unroll
      for (int j = 0; j < T::kSide; ++j) s.dots[at_head + i * T::kHeadsApart][at_key + j * T::kKeysApart] = dot[i][j];
    __syncthreads();

    const int chain = static_cast<int>(threadIdx.x) % ops::kChains;
    for (int key = static_cast<int>(threadIdx.x) / ops::kChains; key < T::kKeys; key += T::kThreads / ops::kChains) {
      float sum = 0.0f;
      for (int h = chain * ops::kChainHeads; h < min((chain + 1) * ops::kChainHeads, p.num_heads); ++h)
        sum = codec::fused(weights[h], ops::relu(s.dots[h][key]), sum);
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
      if (chain == 0 && first + key < scored) tile.row(token)[first + key] = codec::canonical_nan(sum);
    }
  }
  if (tile.fill) fill_tail(tile, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
}

template <class Codec, bool kWords>
cudaError_t launch_scores(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  using T = Tiling<Codec>;
  constexpr int kBytes = sizeof(Shared<Codec>);
  static_assert(kBytes > 48 << 10 && kBytes <= 99 << 10);  // the limit of a CTA on every GPU from sm_80 on
  const auto kernel = score_keys<Codec, kWords>;
  const std::int64_t tiles = std::max<std::int64_t>((max_entries(tile.p) + T::kKeys - 1) / T::kKeys, 1);
  const std::int64_t kv_splits = std::clamp<std::int64_t>(device.num_sms * T::kCtas / tile.count, 1, tiles);
  return launch<kBytes>(kernel, static_cast<unsigned>(kv_splits * tile.count), T::kThreads, stream, tile);
}

template <class Codec>
cudaError_t score_with(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  const RowShape shape = tile.kind().page.shape;
  if (tile.p.q.dtype != DType::u8) {
    const dim3 grid(static_cast<unsigned>(tile.p.num_heads), static_cast<unsigned>(tile.count));
    const cudaError_t status = launch_in_order(encode_queries<Codec>, grid, kEncodeThreads,
                                               static_cast<std::size_t>(4 * (shape.width + 1)), stream, tile);
    if (status != cudaSuccess) return status;
  }
  if constexpr (std::is_same_v<Codec, codec::Fp8Key>) {
    if (has_fp8_words(tile.p)) return launch_scores<Codec, true>(tile, device, stream);
  }
  return launch_scores<Codec, false>(tile, device, stream);
}

}  // namespace

cudaError_t score_generic(const TokenTile& tile, const DeviceFacts& device, cudaStream_t stream) {
  switch (tile.kind().page.format) {
    case Format::mxfp4: return score_with<codec::Mxfp4>(tile, device, stream);
    case Format::nvfp4: return score_with<codec::Nvfp4>(tile, device, stream);
    case Format::fp8: return score_with<codec::Fp8Key>(tile, device, stream);
    case Format::bf16: return score_with<codec::Bf16Row>(tile, device, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace kv4::cuda
