// The inputs of a compressor: records of a step's tokens, and kv and gate rows from the ring or the step's inputs.
#pragma once

#include <type_traits>

#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/ptx/load_store.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/rows/warp_row.cuh"
#include "kv4/params.h"

namespace kv4::cuda {

/// Element of a bf16 row.
struct Bf16 {
  std::uint16_t bits;
};

/// Rows are less than 2 GiB apart, so that an address is one multiplication.
template <class T>
__device__ T* row_at(T* first, int row, std::int64_t stride_bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::uint8_t, std::uint8_t>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(first) +
                              std::uint64_t{static_cast<unsigned>(row)} * static_cast<unsigned>(stride_bytes));
}

/// A pair as loaded; a bf16 pair is in the first word.
using RawPair = Words<kPair>;

struct RawRow {
  RawPair kv, gate;
};

template <class T>
__device__ RawPair load_raw(const T* at) {
  if constexpr (std::is_same_v<T, float>) {
    return load_no_l1<2>(at);
  } else {
    return {{load_no_l1<1>(at).w[0], 0}};
  }
}

template <class T>
__device__ Pair values(const RawPair& q) {
  if constexpr (std::is_same_v<T, float>) {
    return {{codec::bits_float(q.w[0]), codec::bits_float(q.w[1])}};
  } else {
    return pair_values(q.w[0]);
  }
}

/// Stores values rounded to T, with the canonical NaN.
template <class T>
__device__ void store_pair(T* at, const Pair& x) {
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float2*>(at) = make_float2(codec::canonical_nan(x.v[0]), codec::canonical_nan(x.v[1]));
  } else {
    *reinterpret_cast<std::uint32_t*>(at) =
        codec::bf16_bits(x.v[0]) | static_cast<std::uint32_t>(codec::bf16_bits(x.v[1])) << 16;
  }
}

// --- rows in flight to shared memory, where they hold no registers

/// Alignment of rows in a stage. Copies to an address that is 16 modulo 32 take much longer, and copies to multiples of
/// 64 take somewhat longer (H200, 2026-11-16; HCA prefill 64, 51.4 and 49.4 us).
constexpr int kStageLine = 128;

// Loads and copies seem to return in the order of their requests: data needed soon is requested before rows needed
// late, or together with them.

/// Rows in shared memory: kv, then gate, stage_row_bytes each. Every warp has its own part of a row, whatever the type
/// of its elements.
constexpr int stage_row_bytes(int threads) { return threads * static_cast<int>(sizeof(RawPair)); }

__device__ inline int stage_offset(int pair_bytes) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  return (thread - lane) * static_cast<int>(sizeof(RawPair)) + lane * pair_bytes;
}

__device__ inline RawPair read_stage(const std::uint8_t* at, int pair_bytes) {
  if (pair_bytes == sizeof(RawPair)) return *reinterpret_cast<const RawPair*>(at);
  return {{*reinterpret_cast<const std::uint32_t*>(at), 0}};
}

/// Copies consecutive input rows there, 16 bytes at a time. One copy brings the pairs of kSharers lanes, which divide
/// kv, gate and rows among themselves. Readers wait for the copies, then for the warp.
template <class In, int kRowBytes>
class InputCopies {
 public:
  __device__ InputCopies(const ops::InputDesc& kv, const ops::InputDesc& gate, int channel) {
    const int sharer = static_cast<int>(threadIdx.x) % kSharers, first = sharer / 2;  // row of the lane's first copy
    const ops::InputDesc& in = sharer % 2 == 0 ? kv : gate;
    stride_ = static_cast<unsigned>(in.row_stride) * static_cast<unsigned>(sizeof(In));
    from_ = row_at(static_cast<const In*>(in.data), first, stride_) + channel - sharer * kPair;
    offset_ = first * 2 * kRowBytes + sharer % 2 * kRowBytes + stage_offset(kPair * sizeof(In)) -
              sharer * kPair * static_cast<int>(sizeof(In));
  }

  /// kRows rows from `token` on. to: shared address; column: see SourceRows.
  template <int kRows>
  __device__ void issue(unsigned to, int token, int column) const {
    const In* from = row_at(from_, token, stride_) + column;
#pragma unroll
    for (int i = 0; i < kRows; i += kSharers / 2) {
      copy_async<16>(to + offset_ + i * 2 * kRowBytes, from);
      from = row_at(from, kSharers / 2, stride_);
    }
  }

 private:
  static constexpr int kSharers = 16 / (kPair * static_cast<int>(sizeof(In)));
  const In* from_;
  unsigned stride_;
  int offset_;
};

/// Copies whole rows there, by kWarps warps that wait for each other: [kRows, kv and gate, kRowBytes]. A warp copies a
/// part of one row.
template <class In, int kWidth, int kRowBytes, int kWarps, int kRows>
class WholeRowCopies {
 public:
  static constexpr int kBytes = kRows * 2 * kRowBytes;

  __device__ WholeRowCopies(const ops::InputDesc& kv, const ops::InputDesc& gate, int token) {
    const int thread = reload_thread_index(), warp = thread / kWarp, lane_at = thread % kWarp * 16;
    const int part = warp % kParts;
    const ops::InputDesc& in = warp / kParts % 2 == 0 ? kv : gate;
    const std::int64_t stride = in.row_stride * static_cast<std::int64_t>(sizeof(In));
    row_ = warp / (2 * kParts);
    from_ = row_at(static_cast<const std::uint8_t*>(in.data), token + row_, stride) + part * kPart + lane_at;
    step_ = kRows * static_cast<unsigned>(stride);
    offset_ = warp / kParts * kRowBytes + part * kPart + lane_at;
  }

  /// The next kRows rows, `count` of which exist. to: shared address.
  __device__ void issue(unsigned to, int count) {
    if (row_ >= count) return;
#pragma unroll
    for (int i = 0; i < kPart; i += kWarpBytes) copy_async<16>(to + offset_ + i, from_ + i);
    from_ += step_;
  }

 private:
  static constexpr int kParts = kWarps / (2 * kRows), kPart = kWidth * static_cast<int>(sizeof(In)) / kParts;
  static constexpr int kWarpBytes = kWarp * 16;
  static_assert(kPart % kWarpBytes == 0);
  const std::uint8_t* from_;
  unsigned step_;
  int row_, offset_;
};

// --- records

// A kernel that started early is here while the record is written, hence not through the read-only path.
__device__ inline ops::StepRecord load_record(const ops::StepRecord* at) {
  const int4* words = reinterpret_cast<const int4*>(at);
  const int4 a = words[0], b = words[1];
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

/// The same from L2: L1 may still hold a record that was read before the wait.
__device__ inline ops::StepRecord load_record_l2(const ops::StepRecord* at) {
  const int4* words = reinterpret_cast<const int4*>(at);
  const int4 a = __ldcg(words), b = __ldcg(words + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

/// A token's record before the wait: already this step's, unless the kernel before writes it. The rows it points at can
/// be requested at once: they are right if the record proves valid, and lie in the same pools if not (kv4/cuda.h).
class SpeculativeTokenRecord {
 public:
  __device__ SpeculativeTokenRecord(const ops::StepDesc& step, int token) {
    if (token < step.num_tokens) record_ = load_record(step.tokens + token);
  }
  __device__ const ops::StepRecord& get() const { return record_; }
  /// Padded, or half written.
  __device__ bool padded() const { return record_.padded() || min(record_.read_slot, record_.write_slot) < 0; }
  /// Validation: whether the record points at the same rows as `r`.
  __device__ bool holds(const ops::StepRecord& r) const {
    return record_.length == r.length && record_.read_slot == r.read_slot && record_.write_slot == r.write_slot &&
           record_.position == r.position;
  }

 private:
  ops::StepRecord record_;
};

/// Before the wait: prefetches the first kind's input rows of `count` tokens into L2, for whichever CTA reads them.
template <class In>
__device__ void prefetch_inputs(const ops::AppendParams& p, int first, int count) {
  constexpr int kSector = 32;
  const int at = static_cast<int>(threadIdx.x) * kSector;
  if (at >= p.layer.kinds[0].pending.columns * static_cast<int>(sizeof(In))) return;
  for (int token = first; token < min(first + count, p.step.num_tokens); ++token)
    for (const ops::InputDesc* in : {&p.kv[0], &p.gate[0]})
      prefetch_l2(row_at(static_cast<const std::uint8_t*>(in->data), token,
                         in->row_stride * static_cast<std::int64_t>(sizeof(In))) +
                  at);
}

/// The tokens first, first + stride, ... that `wanted` picks; called by whole warps. With an odd stride, tokens that
/// lie a ratio apart (entries due in a prefill) go to different groups, and so do adjacent tokens (decodes).
template <class Wanted>
class TokenIterator {
 public:
  static constexpr int kNone = -1;

  __device__ TokenIterator(const ops::StepDesc& step, int first, int stride, Wanted wanted)
      : step_(step), token_(first < stride ? first : step.num_tokens), stride_(stride), wanted_(wanted) {}

  /// The next token, or kNone.
  __device__ int next() {
    while (todo_ == 0) {
      if (ballot_ == kBallots && !look_ahead()) return kNone;
      todo_ = __shfl_sync(kAllLanes, masks_, ballot_++);
    }
    const int bit = __ffs(static_cast<int>(todo_)) - 1;
    todo_ &= todo_ - 1;
    return token_ + ((ballot_ - 1 - kBallots) * kWarp + bit) * stride_;
  }

 private:
  static constexpr int kBallots = 4;  // records that a lane reads together

  __device__ bool look_ahead() {
    if (token_ >= step_.num_tokens) return false;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int i = 0; i < kBallots; ++i) {
      const int token = token_ + (i * kWarp + lane) * stride_;
      ops::StepRecord record;
      if (token < step_.num_tokens) record = load_record(step_.tokens + token);
      const unsigned mask = __ballot_sync(kAllLanes, !record.padded() && wanted_(record));
      if (lane == i) masks_ = mask;
    }
    token_ += kBallots * kWarp * stride_;
    ballot_ = 0;
    return true;
  }

  const ops::StepDesc& step_;
  int token_, stride_;  // token_: the first one not read yet
  Wanted wanted_;
  unsigned masks_ = 0, todo_ = 0;  // lane i: the wanted tokens of ballot i; those left of this ballot
  int ballot_ = kBallots;          // the next ballot
};

// --- rows

/// Rows of one request and kind, each at one thread's channel. Positions below `length` come from the ring, in the
/// pending type; the others come from the inputs and are rounded to the pending type when used. Rows are less than 2
/// GiB apart, so that an address is one multiplication.
template <class In, class Pending>
class SourceRows {
 public:
  __device__ SourceRows(const ops::AppendParams& p, int k, const ops::StepRecord& r, int channel)
      : pending_(p.layer.kinds[k].pending), length_(r.length) {
    const auto input = [&](const ops::InputDesc& in, int* stride) {
      *stride = static_cast<int>(in.row_stride * static_cast<std::int64_t>(sizeof(In)));
      return static_cast<const std::uint8_t*>(in.data) + std::int64_t{r.first_token - r.length} * *stride +
             channel * static_cast<int>(sizeof(In));
    };
    kv_ = input(p.kv[k], &kv_stride_);
    gate_ = input(p.gate[k], &gate_stride_);
    ring_ = pending_.ring.at(r.read_slot, 0) + channel * static_cast<int>(sizeof(Pending));
    out_ = pending_.ring.at(r.write_slot, 0) + channel * static_cast<int>(sizeof(Pending));
  }

  /// ring_row: position mod ring rows; column: of the row's series, before the thread's channel.
  __device__ RawRow load(int position, int ring_row, int column) const {
    return with_addresses(position, ring_row, column, [](auto* kv, auto* gate) {
      return RawRow{load_raw(kv), load_raw(gate)};
    });
  }

  /// The same into shared memory.
  __device__ void copy(int position, int ring_row, int column, unsigned kv_to, unsigned gate_to) const {
    with_addresses(position, ring_row, column, [=](auto* kv, auto* gate) {
      copy_async<kPair * sizeof(*kv)>(kv_to, kv);
      copy_async<kPair * sizeof(*gate)>(gate_to, gate);
    });
  }

  __device__ RawRow load_input(int position, int column) const {
    return {load_raw(input(kv_, kv_stride_, position) + column),
            load_raw(input(gate_, gate_stride_, position) + column)};
  }

  __device__ Pair read(const RawPair& raw, int position) const { return read(raw, position < length_); }

  __device__ static Pair read(const RawPair& raw, bool stored) {
    if (!std::is_same_v<In, Pending> && stored) return values<Pending>(raw);
    const Pair x = values<In>(raw);
    if constexpr (std::is_same_v<In, float> && std::is_same_v<Pending, Bf16>) return round_bf16(x);
    return x;
  }

  /// Stores an input row into the ring of the write slot.
  __device__ void store(const RawRow& raw, int ring_row, int column) const {
    Pending* row = const_cast<Pending*>(ring_row_of(out_, ring_row)) + column;
    store_pair(row, values<In>(raw.kv));
    store_pair(row + pending_.columns, values<In>(raw.gate));
  }

 private:
  template <class Get>
  __device__ auto with_addresses(int position, int ring_row, int column, Get get) const {
    const bool stored = position < length_;
    const Pending* ring = ring_row_of(ring_, ring_row) + column;
    if constexpr (std::is_same_v<In, Pending>) {  // one access for both sources
      const In* kv = stored ? ring : input(kv_, kv_stride_, position) + column;
      const In* gate = stored ? ring + pending_.columns : input(gate_, gate_stride_, position) + column;
      return get(kv, gate);
    } else {
      if (stored) return get(ring, ring + pending_.columns);
      return get(input(kv_, kv_stride_, position) + column, input(gate_, gate_stride_, position) + column);
    }
  }

  __device__ const Pending* ring_row_of(const std::uint8_t* slot, int row) const {
    return reinterpret_cast<const Pending*>(slot + std::int64_t{row} * static_cast<int>(pending_.ring.row_stride));
  }
  __device__ static const In* input(const std::uint8_t* first, int stride, int position) {
    return reinterpret_cast<const In*>(first + std::int64_t{position} * stride);
  }

  const ops::PendingDesc& pending_;
  int length_, kv_stride_, gate_stride_;
  const std::uint8_t *kv_, *gate_;  // of position 0, whether it exists or not
  const std::uint8_t* ring_;        // of the read slot
  const std::uint8_t* out_;         // of the write slot
};

// --- pools

__device__ inline void clear(ops::Pool (&pool)[kPair]) {
#pragma unroll
  for (int i = 0; i < kPair; ++i) pool[i] = ops::empty_pool();
}

__device__ inline void pool_pair(ops::Pool (&pool)[kPair], const Pair& gate, const Pair& bias, const Pair& kv) {
#pragma unroll
  for (int i = 0; i < kPair; ++i) pool[i] = ops::pool_add(pool[i], gate.v[i] + bias.v[i], kv.v[i]);
}

}  // namespace kv4::cuda
