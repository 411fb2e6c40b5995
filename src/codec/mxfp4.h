// `mxfp4` index key: two e2m1 per byte, element 2i in the low nibble; one UE8M0 per 32: pow2_ceil(max(amax, 6 * 2^-126)
// / 6).
#pragma once

#include "codec/numeric.h"
#include "codec/row_shape.h"

namespace kv4::codec {

struct Mxfp4 {
  static constexpr int kGroup = 32;
  static constexpr int payload_bytes(RowShape s) { return s.width / 2; }
  static constexpr int scale_bytes(RowShape s) { return s.width / kGroup; }

  KV4_HD static int scale_exponent(float amax) {
    const float floor = 6.0f * bits_float(1u << 23);  // 6 * 2^-126
    return pow2_ceil_exponent(quotient(amax > floor ? amax : floor, 6.0f));
  }

  template <class Group>
  KV4_HD static void encode(Group g, RowShape s, const float* x, std::uint8_t* payload, std::uint8_t* scale, float) {
    for (int t = g.lane(); t < s.width / kGroup; t += g.size()) {
      const float* group = x + t * kGroup;
      float amax = 0.0f;
      for (int c = 0; c < kGroup; ++c) amax = larger_magnitude(amax, group[c]);
      const int e = scale_exponent(amax);
      const float inverse = pow2(-e);  // exact
      for (int c = 0; c < kGroup; c += 2) {
        payload[(t * kGroup + c) / 2] =
            static_cast<std::uint8_t>(e2m1_bits(group[c] * inverse) | e2m1_bits(group[c + 1] * inverse) << 4);
      }
      scale[t] = static_cast<std::uint8_t>(e + 127);
    }
  }

  template <class Group>
  KV4_HD static void decode(Group g, RowShape s, const std::uint8_t* payload, const std::uint8_t* scale, float,
                            float* x) {
    for (int c = g.lane(); c < s.width; c += g.size()) {
      const int code = (payload[c / 2] >> (4 * (c & 1))) & 15;
      x[c] = e2m1_value(static_cast<std::uint8_t>(code)) * ue8m0_value(scale[c / kGroup]);
    }
  }
};

}  // namespace kv4::codec
