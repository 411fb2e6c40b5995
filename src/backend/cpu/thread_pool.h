// A fixed number of threads that share a range. What a thread gets depends only on the range and the count, and no
// result depends on that.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace kv4 {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls f(begin, end, worker) on disjoint parts of [0, count), worker in [0, threads()), 0 being the caller; returns
  /// when all are done. f must not throw. Ranges below `grain` stay on one thread.
  template <class F>
  void run(std::int64_t count, std::int64_t grain, F&& f) {
    if (count <= 0) return;
    if (workers_.empty() || count <= grain) return f(std::int64_t{0}, count, 0);
    dispatch(
        count,
        [](void* context, std::int64_t begin, std::int64_t end, int worker) {
          (*static_cast<F*>(context))(begin, end, worker);
        },
        &f);
  }

 private:
  using Call = void (*)(void* context, std::int64_t begin, std::int64_t end, int worker);
  void dispatch(std::int64_t count, Call call, void* context);
  void work(int index);
  void run_part(int index) const;

  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::vector<std::thread> workers_;
  std::int64_t generation_ = 0;
  int running_ = 0;
  bool stop_ = false;
  Call call_ = nullptr;
  void* context_ = nullptr;
  std::int64_t count_ = 0;
};

}  // namespace kv4
