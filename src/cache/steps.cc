#include "cache/steps.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kv4 {

Steps::Steps(CacheMemory& memory, RequestTable& requests, Blocks& blocks, PrefixChains& chains, Snapshots& snapshots)
    : memory_(memory),
      requests_(requests),
      blocks_(blocks),
      chains_(chains),
      snapshots_(snapshots),
      seen_in_step_(memory.schema.options.max_requests) {
  const int max_requests = memory.schema.options.max_requests;
  items_.reserve(memory.tables.max_items());
  window_begins_.reserve(memory.tables.max_items());
  if (memory.schema.config.shares_entries()) {
    decoder_items_.reserve(memory.tables.max_items());
    decoder_begins_.reserve(memory.tables.max_items());
  }
  parts_.reserve(max_requests);
  // The most table entries that a step changes: the blocks that its tokens fill, and for each request its first and its
  // last block.
  changes_.reserve(memory.schema.options.max_step_tokens / blocks.tokens() + std::int64_t{2} * max_requests);
}

// --- prepare

void Steps::check_items(std::span<const StepItem> items, int group) {
  const CacheSchema& schema = memory_.schema;
  require(!is_open_, ErrorCode::bad_state, "step {} is still open; commit or abort it before preparing another",
          step_.id);
  require(group >= 0 && group < schema.num_groups, ErrorCode::bad_argument,
          "group is {}; this cache has 0 (backbone) to {} (draft stages)", group, schema.num_groups - 1);
  const std::int64_t max_items = memory_.tables.max_items();
  require(!items.empty() && std::ssize(items) <= max_items, ErrorCode::bad_argument,
          "a step has 1 to {} items (2 x max_requests); got {}", max_items, items.size());
  const std::int64_t step_id = ++last_id_;
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const StepItem& item = items[i];
    require(item.count >= 1, ErrorCode::bad_argument, "item {} has count {}; it must be at least 1", i, item.count);
    tokens += item.count;
    require(tokens <= schema.options.max_step_tokens, ErrorCode::bad_argument,
            "the step has {} tokens or more; max_step_tokens is {}", tokens, schema.options.max_step_tokens);
    if (item.decoder_count != 0) check_narrowed(item, i, group);
    if (item.request == kNoRequest) continue;
    const std::int32_t row = requests_.row_of(item.request);
    require(seen_in_step_[row] != step_id, ErrorCode::bad_argument,
            "request {} is in the step twice; join its tokens into one item", item.request);
    seen_in_step_[row] = step_id;
    const std::int64_t length = requests_.progress(row, group).length;
    require(item.position == -1 || item.position == length, ErrorCode::bad_argument,
            "item {} starts at position {}, but request {} has {} tokens; positions must continue without a gap", i,
            item.position, item.request, length);
    require(length + item.count <= schema.options.max_context, ErrorCode::bad_argument,
            "request {} would have {} tokens; max_context is {}", item.request, length + item.count,
            schema.options.max_context);
    require(std::ssize(item.token_ids) == item.count || (group != 0 && item.token_ids.empty()), ErrorCode::bad_argument,
            "item {} has {} token ids for {} tokens", i, item.token_ids.size(), item.count);
    if (group == 0) chains_.check_replay(item, row);
  }
}

// So many tokens of the decoder fill its windows, so later steps find whole ones.
void Steps::check_narrowed(const StepItem& item, std::size_t index, int group) const {
  const ModelConfig& config = memory_.schema.config;
  require(config.shares_entries() && group == 0, ErrorCode::bad_argument,
          "item {} has decoder_count {}; only steps of V4.1's backbone can be narrowed, so leave it 0", index,
          item.decoder_count);
  require(item.decoder_count >= std::min(item.count, config.window) && item.decoder_count <= item.count,
          ErrorCode::bad_argument, "item {} has decoder_count {} of {} tokens; it must be from {} to {}, or 0 for all",
          index, item.decoder_count, item.count, std::min(item.count, config.window), item.count);
}

std::int64_t Steps::blocks_needed(const StepItem& item) const {
  if (item.request == kNoRequest) return 0;
  const std::int32_t row = requests_.known_row_of(item.request);
  const Sequence& s = std::as_const(requests_)[row];
  const bool copies = s.length() % blocks_.tokens() != 0 && s.chain.replay_end == 0 &&
                      blocks_.allocator().is_immutable(memory_.tables.block(row, s.length() / blocks_.tokens()));
  return std::max<std::int64_t>(0, blocks_.count_of(s.length() + item.count) - blocks_.num_held(s)) + copies;
}

Shortage Steps::find_shortage(std::span<const StepItem> items, int group) const {
  std::int64_t blocks = 0, slots = 0;
  for (const StepItem& item : items) {
    slots += item.request != kNoRequest && is_long(item);
    if (group == 0) blocks += blocks_needed(item);
  }
  // An eviction for one tenant costs another at most one block that it could have evicted.
  const auto too_few = [&](const StepItem& item) {
    return blocks_needed(item) > 0 &&
           blocks > blocks_.num_available(requests_[requests_.known_row_of(item.request)].chain.tenant);
  };
  if (blocks > blocks_.allocator().num_free() && std::any_of(items.begin(), items.end(), too_few))
    return Shortage::blocks;
  if (slots > memory_.state_pool.num_free()) return Shortage::slots;
  return Shortage::none;
}

void Steps::reserve(std::span<const StepItem> items, int group) {
  std::int32_t first_token = 0;
  for (const StepItem& item : items) {
    ops::StepRecord& record = items_.emplace_back();
    window_begins_.push_back(0);
    record.count = item.count;
    record.first_token = first_token;
    first_token += item.count;
    if (item.request == kNoRequest) continue;
    Part part{requests_.known_row_of(item.request), item.count, -1, is_narrowed(item)};
    Sequence& s = requests_[part.row];
    s.step_id = step_.id;
    if (is_long(item)) {
      part.spare = memory_.state_pool.acquire_slot().value();
      memory_.state_pool.copy_slot(s.slot, part.spare);
    }
    parts_.push_back(part);
    record.row = part.row;
    const GroupProgress& g = s.groups[group];
    record.length = record.position = static_cast<std::int32_t>(g.length);
    window_begins_.back() = static_cast<std::int32_t>(g.window_begin);
    record.read_slot = s.slot;
    record.write_slot = part.spare >= 0 ? part.spare : s.slot;
    if (group != 0) continue;
    if (s.chain.replay_end > 0) record.block = static_cast<std::int32_t>(s.chain.replay_end);
    reserve_blocks(item, part);
    if (part.spare >= 0 && !part.narrowed) snapshots_.plan_boundaries(part.row, s, items_.size() - 1, part.count);
  }
}

// Takes the blocks of a request's new tokens, and notes their token ids.
void Steps::reserve_blocks(const StepItem& item, const Part& part) {
  const Sequence& s = requests_[part.row];
  const std::int64_t first = std::max(s.length(), s.chain.replay_end);  // first token whose entries are written
  const std::int64_t have = blocks_.num_held(s), end = blocks_.count_of(s.length() + item.count);
  for (std::int64_t i = first / blocks_.tokens(); i < end; ++i) {
    const BlockId old_block = i < have ? memory_.tables.block(part.row, i) : -1;
    if (old_block >= 0 && !blocks_.allocator().is_immutable(old_block)) continue;
    const BlockId new_block = blocks_.take(s.chain.tenant);
    if (old_block >= 0) blocks_.copy(old_block, new_block);
    memory_.tables.set_block(part.row, i, new_block);
    changes_.push_back({part.row, i, old_block, new_block});
  }
  for (std::int64_t position = first; position < s.length() + item.count; ++position) {
    const BlockId block = memory_.tables.block(part.row, position / blocks_.tokens());
    blocks_.token_ids(block)[position % blocks_.tokens()] = item.token_ids[position - s.length()];
  }
}

// The items as the decoder sees them: a narrowed one begins with its last tokens, and so do its windows.
void Steps::narrow(std::span<const StepItem> items) {
  decoder_items_.assign(items_.begin(), items_.end());
  decoder_begins_.assign(window_begins_.begin(), window_begins_.end());
  std::int32_t first_token = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    ops::StepRecord& record = decoder_items_[i];
    if (is_narrowed(items[i]) && !record.padded()) {
      record.count = items[i].decoder_count;
      record.length = record.position = items_[i].end() - record.count;
      decoder_begins_[i] = record.length;
    }
    record.first_token = first_token;
    first_token += record.count;
  }
  step_.num_decoder_tokens = first_token;
}

Expected<Step> Steps::prepare(std::span<const StepItem> items, int group) {
  check_items(items, group);
  if (const Shortage shortage = find_shortage(items, group); shortage != Shortage::none) return shortage;
  std::int32_t tokens = 0;
  for (const StepItem& item : items) tokens += item.count;
  step_ = {last_id_, tokens, static_cast<std::int32_t>(items.size()), group, tokens};
  items_.clear();
  window_begins_.clear();
  parts_.clear();
  changes_.clear();
  snapshots_.begin_step();
  reserve(items, group);
  memory_.tables.update(items_, window_begins_, tokens);
  narrowed_ = std::any_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.narrowed; });
  if (narrowed_) {
    narrow(items);
    memory_.tables.update_narrowed({items_, decoder_items_, decoder_begins_, tokens});
  }
  is_open_ = true;
  written_ = false;
  return step_;
}

// --- commit and abort

void Steps::note_write() {
  written_ = true;
  captured_ = captured_ || memory_.backend->capturing();
}

void Steps::check_open(const Step& step, const char* what) const {
  require(is_open_, ErrorCode::bad_state, "no step is open; there is nothing to {}", what);
  require(step.id == step_.id, ErrorCode::bad_state, "step {} is not open, step {} is; {} that one", step.id, step_.id,
          what);
}

void Steps::close() {
  for (const Part& part : parts_) requests_[part.row].step_id = 0;
  is_open_ = false;
}

void Steps::commit(const Step& step) {
  check_open(step, "commit");
  if (step_.group == 0) {
    std::int64_t boundaries = 0;
    for (const Part& part : parts_) {
      const std::int64_t length = requests_[part.row].length();
      boundaries += (length + part.count) / blocks_.tokens() - length / blocks_.tokens();
    }
    snapshots_.reserve(boundaries);
  }
  const std::int64_t ticket = memory_.backend->mark();  // first: it may throw
  snapshots_.give_unsaved_boundaries();
  for (const BlockChange& change : changes_) {
    if (change.old_block < 0) continue;
    chains_.cut(change.row, change.index);
    blocks_.allocator().release(change.old_block);
  }
  for (const Part& part : parts_) {
    Sequence& s = requests_[part.row];
    GroupProgress& g = s.groups[step_.group];
    g.length += part.count;
    g.highest = std::max(g.highest, g.length);
    if (part.narrowed) {  // the decoder's rows before this were never computed
      g.floor = std::max(g.floor, g.length);
      s.chain.narrowed = true;
    }
    if (part.spare >= 0) {
      memory_.state_pool.release_slot(s.slot);
      s.slot = part.spare;
    }
    if (s.length() >= s.chain.replay_end) {
      // Without a snapshot the last layer's windows become whole here, not earlier.
      if (s.groups[0].window_begin > 0) s.groups[0].floor = std::max(s.groups[0].floor, s.chain.replay_end);
      s.chain.replay_end = 0;
    }
    if (step_.group == 0 && s.chain.publishes) {
      chains_.publish(part.row);
      if (!s.chain.narrowed) snapshots_.save(part.row, s, g.length - part.count);
    }
  }
  snapshots_.give_boundaries();
  snapshots_.send();
  commits_[num_commits_++ % commits_.size()] = {step_.id, ticket};
  close();
}

// A step may be so old that its ticket is gone. Then the oldest ticket kept decides, because it is a later one.
bool Steps::finished(const Step& step) const {
  const std::size_t kept = std::min(num_commits_, commits_.size());
  for (std::size_t i = num_commits_ - kept; i < num_commits_; ++i) {
    const Commit& c = commits_[i % commits_.size()];
    if (c.step_id >= step.id) return memory_.backend->reached(c.ticket);
  }
  fail(ErrorCode::bad_state, "step {} was not committed", step.id);
}

void Steps::abort(const Step& step) {
  check_open(step, "abort");
  for (auto change = changes_.rbegin(); change != changes_.rend(); ++change) {
    memory_.tables.set_block(change->row, change->index, change->old_block);
    blocks_.allocator().release(change->new_block);
  }
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    if (part->spare >= 0) {
      memory_.state_pool.release_slot(part->spare);
      continue;
    }
    // Rows written in place have overwritten the oldest rows of the rings.
    GroupProgress& g = requests_[part->row].groups[step_.group];
    if (written_ || captured_) g.highest = std::max(g.highest, g.length + part->count);
  }
  snapshots_.give_boundaries();
  close();
}

}  // namespace kv4
