// `fp8_tile32`: V4.1's window row. Payload: width e4m3, no bf16 tail. Scale: one UE8M0 per 32 channels, by the rule of
// `fp8_tile64`: 2^ceil(log2(max(amax, 1e-4) / 448)).
#pragma once

#include "codec/fp8_tile64.h"

namespace kv4::codec {

struct Fp8Tile32 {
  static constexpr int kTile = 32;
  static constexpr int payload_bytes(RowShape s) { return s.width; }
  static constexpr int scale_bytes(RowShape s) { return s.width / kTile; }

  template <class Group>
  KV4_HD static void encode(Group g, RowShape s, const float* x, std::uint8_t* payload, std::uint8_t* scale, float) {
    for (int t = g.lane(); t < s.width / kTile; t += g.size()) {
      float amax = 0.0f;
      for (int c = t * kTile; c < (t + 1) * kTile; ++c) amax = larger_magnitude(amax, x[c]);
      const int e = Fp8Tile64::scale_exponent(amax);
      const float inverse = pow2(-e);  // exact, so multiplying is dividing
      for (int c = t * kTile; c < (t + 1) * kTile; ++c) payload[c] = e4m3_bits(x[c] * inverse);
      scale[t] = static_cast<std::uint8_t>(e + 127);
    }
  }

  template <class Group>
  KV4_HD static void decode(Group g, RowShape s, const std::uint8_t* payload, const std::uint8_t* scale, float,
                            float* x) {
    for (int c = g.lane(); c < s.width; c += g.size())
      x[c] = e4m3_value(payload[c]) * ue8m0_value(scale[c / kTile]);
  }
};

}  // namespace kv4::codec
