#include "tier/redis_url.h"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/check.h"

namespace kv4::tier {
namespace {

constexpr std::string_view kScheme = "://", kHidden = "***";
constexpr std::size_t kPortDigits = 5;
constexpr const char* kHowTo = "write redis://user:password@host:port, rediss://... for TLS, or host:port";

bool is_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// The entry without parts that may be secret: all before the last '@', and a port that is no valid port
/// (user:password without a host).
std::string shown(std::string_view text) {
  if (text.size() > kMaxServerText) return std::string(kHidden);
  const std::size_t scheme = text.find(kScheme);
  const std::size_t begin = scheme == std::string_view::npos ? 0 : scheme + kScheme.size();
  std::string head(text.substr(0, begin)), rest(text.substr(begin));
  if (const std::size_t at = rest.rfind('@'); at != std::string::npos) {
    head += kHidden;
    rest = rest.substr(at);
  }
  if (const std::size_t colon = rest.rfind(':'); colon != std::string::npos && !rest.ends_with(']')) {
    const std::size_t end = std::min(rest.find('/', colon), rest.size());
    const std::string port = rest.substr(colon + 1, end - colon - 1);
    if (!is_digits(port) || port.size() > kPortDigits) rest = rest.substr(0, colon + 1).append(kHidden);
  }
  std::string out = head + rest;
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return out;
}

std::optional<int> parse_digits(std::string_view text, int least, int most) {
  int number = 0;
  if (!is_digits(text)) return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < least || number > most) return std::nullopt;
  return number;
}

bool is_ipv6(const std::string& text) {
  in6_addr address;
  return ::inet_pton(AF_INET6, text.c_str(), &address) == 1;
}

bool is_host(std::string_view text) {
  constexpr std::size_t kMaxHostName = 253;  // of DNS
  return !text.empty() && text.size() <= kMaxHostName && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' ||
           c == '_';
  });
}

struct HostPort {
  std::string host;
  std::optional<std::string_view> port;
};

/// Parses "host", "host:port", "[::1]" or "[::1]:port"; nullopt: none of these.
std::optional<HostPort> split_host(std::string_view text) {
  HostPort out;
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return std::nullopt;
    out.host = text.substr(1, end - 1);
    text.remove_prefix(end + 1);
    if (!is_ipv6(out.host) || (!text.empty() && text.front() != ':')) return std::nullopt;
    if (!text.empty()) out.port = text.substr(1);
    return out;
  }
  const std::size_t colon = text.find(':');
  out.host = text.substr(0, colon);
  if (colon != std::string_view::npos) out.port = text.substr(colon + 1);
  return is_host(out.host) ? std::optional(out) : std::nullopt;
}

std::optional<std::string> percent_decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    unsigned value = 0;
    if (text.size() - i < 3) return std::nullopt;
    const char *digits = text.data() + i + 1, *end = digits + 2;
    if (const auto parsed = std::from_chars(digits, end, value, 16); parsed.ptr != end) return std::nullopt;
    out += static_cast<char>(value);
    i += 2;
  }
  return out;
}

void parse_credentials(std::string_view text, RedisServer& server, const std::string& entry) {
  const std::size_t colon = text.find(':');
  require(colon != std::string_view::npos && colon + 1 < text.size(), ErrorCode::bad_argument,
          "the server '{}' has no password before its '@'; write redis://user:password@host:port or "
          "redis://:password@host:port",
          shown(entry));
  const std::optional<std::string> user = percent_decoded(text.substr(0, colon)),
                                   password = percent_decoded(text.substr(colon + 1));
  require(user && password, ErrorCode::bad_argument,
          "user or password of the server '{}' have a '%' without two hexadecimal digits; write %25 for it",
          shown(entry));
  server.user = *user;
  server.password = *password;
}

}  // namespace

RedisServer parse_server(const std::string& text) {
  require(text.size() <= kMaxServerText, ErrorCode::bad_argument, "a server of {} characters; {} at most; {}",
          text.size(), kMaxServerText, kHowTo);
  RedisServer server;
  std::string_view rest = text;
  const std::size_t scheme = rest.find(kScheme);
  const bool url = scheme != std::string_view::npos;
  if (url) {
    server.tls = rest.substr(0, scheme) == "rediss";
    require(server.tls || rest.substr(0, scheme) == "redis", ErrorCode::bad_argument,
            "'{}' is no server: kv4 knows redis:// and rediss://", shown(text));
    rest.remove_prefix(scheme + kScheme.size());
    const std::string_view path = rest.substr(std::min(rest.find_first_of("/?#"), rest.size()));
    require(path.empty() || path == "/" || path == "/0", ErrorCode::bad_argument,
            "'{}' names more than a server: kv4 uses database 0 and takes no options there; end it after the port or "
            "with /0, and write %2F, %3F and %23 for /, ? and # in a password",
            shown(text));
    rest.remove_suffix(path.size());
    if (const std::size_t at = rest.rfind('@'); at != std::string_view::npos) {
      parse_credentials(rest.substr(0, at), server, text);
      rest.remove_prefix(at + 1);
    }
  }
  const std::optional<HostPort> parts = split_host(rest);
  require(parts && (url || parts->port), ErrorCode::bad_argument, "'{}' is no server; {} (IPv6 as [::1]:6379)",
          shown(text), kHowTo);
  const std::optional<int> port = parts->port ? parse_digits(*parts->port, 1, 65535) : kRedisPort;
  require(port.has_value(), ErrorCode::bad_argument, "the port of the server '{}' is no number from 1 to 65535; {}",
          shown(text), kHowTo);
  server.address = {parts->host, *port};
  return server;
}

void set_servers(RemoteOptions& options, std::span<const std::string> entries, const std::string& user,
                 const std::string& password) {
  require(entries.size() <= kMaxServers, ErrorCode::bad_argument, "{} servers; {} at most", entries.size(),
          kMaxServers);
  require(user.empty() || !password.empty(), ErrorCode::bad_argument, "a user without a password; give both");
  options.user = user;
  options.password = password;
  for (const std::string& entry : entries) {
    const RedisServer server = parse_server(entry);
    require(options.servers.empty() || server.tls == options.tls, ErrorCode::bad_argument,
            "the servers '{}' and '{}': one with TLS and one without; write rediss:// for all or for none",
            shown(entries.front()), shown(entry));
    options.tls = server.tls;
    options.servers.push_back(server.address);
    if (server.password.empty()) continue;
    require(options.password.empty() || (options.user == server.user && options.password == server.password),
            ErrorCode::bad_argument,
            "the server '{}' has another user or password than what was given before; a cluster has one for all",
            shown(entry));
    options.user = server.user;
    options.password = server.password;
  }
}

ServerRule parse_rule(const std::string& text) {
  ServerRule rule;
  std::string_view rest = text;
  const std::size_t slash = rest.find('/');
  const bool network = slash != std::string_view::npos;
  in_addr v4;
  if (rest.size() <= kMaxServerText) {
    const std::string host(rest.substr(0, slash));
    const bool v6 = is_ipv6(host);
    if (network && (v6 || ::inet_pton(AF_INET, host.c_str(), &v4) == 1)) {
      const std::optional<int> bits = parse_digits(rest.substr(slash + 1), 0, v6 ? 128 : 32);
      if (bits) return {host, *bits, 0};
    }
    if (!network && v6) return {host, -1, 0};
    const std::optional<HostPort> parts = network ? std::nullopt : split_host(rest);
    const std::optional<int> port = parts && parts->port ? parse_digits(*parts->port, 1, 65535) : 0;
    if (parts && port) return {parts->host, -1, *port};
  }
  fail(ErrorCode::bad_argument,
       "'{}' is no allowed server; write host, host:port (IPv6 as [::1]:6379) or a network such as 10.0.0.0/8",
       shown(text));
}

}  // namespace kv4::tier
