// Window rows: one warp per row (rows/octet_row.cuh).
#pragma once

#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/rows/octet_row.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {

/// The ring's format, read where it is asked for.
struct RingFormat {
  const ops::AppendParams& p;
  __device__ operator Format() const { return p.layer.window.ring.format; }
};

// --- the row that is overwritten

/// The row that a token written in place overwrites, if the image before the step holds it (WindowDesc::undo_row). In
/// words, because undo rows are packed. Run again, the row is kept already.
class UndoRow {
 public:
  __device__ UndoRow(const ops::LayerDesc& layer, int lane)
      : w_(layer.window), window_tokens_(layer.window_tokens), lane_(lane) {}

  /// Which row that is.
  __device__ void find(const ops::StepRecord& r) {
    slot_ = r.write_slot;
    lost_ = r.position - w_.rows;
    due_ = r.in_place() && lost_ >= 0 && lost_ == r.length - window_tokens_;
  }
  __device__ void fetch() const {
    if (!due_) return;
    if (lane_ == 0) fetch_ahead(&w_.undo_position(slot_));
    for_words([&](int, const std::uint32_t* word) { fetch_ahead(word); });
    if (lane_ < scale_words()) fetch_ahead(scale());
  }
  __device__ void load() {
    if (!due_) return;
    kept_ = w_.undo_position(slot_);
    for_words([&](int i, const std::uint32_t* word) { payload_[i] = *word; });
    if (lane_ < scale_words()) scale_ = *scale();
  }
  /// What was loaded, before the new row is stored.
  __device__ void keep() const {
    if (!due_) return;
    if (kept_ != lost_) {
      std::uint32_t* payload = words(w_.undo_row.payload.at(slot_, 0)) + lane_;
      for_words([&](int i, const std::uint32_t*) { payload[i * kWarp] = payload_[i]; });
      if (lane_ < scale_words()) words(w_.undo_row.scale.at(slot_, 0))[lane_] = scale_;
    }
    __syncwarp();  // lanes of the old row's words and of the new row's octets differ; all have read the position
    if (lane_ == 0 && kept_ != lost_) w_.undo_position(slot_) = lost_;
  }

 private:
  static constexpr int kWords = 2 * kRowWidth / 4 / kWarp;  // of the longest payload, all bf16

  /// Calls f with the number and the address of each of the lane's words of the payload.
  template <class F>
  __device__ void for_words(F f) const {
    const std::uint32_t* payload = words(w_.ring.payload.at(slot_, lost_ % w_.rows)) + lane_;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (i * kWarp + lane_ < static_cast<int>(w_.ring.payload.row_stride / 4)) f(i, payload + i * kWarp);
  }
  __device__ const std::uint32_t* scale() const { return words(w_.ring.scale.at(slot_, lost_ % w_.rows)) + lane_; }
  __device__ int scale_words() const { return static_cast<int>(w_.ring.scale.row_stride / 4); }
  __device__ static std::uint32_t* words(std::uint8_t* at) { return reinterpret_cast<std::uint32_t*>(at); }

  const ops::WindowDesc& w_;
  int window_tokens_, lane_, slot_ = 0, lost_ = 0;
  bool due_ = false;
  std::int32_t kept_ = 0;
  std::uint32_t payload_[kWords] = {}, scale_ = 0;
};

/// What is known of a lane's part in all rows.
template <class In>
struct WindowLane {
  static constexpr int kWordBytes = 16, kWords = kOctets * kOctetChannels * sizeof(In) / kWordBytes;

  const ops::AppendParams& p;
  int lane;

  /// Where word i of a token's input lies: words of an octet are neighbours.
  __device__ const void* input(int token, int i) const {
    constexpr int kOctetWords = kWords / kOctets, kWordChannels = kOctetChannels / kOctetWords;
    return row_at(static_cast<const In*>(p.window_rows.data), token,
                  p.window_rows.row_stride * static_cast<std::int64_t>(sizeof(In))) +
           octet_channel(lane, i / kOctetWords) + i % kOctetWords * kWordChannels;
  }

  __device__ static void octets(const Words<4> (&in)[kWords], OctetBits (&row)[kOctets]) {
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      if constexpr (std::is_same_v<In, Bf16>) {
        row[j] = {{in[j].w[0], in[j].w[1], in[j].w[2], in[j].w[3]}};
      } else {
        const auto pair = [](const Words<4>& q, int i) {
          return bf16_pair(codec::bits_float(q.w[i]), codec::bits_float(q.w[i + 1]));
        };
        row[j] = {{pair(in[2 * j], 0), pair(in[2 * j], 2), pair(in[2 * j + 1], 0), pair(in[2 * j + 1], 2)}};
      }
    }
  }

  /// Of a row that comes straight from the projection.
  template <class Weights>
  __device__ void finish_projection(const Weights& weights, const RawTurn& turn, OctetBits (&row)[kOctets]) const {
    const ops::FrontEndDesc& f = p.front_end;
    norm_and_rotate(f.eps, f.rope, weights, turn_of(f.rope, turn), lane, row);
  }

  /// The row goes into the ring; in a long step also into the scratch, because the ring keeps only the last rows.
  template <class F>
  __device__ void store(F format, const ops::StepRecord& r, int token, const RowBits& bits) const {
    const ops::WindowDesc& w = p.layer.window;
    const auto put = [&](const ops::RowPlanes& rows, int slot, int row) {
      const auto at = [=](const ops::Plane& plane) {
        return row_at(plane.data + slot * plane.block_stride, row, plane.row_stride);
      };
      store_octets(format, lane, bits, at(rows.payload), at(rows.scale));
    };
    if (!r.in_place()) put(w.scratch, 0, token);
    if (r.in_place() || r.position >= r.end() - w.rows) put(w.ring, r.write_slot, r.position % w.rows);
  }
};

/// One token of a decode. Its record, its input and the row that it probably overwrites are asked for together.
template <bool kProjection, class In, class F>
__device__ void append_window_row(const ops::AppendParams& p, F format, int token) {
  const WindowLane<In> mine{p, static_cast<int>(threadIdx.x) % kWarp};
  float4 weights[kOctets][2];
  if constexpr (kProjection) {
#pragma unroll
    for (int j = 0; j < kOctets; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) weights[j][h] = LaneWeights{p.front_end.norm_weight, mine.lane}(j, h);
  }
  UndoRow undo_row(p.layer, mine.lane);
  RawTurn turn;
  const auto find = [&](const ops::StepRecord& r) {
    undo_row.find(r);
    if constexpr (kProjection) turn = load_lane_turn(p.front_end.rope, r.position, mine.lane);
  };
  const GuessedRecord guess(p.step, token);
  if (!guess.padded()) find(guess.get());
  undo_row.fetch();
  if (token < p.step.num_tokens)
    for (int i = 0; i < WindowLane<In>::kWords; ++i) fetch_ahead(mine.input(token, i));
  grid_dependency_wait();
  launch_dependents();
  if (token >= p.step.num_tokens) return;
  Words<4> in[WindowLane<In>::kWords];
#pragma unroll
  for (int i = 0; i < WindowLane<In>::kWords; ++i) in[i] = load_no_l1<4>(mine.input(token, i));
  undo_row.load();
  const ops::StepRecord r = load_record_again(p.step.tokens + token);
  OctetBits row[kOctets];
  mine.octets(in, row);
  if (r.padded()) return;
  if (guess.padded() || !guess.holds(r)) {
    find(r);
    undo_row.load();
  }
  undo_row.keep();
  if constexpr (kProjection) mine.finish_projection([&](int j, int h) { return weights[j][h]; }, turn, row);
  const RowBits bits = encode_octets(format, mine.lane, row);
  mine.store(format, r, token, bits);
}

/// Shared memory of a warp's rows under way, and how many rows are brought into L2 before the wait. More of either is
/// slower (SWA, 4 rows and 4: 15.4 us instead of 14.7).
constexpr int kWindowStage = 8192, kWindowFetched = 2;
static_assert(kWindowStage % kStageLine == 0);

/// How it is used: records [kSlots], then slots of a row and, of one that comes from the projection, its angles.
template <bool kProjection, class In>
struct WindowSlots {
  static constexpr int kMost = 3, kRecordBytes = static_cast<int>(sizeof(ops::StepRecord));
  static constexpr int kTurnAt = kRowWidth * static_cast<int>(sizeof(In));
  static constexpr int kTurnWord = kWarp * static_cast<int>(sizeof(uint4));
  static constexpr int kFirst = kStageLine, kBytes = kTurnAt + (kProjection ? 2 * kTurnWord : 0);
  static constexpr int kSlots = std::min((kWindowStage - kFirst) / kBytes, kMost);
  static_assert(kSlots >= 2 && kSlots * kRecordBytes <= kFirst && kBytes % kStageLine == 0);
};

/// Before the wait: the first rows of append_window_rows are brought into L2.
template <class In>
__device__ void fetch_window_rows(const ops::AppendParams& p, int warp, int warps) {
  const WindowLane<In> mine{p, static_cast<int>(threadIdx.x) % kWarp};
  for (int i = 0; i < kWindowFetched; ++i) {
    const int token = warp + i * warps;
    if (token >= p.step.num_tokens) return;
#pragma unroll
    for (int j = 0; j < WindowLane<In>::kWords; ++j) fetch_ahead(mine.input(token, j));
  }
}

/// Every warps-th token of a prefill. Everything a row needs is asked for together with it, because loads seem to
/// return in the order they were asked for. stage: shared, kWindowStage bytes of the warp. weights: of a projection's
/// norm.
template <bool kProjection, class In, class F>
__device__ void append_window_rows(const ops::AppendParams& p, F format, const std::uint8_t* stage,
                                   const NormWeights& weights, int warp, int warps) {
  using Slots = WindowSlots<kProjection, In>;
  constexpr int kWords = WindowLane<In>::kWords, kWordBytes = kWarp * static_cast<int>(sizeof(uint4));
  const WindowLane<In> mine{p, static_cast<int>(threadIdx.x) % kWarp};
  const ops::RopeDesc& rope = p.front_end.rope;
  const unsigned stage_at = static_cast<unsigned>(__cvta_generic_to_shared(stage)), lane_at = mine.lane * 16u;
  int positions = 0;  // lane i: of the i-th row from the last multiple of 32 on
  const auto ask = [&](int token, int number, int slot) {
    if constexpr (kProjection) {
      if (number % kWarp == 0) {
        const int lanes_token = token + mine.lane * warps;
        const bool there = lanes_token < p.step.num_tokens;
        positions = there ? max(__ldcg(&p.step.tokens[lanes_token].position), 0) : 0;
      }
    }
    if (token < p.step.num_tokens) {
      const unsigned to = stage_at + Slots::kFirst + slot * Slots::kBytes + lane_at;
#pragma unroll
      for (int i = 0; i < kWords; ++i) copy_async<16>(to + i * kWordBytes, mine.input(token, i));
      if (mine.lane < Slots::kRecordBytes / 16)
        copy_async<16>(stage_at + slot * Slots::kRecordBytes + lane_at,
                       reinterpret_cast<const int4*>(p.step.tokens + token) + mine.lane);
      if constexpr (kProjection) {
        const int position = __shfl_sync(kAllLanes, positions, number % kWarp);
        if (has_turned_pair(rope, mine.lane))
          with_turn_words(rope, position, mine.lane, [&](auto* high, auto* low) {
            copy_async<sizeof(*high)>(to + Slots::kTurnAt, high);
            copy_async<sizeof(*low)>(to + Slots::kTurnAt + Slots::kTurnWord, low);
          });
      }
    }
    commit_copies();
  };
  int number = 0;  // of the next row to ask for
#pragma unroll 1
  for (; number < Slots::kSlots - 1; ++number) ask(warp + number * warps, number, number);
  int slot = 0;
  for (int token = warp; token < p.step.num_tokens; token += warps, ++number) {
    const int free_slot = slot == 0 ? Slots::kSlots - 1 : slot - 1;
    ask(token + (Slots::kSlots - 1) * warps, number, free_slot);
    wait_for_copies<Slots::kSlots - 1>();
    __syncwarp();  // the record is other lanes' copy
    const std::uint8_t* at = stage + Slots::kFirst + slot * Slots::kBytes;
    const ops::StepRecord r = load_record(reinterpret_cast<const ops::StepRecord*>(stage) + slot);
    slot = slot + 1 == Slots::kSlots ? 0 : slot + 1;
    const uint4* words = reinterpret_cast<const uint4*>(at) + mine.lane;
    Words<4> in[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) in[i] = reinterpret_cast<const Words<4>&>(words[i * kWarp]);
    RawTurn turn{};
    if constexpr (kProjection) {
      const uint4* raw = reinterpret_cast<const uint4*>(at + Slots::kTurnAt) + mine.lane;
      turn = {raw[0], raw[kWarp]};
    }
    __syncwarp();
    if (r.padded()) continue;
    OctetBits row[kOctets];
    mine.octets(in, row);
    if constexpr (kProjection) mine.finish_projection(LaneWeights{weights.all, mine.lane}, turn, row);
    const RowBits bits = encode_octets(format, mine.lane, row);
    if (r.in_place()) {
      UndoRow undo_row(p.layer, thread_again() % kWarp);
      undo_row.find(r);
      undo_row.load();
      undo_row.keep();
    }
    mine.store(format, r, token, bits);
  }
}

/// What kernels are compiled for: the usual input and format, or all others. In one kernel those others cost the usual
/// ones registers, and a decode time: instructions of a kernel, 200 KB instead of 80, are fetched as it runs.
enum class WindowCase { usual, rare };

inline WindowCase window_case(const ops::AppendParams& p) {
  const bool usual = p.window_rows.dtype == DType::bf16 && p.layer.window.ring.format == Format::fp8_tile64;
  return usual ? WindowCase::usual : WindowCase::rare;
}

/// Calls f with an input's element, whether rows are projections, and the ring's format: a type where it is the usual
/// one.
template <WindowCase kCase, class F>
__device__ void with_window_input(const ops::AppendParams& p, F&& f) {
  constexpr std::integral_constant<Format, Format::fp8_tile64> kUsualFormat;
  const auto with_projection = [&](auto element, auto format) {
    if (p.front_end.norm_weight != nullptr) return f(element, std::true_type{}, format);
    f(element, std::false_type{}, format);
  };
  if constexpr (kCase == WindowCase::usual) {
    with_projection(Bf16{}, kUsualFormat);
  } else if (p.window_rows.dtype != DType::f32) {
    with_projection(Bf16{}, RingFormat{p});
  } else if (p.layer.window.ring.format == kUsualFormat.value) {
    with_projection(float{}, kUsualFormat);
  } else {
    with_projection(float{}, RingFormat{p});
  }
}

}  // namespace kv4::cuda
