// A call that is made of several calls of a cache is one call of it, too.
#pragma once

#include <chrono>
#include <exception>

#include "base/internal_key.h"
#include "cache/manager_impl.h"

namespace kv4 {

/// OneThread::Call of the cache.
struct CacheCall : OneThread::Call {
  explicit CacheCall(const KVCacheManager& cache) : Call(cache.impl(InternalKey()).driver) {}
};

/// A call of the cache; its time counts when it returns, not when it throws.
class TimedCall {
 public:
  TimedCall(const KVCacheManager& cache, TimeHistogram CallTimes::*times)
      : call_(cache.impl(InternalKey()).driver), times_(cache.impl(InternalKey()).times.*times) {}
  ~TimedCall() {
    if (std::uncaught_exceptions() == exceptions_) times_.add(std::chrono::steady_clock::now() - start_);
  }
  TimedCall(const TimedCall&) = delete;
  TimedCall& operator=(const TimedCall&) = delete;

 private:
  const OneThread::Call call_;  // first: the histogram is this thread's from here on
  TimeHistogram& times_;
  const int exceptions_ = std::uncaught_exceptions();
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// The same, counted where it is a shortage.
template <class T>
Expected<T> counted(Expected<T> value, ShortageCounts& counts) {
  counts.requests += value.error() == Shortage::requests;
  counts.blocks += value.error() == Shortage::blocks;
  counts.slots += value.error() == Shortage::slots;
  return value;
}

}  // namespace kv4
