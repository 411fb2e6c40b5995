#include "cache/prefix_saver.h"

#include <algorithm>
#include <bit>
#include <new>
#include <optional>
#include <utility>

#include "base/undo.h"

namespace kv4 {
namespace {

constexpr int kSnapshotSlots = 2;  // on their way off the device

}  // namespace

PrefixSaver::PrefixSaver(TieredCache& joint)
    : joint_(joint),
      block_slots_([&joint] {
        const int count = staging_slots_for(joint.options.save_bytes, joint.block_bytes, 1);
        return StagingSlots(joint.mover.backend(), joint.block_bytes, count, std::max(1, count / 8));
      }()),
      snapshot_slots_(joint.mover.backend(), joint.snapshot_bytes, kSnapshotSlots, kSnapshotSlots),
      again_(joint.tiers.size()) {}

std::int64_t PrefixSaver::save(std::int64_t max_records) {
  note_results();
  take_events();
  settle();
  std::int64_t begun = begin(fresh_, max_records);
  for (std::list<Waiting>& queue : again_) begun += begin(queue, max_records - begun);
  settle();
  statistics_.waiting = waiting();
  return statistics_.waiting + std::ssize(outgoing_);
}

tier::RecordId PrefixSaver::record_of(const Waiting& what) {
  const TenantId tenant = joint_.cache.find_block(what.key)->tenant;
  return what.snapshot ? joint_.snapshot_record(tenant, what.key) : TieredCache::block_record(tenant, what.key);
}

bool PrefixSaver::is_kept(const Waiting& what) const {
  const std::optional<PrefixBlock> kept = joint_.cache.find_block(what.key);
  return kept && (!what.snapshot || kept->has_snapshot);
}

std::int64_t PrefixSaver::waiting() const {
  std::int64_t count = std::ssize(fresh_);
  for (const std::list<Waiting>& queue : again_) count += std::ssize(queue);
  return count;
}

void PrefixSaver::wait_for(std::list<Waiting>& queue, const Waiting& what) {
  queue.push_back(what);
  shorten(queue);
}

void PrefixSaver::shorten(std::list<Waiting>& queue) {
  for (; std::ssize(queue) > joint_.options.max_waiting; ++statistics_.dropped) queue.pop_front();
}

void PrefixSaver::take_events() {
  do {
    for (; next_event_ < num_events_; ++next_event_) {
      const BlockEvent& event = events_[next_event_];
      if (event.inserted || event.kind == BlockEvent::Kind::evicted) continue;
      wait_for(fresh_, {event.key, event.kind == BlockEvent::Kind::snapshot, joint_.tiers.all(), 0, true});
    }
    num_events_ = joint_.cache.read_block_events(events_);
    next_event_ = 0;
  } while (num_events_ > 0);
  statistics_.lost_events = static_cast<std::int64_t>(joint_.cache.prefix_statistics().lost_events);
}

std::int64_t PrefixSaver::begin(std::list<Waiting>& queue, std::int64_t max_records) {
  std::list<Outgoing> begun;
  std::vector<std::list<Waiting>> later(again_.size());  // for tiers that have no room
  std::vector<BlockKey> keys;
  std::vector<std::byte*> images;
  std::vector<ops::CopyPiece> pieces;
  Undo give_back([&] {
    for (const Outgoing& record : begun)
      if (record.device != nullptr) slots_of(record.what).device->give(record.device);
  });
  std::int64_t gone = 0;
  auto at = queue.begin();
  for (; std::ssize(begun) < max_records && at != queue.end(); ++at) {
    Waiting what = *at;
    if (!is_kept(what)) {
      ++gone;
      continue;
    }
    StagingSlots& slots = slots_of(what);
    const std::int64_t bytes = what.snapshot ? joint_.snapshot_bytes : joint_.block_bytes;
    const std::uint32_t room = what.tiers & joint_.tiers.with_room(bytes);
    if (room == 0 || slots.num_free() == 0) break;
    for (std::size_t i = 0; i < again_.size(); ++i)
      if (((what.tiers & ~room) >> i & 1) != 0)
        later[i].push_back({what.key, what.snapshot, 1u << i, what.attempts, false});
    what.tiers = room;
    Outgoing& record = begun.emplace_back(Outgoing{what, record_of(what), slots.host->take(), nullptr, 0});
    if (slots.device) {
      record.device = slots.device->take();
      pieces.push_back(copy_piece(record.device, record.bytes.data.get(), bytes));
    }
    std::byte* const image = slots.device ? record.device : record.bytes.data.get();
    if (what.snapshot) {
      joint_.mover.gather_snapshot(what.key, image);
    } else {
      keys.push_back(what.key);
      images.push_back(image);
    }
  }
  if (!begun.empty()) {
    joint_.mover.gather(keys, images);
    const std::int64_t transfer = pieces.empty() ? 0 : joint_.backend.transfer_out(pieces);
    for (Outgoing& record : begun) record.transfer = transfer;
  }

  // The bytes are on their way, and nothing fails from here on.
  give_back.keep();
  const std::int64_t count = std::ssize(begun);
  queue.erase(queue.begin(), at);
  outgoing_.splice(outgoing_.end(), begun);
  for (std::size_t i = 0; i < again_.size(); ++i) {
    again_[i].splice(again_[i].end(), later[i]);
    shorten(again_[i]);
  }
  statistics_.dropped += gone;
  if (&queue != &fresh_) statistics_.offered_again += count;
  return count;
}

void PrefixSaver::settle() {
  while (!outgoing_.empty()) {
    const Outgoing& record = outgoing_.front();
    if (record.device != nullptr && !joint_.backend.transferred(record.transfer)) return;
    offer(record);
    if (record.device != nullptr) slots_of(record.what).device->give(record.device);
    outgoing_.pop_front();
  }
}

void PrefixSaver::offer(const Outgoing& record) {
  // Made before the tiers have the record: places for the tiers that refuse it, because their room has gone meanwhile.
  std::list<Waiting> places(static_cast<std::size_t>(std::popcount(record.what.tiers)));
  const auto [told, is_new] = offered_.try_emplace(record.id, record.what);
  if (is_new) told->second.tiers = 0;
  const std::uint32_t taken = joint_.tiers.offer(record.id, record.bytes, tier::Content::of_key, record.what.tiers);
  bool first = record.what.first && taken == 0;  // only one of them: a record counts once
  for (std::size_t i = 0; i < again_.size(); ++i)
    if (((record.what.tiers & ~taken) >> i & 1) != 0) {
      places.front() = {record.what.key, record.what.snapshot, 1u << i, record.what.attempts,
                        std::exchange(first, false)};
      again_[i].splice(again_[i].end(), places, places.begin());
      shorten(again_[i]);
    }
  if (taken == 0) {
    if (is_new) offered_.erase(told);
    return;
  }
  if (record.what.first) ++(record.what.snapshot ? statistics_.offered_snapshots : statistics_.offered_blocks);
  told->second.tiers |= taken;
  told->second.attempts = std::max(told->second.attempts, record.what.attempts);
}

void PrefixSaver::note_results() {
  const std::vector<std::vector<tier::WriteResult>> results = joint_.tiers.poll();
  for (std::size_t i = 0; i < results.size(); ++i)
    for (const tier::WriteResult& result : results[i]) {
      const auto found = offered_.find(result.id);
      if (found == offered_.end() || (found->second.tiers >> i & 1) == 0) continue;  // the result of a promotion
      Waiting what = found->second;
      if ((found->second.tiers &= ~(1u << i)) == 0) offered_.erase(found);
      if (result.status == tier::PutStatus::stored) continue;
      what.tiers = 1u << i;
      what.first = false;
      if (result.status == tier::PutStatus::too_large || ++what.attempts >= joint_.options.max_attempts)
        ++statistics_.dropped;
      else
        again_or_drop(i, what);
    }
}

/// A tier reports a result once: if memory is refused here, the record is dropped.
void PrefixSaver::again_or_drop(std::size_t tier, const Waiting& what) noexcept {
  try {
    wait_for(again_[tier], what);
  } catch (const std::bad_alloc&) {
    ++statistics_.dropped;
  }
}

}  // namespace kv4
