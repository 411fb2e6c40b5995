#include "tier/disk_tier.h"

#include <algorithm>
#include <new>
#include <utility>

namespace kv4::tier {
namespace {

// Enough requests to be in flight together, few enough that a slow disk is noticed in time.
constexpr std::size_t kRequestsAtOnce = 64;

/// Passes parts of `requests` to `call` while there is time, and the rest to `late`, one by one.
template <class Request, class Call, class Late>
void in_parts(std::span<Request> requests, Clock& clock, Deadline deadline, Call&& call, Late&& late) {
  while (!requests.empty() && clock.now() < deadline) {
    const std::size_t count = std::min(requests.size(), kRequestsAtOnce);
    call(requests.first(count));
    requests = requests.subspan(count);
  }
  for (Request& request : requests) late(request);
}

}  // namespace

DiskTier::DiskTier(std::shared_ptr<FileSystem> files, const StoreOptions& options, std::shared_ptr<Clock> clock)
    : files_(std::move(files)),
      clock_(std::move(clock)),
      store_(DiskStore::open(*files_, options)),
      capacity_bytes_(options.capacity_bytes),
      read_threads_(options.read_threads) {}

DiskTier::~DiskTier() {
  try {
    (void)store_->close();
  } catch (const std::bad_alloc&) {  // as after a kill: flushed changes are durable
  }
}

void DiskTier::put(std::span<PutRequest> requests, Deadline deadline) {
  in_parts(
      requests, *clock_, deadline, [&](std::span<PutRequest> part) { store_->put(part); },
      [](PutRequest& request) { request.status = PutStatus::failed; });
}

void DiskTier::get(std::span<GetRequest> requests, Deadline deadline) {
  in_parts(
      requests, *clock_, deadline, [&](std::span<GetRequest> part) { store_->get(part); },
      [](GetRequest& request) {
        request.status = GetStatus::failed;
        request.bytes = 0;
      });
}

void DiskTier::exists(std::span<ExistsRequest> requests, Deadline deadline) {
  in_parts(
      requests, *clock_, deadline, [&](std::span<ExistsRequest> part) { store_->exists(part); },
      [](ExistsRequest& request) { request = {request.id}; });
}

bool DiskTier::look_up(std::span<ExistsRequest> requests) const {
  store_->exists(requests);
  return true;
}

void DiskTier::remove(std::span<RemoveRequest> requests, Deadline deadline) {
  in_parts(
      requests, *clock_, deadline,
      [&](std::span<RemoveRequest> part) {
        store_->remove(part);
        for (RemoveRequest& request : part) request.answered = true;
      },
      [](RemoveRequest& request) { request = {request.id}; });
}

FlushStatus DiskTier::flush(Deadline deadline) {
  return clock_->now() < deadline && store_->flush() ? FlushStatus::durable : FlushStatus::failed;
}

TierStats DiskTier::stats() {
  const StoreStats store = store_->stats();
  TierStats stats;
  stats.records = store.records;
  stats.payload_bytes = store.payload_bytes;
  stats.capacity_bytes = capacity_bytes_;
  stats.evicted_records = store.evicted_records;
  stats.set_aside_records = store.set_aside_records;
  stats.unauthenticated_records = store.unauthenticated_records;
  return stats;
}

}  // namespace kv4::tier
