#include "cache/prefix_loader.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/undo.h"

namespace kv4 {
namespace {

using tier::Deadline;
using tier::GetStatus;
using tier::RecordId;
using tier::SharedBytes;
using Ticket = tier::TierChain::Ticket;

constexpr std::size_t kBatches = 8;  // of a load: tiers work while some are moved or inserted
constexpr std::size_t kKeysAtATime = 256, kSnapshotsAtATime = 64;
constexpr std::chrono::microseconds kTransferPoll{20};
constexpr std::chrono::milliseconds kProgressStep{20};

}  // namespace

// --- the memory of all loads
// ---------------------------------------------------------------------------------------------------------------------

PrefixLoader::PrefixLoader(TieredCache& joint)
    : joint_(joint),
      num_slots_(staging_slots_for(joint.options.load_bytes, joint.block_bytes, 2)),
      block_slots_(joint.mover.backend(), joint.block_bytes, num_slots_, num_slots_),
      snapshot_slots_(joint.mover.backend(), joint.snapshot_bytes, 1, 1) {}

void PrefixLoader::leave(std::unique_ptr<Left> load) noexcept {
  load->next = left_loads_.load(std::memory_order_relaxed);
  while (!left_loads_.compare_exchange_weak(load->next, load.get(), std::memory_order_release)) continue;
  (void)load.release();
}

void PrefixLoader::end_left() noexcept {
  if (left_loads_.load(std::memory_order_relaxed) == nullptr) return;
  std::unique_ptr<Left> load(left_loads_.exchange(nullptr, std::memory_order_acquire));
  while (load) load.reset(std::exchange(load->next, nullptr));
}

void PrefixLoader::give_unused() {
  for (; !in_use_.empty() && joint_.backend.reached(in_use_.front().mark); in_use_.pop_front())
    for (std::byte* slot : in_use_.front().memory) in_use_.front().slots->device->give(slot);
}

// --- one prompt
// ---------------------------------------------------------------------------------------------------------------------

PromptLoad::PromptLoad(PrefixLoader& owner, const Prompt& prompt, Deadline deadline)
    : owner_(owner),
      joint_(owner.joint_),
      prompt_(prompt),
      deadline_(deadline),
      // At least one token of the prompt remains for a query.
      wanted_(prompt.token_ids.empty()
                  ? 0
                  : (prompt.token_ids.size() - 1) / static_cast<std::size_t>(joint_.cache.schema().block_tokens)),
      below_(wanted_) {
  for (; first_ < wanted_; ++first_) {
    know_keys(first_ + 1);
    if (!joint_.cache.find_block(keys_[first_])) break;
  }
  next_ = end_ = first_;
}

void PromptLoad::know_keys(std::size_t count) {
  const Prompt view = prompt_.view();
  if (keys_.empty() && count > 0) root_ = joint_.mover.root(view);
  while (keys_.size() < count) keys_.push_back(joint_.mover.next_key(root_, view, keys_));
}

void PromptLoad::ask(Batch& batch, StagingSlots& slots, std::span<const RecordId> ids, std::int64_t bytes) {
  std::vector<tier::ReadRequest> requests;
  for (const RecordId& id : ids) {
    batch.host.push_back(slots.host->take());
    requests.push_back({id, bytes, batch.host.back(), joint_.views_allowed});
  }
  if (slots.device) {
    batch.device.push_back({0, &slots, {}});
    batch.device.front().memory.reserve(ids.size());
  }
  batch.asked.emplace(joint_.tiers.get(std::move(requests), tier::Content::of_key, deadline_));
  if (slots.device)  // last: nothing can fail any more
    for (std::size_t i = 0; i < ids.size(); ++i) batch.device.front().memory.push_back(slots.device->take());
}

void PromptLoad::move_on(Batch& batch, StagingSlots& slots, std::int64_t bytes) {
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
    pieces.push_back(copy_piece(batch.host[i].data.get(), batch.device.front().memory[i], bytes));
  batch.transfer = joint_.backend.transfer_in(pieces);
}

bool PromptLoad::arrive(Batch& batch, StagingSlots& slots, std::int64_t bytes) {
  move_on(batch, slots, bytes);
  if (batch.asked) return false;
  return batch.host.empty() || !slots.device || joint_.backend.transferred(batch.transfer);
}

std::vector<std::byte*> PromptLoad::images(const Batch& batch) const {
  if (!batch.device.empty()) {
    const std::vector<std::byte*>& memory = batch.device.front().memory;
    return {memory.begin(), memory.begin() + std::ssize(batch.host)};
  }
  std::vector<std::byte*> out;
  for (const SharedBytes& bytes : batch.host) out.push_back(bytes.data.get());
  return out;
}

void PromptLoad::release(Batch& batch, StagingSlots& slots, bool queued) {
  if (queued && !batch.device.empty()) {
    batch.device.front().mark = joint_.backend.mark();
    owner_.in_use_.splice(owner_.in_use_.end(), batch.device);
  }
  for (const PrefixLoader::InUse& unused : batch.device)
    for (std::byte* slot : unused.memory) slots.device->give(slot);
  batch.device.clear();
  batch.host.clear();
}

void PromptLoad::ask_for_blocks() {
  const std::size_t most = std::max<std::size_t>(1, static_cast<std::size_t>(owner_.num_slots_) / kBatches);
  while (batches_.size() < kBatches && next_ < wanted_) {
    const auto free = static_cast<std::size_t>(owner_.block_slots_.num_free());
    const std::size_t count = std::min({most, free, wanted_ - next_});
    if (count == 0) return;
    know_keys(next_ + count);
    std::vector<RecordId> ids;
    for (std::size_t i = 0; i < count; ++i) ids.push_back(TieredCache::block_record(prompt_.tenant, keys_[next_ + i]));
    std::list<Batch> batch(1);
    ask(batch.front(), owner_.block_slots_, ids, joint_.block_bytes);
    batches_.splice(batches_.end(), batch);
    next_ += count;
  }
}

bool PromptLoad::advance_blocks() {
  StagingSlots& slots = owner_.block_slots_;
  for (;;) {
    ask_for_blocks();
    if (batches_.empty()) return next_ == wanted_ || late();                  // otherwise other loads have the slots
    for (Batch& batch : batches_) move_on(batch, slots, joint_.block_bytes);  // transfers go on end
    Batch& batch = batches_.front();
    if (!arrive(batch, slots, joint_.block_bytes)) return false;
    const std::size_t count = batch.host.size();
    const auto brought = static_cast<std::size_t>(joint_.mover.insert(prompt_.view(), keys_, end_, images(batch)));
    owner_.loaded_blocks_ += static_cast<std::int64_t>(brought);
    end_ += brought;
    const bool go_on = batch.whole && brought == count;
    release(batch, slots, true);
    batches_.pop_front();
    if (!go_on) return true;
  }
}

void PromptLoad::ask_which_snapshots_exist() {
  std::vector<RecordId> ids;
  std::vector<std::size_t> asked;
  std::size_t left = below_;
  for (; left > 0 && ids.size() < kSnapshotsAtATime; --left) {
    const BlockKey& key = keys_[left - 1];
    const std::optional<PrefixBlock> kept = joint_.cache.find_block(key);
    if (kept ? kept->has_snapshot : left <= end_) {  // the device has it, or the block is gone again
      left = 0;
      break;
    }
    asked.push_back(left - 1);
    ids.push_back(joint_.snapshot_record(prompt_.tenant, key));
  }
  std::reverse(asked.begin(), asked.end());
  if (!ids.empty()) known_.emplace(joint_.tiers.exists(ids, deadline_));
  possible_ = std::move(asked);
  below_ = left;
}

bool PromptLoad::find_snapshot() {
  for (;;) {
    if (coming_) {
      if (!arrive(*coming_, owner_.snapshot_slots_, joint_.snapshot_bytes)) return false;
      if (coming_->whole) return true;
      release(*coming_, owner_.snapshot_slots_, false);
      coming_.reset();
    }
    if (known_) {
      if (!known_->done()) return false;
      const std::vector<tier::ReadResult> exist = known_->take();  // the deepest first
      known_.reset();
      std::size_t left = 0;
      for (std::size_t i = 0; i < exist.size(); ++i)
        if (exist[exist.size() - 1 - i].status == GetStatus::found) possible_[left++] = possible_[i];
      possible_.resize(left);
    }
    if (!possible_.empty()) {
      if (owner_.snapshot_slots_.num_free() == 0) return late();  // another load has the slot
      coming_at_ = possible_.back();
      const RecordId id = joint_.snapshot_record(prompt_.tenant, keys_[coming_at_]);
      coming_.emplace();
      Undo forget([&] { coming_.reset(); });
      ask(*coming_, owner_.snapshot_slots_, {&id, 1}, joint_.snapshot_bytes);
      forget.keep();
      possible_.pop_back();
      continue;
    }
    if (below_ == 0) return true;
    ask_which_snapshots_exist();
  }
}

bool PromptLoad::advance_snapshot() {
  if (!find_snapshot()) return false;
  if (coming_) {
    owner_.loaded_snapshots_ += joint_.mover.insert_snapshot(keys_[coming_at_], images(*coming_)[0]);
    release(*coming_, owner_.snapshot_slots_, true);
    coming_.reset();
  }
  return true;
}

bool PromptLoad::advance() {
  owner_.give_unused();
  if (phase_ != Phase::done && !keys_.empty() && joint_.mover.root(prompt_.view()) != root_) {  // of other weights now
    stop();
    be_done();
  }
  if (phase_ == Phase::blocks && advance_blocks()) {
    phase_ = Phase::snapshot;
    if (end_ < wanted_) {
      stop();
      below_ = end_;
    }
  }
  if (phase_ == Phase::blocks && end_ > first_) {  // tiers have some of them
    know_keys(std::min(wanted_, keys_.size() + kKeysAtATime));
    if (keys_.size() == wanted_) (void)find_snapshot();
  }
  if (phase_ == Phase::snapshot && advance_snapshot()) be_done();
  return phase_ == Phase::done;
}

void PromptLoad::be_done() {
  if (std::exchange(phase_, Phase::done) != Phase::done)
    joint_.mover.times().tier_load.add(joint_.tiers.now() - begun_);
}

void PromptLoad::run(const TieredProgress& progress) {
  while (!advance()) {
    if (progress && !progress(brought_blocks(), wanted_blocks())) return;
    wait(std::min(deadline_, joint_.tiers.now() + kProgressStep));
  }
}

Expected<Admission> PromptLoad::admit() {
  stop();
  be_done();
  return joint_.mover.admit(prompt_.view(), root_, keys_);
}

void PromptLoad::wait(Deadline until) {
  const Ticket* ticket = nullptr;
  if (phase_ == Phase::blocks && !batches_.empty() && batches_.front().asked) ticket = &*batches_.front().asked;
  if (phase_ == Phase::snapshot && known_) ticket = &*known_;
  if (phase_ == Phase::snapshot && coming_ && coming_->asked) ticket = &*coming_->asked;
  if (ticket != nullptr)
    (void)ticket->wait(until);
  else
    std::this_thread::sleep_for(kTransferPoll);
}

void PromptLoad::stop() {
  for (Batch& batch : batches_) {
    batch.asked.reset();
    release(batch, owner_.block_slots_, true);
  }
  batches_.clear();
  if (coming_) {
    coming_->asked.reset();
    release(*coming_, owner_.snapshot_slots_, true);
  }
  coming_.reset();
  known_.reset();
  possible_.clear();
}

}  // namespace kv4
