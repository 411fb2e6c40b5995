#include "touched_bytes.h"

#include <algorithm>

#include "inputs.h"

namespace kv4::checks {
namespace {

/// Pending rows that the call's entries read from earlier steps, and rows that it writes for later ones.
std::int64_t pending_bytes(const RowKind& kind, const PendingSchema& pending, std::int64_t start, std::int64_t count) {
  const std::int64_t open = start % kind.ratio, end = start + count;
  std::int64_t bytes = std::min<std::int64_t>(count, pending.rows) * pending.row_bytes;
  const bool closes = end / kind.ratio > start / kind.ratio;
  if (kind.overlap) {
    const std::int64_t first = std::max<std::int64_t>(0, start - open - kind.ratio);
    if (closes) bytes += (start - first) * pending.row_bytes / 2;  // each row serves one of its two series
  } else if (pending.online) {
    const std::int64_t accumulator = std::int64_t{3} * kind.width * 4;
    bytes += std::min(count, open) * pending.row_bytes;
    bytes += (open > 0 ? accumulator : 0) + (end % kind.ratio > 0 ? accumulator : 0);
  } else if (closes) {
    bytes += open * pending.row_bytes;
  }
  return bytes;
}

}  // namespace

std::int64_t append_bytes(const LayerCacheSchema& layer, std::int64_t start, std::int64_t count) {
  std::int64_t bytes = count * (LayerInputs::token_bytes(layer) + layer.window.row.bytes());
  for (std::size_t k = 0; k < layer.pages.size(); ++k) {
    const RowKind& kind = layer.pages[k].kind;
    const std::int64_t entries = (start + count) / kind.ratio - start / kind.ratio;
    bytes += entries * layer.pages[k].row.bytes() + pending_bytes(kind, layer.pending[k], start, count);
  }
  return bytes;
}

std::int64_t undo_row_bytes(const CacheSchema& schema, const LayerCacheSchema& layer, std::int64_t start,
                            std::int64_t count) {
  const int window = schema.config.window;
  return start >= window && count == layer.window.rows - window + 1 ? 2 * layer.window.row.bytes() : 0;
}

std::int64_t gather_bytes(const RowSchema& row, std::int64_t rows, std::int64_t element_bytes) {
  return rows * (row.bytes() + row.width * element_bytes);
}

}  // namespace kv4::checks
