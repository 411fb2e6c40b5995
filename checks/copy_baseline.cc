#include "copy_baseline.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/backend.h"

namespace kv4::checks {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{192} << 20;
constexpr std::size_t kSmallBytes = std::size_t{1} << 20;  // not worth waking a thread for
constexpr std::size_t kLine = 64;

std::size_t round_to_lines(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

MemcpyBaseline::MemcpyBaseline(int threads)
    : from_(kBufferBytes, std::byte{1}), to_(kBufferBytes, std::byte{2}), gate_(threads) {
  for (int i = 1; i < threads; ++i) helpers_.emplace_back([this, i] { help(i); });
}

MemcpyBaseline::~MemcpyBaseline() {
  stop_ = true;
  if (!helpers_.empty()) gate_.arrive_and_wait();
}

void MemcpyBaseline::help(std::size_t part) {
  for (;;) {
    gate_.arrive_and_wait();
    if (stop_) return;
    copy_part(part);
    gate_.arrive_and_wait();
  }
}

void MemcpyBaseline::copy_part(std::size_t part) {
  const std::size_t piece = round_to_lines(size_ / (helpers_.size() + 1) + 1);
  const std::size_t begin = std::min(part * piece, size_), end = std::min(begin + piece, size_);
  std::memcpy(to_.data() + at_ + begin, from_.data() + at_ + begin, end - begin);
}

void MemcpyBaseline::copy(std::size_t at, std::size_t size) {
  if (helpers_.empty() || size < kSmallBytes) {
    std::memcpy(to_.data() + at, from_.data() + at, size);
    return;
  }
  at_ = at;
  size_ = size;
  gate_.arrive_and_wait();
  copy_part(0);
  gate_.arrive_and_wait();
}

double MemcpyBaseline::seconds(std::int64_t bytes) {
  double total = 0;
  for (std::size_t left = bytes / 2; left > 0;) {
    const std::size_t size = std::min(left, kBufferBytes);
    if (next_ + size > kBufferBytes) next_ = 0;
    const Stopwatch watch;
    copy(next_, size);
    total += watch.seconds();
    next_ += round_to_lines(size);
    left -= size;
  }
  return total;
}

DeviceCopyBaseline::DeviceCopyBaseline(std::shared_ptr<Backend> backend)
    : backend_(std::move(backend)),
      from_(backend_, static_cast<std::int64_t>(kBufferBytes)),
      to_(backend_, static_cast<std::int64_t>(kBufferBytes)) {
  backend_->fill(from_.data(), 0x5A, from_.bytes());
}

double DeviceCopyBaseline::seconds(std::int64_t bytes) {
  backend_->synchronize();
  const Stopwatch watch;
  for (std::int64_t left = bytes / 2; left > 0;) {
    const std::int64_t size = std::min(left, from_.bytes());
    if (next_ + size > from_.bytes()) next_ = 0;
    backend_->copy(to_.data() + next_, from_.data() + next_, size);
    next_ += static_cast<std::int64_t>(round_to_lines(size));
    left -= size;
  }
  backend_->synchronize();
  return watch.seconds();
}

}  // namespace kv4::checks
