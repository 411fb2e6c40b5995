#include "bench_copy.h"

#include <algorithm>
#include <cstring>

namespace kv4::cli {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{192} << 20;
constexpr std::size_t kSmallBytes = std::size_t{1} << 20;  // not worth waking a thread for
constexpr std::size_t kLine = 64;

std::size_t round_to_lines(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

CopyBaseline::CopyBaseline(int threads)
    : from_(kBufferBytes, std::byte{1}), to_(kBufferBytes, std::byte{2}), gate_(threads) {
  for (int i = 1; i < threads; ++i) helpers_.emplace_back([this, i] { help(static_cast<std::size_t>(i)); });
}

CopyBaseline::~CopyBaseline() {
  stop_ = true;
  if (!helpers_.empty()) gate_.arrive_and_wait();
}

void CopyBaseline::help(std::size_t part) {
  for (;;) {
    gate_.arrive_and_wait();
    if (stop_) return;
    copy_part(part);
    gate_.arrive_and_wait();
  }
}

void CopyBaseline::copy_part(std::size_t part) {
  const std::size_t piece = round_to_lines(size_ / (helpers_.size() + 1) + 1);
  const std::size_t begin = std::min(part * piece, size_), end = std::min(begin + piece, size_);
  std::memcpy(to_.data() + at_ + begin, from_.data() + at_ + begin, end - begin);
}

void CopyBaseline::copy(std::size_t at, std::size_t size) {
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

double CopyBaseline::seconds(std::int64_t bytes) {
  double total = 0;
  for (std::size_t left = static_cast<std::size_t>(bytes) / 2; left > 0;) {
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

}  // namespace kv4::cli
