#include "support/refused_memory.h"

#include <atomic>
#include <new>

#include "support/sanitized.h"

namespace {

std::atomic<std::int64_t> live{0}, seen{0}, refused_at{0};
std::atomic<bool> all_later{false}, all_threads{false}, has_happened{false};
thread_local bool own_thread = false, free_thread = false;

bool refuse() {
  const std::int64_t at = refused_at.load(std::memory_order_relaxed);
  if (at == 0 || free_thread || (!own_thread && !all_threads.load(std::memory_order_relaxed))) return false;
  const std::int64_t number = seen.fetch_add(1, std::memory_order_relaxed) + 1;
  if (number != at && !(all_later.load(std::memory_order_relaxed) && number > at)) return false;
  has_happened = true;
  return true;
}

void* counted(void* memory) {
  if (memory != nullptr) live.fetch_add(1, std::memory_order_relaxed);
  return memory;
}

void* allocate(std::size_t size) noexcept { return refuse() ? nullptr : counted(std::malloc(size == 0 ? 1 : size)); }

void* allocate(std::size_t size, std::align_val_t alignment) noexcept {
  void* memory = nullptr;
  if (refuse() || ::posix_memalign(&memory, static_cast<std::size_t>(alignment), size) != 0) return nullptr;
  return counted(memory);
}

void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void release(void* memory) noexcept {
  if (memory == nullptr) return;
  live.fetch_sub(1, std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace

void* operator new(std::size_t size) { return or_throw(allocate(size)); }
void* operator new[](std::size_t size) { return or_throw(allocate(size)); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocate(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return allocate(size); }
void* operator new(std::size_t size, std::align_val_t a) { return or_throw(allocate(size, a)); }
void* operator new[](std::size_t size, std::align_val_t a) { return or_throw(allocate(size, a)); }
void* operator new(std::size_t size, std::align_val_t a, const std::nothrow_t&) noexcept { return allocate(size, a); }
void* operator new[](std::size_t size, std::align_val_t a, const std::nothrow_t&) noexcept { return allocate(size, a); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t, const std::nothrow_t&) noexcept { release(memory); }
void operator delete[](void* memory, std::align_val_t, const std::nothrow_t&) noexcept { release(memory); }

#if !KV4_SANITIZED
extern "C" void* __libc_memalign(std::size_t alignment, std::size_t size);
extern "C" void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  return refuse() ? nullptr : __libc_memalign(alignment, size);
}
#endif

namespace kv4::test {

std::int64_t live_allocations() { return live; }

RefusedMemory::RefusedMemory(std::int64_t n, Refused refused, Threads threads) {
  own_thread = true;
  all_threads = threads == Threads::all;
  all_later = refused == Refused::all_later;
  has_happened = false;
  seen = 0;
  refused_at = n;
}

RefusedMemory::~RefusedMemory() {
  refused_at = 0;
  own_thread = false;
}

bool RefusedMemory::happened() const { return has_happened; }

FreeMemory::FreeMemory() { free_thread = true; }
FreeMemory::~FreeMemory() { free_thread = false; }

}  // namespace kv4::test
