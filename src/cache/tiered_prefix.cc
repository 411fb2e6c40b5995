// Joins a saver and a loader over one cache and its tiers.
#include "kv4/tiered_prefix.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/check.h"
#include "cache/cache_call.h"
#include "cache/prefix_loader.h"
#include "cache/prefix_saver.h"
#include "cache/tiered_cache.h"
#include "tier/tiers_impl.h"

namespace kv4 {
namespace {

using tier::Deadline;

constexpr std::chrono::microseconds kTransferPoll{20};
constexpr std::chrono::milliseconds kQueuePoll{1};

const TieredOptions& checked(const TieredOptions& options) {
  const auto at_least = [](std::int64_t value, std::int64_t least, const char* what) {
    require(value >= least, ErrorCode::bad_argument, "TieredOptions::{} is {}; {} or more", what, value, least);
  };
  at_least(options.load_bytes, 0, "load_bytes");
  at_least(options.save_bytes, 0, "save_bytes");
  at_least(options.max_waiting, 1, "max_waiting");
  at_least(options.max_attempts, 1, "max_attempts");
  return options;
}

}  // namespace

struct TieredPrefix::Impl {
  Impl(KVCacheManager& cache, Tiers& tiers, const TieredOptions& options)
      : joint(cache, Tiers::Impl::of(tiers).chain, Tiers::Impl::of(tiers).backend.get(), checked(options)),
        saver(joint),
        loader(joint) {}

  TieredCache joint;
  PrefixSaver saver;
  PrefixLoader loader;
};

struct PrefixLoad::Impl final : PromptLoad {
  using PromptLoad::PromptLoad;
};

PrefixLoad::PrefixLoad(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PrefixLoad::~PrefixLoad() {
  if (!impl_) return;  // moved from
  PrefixLoader& owner = impl_->owner();
  const PrefixLoader::Try inside(owner);
  if (inside)
    impl_.reset();
  else
    owner.leave(std::move(impl_));
}
PrefixLoad::PrefixLoad(PrefixLoad&&) noexcept = default;

bool PrefixLoad::advance() try {
  const PrefixLoader::Call call(impl_->owner());
  return impl_->advance();
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<Admission> PrefixLoad::admit() try {
  const PrefixLoader::Call call(impl_->owner());
  return impl_->admit();
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::int64_t PrefixLoad::brought_blocks() const {
  const PrefixLoader::Call call(impl_->owner());
  return impl_->brought_blocks();
}

std::int64_t PrefixLoad::wanted_blocks() const {
  const PrefixLoader::Call call(impl_->owner());
  return impl_->wanted_blocks();
}

TieredPrefix::TieredPrefix(KVCacheManager& cache, Tiers& tiers, const TieredOptions& options) try
    : impl_(std::make_unique<Impl>(cache, tiers, options)) {
} catch (const std::bad_alloc&) {
  fail_for_memory();
}
TieredPrefix::~TieredPrefix() = default;

std::int64_t TieredPrefix::save(std::int64_t max_records) try {
  const PrefixLoader::Call call(impl_->loader);
  const TimedCall timed(impl_->joint.cache, &CallTimes::tier_save);
  return impl_->saver.save(max_records);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

bool TieredPrefix::save_all(Deadline deadline, const TieredProgress& progress) {
  const PrefixLoader::Call call(impl_->loader);
  std::int64_t most = 0;
  for (;;) {
    const std::int64_t left = save(kMaxStagingSlots);
    most = std::max(most, left);
    if (progress && !progress(most - left, most)) return false;
    if (left == 0) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(impl_->saver.transfers() ? kTransferPoll : std::chrono::microseconds(kQueuePoll));
  }
}

PrefixLoad TieredPrefix::start_load(const Prompt& prompt, Deadline deadline) try {
  const PrefixLoader::Call call(impl_->loader);
  return PrefixLoad(std::make_unique<PrefixLoad::Impl>(impl_->loader, prompt, deadline));
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::int64_t TieredPrefix::load(const Prompt& prompt, Deadline deadline, const TieredProgress& progress) try {
  const PrefixLoader::Call call(impl_->loader);
  PromptLoad load(impl_->loader, prompt, deadline);
  load.run(progress);
  return load.brought_blocks();
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<Admission> TieredPrefix::admit(const Prompt& prompt, Deadline deadline, const TieredProgress& progress) try {
  const PrefixLoader::Call call(impl_->loader);
  BlockMover& mover = impl_->joint.mover;
  if (!mover.has_room_for_request(prompt)) return mover.admit(prompt, {}, {});  // it names the shortage
  PromptLoad load(impl_->loader, prompt, deadline);
  load.run(progress);
  return load.admit();
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

TieredStatistics TieredPrefix::statistics() const {
  const PrefixLoader::Call call(impl_->loader);
  TieredStatistics out = impl_->saver.statistics();
  out.loaded_blocks = impl_->loader.loaded_blocks();
  out.loaded_snapshots = impl_->loader.loaded_snapshots();
  return out;
}

}  // namespace kv4
