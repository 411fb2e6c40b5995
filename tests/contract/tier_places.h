// The tiers of the contract suite, with code to make and to damage each.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "support/simulated_disk.h"
#include "tier/disk_tier.h"
#include "tier/guarded_tier.h"
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

inline std::shared_ptr<const tier::RecordGuard> contract_guard(const char* tier, Protection protection) {
  return std::make_shared<tier::RecordGuard>(tier::GuardOptions{tier, {CacheKey{std::byte{3}}}, protection, false});
}

/// A foreign tier with protected records.
struct GuardedPlace {
  static constexpr const char* kName = "guarded";
  static constexpr std::int64_t kTooLarge = 1 << 20;
  static std::string why_not() { return ""; }

  std::shared_ptr<tier::HostTier> host = std::make_shared<tier::HostTier>(
      tier::HostTierOptions{kContractLayout, 1 << 20, 1 << 10}, std::make_shared<tier::SteadyClock>());
  tier::GuardedTier guarded{host, contract_guard("host", Protection::authenticated), kContractLayout};

  tier::Tier& tier() { return guarded; }
  void damage(const tier::RecordId& id) { host->pages_of(id).back().back() ^= std::byte{1}; }
};

template <Protection kProtection>
struct DiskPlaceWith {
  static constexpr const char* kName = kProtection == Protection::none     ? "disk"
                                       : kProtection == Protection::sealed ? "disk_sealed"
                                                                           : "disk_authenticated";
  static constexpr std::int64_t kTooLarge = 256 << 10;
  static std::string why_not() { return ""; }

  static tier::StoreOptions options() {
    tier::StoreOptions options;
    options.directory = "store";
    options.layout_id = kContractLayout;
    options.segment_bytes = 256 << 10;
    options.capacity_bytes = 4 << 20;
    if (kProtection != Protection::none) options.guard = contract_guard("disk", kProtection);
    return options;
  }

  std::shared_ptr<SimulatedDisk> disk = std::make_shared<SimulatedDisk>(1);
  tier::DiskTier store{disk, options(), std::make_shared<tier::SteadyClock>()};

  tier::Tier& tier() { return store; }
  /// Damages the store's first record, whatever its id.
  void damage(const tier::RecordId&) {
    disk->damage("store/" + tier::segment_name(1), tier::kSegmentDataOffset + tier::kBlockBytes + 20, std::byte{1});
  }
};

using DiskPlace = DiskPlaceWith<Protection::none>;

#if KV4_TEST_REMOTE
template <Protection kProtection>
struct RemotePlaceWith {
  static constexpr const char* kName = kProtection == Protection::none     ? "remote"
                                       : kProtection == Protection::sealed ? "remote_sealed"
                                                                           : "remote_authenticated";
  static constexpr std::int64_t kTooLarge = (8 << 20) + 1;
  static std::string why_not() { return why_no_redis(); }

  RedisServers& servers = shared_redis();
  std::unique_ptr<tier::Tier> remote = [this] {
    tier::RemoteOptions options = servers.options();
    if (kProtection != Protection::none) options.guard = contract_guard("remote", kProtection);
    return tier::make_remote_tier(options);
  }();

  tier::Tier& tier() { return *remote; }
  void damage(const tier::RecordId& id) {
    const std::string name = tier::redis_name(kContractLayout, id);
    servers.command(servers.node_of(name), {"SETRANGE", name, std::to_string(tier::kRecordHeaderBytes + 2), "?!"});
  }
};
using AllPlaces =
    testing::Types<HostPlace, DiskPlace, RemotePlaceWith<Protection::none>, DiskPlaceWith<Protection::sealed>,
                   DiskPlaceWith<Protection::authenticated>, RemotePlaceWith<Protection::sealed>,
                   RemotePlaceWith<Protection::authenticated>, GuardedPlace>;
#else
using AllPlaces = testing::Types<HostPlace, DiskPlace, DiskPlaceWith<Protection::sealed>,
                                 DiskPlaceWith<Protection::authenticated>, GuardedPlace>;
#endif

}  // namespace kv4::test
