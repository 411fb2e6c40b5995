#include "backend/cpu/cpu_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/check.h"
#include "kv4/backend.h"
#include "ops/expand_step.h"

namespace kv4 {

std::shared_ptr<Backend> make_cpu_backend(int threads) {
  return cpu::make_cpu_backend_on(threads, cpu::best_row_kernels());
}

const char* cpu_target() { return cpu::best_row_kernels().name; }

namespace cpu {

std::shared_ptr<Backend> make_cpu_backend_on(int threads, const RowKernels& kernels) {
  require(threads >= 1 && threads <= 1024, ErrorCode::bad_argument, "threads is {}; it must be from 1 to 1024",
          threads);
  try {
    return std::make_shared<CpuBackend>(threads, kernels);
  } catch (const std::bad_alloc&) {
    fail_for_memory();
  }
}

std::byte* CpuBackend::allocate(std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(memory != MAP_FAILED, ErrorCode::out_of_memory,
          "the system refused {} bytes; ask for fewer blocks, requests or step tokens", bytes);
  constexpr std::int64_t kHugePage = 2 << 20;
  if (bytes >= 16 * kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);  // only advice: fewer page walks
  return static_cast<std::byte*>(memory);
}

void CpuBackend::deallocate(std::byte* memory, std::int64_t bytes) {
  if (memory != nullptr) munmap(memory, bytes);
}

void CpuBackend::fit_buffers(int width, int num_sources, int attend_heads) {
  try {
    for (RowBuffers& b : buffers_) b.fit(width, num_sources);
    if (attend_heads > 0)
      for (AttendBuffers& b : attend_buffers_) b.fit(attend_heads, width);
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::out_of_memory, "the system refused the memory for rows of {} channels", width);
  }
}

void CpuBackend::copy(std::byte* to, const std::byte* from, std::int64_t bytes) { std::memcpy(to, from, bytes); }

void CpuBackend::fill(std::byte* memory, std::uint8_t value, std::int64_t bytes) { std::memset(memory, value, bytes); }

void CpuBackend::copy_pieces(std::span<const ops::CopyPiece> pieces) {
  for (const ops::CopyPiece& p : pieces) std::memcpy(p.to, p.source(), p.bytes);
}

void CpuBackend::read_pieces(std::span<const ops::CopyPiece> pieces, std::span<std::byte> host) {
  if (host.empty()) return;  // a model without entries has empty blocks
  std::uint8_t* at = reinterpret_cast<std::uint8_t*>(host.data());
  std::uint8_t* const end = at + host.size();
  for (const ops::CopyPiece& p : pieces) {
    std::memset(at, 0, p.to - at);
    at = p.to + p.bytes;
  }
  std::memset(at, 0, end - at);
  copy_pieces(pieces);
}

void CpuBackend::update_step(const ops::StepUpdate& update) {
  const ops::StepTableDesc& t = update.tables;
  for (std::int32_t i = 0; i < update.num_ranges; ++i) {
    const ops::BlockRange& r = update.ranges[i];
    std::copy_n(update.block_ids + r.first_value, r.count,
                t.block_table + std::int64_t{r.row} * t.blocks_per_request + r.begin);
  }
  for (std::int32_t i = 0; i < update.num_items; ++i) {
    const ops::StepRecord& item = t.items[i] = update.items[i];
    const std::int32_t begin = update.window_begins == nullptr ? 0 : update.window_begins[i];
    ops::write_item_arrays(t, item, i, begin);
    std::int32_t* positions = t.ring_positions + std::int64_t{i} * t.ring_rows;
    const std::int32_t end = item.padded() ? 0 : item.end(), head = t.ring_heads[i], ring_rows = t.ring_rows;
    for (std::int32_t r = 0; r < ring_rows; ++r) positions[r] = ops::ring_position(end, head, ring_rows, r, begin);
    for (std::int32_t token = item.first_token; token < item.first_token + item.count; ++token)
      t.tokens[token] = ops::token_record(t, item, token);
  }
}

}  // namespace cpu
}  // namespace kv4
