// `fp8` index key: width e4m3; one fp32 scale per key, a power of two: pow2_ceil(max(amax, 1e-4) / 448).
#pragma once

#include "codec/fp8_row.h"
#include "codec/fp8_tile64.h"

namespace kv4::codec {

struct Fp8Key {
  static constexpr int payload_bytes(RowShape s) { return s.width; }
  static constexpr int scale_bytes(RowShape) { return 4; }

  template <class Group>
  KV4_HD static void encode(Group g, RowShape s, const float* x, std::uint8_t* payload, std::uint8_t* scale, float) {
    const int e = Fp8Tile64::scale_exponent(row_amax(g, x, s.width));
    const float inverse = pow2(-e);
    for (int c = g.lane(); c < s.width; c += g.size()) payload[c] = e4m3_bits(x[c] * inverse);
    const float value = pow2(e);
    if (g.lane() == 0) memcpy(scale, &value, 4);
  }

  template <class Group>
  KV4_HD static void decode(Group g, RowShape s, const std::uint8_t* payload, const std::uint8_t* scale, float,
                            float* x) {
    float value;
    memcpy(&value, scale, 4);
    for (int c = g.lane(); c < s.width; c += g.size()) x[c] = e4m3_value(payload[c]) * value;
  }
};

}  // namespace kv4::codec
