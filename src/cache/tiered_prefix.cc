#include "cache/tiered_prefix.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace kv4 {
namespace {

tier::RecordId block_record(TenantId tenant, const BlockKey& key) {
  tier::RecordId id{.tenant = static_cast<std::uint64_t>(tenant), .key = {}};
  std::memcpy(id.key.data(), key.data(), key.size());
  return id;
}

}  // namespace

/// A key of its own that follows from the block's.
tier::RecordId TieredPrefix::snapshot_record(TenantId tenant, const BlockKey& key) {
  static constexpr std::string_view kWhat = "kv4 snapshot";
  return block_record(tenant, hasher_.block(key, {}, std::as_bytes(std::span(kWhat))));
}

void TieredPrefix::offer(const tier::RecordId& id, std::int64_t& count) {
  const bool taken = tiers_.put(id, buffer_, tier::Content::of_key) > 0;
  (taken ? count : statistics_.refused) += 1;
}

std::int64_t TieredPrefix::save(std::int64_t max_records) {
  std::array<BlockEvent, 64> events;
  std::int64_t done = 0;
  while (done < max_records) {
    const std::size_t most = std::min(events.size(), static_cast<std::size_t>(max_records - done));
    const std::size_t count = cache_.read_block_events(std::span(events).first(most));
    if (count == 0) break;
    done += static_cast<std::int64_t>(count);
    for (const BlockEvent& event : std::span(events).first(count)) {
      const std::optional<KeptBlock> kept = cache_.find_block(event.key);
      if (!kept || event.inserted || event.kind == BlockEvent::Kind::evicted) continue;
      if (event.kind == BlockEvent::Kind::stored) {
        buffer_.resize(static_cast<std::size_t>(cache_.schema().block_image_bytes));
        if (cache_.read_block(event.key, buffer_))
          offer(block_record(kept->tenant, event.key), statistics_.offered_blocks);
      } else {
        buffer_.resize(static_cast<std::size_t>(cache_.snapshot_bytes()));
        if (cache_.read_snapshot(event.key, buffer_))
          offer(snapshot_record(kept->tenant, event.key), statistics_.offered_snapshots);
      }
    }
  }
  statistics_.lost_events = static_cast<std::int64_t>(cache_.prefix_statistics().lost_events);
  tiers_.poll();
  return done;
}

std::int64_t TieredPrefix::load(const Prompt& prompt, tier::Deadline deadline) {
  std::vector<BlockKey> keys = cache_.block_keys(prompt);
  // At least one token of the prompt is left for a query.
  const std::size_t block_tokens = static_cast<std::size_t>(cache_.schema().block_tokens);
  keys.resize(prompt.token_ids.empty() ? 0 : (prompt.token_ids.size() - 1) / block_tokens);
  std::size_t first = 0;
  while (first < keys.size() && cache_.find_block(keys[first])) ++first;

  // A long context is more than the queues' memory: batch by batch, until one is not there as a whole.
  const std::int64_t block_bytes = cache_.schema().block_image_bytes;
  const std::size_t batch = static_cast<std::size_t>(std::max<std::int64_t>(1, batch_bytes_ / block_bytes));
  std::size_t end = first;
  for (std::size_t wanted = end; end < keys.size() && end == wanted;) {
    wanted = std::min(keys.size(), end + batch);
    end += load_blocks(prompt, std::span(keys).subspan(end, wanted - end), deadline);
  }
  keys.resize(end);
  load_snapshot(prompt, keys, deadline);
  return static_cast<std::int64_t>(end - first);
}

std::size_t TieredPrefix::load_blocks(const Prompt& prompt, std::span<const BlockKey> keys, tier::Deadline deadline) {
  const std::int64_t block_bytes = cache_.schema().block_image_bytes;
  std::vector<tier::ReadRequest> requests;
  for (const BlockKey& key : keys) requests.push_back({block_record(prompt.tenant, key), block_bytes, {}});
  tier::TierChain::Ticket ticket = tiers_.get(std::move(requests), tier::Content::of_key, deadline);
  ticket.wait(deadline);
  const std::vector<tier::ReadResult> results = ticket.take();
  std::vector<std::span<const std::byte>> blocks;
  for (const tier::ReadResult& result : results) {
    if (result.status != tier::GetStatus::found || result.bytes != block_bytes) break;
    blocks.push_back(result.payload.span().first(static_cast<std::size_t>(result.bytes)));
  }
  const std::int64_t brought = cache_.insert_blocks(prompt, blocks);
  statistics_.loaded_blocks += brought;
  return static_cast<std::size_t>(brought);
}

// The deepest one that any tier has, if it lies behind the deepest of the device.
void TieredPrefix::load_snapshot(const Prompt& prompt, const std::vector<BlockKey>& keys, tier::Deadline deadline) {
  std::size_t first = keys.size();
  while (first > 0 && !cache_.find_block(keys[first - 1])->has_snapshot) --first;
  std::vector<tier::RecordId> ids;
  for (std::size_t i = first; i < keys.size(); ++i) ids.push_back(snapshot_record(prompt.tenant, keys[i]));
  if (ids.empty()) return;
  tier::TierChain::Ticket known = tiers_.exists(ids, deadline);
  known.wait(deadline);
  const std::vector<tier::ReadResult> exist = known.take();
  for (std::size_t i = ids.size(); i-- > 0;) {
    if (exist[i].status != tier::GetStatus::found) continue;
    tier::TierChain::Ticket ticket =
        tiers_.get({{ids[i], cache_.snapshot_bytes(), {}}}, tier::Content::of_key, deadline);
    ticket.wait(deadline);
    const std::vector<tier::ReadResult> result = ticket.take();
    if (result[0].status != tier::GetStatus::found || result[0].bytes != cache_.snapshot_bytes()) continue;
    const std::span<const std::byte> bytes = result[0].payload.span().first(static_cast<std::size_t>(result[0].bytes));
    statistics_.loaded_snapshots += cache_.insert_snapshot(keys[first + i], bytes);
    return;
  }
}

}  // namespace kv4
