// Foreign lists and sinks for the tuned kernels, which read dense lists with a length per token and leave an lse that
// has the sink in it. Before the attention a kernel writes such lists; the attention runs without a sink; afterwards a
// kernel scales the output by the sink's part and writes the lse that was asked for. Each of the two costs a launch.
#include "backend/cuda/attend/foreign.cuh"

#include <cstdint>

#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/ptx/convert.cuh"
#include "backend/cuda/rows/warp_row.cuh"
#include "backend/cuda/runtime/aligned.h"
#include "backend/cuda/runtime/launch.cuh"
#include "codec/numeric.h"
#include "ops/attend_row.h"

namespace kv4::cuda {
namespace {

using ops::AttendParams;
using ops::SlotList;

constexpr unsigned kThreads = 128;

/// A list as it is, and dense.
struct ListCopy {
  SlotList from;  // slots null: there is none
  std::int32_t* slots = nullptr;
  std::int32_t* lens = nullptr;
};

struct CopyParams {
  ListCopy first, second;
};

__device__ void copy_list(const ListCopy& list, std::int64_t token) {
  if (list.from.slots == nullptr) return;
  const std::int32_t length = list.from.length(token), stride = list.from.max_length();
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < length; i += static_cast<std::int32_t>(kThreads))
    list.slots[token * stride + i] = list.from.slot(token, i);
  if (threadIdx.x == 0) list.lens[token] = length;
}

/// A CTA per token.
__global__ void __launch_bounds__(kThreads) copy_lists(const __grid_constant__ CopyParams p) {
  copy_list(p.first, blockIdx.x);
  copy_list(p.second, blockIdx.x);
}

struct SinkParams {
  ops::OutputDesc out;  // [tokens, heads, kAttendWidth]
  const float* lse_without_sink = nullptr;
  const float* sink = nullptr;
  float* lse = nullptr;
  ops::LseMode mode = ops::LseMode::all;
  std::int64_t num_rows = 0;  // tokens * heads
  std::int32_t num_heads = 0;
};

/// A warp per token and head: 1 KB of its output is read and written if the sink changes it.
__global__ void __launch_bounds__(kThreads) add_sinks(const __grid_constant__ SinkParams p) {
  const std::int64_t row = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (row >= p.num_rows) return;
  const float* const sink = p.sink == nullptr ? nullptr : p.sink + row % p.num_heads;
  const ops::AttentionEnd end = ops::add_sink(p.lse_without_sink[row], sink, p.mode);
  if (lane == 0 && p.lse != nullptr) p.lse[row] = end.lse;
  if (end.factor == 1.0f) return;
  if (p.out.dtype == DType::bf16) {
    uint4* const out = reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.out.data) + row * kAttendWidth);
    for (int i = lane; i < kAttendWidth / 8; i += 32) {
      const uint4 x = out[i];
      const auto scaled = [&](std::uint32_t pair) {
        return bf16_pair(low_value(pair) * end.factor, high_value(pair) * end.factor);
      };
      out[i] = make_uint4(scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w));
    }
  } else {
    float* const out = static_cast<float*>(p.out.data) + row * kAttendWidth;
    for (int i = lane; i < kAttendWidth; i += 32) out[i] *= end.factor;
  }
}

/// Takes parts of a workspace one after the other.
class Parts {
 public:
  explicit Parts(std::uint8_t* at) : at_(at) {}
  template <class T>
  T* take(std::int64_t count) {
    constexpr std::int64_t kLine = 256;
    T* const part = reinterpret_cast<T*>(at_);
    at_ += (count * static_cast<std::int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
    return part;
  }

 private:
  std::uint8_t* at_;
};

/// The copy of a list that is foreign, and the list that the kernel then reads.
ListCopy plan_copy(SlotList& list, std::int64_t tokens, Parts& parts) {
  if (list.slots == nullptr || !list.foreign()) return {};
  ListCopy copy{list, parts.take<std::int32_t>(tokens * list.max_length()), parts.take<std::int32_t>(tokens)};
  list = SlotList{copy.slots, list.max_length(), copy.lens};
  return copy;
}

std::int64_t max_length(const SlotList& list) { return list.slots == nullptr ? 0 : list.max_length(); }

}  // namespace

ForeignAttend plan_foreign(const AttendParams& p) {
  ForeignAttend plan{p};
  const bool has_lists = p.window_slots.foreign() || p.entry_slots.foreign();
  const std::int64_t bytes =
      ops::attend_list_bytes(p.step.num_tokens, p.num_heads, max_length(p.window_slots), max_length(p.entry_slots));
  if (!(has_lists || p.lse_mode != ops::LseMode::all) || p.list_workspace == nullptr ||
      p.list_workspace_bytes < bytes || !is_aligned(p.list_workspace, 256) || p.max_logits != nullptr ||
      p.step.tokens != nullptr || p.inverse_rope.rope_dim != 0 || p.window_slots.slots == nullptr ||
      max_length(p.window_slots) + max_length(p.entry_slots) == 0)
    return plan;
  Parts parts(p.list_workspace);
  plan.plain.sink = nullptr;
  plan.plain.lse = parts.take<float>(std::int64_t{p.step.num_tokens} * p.num_heads);
  plan.plain.lse_mode = ops::LseMode::all;
  plan_copy(plan.plain.window_slots, p.step.num_tokens, parts);
  plan_copy(plan.plain.entry_slots, p.step.num_tokens, parts);
  plan.is_possible = true;
  return plan;
}

cudaError_t before_foreign(const AttendParams& p, cudaStream_t stream) {
  Parts parts(p.list_workspace);
  parts.take<float>(std::int64_t{p.step.num_tokens} * p.num_heads);
  AttendParams plain = p;
  CopyParams copies;
  copies.first = plan_copy(plain.window_slots, p.step.num_tokens, parts);
  copies.second = plan_copy(plain.entry_slots, p.step.num_tokens, parts);
  if (copies.first.slots == nullptr && copies.second.slots == nullptr) return cudaSuccess;
  return launch_in_order(copy_lists, static_cast<unsigned>(p.step.num_tokens), kThreads, 0, stream, copies);
}

cudaError_t after_foreign(const AttendParams& p, const AttendParams& plain, cudaStream_t stream) {
  SinkParams s;
  s.out = p.out;
  s.lse_without_sink = plain.lse;
  s.sink = p.sink;
  s.lse = p.lse;
  s.mode = p.lse_mode;
  s.num_rows = std::int64_t{p.step.num_tokens} * p.num_heads;
  s.num_heads = p.num_heads;
  const std::int64_t ctas = (s.num_rows * 32 + kThreads - 1) / kThreads;
  return launch_in_order(add_sinks, static_cast<unsigned>(ctas), kThreads, 0, stream, s);
}

}  // namespace kv4::cuda
