// The meaning of exported bytes, as a text: the layout id is a digest of it (docs/formats.md, "Layout id").
#pragma once

#include <cstdint>
#include <string>

#include "kv4/schema.h"

namespace kv4 {

/// Everything that decides what exported bytes mean; nothing that only decides where they lie.
std::string describe_layout(const CacheSchema& schema);

/// A schema of which describe_layout says `text`, for contexts of `max_context` tokens: enough to find and decode every
/// row of exported bytes. Sizes that the text does not tell, heads and positions, are the smallest there are. Throws
/// Error(bad_file) where there is none.
CacheSchema parse_layout(const std::string& text, std::int64_t max_context);

}  // namespace kv4
