// Pinned host memory for blocks and snapshots on their way between disks and the GPU.
#pragma once

#include <cstdint>

namespace kv4::cuda {

/// Throws Error(out_of_memory) and leaves no error behind.
void* allocate_pinned(std::int64_t bytes);
/// `bytes`: what was asked for.
void free_pinned(void* memory, std::int64_t bytes);

}  // namespace kv4::cuda
