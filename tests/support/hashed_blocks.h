// Counts hashed blocks of prompts: updates of a digest by as many bytes as a block's token ids.
#pragma once

#include <cstdint>

namespace kv4::test {

/// Count of the whole program since its start.
std::int64_t hashed_blocks(int block_tokens);

}  // namespace kv4::test
