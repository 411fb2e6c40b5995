// A fixed number of threads that divide a range. A thread's part depends only on the range and the number of threads;
// results do not depend on it.
#pragma once

#include <cstdint>
#include <memory>

namespace kv4 {

class ThreadPool {
 public:
  /// Throws Error(out_of_memory) if the system refuses a thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  /// Calls f(begin, end, worker) on disjoint parts of [0, count), worker in [0, threads()), 0 being the caller. Returns
  /// when all parts are done. f must not throw. Ranges of at most `grain` stay on one thread. A child of fork() has
  /// none of the parent's threads; its first call makes new threads.
  template <class F>
  void run(std::int64_t count, std::int64_t grain, F&& f) {
    if (count <= 0) return;
    if (threads_ == 1 || count <= grain) return f(std::int64_t{0}, count, 0);
    dispatch(
        count,
        [](void* context, std::int64_t begin, std::int64_t end, int worker) {
          (*static_cast<F*>(context))(begin, end, worker);
        },
        &f);
  }

 private:
  using Call = void (*)(void* context, std::int64_t begin, std::int64_t end, int worker);
  struct Workers;
  std::unique_ptr<Workers> make_workers() const;
  void dispatch(std::int64_t count, Call call, void* context);
  void leave_forked();

  const int threads_;
  std::uint32_t forks_;  // num_forks() when the workers were made
  std::unique_ptr<Workers> workers_;
};

}  // namespace kv4
