// Window rows: one warp per row (rows/octet_row.cuh).
#pragma once

#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/rows/octet_row.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {

/// The ring's format, read where it is used.
struct RingFormat {
  const ops::AppendParams& p;
  __device__ operator Format() const { return p.layer.window.ring.format; }
};

// --- the undo row

/// Saves the row that a token written in place overwrites, if the image before the step holds that row
/// (WindowDesc::undo_row). Moves words, because undo rows are packed. If the step runs again, the row is saved already.
class UndoRow {
 public:
  __device__ UndoRow(const ops::LayerDesc& layer, int lane)
      : w_(layer.window), window_tokens_(layer.window_tokens), lane_(lane) {}

  /// Finds the row.
  __device__ void find(const ops::StepRecord& r) {
    slot_ = r.write_slot;
    overwritten_ = r.position - w_.rows;
    due_ = r.in_place() && overwritten_ >= 0 && overwritten_ == r.length - window_tokens_;
  }
  __device__ void prefetch() const {
    if (!due_) return;
    if (lane_ == 0) prefetch_l2(&w_.undo_position(slot_));
    for_words([&](int, const std::uint32_t* word) { prefetch_l2(word); });
    if (lane_ < scale_words()) prefetch_l2(scale());
  }
  __device__ void load() {
    if (!due_) return;
    saved_ = w_.undo_position(slot_);
    for_words([&](int i, const std::uint32_t* word) { payload_[i] = *word; });
    if (lane_ < scale_words()) scale_ = *scale();
  }
  /// Stores the loaded row, before the new row is stored.
  __device__ void save() const {
    if (!due_) return;
    if (saved_ != overwritten_) {
      std::uint32_t* payload = words(w_.undo_row.payload.at(slot_, 0)) + lane_;
      for_words([&](int i, const std::uint32_t*) { payload[i * kWarp] = payload_[i]; });
      if (lane_ < scale_words()) words(w_.undo_row.scale.at(slot_, 0))[lane_] = scale_;
    }
    __syncwarp();  // the old row's words and the new row's octets lie in different lanes; all have read the position
    if (lane_ == 0 && saved_ != overwritten_) w_.undo_position(slot_) = overwritten_;
  }

 private:
  static constexpr int kWords = 2 * kRowWidth / 4 / kWarp;  // of the longest payload: all channels bf16

  /// Calls f with number and address of each of the lane's payload words.
  template <class F>
  __device__ void for_words(F f) const {
    const std::uint32_t* payload = words(w_.ring.payload.at(slot_, overwritten_ % w_.rows)) + lane_;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (i * kWarp + lane_ < static_cast<int>(w_.ring.payload.row_stride / 4)) f(i, payload + i * kWarp);
  }
  __device__ const std::uint32_t* scale() const {
    return words(w_.ring.scale.at(slot_, overwritten_ % w_.rows)) + lane_;
  }
  __device__ int scale_words() const { return static_cast<int>(w_.ring.scale.row_stride / 4); }
  __device__ static std::uint32_t* words(std::uint8_t* at) { return reinterpret_cast<std::uint32_t*>(at); }

  const ops::WindowDesc& w_;
  int window_tokens_, lane_, slot_ = 0, overwritten_ = 0;
  bool due_ = false;
  std::int32_t saved_ = 0;
  std::uint32_t payload_[kWords] = {}, scale_ = 0;
};

/// A lane's part of every row.
template <class In>
struct WindowLane {
  static constexpr int kWordBytes = 16, kWords = kOctets * kOctetChannels * sizeof(In) / kWordBytes;

  const ops::AppendParams& p;
  int lane;

  /// Address of word i of a token's input: the words of an octet are adjacent.
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

  /// Norm and rotation of a row that comes straight from the projection.
  template <class Weights>
  __device__ void finish_projection(const Weights& weights, const RawAngle& rotation, OctetBits (&row)[kOctets]) const {
    const ops::FrontEndDesc& f = p.front_end;
    norm_and_rotate(f.eps, f.rope, weights, rotation_of(f.rope, rotation), lane, row);
  }

  /// Stores the row into the ring; in a long step also into the scratch, because the ring keeps only the last rows.
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

/// One token of a decode. Requests its record, its input and the row that it probably overwrites, all together.
template <bool kProjection, class In, class F>
__device__ void append_window_row(const ops::AppendParams& p, F format, int token) {
  const WindowLane<In> window_lane{p, static_cast<int>(threadIdx.x) % kWarp};
  float4 weights[kOctets][2];
  if constexpr (kProjection) {
#pragma unroll
    for (int j = 0; j < kOctets; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) weights[j][h] = LaneWeights{p.front_end.norm_weight, window_lane.lane}(j, h);
  }
  UndoRow undo_row(p.layer, window_lane.lane);
  RawAngle rotation;
  const auto find = [&](const ops::StepRecord& r) {
    undo_row.find(r);
    if constexpr (kProjection) rotation = load_lane_angle(p.front_end.rope, r.position, window_lane.lane);
  };
  const SpeculativeTokenRecord speculative(p.step, token);
  if (!speculative.padded()) find(speculative.get());
  undo_row.prefetch();
  if (token < p.step.num_tokens)
    for (int i = 0; i < WindowLane<In>::kWords; ++i) prefetch_l2(window_lane.input(token, i));
  grid_dependency_wait();
  launch_dependents();
  if (token >= p.step.num_tokens) return;
  Words<4> in[WindowLane<In>::kWords];
#pragma unroll
  for (int i = 0; i < WindowLane<In>::kWords; ++i) in[i] = load_no_l1<4>(window_lane.input(token, i));
  undo_row.load();
  const ops::StepRecord r = load_record_l2(p.step.tokens + token);
  OctetBits row[kOctets];
  window_lane.octets(in, row);
  if (r.padded()) return;
  if (speculative.padded() || !speculative.holds(r)) {
    find(r);
    undo_row.load();
  }
  undo_row.save();
  if constexpr (kProjection) window_lane.finish_projection([&](int j, int h) { return weights[j][h]; }, rotation, row);
  const RowBits bits = encode_octets(format, window_lane.lane, row);
  window_lane.store(format, r, token, bits);
}

/// Shared memory of a warp's rows in flight, and how many rows it prefetches into L2 before the wait. More of either is
/// slower (SWA, 4 rows and 4: 15.4 us instead of 14.7).
constexpr int kWindowStage = 8192, kWindowPrefetched = 2;
static_assert(kWindowStage % kStageLine == 0);

/// Layout of a warp's stages: records [kStages], then stages of a row and, if the row comes from the projection, its
/// angles.
template <bool kProjection, class In>
struct WindowStages {
  static constexpr int kMaxStages = 3, kRecordBytes = static_cast<int>(sizeof(ops::StepRecord));
  static constexpr int kAngleAt = kRowWidth * static_cast<int>(sizeof(In));
  static constexpr int kAngleWordBytes = kWarp * static_cast<int>(sizeof(uint4));
  static constexpr int kFirst = kStageLine, kBytes = kAngleAt + (kProjection ? 2 * kAngleWordBytes : 0);
  static constexpr int kStages = std::min((kWindowStage - kFirst) / kBytes, kMaxStages);
  static_assert(kStages >= 2 && kStages * kRecordBytes <= kFirst && kBytes % kStageLine == 0);
};

/// Before the wait: prefetches the first rows of append_window_rows into L2.
template <class In>
__device__ void prefetch_window_rows(const ops::AppendParams& p, int warp, int warps) {
  const WindowLane<In> window_lane{p, static_cast<int>(threadIdx.x) % kWarp};
  for (int i = 0; i < kWindowPrefetched; ++i) {
    const int token = warp + i * warps;
    if (token >= p.step.num_tokens) return;
#pragma unroll
    for (int j = 0; j < WindowLane<In>::kWords; ++j) prefetch_l2(window_lane.input(token, j));
  }
}

/// Every warps-th token of a prefill. A row's record and angles are requested together with the row, because loads seem
/// to return in the order of their requests. stage: shared, kWindowStage bytes of the warp. weights: of a projection's
/// norm.
template <bool kProjection, class In, class F>
__device__ void append_window_rows(const ops::AppendParams& p, F format, const std::uint8_t* stage,
                                   const NormWeights& weights, int warp, int warps) {
  using Stages = WindowStages<kProjection, In>;
  constexpr int kWords = WindowLane<In>::kWords, kWordBytes = kWarp * static_cast<int>(sizeof(uint4));
  const WindowLane<In> window_lane{p, static_cast<int>(threadIdx.x) % kWarp};
  const ops::RopeDesc& rope = p.front_end.rope;
  const unsigned stage_at = static_cast<unsigned>(__cvta_generic_to_shared(stage)), lane_at = window_lane.lane * 16u;
  int positions = 0;  // lane i: position of the i-th row since the last multiple of 32
  const auto issue = [&](int token, int number, int in) {
    if constexpr (kProjection) {
      if (number % kWarp == 0) {
        const int lanes_token = token + window_lane.lane * warps;
        const bool exists = lanes_token < p.step.num_tokens;
        positions = exists ? max(__ldcg(&p.step.tokens[lanes_token].position), 0) : 0;
      }
    }
    if (token < p.step.num_tokens) {
      const unsigned to = stage_at + Stages::kFirst + in * Stages::kBytes + lane_at;
#pragma unroll
      for (int i = 0; i < kWords; ++i) copy_async<16>(to + i * kWordBytes, window_lane.input(token, i));
      if (window_lane.lane < Stages::kRecordBytes / 16)
        copy_async<16>(stage_at + in * Stages::kRecordBytes + lane_at,
                       reinterpret_cast<const int4*>(p.step.tokens + token) + window_lane.lane);
      if constexpr (kProjection) {
        const int position = __shfl_sync(kAllLanes, positions, number % kWarp);
        if (has_rotated_pair(rope, window_lane.lane))
          with_angle_words(rope, position, window_lane.lane, [&](auto* high, auto* low) {
            copy_async<sizeof(*high)>(to + Stages::kAngleAt, high);
            copy_async<sizeof(*low)>(to + Stages::kAngleAt + Stages::kAngleWordBytes, low);
          });
      }
    }
    commit_copies();
  };
  int number = 0;  // of the next row to request
#pragma unroll 1
  for (; number < Stages::kStages - 1; ++number) issue(warp + number * warps, number, number);
  int at_stage = 0;
  for (int token = warp; token < p.step.num_tokens; token += warps, ++number) {
    const int free_stage = at_stage == 0 ? Stages::kStages - 1 : at_stage - 1;
    issue(token + (Stages::kStages - 1) * warps, number, free_stage);
    wait_for_copies<Stages::kStages - 1>();
    __syncwarp();  // other lanes copied the record
    const std::uint8_t* at = stage + Stages::kFirst + at_stage * Stages::kBytes;
    const ops::StepRecord r = load_record(reinterpret_cast<const ops::StepRecord*>(stage) + at_stage);
    at_stage = at_stage + 1 == Stages::kStages ? 0 : at_stage + 1;
    const uint4* words = reinterpret_cast<const uint4*>(at) + window_lane.lane;
    Words<4> in[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) in[i] = reinterpret_cast<const Words<4>&>(words[i * kWarp]);
    RawAngle rotation{};
    if constexpr (kProjection) {
      const uint4* raw = reinterpret_cast<const uint4*>(at + Stages::kAngleAt) + window_lane.lane;
      rotation = {raw[0], raw[kWarp]};
    }
    __syncwarp();
    if (r.padded()) continue;
    OctetBits row[kOctets];
    window_lane.octets(in, row);
    if constexpr (kProjection) window_lane.finish_projection(LaneWeights{weights.all, window_lane.lane}, rotation, row);
    const RowBits bits = encode_octets(format, window_lane.lane, row);
    if (r.in_place()) {
      UndoRow undo_row(p.layer, reload_thread_index() % kWarp);
      undo_row.find(r);
      undo_row.load();
      undo_row.save();
    }
    window_lane.store(format, r, token, bits);
  }
}

/// Kernels are compiled for the usual input and format, or for all others. One kernel for both would cost the usual
/// case registers, and a decode time: the instructions, 200 KB instead of 80, are fetched while the kernel runs.
enum class WindowCase { usual, rare };

inline WindowCase window_case(const ops::AppendParams& p) {
  const bool usual = p.window_rows.dtype == DType::bf16 && p.layer.window.ring.format == Format::fp8_tile64;
  return usual ? WindowCase::usual : WindowCase::rare;
}

/// Calls f with the input's element, whether rows are projections, and the ring's format (a constant for the usual
/// format).
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
