#include "cache/prefix_chains.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kv4 {

PrefixChains::PrefixChains(CacheMemory& memory, PrefixCache* prefix, RequestTable& requests, Blocks& blocks,
                           Snapshots& snapshots)
    : memory_(memory), prefix_(prefix), requests_(requests), blocks_(blocks), snapshots_(snapshots) {}

PrefixIdentity PrefixChains::identify(const Prompt& prompt) const {
  if (prefix_ == nullptr) return {};
  prefix_->index.tenant_size(prompt.tenant);  // throws if there is no such tenant
  const std::int64_t last = std::max<std::int64_t>(std::ssize(prompt.token_ids) - 1, 0);
  return {prefix_->root(prompt.salt),
          prefix_->weights_generation(prefix_->weights_slot()),
          prompt.tenant,
          last / blocks_.tokens() * blocks_.tokens(),
          {prompt.extra.begin(), prompt.extra.end()}};
}

PrefixIdentity PrefixChains::identity_of(std::int32_t row) const {
  const PrefixChain& chain = requests_[row].chain;
  if (!chain.publishes) return {.extra = {}, .approximate = chain.approximate, .narrowed = chain.narrowed};
  return {chain.root,       prefix_->weights_generation(chain.weights_slot),
          chain.tenant,     chain.prompt_end,
          chain.extra,      chain.approximate,
          chain.narrowed};
}

void PrefixChains::begin(std::int32_t row, PrefixIdentity identity, std::uint16_t weights_slot) {
  PrefixChain& chain = requests_[row].chain;
  chain.publishes = true;
  chain.tenant = identity.tenant;
  chain.weights_slot = weights_slot;
  chain.root = identity.root;
  chain.prompt_end = identity.prompt_end;
  chain.extra = std::move(identity.extra);
}

void PrefixChains::hold(std::int32_t row, const KeptChain& kept) {
  PrefixChain& chain = requests_[row].chain;
  chain.tail = kept.tail;
  chain.blocks = kept.blocks;
  NodeId id = kept.tail;
  for (std::int64_t i = kept.blocks; i-- > 0; id = prefix_->index.parent(id)) {
    blocks_.allocator().retain(prefix_->index.block(id));
    memory_.tables.set_block(row, i, prefix_->index.block(id));
  }
}

void PrefixChains::share(std::int32_t row, const PrefixMatch& match) {
  Sequence& s = requests_[row];
  if (match.id != kNoNode) prefix_->index.pin(match.id);
  hold(row, {match.id, match.usable_tokens / blocks_.tokens()});
  s.chain.replay_end = match.resume_at < match.usable_tokens ? match.usable_tokens : 0;
  // A snapshot has the backbone's windows; without one they begin here, and draft stages' windows begin here either
  // way.
  for (GroupProgress& g : s.groups) g = {match.resume_at, match.resume_at, match.resume_at, match.resume_at};
  if (prefix_->is_approximate(match)) {
    s.chain.approximate = true;
    s.chain.publishes = false;
  }
  if (match.snapshot == kNoSnapshot) return;
  s.groups[0].window_begin = 0;
  ++prefix_->statistics.restored_snapshots;
}

void PrefixChains::fork(PrefixChain parent, Sequence& child, std::int64_t shared_blocks) {
  child.chain = std::move(parent);
  child.chain.latest = kNoNode;
  for (; child.chain.blocks > shared_blocks; --child.chain.blocks)
    child.chain.tail = prefix_->index.parent(child.chain.tail);
  if (child.chain.tail != kNoNode) prefix_->index.pin(child.chain.tail);
}

void PrefixChains::cut(std::int32_t row, std::int64_t blocks) {
  Sequence& s = requests_[row];
  PrefixChain& chain = s.chain;
  for (; chain.blocks > blocks; --chain.blocks) {
    if (chain.latest == chain.tail) snapshots_.leave_latest(s);
    chain.tail = prefix_->index.unpin_last(chain.tail);
  }
}

// A continuation of an ended request will begin at its latest snapshot.
void PrefixChains::end(std::int32_t row) {
  PrefixChain& chain = requests_[row].chain;
  if (chain.latest != kNoNode) prefix_->leave(chain.latest, chain.publishes);
  if (chain.tail != kNoNode) {
    prefix_->index.unpin(chain.tail);
    if (!chain.publishes)
      prefix_->index.forget_tail(chain.tail, [this](const Evicted& gone) { blocks_.free_evicted(gone); });
  }
  chain.latest = chain.tail = kNoNode;
  chain.blocks = 0;
}

void PrefixChains::check_replay(const StepItem& item, std::int32_t row) const {
  const Sequence& s = requests_[row];
  const std::int64_t end = std::min(s.length() + item.count, s.chain.replay_end), step = blocks_.tokens();
  for (std::int64_t position = s.length(); position < end; ++position) {
    const BlockId block = memory_.tables.block(row, position / step);
    const std::int32_t want = std::as_const(blocks_).token_ids(block)[position % step],
                       got = item.token_ids[position - s.length()];
    require(got == want, ErrorCode::bad_argument,
            "request {} replays its prompt up to position {}: token {} there is {}; got {}", item.request,
            s.chain.replay_end, position, want, got);
  }
}

// A key that is there already came from the same tokens: both blocks have the same bytes, so one is enough.
void PrefixChains::publish(std::int32_t row) {
  Sequence& s = requests_[row];
  PrefixChain& chain = s.chain;
  for (; chain.blocks < s.length() / blocks_.tokens(); ++chain.blocks) {
    const BlockId block = memory_.tables.block(row, chain.blocks);
    const bool first = chain.tail == kNoNode;
    const BlockKey key =
        prefix_->block_key(first ? chain.root : prefix_->index.key(chain.tail), std::as_const(blocks_).token_ids(block),
                           chain.blocks < std::ssize(chain.extra) ? chain.extra[chain.blocks] : std::string_view());
    // A chain belongs to one tenant, whoever continues it: otherwise a tenant's block could wait for another tenant's.
    const TenantId tenant = first ? chain.tenant : prefix_->index.tenant(chain.tail);
    const PrefixIndex::Stored stored =
        prefix_->index.append(tenant, chain.tail, key, block, chain.weights_slot).value();
    chain.tail = stored.id;
    if (stored.is_new) {
      blocks_.allocator().publish(block);
      ++prefix_->statistics.stored_blocks;
      continue;
    }
    const BlockId there = prefix_->index.block(stored.id);
    blocks_.allocator().retain(there);
    memory_.tables.set_block(row, chain.blocks, there);
    blocks_.allocator().release(block);
    ++prefix_->statistics.joined_blocks;
  }
}

void PrefixChains::invalidate(std::string_view weights_id) {
  const std::optional<std::uint16_t> weights_slot = prefix_->weights_slot_of(weights_id);
  if (!weights_slot) return;
  for (Sequence& s : requests_.rows())
    if (s.chain.weights_slot == *weights_slot) s.chain.publishes = false;
  prefix_->index.forget(*weights_slot, [this](const Evicted& gone) { blocks_.free_evicted(gone); });
  prefix_->end_weights_slot(*weights_slot);
}

}  // namespace kv4
