// Decides which servers kv4 connects to, and by which addresses. The constructor looks names up, once: nothing waits
// for a resolver later, and a name in a server's answer cannot lead to a new address.
//
// The configured servers are admitted. Servers that the cluster names (CLUSTER SLOTS, MOVED, ASK) are admitted if they
// are on the list of allowed servers. Where there is no password, no TLS and no such list, every numeric address that
// the cluster names is admitted: then there is no secret to send.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tier/remote_tier.h"

namespace kv4::tier {

/// IPv6, or IPv4 as ::ffff:a.b.c.d.
using IpAddress = std::array<std::uint8_t, 16>;
std::optional<IpAddress> parse_ip(const std::string& text);
std::string to_text(const IpAddress& address);

struct RedisEndpoint {
  RedisAddress name;                   // as configured, else numeric; one per server
  std::string certified;               // the host that its certificate has to name
  std::vector<std::string> addresses;  // numeric, to be tried in turn
};

class RedisAdmission {
 public:
  /// Throws Error (bad_argument) where a name cannot be resolved or an entry of the allowed servers is malformed.
  explicit RedisAdmission(const RemoteOptions& options);

  const std::vector<RedisEndpoint>& servers() const { return servers_; }
  /// The endpoint of a server that the cluster names. nullopt: it is not admitted.
  std::optional<RedisEndpoint> find(const RedisAddress& named) const;

 private:
  struct Rule {
    RedisEndpoint endpoint;  // port 0: any
    int prefix_bits = 128;
  };
  /// The host that the certificate of the server at this address has to name: the name that led there, if any.
  std::string certified(const IpAddress& address) const;

  std::vector<RedisEndpoint> servers_;
  std::vector<Rule> rules_;
  bool any_ = false;  // any address is admitted
};

}  // namespace kv4::tier
