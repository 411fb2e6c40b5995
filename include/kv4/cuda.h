// The raw CUDA kernels, for engines that keep their own pools: one plain params struct each (kv4/params.h), all
// addresses on the device, queued on a stream. Nothing here allocates or waits, so every call can be captured in a
// graph; grids depend only on num_tokens, num_items and rows_per_item of the params, everything else is read on the
// device. The returned error is that of the launch. A kernel may start while the one before it still runs, and then
// reads constants (weights, biases, rope tables) at once: the kernel queued just before it must not write them. append
// also looks at the step's token records then, which may still be those of a step before: from the first call on, that
// memory holds records for the same pools, or zeros. Built with KV4_CUDA; needs the CUDA runtime's headers.
#pragma once

#include <cuda_runtime_api.h>

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

/// Copies pieces [count] (device address) in one launch; none overlaps another's target. largest: bytes of the largest.
KV4_API cudaError_t copy_pieces(const ops::CopyPiece* pieces, std::int32_t count, std::int64_t largest,
                                cudaStream_t stream);
/// For each span [count] (device address): what its accumulator would be if all its rows were folded, into `out`.
KV4_API cudaError_t fold_open(const ops::OpenSpan* spans, std::int32_t count, cudaStream_t stream);

}  // namespace kv4::cuda
