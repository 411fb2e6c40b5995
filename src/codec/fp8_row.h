// `fp8_row`: payload (width - tail) e4m3, then tail bf16. Scale: one fp32 inverse scale per row, amax / 448 (1 for a
// zero row); byte = e4m3(x / inverse), value = byte * inverse.
#pragma once

#include "codec/bf16_row.h"

namespace kv4::codec {

template <class Group>
KV4_HD float row_amax(Group g, const float* x, int count) {
  float amax = 0.0f;
  for (int c = g.lane(); c < count; c += g.size()) amax = larger_magnitude(amax, x[c]);
  return g.max(amax);
}

struct Fp8Row {
  static constexpr int payload_bytes(RowShape s) { return s.width - s.tail + 2 * s.tail; }
  static constexpr int scale_bytes(RowShape) { return 4; }

  KV4_HD static float inverse_scale(float amax) {
    const float inverse = quotient(amax, 448.0f);
    return inverse > 0.0f ? inverse : 1.0f;
  }

  template <class Group>
  KV4_HD static void encode(Group g, RowShape s, const float* x, std::uint8_t* payload, std::uint8_t* scale, float) {
    const int body = s.width - s.tail;
    const float inverse = inverse_scale(row_amax(g, x, body));
    for (int c = g.lane(); c < body; c += g.size()) payload[c] = e4m3_bits(quotient(x[c], inverse));
    if (g.lane() == 0) memcpy(scale, &inverse, 4);
    encode_tail(g, s, x, payload);
  }

  template <class Group>
  KV4_HD static void decode(Group g, RowShape s, const std::uint8_t* payload, const std::uint8_t* scale, float,
                            float* x) {
    float inverse;
    memcpy(&inverse, scale, 4);
    for (int c = g.lane(); c < s.width - s.tail; c += g.size()) x[c] = e4m3_value(payload[c]) * inverse;
    decode_tail(g, s, payload, x);
  }
};

}  // namespace kv4::codec
