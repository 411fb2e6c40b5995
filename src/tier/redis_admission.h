// Which servers are ever connected to, and by which addresses. Names are looked up once, when this is made: nothing
// waits for a resolver later, and a name that a server answers with cannot lead anywhere new.
//
// Admitted are the servers that were configured, and of those that the cluster names (CLUSTER SLOTS, MOVED, ASK) the
// ones on the list of allowed servers. Only where there is neither a password nor TLS nor such a list, every numeric
// address that the cluster names is taken: then there is no secret to send.
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
  RedisAddress name;                   // as it was configured, else numeric; one server has one
  std::string certified;               // the host that its certificate has to be for
  std::vector<std::string> addresses;  // numeric, to be tried in turn
};

class RedisAdmission {
 public:
  /// Throws Error (bad_argument) where a name is not known or an allowed server is none.
  explicit RedisAdmission(const RemoteOptions& options);

  const std::vector<RedisEndpoint>& servers() const { return servers_; }
  /// Of a server that the cluster names. Nullopt: it is not admitted.
  std::optional<RedisEndpoint> find(const RedisAddress& named) const;

 private:
  struct Rule {
    RedisEndpoint endpoint;  // port 0: any
    int prefix_bits = 128;
  };
  /// What a certificate of the server at this address has to be for: the name that led there, if one did.
  std::string certified(const IpAddress& address) const;

  std::vector<RedisEndpoint> servers_;
  std::vector<Rule> rules_;
  bool any_ = false;  // address
};

}  // namespace kv4::tier
