// A 64-bit digest for identities that are compared, not for security.
#pragma once

#include <cstdint>
#include <string_view>

namespace kv4 {

std::uint64_t digest64(std::string_view bytes);

}  // namespace kv4
