#include "bench_copy.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace kv4::cli {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{192} << 20;
constexpr std::size_t kPieceBytes = std::size_t{1} << 20;  // smaller ones are not worth a second thread
constexpr std::size_t kLine = 64;

}  // namespace

CopyBaseline::CopyBaseline(int threads) : threads_(threads), from_(kBufferBytes, std::byte{1}), to_(kBufferBytes, std::byte{2}) {}

void CopyBaseline::copy(std::size_t at, std::size_t size) {
  const std::size_t parts = std::clamp<std::size_t>(size / kPieceBytes, 1, static_cast<std::size_t>(threads_));
  const std::size_t part = (size / parts + kLine - 1) / kLine * kLine;
  const auto copy_part = [&](std::size_t i) {
    const std::size_t begin = std::min(i * part, size), end = std::min(begin + part, size);
    std::memcpy(to_.data() + at + begin, from_.data() + at + begin, end - begin);
  };
  std::vector<std::jthread> helpers;
  for (std::size_t i = 1; i < parts; ++i) helpers.emplace_back(copy_part, i);
  copy_part(0);
}

double CopyBaseline::seconds(std::int64_t bytes) {
  double total = 0;
  for (std::size_t left = static_cast<std::size_t>(bytes) / 2; left > 0;) {
    const std::size_t size = std::min(left, kBufferBytes);
    if (at_ + size > kBufferBytes) at_ = 0;
    const Stopwatch watch;
    copy(at_, size);
    total += watch.seconds();
    at_ += (size + kLine - 1) / kLine * kLine;
    left -= size;
  }
  return total;
}

}  // namespace kv4::cli
