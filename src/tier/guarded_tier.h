// Protects the records of a caller's tier as kv4's own tiers do. The inner tier stores header and payload as one
// payload. A record that it returns counts only if one of the cache's keys made it; without keys, if its digests are
// right. The record is copied before it is checked: where the inner tier gives views, others may write to that memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kv4/tier.h"
#include "tier/record_guard.h"

namespace kv4::tier {

class GuardedTier final : public Tier {
 public:
  GuardedTier(std::shared_ptr<Tier> inner, std::shared_ptr<const RecordGuard> guard, std::uint64_t layout_id);

  const char* name() const override { return inner_->name(); }
  int read_threads() const override { return inner_->read_threads(); }
  int read_batch() const override { return inner_->read_batch(); }
  void put(std::span<PutRequest> requests, Deadline deadline) override;
  void get(std::span<GetRequest> requests, Deadline deadline) override;
  void exists(std::span<ExistsRequest> requests, Deadline deadline) override;
  bool look_up(std::span<ExistsRequest> requests) const override;
  void remove(std::span<RemoveRequest> requests, Deadline deadline) override { inner_->remove(requests, deadline); }
  FlushStatus flush(Deadline deadline) override { return inner_->flush(deadline); }
  TierStats stats() override;
  TierFailure failure() const override { return inner_->failure(); }

 private:
  /// Opens the value that the inner tier found for the request.
  void take(GetRequest& request, std::span<const std::byte> value);

  std::shared_ptr<Tier> inner_;
  std::shared_ptr<const RecordGuard> guard_;
  const std::uint64_t layout_id_;
  std::uint64_t next_sequence_ = 0;
  std::atomic<std::int64_t> unauthenticated_records_{0}, forged_records_{0};
};

}  // namespace kv4::tier
