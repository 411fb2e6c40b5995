// attend over windows alone, for many tokens of few requests: a CTA takes 64 heads of a run of tokens and
// keeps their window in shared memory as bf16, each row at its position modulo the window. Of two tokens that follow
// each other one row differs, so a row is converted once per run. The softmax does not mind the order.
//
// Four warpgroups. Two loaders bring a token's queries, which need no conversion, and its new row; all rows where the
// request changes. Two consumers each score one half of the rows (m64n64k16), agree on the largest logit and sum of
// each head, leave their weights in shared memory, and add up one half of the channels over all rows (m64n128k16).
//
// Bounds, per token and 64 heads: 128 KB of queries and outputs, 31 us for 1,024 tokens; multiplies 4,096 clocks. H200,
// 2026-11-16, 1,024 tokens: 56 us (persistent.cuh: 78). Of 13,000 clocks a token has on its SM, 3,700
// were the output's shuffles and stores beside the next token's scores, both of which want shared memory, 2,000
// weights, 2,300 values, and the first token's rows 15,000 once (ncu, before the last change: 59 us).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>

#pragma nv_diag_suppress 177  // parts of dispatch.cu that are not used here

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/rows.cuh"
#include "backend/cuda/attend/single_pass_window.cuh"
#include "backend/cuda/attend/speculative.cuh"
#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace {

constexpr int kConsumers = kScorers, kConsumerWarps = kConsumers / 32;  // of halves of the rows, then of the channels
constexpr int kRunConsumerRegisters = 168, kRunLoaderRegisters = 88;
static_assert(2 * (kRunConsumerRegisters + kRunLoaderRegisters) <= 65536 / kGroup);

struct RunShared : WindowTiles {
  Round rounds[2];   // of tokens by turns
  int next_side[2];  // the half where the next token's row differs
  std::uint64_t queries_there, queries_used, rows_there;
  std::uint64_t side_used, rows_used;  // that half, and all
};
constexpr int kRunSharedBytes = sizeof(RunShared) + 1024;
static_assert(kRunSharedBytes <= 227 * 1024);

// --- rows

/// Brings rows from the pool into their slots. Whole warps call it.
class RunRows {
 public:
  using Reader = Fp8RowReader<Format::fp8_tile64>;

  __device__ RunRows(const AttendParams& p, RunShared& s) : p_(p), s_(s), lane_(thread_here() % 32) {}

  /// Zeros where there is no row.
  __device__ Reader::Raw load(const Found& found) const {
    if (found.payload == nullptr) return {};
    return Reader::load_raw<Keep::usual>({found.payload, found.scale, nullptr}, lane_);
  }
  __device__ Found find(const QueryRows& rows, int position) const {
    const RowPlace place = rows.place(p_, 0, position, rows.block(p_, 0, position));
    return {place.payload, place.scale};
  }
  __device__ void store(const Reader::Raw& raw, int slot) const {
#pragma unroll
    for (int octet = 0; octet < Reader::kOctets; ++octet) {
      const auto x = Reader::decode<std::uint16_t>(raw, lane_, octet);
      const int unit = lane_ + octet * Reader::kLanes;
      store_shared(
          shared_address(s_.rows[slot / kTile]) + unit / 8 * kPanelBytes + panel_offset(slot % kTile, unit % 8),
          make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]));
    }
  }

  /// Every slot; warps take them by turns. A lane finds a row, for all of its warp.
  template <int kWarps>
  __device__ void fill(const QueryRows& rows, int warp) const {
    constexpr int kOwn = kMostRunWindow / kWarps, kAtOnce = 4;
    static_assert(kOwn <= 32 && kOwn % kAtOnce == 0);
    const int position = RingSlots(p_, rows).position(warp + lane_ % kOwn * kWarps);
    Found found{};
    if (position >= 0) found = find(rows, position);
#pragma unroll 1
    for (int own = 0; own < kOwn; own += kAtOnce) {
      Reader::Raw raw[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) raw[j] = load({of_lane(found.payload, own + j), of_lane(found.scale, own + j)});
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) store(raw[j], warp + (own + j) * kWarps);
    }
  }

 private:
  __device__ static const std::uint8_t* of_lane(const std::uint8_t* at, int lane) {
    return reinterpret_cast<const std::uint8_t*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(at), lane));
  }

  const AttendParams& p_;
  RunShared& s_;
  const int lane_;
};

// --- loaders

class RunLoader {
 public:
  __device__ RunLoader(const AttendParams& p, RunShared& s, int first_head)
      : p_(p), s_(s), rows_(p, s), first_head_(first_head), thread_(thread_here() % kLoaders) {}

  /// The first token's rows are in place, its queries on their way.
  __device__ void run(int first, int end) {
    QueryRows rows(p_, first);
    ops::StepRecord before;
    for (int token = first; token < end; ++token) {
      const int i = token - first;
      const bool follows = !rows.at.padded() && rows.at.row == before.row && rows.at.position == before.position + 1;
      const int slot = rows.at.position % p_.layer.window_tokens;
      const bool mine = follows && slot % kLoaderWarps == warp();
      RunRows::Reader::Raw raw{};
      if (mine) raw = rows_.load(rows_.find(rows, rows.at.position));
      if (i > 0) {
        barrier_wait(shared_address(&s_.queries_used), (i - 1) & 1);
        copy_queries(token);
      }
      if (token + 1 < end) fetch_queries(token + 1);
      if (thread_ == 0) {
        s_.rounds[i % 2] = {rows, token, first_head_, 1, {}};
        s_.next_side[i % 2] = slot + 1 == p_.layer.window_tokens ? 0 : (slot + 1) / kTile;
      }
      announce_queries();
      if (i > 0) barrier_wait(shared_address(follows ? &s_.side_used : &s_.rows_used), (i - 1) & 1);
      if (mine) rows_.store(raw, slot);
      if (i > 0 && !follows) rows_.fill<kLoaderWarps>(rows, warp());
      announce(s_.rows_there);
      before = rows.at;
      if (token + 1 < end) rows = QueryRows(p_, token + 1);
    }
  }

  __device__ void copy_queries(int token) const {
    cuda::copy_queries<kLoaders, 4>(p_, s_, token, first_head_, thread_);
  }
  __device__ void fetch_queries(int token) const {
    const std::uint8_t* q = queries_of(p_, token, first_head_);
    for (int at = thread_ * kLine; at < heads() * kWidth * 2; at += kLoaders * kLine) fetch(q + at);
  }

 private:
  __device__ int lane() const { return thread_ % 32; }
  __device__ int warp() const { return thread_ / 32; }
  __device__ int heads() const { return min(kTile, p_.num_heads - first_head_); }

  __device__ void announce_queries() const {
    asm volatile("cp.async.wait_all;" ::: "memory");
    announce(s_.queries_there);
  }
  __device__ void announce(std::uint64_t& barrier) const {
    publish_to_mma();
    if (arrives_for_warp(static_cast<unsigned>(lane()))) barrier_arrive(shared_address(&barrier));
  }

  const AttendParams& p_;
  RunShared& s_;
  const RunRows rows_;
  const int first_head_, thread_;
};

// --- consumers

/// One half of the rows' weights, and one half of the channels.
class RunConsumer {
 public:
  __device__ RunConsumer(const AttendParams& p, RunShared& s, int first_head)
      : p_(p), s_(s), side_(static_cast<int>(threadIdx.x) / kGroup), scale_(p.softmax_scale * codec::kLog2e) {
    for (int half = 0; half < 2; ++half) sink_[half] = sink_of(p, first_head + head_of_thread() + 8 * half);
  }

  /// A token's scores are multiplied while the output of the one before is stored, if that is bf16; those after the
  /// last are of nothing.
  __device__ void run(int tokens) {
    std::uint32_t words[kWords] = {};
    for (int i = 0;; ++i) {
      float z[kScores];
      score(z, i, i < tokens);
      if (i > 0 && p_.out.dtype == DType::bf16) store(words, Job(s_.rounds[(i - 1) % 2], 0));
      mma_wait<0>();
      if (i == tokens) break;
      release(s_.queries_used);
      const Round& round = s_.rounds[i % 2];
      float o[kWidth / 4], base[2], factor[2];
      weigh(round.rows, z, base);
      const int first_side = s_.next_side[i % 2];
      add_values(o, first_side, false);
      add_values(o, first_side ^ 1, true);
      for (int half = 0; half < 2; ++half) factor[half] = finish(round, base[half], half);
      mma_wait<1>();
      release(s_.side_used);
      mma_wait<0>();
      release(s_.rows_used);
      scale_heads(o, factor[0], factor[1]);
      const Job job(round, 0);
      if (side_ == 1) inverse_rope_last(p_, job, o);
      if (p_.out.dtype == DType::f32) store_output(p_, job, o, side_ * (kWidth / 2));
#pragma unroll
      for (int j = 0; j < kWords; ++j) words[j] = pack_bf16(o[2 * j], o[2 * j + 1]);
    }
  }

 private:
  static constexpr int kWords = kWidth / 8;  // of a thread

  __device__ void release(std::uint64_t& barrier) const {
    if (arrives_for_warp(threadIdx.x % 32)) barrier_arrive(shared_address(&barrier));
  }

  /// Of this side's rows.
  __device__ void score(float (&z)[kScores], int token, bool is_there) const {
    if (is_there) {
      barrier_wait(shared_address(&s_.rows_there), token & 1);
      barrier_wait(shared_address(&s_.queries_there), token & 1);
    }
    score_side(s_, z, side_);
  }

  /// Scores to weights relative to the largest of both sides.
  __device__ void weigh(const QueryRows& rows, float (&z)[kScores], float (&base)[2]) {
    if (rows.window < kMostRunWindow) {
      const RingSlots slots(p_, rows);
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (slots.position(side_ * kTile + row_of_score(i)) < 0) z[i] = -INFINITY;
    }
    weigh_side(s_, z, side_, scale_, base);
    named_barrier(1, kConsumers);
  }

  /// O += P V over half of the rows and this side's channels.
  __device__ void add_values(float (&o)[kWidth / 4], int rows, bool add) const {
    const std::uint32_t weights = panel_place(shared_address(s_.weights[rows]));
    const std::uint32_t values = panel_place(shared_address(s_.rows[rows]) + side_ * (kTileBytes / 2), kPanelBytes);
    mma_begin();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      const std::uint64_t a = panel_descriptor(weights, k * 32);
      const std::uint32_t at = k * 16 * kPanelRowBytes;
      multiply_bf16_rows<0>(o, a, panel_descriptor(values, at), add || k > 0);
      multiply_bf16_rows<64>(o, a, panel_descriptor(values, at + 2 * kPanelBytes), add || k > 0);
    }
    mma_commit();
  }

  /// The four lanes of a head swap words until each has 8 channels side by side, all of them at once: a shuffle waits
  /// for multiplies that read shared memory.
  __device__ void store(std::uint32_t (&words)[kWords], const Job& job) const {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const bool high = (quad_of_thread() & step) != 0;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if ((i & 2 * step) != 0) continue;
        std::uint32_t &low_word = words[i], &high_word = words[i + 2 * step];
        const std::uint32_t other = __shfl_xor_sync(kAllLanes, high ? low_word : high_word, step);
        (high ? low_word : high_word) = other;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = head_of_thread() + 8 * half;
      std::uint16_t* out = output_of<std::uint16_t>(p_, job, head) + side_ * (kWidth / 2) + 8 * quad_of_thread();
      if (job.first_head + head >= p_.num_heads) continue;
#pragma unroll
      for (int i = half; i < kWords; i += 8)
        store16(out + i / 8 * 32, words[i], words[i + 2], words[i + 4], words[i + 6]);
    }
  }

  /// What O is multiplied by, of the upper or lower head.
  __device__ float finish(const Round& round, float base, int half) const {
    const int head = head_of_thread() + 8 * half;
    const float sink = round.rows.at.padded() ? -INFINITY : sink_[half];
    const bool has_lse = side_ == 0 && quad_of_thread() == 0;
    return finish_head(s_, head, base, sink, has_lse ? lse_of(p_, round.token, round.first_head + head) : nullptr);
  }

  const AttendParams& p_;
  RunShared& s_;
  const int side_;
  const float scale_;
  float sink_[2];
};

__global__ void __launch_bounds__(kThreads, 1)
    attend_runs_kernel(const __grid_constant__ AttendParams p, int head_tiles, int run_tokens) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  RunShared& s = *reinterpret_cast<RunShared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&s.queries_there), Arrivals::of_warps(kLoaderWarps));
    barrier_init(shared_address(&s.queries_used), Arrivals::of_warps(kConsumerWarps));
    barrier_init(shared_address(&s.rows_there), Arrivals::of_warps(kLoaderWarps));
    barrier_init(shared_address(&s.side_used), Arrivals::of_warps(kConsumerWarps));
    barrier_init(shared_address(&s.rows_used), Arrivals::of_warps(kConsumerWarps));
  }
  launch_dependents();
  touch(p);
  __syncthreads();
  const int first_head = static_cast<int>(blockIdx.x) % head_tiles * kTile;
  const int first = static_cast<int>(blockIdx.x) / head_tiles * run_tokens;
  const int end = min(first + run_tokens, p.step.num_tokens);
  const bool loads = threadIdx.x >= kConsumers;
  if (loads) RunLoader(p, s, first_head).fetch_queries(first);
  grid_dependency_wait();
  if (loads) RunLoader(p, s, first_head).copy_queries(first);
  RunRows(p, s).fill<kThreads / 32>(QueryRows(p, first), thread_here() / 32);
  publish_to_mma();
  __syncthreads();
  if (!loads) {
    more_registers<kRunConsumerRegisters>();
    RunConsumer(p, s, first_head).run(end - first);
  } else {
    fewer_registers<kRunLoaderRegisters>();
    RunLoader(p, s, first_head).run(first, end);
  }
#endif
}

}  // namespace

cudaError_t attend_runs(const AttendParams& p, cudaStream_t stream) {
  const int head_tiles = (p.num_heads + kTile - 1) / kTile;
  const int at_once = std::max(num_sms() / head_tiles, 1);
  const int run_tokens = (p.step.num_tokens + at_once - 1) / at_once;
  const int runs = (p.step.num_tokens + run_tokens - 1) / run_tokens;
  const cudaError_t error =
      cudaFuncSetAttribute(attend_runs_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRunSharedBytes);
  if (error != cudaSuccess) return error;
  return launch<kRunSharedBytes>(attend_runs_kernel, static_cast<unsigned>(runs * head_tiles), kThreads, stream, p,
                                 head_tiles, run_tokens);
}

}  // namespace kv4::cuda
