// Records in a Redis cluster, or on a single server. Each is a string of header and payload, in the format of all
// tiers, and is checked on every read. Other programs may read and write the same names.
//
// The servers decide how durable a `stored` put is (replicas, AOF): flush() says `kept`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kv4/tier.h"
#include "tier/record_guard.h"
#include "tier/redis_slots.h"

namespace kv4::tier {

/// PEM. Empty: the system's authorities; no certificate of our own.
struct RemoteTlsFiles {
  std::string ca, certificate, key;
  bool empty() const { return ca.empty() && certificate.empty() && key.empty(); }
};

struct RemoteOptions {
  std::vector<RedisAddress> servers;  // some of the cluster; they name the others
  std::string user, password;         // AUTH where there is a password; the user needs CLIENT INFO and CLIENT KILL
  std::vector<std::string> allowed;   // other servers that the cluster may name (redis_admission.h), for parse_rule()
  bool tls = false;                   // for all of them
  RemoteTlsFiles tls_files;
  Duration ttl{0};  // a record's, from its put on; 0: none
  std::uint64_t layout_id = 0;
  /// Protects records and decides which are believed; others are misses. Null: as a guard without keys.
  std::shared_ptr<const RecordGuard> guard = {};
  std::int64_t max_payload_bytes = std::int64_t{64} << 20;
  Duration silence_limit = std::chrono::seconds(1);      // a server that owes an answer and sends nothing is dropped
  Duration first_pause = std::chrono::milliseconds(50);  // before it is tried again; doubles
  Duration longest_pause = std::chrono::seconds(5);
};

inline constexpr Duration kLeastTtl = std::chrono::milliseconds(1), kMaxTtl = std::chrono::hours(24 * 3652);

/// Does not connect yet: servers that are not there are misses. Throws Error: bad_argument; bad_file where a PEM file
/// cannot be used; bad_state where kv4 was built without hiredis.
std::unique_ptr<Tier> make_remote_tier(const RemoteOptions& options);
/// The reason why make_remote_tier() fails in this build. Empty: it works.
std::string why_no_remote_tier();

}  // namespace kv4::tier
