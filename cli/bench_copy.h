// What an operation is compared with: memcpy of the same bytes, in the same run, on as many threads.
#pragma once

#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace kv4::cli {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

/// Copies walk through buffers larger than any cache, so that neither side lives in it. They are ordinary memory, as a
/// caller's tensors are; the cache's pools ask for huge pages, so that a copy within them can be faster than this.
class CopyBaseline {
 public:
  explicit CopyBaseline(int threads);
  ~CopyBaseline();
  CopyBaseline(const CopyBaseline&) = delete;
  CopyBaseline& operator=(const CopyBaseline&) = delete;

  /// Seconds of a memcpy that touches `bytes`: half of them read, half written.
  double seconds(std::int64_t bytes);

 private:
  void help(std::size_t part);
  void copy_part(std::size_t part);
  void copy(std::size_t at, std::size_t size);

  std::vector<std::byte> from_, to_;
  std::size_t next_ = 0;

  // The copy under way; written before gate_ opens, read by the helpers between its two phases.
  std::size_t at_ = 0, size_ = 0;
  bool stop_ = false;
  std::barrier<> gate_;
  std::vector<std::jthread> helpers_;
};

}  // namespace kv4::cli
