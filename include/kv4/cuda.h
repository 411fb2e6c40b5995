// The raw CUDA kernels, for engines that keep their own pools: one plain params struct each (kv4/params.h), all
// addresses on the device, queued on a stream. Nothing here allocates or waits, so every call can be captured in a
// graph; grids depend only on num_tokens, num_items and rows_per_item of the params, everything else is read on the
// device. The returned error is that of the launch. Built with KV4_CUDA; needs the CUDA runtime's headers.
//
// A kernel may start while the one before it still runs. It waits for that one's results, but some things it reads at
// once:
// - Constants (weights, biases, rope tables): the kernel queued just before must not write them.
// - append, attend, gather_all, gather_window, index_scores, index_topk: the step's records and block table, for
//   speculative prefetches, which are validated. They may be those of an earlier step: from the first call on,
//   that memory holds records and tables for the same pools, or zeros.
// - append: pending rows of positions before the step, if the record says the same before and after the wait. A kernel
//   that writes records of a new step must therefore wait for the kernels before it, and only then let the next one
//   start (griddepcontrol.launch_dependents). update_step does so; kernels and copies that never signal do so as well.
//   Queue any other writer of such rows (a restored snapshot) before that kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

#include "kv4/export.h"
#include "kv4/params.h"

namespace kv4::cuda {

/// Writes the tables of a new step. items, ranges and block_ids of `update` are device addresses; items are in token
/// order, ranges do not overlap. Not for graphs: the grid depends on the number of ranges.
KV4_API cudaError_t update_step(const ops::StepUpdate& update, cudaStream_t stream);

/// Window rows, pending rows, due entries and index keys of all the step's tokens: one launch.
KV4_API cudaError_t append(const ops::AppendParams& params, cudaStream_t stream);
/// Entries and index keys made elsewhere, into the pages: one launch.
KV4_API cudaError_t flush(const ops::FlushParams& params, cudaStream_t stream);

/// `params.boundaries` is a host address: boundaries travel with the launches, so a graph cannot change them.
KV4_API cudaError_t save_boundaries(const ops::BoundaryParams& params, cudaStream_t stream);

/// Entries by index, decoded: params.indices, out and valid.
KV4_API cudaError_t gather_chosen(const ops::GatherParams& params, cudaStream_t stream);
/// All rows of one kind of each item, decoded: out and lens.
KV4_API cudaError_t gather_all(const ops::GatherParams& params, cudaStream_t stream);
/// Window rows that the step's queries see, decoded: out, lens and first.
KV4_API cudaError_t gather_window(const ops::GatherParams& params, cudaStream_t stream);

/// Scores of all keys a token sees, into `scores`. The workspace holds at least one token's part
/// (ops::index_token_bytes); tokens are taken in tiles that fit it. With ScoreMode::fast, fp8 keys of 128 channels on
/// Hopper go through the tensor cores, in one launch; all other keys are scored exactly.
KV4_API cudaError_t index_scores(const ops::IndexParams& params, cudaStream_t stream);
/// The `top` best of given scores: NaN is the lowest, of equal ones the smaller index wins.
KV4_API cudaError_t select_topk(const ops::IndexParams& params, cudaStream_t stream);
/// index_scores and select_topk in one call; the scores stay in the workspace. With ScoreMode::fast: the best of the
/// fast scores.
KV4_API cudaError_t index_topk(const ops::IndexParams& params, cudaStream_t stream);

/// With a workspace (ops::attend_workspace_bytes) more CTAs may share a token with a long list of entries than without;
/// with ops::staged_attend_workspace_bytes long steps that meet their rows often also decode each row once (Hopper).
/// It must be zero before its first use; calls leave its counters zero. Only calls on one stream may share it.
///
/// Over bf16 rows of your own, layer.num_kinds is 1, layer.kinds[0].page has format bf16 and dense rows of 512
/// channels, entry_slots has a list of row numbers for each token with its lengths and its limit, and step.tokens may
/// be null. On Hopper with bf16 queries one tuned launch does it, and max_logits costs nothing.
KV4_API cudaError_t attend(const ops::AttendParams& params, cudaStream_t stream);

/// Encodes rows into a pool by slot. Two rows of one slot leave a mix of both there.
KV4_API cudaError_t write_slots(const ops::SlotRowsParams& params, cudaStream_t stream);
/// Decodes rows of a pool by slot.
KV4_API cudaError_t gather_slots(const ops::SlotRowsParams& params, cudaStream_t stream);
/// Queued before index_scores, select_topk or index_topk, it makes their tables from key ranges.
KV4_API cudaError_t make_range_tables(const ops::RangeTablesParams& params, cudaStream_t stream);
/// Queued after index_scores.
KV4_API cudaError_t place_scores(const ops::PlaceScoresParams& params, cudaStream_t stream);

/// Copies pieces [count] (device address) in one launch; none overlaps another's target. largest: bytes of the largest.
/// Its grid is count x largest: cut large pieces among many small ones before.
KV4_API cudaError_t copy_pieces(const ops::CopyPiece* pieces, std::int32_t count, std::int64_t largest,
                                cudaStream_t stream);
/// The longest list of copy_few_pieces.
constexpr std::size_t kMostFewPieces = 80;
/// The same with the list on the host: it travels with the launch, and may be reused when the call returns.
KV4_API cudaError_t copy_few_pieces(std::span<const ops::CopyPiece> pieces, cudaStream_t stream);
/// For each span [count] (device address): writes to its `out` the accumulator that folding all its rows gives.
KV4_API cudaError_t fold_open(const ops::OpenSpan* spans, std::int32_t count, cudaStream_t stream);

}  // namespace kv4::cuda
