#include "backend/cuda/runtime/pinned_memory.h"

#include <sys/mman.h>

#include <cstddef>

#include "backend/cuda/runtime/check.h"

namespace kv4::cuda {
namespace {

constexpr std::int64_t kHugePage = 2 << 20, kMin = 4 * kHugePage, kMax = 512 * kHugePage;

std::int64_t whole_pages(std::int64_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

/// Large memory is allocated in huge pages, where the system has them: a disk transfer pins every page of its memory,
/// and cudaMallocHost gives small pages. Very large memory comes from cudaMallocHost, because that refuses a size that
/// the machine does not have, whereas the pages of a mapping turn out missing one by one.
bool in_huge_pages(std::int64_t bytes) {
  int device = 0, supported = 0;
  return bytes >= kMin && bytes <= kMax && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&supported, cudaDevAttrHostRegisterSupported, device) == cudaSuccess && supported != 0;
}

/// At a multiple of huge pages; null where the system refuses.
std::byte* map_huge_pages(std::int64_t bytes) {
  const std::size_t size = whole_pages(bytes);
  void* const mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(mapped);
  const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(mapped) % kHugePage) % kHugePage;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + size, kHugePage - before);
  madvise(begin + before, size, MADV_HUGEPAGE);  // only advice
  madvise(begin + before, size, MADV_DONTFORK);  // otherwise the GPU would use pages that a fork has given to the child
  return begin + before;
}

}  // namespace

void* allocate_pinned(std::int64_t bytes) {
  if (!in_huge_pages(bytes)) return pinned_malloc(bytes);
  const std::size_t size = whole_pages(bytes);
  std::byte* const memory = map_huge_pages(bytes);
  const cudaError_t status =
      memory == nullptr ? cudaErrorMemoryAllocation : cudaHostRegister(memory, size, cudaHostRegisterPortable);
  if (memory != nullptr && status != cudaSuccess) munmap(memory, size);
  check_pinned(status, bytes);
  return memory;
}

void free_pinned(void* memory, std::int64_t bytes) {
  if (!in_huge_pages(bytes)) {
    cudaFreeHost(memory);
    return;
  }
  cudaHostUnregister(memory);
  munmap(memory, whole_pages(bytes));
}

}  // namespace kv4::cuda
