#include "base/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kv4 {

std::uint64_t digest64(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace kv4
