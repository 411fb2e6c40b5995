// `bf16`: width x 2 bytes, no scale.
#pragma once

#include "codec/numeric.h"
#include "codec/row_shape.h"

namespace kv4::codec {

KV4_HD void store_bf16(std::uint8_t* at, float x) {
  const std::uint16_t b = bf16_bits(x);
  memcpy(at, &b, 2);
}

KV4_HD float load_bf16(const std::uint8_t* at) {
  std::uint16_t b;
  memcpy(&b, at, 2);
  return bf16_value(b);
}

struct Bf16Row {
  static constexpr int payload_bytes(RowShape s) { return 2 * s.width; }
  static constexpr int scale_bytes(RowShape) { return 0; }

  template <class Group>
  KV4_HD static void encode(Group g, RowShape s, const float* x, std::uint8_t* payload, std::uint8_t*, float) {
    for (int c = g.lane(); c < s.width; c += g.size()) store_bf16(payload + 2 * c, x[c]);
  }

  template <class Group>
  KV4_HD static void decode(Group g, RowShape s, const std::uint8_t* payload, const std::uint8_t*, float, float* x) {
    for (int c = g.lane(); c < s.width; c += g.size()) x[c] = load_bf16(payload + 2 * c);
  }
};

/// The unquantised end of the row formats: `tail` bf16 after `body` e4m3 bytes.
template <class Group>
KV4_HD void encode_tail(Group g, RowShape s, const float* x, std::uint8_t* payload) {
  const int body = s.width - s.tail;
  for (int c = g.lane(); c < s.tail; c += g.size()) store_bf16(payload + body + 2 * c, x[body + c]);
}

template <class Group>
KV4_HD void decode_tail(Group g, RowShape s, const std::uint8_t* payload, float* x) {
  const int body = s.width - s.tail;
  for (int c = g.lane(); c < s.tail; c += g.size()) x[body + c] = load_bf16(payload + body + 2 * c);
}

}  // namespace kv4::codec
