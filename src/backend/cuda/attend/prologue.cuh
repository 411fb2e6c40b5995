// The prologue of the wgmma kernels: speculative prefetch of the inputs, and the conversion of queries.
#pragma once

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/speculative.cuh"
#include "backend/cuda/ptx/async_copy.cuh"

namespace kv4::cuda::attend_wgmma {

/// Speculative prefetch, before the preceding kernel has ended: queries, the first window rows, and the lists that
/// locate chosen entries.
__device__ inline void prefetch_inputs(const AttendParams& p, Job job) {
  const int thread = static_cast<int>(threadIdx.x), head = job.first_head + thread * kLine / (kWidth * 2);
  if (head < p.num_heads)
    prefetch_l2(static_cast<const std::uint8_t*>(p.q.data) +
                (job.token * p.q.row_stride + job.first_head * kWidth) * 2 + thread * kLine);
  const int lane = thread - kWarpgroupThreads;
  if (lane < 0 || lane >= kWarpgroupThreads) return;
  const QueryRows rows(p, job.token, speculative_record(p, job.token));
  job.take_rows(rows);
  const std::int32_t* blocks = p.step.block_table + std::int64_t{rows.at.row} * p.step.blocks_per_request;
  const int row = job.begin + lane;
  const bool listed = p.chosen.data != nullptr && rows.entries > 0;
  if (row < min(job.end, rows.window)) {
    const int key = rows.key(p, job.token, row);
    const RowPointers place = rows.place(p, row, key, rows.block(p, row, key));
    if (place.payload == nullptr) return;
    for (int at = 0; at < kWidth + kTail; at += kLine) prefetch_l2(place.payload + at);
    prefetch_l2(place.scale);
  }
  const int words = lane * (kLine / 4);
  if (listed && words < p.num_chosen)
    prefetch_l2(static_cast<const std::int32_t*>(p.chosen.data) + job.token * p.chosen.row_stride + words);
  if (listed && words < p.step.blocks_per_request) prefetch_l2(blocks + words);
}

/// Queries in shared memory as fp16. kWarps warps take part. A warp converts one head at a time, kAtOnce heads in
/// flight; each lane converts the bytes that it copied itself.
template <int kWarps, int kAtOnce>
class Queries {
 public:
  __device__ Queries(const AttendParams& p, Shared& s, const Job& job)
      : p_(p), s_(s), job_(job), thread_(thread_here() % (kWarps * 32)) {}

  __device__ void begin() const {
    const auto* q = static_cast<const std::uint8_t*>(p_.q.data) +
                    (std::int64_t{job_.token} * p_.q.row_stride + job_.first_head * kWidth) * 2;
#pragma unroll
    for (int i = 0; i < kHeads; ++i)
#pragma unroll
      for (int j = 0; j < kChunks / 32; ++j) {
        const int chunk = lane() + 32 * j;
        const bool there = job_.first_head + head(i) < p_.num_heads;
        copy_async_or_zero<16>(place(head(i), chunk), q + (there ? (head(i) * kChunks + chunk) * 16 : 0),
                               there ? 16 : 0);
      }
    if (thread_ < kTile) {
      const int head = job_.first_head + thread_;
      const bool sinks = p_.sink != nullptr && !job_.padded && head < p_.num_heads;
      s_.sink[job_.sinks()][thread_] = sinks ? p_.sink[head] * codec::kLog2e : -INFINITY;
    }
  }

  __device__ void finish() const {
    wait_for_all_copies();
    convert();
  }
  /// After the thread's own copies have arrived.
  __device__ void convert() const {
#pragma unroll kAtOnce
    for (int i = 0; i < kHeads; ++i) {
      const uint4 left = load_shared16_ordered(place(head(i), lane())),
                  right = load_shared16_ordered(place(head(i), lane() + 32));
      const int exponent = exponent_of(__reduce_max_sync(kAllLanes, max(top_of_pairs(left), top_of_pairs(right))));
      store_shared16(place(head(i), lane()), to_fp16(left, power_of_two(-exponent)));
      store_shared16(place(head(i), lane() + 32), to_fp16(right, power_of_two(-exponent)));
      if (lane() == 0) s_.q_scale[head(i)] = power_of_two(exponent);
    }
    fence_async_proxy();
  }

 private:
  static constexpr int kChunks = kWidth * 2 / 16, kHeads = kTile / kWarps;

  __device__ int lane() const { return thread_ % 32; }
  __device__ int head(int i) const { return thread_ / 32 + i * kWarps; }
  __device__ std::uint32_t place(int head, int chunk) const {
    return shared_address(s_.q) + chunk / 8 * kPanelBytes + panel_offset(head, chunk % 8);
  }

  const AttendParams& p_;
  Shared& s_;
  const Job& job_;
  const int thread_;  // among the participating threads
};

}  // namespace kv4::cuda::attend_wgmma
