// The meaning of exported bytes, as a text: the layout id is a digest of it (docs/formats.md, "Layout id").
#pragma once

#include <cstdint>
#include <string>

#include "kv4/schema.h"

namespace kv4 {

/// Everything that decides the meaning of exported bytes; nothing that decides only their place.
std::string describe_layout(const CacheSchema& schema);

/// A schema whose describe_layout is `text`, for contexts of `max_context` tokens: enough to find and decode every row
/// of exported bytes. Sizes missing from the text, heads and positions, are as small as possible. Throws
/// Error(bad_file) if there is no such schema.
CacheSchema parse_layout(const std::string& text, std::int64_t max_context);

}  // namespace kv4
