// TiersOptions::keys reach every tier outside host memory: no plain record leaves, and only our records come back.

#include "cache/small_cache.h"
#include "kv4/tiers.h"
#include "tier/open_tier.h"
#include "tier/record_guard.h"
#include "tier/store_records.h"
#include "tier/tiers_impl.h"
#if KV4_TEST_REMOTE
#include "support/redis_servers.h"
#include "tier/redis_slots.h"
#endif

namespace kv4::test {
namespace {

using namespace std::chrono_literals;
using tier::Content;
using tier::GetStatus;

CacheSchema schema() { return build_schema(small::config(), small::options()); }

CacheKey key_of(int first) {
  CacheKey key{};
  key.fill(static_cast<std::byte>(first));
  return key;
}

tier::Deadline soon() { return std::chrono::steady_clock::now() + 60s; }

struct KeyedTiers : testing::Test {
  const tier::RecordId id = record_id(1, 7);
  const std::vector<std::byte> payload = random_bytes(9, 1000);

  void put(const TiersOptions& options) {
    Tiers tiers(schema(), options);
    ASSERT_EQ(Tiers::Impl::of(tiers).chain.put(id, payload, Content::of_key), 1);
    for (const tier::FlushStatus status : tiers.flush(soon())) ASSERT_NE(status, tier::FlushStatus::failed);
    ASSERT_EQ(tiers.report().front().stored, 1);
  }
  /// A found record has the payload.
  GetStatus get(const TiersOptions& options) {
    Tiers tiers(schema(), options);
    tier::TierChain::Ticket ticket = Tiers::Impl::of(tiers).chain.get({{id, 4096, {}}}, Content::of_key, soon());
    EXPECT_TRUE(ticket.wait(soon()));
    const tier::ReadResult result = ticket.take().front();
    if (result.status == GetStatus::found) {
      const auto bytes = result.payload.span();
      EXPECT_EQ(std::vector<std::byte>(bytes.begin(), bytes.end()), payload);
    }
    return result.status;
  }
  /// `options` name one tier; `stored` reads its raw bytes.
  template <class Stored>
  void check(TiersOptions options, Stored&& stored) {
    for (const Protection protection : {Protection::sealed, Protection::authenticated}) {
      TiersOptions mine = options, other = options;
      mine.keys = {key_of(1)};
      mine.protection = protection;
      other.keys = {key_of(2)};
      EXPECT_EQ(Tiers(schema(), mine).report().front().protection, protection);
      // Planted by a writer without a key, or with another one.
      put(options);
      EXPECT_EQ(get(options), GetStatus::found);
      EXPECT_NE(get(mine), GetStatus::found);
      put(other);
      EXPECT_NE(get(mine), GetStatus::found);
      put(mine);
      EXPECT_EQ(get(mine), GetStatus::found);
      EXPECT_NE(get(other), GetStatus::found);
      const std::vector<std::byte> record = stored();
      const tier::ParsedHeader parsed = tier::parse_header(record);
      ASSERT_EQ(parsed.refusal, tier::RecordRefusal::none);
      EXPECT_EQ(tier::protection_of(parsed.header.kind), protection);
      EXPECT_EQ(std::search(record.begin(), record.end(), payload.begin(), payload.end()) == record.end(),
                protection == Protection::sealed);
    }
  }
};

TEST_F(KeyedTiers, ATierOfYourOwn) {
  const auto own = std::make_shared<OpenTier>();
  TiersOptions options;
  options.more = {own};
  check(options, [&] { return own->value(id); });
}

TEST_F(KeyedTiers, Servers) {
#if KV4_TEST_REMOTE
  if (const std::string why = why_no_redis(); !why.empty()) GTEST_SKIP() << why;
  RedisServers& servers = shared_redis();
  TiersOptions options;
  for (const tier::RedisAddress& server : servers.options().servers)
    options.servers.push_back(server.host + ":" + std::to_string(server.port));
  const std::string name = tier::redis_name(schema().layout_id, id);
  check(options, [&] {
    const std::string value = servers.command(servers.node_of(name), {"GET", name});
    const auto bytes = std::as_bytes(std::span(value));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  });
#else
  GTEST_SKIP() << "built without hiredis";
#endif
}

}  // namespace
}  // namespace kv4::test
