#include "graph_timer.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "device_kernels.h"

namespace kv4::bench {
namespace {

constexpr int kWarmUps = 2;
/// A lightly loaded GPU takes some tens of milliseconds of load to reach its full clock: a prefill measured right after
/// decodes took 5 % longer.
constexpr double kWarmUpUs = 50e3;

constexpr std::int64_t kLeastSwept = std::int64_t{256} << 20;
constexpr int kSweptTimesL2 = 4, kLine = 256;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(fmt::format("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status)));
}

GraphTimer::GraphTimer(int device, int repeats) : repeats_(repeats) {
  check(cudaSetDevice(device), "cudaSetDevice");
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaEventCreate(&start_), "cudaEventCreate");
  check(cudaEventCreate(&stop_), "cudaEventCreate");
  int l2_bytes = 0;
  check(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
  swept_bytes_ = std::max(kLeastSwept, std::int64_t{l2_bytes} * kSweptTimesL2 / kLine * kLine);
  check(cudaMalloc(&swept_, static_cast<std::size_t>(swept_bytes_ + kLine)), "memory that sweeps L2");
  check(cudaMemsetAsync(swept_, 1, static_cast<std::size_t>(swept_bytes_ + kLine), stream_), "cudaMemsetAsync");
}

GraphTimer::~GraphTimer() {
  cudaFree(swept_);
  cudaEventDestroy(start_);
  cudaEventDestroy(stop_);
  cudaStreamDestroy(stream_);
}

void GraphTimer::sweep() {
  auto* const sink = reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(swept_) + swept_bytes_);
  check(read_all(swept_, swept_bytes_, sink, stream_), "a sweep of L2");
}

cudaGraph_t GraphTimer::capture(const std::function<void()>& record) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamSynchronize(stream_), "work queued before a capture");
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  try {
    record();
  } catch (...) {
    cudaStreamEndCapture(stream_, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
  return graph;
}

double GraphTimer::between_events(const std::function<void()>& work) {
  float ms = 0;
  check(cudaEventRecord(start_, stream_), "cudaEventRecord");
  work();
  check(cudaEventRecord(stop_, stream_), "cudaEventRecord");
  check(cudaEventSynchronize(stop_), "measured work");
  check(cudaEventElapsedTime(&ms, start_, stop_), "cudaEventElapsedTime");
  return static_cast<double>(ms) * 1e3;
}

double GraphTimer::replay_us(const std::function<void()>& record, const std::function<void()>& before) {
  cudaGraph_t graph = capture(record);
  cudaGraphExec_t replay = nullptr;
  const cudaError_t made = cudaGraphInstantiate(&replay, graph, 0);
  cudaGraphDestroy(graph);
  check(made, "cudaGraphInstantiate");
  const auto run = [&] {
    if (before) before();
    sweep();
    return between_events([&] { check(cudaGraphLaunch(replay, stream_), "cudaGraphLaunch"); });
  };
  double warm_us = 0;
  std::vector<double> times;
  try {
    for (int i = 0; i < kWarmUps || warm_us < kWarmUpUs; ++i) warm_us += run();
    for (int i = 0; i < repeats_; ++i) times.push_back(run());
  } catch (...) {
    cudaGraphExecDestroy(replay);
    throw;
  }
  check(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
  return median(times);
}

double GraphTimer::queue_us(const std::function<void()>& work) {
  std::vector<double> times;
  for (int i = -kWarmUps; i < repeats_; ++i) {
    sweep();
    check(cudaStreamSynchronize(stream_), "work queued before");
    const double us = between_events(work);
    if (i >= 0) times.push_back(us);
  }
  return median(times);
}

std::size_t GraphTimer::count_nodes(const std::function<void()>& record) {
  cudaGraph_t graph = capture(record);
  std::size_t count = 0;
  const cudaError_t counted = cudaGraphGetNodes(graph, nullptr, &count);
  cudaGraphDestroy(graph);
  check(counted, "cudaGraphGetNodes");
  return count;
}

}  // namespace kv4::bench
