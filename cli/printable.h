// Text of files and peers on its way to a terminal.
#pragma once

#include <string>
#include <string_view>

namespace kv4::cli {

/// Shows control characters, those that change the text direction, and bytes that are not UTF-8 as \xNN: they could
/// move the cursor, set titles or hide text. Text longer than `max_bytes` is cut, with "...".
std::string printable(std::string_view text, std::size_t max_bytes = 2000);

}  // namespace kv4::cli
