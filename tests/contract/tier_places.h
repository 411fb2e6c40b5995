// The tiers of the contract suite, each with what it takes to make and to damage one.
#pragma once

#include <memory>
#include <string>

#include "support/simulated_disk.h"
#include "tier/disk_tier.h"
#include "tier/host_tier.h"

namespace kv4::test {

inline constexpr std::uint64_t kContractLayout = 11;

struct HostPlace {
  static constexpr const char* kName = "host";
  static constexpr std::int64_t kTooLarge = 1 << 20;
  static std::string why_not() { return ""; }

  tier::HostTier host{{kContractLayout, 1 << 20, 1 << 10}, std::make_shared<tier::SteadyClock>()};

  tier::Tier& tier() { return host; }
  void damage(const tier::RecordId& id) { host.pages_of(id).back().back() ^= std::byte{1}; }
};

struct DiskPlace {
  static constexpr const char* kName = "disk";
  static constexpr std::int64_t kTooLarge = 256 << 10;
  static std::string why_not() { return ""; }

  static tier::StoreOptions options() {
    tier::StoreOptions options;
    options.directory = "store";
    options.layout_id = kContractLayout;
    options.segment_bytes = 256 << 10;
    options.capacity_bytes = 4 << 20;
    return options;
  }

  std::shared_ptr<SimulatedDisk> disk = std::make_shared<SimulatedDisk>(1);
  tier::DiskTier store{disk, options(), std::make_shared<tier::SteadyClock>()};

  tier::Tier& tier() { return store; }
  /// The first record of the store, whichever it is.
  void damage(const tier::RecordId&) {
    disk->damage("store/" + tier::segment_name(1), tier::kSegmentDataOffset + 200, std::byte{1});
  }
};

}  // namespace kv4::test
