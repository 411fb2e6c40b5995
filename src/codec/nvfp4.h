// `nvfp4` index key: two e2m1 per byte; one e4m3 scale per 16: e4m3(amax / 6 / global); value = e2m1 * (scale *
// global). A scale that rounds to zero stores zeros. The global scale is one fp32 per page.
#pragma once

#include "codec/numeric.h"
#include "codec/row_shape.h"

namespace kv4::codec {

struct Nvfp4 {
  static constexpr int kGroup = 16;
  static constexpr int payload_bytes(RowShape s) { return s.width / 2; }
  static constexpr int scale_bytes(RowShape s) { return s.width / kGroup; }

  KV4_HD static std::uint8_t scale_byte(float amax, float global) {
    return e4m3_bits(quotient(quotient(amax, 6.0f), global));
  }

  template <class Group>
  KV4_HD static void encode(Group g, RowShape s, const float* x, std::uint8_t* payload, std::uint8_t* scale,
                            float global) {
    for (int t = g.lane(); t < s.width / kGroup; t += g.size()) {
      const float* group = x + t * kGroup;
      float amax = 0.0f;
      for (int c = 0; c < kGroup; ++c) amax = larger_magnitude(amax, group[c]);
      scale[t] = scale_byte(amax, global);
      const float step = e4m3_value(scale[t]) * global;
      for (int c = 0; c < kGroup; c += 2) {
        const int low = step == 0.0f ? 0 : e2m1_bits(quotient(group[c], step));
        const int high = step == 0.0f ? 0 : e2m1_bits(quotient(group[c + 1], step));
        payload[(t * kGroup + c) / 2] = static_cast<std::uint8_t>(low | high << 4);
      }
    }
  }

  template <class Group>
  KV4_HD static void decode(Group g, RowShape s, const std::uint8_t* payload, const std::uint8_t* scale, float global,
                            float* x) {
    for (int c = g.lane(); c < s.width; c += g.size()) {
      const int code = (payload[c / 2] >> (4 * (c & 1))) & 15;
      x[c] = e2m1_value(static_cast<std::uint8_t>(code)) * (e4m3_value(scale[c / kGroup]) * global);
    }
  }
};

}  // namespace kv4::codec
