#include "backend/raw_calls.h"

#include <atomic>
#include <cstdint>
#include <string>

#include "backend/cuda/runtime/check.h"
#include "base/check.h"
#include "kv4/cuda.h"

namespace kv4::raw {
namespace {

template <class Params>
void queue(cudaError_t (*launch)(const Params&, cudaStream_t), int device, Stream stream, const Params& params,
           const char* what) {
  require_cuda(device);
  const cuda::DeviceGuard guard(device);
  cuda::check(launch(params, static_cast<cudaStream_t>(stream.handle)), what);
}

}  // namespace

void require_cuda(int device) {
  static std::atomic<std::uint64_t> usable{0};  // a bit per GPU
  constexpr int kBits = 64;
  const std::uint64_t bit = device >= 0 && device < kBits ? std::uint64_t{1} << device : 0;
  if ((usable.load(std::memory_order_relaxed) & bit) != 0) return;
  const std::string why = why_no_cuda(device);
  require(why.empty(), ErrorCode::no_device, "{}", why);
  usable.fetch_or(bit, std::memory_order_relaxed);
}

void attend(int device, Stream stream, const ops::AttendParams& params) {
  queue(cuda::attend, device, stream, params, "attend");
}
void index_scores(int device, Stream stream, const ops::IndexParams& params) {
  queue(cuda::index_scores, device, stream, params, "index_scores");
}
void select_topk(int device, Stream stream, const ops::IndexParams& params) {
  queue(cuda::select_topk, device, stream, params, "select_topk");
}
void index_topk(int device, Stream stream, const ops::IndexParams& params) {
  queue(cuda::index_topk, device, stream, params, "index_topk");
}
void write_slots(int device, Stream stream, const ops::SlotRowsParams& params) {
  queue(cuda::write_slots, device, stream, params, "write_slots");
}
void gather_slots(int device, Stream stream, const ops::SlotRowsParams& params) {
  queue(cuda::gather_slots, device, stream, params, "gather_slots");
}
void make_range_tables(int device, Stream stream, const ops::RangeTablesParams& params) {
  queue(cuda::make_range_tables, device, stream, params, "make_range_tables");
}
void place_scores(int device, Stream stream, const ops::PlaceScoresParams& params) {
  queue(cuda::place_scores, device, stream, params, "place_scores");
}

}  // namespace kv4::raw
