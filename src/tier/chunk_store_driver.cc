// The driver of a ChunkStore: the one thread that takes batches from the callers through the tiers.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/undo.h"
#include "tier/chunk_store_impl.h"

namespace kv4 {
namespace {

constexpr std::size_t kCopiedTogether = 16;

}  // namespace

using tier::GetStatus;
using tier::PutStatus;
using tier::SharedBytes;

void ChunkStore::Impl::drive() noexcept {
  for (bool stop = false; !stop;) {
    tier::Deadline next = tier::Deadline::max();
    for (const Batch& batch : active)
      if (!batch.late) next = std::min(next, batch.deadline);
    wakeup->wait_until(next);
    const std::lock_guard chain_lock(chain_mutex);
    take_inbox();
    settle_writes();
    for (auto at = active.begin(); at != active.end();) {
      const auto batch = at++;
      if (advance(*batch)) finish(batch);
    }
    const std::lock_guard lock(mutex);
    stop = stopping;
  }
  const std::lock_guard chain_lock(chain_mutex);
  take_inbox();
  while (!active.empty()) {
    give_up(active.front());
    finish(active.begin());
  }
}

void ChunkStore::Impl::take_inbox() {
  Batches taken;
  {
    const std::lock_guard lock(mutex);
    taken.splice(taken.end(), inbox);
  }
  while (!taken.empty()) {
    active.splice(active.end(), taken, taken.begin());
    Batch& batch = active.back();
    try {
      begin(batch);
    } catch (const std::bad_alloc&) {  // chunks that were not begun are refused
      for (std::size_t i = 0; i < batch.items.size(); ++i)
        if (!batch.items[i].answered && batch.items[i].waiting == 0) answer(batch, i, ChunkStatus::refused);
    }
    if (batch.action == ChunkAction::put || batch.action == ChunkAction::remove) {
      const std::lock_guard lock(mutex);
      forget_queued(batch);
    }
  }
}

/// Under the lock.
void ChunkStore::Impl::forget_queued(const Batch& batch) {
  for (const Item& item : batch.items)
    if (const auto found = queued.find(item.id); found != queued.end() && --found->second.count == 0)
      queued.erase(found);
}

void ChunkStore::Impl::begin(Batch& batch) {
  switch (batch.action) {
    case ChunkAction::put:
      for (std::size_t i = 0; i < batch.items.size(); ++i) offer(batch, i);
      break;
    case ChunkAction::remove:
      for (std::size_t i = 0; i < batch.items.size(); ++i) {
        const std::uint64_t tag = next_tag++;
        writes.emplace(tag, Write{&batch, i});
        const std::uint32_t taken = chain.withdraw(batch.items[i].id, tag);
        batch.items[i].waiting = std::popcount(taken);
        batch.items[i].failed = taken != chain.all();
        if (taken != 0) continue;
        writes.erase(tag);
        answer(batch, i, ChunkStatus::refused);
      }
      break;
    case ChunkAction::get: begin_gets(batch); break;
    case ChunkAction::exists: {
      std::vector<tier::RecordId> ids;
      for (const Item& item : batch.items) ids.push_back(item.id);
      batch.lookups.push_back({0, chain.exists(ids, batch.deadline)});
      break;
    }
    case ChunkAction::flush: batch.flushes = chain.start_flush(batch.deadline); batch.missed = std::exchange(missed, 0);
  }
}

/// Memory of the caller's, for as long as a tier uses it.
SharedBytes ChunkStore::Impl::lend(Batch& batch, const Item& item, std::byte* memory, std::size_t bytes) {
  ++batch.lent->transfers;
  // Where memory is refused, the deleter runs at once.
  return {std::shared_ptr<std::byte[]>(memory,
                                       [lent = batch.lent, region = item.region, wake = wakeup](std::byte*) mutable {
                                         region.reset();
                                         --lent->transfers;
                                         wake->notify();
                                       }),
          bytes};
}

void ChunkStore::Impl::offer(Batch& batch, std::size_t index) {
  Item& item = batch.items[index];
  if (batch.results.statuses[index] == ChunkStatus::refused) return answer(batch, index, ChunkStatus::refused);
  const std::span<std::byte> value = item.copy ? item.copy.span() : item.pieces.front();
  SharedBytes payload;
  tier::WriteDetails details{item.label, next_tag++};
  if (const std::optional<tier::TrimPlan> plan = tier::plan_trim(value)) {
    payload = chain.buffer(plan->payload_bytes);
    if (payload) {
      tier::trim(value, *plan, payload.span());
      details.label = std::make_shared<tier::ChunkLabel>(
          tier::make_label(item.label->key_span(), {tier::kTrimmed, item.value_bytes}));
      const std::lock_guard lock(mutex);
      counts.trimmed_bytes += item.value_bytes - plan->payload_bytes;
    }
  }
  if (!payload) payload = item.copy ? item.copy : lend(batch, item, value.data(), value.size());
  item.copy = {};
  writes.emplace(details.tag, Write{&batch, index});
  const std::uint32_t taken = chain.offer(item.id, payload, content, chain.all(), details);
  item.waiting = std::popcount(taken);
  const std::lock_guard lock(mutex);
  counts.put_bytes += item.value_bytes;
  if (taken != 0) {
    missed |= chain.all() & ~taken;
    return;
  }
  writes.erase(details.tag);
  answer(batch, index, ChunkStatus::refused);
}

void ChunkStore::Impl::begin_gets(Batch& batch) {
  // Values that are copied to their place come in small groups, so that some are copied while others are read.
  const bool copies =
      std::any_of(batch.items.begin(), batch.items.end(), [](const Item& item) { return !item.region; });
  const std::size_t group = copies ? kCopiedTogether : batch.items.size();
  std::vector<tier::ReadRequest> requests;
  for (std::size_t i = 0; i < batch.items.size(); ++i) {
    Item& item = batch.items[i];
    tier::ReadRequest& request = requests.emplace_back();
    request.id = item.id;
    request.label = item.label;
    request.max_bytes = std::min(item.value_bytes, kMaxChunkValue);
    request.view_allowed = !item.region;
    request.copy_promoted = item.region != nullptr;
    if (item.region) request.to = lend(batch, item, item.pieces.front().data(), request.max_bytes);
    if (requests.size() < group && i + 1 < batch.items.size()) continue;
    const std::size_t first = i + 1 - requests.size();
    batch.lookups.push_back({first, chain.get(std::exchange(requests, {}), content, batch.deadline)});
  }
}

void ChunkStore::Impl::settle_writes() {
  for (const std::vector<tier::WriteResult>& of_tier : chain.drain()) {
    for (const tier::WriteResult& result : of_tier) {
      const auto found = writes.find(result.tag);
      if (found == writes.end()) continue;  // a promoted record, or one whose batch has ended
      const Write write = found->second;
      Batch& batch = *write.batch;
      Item& item = batch.items[write.item];
      ChunkStatus& status = batch.results.statuses[write.item];
      switch (result.status) {
        case PutStatus::stored: status = ChunkStatus::ok; break;
        case PutStatus::no_space: item.no_space = true; break;
        case PutStatus::too_large: item.too_large = true; break;
        case PutStatus::failed: item.failed = true;
      }
      if (--item.waiting > 0) continue;
      writes.erase(found);
      if (batch.action == ChunkAction::remove)  // no tier may have it
        status = item.failed ? ChunkStatus::failed : ChunkStatus::ok;
      else if (status != ChunkStatus::ok)
        status = item.failed ? ChunkStatus::failed : item.no_space ? ChunkStatus::no_space : ChunkStatus::too_large;
      answer(batch, write.item, status);
    }
  }
}

bool ChunkStore::Impl::advance(Batch& batch) {
  const bool over = clock->now() >= batch.deadline;
  if (!batch.late) {
    std::erase_if(batch.lookups, [&](Lookup& lookup) {
      if (!lookup.ticket.done()) return false;
      batch.action == ChunkAction::get ? take_gets(batch, lookup) : take_exists(batch, lookup);
      return true;
    });
    bool waits = batch.unanswered > 0;
    for (const tier::TierQueue::FlushTicket& ticket : batch.flushes) waits = waits || !ticket.done();
    if (waits && !over) return false;
    give_up(batch);
  }
  return batch.lent->transfers == 0;
}

void ChunkStore::Impl::take_exists(Batch& batch, Lookup& lookup) {
  const std::vector<tier::ReadResult> results = lookup.ticket.take();
  for (std::size_t i = 0; i < results.size(); ++i)
    answer(batch, lookup.first + i,
           results[i].status == GetStatus::found     ? ChunkStatus::ok
           : results[i].status == GetStatus::missing ? ChunkStatus::missing
                                                     : ChunkStatus::failed);
}

void ChunkStore::Impl::take_gets(Batch& batch, Lookup& lookup) {
  std::vector<tier::ReadResult> results = lookup.ticket.take();
  for (std::size_t i = 0; i < results.size(); ++i) {
    ChunkStatus status = ChunkStatus::failed;
    std::int64_t bytes = 0;
    switch (results[i].status) {
      case GetStatus::found:
        status = take_value(batch, lookup.first + i, results[i]);
        if (status == ChunkStatus::ok || status == ChunkStatus::too_small) bytes = results[i].coding.decoded_bytes;
        break;
      case GetStatus::missing:
      case GetStatus::damaged: status = ChunkStatus::missing; break;
      case GetStatus::too_small:
        status = ChunkStatus::too_small;
        bytes = std::max(results[i].bytes, results[i].coding.decoded_bytes);
        break;
      case GetStatus::failed: break;
    }
    results[i] = {};  // gives the memory back
    answer(batch, lookup.first + i, status, bytes);
  }
}

/// Puts a value that a tier has found into its place. A value that is not what its header says is a miss.
ChunkStatus ChunkStore::Impl::take_value(Batch& batch, std::size_t index, tier::ReadResult& found) {
  const Item& item = batch.items[index];
  const tier::ChunkCoding& coding = found.coding;
  const auto damaged = [&] {
    const std::lock_guard lock(mutex);
    ++counts.damaged;
    return ChunkStatus::missing;
  };
  const bool trimmed = coding.coding == tier::kTrimmed;
  if (coding.decoded_bytes < 0 || coding.decoded_bytes > kMaxChunkValue || coding.coding > tier::kTrimmed ||
      (trimmed ? found.bytes >= coding.decoded_bytes : found.bytes != coding.decoded_bytes))
    return damaged();
  if (coding.decoded_bytes > item.value_bytes) return ChunkStatus::too_small;
  const auto stored = std::span<const std::byte>(found.payload.data.get(), static_cast<std::size_t>(found.bytes));
  try {
    if (item.pieces.size() == 1) {
      const std::span<std::byte> to = item.pieces.front().first(coding.decoded_bytes);
      if (!stored.empty() && stored.data() != to.data()) std::memcpy(to.data(), stored.data(), stored.size());
      if (trimmed && !tier::expand(to, found.bytes)) return damaged();
      return ChunkStatus::ok;
    }
    std::vector<std::byte> whole;
    std::span<const std::byte> value = stored;
    if (trimmed) {
      whole.resize(coding.decoded_bytes);
      std::copy(stored.begin(), stored.end(), whole.begin());
      if (!tier::expand(whole, found.bytes)) return damaged();
      value = whole;
    }
    std::span<const std::byte> rest = value;
    for (const std::span<std::byte>& piece : item.pieces) {
      const std::size_t bytes = std::min(piece.size(), rest.size());
      if (bytes > 0) std::memcpy(piece.data(), rest.data(), bytes);
      rest = rest.subspan(bytes);
    }
    return ChunkStatus::ok;
  } catch (const std::bad_alloc&) {
    return ChunkStatus::failed;
  }
}

void ChunkStore::Impl::answer(Batch& batch, std::size_t index, ChunkStatus status, std::int64_t bytes) {
  Item& item = batch.items[index];
  if (std::exchange(item.answered, true)) return;
  batch.results.statuses[index] = status;
  batch.results.bytes[index] = bytes;
  item.region.reset();
  --batch.unanswered;
}

/// Ends the batch but for the memory that it has lent. Late answers find nobody.
void ChunkStore::Impl::give_up(Batch& batch) {
  batch.late = true;
  batch.lookups.clear();
  for (std::size_t i = 0; i < batch.flushes.size(); ++i)
    batch.results.flushed.push_back((batch.missed >> i & 1) != 0 ? tier::FlushStatus::failed
                                                                 : batch.flushes[i].status());
  batch.flushes.clear();
  if (batch.unanswered == 0) return;
  if (batch.action == ChunkAction::put || batch.action == ChunkAction::remove)
    std::erase_if(writes, [&](const auto& entry) { return entry.second.batch == &batch; });
  for (std::size_t i = 0; i < batch.items.size(); ++i) {
    // A put that one tier has stored is stored, whatever the others do.
    const bool stored = batch.action == ChunkAction::put && batch.results.statuses[i] == ChunkStatus::ok;
    answer(batch, i, stored ? ChunkStatus::ok : ChunkStatus::failed);
  }
}

void ChunkStore::Impl::finish(Batches::iterator batch) {
  ChunkResults& results = batch->results;
  batch->items.clear();  // gives regions back before the caller can know of the end
  const std::lock_guard lock(mutex);
  for (std::size_t i = 0; i < results.statuses.size(); ++i) {
    const ChunkStatus status = results.statuses[i];
    counts.refused += status == ChunkStatus::refused;
    counts.failed += status == ChunkStatus::failed;
    if (results.action != ChunkAction::get || status != ChunkStatus::ok) continue;
    ++counts.hits;
    counts.hit_bytes += results.bytes[i];
  }
  open.erase(batch->number);
  if (done.empty()) event.raise();
  done.splice(done.end(), active, batch);
  ended.notify_all();
}

}  // namespace kv4
