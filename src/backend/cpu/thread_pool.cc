#include "backend/cpu/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/check.h"

namespace kv4 {
namespace {

/// The number of forks between the first process and this one.
std::uint32_t num_forks() {
  static std::atomic<std::uint32_t> forks = 0;
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  return forks.load(std::memory_order_relaxed);
}

}  // namespace

/// The worker threads, and their state shared with the caller.
struct ThreadPool::Workers {
  explicit Workers(int n) : num_threads(n) {
    try {
      threads.reserve(num_threads - 1);
      for (int i = 1; i < num_threads; ++i) threads.emplace_back([this, i] { work(i); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~Workers() { end(); }

  void end() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    start.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void run_part(int index) const {
    const std::int64_t begin = count * index / num_threads;
    const std::int64_t end = count * (index + 1) / num_threads;
    if (begin < end) call(context, begin, end, index);
  }

  void work(int index) {
    std::int64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex);
        start.wait(lock, [&] { return stop || generation != seen; });
        if (stop) return;
        seen = generation;
      }
      run_part(index);
      const std::lock_guard lock(mutex);
      if (--running == 0) done.notify_one();
    }
  }

  const int num_threads;
  std::mutex mutex;
  std::condition_variable start, done;
  std::vector<std::thread> threads;
  std::int64_t generation = 0;
  int running = 0;
  bool stop = false;
  Call call = nullptr;
  void* context = nullptr;
  std::int64_t count = 0;
};

std::unique_ptr<ThreadPool::Workers> ThreadPool::make_workers() const try {
  return std::make_unique<Workers>(threads_);
} catch (const std::bad_alloc&) {
  fail_for_memory();
} catch (const std::system_error& e) {
  fail(ErrorCode::out_of_memory, "the system refused one of {} threads: {}; make the backend with fewer", threads_,
       e.what());
}

ThreadPool::ThreadPool(int threads) : threads_(threads), forks_(num_forks()), workers_(make_workers()) {}

ThreadPool::~ThreadPool() { leave_forked(); }

// The threads belong to the parent: this process cannot end them, and the mutex may be locked for ever. The workers'
// memory is leaked.
void ThreadPool::leave_forked() {
  if (forks_ != num_forks()) (void)workers_.release();
}

void ThreadPool::dispatch(std::int64_t count, Call call, void* context) {
  if (forks_ != num_forks()) {
    std::unique_ptr<Workers> workers = make_workers();
    leave_forked();
    workers_ = std::move(workers);
    forks_ = num_forks();
  }
  Workers& workers = *workers_;
  {
    const std::lock_guard lock(workers.mutex);
    workers.call = call;
    workers.context = context;
    workers.count = count;
    workers.running = threads_ - 1;
    ++workers.generation;
  }
  workers.start.notify_all();
  workers.run_part(0);
  std::unique_lock lock(workers.mutex);
  workers.done.wait(lock, [&] { return workers.running == 0; });
}

}  // namespace kv4
