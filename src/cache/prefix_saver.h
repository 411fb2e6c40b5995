// The way down: offers the records that a cache stores to the tiers below it.
//
// A block event makes a record wait (fresh). Its bytes are gathered and transferred into a slot of pinned memory
// (outgoing); then all tiers take the slot (offered). A record that a tier refuses or fails to store waits again for
// that tier. Queues are lists: a call builds its records beside them and splices them in once nothing can fail any
// more.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <vector>

#include "cache/staging_slots.h"
#include "cache/tiered_cache.h"

namespace kv4 {

class PrefixSaver {
 public:
  /// `joint` outlives it.
  explicit PrefixSaver(TieredCache& joint);

  /// TieredPrefix::save().
  std::int64_t save(std::int64_t max_records);
  /// Whether records are on their way off the device: their transfers end soon.
  bool transfers() const { return !outgoing_.empty(); }
  /// Counters of the records saved.
  const TieredStatistics& statistics() const { return statistics_; }

 private:
  /// A record that waits for one tier or several.
  struct Waiting {
    BlockKey key{};
    bool snapshot = false;
    std::uint32_t tiers = 0;  // a bit each
    int attempts = 0;         // failed ones
    bool first = false;       // it was never offered
  };
  /// A record on its way off the device.
  struct Outgoing {
    Waiting what;
    tier::RecordId id;
    tier::SharedBytes bytes;
    std::byte* device = nullptr;
    std::int64_t transfer = 0;
  };

  void take_events();
  void wait_for(std::list<Waiting>& queue, const Waiting& what);
  void shorten(std::list<Waiting>& queue);
  /// Begins as many of them as there are slots, and as tiers have room for. Blocks are gathered together.
  std::int64_t begin(std::list<Waiting>& queue, std::int64_t max_records);
  void offer(const Outgoing& record);
  void settle();
  void note_results();
  void again_or_drop(std::size_t tier, const Waiting& what) noexcept;
  bool is_kept(const Waiting& what) const;
  tier::RecordId record_of(const Waiting& what);
  std::int64_t waiting() const;
  StagingSlots& slots_of(const Waiting& what) { return what.snapshot ? snapshot_slots_ : block_slots_; }

  TieredCache& joint_;
  StagingSlots block_slots_, snapshot_slots_;
  std::array<BlockEvent, 64> events_;  // read ones; those from next_event_ on wait
  std::size_t next_event_ = 0, num_events_ = 0;
  std::list<Waiting> fresh_;               // for all tiers
  std::vector<std::list<Waiting>> again_;  // for one tier each
  std::list<Outgoing> outgoing_;
  std::unordered_map<tier::RecordId, Waiting, tier::RecordIdHash> offered_;  // tiers: those without a result yet
  TieredStatistics statistics_;
};

}  // namespace kv4
