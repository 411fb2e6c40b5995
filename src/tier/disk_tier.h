// A disk store as a tier. A system call takes no deadline, so a batch goes to the store in parts, with a look at the
// clock between them.
#pragma once

#include <memory>

#include "kv4/tier.h"
#include "tier/clock.h"
#include "tier/disk_store.h"

namespace kv4::tier {

class DiskTier final : public Tier {
 public:
  /// Throws as DiskStore::open().
  DiskTier(std::shared_ptr<FileSystem> files, const StoreOptions& options, std::shared_ptr<Clock> clock);
  /// Closes the store, which makes puts and removes durable unless the disk fails.
  ~DiskTier() override;

  const char* name() const override { return "disk"; }
  int read_threads() const override { return read_threads_; }
  void put(std::span<PutRequest> requests, Deadline deadline) override;
  void get(std::span<GetRequest> requests, Deadline deadline) override;
  void exists(std::span<ExistsRequest> requests, Deadline deadline) override;
  bool look_up(std::span<ExistsRequest> requests) const override;
  void remove(std::span<RemoveRequest> requests, Deadline deadline) override;
  FlushStatus flush(Deadline deadline) override;
  TierStats stats() override;

 private:
  std::shared_ptr<FileSystem> files_;
  std::shared_ptr<Clock> clock_;
  std::unique_ptr<DiskStore> store_;
  std::int64_t capacity_bytes_;
  int read_threads_;
};

}  // namespace kv4::tier
