// Makes any tier asynchronous. Worker threads make the tier's blocking calls, one for writes and as many for reads as
// the tier takes. In front of them are bounded queues, a circuit breaker and write-behind.
//
// Promises:
//   1. Only wait() and close() block on the tier, no longer than their deadline. A request that does not fit a queue is
//      refused: a put is not done, a get is a miss.
//   2. A get sees every put and remove that was accepted before it, done or not, and never a record that such a write
//      has replaced. Where a write was refused or failed, the id is a miss until another write succeeds.
//   3. Buffers of gets belong to their ticket and to the worker: a late answer is written to memory that still exists,
//      and is dropped.
//   4. Memory is bounded by the limits in the options, and by the results that callers keep. Where the machine refuses
//      memory, a put is refused, a get is a miss or throws std::bad_alloc, and workers go on.
//
// Reads do not wait for writes, since (2) holds without an order between them. A tier that can look records up in
// memory (Tier::look_up) answers all of exists(), and gets of missing records, before the call returns. Any thread may
// call. When the queue goes away, a worker that is stuck in the tier is left behind with everything it uses. A forked
// child has no workers: there every call refuses, misses or fails at once, and the parent keeps the tier.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kv4/tier.h"
#include "kv4/time_histogram.h"
#include "tier/chunk_key.h"
#include "tier/circuit_breaker.h"
#include "tier/shared_bytes.h"

namespace kv4::tier {

struct TierQueueOptions {
  std::int64_t max_write_bytes = std::int64_t{256} << 20;  // payloads that wait or are under way
  std::int64_t max_read_bytes = std::int64_t{256} << 20;   // buffers of gets, until their results are dropped
  std::int64_t max_writes = 4096;                          // writes that wait, are under way, or are not yet drained
  std::int64_t max_reads = 4096;
  std::int64_t batch_requests = 64;
  std::int64_t batch_bytes = std::int64_t{32} << 20;
  std::size_t max_stale_ids = 65536;
  Duration write_limit = std::chrono::seconds(5);   // the tier's deadline for a batch of writes
  Duration close_limit = std::chrono::seconds(10);  // of the destructor: for queued work and a flush
  BreakerOptions breaker;
  /// Called after reads, writes and flushes have been answered: in a worker, under the queue's lock. It calls no queue.
  std::function<void()> on_answer = {};
};

/// Whether puts of an id can differ.
enum class Content : std::uint8_t {
  of_key,   // the bytes follow from the key: an older record is as good as a newer one
  changing  // an older record is wrong
};

struct ReadRequest {
  RecordId id;
  std::int64_t max_bytes = 0;                    // of the payload
  SharedBytes to;                                // empty: the queue provides a buffer
  bool view_allowed = false;                     // the payload may be the tier's own memory
  std::shared_ptr<const ChunkLabel> label = {};  // of a chunk: its key, for the tiers above that take the record, too
  bool copy_promoted = false;                    // the tiers above get a copy: `to` is the caller's again
};
struct ReadResult {
  GetStatus status = GetStatus::failed;
  std::int64_t bytes = 0;  // of the payload, where found or too_small
  SharedBytes payload;     // where a get found the record; read only
  ChunkCoding coding;      // likewise
};
/// What a put may have beside its payload.
struct WriteDetails {
  std::shared_ptr<const ChunkLabel> label = {};  // of a chunk
  std::uint64_t tag = 0;                         // comes back with the result
};
struct WriteResult {
  RecordId id;
  bool remove = false;
  PutStatus status = PutStatus::failed;  // for a remove: stored or failed
  std::uint64_t tag = 0;
};

struct QueueStats {
  // Since the queue was made.
  std::int64_t gets = 0, hits = 0, misses = 0, failed_gets = 0, damaged = 0, hit_bytes = 0;
  std::int64_t puts = 0, stored = 0, failed_puts = 0, refused_puts = 0, stored_bytes = 0, removes = 0;
  std::int64_t times_opened = 0;       // openings of the breaker
  TimeHistogram get_times, put_times;  // of the tier's calls
  // Now.
  std::int64_t waiting_reads = 0, waiting_writes = 0, waiting_write_bytes = 0, stale_ids = 0;
  CircuitBreaker::State breaker = CircuitBreaker::State::closed;
  TierStats tier;  // as of the last flush, or of the last idle time of the writer after a call of stats()
  TierFailure failure;
};

class TierQueue {
  struct Core;
  struct ReadJob;
  struct FlushJob;

 public:
  /// The results of some gets or exists. One thread at a time.
  class ReadTicket {
   public:
    bool done() const;  // all are answered, or the deadline has passed
    bool wait(Deadline until) const;
    /// The results in the order of the requests; unanswered ones have failed. Ends the ticket.
    std::vector<ReadResult> take();
    void cancel() { (void)take(); }
    ~ReadTicket();
    ReadTicket(ReadTicket&&) = default;
    ReadTicket& operator=(ReadTicket&&) = delete;

   private:
    friend class TierQueue;
    ReadTicket(std::shared_ptr<Core> core, std::shared_ptr<ReadJob> job)
        : core_(std::move(core)), job_(std::move(job)) {}
    std::shared_ptr<Core> core_;
    std::shared_ptr<ReadJob> job_;  // null: ended
  };

  class FlushTicket {
   public:
    bool done() const;
    bool wait(Deadline until) const;
    /// `failed` where the flush is not done, or where an accepted put or remove has failed since the previous flush.
    FlushStatus status() const;

   private:
    friend class TierQueue;
    FlushTicket(std::shared_ptr<Core> core, std::shared_ptr<FlushJob> job)
        : core_(std::move(core)), job_(std::move(job)) {}
    std::shared_ptr<Core> core_;
    std::shared_ptr<FlushJob> job_;
  };

  TierQueue(std::shared_ptr<Tier> tier, const TierQueueOptions& options, std::shared_ptr<Clock> clock);
  ~TierQueue();
  TierQueue(const TierQueue&) = delete;
  TierQueue& operator=(const TierQueue&) = delete;

  const char* name() const;
  /// Copies the payload. False: refused.
  bool put(const RecordId& id, std::span<const std::byte> payload, Content content);
  bool put(const RecordId& id, SharedBytes payload, Content content, const WriteDetails& details = {});
  bool remove(const RecordId& id, std::uint64_t tag = 0);
  /// What is known of each record without asking the tier: false where only exists() can tell about one of them. At
  /// once and from memory.
  bool look_up(std::span<ExistsRequest> requests);
  /// Whether a put of so many bytes would be accepted now.
  bool has_room(std::int64_t bytes);
  /// Memory of the queue for a payload to be put; empty where that is used up.
  SharedBytes buffer(std::size_t size);
  /// Acts as a put that was not accepted.
  void refuse(const RecordId& id, Content content);
  ReadTicket get(std::vector<ReadRequest> requests, Deadline deadline);
  ReadTicket exists(std::span<const RecordId> ids, Deadline deadline);
  /// Flushes after all writes that were accepted before.
  FlushTicket flush(Deadline deadline);
  /// The results of puts and removes since the last call, in their order.
  std::vector<WriteResult> drain();
  QueueStats stats();
  /// Finishes queued work, flushes, and ends the workers and with them the tier, unless others share it. Gives up work
  /// that is not done by the deadline. Later calls refuse and miss.
  FlushStatus close(Deadline deadline) noexcept;

 private:
  void end_threads(Deadline deadline) noexcept;

  std::shared_ptr<Core> core_;
  /// The workers in the order of their lanes; none: closed. Null: closed in a forked child.
  std::unique_ptr<std::vector<std::thread>> threads_ = std::make_unique<std::vector<std::thread>>();
};

}  // namespace kv4::tier
