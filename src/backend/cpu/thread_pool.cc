#include "backend/cpu/thread_pool.h"

namespace kv4 {

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_part(int index) const {
  const std::int64_t begin = count_ * index / threads();
  const std::int64_t end = count_ * (index + 1) / threads();
  if (begin < end) call_(context_, begin, end, index);
}

void ThreadPool::dispatch(std::int64_t count, Call call, void* context) {
  {
    std::lock_guard lock(mutex_);
    call_ = call;
    context_ = context;
    count_ = count;
    running_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  start_.notify_all();
  run_part(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
}

void ThreadPool::work(int index) {
  std::int64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
    }
    run_part(index);
    std::lock_guard lock(mutex_);
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace kv4
