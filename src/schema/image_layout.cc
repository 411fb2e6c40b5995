#include "schema/image_layout.h"

#include <algorithm>

#include "base/check.h"
#include "kv4/state_cache_pool.h"

namespace kv4 {

namespace {

// `lengths` say what is in the image, `room` how much of it fits: [groups] each.
ImageLayout lay_out(const CacheSchema& schema, std::span<const std::int64_t> lengths,
                    std::span<const std::int64_t> room) {
  ImageLayout out;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t at = out.bytes;
    out.bytes += bytes;
    return at;
  };
  const int num_layers = static_cast<int>(schema.layers.size());
  for (int i = 0; i < num_layers; ++i) {
    const LayerCacheSchema& layer = schema.layers[static_cast<std::size_t>(i)];
    const std::size_t group = static_cast<std::size_t>(layer.spec.group);
    const std::int64_t rows = std::min<std::int64_t>(room[group], schema.config.window);
    WindowPart part{.layer = i};
    part.count = std::min<std::int64_t>(lengths[group], schema.config.window);
    part.first = lengths[group] - part.count;
    part.payload_at = take(rows * layer.window.row.payload_bytes);
    part.scale_at = take(rows * layer.window.row.scale_bytes);
    out.windows.push_back(part);
  }
  const std::int64_t n = lengths[0];
  for (int i = 0; i < num_layers; ++i) {
    const LayerCacheSchema& layer = schema.layers[static_cast<std::size_t>(i)];
    for (std::size_t k = 0; k < layer.pages.size(); ++k) {
      const RowKind& kind = layer.pages[k].kind;
      const PendingSchema& pending = layer.pending[k];
      PendingPart part{.layer = i, .kind = static_cast<int>(k), .length = n};
      part.open_first = n / kind.ratio * kind.ratio;
      part.open_count = n - part.open_first;
      if (kind.overlap) {
        part.previous_count = part.open_first > 0 ? kind.ratio : 0;
        part.previous_at = take((room[0] >= kind.ratio ? kind.ratio : 0) * pending.row_bytes / 2);
        part.open_at = take(part.open_count * pending.row_bytes);
      } else if (part.open_count > 0) {
        part.open_at = take(std::int64_t{3} * kind.width * 4);
      }
      out.pending.push_back(part);
    }
  }
  return out;
}

}  // namespace

ImageLayout image_layout(const CacheSchema& schema, std::span<const std::int64_t> lengths) {
  require(lengths.size() == static_cast<std::size_t>(schema.num_groups), ErrorCode::bad_argument,
          "the image has {} lengths; this cache has {} (backbone + draft stages)", lengths.size(), schema.num_groups);
  for (std::int64_t n : lengths)
    require(n >= 0 && n <= schema.options.max_context, ErrorCode::bad_argument,
            "the image's length {} is outside this cache's 0 to {} tokens; raise max_context", n,
            schema.options.max_context);
  return lay_out(schema, lengths, lengths);
}

ImageLayout snapshot_layout(const CacheSchema& schema, std::int64_t length) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(schema.num_groups)), room(lengths);
  lengths[0] = length;
  room[0] = std::max<std::int64_t>(schema.config.window, schema.block_tokens);  // no image of a boundary is larger
  return lay_out(schema, lengths, room);
}

std::int64_t image_bytes(const CacheSchema& schema, std::span<const std::int64_t> lengths) {
  return image_layout(schema, lengths).bytes;
}

}  // namespace kv4
