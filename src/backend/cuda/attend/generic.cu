// attend for any sizes: one CTA per token and 8 heads. It decodes a row into shared memory with the codec, and each
// warp adds the row to its head. Its two barriers per row are the bottleneck.
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/rows.cuh"
#include "backend/cuda/rows/cta_group.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "codec/codec.h"
#include "ops/compress_row.h"
#include "schema/rope.h"

namespace kv4::cuda {
namespace {

constexpr int kHeads = 8;  // of a CTA, one warp each
constexpr int kThreads = 32 * kHeads;

// Shared memory: a row, and for each head a query and a sum of P V, each [width].
std::size_t shared_bytes(int width) { return sizeof(float) * static_cast<std::size_t>(width) * (1 + 2 * kHeads); }

__device__ void store(const ops::OutputDesc& out, std::int64_t at, float x) {
  if (out.dtype == DType::bf16)
    static_cast<std::uint16_t*>(out.data)[at] = codec::bf16_bits(x);
  else
    static_cast<float*>(out.data)[at] = x;
}

/// Inverse RoPE of the last channels, at the position of the query.
__device__ void inverse_rope(const ops::RopeDesc& rope, int position, int width, int lane, float* x) {
  const int pairs = rope.rope_dim / 2;
  for (int i = lane; i < pairs; i += 32) {
    float cos, sin;
    if (rope.cos != nullptr) {
      cos = rope.cos[std::int64_t{position} * pairs + i];
      sin = rope.sin[std::int64_t{position} * pairs + i];
    } else {
      rope_angle(rope.angles, position, i, &cos, &sin);
    }
    float* pair = x + width - rope.rope_dim + 2 * i;
    const float a = pair[0], b = pair[1];
    pair[0] = codec::fused(a, cos, b * sin);
    pair[1] = codec::fused(b, cos, -(a * sin));
  }
}

/// As QueryRows, but lists may be foreign.
struct ListRows : QueryRows {
  __device__ ListRows(const ops::AttendParams& p, std::int64_t token) : QueryRows(p, token) {
    if (at.padded()) return;
    if (p.window_slots.slots != nullptr) window = p.window_slots.length(token);
    if (p.entry_slots.slots != nullptr) entries = p.entry_slots.length(token);
  }

  __device__ std::int32_t key(const ops::AttendParams& p, std::int64_t token, std::int32_t i) const {
    if (i < window && p.window_slots.slots != nullptr) return p.window_slots.slot(token, i);
    if (i >= window && i < count() && p.entry_slots.slots != nullptr) return p.entry_slots.slot(token, i - window);
    return QueryRows::key(p, token, i);
  }
};

__global__ void __launch_bounds__(kThreads)
    attend_generic(const __grid_constant__ ops::AttendParams p, int head_groups) {
  extern __shared__ float shared[];
  __shared__ float scratch;
  grid_dependency_wait();
  const int width = width_of(p);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t token = blockIdx.x / head_groups;
  const int head = static_cast<int>(blockIdx.x % head_groups) * kHeads + warp;
  const bool has_head = head < p.num_heads;
  float *row = shared, *q = row + (1 + 2 * warp) * width, *sum = q + width;
  const CtaGroup g(&scratch);

  const ops::RowType q_type = p.q.dtype == DType::bf16 ? ops::RowType::bf16 : ops::RowType::f32;
  const void* q_row = static_cast<const std::uint8_t*>(p.q.data) +
                      (token * p.q.row_stride + head * width) * static_cast<std::int64_t>(element_bytes(p.q.dtype));
  for (int c = lane; c < width; c += 32) {
    q[c] = has_head ? ops::load_element(q_row, q_type, c) : 0.0f;
    sum[c] = 0.0f;
  }
  float row_max = -INFINITY, denominator = 0.0f;
  const ListRows rows(p, token);
  for (int i = 0; i < rows.count(); ++i) {
    const std::int32_t key = rows.key(p, token, i);
    const RowPointers place = rows.place(p, i, key, rows.block(p, i, key));
    if (place.payload == nullptr) continue;
    const ops::RowPlanes& planes = i < rows.window ? p.layer.window.ring : p.layer.kinds[0].page;
    float global = 1.0f;
    if (place.global != nullptr) memcpy(&global, place.global, 4);
    g.sync();  // the previous row is no longer needed
    codec::with_codec(planes.format,
                      [&](auto codec) { codec.decode(g, planes.shape, place.payload, place.scale, global, row); });
    g.sync();
    float z = 0.0f;
    for (int c = lane; c < width; c += 32) z = codec::fused(q[c], row[c], z);
    for (int step = 16; step > 0; step /= 2) z += __shfl_xor_sync(0xFFFFFFFFu, z, step);
    z *= p.softmax_scale;
    const float next = fmaxf(row_max, z);
    const float rescale = next == -INFINITY ? 1.0f : expf(row_max - next);
    const float prob = next == -INFINITY ? expf(z) : expf(z - next);
    for (int c = lane; c < width; c += 32) sum[c] = codec::fused(sum[c], rescale, prob * row[c]);
    denominator = codec::fused(denominator, rescale, prob);
    row_max = next;
  }
  if (!has_head) return;
  const std::int64_t head_at = token * p.num_heads + head;
  if (lane == 0 && p.max_logits != nullptr) p.max_logits[head_at] = row_max;
  if (lane == 0 && p.lse != nullptr && p.lse_mode == ops::LseMode::rows)
    p.lse[head_at] = denominator == 0.0f ? INFINITY : row_max + logf(denominator);
  if (p.sink != nullptr && !rows.at.padded()) {
    const float sink = p.sink[head], next = fmaxf(row_max, sink);
    if (next != -INFINITY) {
      const float rescale = expf(row_max - next);
      denominator = codec::fused(denominator, rescale, sink == next ? 1.0f : expf(sink - next));
      for (int c = lane; c < width; c += 32) sum[c] *= rescale;
      row_max = next;
    }
  }
  const float factor = denominator == 0.0f ? 0.0f : 1.0f / denominator;
  for (int c = lane; c < width; c += 32) sum[c] *= factor;
  __syncwarp();
  if (!rows.at.padded()) inverse_rope(p.inverse_rope, rows.at.position, width, lane, sum);
  __syncwarp();
  for (int c = lane; c < width; c += 32) store(p.out, head_at * width + c, sum[c]);
  if (lane == 0 && p.lse != nullptr && p.lse_mode == ops::LseMode::all)
    p.lse[head_at] = denominator == 0.0f ? -INFINITY : row_max + logf(denominator);
}

}  // namespace

cudaError_t launch_generic(const ops::AttendParams& p, const AttendSplit&, cudaStream_t stream) {
  const std::size_t shared = shared_bytes(width_of(p));
  const int head_groups = (p.num_heads + kHeads - 1) / kHeads;
  return launch_in_order(attend_generic, static_cast<unsigned>(p.step.num_tokens * head_groups), kThreads, shared,
                         stream, p, head_groups);
}

}  // namespace kv4::cuda
