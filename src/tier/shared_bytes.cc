#include "tier/shared_bytes.h"

#include <new>

namespace kv4::tier {
namespace {

constexpr std::int64_t kGranule = 4096;
constexpr std::align_val_t kAlignment{4096};  // for reads past the page cache

}  // namespace

BytesPool::~BytesPool() {
  for (const auto& [bytes, buffers] : free_)
    for (std::byte* buffer : buffers) ::operator delete(buffer, kAlignment);
}

SharedBytes BytesPool::take(std::size_t size) try {
  const std::int64_t bytes = (static_cast<std::int64_t>(size) + kGranule - 1) / kGranule * kGranule;
  if (bytes == 0) return {std::shared_ptr<std::byte[]>(new std::byte[1]), 0};
  std::byte* buffer = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.find(bytes); found != free_.end() && !found->second.empty()) {
      buffer = found->second.back();
      found->second.pop_back();
    } else {
      if (bytes > max_bytes_) return {};
      free_others(bytes);
      if (allocated_bytes_ + bytes > max_bytes_) return {};
      buffer = static_cast<std::byte*>(::operator new(bytes, kAlignment, std::nothrow));
      if (buffer == nullptr) return {};
      allocated_bytes_ += bytes;
    }
  }
  return {std::shared_ptr<std::byte[]>(buffer,
                                       [pool = shared_from_this(), bytes](std::byte* b) { pool->give_back(b, bytes); }),
          size};
} catch (const std::bad_alloc&) {  // counts as exhausted
  return {};
}

std::int64_t BytesPool::allocated_bytes() const {
  const std::lock_guard lock(mutex_);
  return allocated_bytes_;
}

void BytesPool::give_back(std::byte* buffer, std::int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    free_[bytes].push_back(buffer);
  } catch (const std::bad_alloc&) {  // no memory for its entry in free_
    ::operator delete(buffer, kAlignment);
    allocated_bytes_ -= bytes;
  }
}

void BytesPool::free_others(std::int64_t needed) {
  for (auto at = free_.begin(); at != free_.end() && allocated_bytes_ + needed > max_bytes_;) {
    while (!at->second.empty() && allocated_bytes_ + needed > max_bytes_) {
      ::operator delete(at->second.back(), kAlignment);
      at->second.pop_back();
      allocated_bytes_ -= at->first;
    }
    at = at->second.empty() ? free_.erase(at) : std::next(at);
  }
}

}  // namespace kv4::tier
