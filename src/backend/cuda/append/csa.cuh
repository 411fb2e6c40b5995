// Entries that overlap (CSA): an entry pools the first series of the span before its own and the second series of its
// own. Each token stands by itself: nothing it reads is written by another token of the step.
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

  /// A decode, bound by latency: the token's record, its input rows and the ring rows that it probably points at are
  /// asked for together.
  __device__ void run_one(int token) {
    const GuessedRecord guess(p_.step, token);
    const bool guessed = !guess.padded() && closes(guess.get()) && guess.get().position == guess.get().length;
    Turn turn{};
    RawRow rows[kOverlapRows];
    if (guessed) {
      load_stored(guess.get(), rows);
      turn = turn_at(guess.get().position);
    }
    if (token < p_.step.num_tokens) fetch_token(token);
    grid_dependency_wait();
    launch_dependents();
    if (token >= p_.step.num_tokens) return;
    const RawRow first_series = load_token(token, 0);
    rows[kOverlapRows - 1] = load_token(token, kWidth);
    const ops::StepRecord r = load_record_again(p_.step.tokens + token);
    if (r.padded()) return;
    const Source source(p_, k_, r, channel_);
    const int ring_row = ring_row_of(r);
    if (closes(r) && !(guessed && guess.holds(r))) {
      turn = turn_at(r.position);
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
    store_entry(lanes_, p_, kind_, pool, weight_, turn, r.position % p_.step.block_tokens / kOverlapRatio, r.block);
  }

  /// Every groups-th token of a prefill, bound by the bytes of its inputs, each read once: the rows of an entry are
  /// under way while the one before is pooled. stage: shared [2, kOverlapRows, kv and gate, kRowBytes]. ends: what
  /// becomes of pools, EntryBatch or EachEntry.
  template <class Ends>
  __device__ void run(const std::uint8_t* stage, int group, int groups, Ends&& ends) {
    const unsigned stage_at = static_cast<unsigned>(__cvta_generic_to_shared(stage));
    int half = 0, position = kNone, length = 0, block = 0;  // of the entry under way
    const Inputs inputs(p_.kv[k_], p_.gate[k_], channel_);
    TokenWalk walk(p_.step, group, groups, [&](const ops::StepRecord& r) { return closes(r) || stays(r); });
    while (true) {
      const int token = walk.next();
      ops::StepRecord r;
      if (token != kNone) {
        r = load_record(p_.step.tokens + token);
        if (stays(r)) keep(r);
        if (!closes(r)) continue;
      }
      if (position != kNone) ends.begin(position + 1 - kOverlapRatio, block);
      ends.sync();  // rows are asked for whole: warps that drift apart are slower
      if (token != kNone) ask(inputs, r, stage_at + place(half, 0));
      commit_copies();
      wait_for_copies<1>();
      __syncwarp();  // the other lanes' copies, too
      if (position != kNone) {
        ops::Pool pool[kPair];
        pool_rows(position, length, pool, [&](int i) {
          const int pair = pair_bytes(position + 1 - kOverlapRows + i < length);
          const std::uint8_t* at = stage + place(half ^ 1, i) + stage_offset(pair);
          return RawRow{read_stage(at, pair), read_stage(at + kRowBytes, pair)};
        });
        ends.put(pool, channel_);
      }
      if (token == kNone || ends.full()) ends.finish();
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

  /// Where a kv row of the stage lies; its gate row follows.
  __device__ static constexpr int place(int half, int i) { return (half * kOverlapRows + i) * 2 * kRowBytes; }

  __device__ static int pair_bytes(bool stored) {
    return kPair * static_cast<int>(stored ? sizeof(Pending) : sizeof(In));
  }

  __device__ void keep(const ops::StepRecord& r) const {
    const Source source(p_, k_, r, channel_);
    const int ring_row = ring_row_of(r);
    source.store(source.load_input(r.position, 0), ring_row, 0);
    source.store(source.load_input(r.position, kWidth), ring_row, kWidth);
  }

  /// An entry's rows. to: shared address of half a stage.
  __device__ void ask(const Inputs& inputs, const ops::StepRecord& r, unsigned to) const {
    const int begin = r.position + 1 - kOverlapRows;
    if (begin >= r.length) {  // most of a prefill: nothing but inputs
      const int token = static_cast<int>(r.token_of(begin));
      inputs.template ask<kOverlapRatio>(to, token, 0);
      inputs.template ask<kOverlapRatio>(to + place(0, kOverlapRatio), token + kOverlapRatio, kWidth);
    } else {
      const Source source(p_, k_, r, channel_);
      const int ring_row = ring_row_of(r);
#pragma unroll 1
      for (int i = begin >= 0 ? 0 : kOverlapRatio; i < kOverlapRows; ++i) {
        const unsigned at = to + place(0, i) + stage_offset(pair_bytes(begin + i < r.length));
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

  __device__ Turn turn_at(int position) const {
    return load_turn(p_.rope, position + 1 - kOverlapRatio, channel_, kWidth);
  }

  /// Calls f with the index and the address of every row before a decode's token that its entry pools; entry 0 has no
  /// span before its own.
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

  /// The token's input: an engine has just written it and it is in L2 already, else it gets there before the wait ends.
  __device__ void fetch_token(int token) const {
    const auto fetch = [&](const ops::InputDesc& in) {
      const In* row = static_cast<const In*>(in.data) + token * in.row_stride + channel_;
      fetch_ahead(row);
      fetch_ahead(row + kWidth);
    };
    fetch(p_.kv[k_]);
    fetch(p_.gate[k_]);
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
    const bool first = begin < 0;  // no span before its own
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
