// What an operation is compared with: memcpy of the same bytes, in the same run, on as many threads.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv4::cli {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

/// Copies walk through buffers larger than any cache, so that neither side lives in it.
class CopyBaseline {
 public:
  explicit CopyBaseline(int threads);
  /// Seconds of a memcpy that touches `bytes`: half of them read, half written.
  double seconds(std::int64_t bytes);

 private:
  void copy(std::size_t at, std::size_t size);

  int threads_;
  std::vector<std::byte> from_, to_;
  std::size_t at_ = 0;
};

}  // namespace kv4::cli
