// attend for few tokens: rows of 512 channels in fp8_tile64 and bf16 queries on Hopper, bound by latency. Both heads
// and rows are split, so that even one token fills the GPU.
//
// A CTA takes 8 or 16 heads of a token and one KV split, in tiles of 64 rows; the KV splits form a cluster. Raw rows
// are copied into shared memory and never stored converted: an e4m3 code is exact in fp16, and its scale, a power of
// two per row and 64 channels, is applied after the multiplication. S of a tile is computed in the same phase as PV of
// the preceding tile, while the next tile is in flight. A split of at most 80 rows (such as one of eight splits of 640)
// is a single tile.
//   S   S^T = K Q^T (m16n8k16, rows times heads): warps take 16 rows and half of the channels; the products of each 64
//       channels are multiplied by their scale in fp32. Q stays in registers, in fp16 with a power of two per head. In
//       a single tile, 16 excess rows are spread over all warps, 64 channels each.
//   PV  O^T += V^T P^T (channels times heads): warps take 64 channels, all of one scale, and all rows. The scale's
//       exponent is added to the logit, so that P is 2^(logit + exponent - the largest such sum). Therefore each warp
//       has its own running maximum; the maximum in the warp of the bf16 channels is that of the softmax.
// Channels and rows are assigned to the mma indices so that a thread's fragments are adjacent in a row (S) or result
// from byte permutes of four rows (PV). Combination: each CTA sends its partial O, in fp16 with an exponent per head
// and 64 channels, directly to the CTA that reduces it: one exchange, one launch.
//
// Speculative prefetch: before the preceding kernel has ended, the kernel brings the memory that the token's record
// refers to into L2. It requests the first rows by that record while it reads the record again for validation.
// H200, 2026-11-16, one token, 64 heads: 128 rows in 4.0 us, 640 chosen rows in 5.9. Bound by the latency of code that
// runs once, about five clocks an instruction. So everything that can be computed before the grid dependency wait is,
// and the compiler knows the number of splits if it is eight. A further tile takes 4,100 clocks (8 heads) or 5,400
// (16).
#include "backend/cuda/attend/small_batch.cuh"
#include "backend/cuda/ptx/async_copy.cuh"

#include <array>
#include <bit>
#include <cstdint>

#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {
namespace small_batch {

// --- rows

/// An entry of a list. Everything that does not depend on the entry's number is computed before the grid dependency
/// wait.
class ChosenRow {
 public:
  ChosenRow() = default;
  __device__ ChosenRow(const AttendParams& p, const QueryRows& rows, std::int64_t token, int row)
      : list_(static_cast<const std::int32_t*>(p.chosen.data) + token * p.chosen.row_stride + (row - rows.window)),
        table_(p.step.block_table + std::int64_t{rows.at.row} * p.step.blocks_per_request),
        visible_((rows.at.position + 1) / p.layer.kinds[0].ratio) {
    const int in_block = p.layer.kinds[0].rows_per_block;
    shift_ = (in_block & (in_block - 1)) == 0 ? __popc(in_block - 1) : -1;
    asm volatile("" : "+l"(list_), "+l"(table_), "+r"(visible_), "+r"(shift_));  // not moved behind the wait
  }

  __device__ void ask() { entry_ = load4_ordered(list_); }
  __device__ RowPointers place(const AttendParams& p) const {
    if (entry_ < 0 || entry_ >= visible_) return {};
    const ops::KindDesc& kind = p.layer.kinds[0];
    const int in_table = shift_ >= 0 ? entry_ >> shift_ : entry_ / kind.rows_per_block;
    const int block = load4_ordered(table_ + in_table);
    const int row = shift_ >= 0 ? entry_ - (in_table << shift_) : entry_ - in_table * kind.rows_per_block;
    std::int64_t payload = row * kind.page.payload.row_stride, scale = row * kind.page.scale.row_stride;
    asm volatile("" : "+l"(payload), "+l"(scale));  // while the table is read
    if (block < 0) return {};
    return {kind.page.payload.data + payload + block * kind.page.payload.block_stride,
            kind.page.scale.data + scale + block * kind.page.scale.block_stride, nullptr};
  }

 private:
  const std::int32_t *list_, *table_;
  int visible_, shift_;  // shift_: log2 of a block's rows; negative: not a power of two
  int entry_;
};

/// Four threads copy a row; a thread has 16 of every 64 bytes. Each thread locates the row of every fourth tile, one
/// step (see QueryRows) per tile, and passes its address to the other threads.
class RowCopier {
 public:
  static constexpr int kAhead = 2;  // tiles in flight or in S while PV of one runs

  __device__ RowCopier(const AttendParams& p, const QueryRows& rows, const Job& job)
      : p_(p),
        rows_(rows),
        job_(job),
        row_(static_cast<int>(threadIdx.x) / 4),
        chunk_(static_cast<int>(threadIdx.x) % 4) {}

  /// Before the preceding kernel has ended: locates the rows of the first four tiles that no list names, and brings
  /// every n-th line of them into L2.
  __device__ void speculate(int line, int lines) {
    known_ = row(0) >= job_.end || row(0) < rows_.window || p_.chosen.data == nullptr;
    if (!known_) chosen_ = ChosenRow(p_, rows_, job_.token, row(0));
    if (!known_ || row(0) >= job_.end) return;
    name(0);
    block_ =
        row(0) < rows_.window ? rows_.block(p_, row(0), key_) : __ldcg(entry_block());  // the table may still change
    place_ = placed(0);
    if (place_.payload == nullptr) return;
    for (int at = line * kLine; at < kScaleAt + kLine; at += lines * kLine)
      prefetch_l2(at < kScaleAt ? place_.payload + at : place_.scale);
  }

  /// Requests the data that locate the remaining rows; if the speculation was wrong, those of all rows.
  __device__ void begin(bool speculated) {
    speculated_ = speculated;
    known_ = known_ && speculated;
    if (known_) return;
    if (speculated)
      chosen_.ask();
    else
      name(0);
  }

  /// Copies the first tiles.
  template <class S>
  __device__ void copy_first(S& s) {
    if (!known_) {
      if (speculated_) {
        place_ = chosen_.place(p_);
      } else {
        find_block(0);
        place_ = placed(0);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kAhead; ++tile) copy(s, tile);
  }

  /// Validates the speculative addresses, after the record has been validated.
  __device__ bool is_valid() const {
    return !known_ || row(0) >= job_.end || row(0) < rows_.window || *entry_block() == block_;
  }

  /// Called when the preceding tile has been used: copies another tile into its place.
  template <class S>
  __device__ void advance(S& s, int tile) {
    prepare(tile);
    copy(s, tile + kAhead);
  }

 private:
  /// The four tiles after this one's.
  __device__ void prepare(int tile) {
    const int next = tile / 4 * 4 + 4;
    if (next >= job_.tiles()) return;
    if (tile % 4 == 0) name(next);
    if (tile % 4 == 1) find_block(next);
    if (tile % 4 == 2) next_ = placed(next);
  }

  /// A batch of copies, which may be empty.
  template <class S>
  __device__ void copy(S& s, int tile) {
    ask(s, tile);
    commit_copies();
  }
  template <class S>
  __device__ void ask(S& s, int tile) {
    if (tile % 4 == 0 && tile > 0) place_ = next_;
    const int from = static_cast<int>(threadIdx.x) % 32 / 4 * 4 + tile % 4;
    const auto give = [&](const std::uint8_t* mine) {
      return reinterpret_cast<const std::uint8_t*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), from));
    };
    const std::uint8_t *payload = give(place_.payload), *scale = give(place_.scale);
    if (tile >= job_.tiles() || row_ >= job_.steps(tile) * 16) return;
    // This single tile is two here, the second one short; a speculative record may have more rows.
    const int row = S::kOneTile ? tile * kTile + row_ : row_;
    if (S::kOneTile && row >= S::kRows) return;
    const bool there = payload != nullptr;
    if (!there) payload = scale = static_cast<const std::uint8_t*>(p_.q.data);  // a valid address; nothing is read
    const int bytes = there ? 16 : 0, stage = tile % S::kStages;
    const std::uint32_t to = shared_address(s.rows[stage]) + row * kRowStride;
#pragma unroll
    for (int at = 0; at < kScaleAt; at += 64)
      copy_async_or_zero<16>(to + at + chunk_ * 16, payload + at + chunk_ * 16, bytes);
    if (chunk_ != 0) return;
    copy_async_or_zero<8>(to + kScaleAt, scale, bytes / 2);
    s.absent[stage][row] = there ? 0.0f : -INFINITY;
  }

  __device__ int row(int tile) const { return job_.begin + (tile + chunk_) * kTile + row_; }
  __device__ void name(int tile) { key_ = row(tile) < job_.end ? rows_.key(p_, job_.token, row(tile)) : -1; }
  __device__ void find_block(int tile) { block_ = rows_.block(p_, row(tile), key_); }
  __device__ const std::int32_t* entry_block() const {
    return p_.step.block_table + std::int64_t{rows_.at.row} * p_.step.blocks_per_request +
           key_ / p_.layer.kinds[0].rows_per_block;
  }
  __device__ RowPointers placed(int tile) const { return rows_.place(p_, row(tile), key_, block_); }

  const AttendParams& p_;
  const QueryRows& rows_;
  const Job& job_;
  const int row_, chunk_;
  bool known_ = false, speculated_ = true;
  int key_, block_;
  ChosenRow chosen_;
  RowPointers place_, next_;
};

template <int kHeads, int kStages, int kFixed>
__global__ void __launch_bounds__(kThreads, kStages <= 2 ? 2 : 1)
    attend_small_batch(const __grid_constant__ AttendParams p, KvSplits<kFixed> kv_splits, int head_groups) {
#if __CUDA_ARCH__ == 900
  constexpr bool kNine = KvSplits<kFixed>::kNine;
  using S = Shared<kHeads, kStages, kNine>;
  extern __shared__ __align__(16) std::uint8_t base[];
  auto& s = *reinterpret_cast<S*>(base);
  const std::uint32_t arrived = shared_address(&s.arrived);
  if (threadIdx.x == 0) {
    mbarrier_init(arrived, Arrivals::of_copies());
    fence_mbarrier_init();
  }
  part_init_from_arrival();
  if (threadIdx.x == 0) mbarrier_arrive_expect_tx(arrived, s.bytes_sent(kv_splits.count()));
  touch(p);
  __syncwarp();
  cluster_arrive();
  Job job(kv_splits, head_groups, kHeads);
  QueryRows rows(p, job.token, speculative_record_to_load(p, job.token));
  job.take_rows(rows, kv_splits);
  RowCopier copier(p, rows, job);
  copier.speculate(job.first_head / kHeads, head_groups);
  prefetch_inputs<kHeads>(p, job, kv_splits, rows, head_groups);
  float sink = -INFINITY;
  if (p.sink != nullptr && threadIdx.x < kHeads && job.first_head + static_cast<int>(threadIdx.x) < p.num_heads)
    sink = p.sink[job.first_head + threadIdx.x] * codec::kLog2e;
  grid_dependency_wait();
  launch_dependents();

  const int warp = warp_of_thread(), half = warp / kSteps;
  const int step = (warp + half) % kSteps;  // the two halves of 16 rows run in different quarters of the SM
  Queries<S> queries;
  ops::StepRecord record;
  record.row = 0;
  if (p.step.tokens != nullptr) record = load_record_l2(p.step.tokens + job.token);
  copier.begin(true);
  queries.load(p, job);
  copier.copy_first(s);
  queries.convert(s);
  const bool same_query =
      is_same(record, rows.at) && (p.step.tokens == nullptr || window_begin(p.step, record) == rows.begin);
  if (__syncthreads_or(!same_query || !copier.is_valid())) {
    wait_for_copies<0>();
    cta_sync();
    rows = QueryRows(p, job.token, record);
    job.take_rows(rows, kv_splits);
    copier.begin(false);
    copier.copy_first(s);
  }
  if (threadIdx.x < kHeads) s.sink[threadIdx.x] = rows.at.padded() ? -INFINITY : sink;
  Rotation rotation{};
  if (p.inverse_rope.rope_dim > 0 && !rows.at.padded() && (job.kv_split + 1) * kWarps > kScales << kv_splits.log2())
    rotation = load_rotation(p.inverse_rope, rows.at.position, kTailAt + 2 * lane_of_thread(), kWidth);
  queries.take(s, half);

  const float logit_scale = p.softmax_scale * codec::kLog2e;
  PvAccumulator<S> values;
  const auto add = [&](int tile, int steps) {
    if (warp == kWarps - 1)
      values.template add<true>(s, tile, steps);
    else
      values.template add<false>(s, tile, steps);
  };
  if constexpr (S::kOneTile) {
    const int steps = job.steps(), whole = spreads(steps) ? steps - 1 : steps;
    wait_for_copies<0>();
    cta_sync();
    if (step < whole) score_rows(s, 0, step, half, queries, logit_scale);
    if (whole < steps) score_spread(s, whole, logit_scale);
    cta_sync();
    if (steps > 0) add(0, steps);
  } else {
    // S of a tile is computed in the same phase as PV of the preceding tile: one barrier per tile.
    for (int tile = -1; tile < job.tiles(); ++tile) {
      if (tile < 0)
        wait_for_copies<RowCopier::kAhead - 1>();
      else
        wait_for_copies<0>();
      cta_sync();
      if (tile >= 0) {
        copier.advance(s, tile);
        add(tile, job.steps(tile));
      }
      if (tile + 1 < job.tiles() && step < job.steps(tile + 1))
        score_rows(s, tile + 1, step, half, queries, logit_scale);
    }
  }
  cluster_wait();  // all CTAs have begun
  values.send(s, job, kv_splits);
  if (kNine && job.kv_split >= kv_splits.reducers()) return;  // no CTA sends data here
  const auto wait = [&] {
    if (kv_splits.unsplit())
      cta_sync();  // for the data that this CTA stored for itself
    else
      mbarrier_wait(shared_address(&s.arrived), 0);
  };
  if (S::kPairs >> kv_splits.log2() <= kWarps) {
    reduce_one(p, s, job, kv_splits, rotation, wait);
  } else {
    wait();
    reduce_several(p, s, job, kv_splits, rotation);
  }
#endif
}

// --- on the host

/// One variant of the kernel.
template <int kHeads, int kStages>
struct Variant {
  static constexpr bool kNine = kStages > 1;  // nine KV splits, too
  static constexpr int kSharedBytes = sizeof(Shared<kHeads, kStages, kNine>);
  static_assert(kSharedBytes <= (kStages <= 2 ? 113 : 227) * 1024);

  template <int kFixed>
  static cudaError_t launch(const AttendParams& p, int kv_splits, cudaStream_t stream) {
    const auto kernel = attend_small_batch<kHeads, kStages, kFixed>;
    const int head_groups = (p.num_heads + kHeads - 1) / kHeads;
    const int splits_log2 = static_cast<int>(std::bit_width(static_cast<unsigned>(kv_splits))) - 1;
    return launch_clusters<sizeof(Shared<kHeads, kStages, KvSplits<kFixed>::kNine>)>(
        kernel, static_cast<unsigned>(kv_splits), static_cast<unsigned>(p.step.num_tokens * head_groups * kv_splits),
        kThreads, stream, p, KvSplits<kFixed>{splits_log2}, head_groups);
  }
  static cudaError_t launch(const AttendParams& p, int kv_splits, cudaStream_t stream) {
    if constexpr (kNine) {
      if (kv_splits == kNineSplits) return launch<kNineSplits>(p, kv_splits, stream);
    } else {
      if (kv_splits == kEightSplits) return launch<kEightSplits>(p, kv_splits, stream);
    }
    return launch<0>(p, kv_splits, stream);
  }
  static AttendGpu::Clusters count_clusters() {
    AttendGpu::Clusters counts{};
    for (const unsigned ctas : {1u, 2u, 4u, 8u, unsigned{kNineSplits}, 16u})
      if (kNine || ctas != kNineSplits)
        counts[ctas] = clusters_at_once<kSharedBytes>(attend_small_batch<kHeads, kStages, 0>, ctas, kThreads);
    return counts;
  }
};

}  // namespace small_batch

std::array<AttendGpu::Clusters, 4> count_small_batch_clusters() {
  using small_batch::Variant;
  return {Variant<8, 1>::count_clusters(), Variant<8, 2>::count_clusters(), Variant<8, 3>::count_clusters(),
          Variant<16, 3>::count_clusters()};
}

cudaError_t launch_small_batch(const ops::AttendParams& p, const AttendSplit& split, cudaStream_t stream) {
  using small_batch::Variant;
  if (split.heads == 16) return Variant<16, 3>::launch(p, split.kv_splits, stream);
  if (split.stages == 1) return Variant<8, 1>::launch(p, split.kv_splits, stream);
  return split.stages == 2 ? Variant<8, 2>::launch(p, split.kv_splits, stream)
                           : Variant<8, 3>::launch(p, split.kv_splits, stream);
}

}  // namespace kv4::cuda
