// A place below the device that keeps records by tenant and key: host memory, a disk, a cluster of servers.
//
// Promises of every tier:
//   1. What get() gives are exactly the bytes of one put() of that tenant and key and of the tier's layout, and never
//      those of a put before the newest one that was `stored`. They are checked on every read; anything else is a miss.
//   2. No call throws, but for want of memory.
//   3. No call goes on much longer than its deadline, as far as the operating system lets it: what has no answer by
//   then
//      is `failed` or not `answered`. A put that failed may yet be there, whole; see TierQueue for what follows.
//
// Calls block, but for look_up(). One thread at a time puts, removes, flushes and asks for stats(); beside it another
// may get and ask what exists; TierQueue gives each tier two of its own.
#pragma once

#include <cstdint>
#include <span>

#include "tier/clock.h"
#include "tier/requests.h"

namespace kv4::tier {

enum class FlushStatus : std::uint8_t {
  failed,  // not known
  kept,    // the tier has everything that was stored, until the machine or server that keeps it goes away
  durable  // ... and it stays, whatever is killed or loses power
};

struct TierStats {
  static constexpr std::int64_t kUnknown = -1;
  std::int64_t records = 0, payload_bytes = 0;  // that can be found; kUnknown where others put and remove, too
  std::int64_t capacity_bytes = 0;              // kUnknown: the tier's own business
  std::int64_t evicted_records = 0;             // made room; this and the next since the tier was made
  std::int64_t set_aside_records = 0;           // damaged
  std::int64_t connects = 0, redirects = 0;     // of a remote tier
};

class Tier {
 public:
  virtual ~Tier() = default;
  virtual const char* name() const = 0;
  virtual void put(std::span<PutRequest> requests, Deadline deadline) = 0;
  virtual void get(std::span<GetRequest> requests, Deadline deadline) = 0;
  /// A hint: the payload is not looked at.
  virtual void exists(std::span<ExistsRequest> requests, Deadline deadline) = 0;
  /// As exists(), at once and from memory: any thread, beside any other call. False: only exists() can tell.
  virtual bool look_up(std::span<ExistsRequest>) const { return false; }
  virtual void remove(std::span<RemoveRequest> requests, Deadline deadline) = 0;
  virtual FlushStatus flush(Deadline deadline) = 0;
  virtual TierStats stats() = 0;
};

}  // namespace kv4::tier
