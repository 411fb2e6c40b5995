#include "kv4/tiered_prefix.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/undo.h"
#include "cache/block_mover.h"
#include "cache/cache_call.h"
#include "cache/staging_slots.h"
#include "prefix/block_hash.h"
#include "tier/tier_chain.h"

namespace kv4 {
namespace {

using tier::Deadline;
using tier::GetStatus;
using tier::RecordId;
using tier::SharedBytes;
using tier::TierChain;
using Ticket = TierChain::Ticket;

constexpr std::int64_t kMaxSlots = 1024;
constexpr std::size_t kBatches = 8;  // of a load: while some move or are inserted, tiers have work
constexpr int kSnapshotSlots = 2;    // on their way off the device
constexpr std::size_t kKeysAtATime = 256, kSnapshotsAtATime = 64;
constexpr std::chrono::microseconds kTransferPoll{20};
constexpr std::chrono::milliseconds kProgressStep{20}, kQueuePoll{1};

RecordId block_record(TenantId tenant, const BlockKey& key) {
  RecordId id{.tenant = static_cast<std::uint64_t>(tenant), .key = {}};
  std::memcpy(id.key.data(), key.data(), key.size());
  return id;
}

int slots_for(std::int64_t bytes, std::int64_t slot_bytes, std::int64_t least) {
  return static_cast<int>(std::clamp(bytes / std::max<std::int64_t>(slot_bytes, 1), least, kMaxSlots));
}

ops::CopyPiece piece(const std::byte* from, std::byte* to, std::int64_t bytes) {
  return {reinterpret_cast<const std::uint8_t*>(from), reinterpret_cast<std::uint8_t*>(to), bytes};
}

/// Host memory and, where the device cannot read that itself, memory of the device beside it.
struct Slots {
  std::shared_ptr<HostSlots> host;
  std::optional<DeviceSlots> device;

  Slots(const std::shared_ptr<Backend>& backend, std::int64_t slot_bytes, int host_count, int device_count)
      : host(HostSlots::make(backend, slot_bytes, host_count)) {
    if (!backend->on_host()) device.emplace(backend, slot_bytes, device_count);
  }
  bool has_free() const { return host->num_free() > 0 && (!device || device->num_free() > 0); }
};

/// A prompt that outlives the caller's.
struct OwnPrompt {
  std::vector<std::int32_t> token_ids;
  TenantId tenant;
  std::string salt;
  std::vector<std::string> extra;
  std::vector<std::string_view> extra_views;

  explicit OwnPrompt(const Prompt& p)
      : token_ids(p.token_ids.begin(), p.token_ids.end()),
        tenant(p.tenant),
        salt(p.salt),
        extra(p.extra.begin(), p.extra.end()),
        extra_views(extra.begin(), extra.end()) {}
  Prompt view() const { return {token_ids, tenant, salt, extra_views}; }
};

}  // namespace

// Queues are lists: what a call makes ready lies beside them until nothing can fail any more, and is spliced in then.
struct TieredPrefix::Impl {
  /// Both are the caller's while it is in a call.
  struct Call {
    explicit Call(Impl& m) : cache(m.mover.driver()), tiers(m.tiers.driver()) { m.end_left(); }
    OneThread::Call cache, tiers;
  };
  /// The same, of a destructor.
  struct Try {
    explicit Try(Impl& m) : cache(m.mover.driver()), tiers(m.tiers.driver()) {}
    explicit operator bool() const { return cache && tiers; }
    OneThread::Try cache, tiers;
  };
  /// A load that was destroyed by a thread while another was in a call: the next call ends it.
  struct Left {
    virtual ~Left() = default;
    Left* next = nullptr;
  };
  /// A record that one tier or several are to have.
  struct Waiting {
    BlockKey key{};
    bool snapshot = false;
    std::uint32_t tiers = 0;  // a bit each
    int attempts = 0;         // that failed
    bool first = false;       // it was never offered
  };
  /// On its way off the device.
  struct OutgoingRecord {
    Waiting what;
    RecordId id;
    SharedBytes bytes;
    std::byte* device = nullptr;
    std::int64_t transfer = 0;
  };
  /// Device memory that queued work still reads.
  struct InUse {
    std::int64_t mark = 0;
    Slots* slots = nullptr;
    std::vector<std::byte*> memory;
  };

  /// `pinned_for`: the backend that the tiers' own memory is pinned for, if any.
  Impl(KVCacheManager& cache_in, TierChain& tiers_in, const Backend* pinned_for, const TieredOptions& options_in)
      : cache(cache_in),
        tiers(tiers_in),
        options(options_in),
        mover(cache),
        backend(*mover.backend()),
        views_allowed(backend.on_host() || pinned_for == &backend),
        block_bytes(cache.schema().block_image_bytes),
        snapshot_bytes(cache.snapshot_bytes()),
        load_slots(slots_for(options.load_bytes, block_bytes, 2)),
        save_slots(slots_for(options.save_bytes, block_bytes, 1)),
        loads(mover.backend(), block_bytes, load_slots, load_slots),
        saves(mover.backend(), block_bytes, save_slots, std::max(1, save_slots / 8)),
        snapshot_loads(mover.backend(), snapshot_bytes, 1, 1),
        snapshot_saves(mover.backend(), snapshot_bytes, kSnapshotSlots, kSnapshotSlots),
        again(tiers.size()) {}
  ~Impl() { end_left(); }

  void leave(std::unique_ptr<Left> load) noexcept;  // any thread
  void end_left() noexcept;

  // --- saves
  void take_events();
  void wait_for(std::list<Waiting>& queue, const Waiting& what);
  void shorten(std::list<Waiting>& queue);
  std::int64_t begin(std::list<Waiting>& queue, std::int64_t max_records);
  void offer(const OutgoingRecord& record);
  void settle();
  void note_results();
  void again_or_drop(std::size_t tier, const Waiting& what) noexcept;
  bool is_kept(const Waiting& what) const;
  RecordId record_of(const Waiting& what);
  RecordId snapshot_record(TenantId tenant, const BlockKey& key);
  void give_unused();
  std::int64_t waiting() const;
  std::int64_t left() const { return waiting() + std::ssize(outgoing); }

  KVCacheManager& cache;
  TierChain& tiers;
  const TieredOptions options;
  BlockMover mover;
  Backend& backend;
  const bool views_allowed;  // a tier's own memory is as good for a transfer as a slot
  const std::int64_t block_bytes, snapshot_bytes;
  const int load_slots, save_slots;
  Slots loads, saves, snapshot_loads, snapshot_saves;
  std::list<InUse> in_use;
  BlockHasher hasher;
  std::array<BlockEvent, 64> events;  // that were read, from next_event on not looked at
  std::size_t next_event = 0, num_events = 0;
  std::list<Waiting> fresh;               // for all tiers
  std::vector<std::list<Waiting>> again;  // for one tier each
  std::list<OutgoingRecord> outgoing;
  std::unordered_map<RecordId, Waiting, tier::RecordIdHash> offered;  // tiers: those that have not told yet
  TieredStatistics statistics;
  std::atomic<Left*> left_loads{nullptr};  // a list
};

void TieredPrefix::Impl::leave(std::unique_ptr<Left> load) noexcept {
  load->next = left_loads.load(std::memory_order_relaxed);
  while (!left_loads.compare_exchange_weak(load->next, load.get(), std::memory_order_release)) continue;
  (void)load.release();
}

void TieredPrefix::Impl::end_left() noexcept {
  if (left_loads.load(std::memory_order_relaxed) == nullptr) return;
  std::unique_ptr<Left> load(left_loads.exchange(nullptr, std::memory_order_acquire));
  while (load) load.reset(std::exchange(load->next, nullptr));
}

// --- saves
// -----------------------------------------------------------------------------------------------------------------------

RecordId TieredPrefix::Impl::snapshot_record(TenantId tenant, const BlockKey& key) {
  return block_record(tenant, hasher.snapshot(key));
}

RecordId TieredPrefix::Impl::record_of(const Waiting& what) {
  const TenantId tenant = cache.find_block(what.key)->tenant;
  return what.snapshot ? snapshot_record(tenant, what.key) : block_record(tenant, what.key);
}

bool TieredPrefix::Impl::is_kept(const Waiting& what) const {
  const std::optional<KeptBlock> kept = cache.find_block(what.key);
  return kept && (!what.snapshot || kept->has_snapshot);
}

std::int64_t TieredPrefix::Impl::waiting() const {
  std::int64_t count = std::ssize(fresh);
  for (const std::list<Waiting>& queue : again) count += std::ssize(queue);
  return count;
}

void TieredPrefix::Impl::wait_for(std::list<Waiting>& queue, const Waiting& what) {
  queue.push_back(what);
  shorten(queue);
}

void TieredPrefix::Impl::shorten(std::list<Waiting>& queue) {
  for (; std::ssize(queue) > options.max_waiting; ++statistics.dropped) queue.pop_front();
}

void TieredPrefix::Impl::take_events() {
  do {
    for (; next_event < num_events; ++next_event) {
      const BlockEvent& event = events[next_event];
      if (event.inserted || event.kind == BlockEvent::Kind::evicted) continue;
      wait_for(fresh, {event.key, event.kind == BlockEvent::Kind::snapshot, tiers.all(), 0, true});
    }
    num_events = cache.read_block_events(events);
    next_event = 0;
  } while (num_events > 0);
  statistics.lost_events = static_cast<std::int64_t>(cache.prefix_statistics().lost_events);
}

/// As many of them as there are slots, and as tiers have room for. Blocks are gathered together.
std::int64_t TieredPrefix::Impl::begin(std::list<Waiting>& queue, std::int64_t max_records) {
  std::list<OutgoingRecord> begun;
  std::vector<std::list<Waiting>> later(again.size());  // for tiers that have no room
  std::vector<BlockKey> keys;
  std::vector<std::byte*> images;
  std::vector<ops::CopyPiece> pieces;
  Undo give_back([&] {
    for (const OutgoingRecord& record : begun)
      if (record.device != nullptr) (record.what.snapshot ? snapshot_saves : saves).device->give(record.device);
  });
  std::int64_t gone = 0;
  auto at = queue.begin();
  for (; std::ssize(begun) < max_records && at != queue.end(); ++at) {
    Waiting what = *at;
    if (!is_kept(what)) {
      ++gone;
      continue;
    }
    Slots& slots = what.snapshot ? snapshot_saves : saves;
    const std::int64_t bytes = what.snapshot ? snapshot_bytes : block_bytes;
    const std::uint32_t room = what.tiers & tiers.with_room(bytes);
    if (room == 0 || !slots.has_free()) break;
    for (std::size_t i = 0; i < again.size(); ++i)
      if (((what.tiers & ~room) >> i & 1) != 0)
        later[i].push_back({what.key, what.snapshot, 1u << i, what.attempts, false});
    what.tiers = room;
    OutgoingRecord& record = begun.emplace_back(OutgoingRecord{what, record_of(what), slots.host->take(), nullptr, 0});
    if (slots.device) {
      record.device = slots.device->take();
      pieces.push_back(piece(record.device, record.bytes.data.get(), bytes));
    }
    std::byte* const image = slots.device ? record.device : record.bytes.data.get();
    if (what.snapshot) {
      mover.gather_snapshot(what.key, image);
    } else {
      keys.push_back(what.key);
      images.push_back(image);
    }
  }
  if (!begun.empty()) {
    mover.gather(keys, images);
    const std::int64_t transfer = pieces.empty() ? 0 : backend.transfer_out(pieces);
    for (OutgoingRecord& record : begun) record.transfer = transfer;
  }

  // Their bytes are on the way, and nothing fails from here on.
  give_back.keep();
  const std::int64_t count = std::ssize(begun);
  queue.erase(queue.begin(), at);
  outgoing.splice(outgoing.end(), begun);
  for (std::size_t i = 0; i < again.size(); ++i) {
    again[i].splice(again[i].end(), later[i]);
    shorten(again[i]);
  }
  statistics.dropped += gone;
  if (&queue != &fresh) statistics.offered_again += count;
  return count;
}

void TieredPrefix::Impl::settle() {
  while (!outgoing.empty() && (outgoing.front().device == nullptr || backend.transferred(outgoing.front().transfer))) {
    const OutgoingRecord& record = outgoing.front();
    offer(record);
    if (record.device != nullptr) (record.what.snapshot ? snapshot_saves : saves).device->give(record.device);
    outgoing.pop_front();
  }
}

void TieredPrefix::Impl::offer(const OutgoingRecord& record) {
  // Before the tiers have it: places for what they refuse, because the room that there was has gone meanwhile.
  std::list<Waiting> places(static_cast<std::size_t>(std::popcount(record.what.tiers)));
  const auto [told, is_new] = offered.try_emplace(record.id, record.what);
  if (is_new) told->second.tiers = 0;
  const std::uint32_t taken = tiers.offer(record.id, record.bytes, tier::Content::of_key, record.what.tiers);
  bool first = record.what.first && taken == 0;  // of one of them: a record counts once
  for (std::size_t i = 0; i < again.size(); ++i)
    if (((record.what.tiers & ~taken) >> i & 1) != 0) {
      places.front() = {record.what.key, record.what.snapshot, 1u << i, record.what.attempts,
                        std::exchange(first, false)};
      again[i].splice(again[i].end(), places, places.begin());
      shorten(again[i]);
    }
  if (taken == 0) {
    if (is_new) offered.erase(told);
    return;
  }
  if (record.what.first) ++(record.what.snapshot ? statistics.offered_snapshots : statistics.offered_blocks);
  told->second.tiers |= taken;
  told->second.attempts = std::max(told->second.attempts, record.what.attempts);
}

void TieredPrefix::Impl::note_results() {
  const std::vector<std::vector<tier::WriteResult>> results = tiers.poll();
  for (std::size_t i = 0; i < results.size(); ++i)
    for (const tier::WriteResult& result : results[i]) {
      const auto found = offered.find(result.id);
      if (found == offered.end() || (found->second.tiers >> i & 1) == 0) continue;  // of a promotion
      Waiting what = found->second;
      if ((found->second.tiers &= ~(1u << i)) == 0) offered.erase(found);
      if (result.status == tier::PutStatus::stored) continue;
      what.tiers = 1u << i;
      what.first = false;
      if (result.status == tier::PutStatus::too_large || ++what.attempts >= options.max_attempts)
        ++statistics.dropped;
      else
        again_or_drop(i, what);
    }
}

/// What a tier says is heard once: where no memory is left, the record is given up.
void TieredPrefix::Impl::again_or_drop(std::size_t tier, const Waiting& what) noexcept {
  try {
    wait_for(again[tier], what);
  } catch (const std::bad_alloc&) {
    ++statistics.dropped;
  }
}

// --- loads
// -----------------------------------------------------------------------------------------------------------------------

void TieredPrefix::Impl::give_unused() {
  for (; !in_use.empty() && backend.reached(in_use.front().mark); in_use.pop_front())
    for (std::byte* slot : in_use.front().memory) in_use.front().slots->device->give(slot);
}

struct PrefixLoad::Impl : TieredPrefix::Impl::Left {
  enum class Phase : std::uint8_t { blocks, snapshot, done };
  /// Records that are asked for together, then moved, then inserted.
  struct Batch {
    Batch() {}  // written out: clang 14 asks for a defaulted one before this class is complete
    std::vector<SharedBytes> host;
    std::list<TieredPrefix::Impl::InUse> device;  // one, where the device needs memory of its own
    std::optional<Ticket> asked;
    std::int64_t transfer = 0;
    bool whole = true;  // all of it was found
  };

  Impl(TieredPrefix::Impl& owner_in, const Prompt& prompt_in, Deadline deadline_in);
  ~Impl() override { stop(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  bool advance();
  void wait(Deadline until);
  bool late() const { return owner.tiers.now() >= deadline; }

  void know_keys(std::size_t count);
  void ask_for_blocks();
  void ask(Batch& batch, Slots& slots, std::span<const RecordId> ids, std::int64_t bytes);
  /// Its transfer, where tiers have answered.
  void move_on(Batch& batch, Slots& slots, std::int64_t bytes);
  /// False: not yet. Then what was found, in order from the first, is where the device can read it.
  bool arrive(Batch& batch, Slots& slots, std::int64_t bytes);
  std::vector<std::byte*> images(const Batch& batch) const;
  void release(Batch& batch, Slots& slots, bool queued);
  bool advance_blocks();
  void ask_which_snapshots_exist();
  bool find_snapshot();
  bool advance_snapshot();
  void stop();

  TieredPrefix::Impl& owner;
  const OwnPrompt prompt;
  const Deadline deadline;
  const Deadline begun = owner.tiers.now();
  const std::size_t wanted;  // full blocks of the prompt that a request can begin with
  Phase phase = Phase::blocks;
  std::vector<BlockKey> keys;                // of the first of them; the others follow while these come
  std::size_t first = 0, next = 0, end = 0;  // of blocks: not kept at the start, not asked for, not here
  std::list<Batch> batches;
  // The deepest snapshot behind the deepest that the device has. It is looked for once some blocks have come: most
  // often all do.
  std::size_t below = 0;              // snapshots of blocks from here on have been asked for
  std::vector<std::size_t> possible;  // blocks whose snapshots are asked for, or exist; the deepest last
  std::optional<Ticket> known;        // which of them exist
  std::size_t coming_at = 0;
  std::optional<Batch> coming;
};

PrefixLoad::Impl::Impl(TieredPrefix::Impl& owner_in, const Prompt& prompt_in, Deadline deadline_in)
    : owner(owner_in),
      prompt(prompt_in),
      deadline(deadline_in),
      // At least one token of the prompt is left for a query.
      wanted(prompt.token_ids.empty()
                 ? 0
                 : (prompt.token_ids.size() - 1) / static_cast<std::size_t>(owner.cache.schema().block_tokens)),
      below(wanted) {
  for (; first < wanted; ++first) {
    know_keys(first + 1);
    if (!owner.cache.find_block(keys[first])) break;
  }
  next = end = first;
}

void PrefixLoad::Impl::know_keys(std::size_t count) {
  const Prompt view = prompt.view();
  while (keys.size() < count) keys.push_back(owner.mover.next_key(view, keys));
}

void PrefixLoad::Impl::ask(Batch& batch, Slots& slots, std::span<const RecordId> ids, std::int64_t bytes) {
  std::vector<tier::ReadRequest> requests;
  for (const RecordId& id : ids) {
    batch.host.push_back(slots.host->take());
    requests.push_back({id, bytes, batch.host.back(), owner.views_allowed});
  }
  if (slots.device) {
    batch.device.push_back({0, &slots, {}});
    batch.device.front().memory.reserve(ids.size());
  }
  batch.asked.emplace(owner.tiers.get(std::move(requests), tier::Content::of_key, deadline));
  if (slots.device)  // last: nothing fails any more
    for (std::size_t i = 0; i < ids.size(); ++i) batch.device.front().memory.push_back(slots.device->take());
}

void PrefixLoad::Impl::move_on(Batch& batch, Slots& slots, std::int64_t bytes) {
  if (!batch.asked || !batch.asked->done()) return;
  std::vector<ops::CopyPiece> pieces;
  if (slots.device) pieces.reserve(batch.host.size());
  std::vector<tier::ReadResult> results = batch.asked->take();
  batch.asked.reset();
  std::size_t found = 0;
  for (; found < results.size() && results[found].status == GetStatus::found && results[found].bytes == bytes; ++found)
    batch.host[found] = std::move(results[found].payload);
  batch.whole = found == results.size();
  batch.host.resize(found);
  if (!slots.device || found == 0) return;
  for (std::size_t i = 0; i < found; ++i)
    pieces.push_back(piece(batch.host[i].data.get(), batch.device.front().memory[i], bytes));
  batch.transfer = owner.backend.transfer_in(pieces);
}

bool PrefixLoad::Impl::arrive(Batch& batch, Slots& slots, std::int64_t bytes) {
  move_on(batch, slots, bytes);
  if (batch.asked) return false;
  return batch.host.empty() || !slots.device || owner.backend.transferred(batch.transfer);
}

std::vector<std::byte*> PrefixLoad::Impl::images(const Batch& batch) const {
  if (!batch.device.empty()) {
    const std::vector<std::byte*>& memory = batch.device.front().memory;
    return {memory.begin(), memory.begin() + std::ssize(batch.host)};
  }
  std::vector<std::byte*> out;
  for (const SharedBytes& bytes : batch.host) out.push_back(bytes.data.get());
  return out;
}

/// `queued`: work that reads its device memory was queued.
void PrefixLoad::Impl::release(Batch& batch, Slots& slots, bool queued) {
  if (queued && !batch.device.empty()) {
    batch.device.front().mark = owner.backend.mark();
    owner.in_use.splice(owner.in_use.end(), batch.device);
  }
  for (const TieredPrefix::Impl::InUse& unused : batch.device)
    for (std::byte* slot : unused.memory) slots.device->give(slot);
  batch.device.clear();
  batch.host.clear();
}

void PrefixLoad::Impl::ask_for_blocks() {
  const std::size_t most = std::max<std::size_t>(1, static_cast<std::size_t>(owner.load_slots) / kBatches);
  while (batches.size() < kBatches && next < wanted) {
    std::size_t free = static_cast<std::size_t>(owner.loads.host->num_free());
    if (owner.loads.device) free = std::min(free, static_cast<std::size_t>(owner.loads.device->num_free()));
    const std::size_t count = std::min({most, free, wanted - next});
    if (count == 0) return;
    know_keys(next + count);
    std::vector<RecordId> ids;
    for (std::size_t i = 0; i < count; ++i) ids.push_back(block_record(prompt.tenant, keys[next + i]));
    std::list<Batch> batch(1);
    ask(batch.front(), owner.loads, ids, owner.block_bytes);
    batches.splice(batches.end(), batch);
    next += count;
  }
}

/// A long context is more than the slots: batch by batch, until one is not there as a whole.
bool PrefixLoad::Impl::advance_blocks() {
  for (;;) {
    ask_for_blocks();
    if (batches.empty()) return next == wanted || late();                         // else other loads have the slots
    for (Batch& batch : batches) move_on(batch, owner.loads, owner.block_bytes);  // transfers go on end
    Batch& batch = batches.front();
    if (!arrive(batch, owner.loads, owner.block_bytes)) return false;
    const std::size_t count = batch.host.size();
    const auto brought = static_cast<std::size_t>(owner.mover.insert(prompt.view(), keys, end, images(batch)));
    owner.statistics.loaded_blocks += static_cast<std::int64_t>(brought);
    end += brought;
    const bool go_on = batch.whole && brought == count;
    release(batch, owner.loads, true);
    batches.pop_front();
    if (!go_on) return true;
  }
}

/// The next few, deepest first.
void PrefixLoad::Impl::ask_which_snapshots_exist() {
  std::vector<RecordId> ids;
  std::vector<std::size_t> asked;
  std::size_t left = below;
  for (; left > 0 && ids.size() < kSnapshotsAtATime; --left) {
    const BlockKey& key = keys[left - 1];
    const std::optional<KeptBlock> kept = owner.cache.find_block(key);
    if (kept ? kept->has_snapshot : left <= end) {  // that is as good, or the block is gone again
      left = 0;
      break;
    }
    asked.push_back(left - 1);
    ids.push_back(owner.snapshot_record(prompt.tenant, key));
  }
  std::reverse(asked.begin(), asked.end());
  if (!ids.empty()) known.emplace(owner.tiers.exists(ids, deadline));
  possible = std::move(asked);
  below = left;
}

/// True: it is where the device can read it, or there is none.
bool PrefixLoad::Impl::find_snapshot() {
  for (;;) {
    if (coming) {
      if (!arrive(*coming, owner.snapshot_loads, owner.snapshot_bytes)) return false;
      if (coming->whole) return true;
      release(*coming, owner.snapshot_loads, false);
      coming.reset();
    }
    if (known) {
      if (!known->done()) return false;
      const std::vector<tier::ReadResult> exist = known->take();  // the deepest first
      known.reset();
      std::size_t left = 0;
      for (std::size_t i = 0; i < exist.size(); ++i)
        if (exist[exist.size() - 1 - i].status == GetStatus::found) possible[left++] = possible[i];
      possible.resize(left);
    }
    if (!possible.empty()) {
      if (!owner.snapshot_loads.has_free()) return late();  // another load has the slot
      coming_at = possible.back();
      const RecordId id = owner.snapshot_record(prompt.tenant, keys[coming_at]);
      coming.emplace();
      Undo forget([&] { coming.reset(); });
      ask(*coming, owner.snapshot_loads, {&id, 1}, owner.snapshot_bytes);
      forget.keep();
      possible.pop_back();
      continue;
    }
    if (below == 0) return true;
    ask_which_snapshots_exist();
  }
}

/// Blocks are here: those from `end` on are not.
bool PrefixLoad::Impl::advance_snapshot() {
  if (!find_snapshot()) return false;
  if (coming) {
    owner.statistics.loaded_snapshots += owner.mover.insert_snapshot(keys[coming_at], images(*coming)[0]);
    release(*coming, owner.snapshot_loads, true);
    coming.reset();
  }
  return true;
}

bool PrefixLoad::Impl::advance() {
  owner.give_unused();
  if (phase == Phase::blocks && advance_blocks()) {
    phase = Phase::snapshot;
    if (end < wanted) {
      stop();
      below = end;
    }
  }
  if (phase == Phase::blocks && end > first) {  // tiers have some of it
    know_keys(std::min(wanted, keys.size() + kKeysAtATime));
    if (keys.size() == wanted) (void)find_snapshot();
  }
  if (phase == Phase::snapshot && advance_snapshot()) {
    phase = Phase::done;
    owner.mover.times().tier_load.add(owner.tiers.now() - begun);
  }
  return phase == Phase::done;
}

void PrefixLoad::Impl::wait(Deadline until) {
  const Ticket* ticket = nullptr;
  if (phase == Phase::blocks && !batches.empty() && batches.front().asked) ticket = &*batches.front().asked;
  if (phase == Phase::snapshot && known) ticket = &*known;
  if (phase == Phase::snapshot && coming && coming->asked) ticket = &*coming->asked;
  if (ticket != nullptr)
    (void)ticket->wait(until);
  else
    std::this_thread::sleep_for(kTransferPoll);
}

/// Nothing more is asked for. A transfer under way ends before its memory is used again: they keep their order.
void PrefixLoad::Impl::stop() {
  for (Batch& batch : batches) {
    batch.asked.reset();
    release(batch, owner.loads, true);
  }
  batches.clear();
  if (coming) {
    coming->asked.reset();
    release(*coming, owner.snapshot_loads, true);
  }
  coming.reset();
  known.reset();
  possible.clear();
}

PrefixLoad::PrefixLoad(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PrefixLoad::~PrefixLoad() {
  if (!impl_) return;  // moved from
  TieredPrefix::Impl& owner = impl_->owner;
  const TieredPrefix::Impl::Try inside(owner);
  if (inside)
    impl_.reset();
  else
    owner.leave(std::move(impl_));
}
PrefixLoad::PrefixLoad(PrefixLoad&&) noexcept = default;
bool PrefixLoad::advance() try {
  const TieredPrefix::Impl::Call call(impl_->owner);
  return impl_->advance();
} catch (const std::bad_alloc&) {
  fail_for_memory();
}
std::int64_t PrefixLoad::brought_blocks() const {
  const TieredPrefix::Impl::Call call(impl_->owner);
  return static_cast<std::int64_t>(impl_->end - impl_->first);
}
std::int64_t PrefixLoad::wanted_blocks() const {
  const TieredPrefix::Impl::Call call(impl_->owner);
  return static_cast<std::int64_t>(impl_->wanted - impl_->first);
}

// --- the whole
// -----------------------------------------------------------------------------------------------------------------------

TieredPrefix::TieredPrefix(KVCacheManager& cache, Tiers& tiers, const TieredOptions& options) try
    : impl_(std::make_unique<Impl>(cache, tiers.chain(), tiers.backend(), options)) {
} catch (const std::bad_alloc&) {
  fail_for_memory();
}
TieredPrefix::TieredPrefix(KVCacheManager& cache, TierChain& tiers, const TieredOptions& options) try
    : impl_(std::make_unique<Impl>(cache, tiers, nullptr, options)) {
} catch (const std::bad_alloc&) {
  fail_for_memory();
}
TieredPrefix::~TieredPrefix() = default;

std::int64_t TieredPrefix::save(std::int64_t max_records) try {
  Impl& m = *impl_;
  const Impl::Call call(m);
  const TimedCall timed(m.cache, &CallTimes::tier_save);
  m.note_results();
  m.take_events();
  m.settle();
  std::int64_t begun = m.begin(m.fresh, max_records);
  for (std::list<Impl::Waiting>& queue : m.again) begun += m.begin(queue, max_records - begun);
  m.settle();
  m.statistics.waiting = m.waiting();
  return m.left();
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

bool TieredPrefix::save_all(Deadline deadline, const TieredProgress& progress) {
  const Impl::Call call(*impl_);
  std::int64_t most = 0;
  for (;;) {
    const std::int64_t left = save(kMaxSlots);
    most = std::max(most, left);
    if (progress && !progress(most - left, most)) return false;
    if (left == 0) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(impl_->outgoing.empty() ? std::chrono::microseconds(kQueuePoll) : kTransferPoll);
  }
}

PrefixLoad TieredPrefix::start_load(const Prompt& prompt, Deadline deadline) try {
  const Impl::Call call(*impl_);
  return PrefixLoad(std::make_unique<PrefixLoad::Impl>(*impl_, prompt, deadline));
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::int64_t TieredPrefix::load(const Prompt& prompt, Deadline deadline, const TieredProgress& progress) try {
  const Impl::Call call(*impl_);
  PrefixLoad load = start_load(prompt, deadline);
  while (!load.advance()) {
    if (progress && !progress(load.brought_blocks(), load.wanted_blocks())) break;
    load.impl_->wait(std::min(deadline, std::chrono::steady_clock::now() + kProgressStep));
  }
  return load.brought_blocks();
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

TieredStatistics TieredPrefix::statistics() const {
  const Impl::Call call(*impl_);
  return impl_->statistics;
}

}  // namespace kv4
