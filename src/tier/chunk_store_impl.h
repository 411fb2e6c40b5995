// The parts of a ChunkStore: batches on their way through its tiers.
//
//   callers -> inbox -> driver (one thread: trims values, drives the chain, ends batches) -> done -> callers
//                            |
//                       TierChain -> queues -> tiers
//
// Invariants:
//   1. A batch is in exactly one list: inbox_, active_ or done_. Its node moves from one to the next, and nothing is
//      allocated for that. Batches leave inbox_ in the order in which they came.
//   2. Only the driver touches a batch in active_, and only it touches the chain, under chain_mutex_. Exceptions:
//      look_up(), for which the chain needs no lock, and close() after the driver has ended.
//   3. Locks are taken in the order chain_mutex_, mutex_, a queue's, the wakeup's.
//   4. queued_ has every id of a put or remove in inbox_, until the chain has it.
//   5. A batch ends when all its chunks are answered, or its deadline has passed, and no transfer uses memory of the
//      caller's that it lent (Lent::transfers).
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "kv4/chunk_store.h"
#include "tier/chunk_coding.h"
#include "tier/tier_chain.h"
#include "tier/tier_stack.h"
#include "tier/wakeup.h"

namespace kv4 {

struct ChunkStore::Impl {
  Impl(const ChunkStoreOptions& options, tier::TierStack stack, std::shared_ptr<tier::Clock> clock,
       std::shared_ptr<tier::Wakeup> wakeup);

  static Impl& of(ChunkStore& store) { return *store.impl_; }
  /// A store over the caller's queues. `wakeup` is that of their on_answer.
  static std::unique_ptr<ChunkStore> over(const ChunkStoreOptions& options, tier::TierStack stack,
                                          std::shared_ptr<tier::Clock> clock, std::shared_ptr<tier::Wakeup> wakeup);

  /// A file descriptor that is readable while batches wait to be taken.
  class EventFd {
   public:
    EventFd();  // throws Error
    ~EventFd();
    EventFd(const EventFd&) = delete;
    EventFd& operator=(const EventFd&) = delete;
    int fd() const { return fd_; }
    void raise() const;
    void lower() const;

   private:
    int fd_;
  };
  /// Registered memory, and the transfers that use it.
  struct Region {
    std::span<std::byte> memory;
    std::shared_ptr<void> owner;
    std::atomic<std::int64_t> uses{0};  // batches and transfers
  };
  /// What a batch has lent to the tiers.
  struct Lent {
    std::atomic<std::int64_t> transfers{0};
  };
  struct Item {
    tier::RecordId id;
    std::shared_ptr<const tier::ChunkLabel> label;  // of a put: without coding until the driver has trimmed
    std::shared_ptr<Region> region;                 // the value lies there; null: not registered
    std::vector<std::span<std::byte>> pieces;       // of the caller's memory: one where it is contiguous
    std::int64_t value_bytes = 0;                   // of a put; of a get: the room
    tier::SharedBytes copy;                         // of a put that is not registered
    int waiting = 0;                                // tiers that have not answered a write
    bool answered = false;
    bool no_space = false, failed = false, too_large = false;  // a tier's answers to a write
  };
  /// Some chunks of a get or exists, which are asked for together.
  struct Lookup {
    std::size_t first = 0;
    tier::TierChain::Ticket ticket;
  };
  struct Batch {
    std::uint64_t number = 0;
    ChunkAction action = ChunkAction::put;
    std::uint64_t tenant = 0;
    tier::Deadline deadline;
    std::vector<Item> items;
    std::size_t unanswered = 0;
    std::shared_ptr<Lent> lent = std::make_shared<Lent>();
    std::list<Lookup> lookups;                          // of a get or exists: those that have not ended
    std::vector<tier::TierQueue::FlushTicket> flushes;  // of a flush
    std::uint32_t missed = 0;                           // of a flush: tiers that lack a put before it
    bool late = false;                                  // its deadline has passed; it waits for what it lent
    ChunkResults results;
    std::int64_t chunks() const { return std::max<std::int64_t>(1, std::ssize(results.statuses)); }
  };
  using Batches = std::list<Batch>;
  /// A chunk that waits for the answers of tiers to its write.
  struct Write {
    Batch* batch = nullptr;
    std::size_t item = 0;
  };
  struct Queued {
    int count = 0;
    bool there = false;  // the newest is a put
  };

  // Callers.
  Batches make_batch(ChunkAction action, std::size_t chunks, const ChunkCall& call) const;
  void add_item(Batch& batch, std::size_t index, ChunkKey key) const;
  /// Finds the region of memory of a caller's, if it lies in one.
  std::shared_ptr<Region> region_of(std::span<const std::byte> memory) const;
  void copy_in(Item& item, ChunkStatus& status) const;
  std::uint64_t submit(Batches batch);
  ChunkResults take_out(Batch& batch);
  bool forked() const;
  void needs_owner() const;

  // The driver.
  void drive() noexcept;
  void take_inbox();
  void begin(Batch& batch);
  void begin_puts(Batch& batch);
  void begin_gets(Batch& batch);
  void offer(Batch& batch, std::size_t index);
  void settle_writes();
  /// True: the batch has ended.
  bool advance(Batch& batch);
  void take_gets(Batch& batch, Lookup& lookup);
  ChunkStatus take_value(Batch& batch, std::size_t index, tier::ReadResult& found);
  void take_exists(Batch& batch, Lookup& lookup);
  void answer(Batch& batch, std::size_t index, ChunkStatus status, std::int64_t bytes = 0);
  void give_up(Batch& batch);
  void finish(Batches::iterator batch);
  tier::SharedBytes lend(Batch& batch, const Item& item, std::byte* memory, std::size_t bytes);
  void forget_queued(const Batch& batch);

  const ChunkStoreOptions options;
  const std::shared_ptr<tier::Clock> clock;
  const std::shared_ptr<tier::Wakeup> wakeup;
  const tier::Content content;
  const std::vector<Protection> protections;
  const pid_t owner;
  const EventFd event;

  mutable std::mutex chain_mutex;
  tier::TierChain chain;
  Batches active;  // this and the next three: the driver's
  std::unordered_map<std::uint64_t, Write> writes;
  std::uint64_t next_tag = 1;
  std::uint32_t missed = 0;  // tiers that refused a put that others took, since the last flush

  mutable std::mutex mutex;  // guards all below
  std::condition_variable ended;
  Batches inbox, done;
  std::unordered_map<tier::RecordId, Queued, tier::RecordIdHash> queued;
  std::map<std::uint64_t, std::shared_ptr<Region>> regions;
  std::uint64_t next_batch = 1, next_region = 1;
  std::set<std::uint64_t> open;  // the numbers of the batches in inbox and active
  bool closing = false, stopping = false;
  mutable ChunkStoreReport counts;
  std::unique_ptr<std::thread> driver;
};

}  // namespace kv4
