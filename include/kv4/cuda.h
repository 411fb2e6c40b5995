// The raw CUDA kernels, for engines that keep their own pools: one plain params struct each (kv4/params.h), all
// addresses on the device, queued on a stream. Nothing here allocates or waits, so every call can be captured in a
// graph; grids depend only on num_tokens, num_items and rows_per_item of the params, everything else is read on the
// device. The returned error is that of the launch. A kernel may start while the one before it still runs, and then
// reads constants (weights, biases, rope tables) at once: the kernel queued just before it must not write them. append
// and attend also look at the step's token records then, attend at the block table too, which may still be those of a
// step before: from the first call on, that memory holds records and blocks of the same pools, or zeros. Built with
// KV4_CUDA; needs the CUDA runtime's headers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

#include "kv4/export.h"
#include "kv4/params.h"

namespace kv4::cuda {

/// Writes the tables of a new step. Of `update`, items, ranges and block_ids are device addresses. Items stand in token
/// order, ranges do not overlap. Not for graphs: its grid depends on how many ranges there are.
KV4_API cudaError_t update_step(const ops::StepUpdate& update, cudaStream_t stream);

/// Window rows, pending rows, due entries and index keys of all the step's tokens: one launch.
KV4_API cudaError_t append(const ops::AppendParams& params, cudaStream_t stream);
KV4_API cudaError_t flush(const ops::FlushParams& params, cudaStream_t stream);

KV4_API cudaError_t gather_chosen(const ops::GatherParams& params, cudaStream_t stream);
KV4_API cudaError_t gather_all(const ops::GatherParams& params, cudaStream_t stream);
KV4_API cudaError_t gather_window(const ops::GatherParams& params, cudaStream_t stream);

/// Scores of all keys a token sees, into `scores`. The workspace holds at least one token's part
/// (ops::index_token_bytes); tokens are taken in tiles that fit it.
KV4_API cudaError_t index_scores(const ops::IndexParams& params, cudaStream_t stream);
/// The `top` best of given scores: NaN is the lowest, of equal ones the smaller index wins.
KV4_API cudaError_t select_topk(const ops::IndexParams& params, cudaStream_t stream);
/// Both: the scores stay in the workspace.
KV4_API cudaError_t index_topk(const ops::IndexParams& params, cudaStream_t stream);

KV4_API cudaError_t attend(const ops::AttendParams& params, cudaStream_t stream);

/// Copies pieces [count] (device address) in one launch; none overlaps another's target. largest: bytes of the largest.
/// Its grid is count x largest: cut large pieces among many small ones before.
KV4_API cudaError_t copy_pieces(const ops::CopyPiece* pieces, std::int32_t count, std::int64_t largest,
                                cudaStream_t stream);
/// The same with the list on the host, which may be reused when it returns: it travels with the launch.
constexpr std::size_t kMostFewPieces = 80;
KV4_API cudaError_t copy_few_pieces(std::span<const ops::CopyPiece> pieces, cudaStream_t stream);
/// For each span [count] (device address): what its accumulator would be if all its rows were folded, into `out`.
KV4_API cudaError_t fold_open(const ops::OpenSpan* spans, std::int32_t count, cudaStream_t stream);

}  // namespace kv4::cuda
