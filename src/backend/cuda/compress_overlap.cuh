// Entries that overlap (CSA): an entry pools the first series of the span before its own and the second series of its
// own. Each token stands by itself: nothing it reads is written by another token of the step.
#pragma once

#include "backend/cuda/entry_row.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/source_rows.cuh"

namespace kv4::cuda {

constexpr int kOverlapRatio = 4;

/// Group `group` of `groups`: every groups-th token.
template <bool kLatency, class In, class Pending, class Lanes>
__device__ void compress_overlap(const ops::AppendParams& p, int k, Lanes lanes, int group, int groups) {
  constexpr int kWidth = Lanes::kWidth, kRows = 2 * kOverlapRatio;
  const ops::KindDesc& kind = p.layer.kinds[k];
  const int channel = lanes.channel(0), ring_rows = kind.pending.rows;

  // kLatency: asked for before it is known whether an entry is due, so that they are here when its rows are. Else they
  // are in the first-level cache, and their registers are better spent on another thread block.
  const float* first_bias = kind.bias + channel;
  const auto bias_at = [=](int i) { return first_bias + (i % kOverlapRatio * 2 + i / kOverlapRatio) * kWidth; };
  Quad early[kLatency ? kRows : 1], weight;
  if constexpr (kLatency) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) early[i] = load_weight(bias_at(i));
    weight = load_weight(kind.norm_weight + channel);
  }
  const auto bias = [&](int i) {
    if constexpr (kLatency) return early[i];
    return load_weight_late(bias_at(i));
  };

  wait_for_previous();
  const auto closes = [](const ops::StepRecord& r) { return (r.position + 1) % kOverlapRatio == 0; };
  const auto stays = [&](const ops::StepRecord& r) { return r.position >= r.end() - ring_rows; };
  const auto wanted = [&](const ops::StepRecord& r) { return closes(r) || stays(r); };

  for_each_record(p.step, group, groups, wanted, [&](const ops::StepRecord& r) {
    const SourceRows<In, Pending> source(p, k, r, channel);
    const int begin = r.position + 1 - kRows;  // negative: entry 0, which has no span before it
    RawRow rows[kRows], first_series;
    rows[kRows - 1] = source.load_input(r.position, kWidth);
    if (stays(r)) first_series = source.load_input(r.position, 0);
    const auto store_pending = [&] {
      if (!stays(r)) return;
      source.store(first_series, r.position, 0);
      source.store(rows[kRows - 1], r.position, kWidth);
    };
    if constexpr (!kLatency) store_pending();
    if (closes(r)) {
      int ring_row = (begin + ring_rows) % ring_rows;
#pragma unroll
      for (int i = 0; i < kRows - 1; ++i) {
        if (i >= kOverlapRatio || begin >= 0)
          rows[i] = source.load(begin + i, ring_row, i < kOverlapRatio ? 0 : kWidth);
        if (++ring_row == ring_rows) ring_row = 0;
      }
    }
    if constexpr (kLatency) store_pending();
    if (!closes(r)) return;

    Turn turn;
    if constexpr (kLatency) turn = load_turn(p.rope, r.position + 1 - kOverlapRatio, channel, kWidth);
    ops::Pool pool[kQuad] = {ops::empty_pool(), ops::empty_pool(), ops::empty_pool(), ops::empty_pool()};
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (i >= kOverlapRatio || begin >= 0)
        pool_quad(pool, source.read(rows[i].gate, begin + i), bias(i), source.read(rows[i].kv, begin + i));
    if constexpr (!kLatency) {
      turn = load_turn(p.rope, r.position + 1 - kOverlapRatio, channel, kWidth);
      weight = load_weight_late(kind.norm_weight + channel);
    }
    store_entry(lanes, p, kind, pool, weight, turn, r.position, r.block);
  });
}

}  // namespace kv4::cuda
