// Entries without overlap (HCA): many rows are pooled in order; earlier steps may have folded the first of them into an
// accumulator. With an online ring, rows that this step pushes out of the ring join the accumulator first (`advance`).
//
// Order. A step in place overwrites ring rows that `advance` reads, so the group of the request's first token does the
// whole request; every thread reads and writes only its own channels, so program order is enough. A long step reads one
// state slot and writes another: entries are independent, and the last token's group advances the accumulator.
#pragma once

#include "backend/cuda/append/entry_row.cuh"
#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {

constexpr int kOpenBatch = 4, kOpenBatches = 3;  // rows in flight of a span whose rows are inputs

template <bool kLatency, class In, class Pending, class Lanes>
class OpenSpans {
 public:
  __device__ OpenSpans(const ops::AppendParams& p, int k, Lanes lanes)
      : p_(p), k_(k), kind_(p.layer.kinds[k]), lanes_(lanes), channel_(lanes.channel()) {
    if constexpr (kLatency) load_norm_weight();
  }

  /// A decode, bound by latency: prefetches the rows that the speculative record points at before the wait.
  __device__ void decode(int token) {
    const SpeculativeTokenRecord speculative(p_.step, token);
    if (!speculative.padded() && wanted(speculative.get())) prefetch(speculative.get());
    for (const ops::InputDesc* in : {&p_.kv[k_], &p_.gate[k_]})
      prefetch_l2(static_cast<const In*>(in->data) + token * in->row_stride + channel_);
    grid_dependency_wait();
    launch_dependents();
    const ops::StepRecord r = load_record_l2(p_.step.tokens + token);
    if (!r.padded() && wanted(r)) close_spans(r, Source(p_, k_, r, channel_));
  }

  /// Every groups-th token of a prefill. stage: shared [kOpenBatches] of WholeRowCopies.
  __device__ void prefill(const std::uint8_t* stage, int group, int groups) {
    TokenIterator tokens(p_.step, group, groups, [&](const ops::StepRecord& r) { return wanted(r); });
    for (int token = tokens.next(); token != tokens.kNone; token = tokens.next()) {
      const ops::StepRecord r = load_record(p_.step.tokens + token);
      const int begin = r.position / kind_.ratio * kind_.ratio;
      const bool accumulates_here = !kind_.pending.online || r.end() - kind_.pending.rows >= begin;
      if (!r.in_place() && begin >= r.length && accumulates_here) {
        close_span(stage, r, begin);
      } else {
        close_spans(r, Source(p_, k_, r, channel_));
      }
    }
  }

 private:
  using Source = SourceRows<In, Pending>;
  static constexpr int kWidth = Lanes::kWidth;
  static constexpr int kNever = -1;
  static constexpr int kRowBytes = stage_row_bytes(Lanes::kRows * Lanes::kWarps * kWarp);
  static constexpr int kBatch = kOpenBatch, kBatches = kOpenBatches;
  using Copies = WholeRowCopies<In, kWidth, kRowBytes, Lanes::kWarps, kBatch>;
  static constexpr int kFoldAhead = kLatency ? 6 : 2;  // rows in flight of any other span

  __device__ bool wanted(const ops::StepRecord& r) const {
    if (r.in_place()) return r.position == r.length;
    return (r.position + 1) % kind_.ratio == 0 || r.position >= r.end() - kind_.pending.rows ||
           r.position == r.end() - 1;
  }

  /// Prefetches the accumulator, its fold watermark and the first ring rows that `fold` reads.
  __device__ void prefetch(const ops::StepRecord& r) const {
    const ops::PendingDesc& pending = kind_.pending;
    if (lanes_.leader()) prefetch_l2(pending.fold_watermarks + r.read_slot * pending.fold_watermark_stride);
    const float* acc = accumulator(r.read_slot);
    for (int i = 0; i < 3; ++i) prefetch_l2(acc + i * kWidth);
    int at = ::max(r.position / kind_.ratio * kind_.ratio, r.length - pending.rows);
    for (int i = 0; i < kFoldAhead && at < r.length; ++i, ++at) {
      const Pending* kv = reinterpret_cast<const Pending*>(pending.ring.at(r.read_slot, at % pending.rows)) + channel_;
      prefetch_l2(kv);
      prefetch_l2(kv + pending.columns);
    }
  }

  __device__ void load_norm_weight() { weight_ = load_weight(kind_.norm_weight + channel_); }

  /// Stores the entry that closes at `position`, from the pool.
  __device__ void finish(int position, int block) {
    store_entry(lanes_, p_, kind_, pool_, weight_, rotation_, position % p_.step.block_tokens / kind_.ratio, block);
  }

  // A token of a long step whose span so far consists of inputs: most of a prefill.
  __device__ void close_span(const std::uint8_t* stage, const ops::StepRecord& r, int begin) {
    const ops::PendingDesc& pending = kind_.pending;
    const int stays = r.end() - pending.rows;  // from this position on rows stay in the ring
    const bool closes = r.position + 1 == begin + kind_.ratio, advances = pending.online && r.position == r.end() - 1;
    if (r.position >= stays) {
      const Source source(p_, k_, r, channel_);
      source.store(source.load_input(r.position, 0), r.position % pending.rows, 0);
    }
    if (closes || advances)
      pool_inputs(stage, r, begin, closes ? kind_.ratio : stays - begin, advances ? stays - begin : kNever);
    if (advances && lanes_.leader()) pending.fold_watermarks[r.write_slot * pending.fold_watermark_stride] = stays;
    if (!closes) return;
    finish(r.position, r.block);
  }

  // Pools the first `count` rows of a span. After save_at rows the pool goes into the accumulator.
  __device__ void pool_inputs(const std::uint8_t* stage, const ops::StepRecord& r, int begin, int count, int save_at) {
    constexpr int kPairBytes = kPair * static_cast<int>(sizeof(In));
    Copies copies(p_.kv[k_], p_.gate[k_], static_cast<int>(r.token_of(begin)));
    const unsigned stage_at = static_cast<unsigned>(__cvta_generic_to_shared(stage));
    int left = count, batch = 0;  // rows not requested yet; the stage's next batch to request
    const auto issue_next = [&] {
      copies.issue(stage_at + batch * Copies::kBytes, left);
      left -= kBatch;
      commit_copies();
      batch = batch + 1 == kBatches ? 0 : batch + 1;
    };
    lanes_.sync();  // all lanes have read the stage
    for (int i = 0; i < kBatches - 1; ++i) issue_next();
    if (count == kind_.ratio) {  // the span closes: weights and angles come with the first rows
      load_norm_weight();
      rotation_ = load_rotation(p_.rope, begin, channel_, kWidth);
    }
    clear(pool_);
    const std::uint8_t* rows = stage + channel_ * static_cast<int>(sizeof(In));
    const float* biases = kind_.bias + channel_;
    for (int done = 0; done < count; done += kBatch) {
      Pair bias[kBatch];  // the same for all entries, so L1 has most of them
#pragma unroll
      for (int i = 0; i < kBatch; ++i) bias[i] = load_weight(biases + (done + i < kind_.ratio ? i : 0) * kWidth);
      biases += kBatch * kWidth;
      wait_for_copies<kBatches - 2>();
      lanes_.sync();  // the other lanes' copies are there, and all have read the batch before: it is free
      issue_next();
      const auto pool_row = [&](int i) {
        const std::uint8_t* at = rows + batch * Copies::kBytes + i * 2 * kRowBytes;  // of the oldest batch
        pool_pair(pool_, Source::read(read_stage(at + kRowBytes, kPairBytes), false), bias[i],
                  Source::read(read_stage(at, kPairBytes), false));
      };
      if (done + kBatch <= count && (save_at <= done || save_at >= done + kBatch)) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) pool_row(i);
      } else {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (done + i == count) break;
          if (done + i == save_at) save(r.write_slot);
          pool_row(i);
        }
      }
      if (done + kBatch == save_at) save(r.write_slot);
    }
    if (save_at == count && count % kBatch != 0) save(r.write_slot);
  }

  // The spans of the whole request in place, otherwise of one token.
  __device__ void close_spans(const ops::StepRecord& r, const Source& source) {
    const int ratio = kind_.ratio, stays = r.end() - kind_.pending.rows;  // from this position on rows stay in the ring
    const int last = r.in_place() ? r.end() : r.position + 1;
    const bool advances = kind_.pending.online && last == r.end();
    int closing = r.position / ratio * ratio + ratio - 1;
    int to = advances ? stays : kNever;
    int low = advances ? max(stays, 0) : closing;
    int stop = closing < last ? closing + 1 : to;
    int store_at = max(r.position, stays);
    RawRow first;  // pending row, in flight with the others
    if (kLatency && store_at < last) first = source.load_input(store_at, 0);
    while (true) {
      if (stop > 0) fold(r, source, low, stop, to);
      if (closing < r.position + ratio) {  // once: the rows they overwrite are in the accumulator now
        const int rows = kind_.pending.rows;
        if (kLatency && store_at < last) source.store(first, store_at++ % rows, 0);
        for (; store_at < last; ++store_at) source.store(source.load_input(store_at, 0), store_at % rows, 0);
      }
      if (closing >= last) return;
      const int block = closing == r.position ? r.block : p_.step.tokens[r.token_of(closing)].block;
      if constexpr (!kLatency) load_norm_weight();
      finish(closing, block);
      closing += ratio;
      if (closing >= last) return;
      to = kNever;
      low = closing;
      stop = closing + 1;
    }
  }

  // Pools the rows up to `stop` of the span that max(low, fold watermark) lies in. Leaves the result in pool_, and the
  // rotation of an entry that ends at `stop` in rotation_. At position `to` the accumulator advances, unless an earlier
  // step did that. The record alone says which rows are requested: the requests need not wait for the fold watermark,
  // which only says which rows count. No row lies below length - ring rows: rows that left the ring are in the
  // accumulator.
  __device__ void fold(const ops::StepRecord& r, const Source& source, int low, int stop, int to) {
    const ops::PendingDesc& pending = kind_.pending;
    const int from = pending.fold_watermarks[r.read_slot * pending.fold_watermark_stride];
    const float* acc = accumulator(r.read_slot);
    const RawPair max = load_raw(acc), den = load_raw(acc + kWidth), num = load_raw(acc + 2 * kWidth);

    int requested = ::max(low / kind_.ratio * kind_.ratio, r.length - pending.rows), at = requested;
    int phase = requested % kind_.ratio, ring_row = requested % pending.rows;
    RawRow rows[kFoldAhead];
    Pair bias[kFoldAhead];
    const auto issue_next = [&](int i) {
      if (requested >= stop) return;
      rows[i] = source.load(requested, ring_row, 0);
      bias[i] = load_weight(kind_.bias + phase * kWidth + channel_);
      ++requested;
      if (++phase == kind_.ratio) phase = 0;
      if (++ring_row == pending.rows) ring_row = 0;
    };
#pragma unroll
    for (int i = 0; i < kFoldAhead; ++i) issue_next(i);
    if (stop % kind_.ratio == 0) rotation_ = load_rotation(p_.rope, stop - kind_.ratio, channel_, kWidth);

    const int base = ::max(low, from) / kind_.ratio * kind_.ratio, start = ::max(from, base);
    const bool advances = to > from, saves = advances && to > base;
    int next_base = base + kind_.ratio;  // a new span begins there
#pragma unroll
    for (int i = 0; i < kPair; ++i)
      pool_[i] = from <= base
                     ? ops::empty_pool()
                     : ops::Pool{codec::bits_float(max.w[i]), codec::bits_float(den.w[i]), codec::bits_float(num.w[i])};
    while (at < stop) {
#pragma unroll
      for (int i = 0; i < kFoldAhead; ++i) {
        if (at >= stop) break;
        if (saves && at == to) save(r.write_slot);
        if (at == next_base) {
          next_base += kind_.ratio;
          clear(pool_);
        }
        if (at >= start) pool_pair(pool_, source.read(rows[i].gate, at), bias[i], source.read(rows[i].kv, at));
        issue_next(i);
        ++at;
      }
    }
    if (saves && to == stop) save(r.write_slot);
    if (advances) {
      lanes_.sync();  // all lanes have read the fold watermark
      if (lanes_.leader()) pending.fold_watermarks[r.write_slot * pending.fold_watermark_stride] = to;
    }
  }

  __device__ void save(int slot) const {
    Pair den, num;
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      den.v[i] = pool_[i].den;
      num.v[i] = pool_[i].num;
    }
    float* acc = accumulator(slot);
    store_pair(acc, Pair{{pool_[0].max, pool_[1].max}});
    store_pair(acc + kWidth, den);
    store_pair(acc + 2 * kWidth, num);
  }

  __device__ float* accumulator(int slot) const {
    return reinterpret_cast<float*>(kind_.pending.accumulator.at(slot, 0)) + channel_;
  }

  const ops::AppendParams& p_;
  int k_;
  const ops::KindDesc& kind_;
  Lanes lanes_;
  int channel_;
  Pair weight_;
  ops::Pool pool_[kPair];
  Rotation rotation_{};
};

}  // namespace kv4::cuda
