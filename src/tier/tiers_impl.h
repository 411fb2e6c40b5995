// The chain inside Tiers, for code that works with records: TieredPrefix, the tool and tests.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kv4/tiers.h"
#include "tier/tier_chain.h"

namespace kv4 {

struct Tiers::Impl {
  Impl(std::vector<std::unique_ptr<tier::TierQueue>> queues, std::shared_ptr<tier::Clock> clock)
      : protections(queues.size(), Protection::none), chain(std::move(queues), std::move(clock)) {}

  static Impl& of(Tiers& tiers) { return *tiers.impl_; }
  /// Tiers over the caller's queues, without keys.
  static Tiers over(std::vector<std::unique_ptr<tier::TierQueue>> queues, std::shared_ptr<tier::Clock> clock) {
    return Tiers(std::make_unique<Impl>(std::move(queues), std::move(clock)));
  }

  std::shared_ptr<Backend> backend;     // host memory is pinned for it; null: none
  std::vector<Protection> protections;  // by tier
  tier::TierChain chain;
};

}  // namespace kv4
