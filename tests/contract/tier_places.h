// The tiers of the contract suite, each with what it takes to make and to damage one.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "support/simulated_disk.h"
#include "tier/disk_tier.h"
#include "tier/host_tier.h"
#if KV4_TEST_REMOTE
#include "support/redis_servers.h"
#endif

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
    disk->damage("store/" + tier::segment_name(1), tier::kSegmentDataOffset + tier::kBlockBytes + 20, std::byte{1});
  }
};

#if KV4_TEST_REMOTE
struct RemotePlace {
  static constexpr const char* kName = "remote";
  static constexpr std::int64_t kTooLarge = (8 << 20) + 1;
  static std::string why_not() { return why_no_redis(); }

  RedisServers& servers = shared_redis();
  std::unique_ptr<tier::Tier> remote = tier::make_remote_tier(servers.options());

  tier::Tier& tier() { return *remote; }
  void damage(const tier::RecordId& id) {
    const std::string name = tier::redis_name(kContractLayout, id);
    servers.command(servers.node_of(name), {"SETRANGE", name, "200", "?!"});
  }
};
using AllPlaces = testing::Types<HostPlace, DiskPlace, RemotePlace>;
#else
using AllPlaces = testing::Types<HostPlace, DiskPlace>;
#endif

}  // namespace kv4::test
