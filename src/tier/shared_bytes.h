// Bytes shared by several threads, and a pool of them: a late thread still has memory to write to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace kv4::tier {

/// Bytes with shared ownership. A caller that has handed them to a queue for a put does not change them any more.
struct SharedBytes {
  std::shared_ptr<std::byte[]> data;
  std::size_t size = 0;

  std::span<std::byte> span() const { return {data.get(), size}; }
  explicit operator bool() const { return data != nullptr; }
};

/// A pool of reusable buffers. Used and free buffers together never take more than `max_bytes`, each rounded up to a
/// multiple of 4,096. Any thread. Buffers may outlive their pool.
class BytesPool : public std::enable_shared_from_this<BytesPool> {
 public:
  static std::shared_ptr<BytesPool> make(std::int64_t max_bytes) {
    return std::shared_ptr<BytesPool>(new BytesPool(max_bytes));
  }
  ~BytesPool();
  BytesPool(const BytesPool&) = delete;
  BytesPool& operator=(const BytesPool&) = delete;

  /// Empty where the pool or the machine has no memory left.
  SharedBytes take(std::size_t size);
  std::int64_t allocated_bytes() const;

 private:
  explicit BytesPool(std::int64_t max_bytes) : max_bytes_(max_bytes) {}
  void give_back(std::byte* buffer, std::int64_t bytes) noexcept;
  void free_others(std::int64_t needed);

  const std::int64_t max_bytes_;
  mutable std::mutex mutex_;
  std::int64_t allocated_bytes_ = 0;
  std::map<std::int64_t, std::vector<std::byte*>> free_;  // by size
};

}  // namespace kv4::tier
