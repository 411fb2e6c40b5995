// A foreign tier in a map. A test can read and write it past the cache and make it report false lengths.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kv4/tier.h"

namespace kv4::test {

class OpenTier final : public tier::Tier {
 public:
  using Value = std::vector<std::byte>;

  /// The stored bytes; empty: none.
  Value value(const tier::RecordId& id) {
    const std::lock_guard lock(mutex_);
    const auto found = records_.find(place(id));
    return found == records_.end() ? Value() : found->second;
  }
  void plant(const tier::RecordId& id, Value value) {
    const std::lock_guard lock(mutex_);
    records_[place(id)] = std::move(value);
  }
  /// The length that get() reports for every record.
  void lie(std::optional<std::int64_t> bytes) { lie_ = bytes; }
  /// Gives views of its own memory where the request allows it.
  void give_views(bool on) { views_ = on; }

  const char* name() const override { return "mine"; }
  void put(std::span<tier::PutRequest> requests, tier::Deadline) override {
    for (tier::PutRequest& request : requests) {
      plant(request.id, {request.payload.begin(), request.payload.end()});
      request.status = tier::PutStatus::stored;
    }
  }
  void get(std::span<tier::GetRequest> requests, tier::Deadline) override {
    for (tier::GetRequest& request : requests) {
      const Value found = value(request.id);
      request.status = tier::GetStatus::missing;
      if (found.empty()) continue;
      request.bytes = static_cast<std::int64_t>(found.size());
      request.status = tier::GetStatus::too_small;
      if (views_ && request.view_allowed) {
        request.view = std::make_shared<std::byte[]>(found.size());
        std::copy(found.begin(), found.end(), request.view.get());
      } else if (found.size() > request.to.size()) {
        continue;
      } else {
        std::copy(found.begin(), found.end(), request.to.begin());
      }
      request.status = tier::GetStatus::found;
      if (lie_) request.bytes = *lie_;
    }
  }
  void exists(std::span<tier::ExistsRequest> requests, tier::Deadline) override {
    for (tier::ExistsRequest& request : requests) {
      const Value found = value(request.id);
      request.answered = true;
      request.bytes = found.empty() ? -1 : static_cast<std::int64_t>(found.size());
    }
  }
  void remove(std::span<tier::RemoveRequest> requests, tier::Deadline) override {
    const std::lock_guard lock(mutex_);
    for (tier::RemoveRequest& request : requests) {
      request.removed = records_.erase(place(request.id)) == 1;
      request.answered = true;
    }
  }
  tier::FlushStatus flush(tier::Deadline) override { return tier::FlushStatus::kept; }
  tier::TierStats stats() override {
    const std::lock_guard lock(mutex_);
    tier::TierStats stats;
    for (const auto& [id, value] : records_) ++stats.records, stats.payload_bytes += std::ssize(value);
    return stats;
  }

 private:
  static std::pair<std::uint64_t, tier::Key> place(const tier::RecordId& id) { return {id.tenant, id.key}; }

  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, tier::Key>, Value> records_;
  std::optional<std::int64_t> lie_;
  bool views_ = false;
};

}  // namespace kv4::test
