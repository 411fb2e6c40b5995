// Tiers below each other: host memory, disk, remote. A get asks one after the other and puts found records into the
// tiers above. A put goes to all tiers in the background.
//
// Any tier may lack a record, or be full, slow or away: the chain then has fewer hits, and never other bytes. This
// holds even where tiers disagree: each queue misses ids whose record may be outdated (tier_queue.h), and a found
// record is not promoted if its id was written meanwhile. The chain cannot detect a tier that goes back in time by
// itself, as Redis may (kv4/tier.h, 1a): keep only Content::of_key in a chain with such a tier.
//
// One thread drives a chain and its tickets. Work goes on in its calls of poll(), or of a ticket's done() or wait().
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
  std::int64_t promoted = 0;  // records put there because a tier below had them
};

class TierChain {
  struct Lookup;

 public:
  /// The results of some gets or exists.
  class Ticket {
   public:
    bool done() const;
    bool wait(Deadline until) const;
    /// The results in the order of the requests; unanswered ones have failed. Ends the ticket.
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
  Deadline now() const { return clock_->now(); }  // by the clock of the deadlines
  /// Returns how many tiers took the put. The payload is copied once for all tiers, or handed over.
  int put(const RecordId& id, std::span<const std::byte> payload, Content content);
  int put(const RecordId& id, const SharedBytes& payload, Content content);
  /// Puts into some of the tiers, a bit each; returns those that took it.
  std::uint32_t offer(const RecordId& id, const SharedBytes& payload, Content content, std::uint32_t tiers,
                      const WriteDetails& details = {});
  /// Removes from all tiers; returns those that took it.
  std::uint32_t withdraw(const RecordId& id, std::uint64_t tag);
  /// Any thread: the answers of tiers that know them from memory. `answered`: of a record that is there, in one tier;
  /// of one that is not, in all.
  void look_up(std::span<ExistsRequest> requests) const;
  std::uint32_t all() const { return (std::uint32_t{1} << size()) - 1; }
  /// The tiers that would take a put of so many bytes now.
  std::uint32_t with_room(std::int64_t bytes) const;
  int remove(const RecordId& id);
  /// `content`: of the records that are found and put into the tiers above. These tiers share the buffer of such a
  /// record, also the caller's own, until they have stored it.
  Ticket get(std::vector<ReadRequest> requests, Content content, Deadline deadline);
  /// Stops at the first tier that has a record; promotes nothing.
  Ticket exists(std::span<const RecordId> ids, Deadline deadline);
  /// Begins flush(); one ticket per tier.
  std::vector<TierQueue::FlushTicket> start_flush(Deadline deadline);
  /// Memory of the first tier's queue that has some left; empty: none has.
  SharedBytes buffer(std::size_t size) const;
  /// Flushes all earlier writes; one answer per tier.
  std::vector<FlushStatus> flush(Deadline deadline);
  /// Closes all tiers at once, as TierQueue::close().
  std::vector<FlushStatus> close(Deadline deadline);
  /// Advances lookups, and returns the results of puts and removes since the last call, by tier.
  std::vector<std::vector<WriteResult>> poll();
  /// The results alone.
  std::vector<std::vector<WriteResult>> drain();
  std::vector<ChainStats> stats();

 private:
  struct Reading {
    int count = 0;
    bool written = false;  // since one of these lookups began
  };

  Ticket start(std::shared_ptr<Lookup> lookup);
  /// Takes the answers that are there, and asks the next tier for the records not found yet.
  void advance(Lookup& lookup);
  void ask(Lookup& lookup);
  void take_answers(Lookup& lookup);
  void promote(const Lookup& lookup, std::size_t request);
  void end(Lookup& lookup);
  void note_write(const RecordId& id);

  OneThread driver_;
  std::vector<std::unique_ptr<TierQueue>> tiers_;
  std::vector<std::int64_t> promoted_;  // by tier
  std::shared_ptr<Clock> clock_;
  std::vector<std::weak_ptr<Lookup>> lookups_;  // under way, and some that have ended
  std::size_t sweep_at_ = 64;                   // ended ones go when there are so many
  std::unordered_map<RecordId, Reading, RecordIdHash> reading_;
};

}  // namespace kv4::tier
