#include "cache/requests.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kv4 {

Requests::Requests(CacheMemory& memory, PrefixCache* prefix, RequestTable& table, Blocks& blocks, Snapshots& snapshots,
                   PrefixChains& chains)
    : memory_(memory), prefix_(prefix), table_(table), blocks_(blocks), snapshots_(snapshots), chains_(chains) {}

Expected<RequestId> Requests::admit() {
  if (table_.full()) return Shortage::requests;
  NewSlot slot(memory_.state_pool);
  if (!slot) return Shortage::slots;
  memory_.state_pool.reset_slot(*slot);
  return table_[table_.start(slot.keep())].id;
}

void Requests::check(const Prompt& prompt) const {
  require(prefix_ != nullptr, ErrorCode::bad_state,
          "this cache keeps no prefixes; set options.prefix.enabled, or admit without a prompt");
  const std::int64_t tokens = std::ssize(prompt.token_ids), max_context = memory_.schema.options.max_context;
  require(tokens <= max_context, ErrorCode::bad_argument, "the prompt has {} tokens; max_context is {}", tokens,
          max_context);
  const std::int64_t blocks = blocks_.count_of(tokens);
  require(std::ssize(prompt.extra) <= blocks, ErrorCode::bad_argument,
          "there is extra for {} blocks; a prompt of {} tokens has {}", prompt.extra.size(), tokens, blocks);
  prefix_->index.tenant_size(prompt.tenant);  // throws if there is no such tenant
}

Expected<Admission> Requests::admit(const Prompt& prompt) {
  check(prompt);
  return begin(prompt, chains_.identify(prompt), {});
}

Expected<Admission> Requests::admit(const Prompt& prompt, const BlockKey& root, std::span<const BlockKey> known) {
  check(prompt);
  PrefixIdentity identity = chains_.identify(prompt);
  if (identity.root != root) known = {};  // keys of other weights than the present ones
  return begin(prompt, std::move(identity), known);
}

Expected<Admission> Requests::begin(const Prompt& prompt, PrefixIdentity identity, std::span<const BlockKey> known) {
  const std::int64_t tokens = std::ssize(prompt.token_ids);
  const PrefixMatch match = prefix_->index.match(prefix_->keys_of(identity.root, prompt, true, known), tokens);
  if (table_.full()) return Shortage::requests;
  NewSlot slot(memory_.state_pool);
  if (!slot) return Shortage::slots;
  memory_.state_pool.reset_slot(*slot);
  snapshots_.restore(*slot, match);

  const std::int32_t row = table_.start(slot.keep());
  chains_.begin(row, std::move(identity), prefix_->weights_slot());
  chains_.share(row, match);

  PrefixStatistics& statistics = prefix_->statistics;
  ++statistics.prompts;
  statistics.hits += match.usable_tokens > 0;
  statistics.prompt_tokens += tokens;
  statistics.usable_tokens += match.usable_tokens;
  statistics.replayed_tokens += match.replayed_tokens();
  prefix_->usable_tokens.add(match.usable_tokens);
  if (match.usable_tokens > 0) prefix_->replayed_tokens.add(match.replayed_tokens());
  return Admission{table_[row].id, match.usable_tokens, match.resume_at};
}

Expected<RequestId> Requests::fork(RequestId request) {
  const std::int32_t row = table_.idle_row_of(request, "forking it");
  const Sequence& parent = table_[row];
  const std::int64_t held = blocks_.num_held(parent);
  const bool has_open = held * blocks_.tokens() > std::max(parent.length(), parent.chain.replay_end);
  const std::int64_t shared = held - has_open;
  if (table_.full()) return Shortage::requests;
  if (has_open && blocks_.num_available(parent.chain.tenant) < 1) return Shortage::blocks;
  PrefixChain chain = parent.chain;
  NewSlot slot(memory_.state_pool);
  if (!slot) return Shortage::slots;
  memory_.state_pool.copy_slot(parent.slot, *slot);

  const std::int32_t child_row = table_.start(slot.keep());
  Sequence& child = table_[child_row];
  std::copy(parent.groups.begin(), parent.groups.end(), child.groups.begin());
  for (std::int64_t i = 0; i < shared; ++i) {
    const BlockId block = memory_.tables.block(row, i);
    blocks_.allocator().retain(block);
    memory_.tables.set_block(child_row, i, block);
  }
  chains_.fork(std::move(chain), child, shared);
  if (has_open) {
    const BlockId block = blocks_.take(parent.chain.tenant);
    blocks_.copy(memory_.tables.block(row, shared), block);
    memory_.tables.set_block(child_row, shared, block);
  }
  return child.id;
}

void Requests::release(RequestId request) {
  const std::int32_t row = table_.idle_row_of(request, "releasing it");
  chains_.end(row);
  blocks_.drop(row, table_[row], 0);
  memory_.state_pool.release_slot(table_[row].slot);
  table_.end(row);
}

void Requests::rewind(RequestId request, std::int64_t length, int group) {
  const std::int32_t row = table_.idle_row_of(request, "rewinding it");
  GroupProgress& g = table_.progress(row, group);
  const std::int64_t floor = rewind_floor(request, group);
  require(length >= floor && length <= g.length, ErrorCode::bad_argument,
          "request {} of length {} cannot be rewound to {}; allowed are {} to {} (max_rewind_tokens = {})", request,
          g.length, length, floor, g.length, memory_.schema.options.max_rewind_tokens);
  if (group == 0 && table_[row].chain.replay_end == 0) {
    chains_.cut(row, blocks_.count_of(length));
    blocks_.drop(row, table_[row], blocks_.count_of(length));
  }
  g.length = length;
}

std::int64_t Requests::rewind_floor(RequestId request, int group) const {
  const GroupProgress& g = table_.progress(table_.row_of(request), group);
  const std::int64_t max_rewind_tokens = memory_.schema.options.max_rewind_tokens;
  return std::min(g.length, std::max({g.highest - max_rewind_tokens, g.floor, std::int64_t{0}}));
}

std::vector<BlockId> Requests::blocks(RequestId request) const {
  const std::int32_t row = table_.row_of(request);
  const BlockId* first = memory_.tables.row(row);
  return {first, first + blocks_.count_of(table_[row].length())};
}

std::vector<std::int32_t> Requests::token_ids(RequestId request) const {
  std::vector<std::int32_t> out;
  const std::int64_t length = table_[table_.row_of(request)].length();
  for (const BlockId block : blocks(request)) {
    const std::span<const std::int32_t> ids = std::as_const(blocks_).token_ids(block);
    out.insert(out.end(), ids.begin(), ids.begin() + std::min(std::ssize(ids), length - std::ssize(out)));
  }
  return out;
}

std::vector<std::int32_t> Requests::last_token_ids(RequestId request, int count) const {
  const std::int32_t row = table_.row_of(request);
  constexpr int kMostIds = 1024;
  require(count >= 0 && count <= kMostIds, ErrorCode::bad_argument, "count is {}; it must be from 0 to {}", count,
          kMostIds);
  const std::int32_t pad = static_cast<std::int32_t>(memory_.schema.config.engram.pad_id);
  std::vector<std::int32_t> out;
  bool in_image = false;
  for (std::int64_t at = table_[row].length() - 1; std::ssize(out) < count; --at) {
    std::int32_t id = pad;
    if (at >= 0) {
      const BlockId block = memory_.tables.block(row, at / blocks_.tokens());
      id = std::as_const(blocks_).token_ids(block)[at % blocks_.tokens()];
    }
    in_image = in_image || (at >= 0 && id < 0);
    out.push_back(in_image ? -1 : id);
  }
  return out;
}

}  // namespace kv4
