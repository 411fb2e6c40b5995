// The operations of kv4/cuda.h for callers that are built without CUDA's headers: memory of a GPU that the caller owns,
// queued on the caller's stream. Nothing allocates or waits. Thread-safe. Errors are Error(device_failure).
#pragma once

#include "kv4/backend.h"
#include "kv4/params.h"

namespace kv4::raw {

/// Throws Error(no_device) if make_cuda_backend(device) would; the answer is kept.
void require_cuda(int device);

void attend(int device, Stream stream, const ops::AttendParams& params);
void index_scores(int device, Stream stream, const ops::IndexParams& params);
void select_topk(int device, Stream stream, const ops::IndexParams& params);
void index_topk(int device, Stream stream, const ops::IndexParams& params);
void write_slots(int device, Stream stream, const ops::SlotRowsParams& params);
void gather_slots(int device, Stream stream, const ops::SlotRowsParams& params);
void make_range_tables(int device, Stream stream, const ops::RangeTablesParams& params);
void place_scores(int device, Stream stream, const ops::PlaceScoresParams& params);

}  // namespace kv4::raw
