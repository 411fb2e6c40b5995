// A fixed number of threads that share a range. What a thread gets depends only on the range and the count, and no
// result depends on that.
#pragma once

#include <cstdint>
#include <memory>

namespace kv4 {

class ThreadPool {
 public:
  /// Throws Error(out_of_memory) where the system refuses a thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  /// Calls f(begin, end, worker) on disjoint parts of [0, count), worker in [0, threads()), 0 being the caller; returns
  /// when all are done. f must not throw. Ranges below `grain` stay on one thread. In the child of a fork(), which has
  /// none of the parent's threads, the first call makes new ones.
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
  struct Crew;
  std::unique_ptr<Crew> make_crew() const;
  void dispatch(std::int64_t count, Call call, void* context);
  void leave_forked();

  const int threads_;
  std::uint32_t forks_;  // of the process, when the crew was made
  std::unique_ptr<Crew> crew_;
};

}  // namespace kv4
