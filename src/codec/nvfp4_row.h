// `nvfp4_row`: V4.1's entry. Two e2m1 per byte, element 2i in the low nibble, no bf16 tail; one e4m3 scale per 16:
// e4m3(min(max(amax, 6 * 2^-9) / 6, 448)), never 0 and without a global scale. e2m1 has no NaN, so a group with a NaN
// has the scale NaN and codes 0: all of it decodes to NaN.
#pragma once

#include "codec/numeric.h"
#include "codec/row_shape.h"

namespace kv4::codec {

struct Nvfp4Row {
  static constexpr int kGroup = 16;
  static constexpr int payload_bytes(RowShape s) { return s.width / 2; }
  static constexpr int scale_bytes(RowShape s) { return s.width / kGroup; }

  /// e4m3_bits clamps to 448.
  KV4_HD static std::uint8_t scale_byte(float amax) {
    const float floor = 6.0f * 0.001953125f;  // 6 * 2^-9
    return e4m3_bits(quotient(amax > floor ? amax : floor, 6.0f));
  }

  template <class Group>
  KV4_HD static void encode(Group g, RowShape s, const float* x, std::uint8_t* payload, std::uint8_t* scale, float) {
    for (int t = g.lane(); t < s.width / kGroup; t += g.size()) {
      const float* group = x + t * kGroup;
      float amax = 0.0f;
      bool nan = false;
      for (int c = 0; c < kGroup; ++c) {
        amax = larger_magnitude(amax, group[c]);
        nan = nan || is_nan(group[c]);
      }
      scale[t] = nan ? kE4m3Nan : scale_byte(amax);
      const float step = e4m3_value(scale[t]);
      for (int c = 0; c < kGroup; c += 2) {  // divided by the rounded scale: a product with 1 / step can cross a tie
        const int low = nan ? 0 : e2m1_bits(quotient(group[c], step));
        const int high = nan ? 0 : e2m1_bits(quotient(group[c + 1], step));
        payload[(t * kGroup + c) / 2] = static_cast<std::uint8_t>(low | high << 4);
      }
    }
  }

  template <class Group>
  KV4_HD static void decode(Group g, RowShape s, const std::uint8_t* payload, const std::uint8_t* scale, float,
                            float* x) {
    for (int c = g.lane(); c < s.width; c += g.size()) {
      const int code = (payload[c / 2] >> (4 * (c & 1))) & 15;
      x[c] = canonical_nan(e2m1_value(static_cast<std::uint8_t>(code)) * e4m3_value(scale[c / kGroup]));
    }
  }
};

}  // namespace kv4::codec
