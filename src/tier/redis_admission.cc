#include "tier/redis_admission.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <strings.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/check.h"
#include "tier/redis_url.h"

namespace kv4::tier {
namespace {

constexpr std::size_t kMaxAddresses = 8;  // of one name
constexpr IpAddress kMappedIpv4 = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr int kMappedBits = 96;

std::vector<std::string> look_up(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  require(error == 0, ErrorCode::bad_argument, "no address of the server '{}': {}", host, ::gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> all(found, ::freeaddrinfo);
  std::vector<std::string> addresses;
  for (const addrinfo* each = found; each != nullptr && addresses.size() < kMaxAddresses; each = each->ai_next) {
    char text[NI_MAXHOST];
    if (::getnameinfo(each->ai_addr, each->ai_addrlen, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0)
      addresses.emplace_back(text);
  }
  require(!addresses.empty(), ErrorCode::bad_argument, "no address of the server '{}'", host);
  return addresses;
}

RedisEndpoint endpoint_of(const RedisAddress& address) { return {address, address.host, look_up(address.host)}; }

bool same_network(const IpAddress& a, const IpAddress& b, int bits) {
  const std::size_t whole = bits / 8;
  if (std::memcmp(a.data(), b.data(), whole) != 0) return false;
  return bits % 8 == 0 || (a[whole] ^ b[whole]) >> (8 - bits % 8) == 0;
}

bool has(const RedisEndpoint& endpoint, const IpAddress& ip, int bits = 128) {
  return std::any_of(endpoint.addresses.begin(), endpoint.addresses.end(), [&](const std::string& text) {
    const std::optional<IpAddress> own = parse_ip(text);
    return own && same_network(*own, ip, bits);
  });
}

bool same_host(const std::string& a, const std::string& b) { return ::strcasecmp(a.c_str(), b.c_str()) == 0; }

}  // namespace

std::optional<IpAddress> parse_ip(const std::string& text) {
  IpAddress out = kMappedIpv4;
  if (::inet_pton(AF_INET, text.c_str(), out.data() + kMappedBits / 8) == 1) return out;
  if (::inet_pton(AF_INET6, text.c_str(), out.data()) == 1) return out;
  return std::nullopt;
}

std::string to_text(const IpAddress& address) {
  char text[INET6_ADDRSTRLEN];
  const bool v4 = same_network(address, kMappedIpv4, kMappedBits);
  ::inet_ntop(v4 ? AF_INET : AF_INET6, address.data() + (v4 ? kMappedBits / 8 : 0), text, sizeof(text));
  return text;
}

RedisAdmission::RedisAdmission(const RemoteOptions& options)
    : any_(options.allowed.empty() && options.password.empty() && !options.tls) {
  for (const RedisAddress& address : options.servers) {
    require(address.port > 0 && address.port < 65536, ErrorCode::bad_argument, "port {} of the server '{}'",
            address.port, address.host);
    servers_.push_back(endpoint_of(address));
  }
  require(options.allowed.size() <= kMaxServers, ErrorCode::bad_argument, "{} allowed servers; {} at most",
          options.allowed.size(), kMaxServers);
  for (const std::string& text : options.allowed) {
    const ServerRule rule = parse_rule(text);
    const bool v4 = rule.host.find(':') == std::string::npos;
    rules_.push_back(
        {endpoint_of({rule.host, rule.port}), rule.prefix_bits < 0 ? 128 : rule.prefix_bits + (v4 ? kMappedBits : 0)});
  }
}

std::string RedisAdmission::certified(const IpAddress& address) const {
  for (const RedisEndpoint& server : servers_)
    if (has(server, address)) return server.certified;
  for (const Rule& rule : rules_)
    if (rule.prefix_bits == 128 && has(rule.endpoint, address)) return rule.endpoint.certified;
  return to_text(address);
}

std::optional<RedisEndpoint> RedisAdmission::find(const RedisAddress& named) const {
  if (named.port <= 0 || named.port > 65535) return std::nullopt;
  const std::optional<IpAddress> ip = parse_ip(named.host);
  const auto is = [&](const RedisEndpoint& endpoint, int bits) {
    return ip ? has(endpoint, *ip, bits) : same_host(endpoint.name.host, named.host);
  };
  for (const RedisEndpoint& server : servers_)
    if (server.name.port == named.port && is(server, 128)) return server;
  const auto numeric = [&] { return RedisEndpoint{{to_text(*ip), named.port}, certified(*ip), {to_text(*ip)}}; };
  for (const Rule& rule : rules_) {
    if ((rule.endpoint.name.port != 0 && rule.endpoint.name.port != named.port) || !is(rule.endpoint, rule.prefix_bits))
      continue;
    if (ip) return numeric();
    return RedisEndpoint{{rule.endpoint.name.host, named.port}, rule.endpoint.certified, rule.endpoint.addresses};
  }
  return any_ && ip ? std::optional(numeric()) : std::nullopt;
}

}  // namespace kv4::tier
