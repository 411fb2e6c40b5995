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

/// How often this process is the child of a fork().
std::uint32_t num_forks() {
  static std::atomic<std::uint32_t> forks = 0;
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  return forks.load(std::memory_order_relaxed);
}

}  // namespace

/// The workers, and what they share with the caller.
struct ThreadPool::Crew {
  explicit Crew(int threads) : num_threads(threads) {
    try {
      workers.reserve(static_cast<std::size_t>(threads - 1));
      for (int i = 1; i < threads; ++i) workers.emplace_back([this, i] { work(i); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~Crew() { end(); }

  void end() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    start.notify_all();
    for (std::thread& worker : workers) worker.join();
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
  std::vector<std::thread> workers;
  std::int64_t generation = 0;
  int running = 0;
  bool stop = false;
  Call call = nullptr;
  void* context = nullptr;
  std::int64_t count = 0;
};

std::unique_ptr<ThreadPool::Crew> ThreadPool::make_crew() const try {
  return std::make_unique<Crew>(threads_);
} catch (const std::bad_alloc&) {
  fail_for_memory();
} catch (const std::system_error& e) {
  fail(ErrorCode::out_of_memory, "the system refused one of {} threads: {}; make the backend with fewer", threads_,
       e.what());
}

ThreadPool::ThreadPool(int threads) : threads_(threads), forks_(num_forks()), crew_(make_crew()) {}

ThreadPool::~ThreadPool() { leave_forked(); }

// The threads are the parent's: nobody here can end them, and the mutex may be held for ever. What the crew has stays.
void ThreadPool::leave_forked() {
  if (forks_ != num_forks()) (void)crew_.release();
}

void ThreadPool::dispatch(std::int64_t count, Call call, void* context) {
  if (forks_ != num_forks()) {
    std::unique_ptr<Crew> crew = make_crew();
    leave_forked();
    crew_ = std::move(crew);
    forks_ = num_forks();
  }
  Crew& crew = *crew_;
  {
    const std::lock_guard lock(crew.mutex);
    crew.call = call;
    crew.context = context;
    crew.count = count;
    crew.running = threads_ - 1;
    ++crew.generation;
  }
  crew.start.notify_all();
  crew.run_part(0);
  std::unique_lock lock(crew.mutex);
  crew.done.wait(lock, [&] { return crew.running == 0; });
}

}  // namespace kv4
