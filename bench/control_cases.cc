// The cost of a step besides its bytes: the allocator, prepare_forward and commit; and of a status between steps.
#include <fmt/format.h>

#include <algorithm>

#include "case_cache.h"
#include "checks/copy_baseline.h"
#include "checks/sizes.h"
#include "kv4/status_folder.h"

namespace kv4::bench {
namespace {

constexpr int kBatch = 256;
constexpr int kAllocatorBlocks = 1 << 18;
constexpr int kStatusBlocks = 300'000;
constexpr std::int64_t kRoom = 2048;  // tokens a request may grow before it starts again
constexpr int kChunk = 8192;          // tokens of the steps that prefill it

/// Allocates and releases a batch's blocks; a published block is evicted when it is needed again.
Operation make_allocator(bool publish) {
  auto allocator = std::make_shared<BlockAllocator>(kAllocatorBlocks);
  std::vector<BlockId> blocks(kBatch);
  return [allocator, blocks, publish]() mutable -> Sample {
    const checks::Stopwatch watch;
    for (BlockId& block : blocks) block = *allocator->allocate();
    for (const BlockId block : blocks) {
      if (publish) allocator->publish(block);
      allocator->release(block);
    }
    return {watch.seconds(), 0, kBatch};
  };
}

/// Prepares one token for each of 256 requests; nothing is appended, so only the control work is measured.
Operation make_prepare(const BenchSettings& settings, std::int64_t context, bool commit) {
  CacheOptions options;
  const std::optional<int> layer = first_layer(settings.config, LayerKind::hca);  // the smallest pages
  options.layers = {layer.value_or(0)};
  options.max_requests = kBatch;
  options.max_context = std::min(context + kRoom, settings.config.max_positions);
  options.max_step_tokens = kChunk;
  auto cache = std::make_shared<BenchCache>(settings, options);
  const auto start = [cache, context] {
    cache->release_all();
    for (int i = 0; i < kBatch; ++i) {
      const RequestId request = cache->admit();
      for (std::int64_t left = context + i % 128; left > 0;) {
        const StepSpec item{request, static_cast<int>(std::min<std::int64_t>(left, kChunk))};
        cache->manager().commit(cache->prepare(std::span(&item, 1)));
        left -= item.count;
      }
    }
  };
  start();
  auto items = std::make_shared<std::vector<StepItem>>();
  auto ids = std::make_shared<std::vector<std::int32_t>>(kBatch, 7);
  return [=]() -> Sample {
    KVCacheManager& manager = cache->manager();
    if (manager.length(cache->requests().back()) + 1 >= options.max_context) start();
    items->clear();
    for (std::size_t i = 0; i < cache->requests().size(); ++i)
      items->push_back({cache->requests()[i], 1, std::span(*ids).subspan(i, 1), -1});
    const checks::Stopwatch watch;
    const Step step = *manager.prepare_forward(*items);
    if (commit)
      manager.commit(step);
    else
      manager.abort(step);
    return {watch.seconds(), 0, kBatch};
  };
}

Operation make_admit(const BenchSettings& settings) {
  CacheOptions options;
  options.max_requests = 16;
  options.max_context = 128;
  auto cache = std::make_shared<BenchCache>(settings, options);
  return [cache]() -> Sample {
    const checks::Stopwatch watch;
    const RequestId request = cache->manager().admit().value();
    const double seconds = watch.seconds();
    cache->manager().release(request);
    return {seconds, 0, 1};
  };
}

/// The status of a cache that fills a GPU.
Operation make_status(const BenchSettings& settings) {
  CacheOptions options;
  options.layers = {first_layer(settings.config, LayerKind::hca).value_or(0)};
  options.max_requests = kBatch;
  options.max_context = 128;
  options.num_blocks = kStatusBlocks;
  auto cache = std::make_shared<BenchCache>(settings, options);
  for (int i = 0; i < kBatch; ++i) cache->admit();
  return [cache]() -> Sample {
    const checks::Stopwatch watch;
    const CacheStatus status = read_status(cache->manager());
    return {watch.seconds(), 0, static_cast<std::int64_t>(status.block_states.size())};
  };
}

}  // namespace

void add_control_cases(std::vector<Case>& cases, const BenchSettings& settings) {
  cases.push_back({"allocator/allocate_release", "block", [] { return make_allocator(false); }});
  cases.push_back({"allocator/publish_evict", "block", [] { return make_allocator(true); }});
  for (const std::int64_t context : {std::int64_t{1} << 10, std::int64_t{1} << 17}) {
    for (const bool commit : {true, false}) {
      cases.push_back({fmt::format("step/prepare_{}256/{}", commit ? "commit" : "abort", checks::human_tokens(context)),
                       "request", [=] { return make_prepare(settings, context, commit); }});
    }
  }
  cases.push_back({"status/read", "block", [=] { return make_status(settings); }});
  cases.push_back({"step/admit", "request", [=] { return make_admit(settings); }});
}

}  // namespace kv4::bench
