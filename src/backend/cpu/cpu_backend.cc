#include "backend/cpu/cpu_backend.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "base/check.h"
#include "kv4/backend.h"

namespace kv4 {

std::shared_ptr<Backend> make_cpu_backend(int threads) {
  return cpu::make_cpu_backend_on(threads, cpu::best_row_kernels());
}

const char* cpu_target() { return cpu::best_row_kernels().name; }

namespace cpu {

std::shared_ptr<Backend> make_cpu_backend_on(int threads, const RowKernels& kernels) {
  require(threads >= 1 && threads <= 1024, ErrorCode::bad_argument, "threads is {}; it must be from 1 to 1024",
          threads);
  return std::make_shared<CpuBackend>(threads, kernels);
}

std::byte* CpuBackend::allocate(std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  void* memory = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(memory != MAP_FAILED, ErrorCode::out_of_memory,
          "the system refused {} bytes; ask for fewer blocks, requests or step tokens", bytes);
  constexpr std::int64_t kHugePage = 2 << 20;
  if (bytes >= 16 * kHugePage)
    madvise(memory, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);  // advice: fewer page walks
  return static_cast<std::byte*>(memory);
}

void CpuBackend::deallocate(std::byte* memory, std::int64_t bytes) {
  if (memory != nullptr) munmap(memory, static_cast<std::size_t>(bytes));
}

void CpuBackend::fit_buffers(int width) {
  try {
    for (RowBuffers& b : buffers_) b.fit(width);
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::out_of_memory, "the system refused the memory for rows of {} channels", width);
  }
}

void CpuBackend::copy(std::byte* to, const std::byte* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void CpuBackend::fill(std::byte* memory, std::uint8_t value, std::int64_t bytes) {
  std::memset(memory, value, static_cast<std::size_t>(bytes));
}

}  // namespace cpu
}  // namespace kv4
