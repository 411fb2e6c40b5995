#pragma once

#include <cstdint>

namespace kv4::codec {

/// `width` channels; the row formats quantise the first width - tail and keep the rest bf16. Index keys have tail 0.
struct RowShape {
  std::int32_t width;
  std::int32_t tail;
};

}  // namespace kv4::codec
