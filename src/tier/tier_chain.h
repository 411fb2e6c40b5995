// Tiers below each other: host memory, disk, remote. A get asks one after the other and puts what it found into those
// above; a put goes to all, behind the caller's back.
//
// Any tier may be missing a record, full, slow or away: the chain then has fewer hits, and never other bytes. What
// keeps that with tiers that disagree: each queue misses what it may hold in an older version (tier_queue.h), and what
// was found is not put anywhere if its id was written meanwhile. A tier that goes back in time by itself, as Redis may
// (kv4/tier.h, 1a), cannot be told from one that does not: keep only Content::of_key in a chain with such a tier.
//
// One thread drives a chain, its tickets included. Work goes on when it calls: poll(), or a ticket's done() or wait().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/one_thread.h"
#include "tier/requests.h"
#include "tier/tier_queue.h"

namespace kv4::tier {

struct ChainStats {
  std::string name;
  QueueStats queue;
  std::int64_t promoted = 0;  // records that were put there because a tier below had them
};

class TierChain {
  struct Lookup;

 public:
  /// What became of some gets or exists.
  class Ticket {
   public:
    bool done() const;
    bool wait(Deadline until) const;
    /// In the order of the requests; those without an answer have failed. Ends the ticket.
    std::vector<ReadResult> take();
    void cancel();
    ~Ticket();
    Ticket(Ticket&&) = default;
    Ticket& operator=(Ticket&&) = delete;

   private:
    friend class TierChain;
    Ticket(TierChain& chain, std::shared_ptr<Lookup> lookup) : chain_(&chain), lookup_(std::move(lookup)) {}
    TierChain* chain_;
    std::shared_ptr<Lookup> lookup_;  // null: ended
  };

  /// The fastest first. Tickets end before the chain does.
  TierChain(std::vector<std::unique_ptr<TierQueue>> tiers, std::shared_ptr<Clock> clock);

  OneThread& driver() { return driver_; }
  std::size_t size() const { return tiers_.size(); }
  Deadline now() const { return clock_->now(); }  // of the clock that deadlines are of
  /// How many tiers took it. The payload is copied once for all, or handed over.
  int put(const RecordId& id, std::span<const std::byte> payload, Content content);
  int put(const RecordId& id, const SharedBytes& payload, Content content);
  /// To some of the tiers, a bit each; returns those that took it.
  std::uint32_t offer(const RecordId& id, const SharedBytes& payload, Content content, std::uint32_t tiers);
  std::uint32_t all() const { return (std::uint32_t{1} << size()) - 1; }
  /// Those that would take a put of so many bytes now.
  std::uint32_t with_room(std::int64_t bytes) const;
  int remove(const RecordId& id);
  /// `content`: of what is found and put into the tiers above. Its buffer, the caller's own included, is theirs, too,
  /// until they have it.
  Ticket get(std::vector<ReadRequest> requests, Content content, Deadline deadline);
  /// Stops at the first tier that has a record; promotes nothing.
  Ticket exists(std::span<const RecordId> ids, Deadline deadline);
  /// After everything before; one answer per tier.
  std::vector<FlushStatus> flush(Deadline deadline);
  /// All tiers at once, as TierQueue::close().
  std::vector<FlushStatus> close(Deadline deadline);
  /// Moves lookups on, and gives the results of puts and removes since the last call, tier by tier.
  std::vector<std::vector<WriteResult>> poll();
  std::vector<ChainStats> stats();

 private:
  struct Reading {
    int count = 0;
    bool written = false;  // since one of them began
  };

  Ticket start(std::shared_ptr<Lookup> lookup);
  /// Asks the next tier for what is not found yet, as far as answers are there.
  void advance(Lookup& lookup);
  void ask(Lookup& lookup);
  void take_answers(Lookup& lookup);
  void promote(const Lookup& lookup, std::size_t request);
  void end(Lookup& lookup);
  void note_write(const RecordId& id);
  std::vector<std::vector<WriteResult>> drain();

  OneThread driver_;
  std::vector<std::unique_ptr<TierQueue>> tiers_;
  std::vector<std::int64_t> promoted_;  // by tier
  std::shared_ptr<Clock> clock_;
  std::vector<std::weak_ptr<Lookup>> lookups_;  // under way
  std::unordered_map<RecordId, Reading, RecordIdHash> reading_;
};

}  // namespace kv4::tier
