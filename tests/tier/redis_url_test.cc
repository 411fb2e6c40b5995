// The notation of servers; no error repeats a password.
#include "tier/redis_url.h"

#include <gtest/gtest.h>

#include "kv4/error.h"

namespace kv4::test {
namespace {

using tier::parse_rule;
using tier::parse_server;

template <class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    return e.what();
  }
  return "";
}

struct Case {
  const char* text;
  const char* host;
  int port;
  const char *user, *password;
  bool tls;
};

TEST(TierRedisUrl, WhatIsTaken) {
  for (const Case& each : {Case{"10.0.0.7:6380", "10.0.0.7", 6380, "", "", false},
                           Case{"redis-1.example:1", "redis-1.example", 1, "", "", false},
                           Case{"[::1]:6380", "::1", 6380, "", "", false},
                           Case{"redis://host", "host", 6379, "", "", false},
                           Case{"redis://host/", "host", 6379, "", "", false},
                           Case{"redis://host:65535/0", "host", 65535, "", "", false},
                           Case{"rediss://[fe80::1]", "fe80::1", 6379, "", "", true},
                           Case{"rediss://u:p@[::1]:7000/0", "::1", 7000, "u", "p", true},
                           Case{"redis://:only@host:2", "host", 2, "", "only", false},
                           Case{"redis://kv%34:a%3Ab%40c%2f%25%20@host:2", "host", 2, "kv4", "a:b@c/% ", false},
                           Case{"redis://u:a:b@host", "host", 6379, "u", "a:b", false}}) {
    const tier::RedisServer server = parse_server(each.text);
    EXPECT_EQ(server.address, (tier::RedisAddress{each.host, each.port})) << each.text;
    EXPECT_EQ(server.user, each.user) << each.text;
    EXPECT_EQ(server.password, each.password) << each.text;
    EXPECT_EQ(server.tls, each.tls) << each.text;
  }
}

TEST(TierRedisUrl, WhatIsRefusedNeverRepeatsAPassword) {
  for (const char* text :
       {"", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:1x", "host:99999999999", "a b:1",
        "::1:6379", "[::1]", "[::1", "[::1]6379", "[host]:1", "redis://", "redis://:1", "redis://host:",
        "redis://host:0", "http://host:1", "redis+sentinel://host:1", "redis://host/1", "redis://host/0/",
        "redis://host?db=1", "redis://host#x", "redis://secret@host", "redis://user:@host", "redis://@host",
        "redis://u:secret%@host", "redis://u:secret%4@host", "redis://u:secret%zz@host",
        "redis://u:secret@host:99999", "redis://u:secret@", "redis://u:sec/secret@host:1",
        "redis://u:sec?secret@host:1", "redis://u:s@secret@", "u:secret@host:1", "redis://user:secret", "user:secret",
        "rediss://u:secret@ho st", "ftp://u:secret@host", "redis://u:secret@[::1", "redis://u:secret@host/2",
        "redis://u:p#secret@host", "redis://u:secret@host:1/0?ssl_cert_reqs=none"}) {
    const std::string error = error_of([&] { (void)parse_server(text); });
    EXPECT_FALSE(error.empty()) << text;
    EXPECT_EQ(error.find("secret"), std::string::npos) << error;
  }
  for (const char* text : {"redis://user:31415926", "user:31415926", "user:31415926/0"})  // no port has so many digits
    EXPECT_EQ(error_of([&] { (void)parse_server(text); }).find("31415926"), std::string::npos) << text;
  EXPECT_NE(error_of([] { (void)parse_server(std::string(5000, 'a') + ":1"); }).find("4096"), std::string::npos);
}

TEST(TierRedisUrl, OneKindOfServerAndOnePasswordForAll) {
  const auto set = [](const std::vector<std::string>& entries, const std::string& user = "",
                      const std::string& password = "") {
    tier::RemoteOptions options;
    tier::set_servers(options, entries, user, password);
    return options;
  };
  const tier::RemoteOptions both = set({"rediss://u:p@a", "rediss://b:1"});
  EXPECT_EQ(both.servers.size(), 2u);
  EXPECT_EQ(both.user + "/" + both.password, "u/p");
  EXPECT_TRUE(both.tls);
  EXPECT_EQ(set({"redis://u:p@a", "redis://u:p@b"}, "u", "p").password, "p");
  EXPECT_EQ(set({"a:1"}, "", "p").password, "p");
  for (const std::vector<std::string>& entries :
       {std::vector<std::string>{"rediss://a", "b:1"},
        {"redis://a", "rediss://b"},
        {"redis://u:secret@a", "redis://u:p@b"},
        {"redis://u:secret@a", "redis://v:secret@b"}}) {
    const std::string error = error_of([&] { (void)set(entries); });
    EXPECT_FALSE(error.empty()) << entries[0];
    EXPECT_EQ(error.find("secret"), std::string::npos) << error;
  }
  EXPECT_FALSE(error_of([&] { (void)set({"redis://u:p@a"}, "u", "other"); }).empty());
  EXPECT_FALSE(error_of([&] { (void)set({"a:1"}, "u", ""); }).empty());
  EXPECT_FALSE(error_of([&] { (void)set(std::vector<std::string>(1001, "a:1")); }).empty());
}

TEST(TierRedisUrl, RulesAreHostsPortsAndNetworks) {
  const auto is = [](const char* text, const char* host, int bits, int port) {
    const tier::ServerRule rule = parse_rule(text);
    EXPECT_EQ(rule.host, host) << text;
    EXPECT_EQ(rule.prefix_bits, bits) << text;
    EXPECT_EQ(rule.port, port) << text;
  };
  is("host", "host", -1, 0);
  is("host:7000", "host", -1, 7000);
  is("10.0.0.1", "10.0.0.1", -1, 0);
  is("::1", "::1", -1, 0);
  is("[::1]:7", "::1", -1, 7);
  is("10.0.0.0/8", "10.0.0.0", 8, 0);
  is("0.0.0.0/0", "0.0.0.0", 0, 0);
  is("fd00::/16", "fd00::", 16, 0);
  for (const char* text : {"", "host:", "host:0", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/-1", "fd00::/129", "host/8",
                           "/8", "redis://host", "a b", "10.0.0.0/8:1"})
    EXPECT_FALSE(error_of([&] { (void)parse_rule(text); }).empty()) << text;
}

}  // namespace
}  // namespace kv4::test
