// The bytes that an operation must touch: read plus written, each counted once, independent of the implementation.
#pragma once

#include <cstdint>

#include "kv4/schema.h"

namespace kv4::checks {

/// Append of `count` tokens to a request of length `start` in one layer: inputs, window rows, pending rows, entries and
/// index keys.
std::int64_t append_bytes(const LayerCacheSchema& layer, std::int64_t start, std::int64_t count);

/// The window row that a step of R + 1 tokens removes from the image. It is copied beside the ring once per step,
/// however often the step runs.
std::int64_t undo_row_bytes(const CacheSchema& schema, const LayerCacheSchema& layer, std::int64_t start,
                            std::int64_t count);

/// Gather of `rows` rows decoded into `element_bytes` per channel.
std::int64_t gather_bytes(const RowSchema& row, std::int64_t rows, std::int64_t element_bytes);

}  // namespace kv4::checks
