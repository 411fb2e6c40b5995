// Caches over tiers, for the tests of both.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cache/prefix_options.h"
#include "kv4/tiered_prefix.h"
#include "support/fake_tier.h"
#include "tier/disk_tier.h"
#include "tier/host_tier.h"
#include "tier/tiers_impl.h"

namespace kv4::test {

inline const SnapshotPolicy kCheckpoint{.kind = SnapshotPolicy::Kind::checkpoint, .period_tokens = 48};
inline const SnapshotPolicy kPolicies[] = {
    {.kind = SnapshotPolicy::Kind::full}, kCheckpoint, {.kind = SnapshotPolicy::Kind::none}};

inline std::vector<std::int32_t> ids_of(std::uint64_t stream, std::int64_t count) {
  std::vector<std::int32_t> out;
  for (std::int64_t p = 0; p < count; ++p) out.push_back(Driver::token_id(stream, p));
  return out;
}

/// Host memory and optionally a disk, below a sequence of caches of one layout.
struct HostAndDisk {
  std::shared_ptr<tier::Clock> clock = std::make_shared<tier::SteadyClock>();
  std::optional<Tiers> tiers;
  tier::TierChain* chain = nullptr;

  explicit HostAndDisk(std::uint64_t layout, const std::string& directory = "", bool host = true) {
    std::vector<std::unique_ptr<tier::TierQueue>> queues;
    const auto add = [&](std::shared_ptr<tier::Tier> tier) {
      queues.push_back(std::make_unique<tier::TierQueue>(std::move(tier), tier::TierQueueOptions{}, clock));
    };
    if (host) {
      const tier::HostTierOptions options{.layout_id = layout, .capacity_bytes = 64 << 20};
      add(std::make_shared<tier::HostTier>(options, clock));
    }
    if (!directory.empty()) {
      tier::StoreOptions options;
      options.directory = directory;
      options.layout_id = layout;
      options.segment_bytes = 4 << 20;
      add(std::make_shared<tier::DiskTier>(tier::make_posix_file_system(), options, clock));
    }
    tiers.emplace(Tiers::Impl::over(std::move(queues), clock));
    chain = &Tiers::Impl::of(*tiers).chain;
  }
  tier::Deadline soon() { return clock->now() + std::chrono::seconds(60); }
};

inline std::uint64_t layout_of(const Model& model, const CacheOptions& o) {
  return build_schema(model.config, o).layout_id;
}

/// A cache above tiers.
struct TieredDriver : Driver {
  TieredDriver(const Model& model, const CacheOptions& o, HostAndDisk& tiers_in)
      : Driver(model, o), tiers(tiers_in), tiered(cache, *tiers.tiers) {}

  std::int64_t load(std::uint64_t stream, std::int64_t tokens, std::string_view salt = "") {
    const std::vector<std::int32_t> ids = ids_of(stream, tokens);
    return tiered.load({ids, 0, salt, {}}, tiers.soon());
  }
  Admission begin(std::uint64_t stream, std::int64_t tokens, std::string_view salt = "") {
    const std::vector<std::int32_t> ids = ids_of(stream, tokens);
    return cache.admit(Prompt{ids, 0, salt, {}}).value();
  }
  /// Computes the missing tokens, including those after the prompt.
  void fill_up(RequestId request, std::uint64_t stream, std::int64_t tokens) {
    for (std::int64_t at = cache.length(request); at < tokens; at = cache.length(request))
      run({{request, stream, static_cast<std::int32_t>(std::min<std::int64_t>(23, tokens - at))}});
  }
  void save_all() {
    while (tiered.save(7) > 0) continue;
    for (const tier::FlushStatus status : tiers.chain->flush(tiers.soon()))
      EXPECT_NE(status, tier::FlushStatus::failed);
  }
  void compute_and_save(std::uint64_t stream, std::int64_t tokens, std::string_view salt = "") {
    const Admission a = begin(stream, tokens, salt);
    fill_up(a.request, stream, tokens);
    cache.release(a.request);
    save_all();
  }

  HostAndDisk& tiers;
  TieredPrefix tiered;
};

inline Bytes cold_bytes(const Model& model, CacheOptions options, std::uint64_t stream, std::int64_t tokens) {
  options.prefix = {};
  Driver d(model, options, make_cpu_backend());
  const RequestId r = d.admit();
  d.run({{r, stream, static_cast<std::int32_t>(tokens)}});
  return bytes_of(d.cache, r);
}

/// A tier that the test controls, with a small queue, below a cache.
struct FakeBelow {
  std::shared_ptr<ManualClock> clock = std::make_shared<ManualClock>();
  std::shared_ptr<FakeTier> fake = std::make_shared<FakeTier>(clock);
  std::optional<Tiers> tiers;
  tier::TierChain* chain = nullptr;

  explicit FakeBelow(std::int64_t max_writes) {
    tier::TierQueueOptions options;
    options.max_writes = max_writes;
    options.breaker.failures_to_open = 1000;
    std::vector<std::unique_ptr<tier::TierQueue>> queues;
    queues.push_back(std::make_unique<tier::TierQueue>(fake, options, clock));
    tiers.emplace(Tiers::Impl::over(std::move(queues), clock));
    chain = &Tiers::Impl::of(*tiers).chain;
  }
  ~FakeBelow() { fake->release(); }
  std::int64_t stored() { return chain->stats()[0].queue.stored; }
};

inline void compute(Driver& d, std::uint64_t stream, std::int64_t tokens) {
  const std::vector<std::int32_t> ids = ids_of(stream, tokens);
  const RequestId request = d.cache.admit(Prompt{ids, 0, "", {}}).value().request;
  while (d.cache.length(request) < tokens)
    d.run({{request, stream, static_cast<std::int32_t>(std::min<std::int64_t>(23, tokens - d.cache.length(request)))}});
  d.cache.release(request);
}

}  // namespace kv4::test
