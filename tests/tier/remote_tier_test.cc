// The remote tier on a real Redis cluster under disturbances: only misses, never wrong bytes, and never (much) past the
// deadline.
#include "tier/remote_tier.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "kv4/error.h"
#include "support/redis_servers.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using namespace std::chrono_literals;
using tier::GetStatus;
using tier::PutStatus;
using Time = std::chrono::steady_clock;

constexpr auto kSlack = 10s;  // for a busy machine; far less than a hang
constexpr std::uint64_t kLayout = 11;

TEST(TierRedisSlots, AreTheServers) {
  EXPECT_EQ(tier::redis_slot(""), 0);
  EXPECT_EQ(tier::redis_slot("123456789"), 0x31c3);  // from the specification
  EXPECT_EQ(tier::redis_slot("foo"), 12182);
  const std::string name = tier::redis_name(0x1f, record_id(1, 0xabc));
  EXPECT_EQ(name.size(), 4u + 17 + 17 + 64);
  EXPECT_TRUE(name.starts_with("kv4:000000000000001f:0000000000000abc:"));
}

TEST(TierRedisSlots, RedirectsAreParsedOrRefused) {
  using Kind = tier::RedisRedirect::Kind;
  const tier::RedisAddress asked{"10.0.0.1", 7};
  const tier::RedisRedirect moved = tier::parse_redirect("MOVED 3999 127.0.0.1:6381", asked);
  EXPECT_EQ(moved.kind, Kind::moved);
  EXPECT_EQ(moved.slot, 3999);
  EXPECT_EQ(moved.to, (tier::RedisAddress{"127.0.0.1", 6381}));
  EXPECT_EQ(tier::parse_redirect("ASK 1 ::1:6381", asked).to, (tier::RedisAddress{"::1", 6381}));
  EXPECT_EQ(tier::parse_redirect("ASK 1 :6381", asked).to, (tier::RedisAddress{"10.0.0.1", 6381}));
  for (const char* text : {"", "ERR", "MOVED", "MOVED ", "MOVED 1", "MOVED 16384 a:1", "MOVED -1 a:1", "MOVED 1 a",
                           "MOVED 1 a:", "MOVED 1 a:65536", "MOVED 1 a:-1", "ASK x a:1", "MOVED a:1 ", "moved 1 a:1"})
    EXPECT_EQ(tier::parse_redirect(text, asked).kind, Kind::none) << text;
}

TEST(TierRemoteOptions, AreChecked) {
  tier::RemoteOptions options;
  EXPECT_THROW(tier::make_remote_tier(options), Error);
  options.servers = {{"127.0.0.1", 0}};
  EXPECT_THROW(tier::make_remote_tier(options), Error);
  options.servers = {{"127.0.0.1", 1}};
  options.max_payload_bytes = std::int64_t{1} << 30;
  EXPECT_THROW(tier::make_remote_tier(options), Error);
}

constexpr std::uint64_t kCount = 60;

/// Numbered records; number and version determine the payload.
struct TierRemote : testing::Test {
  RedisServers* servers = nullptr;
  std::unique_ptr<tier::Tier> remote;

  void SetUp() override {
    if (const std::string why = why_no_redis(); !why.empty()) GTEST_SKIP() << why;
    servers = &shared_redis();
    make(servers->options());
  }
  void make(tier::RemoteOptions options) {
    options.silence_limit = 2s;  // even a server on a busy machine answers within this time
    options.first_pause = 20ms;
    options.longest_pause = 200ms;
    remote = tier::make_remote_tier(options);
  }

  static std::string name_of(std::uint64_t number) { return tier::redis_name(kLayout, record_id(number)); }
  int node_of(std::uint64_t number) const { return servers->node_of(name_of(number)); }
  static std::vector<std::byte> payload(std::uint64_t number, std::uint64_t version = 0) {
    return random_bytes(number * 1000 + version, 500 + static_cast<std::int64_t>(number) * 37);
  }
  std::string value_of(std::uint64_t number) { return servers->command(node_of(number), {"GET", name_of(number)}); }

  template <class Call>
  void within(tier::Duration limit, Call&& call) {
    const auto start = Time::now();
    call(start + limit);
    EXPECT_LT(Time::now() - start, limit + kSlack);
  }
  std::vector<PutStatus> put(std::uint64_t count, tier::Duration limit = 5s, std::uint64_t version = 0) {
    std::vector<std::vector<std::byte>> payloads;
    std::vector<tier::PutRequest> requests;
    for (std::uint64_t i = 0; i < count; ++i) payloads.push_back(payload(i, version));
    for (std::uint64_t i = 0; i < count; ++i) requests.push_back({record_id(i), payloads[i]});
    within(limit, [&](tier::Deadline deadline) { remote->put(requests, deadline); });
    std::vector<PutStatus> statuses;
    for (const tier::PutRequest& request : requests) statuses.push_back(request.status);
    return statuses;
  }
  /// A found record has the right bytes.
  std::vector<GetStatus> get(std::uint64_t count, tier::Duration limit = 5s, std::uint64_t version = 0) {
    std::vector<std::vector<std::byte>> buffers(count, std::vector<std::byte>(64 << 10));
    std::vector<tier::GetRequest> requests;
    for (std::uint64_t i = 0; i < count; ++i) requests.push_back({record_id(i), buffers[i]});
    within(limit, [&](tier::Deadline deadline) { remote->get(requests, deadline); });
    std::vector<GetStatus> statuses;
    for (std::uint64_t i = 0; i < count; ++i) {
      statuses.push_back(requests[i].status);
      if (requests[i].status != GetStatus::found) continue;
      buffers[i].resize(static_cast<std::size_t>(requests[i].bytes));
      EXPECT_EQ(buffers[i], payload(i, version)) << "wrong bytes of record " << i;
    }
    return statuses;
  }
  template <class Status>
  void expect_all(const std::vector<Status>& statuses, Status expected) {
    for (std::size_t i = 0; i < statuses.size(); ++i) EXPECT_EQ(statuses[i], expected) << "record " << i;
  }
  /// The node's records always fail. Other nodes' records are found at least once, because this machine may be slow.
  void expect_without(int node, tier::Duration limit) {
    std::vector<int> found(kCount);
    for (int round = 0; round < 5; ++round) {
      const std::vector<GetStatus> got = get(kCount, limit);
      for (std::uint64_t i = 0; i < kCount; ++i) {
        EXPECT_NE(got[i], GetStatus::missing) << "record " << i;
        found[i] += got[i] == GetStatus::found;
      }
    }
    for (std::uint64_t i = 0; i < kCount; ++i) EXPECT_EQ(found[i] > 0, node_of(i) != node) << "record " << i;
  }
  /// Repeats until the tier has recovered.
  template <class Done>
  void eventually(Done&& done) {
    const auto limit = Time::now() + 20s;
    while (!done()) {
      ASSERT_LT(Time::now(), limit);
      std::this_thread::sleep_for(20ms);
    }
  }
};

TEST_F(TierRemote, KilledNode) {
  expect_all(put(kCount), PutStatus::stored);
  servers->kill(1);
  expect_without(1, 1s);
  const std::vector<PutStatus> stored = put(kCount);
  for (std::uint64_t i = 0; i < kCount; ++i)
    EXPECT_EQ(stored[i], node_of(i) == 1 ? PutStatus::failed : PutStatus::stored) << "record " << i;
  servers->restart(1);  // with no records
  std::vector<GetStatus> got;
  eventually([&] {
    got = get(kCount, 1s);
    return std::count(got.begin(), got.end(), GetStatus::failed) == 0;
  });
  for (std::uint64_t i = 0; i < kCount; ++i)
    EXPECT_EQ(got[i], node_of(i) == 1 ? GetStatus::missing : GetStatus::found) << "record " << i;
  eventually([&] {  // writes have connections of their own, which recover separately
    const std::vector<PutStatus> again = put(kCount, 1s);
    return std::count(again.begin(), again.end(), PutStatus::stored) == static_cast<std::ptrdiff_t>(kCount);
  });
  expect_all(get(kCount), GetStatus::found);
}

TEST_F(TierRemote, StalledNode) {
  expect_all(put(kCount), PutStatus::stored);
  servers->stall(2);
  expect_without(2, 250ms);
  servers->resume(2);
  eventually([&] {
    const std::vector<GetStatus> got = get(kCount, 1s);
    return std::count(got.begin(), got.end(), GetStatus::found) == static_cast<std::ptrdiff_t>(kCount);
  });
}

// A put that a stalled server received and did not answer must not take effect after a later put.
TEST_F(TierRemote, PutsInDoubtNeverReplaceLaterOnes) {
  for (const auto limit : {100ms, 2500ms}) {  // shorter and longer than the limit of silence
    expect_all(put(kCount), PutStatus::stored);
    for (int node = 0; node < RedisServers::kNodes; ++node) servers->stall(node);
    for (const PutStatus status : put(kCount, limit, 1)) EXPECT_EQ(status, PutStatus::failed);
    for (int node = 0; node < RedisServers::kNodes; ++node) servers->resume(node);
    eventually([&] {
      const std::vector<PutStatus> stored = put(kCount, 1s, 2);
      return std::count(stored.begin(), stored.end(), PutStatus::stored) == static_cast<std::ptrdiff_t>(kCount);
    });
    std::this_thread::sleep_for(50ms);
    expect_all(get(kCount, 5s, 2), GetStatus::found);
  }
}

TEST_F(TierRemote, FullMemory) {
  expect_all(put(20), PutStatus::stored);
  for (int node = 0; node < RedisServers::kNodes; ++node) servers->command(node, {"CONFIG", "SET", "maxmemory", "1mb"});
  const std::vector<PutStatus> stored = put(kCount);
  EXPECT_GT(std::count(stored.begin(), stored.end(), PutStatus::no_space), 0);
  EXPECT_EQ(std::count(stored.begin(), stored.end(), PutStatus::failed), 0);
  const std::vector<GetStatus> got = get(kCount);
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const bool there = i < 20 || stored[i] == PutStatus::stored;
    EXPECT_EQ(got[i], there ? GetStatus::found : GetStatus::missing) << "record " << i;
  }
  for (int node = 0; node < RedisServers::kNodes; ++node) servers->command(node, {"CONFIG", "SET", "maxmemory", "0"});
  expect_all(put(kCount), PutStatus::stored);
}

TEST_F(TierRemote, ValuesChangedBehindItsBack) {
  constexpr std::size_t kHeader = tier::kRecordHeaderBytes;
  const std::size_t length = kHeader + payload(0).size();
  for (std::size_t at = 0; at < length; at += at < 96 ? 1 : 37) {
    expect_all(put(1), PutStatus::stored);
    std::string value = value_of(0);
    ASSERT_EQ(value.size(), length);
    value[at] = static_cast<char>(value[at] ^ 4);
    servers->command(node_of(0), {"SET", name_of(0), value});
    expect_all(get(1), GetStatus::damaged);
    expect_all(get(1), GetStatus::missing);
    EXPECT_EQ(servers->command(node_of(0), {"EXISTS", name_of(0)}), "0");
  }
  const auto replaced_by = [&](const std::string& value) {
    expect_all(put(2), PutStatus::stored);
    servers->command(node_of(0), {"SET", name_of(0), value});
    EXPECT_EQ(get(2), (std::vector{GetStatus::damaged, GetStatus::found}));
    EXPECT_EQ(get(2), (std::vector{GetStatus::missing, GetStatus::found}));
  };
  expect_all(put(2), PutStatus::stored);
  const std::string own = value_of(0), other = value_of(1);
  replaced_by(other);
  replaced_by("");
  replaced_by(own.substr(0, 100));
  replaced_by(own.substr(0, own.size() - 1));
  replaced_by(own + "x");
  expect_all(put(2), PutStatus::stored);
  servers->command(node_of(0), {"DEL", name_of(0)});
  servers->command(node_of(0), {"LPUSH", name_of(0), "a"});
  EXPECT_EQ(get(2), (std::vector{GetStatus::damaged, GetStatus::found}));
  EXPECT_EQ(get(2), (std::vector{GetStatus::missing, GetStatus::found}));
}

TEST_F(TierRemote, OtherLayoutsShareNothing) {
  expect_all(put(3), PutStatus::stored);
  tier::RemoteOptions other = servers->options();
  other.layout_id = kLayout + 1;
  const std::unique_ptr<tier::Tier> mine = std::move(remote);
  make(other);
  expect_all(get(3), GetStatus::missing);
  expect_all(put(3, 5s, 7), PutStatus::stored);
  expect_all(get(3, 5s, 7), GetStatus::found);
  make(servers->options());
  expect_all(get(3), GetStatus::found);
}

TEST_F(TierRemote, SlotsMoveWhileItReads) {
  RedisServers own;  // the test leaves slots on other nodes
  servers = &own;
  make(own.options());
  expect_all(put(kCount), PutStatus::stored);
  expect_all(get(kCount), GetStatus::found);
  const auto there_and_back = [&](std::uint64_t number, auto&& between) {
    const int slot = tier::redis_slot(name_of(number)), from = node_of(number), to = (from + 1) % 3;
    servers->move_slot(slot, from, to, between);
    between();
    servers->move_slot(slot, to, from, between);
    between();
  };
  for (std::uint64_t number = 0; number < 4; ++number)
    there_and_back(number, [&] { expect_all(get(kCount), GetStatus::found); });
  EXPECT_GT(remote->stats().redirects, 0);
  // New records of a moving slot go to the new node, by ASK.
  there_and_back(5, [&] {
    const std::vector<PutStatus> stored = put(8);
    EXPECT_EQ(stored[5], PutStatus::stored);
    expect_all(get(8), GetStatus::found);
  });
  // The same with a concurrent reader.
  std::atomic<bool> stop = false;
  std::atomic<int> gets = 0, found = 0;
  std::thread reader([&] {
    for (; !stop; ++gets)
      for (const GetStatus status : get(kCount, 2s)) found += status == GetStatus::found;
  });
  for (std::uint64_t number = 10; number < 18; ++number) there_and_back(number, [] {});
  while (gets < 20) std::this_thread::sleep_for(1ms);
  stop = true;
  reader.join();
  // Servers that do not yet agree redirect a command to each other until the tier gives up.
  EXPECT_GT(found, gets * static_cast<int>(kCount) / 2);
}

TEST_F(TierRemote, PasswordIsAskedFor) {
  RedisServers single(RedisServers::Mode::single);
  make(single.options());
  expect_all(put(5), PutStatus::stored);  // also without cluster mode
  single.command(0, {"CONFIG", "SET", "requirepass", "open sesame"});
  tier::RemoteOptions options = single.options();
  make(options);
  expect_all(get(5, 300ms), GetStatus::failed);
  options.password = "wrong";
  make(options);
  expect_all(get(5, 300ms), GetStatus::failed);
  options.password = "open sesame";
  make(options);
  expect_all(get(5), GetStatus::found);
  options.user = "default";
  make(options);
  expect_all(get(5), GetStatus::found);
}

/// Accepts connections and sends the same bytes to everything, repeatedly.
class OneAnswerServer {
 public:
  explicit OneAnswerServer(std::string answer) : answer_(std::move(answer)) {
    socket_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    if (::bind(socket_, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(socket_, 8) != 0)
      throw std::runtime_error("no server on loopback");
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~OneAnswerServer() {
    ::shutdown(socket_, SHUT_RDWR);
    thread_.join();
    ::close(socket_);
  }
  int port() const { return port_; }

 private:
  void serve() {
    for (int client; (client = ::accept(socket_, nullptr, nullptr)) >= 0; ::close(client)) {
      char bytes[4096];
      while (::recv(client, bytes, sizeof(bytes), 0) > 0)
        if (::send(client, answer_.data(), answer_.size(), MSG_NOSIGNAL) < 0) break;
    }
  }
  std::string answer_;
  int socket_ = -1, port_ = 0;
  std::thread thread_;
};

TEST_F(TierRemote, ServersThatTalkNonsense) {
  const std::string many(1 << 20, 'x');
  for (const std::string& answer :
       {std::string("nonsense\r\n"), std::string("$5\r\nab"), std::string("*2\r\n:1\r\n"), std::string("$-1\r\n"),
        std::string("+OK\r\n"), std::string(":1\r\n:1\r\n:1\r\n"), "$999999999\r\n" + many, "-ERR " + many,
        std::string("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$3\r\nabc\r\n:1\r\n"), std::string("*1\r\n*1\r\n:0\r\n"),
        std::string("-MOVED 1 127.0.0.1:1\r\n")}) {
    OneAnswerServer server(answer);
    tier::RemoteOptions options;
    options.layout_id = kLayout;
    options.servers = {{"127.0.0.1", server.port()}};
    make(options);
    expect_all(get(3, 200ms), GetStatus::failed);
    expect_all(put(3, 200ms), PutStatus::failed);
    remote.reset();
  }
}

// A forger who can write to the server, without a key or with another one.
TEST_F(TierRemote, ForgedRecordsAreMisses) {
  const auto options_with = [&](std::vector<CacheKey> keys, Protection protection = Protection::sealed) {
    tier::RemoteOptions options = servers->options();
    options.guard =
        std::make_shared<tier::RecordGuard>(tier::GuardOptions{"remote", std::move(keys), protection, false});
    return options;
  };
  const CacheKey key{std::byte{1}}, other{std::byte{2}};
  const auto status_of = [&](tier::Tier& tier, const tier::RecordId& id, std::span<const std::byte> payload) {
    std::vector<std::byte> to(payload.size());
    tier::GetRequest request{id, to};
    tier.get({&request, 1}, Time::now() + kSlack);
    EXPECT_EQ(request.status == GetStatus::found, std::equal(to.begin(), to.end(), payload.begin()));
    return request.status;
  };
  const auto store = [&](tier::Tier& tier, const tier::RecordId& id, std::span<const std::byte> payload) {
    tier::PutRequest request{id, payload};
    tier.put({&request, 1}, Time::now() + kSlack);
    EXPECT_EQ(request.status, PutStatus::stored);
  };
  const std::vector<std::byte> payload = random_bytes(1, 3000), forged = random_bytes(2, 3000);
  for (const Protection protection : {Protection::sealed, Protection::authenticated}) {
    const auto mine = tier::make_remote_tier(options_with({key}, protection));
    const auto rotated = tier::make_remote_tier(options_with({other, key}, protection));
    std::vector<std::unique_ptr<tier::Tier>> strangers;
    strangers.push_back(tier::make_remote_tier(servers->options()));
    strangers.push_back(tier::make_remote_tier(options_with({other})));
    strangers.push_back(tier::make_remote_tier(options_with({other}, Protection::authenticated)));
    const tier::RecordId id = record_id(70, 3);
    for (const auto& stranger : strangers) {
      store(*mine, id, payload);
      EXPECT_EQ(status_of(*mine, id, payload), GetStatus::found);
      EXPECT_EQ(status_of(*rotated, id, payload), GetStatus::found);
      store(*stranger, id, forged);
      EXPECT_EQ(status_of(*mine, id, forged), GetStatus::missing);
    }
    EXPECT_EQ(mine->stats().unauthenticated_records, 3);
    // A record of the forger's own key under the name of another record.
    store(*mine, id, payload);
    const std::string from = tier::redis_name(kLayout, id), to = tier::redis_name(kLayout, record_id(71, 3));
    servers->command(servers->node_of(to), {"SET", to, servers->command(servers->node_of(from), {"GET", from})});
    EXPECT_EQ(status_of(*mine, record_id(71, 3), payload), GetStatus::damaged);
  }
}

}  // namespace
}  // namespace kv4::test
