// The staging pass of staged.cu: the rows that a step's queries see, decoded into bf16 once. A warp decodes four rows
// at a time. Bound by memory: 584 bytes of a row are read, 1,024 written.
#include <algorithm>

#include "backend/cuda/attend/rows.cuh"
#include "backend/cuda/attend/staged.cuh"
#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {
namespace {

constexpr int kStageWarps = 8, kRowsAtOnce = 4;
using Reader = Fp8RowReader<Format::fp8_tile64>;

/// The record of an item. Without a table of items there is one item: that of the first token that belongs to one.
__device__ ops::StepRecord item_record(const ops::StepDesc& step, int item, int lane) {
  if (step.items != nullptr) return step.items[item];
  for (int first = 0; first < step.num_tokens; first += kWarp) {
    const bool found = first + lane < step.num_tokens && !step.tokens[first + lane].padded();
    const unsigned lanes = __ballot_sync(kAllLanes, found);
    if (lanes != 0) return step.tokens[first + __ffs(static_cast<int>(lanes)) - 1];
  }
  return {};
}

__global__ void __launch_bounds__(32 * kStageWarps)
    stage_rows(const __grid_constant__ ops::AttendParams p, const __grid_constant__ StagedRows to) {
  launch_dependents();
  grid_dependency_wait();
  const int lane = static_cast<int>(threadIdx.x) % kWarp, item = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (item == 0)  // the zeros of a panel
    for (int i = thread; i < kBlockRows * 128 / 16; i += static_cast<int>(gridDim.x * blockDim.x))
      store16(reinterpret_cast<std::uint16_t*>(to.rows + i * 16), 0, 0, 0, 0);
  const ops::StepRecord at = item_record(p.step, item, lane);
  if (at.padded()) return;
  const ops::WindowDesc& w = p.layer.window;
  const ops::KindDesc& kind = p.layer.kinds[0];
  for (int i = thread; i < at.count; i += static_cast<int>(gridDim.x * blockDim.x))
    to.item_of_token[at.first_token + i] = item;

  // The window rows from `first` on, those of the step included, then the entries.
  const int first = first_window_row(at, p.layer.window_tokens, window_begin(p.step, at));
  const int window_at = to.window_at(at, item, p.layer.window_tokens, first);
  const int window = p.layer.window_tokens > 0 ? at.end() - first : 0;
  const int entries = p.layer.num_kinds > 0 ? min(at.end() / kind.ratio, to.max_entries) : 0;
  const int warp = thread / kWarp, warps = static_cast<int>(gridDim.x) * kStageWarps;
  for (int base = warp * kRowsAtOnce; base < window + entries; base += warps * kRowsAtOnce) {
    Reader::Raw raw[kRowsAtOnce];
    int target[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int row = base + i;
      RowPointers place;
      target[i] = -1;
      if (row < window) {
        const int position = first + row;
        target[i] = window_at + position;
        place = position >= at.length && !at.in_place() ? pointers_of(w.scratch, 0, at.token_of(position))
                                      : pointers_of(w.ring, at.read_slot, position % w.rows);
      } else if (row < window + entries) {
        const int entry = row - window;
        target[i] = to.entries_at + item * to.max_entries + entry;
        const int block =
            p.step.block_table[std::int64_t{at.row} * p.step.blocks_per_request + entry / kind.rows_per_block];
        if (block >= 0) place = pointers_of(kind.page, block, entry % kind.rows_per_block);
      }
      raw[i] = {};
      if (place.payload != nullptr) raw[i] = Reader::load_raw<L2Priority::evict_first>(place, lane);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i)
#pragma unroll
      for (int octet = 0; octet < Reader::kOctets; ++octet)
        store_octet(reinterpret_cast<std::uint16_t*>(
                        to.rows + staged_offset(max(target[i], 0), lane + octet * kWarp,
                                                base + i < window || to.entries_in_blocks)),
                    Reader::decode<std::uint16_t>(raw[i], lane, octet), target[i] >= 0);
  }
}

}  // namespace

cudaError_t launch_stage_rows(const ops::AttendParams& p, const StagedRows& to, cudaStream_t stream) {
  constexpr int kCtasPerSm = 8;
  const std::int64_t rows = p.step.num_tokens + p.layer.window_tokens + std::int64_t{to.max_entries};
  const std::int64_t ctas = (rows + kStageWarps * kRowsAtOnce - 1) / (kStageWarps * kRowsAtOnce);
  const std::int64_t most = std::max(kCtasPerSm * num_sms() / p.step.num_items, 1);
  const dim3 grid(static_cast<unsigned>(std::clamp<std::int64_t>(ctas, 1, most)),
                  static_cast<unsigned>(p.step.num_items));
  return launch(stage_rows, grid, 32 * kStageWarps, stream, p, to);
}

}  // namespace kv4::cuda
