// The types that a client accepts (RFC 9110, 12.5.1), as far as needed to decide between two of them.
#pragma once

#include <string_view>

namespace kv4::cli {

/// How much the Accept header wants a type such as "text/plain; version=0.0.4": 0 (not at all) to 1000. The most
/// specific range that fits decides; a range with a version fits that version only. Below 1: only wildcards fit.
double preference(std::string_view accept, std::string_view type);

}  // namespace kv4::cli
