// Text of files and peers on its way to a terminal.
#pragma once

#include <string>
#include <string_view>

namespace kv4::cli {

/// Control characters, those that turn the direction of text, and bytes that are no UTF-8 as \xNN: they could move the
/// cursor, set titles or hide what follows. Longer than `max_bytes`: cut, with "...".
std::string printable(std::string_view text, std::size_t max_bytes = 2000);

}  // namespace kv4::cli
