// The offset and the rows of each part of a canonical image.
//
//   for each owned layer: window payloads [k, p], window scales [k, s]      k = min(length, window), in position order
//   for each owned layer, each row kind:
//     overlap:  first-half kv and gate of the previous span's rows [ratio, 2 x width]   (if there is one)
//               kv and gate of the open span's rows                [length mod ratio, 2 x columns]
//     V4.1:     kv and gate of the open row [1, 2 x width]          (entries of ratio 2 at odd lengths)
//     else:     max, denominator, numerator of the open span [3, width] fp32            (if it has rows)
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv4/schema.h"

namespace kv4 {

struct WindowPart {
  int layer = 0;           // index among the owned layers
  std::int64_t first = 0;  // position of the first row
  std::int64_t count = 0;
  std::int64_t payload_at = 0;  // offset in the image
  std::int64_t scale_at = 0;
};

struct PendingPart {
  int layer = 0;
  int kind = 0;  // index among the layer's row kinds
  std::int64_t length = 0;
  std::int64_t previous_count = 0;  // rows [open_first - previous_count, open_first), first half only
  std::int64_t open_first = 0;
  std::int64_t open_count = 0;
  std::int64_t previous_at = 0;
  std::int64_t open_at = 0;  // open rows, or the accumulator
};

struct ImageLayout {
  std::vector<WindowPart> windows;
  std::vector<PendingPart> pending;
  std::int64_t bytes = 0;
};

ImageLayout image_layout(const CacheSchema& schema, std::span<const std::int64_t> lengths);

/// The layout of the backbone's image at a block boundary, with every part where a long context's image has it: from
/// one window on, the bytes are the same. `length`: a multiple of the block.
ImageLayout snapshot_layout(const CacheSchema& schema, std::int64_t length);
/// The same into `out`; allocates nothing if `out` has held such a layout before.
void snapshot_layout(const CacheSchema& schema, std::int64_t length, ImageLayout& out);

}  // namespace kv4
