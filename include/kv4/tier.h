// A place below the device that keeps records by tenant and key: host memory, a disk, a cluster of servers, or one of
// your own.
//
// Promises of every tier:
//   1. get() gives exactly the bytes of one put() of that tenant and key and of the tier's layout. They are checked on
//      every read; anything else is a miss.
//   1a. get() never gives the bytes of a put before the newest one that was `stored`, and nothing after a remove that
//      was `answered`, as long as the storage does not go back in time by itself:
//        host memory     never does
//        disk            never does after a flush() that said `durable`, killed or not, except for segments that could
//                        not be opened (EACCES, EMFILE, EIO). When they can be opened again their records are as they
//                        were, including removed records and records whose newer ones were evicted meanwhile.
//                        Older records also come back where the file system or the disk is restored to an older state
//        Redis           does: a failover to a replica that lags, or a restart from an older file, brings older and
//                        removed records back, whole
//        your own        document it
//      So records whose bytes follow from their key (all that TieredPrefix keeps) may be in any tier: an older one is
//      the same. Records that change may not be in Redis.
//   2. Calls throw only std::bad_alloc, for want of memory: that is a failed put, and a miss.
//   3. No call goes on much longer than its deadline, as far as the operating system allows: a request without an
//      answer by then is `failed` or not `answered`. A put that failed may still be stored, whole.
//
// No answer is an error for the caller: after any failure the caller computes the bytes again.
//
// Calls block, except look_up(). One thread at a time calls put(), remove(), flush() and stats(); beside it
// read_threads() threads may call get() and exists(). kv4 gives each tier as many threads of its own.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kv4/export.h"

namespace kv4::tier {

using Duration = std::chrono::nanoseconds;               // of waiting
using Deadline = std::chrono::steady_clock::time_point;  // answers after it are too late

/// The name of a record: 32 bytes, from a hash.
using Key = std::array<std::byte, 32>;

/// The id of a record. The same key of two tenants is two records.
struct RecordId {
  std::uint64_t tenant = 0;
  Key key{};
  friend bool operator==(const RecordId&, const RecordId&) = default;
};

/// The result of a put.
enum class PutStatus : std::uint8_t { stored, too_large, no_space, failed };
/// The result of a get.
enum class GetStatus : std::uint8_t {
  found,
  missing,
  too_small,  // `to` is shorter than the payload; `bytes` says how long that is
  damaged,    // a miss; the record is set aside
  failed      // a miss; no answer, or not in time
};

/// How the value of a chunk is stored (kv4/chunk_store.h). Only kv4's own tiers see it.
struct ChunkCoding {
  std::uint16_t coding = 0;         // 0: as it was put; else docs/formats.md
  std::int64_t decoded_bytes = -1;  // of the value; -1: the record is no chunk's
  friend bool operator==(const ChunkCoding&, const ChunkCoding&) = default;
};
struct ChunkLabel;  // the library's own: the key of a chunk and its coding

// Requests come in batches; each has its own result.
struct PutRequest {
  RecordId id;
  std::span<const std::byte> payload;
  PutStatus status = PutStatus::failed;  // out
  const ChunkLabel* label = nullptr;     // null for a tier of your own
};

/// A record to read.
struct GetRequest {
  RecordId id;
  std::span<std::byte> to;               // as it was, or zeros, unless the record is `found`
  GetStatus status = GetStatus::failed;  // out
  std::int64_t bytes = 0;                // out
  /// True: a tier that keeps records in memory may give `view` instead of a copy in `to`. The bytes stay unchanged and
  /// in memory as long as the view is held: hold it for a transfer, not for long.
  bool view_allowed = false;
  std::shared_ptr<std::byte[]> view = {};  // out
  ChunkCoding coding = {};                 // out, of kv4's own tiers
};

/// A record to look for.
struct ExistsRequest {
  RecordId id;
  std::int64_t bytes = -1;  // out: of the payload; -1: not there, as far as is known
  bool answered = false;    // out: -1 is no failure
};

/// A record to forget.
struct RemoveRequest {
  RecordId id;
  bool removed = false;   // out: it was there
  bool answered = false;  // out, of a Tier: it is not there any more
};

/// The result of a flush.
enum class FlushStatus : std::uint8_t {
  failed,  // not known
  kept,    // the tier has everything that was stored, until the machine or server that keeps it goes away
  durable  // ... and it survives a kill and a loss of power
};

/// The enumerator's name: "durable", ...
KV4_API const char* to_string(FlushStatus status);

/// The state of a tier and its counts.
struct TierStats {
  static constexpr std::int64_t kUnknown = -1;
  std::int64_t records = 0, payload_bytes = 0;  // that can be found; kUnknown where others put and remove, too
  std::int64_t capacity_bytes = 0;              // kUnknown: the tier does not report it
  std::int64_t evicted_records = 0;             // to make room; this and the next since the tier was made
  std::int64_t set_aside_records = 0;           // damaged
  std::int64_t unauthenticated_records = 0;     // not believed: no key of the cache's protects them
  std::int64_t connects = 0, redirects = 0;     // of a remote tier
};

/// Why a remote tier fails. Names stay the same: logs, reports and metrics have them.
enum class FailureReason : std::uint8_t {
  none,
  connection_refused,   // no server listens: a wrong port, or the server is down
  unreachable,          // no way to the address, or no answer from there
  silent,               // it is connected, owes an answer and sends nothing, or a byte now and then
  disconnected,         // it closed the connection
  password_needed,      // NOAUTH
  wrong_password,       // WRONGPASS, or a password for a server without one
  not_permitted,        // NOPERM, DENIED
  tls_refused,          // the handshake failed, or the server speaks no TLS
  certificate_refused,  // it is not of a known authority, not for this host, or out of date
  not_redis,            // its bytes are no replies
  reply_too_large,      // larger than the command's answer can be
  server_full,          // OOM, where the server evicts nothing
  server_error,         // any other error
  not_admitted          // the cluster names a server that is neither configured nor allowed
};
/// The number of enumerators.
inline constexpr std::size_t kFailureReasons = static_cast<std::size_t>(FailureReason::not_admitted) + 1;
/// The enumerator's name, as in logs and metrics.
KV4_API const char* to_string(FailureReason reason);

/// Why a tier fails now, and how often it has failed.
struct TierFailure {
  FailureReason reason = FailureReason::none;  // now, the newest of all servers; none: all work, as far as is known
  std::string detail;                          // the server and its message; never a password
  std::array<std::int64_t, kFailureReasons> counts{};  // by reason, since the tier was made: batches with failures
};

/// A place that keeps records. The promises stand at the head of this file.
class KV4_API Tier {
 public:
  virtual ~Tier() = default;
  virtual const char* name() const = 0;  // for reports and logs; stays the same
  /// The number of threads that may be in get() and exists() at a time.
  virtual int read_threads() const { return 1; }
  /// The most requests of one get() or exists(); 0: any number. Best few for a tier that does them one by one, so that
  /// early results are used early, and many for one that has them in flight together.
  virtual int read_batch() const { return 0; }
  /// Stores each payload, replacing an older one of its id.
  virtual void put(std::span<PutRequest> requests, Deadline deadline) = 0;
  /// Reads each record that is there, checked.
  virtual void get(std::span<GetRequest> requests, Deadline deadline) = 0;
  /// A hint: the payload is not looked at.
  virtual void exists(std::span<ExistsRequest> requests, Deadline deadline) = 0;
  /// As exists(), at once and from memory: any thread, beside any other call. False: only exists() can tell.
  virtual bool look_up(std::span<ExistsRequest>) const { return false; }
  /// Forgets each record.
  virtual void remove(std::span<RemoveRequest> requests, Deadline deadline) = 0;
  /// Waits until everything stored is as safe as the tier makes it.
  virtual FlushStatus flush(Deadline deadline) = 0;
  /// Counters now.
  virtual TierStats stats() = 0;
  /// At once and from memory: any thread, beside any other call.
  virtual TierFailure failure() const { return {}; }
};

}  // namespace kv4::tier
