// A process killed at any moment, on a real disk: its durable records are there, and no record is wrong.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>

#include "tier/disk_store.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using tier::DiskStore;

constexpr int kKeys = 16;
constexpr std::int64_t kNone = -1;

// Operation i puts the i-th version of key_of(i), or removes it.
std::uint64_t key_of(std::int64_t operation) { return Random(static_cast<std::uint64_t>(operation)).next() % kKeys; }
bool removes(std::int64_t operation) { return Random(static_cast<std::uint64_t>(operation) + 77).below(8) == 0; }
std::vector<std::byte> payload_of(std::int64_t operation) {
  Random random(static_cast<std::uint64_t>(operation) + 999);
  return random_bytes(random.next(), random.below(60000));
}

struct Message {
  std::int64_t started, flushed;  // all operations below these numbers
};

[[noreturn]] void child(const tier::StoreOptions& options, std::int64_t operation, int out) {
  const auto files = tier::make_posix_file_system();
  const auto store = DiskStore::open(*files, options);
  std::int64_t flushed = operation;
  const auto tell = [&](std::int64_t started) {
    const Message message{started, flushed};
    if (::write(out, &message, sizeof(message)) != sizeof(message)) ::_exit(1);
  };
  for (;;) {
    const std::int64_t first = operation;
    Random random(static_cast<std::uint64_t>(operation) + 5);
    if (removes(operation)) {
      tell(++operation);
      remove(*store, record_id(key_of(first)));
    } else {  // a batch
      const std::int64_t end = operation + random.between(1, 8);
      while (operation < end && !removes(operation)) ++operation;
      tell(operation);
      std::vector<std::vector<std::byte>> payloads;
      std::vector<tier::PutRequest> requests;
      for (std::int64_t i = first; i < operation; ++i) payloads.push_back(payload_of(i));
      for (std::int64_t i = first; i < operation; ++i)
        requests.push_back({record_id(key_of(i)), payloads[static_cast<std::size_t>(i - first)]});
      store->put(requests);
    }
    if (random.below(6) == 0 && store->flush()) {
      flushed = operation;
      tell(operation);
    }
  }
}

TEST(TierKill, DurableAfterSigkill) {
  const int kills = std::getenv("KV4_TEST_LONG") != nullptr ? 200 : 30;
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("kv4_kill_" + std::to_string(::getpid()));
  std::filesystem::remove_all(folder);
  tier::StoreOptions options;
  options.directory = folder.string();
  options.segment_bytes = 1 << 20;
  options.capacity_bytes = 64 << 20;

  Random random(20);
  std::array<std::int64_t, kKeys> settled;  // the operation that wrote the current record
  settled.fill(kNone);
  std::int64_t operation = 0;
  for (int round = 0; round < kills && !testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE("kill " + std::to_string(round));
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      ::close(ends[0]);
      child(options, operation, ends[1]);
    }
    ::close(ends[1]);
    // Lets the child work for some operations, which does not depend on its speed, then for a moment more.
    const std::int64_t wanted = operation + random.between(1, 60);
    Message last{operation, operation}, message{};
    while (last.started < wanted && ::read(ends[0], &message, sizeof(message)) == sizeof(message)) last = message;
    ::usleep(static_cast<useconds_t>(random.below(3000)));
    ::kill(pid, SIGKILL);
    while (::read(ends[0], &message, sizeof(message)) == sizeof(message)) last = message;
    ::close(ends[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself with " << status;

    const auto files = tier::make_posix_file_system();
    const auto store = DiskStore::open(*files, options);
    for (std::uint64_t key = 0; key < kKeys; ++key) {
      std::vector<std::int64_t> allowed{settled[key]};  // operations; a removal and kNone mean a miss
      for (std::int64_t i = operation; i < last.started; ++i) {
        if (key_of(i) != key) continue;
        if (i < last.flushed) allowed.clear();
        allowed.push_back(removes(i) ? kNone : i);
      }
      const Got got = get(*store, record_id(key));
      const auto match = std::find_if(allowed.begin(), allowed.end(), [&](std::int64_t i) {
        if (got.status != tier::GetStatus::found) return i == kNone;
        return i != kNone && payload_of(i) == got.payload;
      });
      ASSERT_NE(match, allowed.end()) << "key " << key << ", status " << static_cast<int>(got.status) << ", operations "
                                      << operation << " to " << last.started << ", flushed " << last.flushed;
      settled[key] = *match;
    }
    ASSERT_TRUE(store->close());
    operation = last.started;
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace kv4::test
