// Window rows: one warp per row of 512 channels. A lane holds two octets, 8 consecutive channels each, as bf16 pairs:
// loads and stores are 16 and 8 bytes wide and a tile of 64 channels is 8 lanes.
#pragma once

#include "backend/cuda/launch.cuh"
#include "backend/cuda/row_decode.cuh"
#include "backend/cuda/row_encode.cuh"
#include "backend/cuda/source_rows.cuh"

namespace kv4::cuda {

constexpr int kOctets = 2, kOctetChannels = 8;
constexpr int kOctetStride = kWarp * kOctetChannels;  // channels between a lane's octets

struct OctetBits {
  std::uint32_t pair[4];
};

__device__ inline int octet_channel(int lane, int octet) { return octet * kOctetStride + lane * kOctetChannels; }

__device__ inline void octet_values(const OctetBits& o, float (&x)[kOctetChannels]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = low_value(o.pair[i]);
    x[2 * i + 1] = high_value(o.pair[i]);
  }
}

// --- norm and rotation of a row that comes straight from the projection

__device__ inline Quad load_weights(const float* at) {
  const float4 w = __ldg(reinterpret_cast<const float4*>(at));
  return {{w.x, w.y, w.z, w.w}};
}

/// The same, but not before the program comes to it: they are in the first-level cache, and their registers are better
/// spent on more warps.
__device__ inline Quad load_weights_late(const float* at) {
  Quad w;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(w.v[0]), "=f"(w.v[1]), "=f"(w.v[2]), "=f"(w.v[3])
               : "l"(at));
  return w;
}

/// Of a lane's last octet, if it is turned: what is turned lies in the last octets of a row.
struct OctetTurn {
  float cos[kOctetChannels / kPair], sin[kOctetChannels / kPair];
};

__device__ inline bool turns_octet(const ops::RopeDesc& rope, int lane) {
  return octet_channel(lane, kOctets - 1) >= kRowWidth - rope.rope_dim;
}

__device__ inline OctetTurn load_octet_turn(const ops::RopeDesc& rope, int position, int lane) {
  OctetTurn out{};
  if (!turns_octet(rope, lane)) return out;
#pragma unroll
  for (int i = 0; i < kOctetChannels / kPair; ++i) {
    const Turn turn = load_turn(rope, position, octet_channel(lane, kOctets - 1) + i * kPair, kRowWidth);
    out.cos[i] = turn.cos;
    out.sin[i] = turn.sin;
  }
  return out;
}

/// weights(octet, half): 4 of them. turn(): an OctetTurn.
template <class Weights, class GetTurn>
__device__ void finish_projection(const ops::FrontEndDesc& f, Weights weights, GetTurn turn, int lane,
                                  OctetBits (&row)[kOctets]) {
  float x[kOctets][kOctetChannels], sum[kOctets];
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    octet_values(row[j], x[j]);
    float square[kOctetChannels];
#pragma unroll
    for (int i = 0; i < kOctetChannels; ++i) square[i] = x[j][i] * x[j][i];
    sum[j] = pair_sum<0, kOctetChannels>(square);
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) sum[j] += __shfl_xor_sync(kAllLanes, sum[j], step);
  }
  const float factor = norm_factor<kRowWidth>(sum[0] + sum[1], f.eps);
#pragma unroll
  for (int j = 0; j < kOctets; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Quad w = weights(j, h);
      const float* y = x[j] + 4 * h;
      row[j].pair[2 * h] = bf16_pair(y[0] * factor * w.v[0], y[1] * factor * w.v[1]);
      row[j].pair[2 * h + 1] = bf16_pair(y[2] * factor * w.v[2], y[3] * factor * w.v[3]);
    }
  if (!turns_octet(f.rope, lane)) return;
  const OctetTurn by = turn();
#pragma unroll
  for (int i = 0; i < kOctetChannels / kPair; ++i) {
    std::uint32_t& pair = row[kOctets - 1].pair[i];
    const Pair y = rotate({true, by.cos[i], by.sin[i]}, pair_values(pair));
    pair = bf16_pair(y.v[0], y.v[1]);
  }
}

// --- encoding

/// Eight e4m3 of channels times `by`.
__device__ inline uint2 e4m3_octet(const OctetBits& o, float by) {
  return make_uint2(
      e4m3_quad({{low_value(o.pair[0]), high_value(o.pair[0]), low_value(o.pair[1]), high_value(o.pair[1])}}, by),
      e4m3_quad({{low_value(o.pair[2]), high_value(o.pair[2]), low_value(o.pair[3]), high_value(o.pair[3])}}, by));
}

__device__ inline float octet_amax(const OctetBits& o) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) amax = fmaxf(fmaxf(amax, fabsf(low_value(o.pair[i]))), fabsf(high_value(o.pair[i])));
  return amax;
}

__device__ inline uint4 bf16_octet(OctetBits o) {
  if (has_nan_bf16(o.pair)) fix_nan(o.pair);
  return make_uint4(o.pair[0], o.pair[1], o.pair[2], o.pair[3]);
}

/// The ring's format, read where it is asked for.
struct RingFormat {
  const ops::AppendParams& p;
  __device__ operator Format() const { return p.layer.window.ring.format; }
};

// `format` below: a RingFormat or a constant.

/// What a lane stores of one row.
struct WindowBits {
  uint4 payload[kOctets];  // 8 bytes of codes or 16 of bf16
  std::uint32_t scale[kOctets];
};

template <int kSteps>
__device__ float max_over_lanes(float x) {
#pragma unroll
  for (int step = 1; step < kSteps; step *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

template <class F>
__device__ WindowBits encode_window(F format, int lane, const OctetBits (&row)[kOctets]) {
  constexpr int body = kRowWidth - kRowTail;
  WindowBits out;
  if (format == Format::bf16) {
#pragma unroll
    for (int j = 0; j < kOctets; ++j) out.payload[j] = bf16_octet(row[j]);
    return out;
  }
  if (format == Format::fp8_tile64) {
    // The largest of both octets' tiles at once: bf16 without sign order as integers do.
    static_assert(kOctets == 2);
    std::uint32_t amax =
        __byte_perm(codec::float_bits(octet_amax(row[0])), codec::float_bits(octet_amax(row[1])), 0x7632);
#pragma unroll
    for (int step = 1; step < codec::Fp8Tile64::kTile / kOctetChannels; step *= 2)
      amax = __vmaxu2(amax, __shfl_xor_sync(kAllLanes, amax, step));
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      const int e = exponent_over_448(j == 0 ? low_value(amax) : high_value(amax));
      const bool quantised = octet_channel(lane, j) < body;
      const uint2 codes = e4m3_octet(row[j], pow2_normal(-e));
      out.payload[j] = quantised ? make_uint4(codes.x, codes.y, 0, 0) : bf16_octet(row[j]);
      out.scale[j] = quantised ? static_cast<std::uint32_t>(e + 127) : 0;
    }
    return out;
  }
  float amax = 0.0f;  // fp8_row
#pragma unroll
  for (int j = 0; j < kOctets; ++j)
    if (octet_channel(lane, j) < body) amax = fmaxf(amax, octet_amax(row[j]));
  const float inverse = codec::Fp8Row::inverse_scale(fminf(max_over_lanes<kWarp>(amax), codec::kBf16Max));
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    std::uint32_t codes[2] = {};
#pragma unroll
    for (int i = 0; i < kOctetChannels / kPair; ++i) {
      const Pair x = pair_values(row[j].pair[i]);
      const std::uint32_t code = e4m3_pair(codec::quotient(x.v[0], inverse), codec::quotient(x.v[1], inverse));
      codes[i / 2] |= code << (16 * (i % 2));
    }
    out.payload[j] = octet_channel(lane, j) < body ? make_uint4(codes[0], codes[1], 0, 0) : bf16_octet(row[j]);
    out.scale[j] = codec::float_bits(inverse);
  }
  return out;
}

/// As store16.
__device__ inline void store8(void* at, std::uint32_t x, std::uint32_t y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(at)), "r"(x), "r"(y) : "memory");
}

template <class F>
__device__ void store_window(F format, int lane, const WindowBits& bits, std::uint8_t* payload, std::uint8_t* scale) {
  const int body = format == Format::bf16 ? 0 : kRowWidth - kRowTail;
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    const int channel = octet_channel(lane, j);
    const uint4 p = bits.payload[j];
    if (channel < body) {
      store8(payload + channel, p.x, p.y);
    } else {
      store16(payload + 2 * channel - body, p.x, p.y, p.z, p.w);
    }
    if (format == Format::fp8_tile64 && channel % codec::Fp8Tile64::kTile == 0)
      scale[channel / codec::Fp8Tile64::kTile] = static_cast<std::uint8_t>(bits.scale[j]);
  }
  if (format == Format::fp8_row && lane == 0) store_word(scale, bits.scale[0]);
}

// --- the row that is overwritten

/// The row that a token written in place overwrites, if the image before the step holds it (WindowDesc::displaced). In
/// words, because displaced rows are packed. Run again, the row is kept already.
class DisplacedRow {
 public:
  __device__ DisplacedRow(const ops::LayerDesc& layer, int lane)
      : w_(layer.window), window_tokens_(layer.window_tokens), lane_(lane) {}

  /// Which row that is.
  __device__ void find(const ops::StepRecord& r) {
    slot_ = r.write_slot;
    lost_ = r.position - w_.rows;
    due_ = r.in_place() && lost_ >= 0 && lost_ == r.length - window_tokens_;
  }
  __device__ void fetch() const {
    if (!due_) return;
    if (lane_ == 0) fetch_ahead(&w_.displaced_position(slot_));
    for_words([&](int, const std::uint32_t* word) { fetch_ahead(word); });
    if (lane_ < scale_words()) fetch_ahead(scale());
  }
  __device__ void load() {
    if (!due_) return;
    kept_ = w_.displaced_position(slot_);
    for_words([&](int i, const std::uint32_t* word) { payload_[i] = *word; });
    if (lane_ < scale_words()) scale_ = *scale();
  }
  /// What was loaded, before the new row is stored.
  __device__ void keep() const {
    if (!due_) return;
    if (kept_ != lost_) {
      std::uint32_t* payload = words(w_.displaced.payload.at(slot_, 0)) + lane_;
      for_words([&](int i, const std::uint32_t*) { payload[i * kWarp] = payload_[i]; });
      if (lane_ < scale_words()) words(w_.displaced.scale.at(slot_, 0))[lane_] = scale_;
    }
    __syncwarp();  // lanes of the old row's words and of the new row's octets differ; all have read the position
    if (lane_ == 0 && kept_ != lost_) w_.displaced_position(slot_) = lost_;
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

  /// The row goes into the ring; in a long step also into the scratch, because the ring keeps only the last rows.
  template <class F>
  __device__ void store(F format, const ops::StepRecord& r, int token, const WindowBits& bits) const {
    const ops::WindowDesc& w = p.layer.window;
    const auto put = [&](const ops::RowPlanes& rows, int slot, int row) {
      const auto at = [=](const ops::Plane& plane) {
        return row_at(plane.data + slot * plane.block_stride, row, plane.row_stride);
      };
      store_window(format, lane, bits, at(rows.payload), at(rows.scale));
    };
    if (!r.in_place()) put(w.scratch, 0, token);
    if (r.in_place() || r.position >= r.end() - w.rows) put(w.ring, r.write_slot, r.position % w.rows);
  }
};

/// One token of a decode. Its record, its input and the row that it probably overwrites are asked for together.
template <bool kProjection, class In, class F>
__device__ void append_window_row(const ops::AppendParams& p, F format, int token) {
  const WindowLane<In> mine{p, static_cast<int>(threadIdx.x) % kWarp};
  const float* weights = p.front_end.norm_weight + mine.lane * kOctetChannels;
  Quad weight[kOctets][2];
  if constexpr (kProjection) {
#pragma unroll
    for (int j = 0; j < kOctets; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) weight[j][h] = load_weights(weights + j * kOctetStride + h * 4);
  }
  DisplacedRow displaced(p.layer, mine.lane);
  OctetTurn turn;
  const auto find = [&](const ops::StepRecord& r) {
    displaced.find(r);
    if constexpr (kProjection) turn = load_octet_turn(p.front_end.rope, r.position, mine.lane);
  };
  const GuessedRecord guess(p.step, token);
  if (!guess.padded()) find(guess.get());
  displaced.fetch();
  if (token < p.step.num_tokens)
    for (int i = 0; i < WindowLane<In>::kWords; ++i) fetch_ahead(mine.input(token, i));
  wait_for_previous();
  let_next_start();
  if (token >= p.step.num_tokens) return;
  Words<4> in[WindowLane<In>::kWords];
#pragma unroll
  for (int i = 0; i < WindowLane<In>::kWords; ++i) in[i] = load_words<4>(mine.input(token, i));
  displaced.load();
  const ops::StepRecord r = load_record_again(p.step.tokens + token);
  OctetBits row[kOctets];
  mine.octets(in, row);
  if (r.padded()) return;
  if (guess.padded() || !guess.holds(r)) {
    find(r);
    displaced.load();
  }
  displaced.keep();
  if constexpr (kProjection)
    finish_projection(
        p.front_end, [&](int j, int h) { return weight[j][h]; }, [&] { return turn; }, mine.lane, row);
  const WindowBits bits = encode_window(format, mine.lane, row);
  mine.store(format, r, token, bits);
}

constexpr int kWindowAhead = 4;  // rows under way

/// Of shared memory that a warp's rows under way take, with their records.
constexpr int kWindowStage = kWindowAhead * (kRowWidth * static_cast<int>(sizeof(float)) + sizeof(ops::StepRecord));

/// Before the wait: the first rows of append_window_rows are brought into L2.
template <class In>
__device__ void fetch_window_rows(const ops::AppendParams& p, int warp, int warps) {
  const WindowLane<In> mine{p, static_cast<int>(threadIdx.x) % kWarp};
  for (int i = 0; i < kWindowAhead; ++i) {
    const int token = warp + i * warps;
    if (token >= p.step.num_tokens) return;
#pragma unroll
    for (int j = 0; j < WindowLane<In>::kWords; ++j) fetch_ahead(mine.input(token, j));
  }
}

/// Every warps-th token of a prefill. stage: shared, kWindowStage bytes of the warp: records [kWindowAhead], words
/// [kWindowAhead, kWords, 32] of 16 bytes.
template <bool kProjection, class In, class F>
__device__ void append_window_rows(const ops::AppendParams& p, F format, const std::uint8_t* stage, int warp,
                                   int warps) {
  constexpr int kWords = WindowLane<In>::kWords, kRecordBytes = static_cast<int>(sizeof(ops::StepRecord));
  const WindowLane<In> mine{p, static_cast<int>(threadIdx.x) % kWarp};
  const float* weights = p.front_end.norm_weight + mine.lane * kOctetChannels;
  const Words<4>* slots = reinterpret_cast<const Words<4>*>(stage + kWindowAhead * kRecordBytes) + mine.lane;
  const unsigned records_at = static_cast<unsigned>(__cvta_generic_to_shared(stage));
  const unsigned slots_at = static_cast<unsigned>(__cvta_generic_to_shared(slots));
  const auto ask = [&](int token, unsigned slot) {
    if (token < p.step.num_tokens) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        copy_ahead<16>(slots_at + (slot * kWords + i) * kWarp * sizeof(Words<4>), mine.input(token, i));
      if (mine.lane < kRecordBytes / 16)
        copy_ahead<16>(records_at + slot * kRecordBytes + mine.lane * 16,
                       reinterpret_cast<const int4*>(p.step.tokens + token) + mine.lane);
    }
    close_batch();
  };
  for (int i = 0; i < kWindowAhead - 1; ++i) ask(warp + i * warps, i);
  unsigned slot = 0;
  for (int token = warp; token < p.step.num_tokens; token += warps, slot = (slot + 1) % kWindowAhead) {
    ask(token + (kWindowAhead - 1) * warps, (slot + kWindowAhead - 1) % kWindowAhead);
    wait_for_batch<kWindowAhead - 1>();
    __syncwarp();  // the record is other lanes' copy
    const ops::StepRecord r = load_record(reinterpret_cast<const ops::StepRecord*>(stage) + slot);
    __syncwarp();
    if (r.padded()) continue;
    Words<4> in[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) in[i] = slots[(slot * kWords + i) * kWarp];
    OctetBits row[kOctets];
    mine.octets(in, row);
    if constexpr (kProjection) {
      const auto weight = [&](int j, int h) { return load_weights_late(weights + j * kOctetStride + h * 4); };
      const auto turn = [&] { return load_octet_turn(p.front_end.rope, r.position, mine.lane); };
      finish_projection(p.front_end, weight, turn, mine.lane, row);
    }
    const WindowBits bits = encode_window(format, mine.lane, row);
    DisplacedRow displaced(p.layer, mine.lane);
    displaced.find(r);
    displaced.load();
    displaced.keep();
    mine.store(format, r, token, bits);
  }
}

/// Calls f with an input's element, whether rows are projections, and the ring's format: a type where it is the usual
/// one.
template <class F>
__device__ void with_window_input(const ops::AppendParams& p, F&& f) {
  const auto with_format = [&](auto element, auto projection) {
    if (p.layer.window.ring.format == Format::fp8_tile64)
      return f(element, projection, std::integral_constant<Format, Format::fp8_tile64>{});
    f(element, projection, RingFormat{p});
  };
  const auto with_input = [&](auto element) {
    if (p.front_end.norm_weight != nullptr) return with_format(element, std::true_type{});
    with_format(element, std::false_type{});
  };
  if (p.window_rows.dtype == DType::f32) return with_input(float{});
  with_input(Bf16{});
}

}  // namespace kv4::cuda
