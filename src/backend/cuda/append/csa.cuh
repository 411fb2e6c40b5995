// Entries that overlap (CSA): an entry pools the first series of the span before its own, and the second series of its
// own span. Tokens are independent: no token reads data that another token of the step writes.
#pragma once

#include "backend/cuda/append/entry_row.cuh"
#include "backend/cuda/append/prefill_entries.cuh"
#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {

constexpr int kOverlapRatio = 4, kOverlapRows = 2 * kOverlapRatio;

template <class In, class Pending, class Lanes>
class OverlapSpans {
 public:
  __device__ OverlapSpans(const ops::AppendParams& p, int k, Lanes lanes)
      : p_(p), k_(k), kind_(p.layer.kinds[k]), lanes_(lanes), channel_(lanes.channel()) {
#pragma unroll
    for (int i = 0; i < kOverlapRows; ++i)
      bias_[i] = load_weight(kind_.bias + (i % kOverlapRatio * 2 + i / kOverlapRatio) * kWidth + channel_);
    weight_ = load_weight(kind_.norm_weight + channel_);
  }

  /// A decode, bound by latency: requests the token's record, its input rows and the ring rows that the speculative
  /// record points at, all together.
  __device__ void decode(int token) {
    const SpeculativeTokenRecord speculative(p_.step, token);
    const bool prefetched =
        !speculative.padded() && closes(speculative.get()) && speculative.get().position == speculative.get().length;
    Rotation rotation{};
    RawRow rows[kOverlapRows];
    if (prefetched) {
      load_stored(speculative.get(), rows);
      rotation = rotation_at(speculative.get().position);
    }
    if (token < p_.step.num_tokens) prefetch_token(token);
    grid_dependency_wait();
    launch_dependents();
    if (token >= p_.step.num_tokens) return;
    const RawRow first_series = load_token(token, 0);
    rows[kOverlapRows - 1] = load_token(token, kWidth);
    const ops::StepRecord r = load_record_l2(p_.step.tokens + token);
    if (r.padded()) return;
    const Source source(p_, k_, r, channel_);
    const int ring_row = ring_row_of(r);
    if (closes(r) && !(prefetched && speculative.holds(r))) {
      rotation = rotation_at(r.position);
      const int begin = r.position + 1 - kOverlapRows;
#pragma unroll
      for (int i = 0; i < kOverlapRows - 1; ++i)
        if (i >= kOverlapRatio || begin >= 0)
          rows[i] = source.load(begin + i, row_before(ring_row, kOverlapRows - 1 - i), column(i));
    }
    if (stays(r)) {
      source.store(first_series, ring_row, 0);
      source.store(rows[kOverlapRows - 1], ring_row, kWidth);
    }
    if (!closes(r)) return;
    ops::Pool pool[kPair];
    pool_rows(r.position, r.length, pool, [&](int i) { return rows[i]; });
    store_entry(lanes_, p_, kind_, pool, weight_, rotation, r.position % p_.step.block_tokens / kOverlapRatio, r.block);
  }

  /// Every groups-th token of a prefill, bound by the bytes of its inputs, which it reads once. The rows of an entry
  /// are in flight while the entry before is pooled. stage: shared [2, kOverlapRows, kv and gate, kRowBytes]. sink:
  /// takes the pools, EntryBatch or EachEntry.
  template <class Sink>
  __device__ void prefill(const std::uint8_t* stage, int group, int groups, Sink&& sink) {
    const unsigned stage_at = static_cast<unsigned>(__cvta_generic_to_shared(stage));
    int half = 0, position = kNone, length = 0, block = 0;  // of the entry in flight
    const Inputs inputs(p_.kv[k_], p_.gate[k_], channel_);
    TokenIterator tokens(p_.step, group, groups, [&](const ops::StepRecord& r) { return closes(r) || stays(r); });
    while (true) {
      const int token = tokens.next();
      ops::StepRecord r;
      if (token != kNone) {
        r = load_record(p_.step.tokens + token);
        if (stays(r)) store_pending(r);
        if (!closes(r)) continue;
      }
      if (position != kNone) sink.begin(position + 1 - kOverlapRatio, block);
      sink.sync();  // the warps request whole rows together: slower if they drift apart
      if (token != kNone) issue(inputs, r, stage_at + offset_of(half, 0));
      commit_copies();
      wait_for_copies<1>();
      __syncwarp();  // for the copies of the other lanes
      if (position != kNone) {
        ops::Pool pool[kPair];
        pool_rows(position, length, pool, [&](int i) {
          const int pair = pair_bytes(position + 1 - kOverlapRows + i < length);
          const std::uint8_t* at = stage + offset_of(half ^ 1, i) + stage_offset(pair);
          return RawRow{read_stage(at, pair), read_stage(at + kRowBytes, pair)};
        });
        sink.put(pool, channel_);
      }
      if (token == kNone || sink.full()) sink.finish();
      if (token == kNone) return;
      position = r.position;
      length = r.length;
      block = r.block;
      half ^= 1;
    }
  }

 private:
  using Source = SourceRows<In, Pending>;
  static constexpr int kWidth = Lanes::kWidth, kNone = -1;
  static constexpr int kRowBytes = stage_row_bytes(Lanes::kRows * Lanes::kWarps * kWarp);

  using Inputs = InputCopies<In, kRowBytes>;

  /// Byte of a kv row in the stage; its gate row follows.
  __device__ static constexpr int offset_of(int half, int i) { return (half * kOverlapRows + i) * 2 * kRowBytes; }

  __device__ static int pair_bytes(bool stored) {
    return kPair * static_cast<int>(stored ? sizeof(Pending) : sizeof(In));
  }

  __device__ void store_pending(const ops::StepRecord& r) const {
    const Source source(p_, k_, r, channel_);
    const int ring_row = ring_row_of(r);
    source.store(source.load_input(r.position, 0), ring_row, 0);
    source.store(source.load_input(r.position, kWidth), ring_row, kWidth);
  }

  /// Starts the copies of an entry's rows. to: shared address of half a stage.
  __device__ void issue(const Inputs& inputs, const ops::StepRecord& r, unsigned to) const {
    const int begin = r.position + 1 - kOverlapRows;
    if (begin >= r.length) {  // most of a prefill: all rows are inputs
      const int token = static_cast<int>(r.token_of(begin));
      inputs.template issue<kOverlapRatio>(to, token, 0);
      inputs.template issue<kOverlapRatio>(to + offset_of(0, kOverlapRatio), token + kOverlapRatio, kWidth);
    } else {
      const Source source(p_, k_, r, channel_);
      const int ring_row = ring_row_of(r);
#pragma unroll 1
      for (int i = begin >= 0 ? 0 : kOverlapRatio; i < kOverlapRows; ++i) {
        const unsigned at = to + offset_of(0, i) + stage_offset(pair_bytes(begin + i < r.length));
        source.copy(begin + i, row_before(ring_row, kOverlapRows - 1 - i), column(i), at, at + kRowBytes);
      }
    }
  }

  __device__ static bool closes(const ops::StepRecord& r) { return (r.position + 1) % kOverlapRatio == 0; }
  __device__ bool stays(const ops::StepRecord& r) const { return r.position >= r.end() - kind_.pending.rows; }

  __device__ int ring_row_of(const ops::StepRecord& r) const {
    return static_cast<int>(static_cast<unsigned>(r.position) % static_cast<unsigned>(kind_.pending.rows));
  }
  __device__ int row_before(int ring_row, int distance) const {
    return ring_row < distance ? ring_row - distance + kind_.pending.rows : ring_row - distance;
  }
  __device__ static int column(int i) { return i < kOverlapRatio ? 0 : kWidth; }

  __device__ Rotation rotation_at(int position) const {
    return load_rotation(p_.rope, position + 1 - kOverlapRatio, channel_, kWidth);
  }

  /// Calls f with index and address of each row before the token that the token's entry pools, in a decode; entry 0 has
  /// no span before its own.
  template <class F>
  __device__ void for_stored(const ops::StepRecord& r, F f) const {
    const std::uint8_t* slot = kind_.pending.ring.at(r.read_slot, 0);
    const int ring_row = ring_row_of(r);
#pragma unroll
    for (int i = 0; i < kOverlapRows - 1; ++i)
      if (i >= kOverlapRatio || r.position >= kOverlapRows - 1)
        f(i, reinterpret_cast<const Pending*>(slot + std::int64_t{row_before(ring_row, kOverlapRows - 1 - i)} *
                                                         static_cast<int>(kind_.pending.ring.row_stride)) +
                 column(i) + channel_);
  }
  __device__ void load_stored(const ops::StepRecord& r, RawRow (&rows)[kOverlapRows]) const {
    for_stored(r, [&](int i, const Pending* kv) { rows[i] = {load_raw(kv), load_raw(kv + kind_.pending.columns)}; });
  }

  /// Prefetches the token's input. An engine has just written it, so L2 has it already; otherwise it arrives during the
  /// wait.
  __device__ void prefetch_token(int token) const {
    const auto prefetch = [&](const ops::InputDesc& in) {
      const In* row = static_cast<const In*>(in.data) + token * in.row_stride + channel_;
      prefetch_l2(row);
      prefetch_l2(row + kWidth);
    };
    prefetch(p_.kv[k_]);
    prefetch(p_.gate[k_]);
  }

  __device__ RawRow load_token(int token, int column) const {
    const auto load = [&](const ops::InputDesc& in) {
      return load_raw(static_cast<const In*>(in.data) + token * in.row_stride + column + channel_);
    };
    return {load(p_.kv[k_]), load(p_.gate[k_])};
  }

  template <class Row>
  __device__ void pool_rows(int position, int length, ops::Pool (&pool)[kPair], Row row) const {
    const int begin = position + 1 - kOverlapRows;
    const bool first = begin < 0;  // no span before
    clear(pool);
    Pair gate[kOverlapRows];
#pragma unroll
    for (int i = 0; i < kOverlapRows; ++i) {
      if (first && i < kOverlapRatio) continue;
      gate[i] = Source::read(row(i).gate, begin + i < length);
#pragma unroll
      for (int c = 0; c < kPair; ++c) {
        gate[i].v[c] += bias_[i].v[c];
        pool[c].max =
            fmaxf(gate[i].v[c], pool[c].max);  // ops::larger_gate but for the sign of zero, which has no effect
      }
    }
#pragma unroll
    for (int i = 0; i < kOverlapRows; ++i) {
      if (first && i < kOverlapRatio) continue;
      const Pair kv = Source::read(row(i).kv, begin + i < length);
#pragma unroll
      for (int c = 0; c < kPair; ++c) pool[c] = ops::pool_add_known_max(pool[c], gate[i].v[c], kv.v[c]);
    }
  }

  const ops::AppendParams& p_;
  int k_;
  const ops::KindDesc& kind_;
  Lanes lanes_;
  int channel_;
  Pair bias_[kOverlapRows], weight_;
};

}  // namespace kv4::cuda
