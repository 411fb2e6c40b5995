// The baseline of an operation: a copy of the same bytes in the same run on the same device.
#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "device_tensors.h"

namespace kv4::checks {

/// Seconds without the cost of reading the clock, which is a tenth of the shortest operations.
class Stopwatch {
 public:
  double seconds() const { return std::max(0.0, elapsed() - cost()); }

 private:
  using Clock = std::chrono::steady_clock;

  double elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  static double cost() {
    static const double least = [] {
      double found = 1;
      for (int i = 0; i < 1000; ++i) found = std::min(found, Stopwatch().elapsed());
      return found;
    }();
    return least;
  }

  Clock::time_point start_ = Clock::now();
};

/// Copies walk through buffers larger than any cache, so that neither side stays in it.
class CopyBaseline {
 public:
  CopyBaseline() = default;
  virtual ~CopyBaseline() = default;
  CopyBaseline(const CopyBaseline&) = delete;
  CopyBaseline& operator=(const CopyBaseline&) = delete;

  /// Seconds of a copy that touches `bytes`: it reads half of them and writes half.
  virtual double seconds(std::int64_t bytes) = 0;
};

/// memcpy on several threads. Its buffers are ordinary memory, like a caller's tensors. The cache's pools ask for huge
/// pages, so a copy within them can be faster.
class MemcpyBaseline final : public CopyBaseline {
 public:
  explicit MemcpyBaseline(int threads);
  ~MemcpyBaseline() override;

  double seconds(std::int64_t bytes) override;

 private:
  void help(std::size_t part);
  void copy_part(std::size_t part);
  void copy(std::size_t at, std::size_t size);

  std::vector<std::byte> from_, to_;
  std::size_t next_ = 0;

  // The current copy; written before gate_ opens, read by the helpers between its two phases.
  std::size_t at_ = 0, size_ = 0;
  bool stop_ = false;
  std::barrier<> gate_;
  std::vector<std::jthread> helpers_;
};

/// A copy within the backend's memory, timed by the host's clock from the call to its completion.
class DeviceCopyBaseline final : public CopyBaseline {
 public:
  explicit DeviceCopyBaseline(std::shared_ptr<Backend> backend);
  double seconds(std::int64_t bytes) override;

 private:
  std::shared_ptr<Backend> backend_;
  DeviceMemory from_, to_;
  std::int64_t next_ = 0;
};

}  // namespace kv4::checks
