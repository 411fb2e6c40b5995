// `fp8_tile64`: DeepSeek's own row. Payload: (width - tail) e4m3, then tail bf16. Scale: one UE8M0 per 64 channels,
// zero padded to a multiple of 8 bytes. Scale rule: 2^ceil(log2(max(amax, 1e-4) / 448)); the floor is on amax, not on
// the scale.
#pragma once

#include "codec/bf16_row.h"

namespace kv4::codec {

constexpr float kAmaxFloor = 1e-4f;

struct Fp8Tile64 {
  static constexpr int kTile = 64;
  static constexpr int tiles(RowShape s) { return (s.width - s.tail) / kTile; }
  static constexpr int payload_bytes(RowShape s) { return s.width - s.tail + 2 * s.tail; }
  static constexpr int scale_bytes(RowShape s) { return (tiles(s) + 7) / 8 * 8; }

  KV4_HD static int scale_exponent(float amax) {
    return pow2_ceil_exponent(quotient(amax > kAmaxFloor ? amax : kAmaxFloor, 448.0f));
  }

  template <class Group>
  KV4_HD static void encode(Group g, RowShape s, const float* x, std::uint8_t* payload, std::uint8_t* scale, float) {
    for (int t = g.lane(); t < scale_bytes(s); t += g.size()) {
      if (t >= tiles(s)) {
        scale[t] = 0;
        continue;
      }
      float amax = 0.0f;
      for (int c = t * kTile; c < (t + 1) * kTile; ++c) amax = larger_magnitude(amax, x[c]);
      const int e = scale_exponent(amax);
      const float inverse = pow2(-e);  // exact, so multiplying is dividing
      for (int c = t * kTile; c < (t + 1) * kTile; ++c) payload[c] = e4m3_bits(x[c] * inverse);
      scale[t] = static_cast<std::uint8_t>(e + 127);
    }
    encode_tail(g, s, x, payload);
  }

  template <class Group>
  KV4_HD static void decode(Group g, RowShape s, const std::uint8_t* payload, const std::uint8_t* scale, float,
                            float* x) {
    for (int c = g.lane(); c < s.width - s.tail; c += g.size())
      x[c] = e4m3_value(payload[c]) * ue8m0_value(scale[c / kTile]);
    decode_tail(g, s, payload, x);
  }
};

}  // namespace kv4::codec
