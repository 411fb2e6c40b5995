// TLS between the remote tier and real servers: the same records, and not a byte for a server that proves nothing.
#include <gtest/gtest.h>

#include "kv4/error.h"
#include "support/certificates.h"
#include "support/forging_server.h"
#include "support/redis_servers.h"
#include "tier/remote_tier.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using namespace std::chrono_literals;
using tier::FailureReason;
using tier::GetStatus;
using tier::PutStatus;
using Time = std::chrono::steady_clock;

std::unique_ptr<RedisServers> start_tls(const Certificates& certificates, const Certificates::Files& files, int& port,
                                        std::vector<std::string> more = {}) {
  for (int starts = 0;; ++starts) {
    port = free_port();
    std::vector<std::string> arguments = {"--tls-port",          std::to_string(port),     "--tls-cert-file",
                                          files.certificate,     "--tls-key-file",         files.key,
                                          "--tls-ca-cert-file",  certificates.authority(), "--tls-auth-clients",
                                          "no"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    try {
      return std::make_unique<RedisServers>(RedisServers::Mode::single, arguments);
    } catch (const std::runtime_error&) {  // another test took the port
      if (starts == 3) throw;
    }
  }
}

struct TierRemoteTls : testing::Test {
  Certificates authority;
  std::unique_ptr<RedisServers> server;
  int port = 0;
  std::unique_ptr<tier::Tier> remote;

  void SetUp() override {
    if (const std::string why = why_no_redis(); !why.empty()) GTEST_SKIP() << why;
  }
  void start(const std::string& names, int days = 30, std::vector<std::string> more = {}) {
    server = start_tls(authority, authority.issue("server", names, days), port, std::move(more));
  }
  tier::RemoteOptions options(const std::string& host = "127.0.0.1") {
    tier::RemoteOptions out;
    out.servers = {{host, port}};
    out.layout_id = 11;
    out.tls = true;
    out.tls_files.ca = authority.authority();
    out.silence_limit = 500ms;
    out.first_pause = 1ms;
    out.longest_pause = 5ms;
    return out;
  }
  PutStatus put(std::uint64_t number, std::int64_t bytes) {
    const std::vector<std::byte> payload = random_bytes(number, bytes);
    tier::PutRequest request{record_id(number), payload};
    remote->put({&request, 1}, Time::now() + 10s);
    return request.status;
  }
  GetStatus get(std::uint64_t number, std::int64_t bytes = 0) {
    std::vector<std::byte> to(static_cast<std::size_t>(bytes));
    tier::GetRequest request{record_id(number), to};
    remote->get({&request, 1}, Time::now() + 10s);
    EXPECT_TRUE(request.status != GetStatus::found || to == random_bytes(number, bytes));
    return request.status;
  }
  void expect_refused(const tier::RemoteOptions& with, FailureReason reason, const std::string& word) {
    remote = tier::make_remote_tier(with);
    EXPECT_EQ(get(1), GetStatus::failed);
    const tier::TierFailure failure = remote->failure();
    EXPECT_EQ(tier::to_string(failure.reason), std::string(tier::to_string(reason))) << failure.detail;
    EXPECT_NE(failure.detail.find(word), std::string::npos) << failure.detail;
    remote.reset();
  }
};

TEST_F(TierRemoteTls, RecordsOfAnySizeThroughNamesAndAddresses) {
  start("DNS:localhost,IP:127.0.0.1");
  server->command(0, {"ACL", "SETUSER", "default", ">secret"});
  for (const char* host : {"127.0.0.1", "localhost"}) {
    tier::RemoteOptions with = options(host);
    with.password = "secret";
    remote = tier::make_remote_tier(with);
    std::uint64_t number = 0;
    for (const std::int64_t bytes : {0, 1, 16000, 16384, 100'000, 262'144, 5'000'000}) {
      ++number;
      EXPECT_EQ(put(number, bytes), PutStatus::stored) << remote->failure().detail;
      EXPECT_EQ(get(number, bytes), GetStatus::found) << bytes;
    }
    // A batch in which answers arrive while other commands are being sent.
    std::vector<std::vector<std::byte>> payloads, buffers(40, std::vector<std::byte>(60'000));
    std::vector<tier::PutRequest> puts;
    std::vector<tier::GetRequest> gets;
    for (std::uint64_t i = 0; i < 40; ++i) payloads.push_back(random_bytes(i, 60'000));
    for (std::uint64_t i = 0; i < 40; ++i) puts.push_back({record_id(i), payloads[i]});
    for (std::uint64_t i = 0; i < 40; ++i) gets.push_back({record_id(i), buffers[i]});
    remote->put(puts, Time::now() + 10s);
    remote->get(gets, Time::now() + 10s);
    for (std::uint64_t i = 0; i < 40; ++i) EXPECT_EQ(puts[i].status, PutStatus::stored);
    EXPECT_EQ(buffers, payloads);
    EXPECT_EQ(remote->failure().reason, FailureReason::none);
    EXPECT_EQ(remote->stats().connects, 2);
  }
}

TEST_F(TierRemoteTls, OldVersionsAreRefused) {
  start("IP:127.0.0.1", 30, {"--tls-protocols", "TLSv1.1"});
  expect_refused(options(), FailureReason::tls_refused, "TLS");
}

TEST_F(TierRemoteTls, CertificatesOfOthersAreRefused) {
  start("DNS:elsewhere.example,IP:10.0.0.1");
  expect_refused(options(), FailureReason::certificate_refused, "IP address mismatch");
  expect_refused(options("localhost"), FailureReason::certificate_refused, "ostname mismatch");
  tier::RemoteOptions system = options();
  system.tls_files.ca = "";  // the system does not know our authority
  expect_refused(system, FailureReason::certificate_refused, "certificate");
  const Certificates other;
  tier::RemoteOptions with = options();
  with.tls_files.ca = other.authority();
  expect_refused(with, FailureReason::certificate_refused, "certificate");
}

TEST_F(TierRemoteTls, CertificatesThatAreOverAreRefused) {
  start("IP:127.0.0.1", 0);
  expect_refused(options(), FailureReason::certificate_refused, "expired");
}

TEST_F(TierRemoteTls, ServersMayAskForACertificate) {
  start("IP:127.0.0.1", 30, {"--tls-auth-clients", "yes"});
  expect_refused(options(), FailureReason::tls_refused, "certificate");
  tier::RemoteOptions with = options();
  const Certificates::Files own = authority.issue("client", "DNS:worker"),
                            other = authority.issue("other", "DNS:other");
  with.tls_files.certificate = own.certificate;
  with.tls_files.key = own.key;
  remote = tier::make_remote_tier(with);
  EXPECT_EQ(put(1, 100), PutStatus::stored) << remote->failure().detail;
  with.tls_files.key = other.key;
  EXPECT_THROW(tier::make_remote_tier(with), Error);
  with.tls_files.key = "";
  EXPECT_THROW(tier::make_remote_tier(with), Error);
}

// No part of a password or a record is sent before the server has authenticated itself, and never without TLS.
TEST_F(TierRemoteTls, NothingPlainEver) {
  ForgingServer plain([](const ForgingServer::Arguments& command) { return ForgingServer::hello(command); });
  port = plain.port();
  tier::RemoteOptions with = options();
  with.password = "open sesame";
  expect_refused(with, FailureReason::tls_refused, "TLS");  // the server waits for a line end
  EXPECT_EQ(plain.received().find("sesame"), std::string::npos);
  EXPECT_EQ(plain.received().find("CLIENT"), std::string::npos);
  start("IP:127.0.0.1");
  port = server->address(0).port;  // a server without TLS
  expect_refused(with, FailureReason::tls_refused, "TLS");
}

TEST_F(TierRemoteTls, PlainConnectionToATlsPort) {
  start("IP:127.0.0.1");
  tier::RemoteOptions with = options();
  with.tls = false;
  with.tls_files = {};
  remote = tier::make_remote_tier(with);
  EXPECT_EQ(get(1), GetStatus::failed);
  const tier::TierFailure failure = remote->failure();
  EXPECT_TRUE(failure.reason == FailureReason::not_redis || failure.reason == FailureReason::disconnected)
      << failure.detail;
}

TEST_F(TierRemoteTls, FilesAreChecked) {
  tier::RemoteOptions with = options();
  port = 1;
  with = options();
  with.tls_files.ca = "/no/such/file.pem";
  try {
    (void)tier::make_remote_tier(with);
    FAIL() << "made";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_file);
    EXPECT_NE(std::string(e.what()).find("/no/such/file.pem"), std::string::npos) << e.what();
  }
  with.tls = false;  // files, but no rediss://
  EXPECT_THROW(tier::make_remote_tier(with), Error);
}

}  // namespace
}  // namespace kv4::test
