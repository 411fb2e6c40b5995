// The way up: brings blocks of prompts from tiers to the device.
//
// PrefixLoader has the memory that all loads share. A PromptLoad serves one prompt: it asks for batches of records,
// moves them to the device and inserts them in order, then the deepest snapshot of these blocks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/one_thread.h"
#include "cache/staging_slots.h"
#include "cache/tiered_cache.h"

namespace kv4 {

class PrefixLoader {
 public:
  /// A load that one thread destroyed while another was in a call: the next call ends it.
  struct Left {
    virtual ~Left() = default;
    Left* next = nullptr;
  };
  /// A call of a TieredPrefix or of one of its loads. It holds cache and tiers.
  struct Call {
    explicit Call(PrefixLoader& m) : cache(m.joint_.mover.driver()), tiers(m.joint_.tiers.driver()) { m.end_left(); }
    OneThread::Call cache, tiers;
  };
  /// The same for a destructor.
  struct Try {
    explicit Try(PrefixLoader& m) : cache(m.joint_.mover.driver()), tiers(m.joint_.tiers.driver()) {}
    explicit operator bool() const { return cache && tiers; }
    OneThread::Try cache, tiers;
  };

  /// `joint` outlives it.
  explicit PrefixLoader(TieredCache& joint);
  ~PrefixLoader() { end_left(); }
  PrefixLoader(const PrefixLoader&) = delete;
  PrefixLoader& operator=(const PrefixLoader&) = delete;

  void leave(std::unique_ptr<Left> load) noexcept;  // any thread
  std::int64_t loaded_blocks() const { return loaded_blocks_; }
  std::int64_t loaded_snapshots() const { return loaded_snapshots_; }

 private:
  friend class PromptLoad;

  /// Device memory that queued work still reads.
  struct InUse {
    std::int64_t mark = 0;
    StagingSlots* slots = nullptr;
    std::vector<std::byte*> memory;
  };

  void end_left() noexcept;
  void give_unused();

  TieredCache& joint_;
  const int num_slots_;
  StagingSlots block_slots_, snapshot_slots_;
  std::list<InUse> in_use_;
  std::int64_t loaded_blocks_ = 0, loaded_snapshots_ = 0;
  std::atomic<Left*> left_loads_{nullptr};  // a list
};

/// Its calls are made inside a PrefixLoader::Call.
class PromptLoad : public PrefixLoader::Left {
 public:
  PromptLoad(PrefixLoader& owner, const Prompt& prompt, tier::Deadline deadline);
  ~PromptLoad() override { stop(); }
  PromptLoad(const PromptLoad&) = delete;
  PromptLoad& operator=(const PromptLoad&) = delete;

  bool advance();
  /// advance() until the load is done, or `progress` stops it.
  void run(const TieredProgress& progress);
  /// Ends the load. Keys that it has hashed are not hashed again.
  Expected<Admission> admit();

  std::int64_t brought_blocks() const { return static_cast<std::int64_t>(end_ - first_); }
  std::int64_t wanted_blocks() const { return static_cast<std::int64_t>(wanted_ - first_); }
  PrefixLoader& owner() const { return owner_; }

 private:
  enum class Phase : std::uint8_t { blocks, snapshot, done };
  /// A copy of the caller's prompt.
  struct OwnPrompt {
    explicit OwnPrompt(const Prompt& p)
        : token_ids(p.token_ids.begin(), p.token_ids.end()),
          tenant(p.tenant),
          salt(p.salt),
          extra(p.extra.begin(), p.extra.end()),
          extra_views(extra.begin(), extra.end()) {}
    Prompt view() const { return {token_ids, tenant, salt, extra_views}; }

    std::vector<std::int32_t> token_ids;
    TenantId tenant;
    std::string salt;
    std::vector<std::string> extra;
    std::vector<std::string_view> extra_views;
  };
  /// Records that are asked for together, then moved, then inserted.
  struct Batch {
    Batch() {}  // written out: clang 14 asks for a defaulted one before this class is complete
    std::vector<tier::SharedBytes> host;
    std::list<PrefixLoader::InUse> device;  // at most one, where the device needs memory of its own
    std::optional<tier::TierChain::Ticket> asked;
    std::int64_t transfer = 0;
    bool whole = true;  // all its records were found
  };

  bool late() const { return joint_.tiers.now() >= deadline_; }
  void know_keys(std::size_t count);
  void ask_for_blocks();
  void ask(Batch& batch, StagingSlots& slots, std::span<const tier::RecordId> ids, std::int64_t bytes);
  /// Starts the batch's transfer, once tiers have answered.
  void move_on(Batch& batch, StagingSlots& slots, std::int64_t bytes);
  /// False: not yet. True: the records found, in order from the first, are where the device can read them.
  bool arrive(Batch& batch, StagingSlots& slots, std::int64_t bytes);
  std::vector<std::byte*> images(const Batch& batch) const;
  /// `queued`: work that reads its device memory was queued.
  void release(Batch& batch, StagingSlots& slots, bool queued);
  /// A long context needs more than the slots: loads batch by batch, until a batch is not found whole.
  bool advance_blocks();
  /// Asks for the next few, deepest first.
  void ask_which_snapshots_exist();
  /// True: the snapshot is where the device can read it, or there is none.
  bool find_snapshot();
  /// All blocks before end_ are here.
  bool advance_snapshot();
  void wait(tier::Deadline until);
  /// Asks for nothing more. A transfer under way ends before its memory is used again, because transfers keep their
  /// order.
  void stop();
  void be_done();

  PrefixLoader& owner_;
  TieredCache& joint_;
  const OwnPrompt prompt_;
  const tier::Deadline deadline_;
  const tier::Deadline begun_ = joint_.tiers.now();
  const std::size_t wanted_;  // full blocks of the prompt that a request can begin with
  Phase phase_ = Phase::blocks;
  BlockKey root_{};                             // of keys_, once there is one
  std::vector<BlockKey> keys_;                  // of the first blocks; later ones are hashed while blocks arrive
  std::size_t first_ = 0, next_ = 0, end_ = 0;  // the first block not kept at the start, not asked for, not here
  std::list<Batch> batches_;
  // The deepest snapshot below the deepest one on the device. The search begins once some blocks have come, because
  // usually all of them come.
  std::size_t below_ = 0;                         // from here on, blocks' snapshots have been asked for
  std::vector<std::size_t> possible_;             // blocks whose snapshots are asked for, or exist; the deepest last
  std::optional<tier::TierChain::Ticket> known_;  // which of them exist
  std::size_t coming_at_ = 0;
  std::optional<Batch> coming_;
};

}  // namespace kv4
