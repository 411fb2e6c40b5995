// Servers that lie to the remote tier, and servers that do not work: no secret leaves, memory stays bounded, and each
// failure has its reason in the report and, once, in the log.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <mutex>

#include "kv4/error.h"
#include "kv4/log.h"
#include "support/forging_server.h"
#include "support/redis_servers.h"
#include "support/sanitized.h"
#include "tier/remote_tier.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using namespace std::chrono_literals;
using tier::FailureReason;
using tier::GetStatus;
using tier::PutStatus;
using Time = std::chrono::steady_clock;

tier::RemoteOptions options_for(int port) {
  tier::RemoteOptions options;
  options.servers = {{"127.0.0.1", port}};
  options.layout_id = 11;
  options.max_payload_bytes = 1 << 20;
  options.silence_limit = 300ms;
  options.first_pause = 1ms;
  options.longest_pause = 5ms;
  return options;
}

std::string bulk(const std::string& text) { return "$" + std::to_string(text.size()) + "\r\n" + text + "\r\n"; }

/// The reply to CLUSTER SLOTS that assigns all slots to one server.
std::string slots_at(const std::string& host, int port) {
  return "*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n" + bulk(host) + ":" + std::to_string(port) + "\r\n" + bulk("id");
}

struct TierRemoteAttack : testing::Test {
  std::unique_ptr<tier::Tier> remote;
  std::mutex mutex;
  std::vector<std::string> events;  // "event reason message"

  void SetUp() override {
    set_log_sink([this](const LogRecord& record) {
      if (!record.event.starts_with("remote.")) return;
      const std::lock_guard lock(mutex);
      std::string text(record.event);
      for (const LogField& field : record.fields)
        if (field.name == "reason") text.append(" ").append(field.value);
      events.push_back(text.append(" ").append(record.message));
    });
  }
  void TearDown() override { set_log_sink({}); }

  int told(const std::string& begin) {
    const std::lock_guard lock(mutex);
    return static_cast<int>(std::count_if(events.begin(), events.end(),
                                          [&](const std::string& event) { return event.starts_with(begin); }));
  }
  GetStatus get(tier::Duration limit = 2s) {
    std::vector<std::byte> to(1 << 10);
    tier::GetRequest request{record_id(1), to};
    remote->get({&request, 1}, Time::now() + limit);
    return request.status;
  }
  PutStatus put(tier::Duration limit = 2s) {
    const std::vector<std::byte> payload = random_bytes(1, 500);
    tier::PutRequest request{record_id(1), payload};
    remote->put({&request, 1}, Time::now() + limit);
    return request.status;
  }
  /// Gets fail for this reason, and it is logged once.
  void expect_failure(FailureReason reason, const std::string& word = "") {
    const std::string name = tier::to_string(reason);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(get(), GetStatus::failed) << name;
      std::this_thread::sleep_for(6ms);
    }
    const tier::TierFailure failure = remote->failure();
    EXPECT_EQ(tier::to_string(failure.reason), name) << failure.detail;
    EXPECT_GT(failure.counts[static_cast<std::size_t>(reason)], 0) << name;
    EXPECT_NE(failure.detail.find(word), std::string::npos) << failure.detail;
    EXPECT_EQ(told("remote.failed " + name), 1) << name;
    EXPECT_EQ(told("remote.works"), 0) << name;
  }
};

// --- credentials

TEST_F(TierRemoteAttack, CredentialsGoToConfiguredServersOnly) {
  ForgingServer thief([](const ForgingServer::Arguments& command) { return ForgingServer::hello(command); });
  for (const std::string kind : {"MOVED", "ASK", "SLOTS"}) {
    ForgingServer liar([&](const ForgingServer::Arguments& command) {
      if (command[0] == "CLUSTER" && kind == "SLOTS") return slots_at("127.0.0.1", thief.port());
      const std::string hello = ForgingServer::hello(command);
      return !hello.empty() ? hello : "-" + kind + " " + std::to_string(tier::redis_slot(command[1])) + " " +
                                          thief.address() + "\r\n";
    });
    tier::RemoteOptions options = options_for(liar.port());
    options.user = "somebody";
    options.password = "open sesame";
    remote = tier::make_remote_tier(options);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(get(), GetStatus::failed);
      EXPECT_EQ(put(), PutStatus::failed);
    }
    EXPECT_EQ(thief.connections(), 0) << kind;
    EXPECT_NE(liar.received().find("open sesame"), std::string::npos);
    EXPECT_EQ(tier::to_string(remote->failure().reason), std::string("not_admitted")) << kind;
    EXPECT_NE(remote->failure().detail.find(thief.address()), std::string::npos) << remote->failure().detail;
    EXPECT_EQ(told("remote.failed not_admitted"), 1) << kind;
    events.clear();

    for (const char* allowed : {"127.0.0.2", "127.0.0.1:1", "10.0.0.0/8"}) {
      options.allowed = {allowed};
      remote = tier::make_remote_tier(options);
      EXPECT_EQ(get(), GetStatus::failed);
      EXPECT_EQ(thief.connections(), 0) << allowed;
    }
    options.allowed.clear();
    options.user = options.password = "";  // the list also applies without a password
    options.allowed = {"127.0.0.2"};
    remote = tier::make_remote_tier(options);
    EXPECT_EQ(get(), GetStatus::failed);
    EXPECT_EQ(thief.connections(), 0);
    events.clear();
  }
}

TEST_F(TierRemoteAttack, AllowedServersAreUsed) {
  ForgingServer real([](const ForgingServer::Arguments& command) {
    const std::string hello = ForgingServer::hello(command);
    return !hello.empty() ? hello : std::string(command[0] == "SET" ? "+OK\r\n" : "$-1\r\n");
  });
  ForgingServer first([&](const ForgingServer::Arguments& command) {
    if (command[0] == "CLUSTER") return slots_at("127.0.0.1", real.port());
    return ForgingServer::hello(command);
  });
  int used = 0;
  for (const std::string& allowed :
       {real.address(), std::string("127.0.0.1"), std::string("127.0.0.0/8"), std::string("127.0.0.1/32"),
        std::string("localhost"), std::string("::ffff:127.0.0.1"), std::string("0.0.0.0/0")}) {
    tier::RemoteOptions options = options_for(first.port());
    options.password = "open sesame";
    options.allowed = {"10.0.0.1", allowed};
    remote = tier::make_remote_tier(options);
    EXPECT_EQ(get(), GetStatus::missing) << allowed;
    EXPECT_EQ(put(), PutStatus::stored) << allowed;
    EXPECT_EQ(remote->failure().reason, FailureReason::none) << remote->failure().detail;
    EXPECT_GT(real.connections(), used) << allowed;
    used = real.connections();
  }
  EXPECT_NE(real.received().find("open sesame"), std::string::npos);
  // Without a password and without a list, any address is accepted.
  remote = tier::make_remote_tier(options_for(first.port()));
  EXPECT_EQ(get(), GetStatus::missing);
}

TEST_F(TierRemoteAttack, ErrorsThatRepeatThePasswordAreNotShown) {
  ForgingServer server([](const ForgingServer::Arguments& command) {
    return "-ERR unknown command '" + command[0] + "', with args beginning with: '" + command.back() + "'\r\n";
  });
  tier::RemoteOptions options = options_for(server.port());
  options.password = "open sesame";
  remote = tier::make_remote_tier(options);
  expect_failure(FailureReason::server_error);
  EXPECT_EQ(remote->failure().detail.find("open sesame"), std::string::npos) << remote->failure().detail;
  for (const std::string& event : events) EXPECT_EQ(event.find("open sesame"), std::string::npos) << event;
}

// Redis truncates arguments in its error messages.
TEST_F(TierRemoteAttack, ErrorsThatRepeatAPartOfThePasswordAreNotShown) {
  ForgingServer server([](const ForgingServer::Arguments& command) {
    return "-ERR unknown command '" + command[0] + "', with args beginning with: '" + command.back().substr(0, 40) +
           "'\r\n";
  });
  tier::RemoteOptions options = options_for(server.port());
  for (int i = 0; i < 50; ++i) options.password += "no. " + std::to_string(1000 + i);
  remote = tier::make_remote_tier(options);
  expect_failure(FailureReason::server_error);
  EXPECT_EQ(remote->failure().detail.find("no. 1000"), std::string::npos) << remote->failure().detail;
  for (const std::string& event : events) EXPECT_EQ(event.find("no. 1000"), std::string::npos) << event;
}

TEST_F(TierRemoteAttack, WhatServersSayIsMadePrintable) {
  ForgingServer server([](const ForgingServer::Arguments&) { return "-ERR \x1b[2J\nfake log line\r\n"; });
  remote = tier::make_remote_tier(options_for(server.port()));
  expect_failure(FailureReason::server_error, "ERR ?[2J?fake log line");
}

// --- replies

#if !KV4_SANITIZED
/// Peak memory of this process in bytes.
std::int64_t peak_memory() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;)
    if (word == "VmHWM:") {
      std::int64_t kilobytes = 0;
      file >> kilobytes;
      return kilobytes << 10;
    }
  return 0;
}

/// The growth of a process that gets one record from the server: a child, which has a peak of its own.
std::int64_t growth_of_get(const tier::RemoteOptions& options, FailureReason expected) {
  int ends[2];
  if (::pipe(ends) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    set_log_sink({});
    std::ofstream("/proc/self/clear_refs") << 5;  // resets the peak
    const std::int64_t before = peak_memory();
    const std::unique_ptr<tier::Tier> remote = tier::make_remote_tier(options);
    std::vector<std::byte> to(1 << 10);
    tier::GetRequest request{record_id(1), to};
    remote->get({&request, 1}, Time::now() + 20s);
    const bool right = request.status == GetStatus::failed && remote->failure().reason == expected;
    const std::int64_t growth = right ? peak_memory() - before : -2;
    (void)!::write(ends[1], &growth, sizeof(growth));
    ::_exit(0);
  }
  ::close(ends[1]);
  std::int64_t growth = -1;
  (void)!::read(ends[0], &growth, sizeof(growth));
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  return growth;
}

TEST_F(TierRemoteAttack, MemoryStaysBounded) {
  set_log_sink({});
  constexpr std::int64_t kMegabyte = 1 << 20;
  std::string many, deep, strings = "*200000\r\n";
  for (int i = 0; i < (4 << 20); i += 4) many += ":1\r\n";
  for (int i = 0; i < 200'000; ++i) deep += "*9\r\n";
  for (int i = 0; i < 18'000; ++i) strings += bulk(std::string(1000, 'x'));
  struct Case {
    const char* name;
    std::string answer;  // to GET, and to CLUSTER SLOTS where `slots`
    bool slots;
    std::int64_t most;
    FailureReason reason = FailureReason::reply_too_large;
  };
  for (const Case& each : {Case{"array", "*50000000\r\n" + many, false, 4 * kMegabyte},
                           Case{"array of slots", "*50000000\r\n" + many, true, 4 * kMegabyte},
                           Case{"largest array of slots", "*262144\r\n" + many, true, 48 * kMegabyte,
                                FailureReason::not_redis},
                           Case{"arrays in arrays", deep, true, 4 * kMegabyte},
                           Case{"string", "$999999999\r\n" + many, false, 4 * kMegabyte},
                           Case{"strings", strings, true, 40 * kMegabyte},
                           Case{"line", "+" + std::string(8 << 20, 'x'), false, 4 * kMegabyte},
                           Case{"error", "-ERR " + std::string(8 << 20, 'x'), false, 4 * kMegabyte},
                           Case{"map", "%50000000\r\n" + many, false, 4 * kMegabyte, FailureReason::not_redis}}) {
    ForgingServer server([&](const ForgingServer::Arguments& command) {
      if (command[0] == "GET" || (each.slots && command[0] == "CLUSTER")) return each.answer;
      return ForgingServer::hello(command);
    });
    tier::RemoteOptions options = options_for(server.port());
    options.silence_limit = 10s;
    const std::int64_t growth = growth_of_get(options, each.reason);
    EXPECT_GE(growth, 0) << each.name;
    EXPECT_LE(growth, each.most) << each.name;
  }
}
#endif

TEST_F(TierRemoteAttack, RepliesThatNobodyAskedFor) {
  ForgingServer server([](const ForgingServer::Arguments& command) {
    const std::string hello = ForgingServer::hello(command);
    return !hello.empty() ? hello : std::string("$-1\r\n$-1\r\n$-1\r\n");
  });
  remote = tier::make_remote_tier(options_for(server.port()));
  (void)get();
  EXPECT_EQ(remote->failure().reason, FailureReason::not_redis);
}

// Valid replies of the wrong kind: a tier that never works gives the reason.
TEST_F(TierRemoteAttack, AnswersOfAnotherKindAreAReason) {
  struct Case {
    std::string command, answer;
  };
  for (const Case& each :
       {Case{"AUTH", ":1\r\n"}, Case{"AUTH", "$2\r\nOK\r\n"}, Case{"CLIENT", "+OK\r\n"}, Case{"CLIENT", ":1\r\n"},
        Case{"CLIENT", "$-1\r\n"}, Case{"CLIENT", "$2\r\nid\r\n"}, Case{"CLUSTER", "+OK\r\n"}, Case{"GET", "+OK\r\n"},
        Case{"GET", ":1\r\n"}, Case{"SET", ":1\r\n"}, Case{"SET", "$-1\r\n"}, Case{"SET", "$2\r\nOK\r\n"}}) {
    ForgingServer server([&](const ForgingServer::Arguments& command) {
      if (command[0] == each.command) return each.answer;
      const std::string hello = ForgingServer::hello(command);
      return !hello.empty() ? hello : std::string(command[0] == "SET" ? "+OK\r\n" : "$-1\r\n");
    });
    tier::RemoteOptions options = options_for(server.port());
    options.password = "open sesame";
    remote = tier::make_remote_tier(options);
    if (each.command == "SET")
      EXPECT_EQ(put(), PutStatus::failed) << each.answer;
    else
      EXPECT_EQ(get(), GetStatus::failed) << each.command << " " << each.answer;
    EXPECT_EQ(tier::to_string(remote->failure().reason), std::string("not_redis"))
        << each.command << " " << each.answer << remote->failure().detail;
    EXPECT_EQ(told("remote.failed not_redis"), 1) << each.command << " " << each.answer;
    events.clear();
  }
}

// A length without a valid tag must not cause a second get with a larger buffer.
TEST_F(TierRemoteAttack, ForgedLengthsAreNotTold) {
  const auto guard = std::make_shared<const tier::RecordGuard>(
      tier::GuardOptions{"remote", {CacheKey{std::byte{1}}}, Protection::sealed, false});
  for (const bool forged : {false, true}) {
    tier::RecordHeader header;
    header.layout_id = 11;
    header.id = record_id(1);
    header.length = 5000;
    std::vector<std::byte> stored = random_bytes(1, 5000);
    ASSERT_TRUE(guard->protect(header, stored, stored));
    if (forged) stored[4999] ^= std::byte{1};
    header.payload_digest = digest128(stored);
    std::vector<std::byte> record(tier::kRecordHeaderBytes);
    tier::encode_header(header, record);
    record.insert(record.end(), stored.begin(), stored.end());
    const std::string text(reinterpret_cast<const char*>(record.data()), record.size());
    ForgingServer server([&](const ForgingServer::Arguments& command) {
      const std::string hello = ForgingServer::hello(command);
      return !hello.empty() ? hello : command[0] == "GET" ? bulk(text) : std::string(":1\r\n");
    });
    tier::RemoteOptions options = options_for(server.port());
    options.guard = guard;
    remote = tier::make_remote_tier(options);
    EXPECT_EQ(get(), forged ? GetStatus::damaged : GetStatus::too_small);
    EXPECT_EQ(remote->stats().set_aside_records, forged ? 1 : 0);
  }
}

// --- reasons

TEST_F(TierRemoteAttack, NobodyListens) {
  remote = tier::make_remote_tier(options_for(1));
  expect_failure(FailureReason::connection_refused, "127.0.0.1:1");
}

TEST_F(TierRemoteAttack, NoWay) {
  tier::RemoteOptions options = options_for(6379);
  options.servers = {{"255.255.255.255", 6379}};  // the system refuses this address
  remote = tier::make_remote_tier(options);
  expect_failure(FailureReason::unreachable);
}

TEST_F(TierRemoteAttack, Silence) {
  ForgingServer server([](const ForgingServer::Arguments&) { return ""; });
  remote = tier::make_remote_tier(options_for(server.port()));
  EXPECT_EQ(get(3s), GetStatus::failed);
  EXPECT_EQ(remote->failure().reason, FailureReason::silent) << remote->failure().detail;
}

// Never silent for long, but never a complete answer.
TEST_F(TierRemoteAttack, AByteNowAndThen) {
  ForgingServer server([](const ForgingServer::Arguments& command) {
    const std::string hello = ForgingServer::hello(command);
    return hello.empty() ? "$1000\r\n" + std::string(1000, 'x') : hello;
  });
  server.trickle_from(100, 50ms);
  remote = tier::make_remote_tier(options_for(server.port()));
  EXPECT_EQ(get(2s), GetStatus::failed);
  EXPECT_EQ(remote->failure().reason, FailureReason::silent) << remote->failure().detail;
}

TEST_F(TierRemoteAttack, Nonsense) {
  ForgingServer server([](const ForgingServer::Arguments&) { return "HTTP/1.1 400 Bad Request\r\n\r\n"; });
  remote = tier::make_remote_tier(options_for(server.port()));
  expect_failure(FailureReason::not_redis, "HTTP/1.1 400");
}

TEST_F(TierRemoteAttack, AddressesOfANameAreTriedInTurn) {
  ForgingServer server([](const ForgingServer::Arguments& command) {
    const std::string hello = ForgingServer::hello(command);
    return !hello.empty() ? hello : std::string("$-1\r\n");
  });
  tier::RemoteOptions options = options_for(server.port());
  options.servers = {{"localhost", server.port()}};
  remote = tier::make_remote_tier(options);
  EXPECT_EQ(get(), GetStatus::missing) << remote->failure().detail;
}

struct TierRemoteReasons : TierRemoteAttack {
  std::unique_ptr<RedisServers> server;
  void SetUp() override {
    if (const std::string why = why_no_redis(); !why.empty()) GTEST_SKIP() << why;
    TierRemoteAttack::SetUp();
    server = std::make_unique<RedisServers>(RedisServers::Mode::single);
  }
  tier::RemoteOptions options() { return options_for(server->address(0).port); }
};

TEST_F(TierRemoteReasons, Passwords) {
  server->command(0, {"ACL", "SETUSER", "reader", "on", ">secret", "~*", "+get", "+client", "+cluster", "+getrange"});
  server->command(0, {"ACL", "SETUSER", "nobody", "on", ">secret", "~*", "+get"});
  tier::RemoteOptions with = options();
  with.password = "secret";
  remote = tier::make_remote_tier(with);
  expect_failure(FailureReason::wrong_password, "without any password");  // a password for a server without one
  with.user = "reader";
  with.password = "wrong";
  events.clear();
  remote = tier::make_remote_tier(with);
  expect_failure(FailureReason::wrong_password, "WRONGPASS");
  with.user = "nobody";
  with.password = "secret";
  remote = tier::make_remote_tier(with);
  expect_failure(FailureReason::not_permitted, "NOPERM");
  with.user = "reader";
  events.clear();
  remote = tier::make_remote_tier(with);
  EXPECT_EQ(get(), GetStatus::missing);
  EXPECT_EQ(put(), PutStatus::failed);
  EXPECT_EQ(get(), GetStatus::missing);  // successful reads do not hide the failures of writes
  EXPECT_EQ(remote->failure().reason, FailureReason::not_permitted);
  EXPECT_EQ(told("remote.failed not_permitted"), 1);
  server->command(0, {"CONFIG", "SET", "requirepass", "open sesame"});
  remote = tier::make_remote_tier(options());
  expect_failure(FailureReason::password_needed, "NOAUTH");
}

TEST_F(TierRemoteReasons, FullServerAndBack) {
  remote = tier::make_remote_tier(options());
  EXPECT_EQ(put(), PutStatus::stored);
  server->command(0, {"CONFIG", "SET", "maxmemory", "1mb"});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(put(), PutStatus::no_space);
    EXPECT_EQ(get(), GetStatus::found);
  }
  EXPECT_EQ(remote->failure().reason, FailureReason::server_full);
  EXPECT_EQ(told("remote.failed server_full"), 1);
  EXPECT_EQ(told("remote.works"), 0);
  server->command(0, {"CONFIG", "SET", "maxmemory", "0"});
  EXPECT_EQ(put(), PutStatus::stored);
  EXPECT_EQ(remote->failure().reason, FailureReason::none);
  EXPECT_EQ(remote->failure().detail, "");
  EXPECT_EQ(remote->failure().counts[static_cast<std::size_t>(FailureReason::server_full)], 3);
  EXPECT_EQ(told("remote.works"), 1);
}

TEST_F(TierRemoteReasons, ServerThatGoes) {
  remote = tier::make_remote_tier(options());
  EXPECT_EQ(put(), PutStatus::stored);
  EXPECT_EQ(get(), GetStatus::found);
  server->kill(0);
  EXPECT_EQ(get(), GetStatus::failed);
  EXPECT_EQ(remote->failure().reason, FailureReason::disconnected);
  std::this_thread::sleep_for(10ms);
  EXPECT_EQ(get(), GetStatus::failed);
  EXPECT_EQ(remote->failure().reason, FailureReason::connection_refused);
}

TEST_F(TierRemoteReasons, RecordsExpire) {
  tier::RemoteOptions with = options();
  with.ttl = 100ms;
  remote = tier::make_remote_tier(with);
  EXPECT_EQ(put(), PutStatus::stored);
  const std::string name = tier::redis_name(11, record_id(1));
  EXPECT_NE(server->command(0, {"PTTL", name}), "-1");
  const auto limit = Time::now() + 20s;
  while (get() != GetStatus::missing) ASSERT_LT(Time::now(), limit);
  with.ttl = std::chrono::hours(24);
  remote = tier::make_remote_tier(with);
  EXPECT_EQ(put(), PutStatus::stored);
  EXPECT_EQ(get(), GetStatus::found);
  EXPECT_GT(std::stoi(server->command(0, {"TTL", name})), 86000);
  remote = tier::make_remote_tier(options());
  EXPECT_EQ(put(), PutStatus::stored);
  EXPECT_EQ(server->command(0, {"TTL", name}), "-1");
}

// A failover to a lagging replica brings an older record back, intact and without an error. Where that can happen, only
// records whose bytes follow from their key may be stored (kv4/tier.h).
TEST_F(TierRemoteReasons, ServersMayGoBackInTime) {
  remote = tier::make_remote_tier(options());
  const std::string name = tier::redis_name(11, record_id(1));
  EXPECT_EQ(put(), PutStatus::stored);
  server->command(0, {"COPY", name, "replica"});
  const std::vector<std::byte> newer = random_bytes(2, 500);
  tier::PutRequest request{record_id(1), newer};
  remote->put({&request, 1}, Time::now() + 2s);
  ASSERT_EQ(request.status, PutStatus::stored);
  server->command(0, {"RENAME", "replica", name});
  std::vector<std::byte> to(500);
  tier::GetRequest back{record_id(1), to};
  remote->get({&back, 1}, Time::now() + 2s);
  EXPECT_EQ(back.status, GetStatus::found);
  EXPECT_EQ(to, random_bytes(1, 500));
}

}  // namespace
}  // namespace kv4::test
