// Pinned host memory for blocks and snapshots in transfer between disks and the GPU.
#pragma once

#include <cstdint>

namespace kv4::cuda {

/// Throws Error(out_of_memory) and leaves no error behind.
void* allocate_pinned(std::int64_t bytes);
/// `bytes`: the size that was allocated.
void free_pinned(void* memory, std::int64_t bytes);

}  // namespace kv4::cuda
