// How servers are written: "redis://[[user]:password@]host[:port][/0]", "rediss://..." for TLS, or "host:port"; and
// the servers that a cluster may name: "host", "host:port", "10.0.0.0/8".
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

/// Throws Error (bad_argument) that says what is wrong and never repeats a password.
RedisServer parse_server(const std::string& text);

/// Servers, TLS and credentials of `options` from entries and from the user and password beside them, which are one for
/// all servers of a cluster. Throws Error (bad_argument).
void set_servers(RemoteOptions& options, std::span<const std::string> entries, const std::string& user,
                 const std::string& password);

struct ServerRule {
  std::string host;      // a name or a numeric address
  int prefix_bits = -1;  // of the address; -1: all of them
  int port = 0;          // 0: any
};
ServerRule parse_rule(const std::string& text);

}  // namespace kv4::tier
