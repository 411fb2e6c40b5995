// How many blocks of a prompt were hashed: updates of a digest as long as a block's token ids.
#pragma once

#include <cstdint>

namespace kv4::test {

/// Of the whole program, since it was started.
std::int64_t hashed_blocks(int block_tokens);

}  // namespace kv4::test
