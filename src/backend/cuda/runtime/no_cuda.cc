// Replaces the CUDA backend in builds without nvcc.
#include "backend/raw_calls.h"
#include "base/check.h"
#include "kv4/backend.h"

namespace kv4 {

std::string why_no_cuda(int) { return "this build of kv4 has no CUDA; build it where nvcc is found"; }

std::shared_ptr<Backend> make_cuda_backend(int device, Stream) {
  fail(ErrorCode::no_device, "{}", why_no_cuda(device));
}

namespace raw {

void require_cuda(int device) { fail(ErrorCode::no_device, "{}", why_no_cuda(device)); }

void attend(int device, Stream, const ops::AttendParams&) { require_cuda(device); }
void index_scores(int device, Stream, const ops::IndexParams&) { require_cuda(device); }
void select_topk(int device, Stream, const ops::IndexParams&) { require_cuda(device); }
void index_topk(int device, Stream, const ops::IndexParams&) { require_cuda(device); }
void write_slots(int device, Stream, const ops::SlotRowsParams&) { require_cuda(device); }
void gather_slots(int device, Stream, const ops::SlotRowsParams&) { require_cuda(device); }
void make_range_tables(int device, Stream, const ops::RangeTablesParams&) { require_cuda(device); }
void place_scores(int device, Stream, const ops::PlaceScoresParams&) { require_cuda(device); }

}  // namespace raw
}  // namespace kv4
