// What exported bytes mean, in words: the layout id is a digest of it (docs/formats.md, "Layout id").
#pragma once

#include <string>

#include "kv4/schema.h"

namespace kv4 {

/// Everything that decides what exported bytes mean; nothing that only decides where they lie.
std::string describe_layout(const CacheSchema& schema);

}  // namespace kv4
