// Times queued work by replaying it as a CUDA graph between two events. A sweep reads other memory before each replay,
// outside of the measured time, so that L2 holds none of the work's data.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace kv4::bench {

/// Throws std::runtime_error that names the failed call.
void check(cudaError_t status, const char* what);

class GraphTimer {
 public:
  /// Owns its stream and queues all measured work there. Takes several times L2's size of memory for the sweep.
  GraphTimer(int device, int repeats);
  ~GraphTimer();
  GraphTimer(const GraphTimer&) = delete;
  GraphTimer& operator=(const GraphTimer&) = delete;

  cudaStream_t stream() const { return stream_; }

  /// Median microseconds of one replay of the work that `record` queues. `before` and the sweep of L2 run before each
  /// replay and are not measured.
  double replay_us(const std::function<void()>& record, const std::function<void()>& before = {});
  /// Microseconds of the work that `work` queues, without a graph: for calls that cannot be captured. L2 is swept.
  double queue_us(const std::function<void()>& work);
  /// Number of nodes in a graph of that work.
  std::size_t count_nodes(const std::function<void()>& record);

 private:
  void sweep();
  cudaGraph_t capture(const std::function<void()>& record);
  double between_events(const std::function<void()>& work);

  int repeats_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
  void* swept_ = nullptr;  // [swept_bytes_], then a line that is never written
  std::int64_t swept_bytes_ = 0;
};

}  // namespace kv4::bench
