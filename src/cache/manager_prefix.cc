// The manager's side of the prefix cache: what a prompt finds, what a commit leaves, what room costs.
#include <algorithm>
#include <utility>

#include "backend/image_pieces.h"
#include "backend/nvtx_range.h"
#include "base/check.h"
#include "cache/cache_call.h"
#include "cache/manager_impl.h"

namespace kv4 {

// --- blocks
// ---------------------------------------------------------------------------------------------------------------------

std::int64_t KVCacheManager::Impl::num_available(TenantId tenant) const {
  return allocator.num_free() + (prefix ? prefix->index.num_evictable(tenant) : 0);
}

BlockId KVCacheManager::Impl::take_block(TenantId tenant) {
  if (allocator.num_free() == 0) free_evicted(prefix->index.evict(tenant).value());
  return allocator.allocate().value();
}

void KVCacheManager::Impl::free_evicted(const Evicted& gone) {
  allocator.unpublish(gone.block);
  prefix->give_place(gone.snapshot);
  ++prefix->statistics.evicted_blocks;
}

void KVCacheManager::Impl::cut_chain(std::int32_t row, std::int64_t blocks) {
  Sequence& s = sequences[static_cast<std::size_t>(row)];
  PrefixChain& chain = s.chain;
  for (; chain.blocks > blocks; --chain.blocks) {
    if (chain.latest == chain.tail) leave_latest(s);
    chain.tail = prefix->index.unpin_last(chain.tail);
  }
}

// The latest snapshot of a request that ends is where its continuation will begin.
void KVCacheManager::Impl::end_chain(std::int32_t row) {
  PrefixChain& chain = sequences[static_cast<std::size_t>(row)].chain;
  if (chain.latest != kNoSlot) prefix->leave(chain.latest, chain.publishes);
  if (chain.tail != kNoSlot) {
    prefix->index.unpin(chain.tail);
    if (!chain.publishes) prefix->index.forget_tail(chain.tail, [this](const Evicted& gone) { free_evicted(gone); });
  }
  chain.latest = chain.tail = kNoSlot;
  chain.blocks = 0;
}

void KVCacheManager::Impl::fork_chain(PrefixChain parent, Sequence& child, std::int64_t shared_blocks) {
  child.chain = std::move(parent);
  child.chain.latest = kNoSlot;
  for (; child.chain.blocks > shared_blocks; --child.chain.blocks)
    child.chain.tail = prefix->index.parent(child.chain.tail);
  if (child.chain.tail != kNoSlot) prefix->index.pin(child.chain.tail);
}

// A key that is there already came from the same tokens: the two blocks have the same bytes, and one is enough.
void KVCacheManager::Impl::publish(std::int32_t row) {
  Sequence& s = sequences[static_cast<std::size_t>(row)];
  PrefixChain& chain = s.chain;
  for (; chain.blocks < s.length() / block_tokens(); ++chain.blocks) {
    const BlockId block = tables.block(row, chain.blocks);
    const bool first = chain.tail == kNoSlot;
    const std::size_t i = static_cast<std::size_t>(chain.blocks);
    const BlockKey key = prefix->block_key(first ? chain.root : prefix->index.key(chain.tail), block_ids_of(block),
                                           i < chain.extra.size() ? chain.extra[i] : std::string_view());
    // A chain is one tenant's, whoever goes on with it: else a tenant's block could wait for another's.
    const TenantId tenant = first ? chain.tenant : prefix->index.tenant(chain.tail);
    const PrefixIndex::Stored stored = prefix->index.append(tenant, chain.tail, key, block, chain.weights_slot).value();
    chain.tail = stored.slot;
    if (stored.is_new) {
      allocator.publish(block);
      ++prefix->statistics.stored_blocks;
      continue;
    }
    const BlockId there = prefix->index.block(stored.slot);
    allocator.retain(there);
    tables.set_block(row, chain.blocks, there);
    allocator.release(block);
    ++prefix->statistics.joined_blocks;
  }
}

// --- a prompt
// ---------------------------------------------------------------------------------------------------------------------

void KVCacheManager::Impl::hold_chain(std::int32_t row, const KeptChain& kept) {
  PrefixChain& chain = sequences[static_cast<std::size_t>(row)].chain;
  chain.tail = kept.tail;
  chain.blocks = kept.blocks;
  Slot slot = kept.tail;
  for (std::int64_t i = kept.blocks; i-- > 0; slot = prefix->index.parent(slot)) {
    allocator.retain(prefix->index.block(slot));
    tables.set_block(row, i, prefix->index.block(slot));
  }
}

void KVCacheManager::Impl::share_prefix(std::int32_t row, const PrefixMatch& match) {
  Sequence& s = sequences[static_cast<std::size_t>(row)];
  if (match.slot != kNoSlot) prefix->index.pin(match.slot);
  hold_chain(row, {match.slot, match.usable_tokens / block_tokens()});
  s.chain.replay_end = match.resume_at < match.usable_tokens ? match.usable_tokens : 0;
  // A snapshot has the backbone's windows; without one they begin here, and so do those of draft stages.
  for (GroupProgress& g : s.groups) g = {match.resume_at, match.resume_at, match.resume_at, match.resume_at};
  if (match.snapshot == kNoSnapshot) return;
  s.groups[0].window_begin = 0;
  ++prefix->statistics.restored_snapshots;
}

// The state that a request begins with where it resumes.
void KVCacheManager::Impl::restore_slot(std::int32_t slot, const PrefixMatch& match) {
  if (match.resume_at == 0) return;
  std::vector<ops::CopyPiece> pieces;
  if (match.snapshot != kNoSnapshot)
    pieces = pieces_from_image(layers, snapshot_layout(schema, match.resume_at), slot, prefix->address(match.snapshot));
  // Spans before this are closed: nothing of them is to be folded.
  for (const PendingPart& part : snapshot_parts.pending) {
    const ops::KindDesc& kind = layers[static_cast<std::size_t>(part.layer)].kinds[part.kind];
    const ops::PendingDesc& p = kind.pending;
    if (!kind.overlap)
      pieces.push_back({prefix->boundary(match.resume_at / block_tokens()),
                        reinterpret_cast<std::uint8_t*>(p.fold_watermarks + slot * p.fold_watermark_stride), 4});
  }
  backend->copy_pieces(pieces);
}

void KVCacheManager::Impl::begin_chain(std::int32_t row, PrefixIdentity name, std::uint16_t weights_slot) {
  PrefixChain& chain = sequences[static_cast<std::size_t>(row)].chain;
  chain.publishes = true;
  chain.tenant = name.tenant;
  chain.weights_slot = weights_slot;
  chain.root = name.root;
  chain.prompt_end = name.prompt_end;
  chain.extra = std::move(name.extra);
}

PrefixIdentity KVCacheManager::identify_prefix(const Prompt& prompt) try {
  const OneThread::Call call(impl_->driver);
  Impl& m = *impl_;
  if (!m.prefix) return {};
  m.prefix->index.tenant_size(prompt.tenant);  // throws if there is no such tenant
  const std::int64_t last = std::max<std::int64_t>(static_cast<std::int64_t>(prompt.token_ids.size()) - 1, 0);
  return {m.prefix->root(prompt.salt),
          m.prefix->weights_generation(m.prefix->weights_slot()),
          prompt.tenant,
          last / m.block_tokens() * m.block_tokens(),
          {prompt.extra.begin(), prompt.extra.end()}};
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

PrefixIdentity KVCacheManager::chain_of(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  const Impl& m = *impl_;
  const PrefixChain& chain = m.sequences[static_cast<std::size_t>(m.row_of(request))].chain;
  if (!chain.publishes) return {};
  return {chain.root, m.prefix->weights_generation(chain.weights_slot), chain.tenant, chain.prompt_end, chain.extra};
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::Impl::check_prompt(const Prompt& prompt) const {
  require(prefix.has_value(), ErrorCode::bad_state,
          "this cache keeps no prefixes; set options.prefix.enabled, or admit without a prompt");
  const std::int64_t tokens = static_cast<std::int64_t>(prompt.token_ids.size());
  require(tokens <= schema.options.max_context, ErrorCode::bad_argument, "the prompt has {} tokens; max_context is {}",
          tokens, schema.options.max_context);
  const std::int64_t blocks = num_blocks_of(tokens);
  require(static_cast<std::int64_t>(prompt.extra.size()) <= blocks, ErrorCode::bad_argument,
          "there is extra for {} blocks; a prompt of {} tokens has {}", prompt.extra.size(), tokens, blocks);
  prefix->index.tenant_size(prompt.tenant);  // throws if there is no such tenant
}

Expected<Admission> KVCacheManager::admit(const Prompt& prompt) try {
  const TimedCall call(*this, &CallTimes::admit);
  const NvtxRange range("kv4 admit", !impl_->backend->on_host());
  return impl_->admit(prompt, identify_prefix(prompt), {});
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<Admission> KVCacheManager::Impl::admit(const Prompt& prompt, PrefixIdentity name,
                                                std::span<const BlockKey> known) {
  check_prompt(prompt);
  const std::int64_t tokens = static_cast<std::int64_t>(prompt.token_ids.size());
  const PrefixMatch match = prefix->index.match(prefix->keys_of(name.root, prompt, true, known), tokens);
  if (free_rows.empty()) return counted(Shortage::requests, admit_shortages);
  NewSlot slot(state_pool);
  if (!slot.slot) return counted(Shortage::slots, admit_shortages);
  state_pool.reset_slot(*slot.slot);
  restore_slot(*slot.slot, match);

  const RequestId request = start_row(slot.keep());
  const std::int32_t row = row_of(request);
  begin_chain(row, std::move(name), prefix->weights_slot());
  share_prefix(row, match);

  PrefixStatistics& statistics = prefix->statistics;
  ++statistics.prompts;
  statistics.hits += match.usable_tokens > 0;
  statistics.prompt_tokens += tokens;
  statistics.usable_tokens += match.usable_tokens;
  statistics.replayed_tokens += match.replayed_tokens();
  prefix->usable_tokens.add(match.usable_tokens);
  if (match.usable_tokens > 0) prefix->replayed_tokens.add(match.replayed_tokens());
  return Admission{request, match.usable_tokens, match.resume_at};
}

void KVCacheManager::Impl::check_replay(const StepItem& item, std::int32_t row) const {
  const Sequence& s = sequences[static_cast<std::size_t>(row)];
  const std::int64_t end = std::min(s.length() + item.count, s.chain.replay_end);
  for (std::int64_t position = s.length(); position < end; ++position) {
    const std::int32_t want = block_ids_of(tables.block(
                           row, position / block_tokens()))[static_cast<std::size_t>(position % block_tokens())],
                       got = item.token_ids[static_cast<std::size_t>(position - s.length())];
    require(got == want, ErrorCode::bad_argument,
            "request {} replays its prompt up to position {}: token {} there is {}; got {}", item.request,
            s.chain.replay_end, position, want, got);
  }
}

std::string KVCacheManager::Impl::digest_table(const TensorView& table) const {
  const std::int64_t bytes = table.shape[0] * table.shape[1] * static_cast<std::int64_t>(element_bytes(table.dtype));
  constexpr std::int64_t most = 1 << 16;  // docs/formats.md, "Block keys"
  backend->reserve_staging(most);
  std::vector<std::byte> part;
  std::string digests;
  BlockHasher hasher;
  for (std::int64_t at = 0; at < bytes; at += most) {
    part.resize(static_cast<std::size_t>(std::min(most, bytes - at)));
    const ops::CopyPiece piece{static_cast<const std::uint8_t*>(table.data) + at,
                               reinterpret_cast<std::uint8_t*>(part.data()), static_cast<std::int64_t>(part.size())};
    backend->read_pieces(std::span(&piece, 1), part);
    const Sha256 digest = hasher.digest({reinterpret_cast<const char*>(part.data()), part.size()});
    digests.append(digest.begin(), digest.end());
  }
  return digests;
}

// --- snapshots
// ---------------------------------------------------------------------------------------------------------------------

bool KVCacheManager::Impl::keeps_snapshot(const Sequence& s, std::int64_t position) const {
  return prefix->index.snapshots().keeps(position, position == s.chain.prompt_end);
}

// The last boundary before `length` may turn out to be that of the output.
bool KVCacheManager::Impl::wants_latest(std::int64_t position, std::int64_t length) const {
  return prefix->index.snapshots().kind == SnapshotPolicy::Kind::checkpoint &&
         position == length / block_tokens() * block_tokens();
}

// Boundaries that the rings will not hold after the step.
void KVCacheManager::Impl::reserve_boundaries(std::size_t item, const StepPart& part) {
  const Sequence& s = sequences[static_cast<std::size_t>(part.row)];
  if (!s.chain.publishes || part.spare < 0) return;
  const std::int64_t end = s.length() + part.count, step = block_tokens();
  for (std::int64_t position = (s.length() / step + 1) * step; position < end - schema.options.max_rewind_tokens;
       position += step) {
    if (!keeps_snapshot(s, position) && !wants_latest(position, end)) continue;
    const SnapshotId place = prefix->take_place();
    if (place == kNoSnapshot) return;
    open.boundaries.push_back({part.row, item, position, place});
  }
}

void KVCacheManager::Impl::describe_boundaries(std::size_t layer, ops::BoundaryParams& params) {
  boundaries.clear();
  for (const StepBoundary& b : open.boundaries)
    boundaries.push_back({open.items[b.item], static_cast<std::int32_t>(b.position), prefix->address(b.place)});
  params.boundaries = boundaries.data();
  params.count = static_cast<std::int32_t>(boundaries.size());
  const WindowPart& window = snapshot_parts.windows[layer];
  params.payload_at = window.payload_at;
  params.scale_at = window.scale_at;
  for (const PendingPart& part : snapshot_parts.pending)
    if (static_cast<std::size_t>(part.layer) == layer) params.pending_at[part.kind] = part.previous_at;
}

void KVCacheManager::Impl::leave_latest(Sequence& s) {
  if (s.chain.latest != kNoSlot) prefix->leave(std::exchange(s.chain.latest, kNoSlot), false);
}

// Of a committed boundary: what the step's layers have saved, or from the rings. kNoSnapshot: there is no room, or the
// rows are gone.
SnapshotId KVCacheManager::Impl::take_snapshot(std::int32_t row, std::int64_t position) {
  for (StepBoundary& b : open.boundaries)
    if (b.row == row && b.position == position) return std::exchange(b.place, kNoSnapshot);
  Sequence& s = sequences[static_cast<std::size_t>(row)];
  const GroupProgress& g = s.groups[0];
  if (position < std::max(g.highest - schema.options.max_rewind_tokens, g.floor)) return kNoSnapshot;
  leave_latest(s);  // its place may be the only one
  const SnapshotId place = prefix->take_place();
  if (place == kNoSnapshot) return place;
  if (std::find(snapshot_targets.begin(), snapshot_targets.end(), place) != snapshot_targets.end()) send_snapshots();
  snapshot_layout(schema, position, snapshot_at);
  add_pieces_to_image(layers, snapshot_at, s.slot, prefix->address(place), snapshot_pieces);
  snapshot_targets.push_back(place);
  return place;
}

void KVCacheManager::Impl::send_snapshots() {
  if (snapshot_targets.empty()) return;
  backend->copy_pieces(snapshot_pieces);
  snapshot_pieces.clear();
  snapshot_targets.clear();
}

void KVCacheManager::Impl::reserve_snapshots(std::int64_t count) {
  const std::size_t most = std::min(static_cast<std::size_t>(count), prefix->num_places());
  snapshot_pieces.reserve(most * pieces_per_snapshot);
  snapshot_targets.reserve(most);
}

void KVCacheManager::Impl::save_snapshots(std::int32_t row, std::int64_t old_length) {
  Sequence& s = sequences[static_cast<std::size_t>(row)];
  const std::int64_t first = old_length / block_tokens() + 1, last = s.length() / block_tokens();
  if (first > last || prefix->index.snapshots().kind == SnapshotPolicy::Kind::none) return;
  // From the newest on: if there are too few places, it has one.
  Slot slot = s.chain.tail;
  for (std::int64_t i = s.chain.blocks; i > last; --i) slot = prefix->index.parent(slot);  // of a replay's rest
  for (std::int64_t i = last; i >= first; --i, slot = prefix->index.parent(slot)) {
    const std::int64_t position = i * block_tokens();
    const bool kept = keeps_snapshot(s, position), latest = !kept && wants_latest(position, s.length());
    if (!kept && !latest) continue;
    if (prefix->index.snapshot(slot) == kNoSnapshot) {
      const SnapshotId place = take_snapshot(row, position);
      if (place == kNoSnapshot) continue;
      prefix->attach(slot, place);
    }
    if (kept) prefix->keep(slot);
    if (latest) prefix->stay(slot);
    if (i == last) leave_latest(s);
    if (latest) s.chain.latest = slot;
  }
}

bool KVCacheManager::Impl::boundaries_saved() const {
  for (std::size_t i = 0; i < layers.size(); ++i)
    if (schema.layers[i].spec.group == 0 && !open.saved_layers[i]) return false;
  return true;
}

// Places whose boundaries did not come to be, or had a snapshot already.
void KVCacheManager::Impl::give_boundaries() {
  for (const StepBoundary& b : open.boundaries) prefix->give_place(b.place);
  open.boundaries.clear();
}

// --- weights, accessors
// ---------------------------------------------------------------------------------------------------------------------

void KVCacheManager::set_weights_id(std::string_view weights_id) try {
  const OneThread::Call call(impl_->driver);
  require(impl_->prefix.has_value(), ErrorCode::bad_state, "this cache keeps no prefixes; set options.prefix.enabled");
  impl_->prefix->set_weights_id(weights_id);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::invalidate(std::string_view weights_id) {
  const OneThread::Call call(impl_->driver);
  Impl& m = *impl_;
  require(m.prefix.has_value(), ErrorCode::bad_state, "this cache keeps no prefixes; set options.prefix.enabled");
  const std::optional<std::uint16_t> weights_slot = m.prefix->weights_slot_of(weights_id);
  if (!weights_slot) return;
  for (Sequence& s : m.sequences)
    if (s.chain.weights_slot == *weights_slot) s.chain.publishes = false;
  m.prefix->index.forget(*weights_slot, [&m](const Evicted& gone) { m.free_evicted(gone); });
  m.prefix->end_weights_slot(*weights_slot);
}

PrefixStatistics KVCacheManager::prefix_statistics() const {
  const OneThread::Call call(impl_->driver);
  if (!impl_->prefix) return {};
  return impl_->prefix->now();
}

CacheStatistics KVCacheManager::statistics() const try {
  const OneThread::Call call(impl_->driver);
  const Impl& m = *impl_;
  CacheStatistics out;
  out.requests = num_requests();
  out.max_requests = m.schema.options.max_requests;
  out.blocks = m.allocator.num_blocks();
  out.free_blocks = m.allocator.num_free();
  out.held_blocks = m.allocator.num_held();
  out.evictable_blocks = m.allocator.num_evictable();
  out.slots = m.state_pool.num_slots();
  out.free_slots = m.state_pool.num_free();
  out.memory_bytes = memory_bytes();
  out.times = m.times;
  out.admit_shortages = m.admit_shortages;
  out.prepare_forward_shortages = m.prepare_forward_shortages;
  if (!m.prefix) return out;
  const std::vector<std::int64_t>& shares = m.schema.options.prefix.tenant_shares;
  for (std::size_t i = 0; i < shares.size(); ++i)
    out.tenants.push_back({shares[i], m.prefix->index.tenant_size(static_cast<TenantId>(i))});
  out.prefix = m.prefix->now();
  out.usable_tokens = m.prefix->usable_tokens;
  out.replayed_tokens = m.prefix->replayed_tokens;
  return out;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::size_t KVCacheManager::read_block_events(std::span<BlockEvent> out) {
  const OneThread::Call call(impl_->driver);
  return impl_->prefix ? impl_->prefix->index.read_events(out) : 0;
}

}  // namespace kv4
