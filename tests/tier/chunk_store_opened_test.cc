// A store of chunks as its users open it: on a real disk, on servers, through kills and forks.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>

#include "kv4/chunk_store.h"
#include "kv4/error.h"
#include "tier/chunk_coding.h"
#include "tier/chunk_values.h"
#include "tier/segment_file.h"
#include "tier/store_survey.h"
#if KV4_TEST_REMOTE
#include "support/redis_servers.h"
#include "tier/redis_slots.h"
#endif

namespace kv4::test {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<std::byte>;

struct Folder {
  std::filesystem::path path;
  explicit Folder(const std::string& name)
      : path(std::filesystem::temp_directory_path() / ("kv4_" + name + "_" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

ChunkStoreOptions real_options(const Folder& folder, bool keys) {
  ChunkStoreOptions options;
  options.tiers.directory = folder.path.string();
  options.tiers.segment_bytes = 1 << 20;
  options.tiers.disk_bytes = 64 << 20;
  options.space = "a model";
  if (keys) options.tiers.keys = {CacheKey{std::byte{7}}};
  return options;
}

std::pair<ChunkStatus, Bytes> get_from(ChunkStore& store, const std::string& name) {
  Bytes to(1 << 17);
  const ChunkResults got = store.take(store.get({{.key = key(name), .to = to}}), soon()).value();
  to.resize(static_cast<std::size_t>(got.bytes.front()));
  return {got.statuses.front(), to};
}

TEST(ChunkStoreOpened, OpensAgainWithItsKeyAndSpaceOnly) {
  const Folder folder("chunks");
  for (const bool keys : {false, true}) {
    std::filesystem::remove_all(folder.path);
    {
      ChunkStore store(real_options(folder, keys));
      for (std::int64_t i = 0; i < 20; ++i)
        (void)store.put({{.key = key(key_of(i)), .value = value_of(static_cast<std::uint64_t>(i))}});
      EXPECT_EQ(store.close(soon()).front(), tier::FlushStatus::durable);
    }
    {
      ChunkStore store(real_options(folder, keys));
      for (std::int64_t i = 0; i < 20; ++i)
        EXPECT_EQ(get_from(store, key_of(i)), std::pair(ChunkStatus::ok, value_of(static_cast<std::uint64_t>(i))));
    }
    ChunkStoreOptions other = real_options(folder, keys);
    other.space = "another model";
    EXPECT_THROW(ChunkStore{other}, Error);
    other = real_options(folder, true);
    other.tiers.keys = {CacheKey{std::byte{8}}};
    ChunkStore store(other);
    EXPECT_EQ(get_from(store, key_of(3)).first, ChunkStatus::missing);
    const std::string text = key_of(3);
    if (!keys) {  // no key protects it: it is known not to count
      EXPECT_EQ(store.look_up(std::vector<ChunkKey>{key(text)}).front(), ChunkPresence::absent);
    }
  }
}

TEST(ChunkStoreOpened, ManyChunksInABatch) {
  const Folder folder("chunks_many");
  ChunkStoreOptions options = real_options(folder, false);
  options.tiers.disk_bytes = 256 << 20;
  ChunkStore store(options);
  constexpr std::int64_t kChunks = 10'000;
  std::vector<std::string> names;
  std::vector<ChunkPut> puts;
  std::vector<ChunkGet> gets;
  std::vector<ChunkKey> keys;
  std::vector<std::int64_t> got(kChunks);
  for (std::int64_t i = 0; i < kChunks; ++i) names.push_back("key " + std::to_string(i));
  for (std::int64_t i = 0; i < kChunks; ++i) {
    keys.push_back(key(names[i]));
    puts.push_back({.key = keys.back(), .value = bytes_of(names[i])});
    gets.push_back({.key = keys.back(), .to = std::as_writable_bytes(std::span(&got[i], 1))});
  }
  const auto put = store.put(puts), exists = store.exists(keys), get = store.get(gets);
  EXPECT_TRUE(store.take(put, soon()).value().all_ok());
  EXPECT_TRUE(store.take(exists, soon()).value().all_ok());
  const ChunkResults results = store.take(get, soon()).value();
  for (std::int64_t i = 0; i < kChunks; ++i) {
    const auto size = static_cast<std::int64_t>(names[i].size());
    ASSERT_EQ(results.statuses[i], size <= 8 ? ChunkStatus::ok : ChunkStatus::too_small) << i;
    ASSERT_EQ(results.bytes[i], size);
    if (size <= 8) {
      ASSERT_EQ(std::memcmp(&got[i], names[i].data(), names[i].size()), 0);
    }
  }
}

TEST(ChunkStoreOpened, ASurveyKnowsChunks) {
  const Folder folder("chunks_survey");
  Bytes zeros(50'000, std::byte{0});
  zeros.front() = std::byte{1};
  {
    ChunkStore store(real_options(folder, false));
    (void)store.put(
        {{.key = bytes_of("zeros"), .value = zeros}, {.key = bytes_of("plain"), .value = random_bytes(1, 5000)}});
    EXPECT_EQ(store.close(soon()).front(), tier::FlushStatus::durable);
  }
  const auto files = tier::make_posix_file_system();
  tier::StoreSurvey survey = tier::survey_store(*files, folder.path.string(), true);
  EXPECT_TRUE(survey.sound());
  EXPECT_EQ(survey.keys, 2);
  EXPECT_EQ(survey.records(&tier::SegmentSurvey::chunks), 2);
  EXPECT_EQ(survey.records(&tier::SegmentSurvey::trimmed_chunks), 1);
  EXPECT_GT(survey.records(&tier::SegmentSurvey::trimmed_bytes), 49'000);
  // A record whose digests are right and whose runs make no value.
  const std::string path = (folder.path / tier::segment_name(1)).string();
  Bytes file(static_cast<std::size_t>(std::filesystem::file_size(path)));
  std::FILE* const in = std::fopen(path.c_str(), "r+b");
  ASSERT_NE(in, nullptr);
  ASSERT_EQ(std::fread(file.data(), 1, file.size(), in), file.size());
  const std::span<std::byte> header_bytes = std::span(file).subspan(tier::kSegmentDataOffset, tier::kRecordHeaderBytes);
  tier::RecordHeader header = tier::parse_header(header_bytes).header;
  ASSERT_EQ(header.coding().coding, tier::kTrimmed);
  const std::span<std::byte> payload =
      std::span(file).subspan(tier::kSegmentDataOffset + tier::kBlockBytes, static_cast<std::size_t>(header.length));
  payload.back() = std::byte{9};  // of the number of runs
  header.payload_digest = digest128(std::span<const std::byte>(payload));
  tier::encode_header(header, header_bytes);
  std::rewind(in);
  ASSERT_EQ(std::fwrite(file.data(), 1, file.size(), in), file.size());
  std::fclose(in);
  survey = tier::survey_store(*files, folder.path.string(), true);
  ASSERT_EQ(survey.damaged_records(), 1);
  ASSERT_TRUE(survey.segments.front().damaged.front().label);
  EXPECT_TRUE(std::ranges::equal(survey.segments.front().damaged.front().label->key_span(), bytes_of("zeros")));
  ChunkStore store(real_options(folder, false));
  EXPECT_EQ(get_from(store, "zeros").first, ChunkStatus::missing);
  EXPECT_EQ(get_from(store, "plain"), std::pair(ChunkStatus::ok, random_bytes(1, 5000)));
}

#if KV4_TEST_REMOTE
TEST(ChunkStoreOpened, OnServers) {
  if (const std::string why = why_no_redis(); !why.empty()) GTEST_SKIP() << why;
  RedisServers& servers = shared_redis();
  servers.clear();
  ChunkStoreOptions options;
  for (const tier::RedisAddress& server : servers.options().servers)
    options.tiers.servers.push_back(server.host + ":" + std::to_string(server.port));
  Bytes zeros(1'002'240, std::byte{0});
  std::copy_n(random_bytes(1, 60'000).begin(), 60'000, zeros.begin() + 4096);
  for (const bool keys : {false, true}) {
    if (keys) options.tiers.keys = {CacheKey{std::byte{7}}};
    ChunkStore store(options);
    std::vector<ChunkPut> puts{{.key = bytes_of("zeros"), .value = zeros}};
    std::vector<std::string> names;
    std::vector<Bytes> values;
    for (std::int64_t i = 0; i < 20; ++i) names.push_back(key_of(i)), values.push_back(value_of(i));
    for (std::size_t i = 0; i < 20; ++i) puts.push_back({.key = key(names[i]), .value = values[i]});
    ASSERT_TRUE(store.take(store.put(puts), soon()).value().all_ok());
    const std::vector<ChunkKey> one{bytes_of("zeros")}, none{bytes_of("none")};
    EXPECT_EQ(store.look_up(one).front(), ChunkPresence::unknown);
    EXPECT_EQ(store.take(store.exists(one), soon()).value().statuses.front(), ChunkStatus::ok);
    EXPECT_EQ(store.take(store.exists(none), soon()).value().statuses.front(), ChunkStatus::missing);
    for (std::int64_t i = 0; i < 20; ++i)
      EXPECT_EQ(get_from(store, key_of(i)), std::pair(ChunkStatus::ok, value_of(i)));
    Bytes to(1'002'240), original = zeros;
    (void)store.add_memory(to);
    ASSERT_TRUE(store.take(store.get({{.key = one.front(), .to = to}}), soon()).value().all_ok());
    EXPECT_EQ(to, original);
    EXPECT_LT(store.report().tiers.front().stored_bytes, 20 * 40'000 + 61'000);  // not the zeros
    // A flipped bit in a server's memory.
    const tier::RecordId id{0, tier::chunk_id(one.front())};
    const std::string name = tier::redis_name(tier::chunk_layout_id(""), id);
    (void)servers.command(servers.node_of(name), {"SETRANGE", name, "5000", "flipped"});
    EXPECT_EQ(store.take(store.get({{.key = one.front(), .to = to}}), soon()).value().statuses.front(),
              ChunkStatus::missing);
    if (!keys) continue;
    servers.kill(0);
    std::vector<Bytes> rooms(20, Bytes(1 << 16));
    std::vector<ChunkGet> gets;
    for (std::size_t i = 0; i < 20; ++i) gets.push_back({.key = key(names[i]), .to = rooms[i]});
    const ChunkResults got = store.take(store.get(gets, {.timeout = 3s}), soon()).value();
    for (std::size_t i = 0; i < 20; ++i) {
      if (got.statuses[i] != ChunkStatus::ok) continue;
      EXPECT_TRUE(std::ranges::equal(std::span(rooms[i]).first(static_cast<std::size_t>(got.bytes[i])), values[i]));
    }
    servers.restart(0);
    servers.clear();
  }
}
#endif

TEST(ChunkStoreOpened, AForkOfItsProcessIsRefused) {
  const Folder folder("chunks_fork");
  ChunkStore store(real_options(folder, false));
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    int refused = 0;
    try {
      (void)store.flush();
    } catch (const Error& e) {
      refused = e.code() == ErrorCode::bad_state;
    }
    ::_exit(refused == 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(store.close(soon()).front(), tier::FlushStatus::durable);
}

// A process killed at any moment: what its flush reported durable is there, and no value is wrong.
TEST(ChunkStoreOpened, DurableAfterSigkill) {
  const Folder folder("chunks_kill");
  const int kills = std::getenv("KV4_TEST_LONG") != nullptr ? 100 : 12;
  std::int64_t base = 0;
  constexpr std::int64_t kKeys = 16;
  std::map<std::int64_t, std::int64_t> settled;  // by key: the version there; none: missing
  for (int round = 0; round < kills && !testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE("kill " + std::to_string(round));
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      ChunkStore store(real_options(folder, true));
      for (std::int64_t i = base;; i += 4) {
        std::int64_t message[2] = {i + 4, -1};  // begun, durable
        if (::write(ends[1], message, sizeof message) != sizeof message) ::_exit(1);
        for (std::int64_t v = i; v < i + 4; ++v)
          (void)store.put({{.key = key(key_of(v % kKeys)), .value = value_of(static_cast<std::uint64_t>(v))}});
        const ChunkResults flushed = store.take(store.flush(), soon()).value();
        bool stored = true;
        for (const ChunkResults& each : store.drain()) stored = stored && each.all_ok();
        if (!stored || flushed.flushed.front() != tier::FlushStatus::durable) ::_exit(2);
        message[1] = i + 4;
        if (::write(ends[1], message, sizeof message) != sizeof message) ::_exit(1);
      }
    }
    ::close(ends[1]);
    Random random(static_cast<std::uint64_t>(round));
    std::int64_t begun = base, durable = base, message[2];
    const auto read_one = [&] {
      if (::read(ends[0], message, sizeof message) != sizeof message) return false;
      begun = message[0];
      if (message[1] >= 0) durable = message[1];
      return true;
    };
    for (std::int64_t left = random.between(1, 12); left > 0 && read_one(); --left) {
    }
    ::usleep(static_cast<useconds_t>(random.below(4000)));
    ::kill(pid, SIGKILL);
    while (read_one()) {
    }
    ::close(ends[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself with " << status;

    ChunkStore store(real_options(folder, true));
    for (std::int64_t k = 0; k < kKeys; ++k) {
      std::vector<std::int64_t> may;
      if (settled.count(k) != 0) may.push_back(settled[k]);
      bool surely = !may.empty();
      for (std::int64_t v = base; v < begun; ++v) {
        if (v % kKeys != k) continue;
        if (v < durable) may.clear(), surely = true;
        may.push_back(v);
      }
      const auto [got, value] = get_from(store, key_of(k));
      if (got != ChunkStatus::ok) {
        ASSERT_FALSE(surely) << "key " << k;
        continue;
      }
      const auto found = std::find_if(may.begin(), may.end(), [&stored = value](std::int64_t v) {
        return value_of(static_cast<std::uint64_t>(v)) == stored;
      });
      ASSERT_NE(found, may.end()) << "key " << k;
      settled[k] = *found;
    }
    ASSERT_EQ(store.close(soon()).front(), tier::FlushStatus::durable);
    base = begun;
  }
}

}  // namespace
}  // namespace kv4::test
