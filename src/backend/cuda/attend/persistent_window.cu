// Persistent window kernel: attend over windows only, for many tokens of few requests. A CTA takes 64 heads of
// consecutive tokens and keeps their window in shared memory as bf16, each row at its position modulo the window. Two
// consecutive tokens differ in one row, so each row is converted once per CTA. The softmax does not depend on the order
// of rows.
//
// Four warpgroups. Two producers load a token's queries, which need no conversion, and its new row; where the request
// changes, they load all rows. Two consumers each compute S of one half of the rows (m64n64k16), agree on the row
// maximum and the sum of each head, store P in shared memory, and compute PV of one half of the channels over all rows
// (m64n128k16).
//
// Bounds, per token and 64 heads: 128 KB of queries and outputs, 31 us for 1,024 tokens; multiplies 4,096 clocks. H200,
// 2026-11-16, 1,024 tokens: 56 us (persistent.cu: 78). A token has 13,000 clocks on its SM. The output's shuffles and
// stores beside the next token's S took 3,700 of them, both of which access shared memory, the softmax 2,000, PV 2,300,
// and the first token's rows 15,000 once (ncu, before the last change: 59 us).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/rows.cuh"
#include "backend/cuda/attend/single_pass_window.cuh"
#include "backend/cuda/attend/speculative.cuh"
#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace attend_wgmma::persistent_window {

inline constexpr int kConsumerThreads = kScoreThreads,
                     kConsumerWarps =
                         kConsumerThreads / 32;  // halves of the rows for S, then halves of the channels for PV
inline constexpr int kWindowConsumerRegisters = 168, kWindowProducerRegisters = 88;
static_assert(2 * (kWindowConsumerRegisters + kWindowProducerRegisters) <= 65536 / kWarpgroupThreads);

struct WindowShared : WindowTiles {
  WorkTile work_tiles[2];  // of even and odd tokens
  int next_side[2];        // the half that contains the next token's new row
  std::uint64_t queries_full, queries_empty, rows_full;
  std::uint64_t side_empty, rows_empty;  // that half, and both
};
inline constexpr int kPersistentWindowSharedBytes = sizeof(WindowShared) + 1024;
static_assert(kPersistentWindowSharedBytes <= 227 * 1024);

// --- rows

/// Loads rows from the pool and stores them in their slots. Whole warps call it.
class WindowRows {
 public:
  using Reader = Fp8RowReader<Format::fp8_tile64>;

  __device__ WindowRows(const AttendParams& p, WindowShared& s) : p_(p), s_(s), lane_(thread_here() % 32) {}

  /// Zeros if there is no row.
  __device__ Reader::Raw load(const RowAddress& address) const {
    if (address.payload == nullptr) return {};
    return Reader::load_raw<L2Priority::normal>({address.payload, address.scale, nullptr}, lane_);
  }
  __device__ RowAddress find(const QueryRows& rows, int position) const {
    const RowPointers place = rows.place(p_, 0, position, rows.block(p_, 0, position));
    return {place.payload, place.scale};
  }
  __device__ void store(const Reader::Raw& raw, int slot) const {
#pragma unroll
    for (int octet = 0; octet < Reader::kOctets; ++octet) {
      const auto x = Reader::decode<std::uint16_t>(raw, lane_, octet);
      const int chunk = lane_ + octet * Reader::kLanes;
      store_shared16(
          shared_address(s_.rows[slot / kTile]) + chunk / 8 * kPanelBytes + panel_offset(slot % kTile, chunk % 8),
          make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]));
    }
  }

  /// Fills every slot; the warps take slots in turn. A lane locates one row for its warp.
  template <int kWarps>
  __device__ void fill(const QueryRows& rows, int warp) const {
    constexpr int kOwn = kMaxWindowRows / kWarps, kAtOnce = 4;
    static_assert(kOwn <= 32 && kOwn % kAtOnce == 0);
    const int position = RingSlots(p_, rows).position(warp + lane_ % kOwn * kWarps);
    RowAddress address{};
    if (position >= 0) address = find(rows, position);
#pragma unroll 1
    for (int own = 0; own < kOwn; own += kAtOnce) {
      Reader::Raw raw[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        raw[j] = load({of_lane(address.payload, own + j), of_lane(address.scale, own + j)});
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
  WindowShared& s_;
  const int lane_;
};

// --- producers

class WindowProducer {
 public:
  __device__ WindowProducer(const AttendParams& p, WindowShared& s, int first_head)
      : p_(p), s_(s), rows_(p, s), first_head_(first_head), thread_(thread_here() % kProducerThreads) {}

  /// The first token's rows are in place, and its queries are in flight.
  __device__ void run(int first, int end) {
    QueryRows rows(p_, first);
    ops::StepRecord before;
    for (int token = first; token < end; ++token) {
      const int i = token - first;
      const bool follows = !rows.at.padded() && rows.at.row == before.row && rows.at.position == before.position + 1;
      const int slot = rows.at.position % p_.layer.window_tokens;
      const bool mine = follows && slot % kProducerWarps == warp();
      WindowRows::Reader::Raw raw{};
      if (mine) raw = rows_.load(rows_.find(rows, rows.at.position));
      if (i > 0) {
        mbarrier_wait(shared_address(&s_.queries_empty), (i - 1) & 1);
        copy_queries(token);
      }
      if (token + 1 < end) prefetch_queries(token + 1);
      if (thread_ == 0) {
        s_.work_tiles[i % 2] = {rows, token, first_head_, 1, {}};
        s_.next_side[i % 2] = slot + 1 == p_.layer.window_tokens ? 0 : (slot + 1) / kTile;
      }
      announce_queries();
      if (i > 0) mbarrier_wait(shared_address(follows ? &s_.side_empty : &s_.rows_empty), (i - 1) & 1);
      if (mine) rows_.store(raw, slot);
      if (i > 0 && !follows) rows_.fill<kProducerWarps>(rows, warp());
      announce(s_.rows_full);
      before = rows.at;
      if (token + 1 < end) rows = QueryRows(p_, token + 1);
    }
  }

  __device__ void copy_queries(int token) const {
    attend_wgmma::copy_queries<kProducerThreads, 4>(p_, s_, token, first_head_, thread_);
  }
  __device__ void prefetch_queries(int token) const {
    const std::uint8_t* q = queries_of(p_, token, first_head_);
    for (int at = thread_ * kLine; at < heads() * kWidth * 2; at += kProducerThreads * kLine) prefetch_l2(q + at);
  }

 private:
  __device__ int lane() const { return thread_ % 32; }
  __device__ int warp() const { return thread_ / 32; }
  __device__ int heads() const { return min(kTile, p_.num_heads - first_head_); }

  __device__ void announce_queries() const {
    wait_for_all_copies();
    announce(s_.queries_full);
  }
  __device__ void announce(std::uint64_t& barrier) const {
    fence_async_proxy();
    if (arrives_for_warp(static_cast<unsigned>(lane()))) mbarrier_arrive(shared_address(&barrier));
  }

  const AttendParams& p_;
  WindowShared& s_;
  const WindowRows rows_;
  const int first_head_, thread_;
};

// --- consumers

/// A consumer: P of one half of the rows, and PV of one half of the channels.
class WindowConsumer {
 public:
  __device__ WindowConsumer(const AttendParams& p, WindowShared& s, int first_head)
      : p_(p),
        s_(s),
        side_(static_cast<int>(threadIdx.x) / kWarpgroupThreads),
        scale_(p.softmax_scale * codec::kLog2e) {
    for (int half = 0; half < 2; ++half) sink_[half] = sink_of(p, first_head + head_of_thread() + 8 * half);
  }

  /// S of a token runs while the previous token's output is stored, if the output is bf16. The S after the last token
  /// is not used.
  __device__ void run(int tokens) {
    std::uint32_t words[kWords] = {};
    for (int i = 0;; ++i) {
      float z[kScores];
      score(z, i, i < tokens);
      if (i > 0 && p_.out.dtype == DType::bf16) store(words, Job(s_.work_tiles[(i - 1) % 2], 0));
      wgmma_wait<0>();
      if (i == tokens) break;
      release(s_.queries_empty);
      const WorkTile& work = s_.work_tiles[i % 2];
      float o[kWidth / 4], base[2], factor[2];
      softmax_tile(work.rows, z, base);
      const int first_side = s_.next_side[i % 2];
      add_values(o, first_side, false);
      add_values(o, first_side ^ 1, true);
      for (int half = 0; half < 2; ++half) factor[half] = finish(work, base[half], half);
      wgmma_wait<1>();
      release(s_.side_empty);
      wgmma_wait<0>();
      release(s_.rows_empty);
      scale_heads(o, factor[0], factor[1]);
      const Job job(work, 0);
      if (side_ == 1) inverse_rope_last(p_, job, o);
      if (p_.out.dtype == DType::f32) store_output(p_, job, o, side_ * (kWidth / 2));
#pragma unroll
      for (int j = 0; j < kWords; ++j) words[j] = bf16_pair(o[2 * j], o[2 * j + 1]);
    }
  }

 private:
  static constexpr int kWords = kWidth / 8;  // of a thread

  __device__ void release(std::uint64_t& barrier) const {
    if (arrives_for_warp(threadIdx.x % 32)) mbarrier_arrive(shared_address(&barrier));
  }

  /// Scores of this side's rows.
  __device__ void score(float (&z)[kScores], int token, bool is_there) const {
    if (is_there) {
      mbarrier_wait(shared_address(&s_.rows_full), token & 1);
      mbarrier_wait(shared_address(&s_.queries_full), token & 1);
    }
    score_side(s_, z, side_);
  }

  /// Converts S to P relative to the row maximum of both sides.
  __device__ void softmax_tile(const QueryRows& rows, float (&z)[kScores], float (&base)[2]) {
    if (rows.window < kMaxWindowRows) {
      const RingSlots slots(p_, rows);
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (slots.position(side_ * kTile + row_of_score(i)) < 0) z[i] = -INFINITY;
    }
    softmax_side(s_, z, side_, scale_, base);
    named_barrier_sync(1, kConsumerThreads);
  }

  /// O += P V over half of the rows and this side's channels.
  __device__ void add_values(float (&o)[kWidth / 4], int rows, bool add) const {
    const std::uint32_t p_tile = panel_place(shared_address(s_.p_tile[rows]));
    const std::uint32_t values = panel_place(shared_address(s_.rows[rows]) + side_ * (kTileBytes / 2), kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      const std::uint64_t a = panel_descriptor(p_tile, k * 32);
      const std::uint32_t at = k * 16 * kPanelRowBytes;
      wgmma<MmaType::bf16, 128, true>(o, a, panel_descriptor(values, at), add || k > 0);
      wgmma<MmaType::bf16, 128, true, 64>(o, a, panel_descriptor(values, at + 2 * kPanelBytes), add || k > 0);
    }
    wgmma_commit();
  }

  /// The four lanes of a head exchange words until each has 8 adjacent channels. All words are exchanged together: a
  /// shuffle waits for multiplies that read shared memory.
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

  /// The factor of O, for the upper or the lower head.
  __device__ float finish(const WorkTile& work, float base, int half) const {
    const int head = head_of_thread() + 8 * half;
    const float sink = work.rows.at.padded() ? -INFINITY : sink_[half];
    const bool has_lse = side_ == 0 && quad_of_thread() == 0;
    return finish_head(s_, head, base, sink, has_lse ? lse_of(p_, work.token, work.first_head + head) : nullptr);
  }

  const AttendParams& p_;
  WindowShared& s_;
  const int side_;
  const float scale_;
  float sink_[2];
};

__global__ void __launch_bounds__(kThreads, 1)
    attend_persistent_window(const __grid_constant__ AttendParams p, int head_tiles, int cta_tokens) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  WindowShared& s = *reinterpret_cast<WindowShared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&s.queries_full), Arrivals::of_warps(kProducerWarps));
    mbarrier_init(shared_address(&s.queries_empty), Arrivals::of_warps(kConsumerWarps));
    mbarrier_init(shared_address(&s.rows_full), Arrivals::of_warps(kProducerWarps));
    mbarrier_init(shared_address(&s.side_empty), Arrivals::of_warps(kConsumerWarps));
    mbarrier_init(shared_address(&s.rows_empty), Arrivals::of_warps(kConsumerWarps));
  }
  launch_dependents();
  touch(p);
  cta_sync();
  const int first_head = static_cast<int>(blockIdx.x) % head_tiles * kTile;
  const int first = static_cast<int>(blockIdx.x) / head_tiles * cta_tokens;
  const int end = min(first + cta_tokens, p.step.num_tokens);
  const bool loads = threadIdx.x >= kConsumerThreads;
  if (loads) WindowProducer(p, s, first_head).prefetch_queries(first);
  grid_dependency_wait();
  if (loads) WindowProducer(p, s, first_head).copy_queries(first);
  WindowRows(p, s).fill<kThreads / 32>(QueryRows(p, first), thread_here() / 32);
  fence_async_proxy();
  cta_sync();
  if (!loads) {
    more_registers<kWindowConsumerRegisters>();
    WindowConsumer(p, s, first_head).run(end - first);
  } else {
    fewer_registers<kWindowProducerRegisters>();
    WindowProducer(p, s, first_head).run(first, end);
  }
#endif
}

}  // namespace attend_wgmma::persistent_window

cudaError_t launch_persistent_window(const ops::AttendParams& p, const AttendSplit&, cudaStream_t stream) {
  using namespace attend_wgmma;
  using namespace attend_wgmma::persistent_window;
  const int head_tiles = head_tiles_of(p);
  const int at_once = std::max(num_sms() / head_tiles, 1);
  const int cta_tokens = (p.step.num_tokens + at_once - 1) / at_once;
  const int token_ranges = (p.step.num_tokens + cta_tokens - 1) / cta_tokens;
  return launch<kPersistentWindowSharedBytes>(attend_persistent_window,
                                              static_cast<unsigned>(token_ranges * head_tiles), kThreads, stream, p,
                                              head_tiles, cta_tokens);
}

}  // namespace kv4::cuda
