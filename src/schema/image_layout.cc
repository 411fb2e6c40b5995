#include "schema/image_layout.h"

#include <algorithm>

#include "base/check.h"
#include "kv4/state_cache_pool.h"

namespace kv4 {

namespace {

// By group: the image has the rows of length_of, and room for those of room_of.
template <class LengthOf, class RoomOf>
void lay_out(const CacheSchema& schema, LengthOf&& length_of, RoomOf&& room_of, ImageLayout& out) {
  out.windows.clear();
  out.pending.clear();
  out.bytes = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t at = out.bytes;
    out.bytes += bytes;
    return at;
  };
  const int num_layers = static_cast<int>(schema.layers.size());
  for (int i = 0; i < num_layers; ++i) {
    const LayerCacheSchema& layer = schema.layers[i];
    const std::size_t group = layer.spec.group;
    const std::int64_t rows = std::min<std::int64_t>(room_of(group), schema.config.window);
    WindowPart part{.layer = i};
    part.count = std::min<std::int64_t>(length_of(group), schema.config.window);
    part.first = length_of(group) - part.count;
    part.payload_at = take(rows * layer.window.row.payload_bytes);
    part.scale_at = take(rows * layer.window.row.scale_bytes);
    out.windows.push_back(part);
  }
  const std::int64_t n = length_of(0);
  for (int i = 0; i < num_layers; ++i) {
    const LayerCacheSchema& layer = schema.layers[i];
    for (std::size_t k = 0; k < layer.pages.size(); ++k) {
      const RowKind& kind = layer.pages[k].kind;
      const PendingSchema& pending = layer.pending[k];
      PendingPart part{.layer = i, .kind = static_cast<int>(k), .length = n};
      part.open_first = n / kind.ratio * kind.ratio;
      part.open_count = n - part.open_first;
      if (kind.overlap) {
        part.previous_count = part.open_first > 0 ? kind.ratio : 0;
        part.previous_at = take((room_of(0) >= kind.ratio ? kind.ratio : 0) * pending.row_bytes / 2);
        part.open_at = take(part.open_count * pending.row_bytes);
      } else if (part.open_count > 0) {
        part.open_at = take(pending.acc_offset >= 0 ? std::int64_t{3} * kind.width * 4
                                                    : std::min<std::int64_t>(part.open_count, pending.rows) *
                                                          pending.row_bytes);
      }
      out.pending.push_back(part);
    }
  }
}

}  // namespace

ImageLayout image_layout(const CacheSchema& schema, std::span<const std::int64_t> lengths) {
  require(std::ssize(lengths) == schema.num_groups, ErrorCode::bad_argument,
          "the image has {} lengths; this cache has {} (backbone + draft stages)", lengths.size(), schema.num_groups);
  for (std::int64_t n : lengths)
    require(n >= 0 && n <= schema.options.max_context, ErrorCode::bad_argument,
            "the image's length {} is outside this cache's 0 to {} tokens; raise max_context", n,
            schema.options.max_context);
  const auto length_of = [&](std::size_t group) { return lengths[group]; };
  ImageLayout out;
  lay_out(schema, length_of, length_of, out);
  return out;
}

void snapshot_layout(const CacheSchema& schema, std::int64_t length, ImageLayout& out) {
  // No boundary's image is larger.
  const std::int64_t room = std::max<std::int64_t>(schema.config.window, schema.block_tokens);
  lay_out(
      schema, [&](std::size_t group) { return group == 0 ? length : 0; },
      [&](std::size_t group) { return group == 0 ? room : 0; }, out);
}

ImageLayout snapshot_layout(const CacheSchema& schema, std::int64_t length) {
  ImageLayout out;
  snapshot_layout(schema, length, out);
  return out;
}

std::int64_t image_bytes(const CacheSchema& schema, std::span<const std::int64_t> lengths) try {
  return image_layout(schema, lengths).bytes;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

}  // namespace kv4
