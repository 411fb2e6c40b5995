// Index scores of any format, width, alignment and head count.
//
// First the queries are encoded as keys are, into the workspace. Then a thread block takes 64 keys of a token: 128
// channels at a time of queries and keys are decoded into shared memory, a thread makes 4 x 4 dot products, and one per
// key and chain adds the heads (ops/score_row.h).
//
// Bound by fp32 fma: 8,192 per key of 128 channels and 64 heads are 64 clocks of a multiprocessor. Their order is part
// of the definition, so a matrix unit, which adds as it likes, cannot take them over. Measured are 220, on an H200,
// 2026-11-15: loads from shared memory and decoding take the rest.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "backend/cuda/group.cuh"
#include "backend/cuda/index_tile.cuh"
#include "backend/cuda/launch.cuh"
#include "codec/codec.h"
#include "ops/compress_row.h"
#include "ops/score_row.h"

namespace kv4::cuda {
namespace {

/// A thread block per head and token.
template <class Codec>
__global__ void encode_queries(const __grid_constant__ IndexTile tile) {
  extern __shared__ float shared[];  // [1 + width]
  wait_for_previous();
  const ops::IndexParams& p = tile.p;
  const int head = static_cast<int>(blockIdx.x), token = static_cast<int>(blockIdx.y);
  if (p.step.tokens[tile.first + token].padded()) return;
  const RowShape shape = tile.kind().page.shape;
  const Block block(shared);
  float* x = shared + 1;
  const std::int64_t at = (tile.first + token) * p.q.row_stride + std::int64_t{head} * shape.width;
  for (int c = block.lane(); c < shape.width; c += block.size())
    x[c] = p.q.dtype == DType::bf16 ? codec::bf16_value(static_cast<const std::uint16_t*>(p.q.data)[at + c])
                                    : codec::round_bf16(static_cast<const float*>(p.q.data)[at + c]);
  block.sync();
  if (tile.kind().hadamard) ops::hadamard_row(block, shape.width, x);
  std::uint8_t* to = tile.queries + token * tile.query_stride + head * query_row_bytes(shape.width);
  Codec::encode(block, shape, x, to, to + 2 * shape.width, tile.kind().global_scale);
}

struct WarpGroup {
  __device__ int lane() const { return static_cast<int>(threadIdx.x % 32); }
  __device__ int size() const { return 32; }
};

constexpr int kTileKeys = 64, kSlice = 128, kPitch = kSlice + 4, kThreads = 256, kRegisterTile = 4;
constexpr int kRowsPerPass = kTileKeys / kRegisterTile;  // a thread's rows lie this far apart
static_assert(ops::kMaxIndexHeads == kTileKeys && kRowsPerPass * kRowsPerPass == kThreads);

/// Rows of queries or keys in shared memory: a slice of their channels. mxfp4: codes times 2, scales apart.
struct Slice {
  float x[kTileKeys][kPitch];
  float scale[kTileKeys][kSlice / codec::Mxfp4::kGroup];
};

struct Shared {
  Slice q;
  union {
    Slice k;
    float dots[ops::kMaxIndexHeads][kTileKeys + 1];
  };
};

/// Channels [begin, begin + count) of a row, decoded by a warp. A slice of groups is a row itself.
template <class Codec>
__device__ void load_slice(Slice& to, int row, const std::uint8_t* payload, const std::uint8_t* scale, float global,
                           int begin, int count) {
  const WarpGroup g;
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

__device__ void clear_slice(Slice& to, int row) {
  for (int c = static_cast<int>(threadIdx.x % 32); c < kSlice; c += 32) to.x[row][c] = 0.0f;
  if (threadIdx.x % 32 < kSlice / codec::Mxfp4::kGroup) to.scale[row][threadIdx.x % 32] = 0.0f;
}

template <class Codec>
__global__ void __launch_bounds__(kThreads) score_keys(const __grid_constant__ IndexTile tile) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  wait_for_previous();
  const ops::IndexParams& p = tile.p;
  const ops::KindDesc& kind = tile.kind();
  const int width = kind.page.shape.width, warp = static_cast<int>(threadIdx.x / 32);
  const int at_key = static_cast<int>(threadIdx.x) % kRowsPerPass,
            at_head = static_cast<int>(threadIdx.x) / kRowsPerPass;
  const int parts = static_cast<int>(gridDim.x) / tile.count, token = static_cast<int>(blockIdx.x) / parts;
  const ops::StepRecord record = p.step.tokens[tile.first + token];
  const int scored = tile.scored(record);
  const QueryRows queries = query_rows<Codec>(tile, token);
  const std::int32_t* table = p.step.block_table + std::int64_t{record.row} * p.step.blocks_per_request;
  const float* weights = static_cast<const float*>(p.weights.data) + (tile.first + token) * p.weights.row_stride;

  bool has_queries = false;  // in shared memory, all channels
  for (int first = static_cast<int>(blockIdx.x) % parts * kTileKeys; first < scored; first += parts * kTileKeys) {
    float dot[kRegisterTile][kRegisterTile] = {};  // [head, key]
    for (int begin = 0; begin < width; begin += kSlice) {
      const int count = min(kSlice, width - begin);
      __syncthreads();
      for (int row = warp; row < kTileKeys; row += kThreads / 32) {
        if (!has_queries) clear_slice(s.q, row);
        clear_slice(s.k, row);
        __syncwarp();
        if (!has_queries && row < p.num_heads)
          load_slice<Codec>(s.q, row, queries.payload + row * queries.payload_stride,
                            queries.scale + row * queries.scale_stride, kind.global_scale, begin, count);
        const int entry = first + row;
        const std::int32_t block = entry < scored ? table[entry / kind.rows_per_block] : -1;
        if (block < 0) continue;
        float global = 1.0f;
        if (kind.page.global.data != nullptr) memcpy(&global, kind.page.global.at(block, 0), 4);
        const int in_block = entry % kind.rows_per_block;
        load_slice<Codec>(s.k, row, kind.page.payload.at(block, in_block), kind.page.scale.at(block, in_block), global,
                          begin, count);
      }
      __syncthreads();
      has_queries = width <= kSlice;
      constexpr int kGroup = std::is_same_v<Codec, codec::Mxfp4> ? codec::Mxfp4::kGroup : kSlice;
      for (int group = 0; group < kSlice / kGroup; ++group) {
        float sum[kRegisterTile][kRegisterTile] = {};
        float(&to)[kRegisterTile][kRegisterTile] = std::is_same_v<Codec, codec::Mxfp4> ? sum : dot;
#pragma unroll 4
        for (int c = group * kGroup; c < (group + 1) * kGroup; c += 4) {
          float4 q[kRegisterTile], k[kRegisterTile];
#pragma unroll
          for (int i = 0; i < kRegisterTile; ++i) {
            q[i] = *reinterpret_cast<const float4*>(&s.q.x[at_head + i * kRowsPerPass][c]);
            k[i] = *reinterpret_cast<const float4*>(&s.k.x[at_key + i * kRowsPerPass][c]);
          }
#pragma unroll
          for (int i = 0; i < kRegisterTile; ++i)
#pragma unroll
            for (int j = 0; j < kRegisterTile; ++j) {
              to[i][j] = codec::fused(q[i].x, k[j].x, to[i][j]);
              to[i][j] = codec::fused(q[i].y, k[j].y, to[i][j]);
              to[i][j] = codec::fused(q[i].z, k[j].z, to[i][j]);
              to[i][j] = codec::fused(q[i].w, k[j].w, to[i][j]);
            }
        }
        if constexpr (std::is_same_v<Codec, codec::Mxfp4>) {
#pragma unroll
          for (int i = 0; i < kRegisterTile; ++i)
#pragma unroll
            for (int j = 0; j < kRegisterTile; ++j)
              dot[i][j] = dot[i][j] + sum[i][j] * (s.k.scale[at_key + j * kRowsPerPass][group] * 0.25f) *
                                          s.q.scale[at_head + i * kRowsPerPass][group];
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRegisterTile; ++i)
#pragma unroll
      for (int j = 0; j < kRegisterTile; ++j) s.dots[at_head + i * kRowsPerPass][at_key + j * kRowsPerPass] = dot[i][j];
    __syncthreads();

    const int key = static_cast<int>(threadIdx.x) / ops::kChains, chain = static_cast<int>(threadIdx.x) % ops::kChains;
    float sum = 0.0f;
    for (int h = chain * ops::kChainHeads; h < min((chain + 1) * ops::kChainHeads, p.num_heads); ++h)
      sum = codec::fused(weights[h], ops::relu(s.dots[h][key]), sum);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    if (chain == 0 && first + key < scored) tile.row(token)[first + key] = codec::canonical_nan(sum);
  }
  if (tile.fill) fill_rest(tile, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
}

constexpr int kMostBlocks = 132 * 6;

template <class Codec>
cudaError_t score_with(const IndexTile& tile, cudaStream_t stream) {
  const RowShape shape = tile.kind().page.shape;
  if (tile.p.q.dtype != DType::u8) {
    const dim3 grid(static_cast<unsigned>(tile.p.num_heads), static_cast<unsigned>(tile.count));
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = 64;
    config.dynamicSmemBytes = static_cast<std::size_t>(4 * (shape.width + 1));
    config.stream = stream;
    const cudaError_t status = cudaLaunchKernelEx(&config, encode_queries<Codec>, tile);
    if (status != cudaSuccess) return status;
  }
  static_assert(sizeof(Shared) > 48 << 10);
  const cudaError_t status = cudaFuncSetAttribute(score_keys<Codec>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(sizeof(Shared)));
  if (status != cudaSuccess) return status;
  const std::int64_t tiles = std::max<std::int64_t>((max_entries(tile.p) + kTileKeys - 1) / kTileKeys, 1);
  const std::int64_t parts = std::clamp<std::int64_t>(kMostBlocks / tile.count, 1, tiles);
  return launch<sizeof(Shared)>(score_keys<Codec>, static_cast<unsigned>(parts * tile.count), kThreads, stream, tile);
}

}  // namespace

cudaError_t score_plain(const IndexTile& tile, cudaStream_t stream) {
  switch (tile.kind().page.format) {
    case Format::mxfp4: return score_with<codec::Mxfp4>(tile, stream);
    case Format::nvfp4: return score_with<codec::Nvfp4>(tile, stream);
    case Format::fp8: return score_with<codec::Fp8Key>(tile, stream);
    case Format::bf16: return score_with<codec::Bf16Row>(tile, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace kv4::cuda
