// The asynchronous face of a tier, the same for all: worker threads that make the tier's blocking calls, one for writes
// and as many for reads as the tier takes, bounded queues in front of them, a circuit breaker, write-behind.
//
// Promises:
//   1. No call blocks on the tier but wait() and close(), and those no longer than they are told to. What does not fit
//      a queue is refused: a put is not done, a get is a miss.
//   2. A get sees every put and remove that was accepted before it, done or not, and never what such a one has
//   replaced:
//      where one was refused or failed, the id is a miss until another succeeds.
//   3. Buffers of gets belong to their ticket and to the worker: an answer that comes late is written to memory that is
//      still there, and goes nowhere.
//   4. Memory is bounded: by the limits in the options, and by what callers keep of the results. Where the machine
//      refuses some, a put is refused, a get is a miss or throws std::bad_alloc, and workers go on.
//
// Reads do not wait for writes, since (2) holds without an order between them. What a tier can tell from memory
// (Tier::look_up) is answered before the call returns: all that exists() asks, and gets of what is not there. Any
// thread may call; a worker that is stuck in the tier is left behind with everything it uses when the queue goes away.
// A forked child has no workers: there every call refuses, misses or fails at once, and the parent keeps the tier.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "kv4/tier.h"
#include "kv4/time_histogram.h"
#include "tier/circuit_breaker.h"
#include "tier/shared_bytes.h"

namespace kv4::tier {

struct TierQueueOptions {
  std::int64_t max_write_bytes = std::int64_t{256} << 20;  // payloads that wait or are under way
  std::int64_t max_read_bytes = std::int64_t{256} << 20;   // buffers of gets, until their results are dropped
  std::int64_t max_writes = 4096;                          // that wait, are under way, or are not yet drained
  std::int64_t max_reads = 4096;
  std::int64_t batch_requests = 64;
  std::int64_t batch_bytes = std::int64_t{32} << 20;
  std::size_t max_stale_ids = 65536;
  Duration write_limit = std::chrono::seconds(5);   // the tier's deadline for a batch of writes
  Duration close_limit = std::chrono::seconds(10);  // of the destructor: for what is queued, and a flush
  BreakerOptions breaker;
};

/// Whether puts of an id can differ.
enum class Content : std::uint8_t {
  of_key,   // its bytes follow from the key: an older record is as good as a newer one
  changing  // an older record is a wrong one
};

struct ReadRequest {
  RecordId id;
  std::int64_t max_bytes = 0;  // of the payload
  SharedBytes to;              // nothing: a buffer of the queue's
  bool view_allowed = false;   // the payload may be memory of the tier's own
};
struct ReadResult {
  GetStatus status = GetStatus::failed;
  std::int64_t bytes = 0;  // of the payload, where it is found or too_small
  SharedBytes payload;     // where it is found by a get; it is read only
};
struct WriteResult {
  RecordId id;
  bool remove = false;
  PutStatus status = PutStatus::failed;  // of a remove: stored or failed
};

struct QueueStats {
  // Since the queue was made.
  std::int64_t gets = 0, hits = 0, misses = 0, failed_gets = 0, damaged = 0, hit_bytes = 0;
  std::int64_t puts = 0, stored = 0, failed_puts = 0, refused_puts = 0, stored_bytes = 0, removes = 0;
  std::int64_t times_opened = 0;       // the breaker
  TimeHistogram get_times, put_times;  // of the tier's calls
  // Now.
  std::int64_t waiting_reads = 0, waiting_writes = 0, waiting_write_bytes = 0, stale_ids = 0;
  CircuitBreaker::State breaker = CircuitBreaker::State::closed;
  TierStats tier;  // as of the last flush, or the last time nothing was to be written after a call of stats()
  TierFailure failure;
};

class TierQueue {
  struct Core;
  struct ReadJob;
  struct FlushJob;

 public:
  /// Of some gets or exists. One thread at a time.
  class ReadTicket {
   public:
    bool done() const;  // all are answered, or the deadline has passed
    bool wait(Deadline until) const;
    /// In the order of the requests; those without an answer have failed. Ends the ticket.
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
    /// Failed where it is not done. `failed`, too, where a put or remove since the flush before was accepted and
    /// failed.
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
  bool put(const RecordId& id, SharedBytes payload, Content content);
  bool remove(const RecordId& id);
  /// Whether a put of so many bytes would be accepted now.
  bool has_room(std::int64_t bytes);
  /// Memory of the queue for a payload to be put; nothing where that is used up.
  SharedBytes buffer(std::size_t size);
  /// As a put that was not accepted.
  void refuse(const RecordId& id, Content content);
  ReadTicket get(std::vector<ReadRequest> requests, Deadline deadline);
  ReadTicket exists(std::span<const RecordId> ids, Deadline deadline);
  /// After everything that was accepted before.
  FlushTicket flush(Deadline deadline);
  /// What became of puts and removes since the last call, in their order.
  std::vector<WriteResult> drain();
  QueueStats stats();
  /// Finishes what is queued, flushes, and ends the worker and with it the tier, unless others share that; whatever is
  /// not done by then is given up. Later calls refuse and miss.
  FlushStatus close(Deadline deadline) noexcept;

 private:
  void end_threads(Deadline deadline) noexcept;

  std::shared_ptr<Core> core_;
  /// In the order of their lanes; none: closed. Null: closed in a forked child.
  std::unique_ptr<std::vector<std::thread>> threads_ = std::make_unique<std::vector<std::thread>>();
};

}  // namespace kv4::tier
