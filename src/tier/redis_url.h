// Parses servers ("redis://[[user]:password@]host[:port][/0]", "rediss://..." for TLS, or "host:port") and rules for
// the servers that a cluster may name ("host", "host:port", "10.0.0.0/8").
#pragma once

#include <span>
#include <string>

#include "tier/remote_tier.h"

namespace kv4::tier {

inline constexpr std::size_t kMaxServerText = 4096;  // characters of one entry
inline constexpr std::size_t kMaxServers = 1000;     // entries; a cluster has no more masters
inline constexpr int kRedisPort = 6379;              // where a URL names none

struct RedisServer {
  RedisAddress address;
  std::string user, password;
  bool tls = false;
};

/// Throws Error (bad_argument) with the reason, and never with a password.
RedisServer parse_server(const std::string& text);

/// Sets servers, TLS and credentials of `options` from the entries, and from the user and password given beside them.
/// All servers of a cluster have one user and password. Throws Error (bad_argument).
void set_servers(RemoteOptions& options, std::span<const std::string> entries, const std::string& user,
                 const std::string& password);

struct ServerRule {
  std::string host;      // a name or a numeric address
  int prefix_bits = -1;  // bits of the address that count; -1: all
  int port = 0;          // 0: any
};
ServerRule parse_rule(const std::string& text);

}  // namespace kv4::tier
