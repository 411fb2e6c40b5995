// A tier in a map that a test controls: it fails, hangs, or takes time on a manual clock.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <vector>

#include "kv4/tier.h"
#include "support/manual_clock.h"

namespace kv4::test {

class FakeTier final : public tier::Tier {
 public:
  explicit FakeTier(std::shared_ptr<ManualClock> clock, int read_threads = 1, int read_batch = 0)
      : clock_(std::move(clock)), read_threads_(read_threads), read_batch_(read_batch) {}

  // Callable from any thread.
  void fail(bool on) {
    set([&] { failing_ = on; });
  }
  void take_time(tier::Duration time) {
    set([&] { call_time_ = time; });
  }
  enum class Held { nothing, writes, all };
  /// Calls do not return before release().
  void hold(Held what = Held::all) {
    set([&] { held_ = what; });
  }
  void release() { hold(Held::nothing); }
  void wait_for_calls(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return calls_ >= count; });
  }
  int calls() {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  std::vector<std::size_t> batches() {
    const std::lock_guard lock(mutex_);
    return batches_;
  }

  const char* name() const override { return "fake"; }
  int read_threads() const override { return read_threads_; }
  int read_batch() const override { return read_batch_; }
  void put(std::span<tier::PutRequest> requests, tier::Deadline) override {
    const bool good = begin(requests.size(), false);
    const std::lock_guard lock(mutex_);
    for (tier::PutRequest& request : requests) {
      if (good) records_[key(request.id)].assign(request.payload.begin(), request.payload.end());
      request.status = good ? tier::PutStatus::stored : tier::PutStatus::failed;
    }
  }
  void get(std::span<tier::GetRequest> requests, tier::Deadline) override {
    const bool good = begin(requests.size(), true);
    const std::lock_guard lock(mutex_);
    for (tier::GetRequest& request : requests) {
      request.status = good ? tier::GetStatus::missing : tier::GetStatus::failed;
      const auto found = records_.find(key(request.id));
      if (!good || found == records_.end()) continue;
      request.bytes = static_cast<std::int64_t>(found->second.size());
      request.status = tier::GetStatus::too_small;
      if (found->second.size() > request.to.size()) continue;
      std::copy(found->second.begin(), found->second.end(), request.to.begin());
      request.status = tier::GetStatus::found;
    }
  }
  void exists(std::span<tier::ExistsRequest> requests, tier::Deadline) override {
    const bool good = begin(requests.size(), true);
    const std::lock_guard lock(mutex_);
    for (tier::ExistsRequest& request : requests) {
      request.answered = good;
      if (const auto found = records_.find(key(request.id)); good && found != records_.end())
        request.bytes = static_cast<std::int64_t>(found->second.size());
    }
  }
  void remove(std::span<tier::RemoveRequest> requests, tier::Deadline) override {
    const bool good = begin(requests.size(), false);
    const std::lock_guard lock(mutex_);
    for (tier::RemoveRequest& request : requests) {
      request.answered = good;
      request.removed = good && records_.erase(key(request.id)) == 1;
    }
  }
  tier::FlushStatus flush(tier::Deadline) override {
    return begin(0, false) ? tier::FlushStatus::durable : tier::FlushStatus::failed;
  }
  tier::TierStats stats() override {
    const std::lock_guard lock(mutex_);
    tier::TierStats stats;
    stats.records = static_cast<std::int64_t>(records_.size());
    return stats;
  }

 private:
  template <class Change>
  void set(Change&& change) {
    const std::lock_guard lock(mutex_);
    change();
    changed_.notify_all();
  }
  bool begin(std::size_t requests, bool reads) {
    std::unique_lock lock(mutex_);
    ++calls_;
    batches_.push_back(requests);
    changed_.notify_all();
    changed_.wait(lock, [&] { return held_ == Held::nothing || (reads && held_ == Held::writes); });
    clock_->advance(call_time_);
    return !failing_;
  }
  static std::pair<std::uint64_t, tier::Key> key(const tier::RecordId& id) { return {id.tenant, id.key}; }

  std::shared_ptr<ManualClock> clock_;
  const int read_threads_, read_batch_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool failing_ = false;
  Held held_ = Held::nothing;
  tier::Duration call_time_{0};
  int calls_ = 0;
  std::vector<std::size_t> batches_;
  std::map<std::pair<std::uint64_t, tier::Key>, std::vector<std::byte>> records_;
};

}  // namespace kv4::test
