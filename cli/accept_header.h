// The types that a client accepts (RFC 9110, 12.5.1), as far as needed to decide between two of them.
#pragma once

#include <string_view>

namespace kv4::cli {

/// How much the Accept header wants a type, "text/plain; version=0.0.4": 0 (not at all) to 1000. Of its ranges the
/// most specific one that fits tells; one with a version fits that version only. Below 1: no range but wildcards
/// fits.
double preference(std::string_view accept, std::string_view type);

}  // namespace kv4::cli
