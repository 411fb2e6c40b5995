// Window rows: one warp per row.
#pragma once

#include "backend/cuda/quad_codec.cuh"
#include "backend/cuda/source_rows.cuh"

namespace kv4::cuda {

/// The row that a token written in place overwrites, if the image before the step holds it (WindowDesc::displaced). In
/// words, because displaced rows are packed. Run again, the row is kept already.
template <int kWidth>
class DisplacedRow {
 public:
  __device__ DisplacedRow(const ops::WindowDesc& w, int window_tokens, const ops::StepRecord& r, int lane)
      : w_(w), slot_(r.write_slot), lost_(r.position - w.rows), lane_(lane) {
    due_ = r.in_place() && lost_ >= 0 && lost_ == r.length - window_tokens;
    if (!due_) return;
    kept_ = w.displaced_position(slot_);
    const std::uint32_t* payload = words(w.ring.payload.at(slot_, r.position % w.rows));
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (i * kWarp + lane < payload_words()) payload_[i] = payload[i * kWarp + lane];
    if (lane < scale_words()) scale_ = words(w.ring.scale.at(slot_, r.position % w.rows))[lane];
  }

  /// Before the new row is stored.
  __device__ void keep() const {
    if (!due_ || kept_ == lost_) return;
    std::uint32_t* payload = words(w_.displaced.payload.at(slot_, 0));
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (i * kWarp + lane_ < payload_words()) payload[i * kWarp + lane_] = payload_[i];
    if (lane_ < scale_words()) words(w_.displaced.scale.at(slot_, 0))[lane_] = scale_;
    __syncwarp();
    if (lane_ == 0) w_.displaced_position(slot_) = lost_;
  }

 private:
  static constexpr int kWords = 2 * kWidth / 4 / kWarp;  // of the longest payload, all bf16

  __device__ int payload_words() const { return static_cast<int>(w_.ring.payload.row_stride / 4); }
  __device__ int scale_words() const { return static_cast<int>(w_.ring.scale.row_stride / 4); }
  __device__ static std::uint32_t* words(std::uint8_t* at) { return reinterpret_cast<std::uint32_t*>(at); }

  const ops::WindowDesc& w_;
  int slot_, lost_, lane_;
  bool due_;
  std::int32_t kept_ = 0;
  std::uint32_t payload_[kWords] = {}, scale_ = 0;
};

/// Norm and rotation of a row that comes straight from the projection.
template <class Lanes>
__device__ void finish_window_row(Lanes& lanes, const ops::FrontEndDesc& f, int position, Quad (&x)[Lanes::kQuads]) {
  const Turn turn = load_turn(f.rope, position, lanes.channel(Lanes::kQuads - 1), Lanes::kWidth);
  Quad weight[Lanes::kQuads];
#pragma unroll
  for (int q = 0; q < Lanes::kQuads; ++q) weight[q] = load_weight(f.norm_weight + lanes.channel(q));
  norm_row(lanes, weight, f.eps, x);
  rotate(turn, x[Lanes::kQuads - 1]);
}

/// The row goes into the ring; in a long step also into the scratch, because the ring keeps only the last rows.
template <class Lanes>
__device__ void store_window_row(Lanes& lanes, const ops::LayerDesc& layer, const ops::StepRecord& r, int token,
                                 const Quad (&x)[Lanes::kQuads]) {
  const ops::WindowDesc& w = layer.window;
  const DisplacedRow<Lanes::kWidth> displaced(w, layer.window_tokens, r, lanes.lane());
  with_row_quads(w.ring.format, [&](auto codec) {
    using Codec = decltype(codec);
    QuadBits bits[Lanes::kQuads];
    encode_row<Codec>(lanes, w.ring.shape, x, 1.0f, bits);
    const auto store = [&](const ops::RowPlanes& to, std::int64_t block, std::int64_t row) {
      std::uint8_t *payload = to.payload.at(block, row), *scale = to.scale.at(block, row);
#pragma unroll
      for (int q = 0; q < Lanes::kQuads; ++q)
        store_quad<Codec>(bits[q], w.ring.shape, payload, scale, lanes.channel(q));
    };
    displaced.keep();
    __syncwarp();  // lanes of the old row's words and of the new row's quads differ
    if (!r.in_place()) store(w.scratch, 0, token);
    if (r.in_place() || r.position >= r.end() - w.rows) store(w.ring, r.write_slot, r.position % w.rows);
  });
}

/// Warp `warp` of `warps`: every warps-th token. A token's input does not depend on its record, so both are under way
/// while the token before is encoded.
template <class In, class Lanes>
__device__ void append_window(const ops::AppendParams& p, Lanes lanes, int warp, int warps) {
  RawQuad raw[Lanes::kQuads], next[Lanes::kQuads];
  ops::StepRecord r, next_record;
  const auto ask = [&](int token) {
    if (token >= p.step.num_tokens) return;
    const In* row = static_cast<const In*>(p.window_rows.data) + token * p.window_rows.row_stride;
#pragma unroll
    for (int q = 0; q < Lanes::kQuads; ++q) next[q] = load_raw(row + lanes.channel(q));
    next_record = load_record(p.step.tokens + token);
  };
  ask(warp);
  for (int token = warp; token < p.step.num_tokens; token += warps) {
    r = next_record;
#pragma unroll
    for (int q = 0; q < Lanes::kQuads; ++q) raw[q] = next[q];
    ask(token + warps);
    if (r.padded()) continue;
    Quad x[Lanes::kQuads];
#pragma unroll
    for (int q = 0; q < Lanes::kQuads; ++q) {
      x[q] = values<In>(raw[q]);
      if constexpr (std::is_same_v<In, float>) x[q] = round_bf16(x[q]);
    }
    if (p.front_end.norm_weight != nullptr) finish_window_row(lanes, p.front_end, r.position, x);
    store_window_row(lanes, p.layer, r, token, x);
  }
}

}  // namespace kv4::cuda
