// Writes a new step's tables in one launch: changed block table entries, items, a record per token.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "kv4/cuda.h"
#include "ops/expand_step.h"

namespace kv4::cuda {
namespace {

using ops::BlockRange;
using ops::StepRecord;
using ops::StepUpdate;

constexpr int kThreads = 256;

// CTAs take roles by index: tokens first, then one item per CTA, then range_ctas CTAs per range.
struct Grid {
  std::int32_t token_ctas;
  std::int32_t range_ctas;
};

__device__ void apply_range(const StepUpdate& u, const BlockRange& range, int part, int parts) {
  std::int32_t* row = u.tables.block_table + std::int64_t{range.row} * u.tables.blocks_per_request + range.begin;
  for (int i = part * kThreads + static_cast<int>(threadIdx.x); i < range.count; i += parts * kThreads)
    row[i] = u.block_ids[range.first_value + i];
}

__device__ void write_item(const StepUpdate& u, std::int32_t i) {
  const ops::StepTableDesc& t = u.tables;
  const StepRecord item = u.items[i];
  const std::int32_t begin = u.window_begins == nullptr ? 0 : u.window_begins[i];
  if (threadIdx.x == 0) {
    if (u.items != t.items) t.items[i] = item;
    ops::write_item_arrays(t, item, i, begin);
  }
  const std::int32_t head = item.end() % t.ring_rows;
  for (int r = static_cast<int>(threadIdx.x); r < t.ring_rows; r += kThreads)
    t.ring_positions[std::int64_t{i} * t.ring_rows + r] =
        item.padded() ? -1 : ops::ring_position(item.end(), head, t.ring_rows, r, begin);
}

// The last item that begins at or before the token, or -1. Items are in token order.
__device__ std::int32_t find_item(const StepUpdate& u, std::int32_t token) {
  std::int32_t begin = 0, end = u.num_items;
  while (begin < end) {
    const std::int32_t middle = (begin + end) / 2;
    if (u.items[middle].first_token <= token)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin - 1;
}

// Other CTAs may be writing the block table entry that token_record reads. A range then contains that entry, and the
// range's value replaces it; no other entry changes.
__device__ void write_token(const StepUpdate& u, std::int32_t token) {
  __shared__ BlockRange ranges[kThreads];
  const std::int32_t owner = token < u.num_tokens ? find_item(u, token) : -1;
  StepRecord record;
  bool owned = false, kept = false;
  if (owner >= 0) {
    const StepRecord item = u.items[owner];
    owned = token < item.first_token + item.count;
    if (owned) record = ops::token_record(u.tables, item, token);
    kept = record.position < item.block;
  }
  const std::int32_t index = record.position / u.tables.block_tokens;
  for (int first = 0; first < u.num_ranges; first += kThreads) {
    const int count = min(u.num_ranges - first, kThreads);
    __syncthreads();
    if (threadIdx.x < count) ranges[threadIdx.x] = u.ranges[first + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      const BlockRange& range = ranges[i];
      if (!kept && range.row == record.row && index >= range.begin && index - range.begin < range.count)
        record.block = u.block_ids[range.first_value + index - range.begin];
    }
  }
  if (owned) u.tables.tokens[token] = record;
}

// Bound by latency: a launch, about log2(items) loads that depend on each other, and a pass over the ranges.
__global__ void __launch_bounds__(kThreads) expand(const __grid_constant__ StepUpdate u, Grid grid) {
  grid_dependency_wait();
  launch_dependents();  // now: a kernel that starts early then finds all work done that was queued before this kernel
  std::int32_t cta = static_cast<std::int32_t>(blockIdx.x);
  if (cta < grid.token_ctas) return write_token(u, cta * kThreads + static_cast<int>(threadIdx.x));
  cta -= grid.token_ctas;
  if (cta < u.num_items) return write_item(u, cta);
  cta -= u.num_items;
  apply_range(u, u.ranges[cta / grid.range_ctas], cta % grid.range_ctas, grid.range_ctas);
}

}  // namespace

cudaError_t update_step(const StepUpdate& update, cudaStream_t stream) {
  const NvtxRange range("kv4 launch update_step", true);
  const auto ctas_for = [](std::int64_t n) { return static_cast<std::int32_t>((n + kThreads - 1) / kThreads); };
  const Grid grid{
      .token_ctas = ctas_for(update.num_tokens),
      .range_ctas = update.num_ranges == 0 ? 0 : std::max(ctas_for(update.num_values / update.num_ranges), 1)};
  const std::int32_t ctas = grid.token_ctas + update.num_items + update.num_ranges * grid.range_ctas;
  if (ctas == 0) return cudaSuccess;
  return launch(expand, static_cast<unsigned>(ctas), kThreads, stream, update, grid);
}

}  // namespace kv4::cuda
