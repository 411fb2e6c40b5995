// Hostile files in a store's directory: nothing is lost, removed or waited for. On a real file system.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <thread>

#include "base/digest.h"
#include "kv4/error.h"
#include "kv4/log.h"
#include "tier/disk_store.h"
#include "tier/index_checkpoint.h"
#include "tier/little_endian.h"
#include "tier/store_names.h"
#include "tier/store_records.h"
#include "tier/store_survey.h"

namespace kv4::test {
namespace {

namespace fs = std::filesystem;
using tier::DiskStore;
using tier::GetStatus;
using tier::PutStatus;

constexpr std::uint64_t kRecords = 12, kSegments = 6;
constexpr std::int64_t kPayload = 20000;  // two of them fill a segment

using Bytes = std::vector<char>;

Bytes read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const fs::path& path, const Bytes& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
}

/// Changes the number at `offset` in both copies of a segment's header, with fitting digests.
void forge(Bytes& segment, int offset, std::uint64_t number) {
  for (const int copy : {0, 4096}) {
    auto* at = reinterpret_cast<std::byte*>(segment.data()) + copy;
    tier::store_le(at + offset, number);
    tier::store_le(at + 56, digest64(std::span<const std::byte>(at, 56)));
  }
}
constexpr int kIdAt = 16, kNonceAt = 24, kBytesAt = 40;

/// Runs `work` in a process of its own; returns 0 on success.
int in_child(const std::function<void()>& work) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    work();
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  ::waitpid(pid, &status, 0);
  return status;
}

struct TierStoreAttack : testing::Test {
  fs::path folder = fs::temp_directory_path() / ("kv4_attack_" + std::to_string(::getpid()));
  std::unique_ptr<tier::FileSystem> files = tier::make_posix_file_system({.lock_wait = std::chrono::milliseconds(0)});
  tier::StoreOptions options;
  std::unique_ptr<DiskStore> store;
  std::vector<std::string> warnings;

  TierStoreAttack() {
    fs::remove_all(folder);
    options.directory = folder.string();
    options.layout_id = 11;
    options.segment_bytes = 64 << 10;
    options.capacity_bytes = 64 << 20;
    set_log_sink([this](const LogRecord& record) {
      if (record.level != LogLevel::info) warnings.emplace_back(record.message);
    });
  }
  ~TierStoreAttack() override {
    set_log_sink({});
    store.reset();
    fs::remove_all(folder);
  }

  void open() {
    store.reset();
    store = DiskStore::open(*files, options);
  }
  void fill() {
    open();
    for (std::uint64_t i = 0; i < kRecords; ++i)
      ASSERT_EQ(put(*store, record_id(i), random_bytes(i, kPayload)), PutStatus::stored);
    ASSERT_TRUE(store->close());
  }
  void expect_all(std::uint64_t from, std::uint64_t end) {
    for (std::uint64_t i = from; i < end; ++i)
      ASSERT_EQ(get(*store, record_id(i)).payload, random_bytes(i, kPayload)) << i;
  }
  /// Opens the store, fills it further and opens it again without a checkpoint: no record is lost.
  void expect_to_work() {
    open();
    expect_all(0, kRecords);
    for (std::uint64_t i = kRecords; i < 2 * kRecords; ++i)
      ASSERT_EQ(put(*store, record_id(i), random_bytes(i, kPayload)), PutStatus::stored) << i;
    ASSERT_TRUE(store->flush());
    EXPECT_TRUE(store->collect().durable);
    expect_all(0, 2 * kRecords);
    ASSERT_TRUE(store->close());
    if (fs::is_regular_file(fs::symlink_status(folder / "index.kv4"))) fs::remove(folder / "index.kv4");
    open();
    expect_all(0, 2 * kRecords);
    EXPECT_EQ(store->stats().records, static_cast<std::int64_t>(2 * kRecords));
    ASSERT_TRUE(store->close());
  }
  bool survey_names(const std::string& name) {
    const tier::StoreSurvey survey = tier::survey_store(*files, options.directory, true);
    EXPECT_FALSE(survey.sound());
    for (const tier::SetAsideFile& file : survey.set_aside)
      if (file.name == name) return true;
    for (const tier::SegmentSurvey& segment : survey.segments)
      if (segment.name == name && !segment.problem.empty()) return true;
    return false;
  }
  bool warned_of(const std::string& name) const {
    return std::any_of(warnings.begin(), warnings.end(),
                       [&](const std::string& text) { return text.find(name) != std::string::npos; });
  }
};

TEST_F(TierStoreAttack, NamesThatNoStoreMakesAreSetAside) {
  fill();
  const Bytes segment = read_file(folder / tier::segment_name(3));
  const Bytes garbage(5000, 'x');
  const std::vector<std::pair<std::string, Bytes>> planted = {{"segment-fffffffffffffffe.kv4", garbage},
                                                              {"segment-ffffffffffffffff.kv4", {}},
                                                              {"segment-8000000000000000.kv4", segment},
                                                              {"segment-000000000000000A.kv4", segment},
                                                              {"segment-3.kv4", segment},
                                                              {"segment-0x00000000000003.kv4", segment},
                                                              {"segment-0000000000000003.kv4.new.kv4", segment}};
  for (const auto& [name, bytes] : planted) write_file(folder / name, bytes);
  write_file(folder / "notes.new", garbage);
  expect_to_work();
  EXPECT_EQ(read_file(folder / "notes.new"), garbage);
  for (const auto& [name, bytes] : planted) {
    EXPECT_EQ(read_file(folder / name), bytes) << name;
    EXPECT_TRUE(survey_names(name)) << name;
    EXPECT_TRUE(warned_of(name)) << name;
  }
}

TEST_F(TierStoreAttack, ForgedHeadersWithHugeIdsAreSetAside) {
  fill();
  const Bytes sound = read_file(folder / tier::segment_name(2));
  for (const std::uint64_t id : {UINT64_MAX, UINT64_MAX - 1, std::uint64_t{1} << 63, tier::kMaxSegmentId,
                                 tier::kMaxSegmentId + 1, tier::kMaxSegmentIdStep * 2}) {
    Bytes forged = sound;
    forge(forged, kIdAt, id);
    write_file(folder / tier::segment_name(id), forged);
  }
  expect_to_work();
  for (const std::uint64_t id : {UINT64_MAX, tier::kMaxSegmentId, tier::kMaxSegmentIdStep * 2})
    EXPECT_TRUE(survey_names(tier::segment_name(id))) << id;
}

// Headers with the largest accepted id, repeatedly: ids never run out, and stored records stay.
TEST_F(TierStoreAttack, ForgedHeadersThatAreBelievedLeaveRoom) {
  fill();
  Bytes forged(64 << 10);
  const Bytes sound = read_file(folder / tier::segment_name(2));
  std::copy(sound.begin(), sound.begin() + 8192, forged.begin());
  std::uint64_t id = 100;
  for (int i = 0; i < 50; ++i) {
    id += tier::kMaxSegmentIdStep;
    forge(forged, kIdAt, id);
    write_file(folder / tier::segment_name(id), forged);
  }
  expect_to_work();
}

TEST_F(TierStoreAttack, CopiesOfSegmentsAreSetAside) {
  fill();
  const Bytes segment = read_file(folder / tier::segment_name(1));
  write_file(folder / tier::segment_name(500), segment);
  expect_to_work();
  EXPECT_EQ(read_file(folder / tier::segment_name(500)), segment);
  EXPECT_TRUE(survey_names(tier::segment_name(500)));
}

// Headers that lie about the file's size, and damaged ones: their sizes do not evict sound segments.
TEST_F(TierStoreAttack, ForgedSizesEvictNothing) {
  options.capacity_bytes = 2 << 20;
  fill();
  Bytes forged = read_file(folder / tier::segment_name(2));
  forge(forged, kIdAt, 1000);
  forge(forged, kNonceAt, 1);
  forge(forged, kBytesAt, static_cast<std::uint64_t>(tier::kMaxSegmentBytes));
  forged.resize(8192);
  write_file(folder / tier::segment_name(1000), forged);
  for (std::uint64_t id = 2000; id < 2020; ++id) write_file(folder / tier::segment_name(id), Bytes(1, 'x'));
  expect_to_work();
}

TEST_F(TierStoreAttack, HugeSparseSegmentsAreNotReadThrough) {
  fill();
  Bytes forged = read_file(folder / tier::segment_name(2));
  forge(forged, kIdAt, 1000);
  forge(forged, kNonceAt, 1);
  forge(forged, kBytesAt, static_cast<std::uint64_t>(tier::kMaxSegmentBytes));
  forged.resize(8192);
  const fs::path path = folder / tier::segment_name(1000);
  write_file(path, forged);
  if (::truncate(path.c_str(), tier::kMaxSegmentBytes) != 0) GTEST_SKIP() << "no files of 1 TiB here";
  EXPECT_EQ(tier::survey_store(*files, options.directory, true).segments.size(), kSegments + 1);
  options.capacity_bytes = INT64_MAX;
  open();
  expect_all(0, kRecords);
  store.reset();
  options.capacity_bytes = 64 << 20;  // the file takes no disk room but claims it: something must be evicted
  open();
  ASSERT_EQ(put(*store, record_id(99), random_bytes(99, 50000)), PutStatus::stored);
}

// A header in a sparse file announces a payload of 1 GiB that takes no disk room: it must not take memory either.
TEST_F(TierStoreAttack, PayloadsInHolesTakeNoMemory) {
  fill();
  constexpr std::int64_t kMost = 200 << 20;
  Bytes forged = read_file(folder / tier::segment_name(2));
  forge(forged, kIdAt, 1000);
  forge(forged, kNonceAt, 1);
  forge(forged, kBytesAt, std::uint64_t{1} << 32);
  forged.resize(8192 + 4096);
  std::byte place[16];
  tier::store_le(place, std::uint64_t{1});
  tier::store_le(place + 8, std::uint64_t{8192});
  tier::RecordHeader header;
  header.layout_id = options.layout_id;
  header.id = record_id(0);  // the id of a sound record, so that opening has to choose
  header.length = tier::kMaxPayloadBytes;
  header.sequence = 1 << 20;
  header.place = digest64(std::span<const std::byte>(place));
  tier::encode_header(header, std::as_writable_bytes(std::span(forged).subspan(8192)));
  const fs::path path = folder / tier::segment_name(1000);
  write_file(path, forged);
  fs::remove(folder / "index.kv4");
  if (::truncate(path.c_str(), std::int64_t{1} << 32) != 0) GTEST_SKIP() << "no files of 4 GiB here";
  const auto peak_bytes = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return std::int64_t{usage.ru_maxrss} << 10;
  };
  EXPECT_EQ(in_child([&] {
              const std::int64_t before = peak_bytes();
              const tier::StoreSurvey survey = tier::survey_store(*files, options.directory, true);
              EXPECT_EQ(survey.damaged_records(), 1);
              options.capacity_bytes = INT64_MAX;
              open();
              expect_all(0, kRecords);
              EXPECT_TRUE(store->collect().durable);
              expect_all(0, kRecords);
              EXPECT_LT(peak_bytes() - before, kMost);
            }),
            0);
}

TEST_F(TierStoreAttack, NothingButRegularFilesIsUsed) {
  const auto pipe = [](const fs::path& path) { ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0); };
  const auto directory = [](const fs::path& path) { fs::create_directory(path); };
  const auto link = [this](const fs::path& path) { fs::create_symlink(folder / tier::segment_name(1), path); };
  const auto device = [](const fs::path& path) { fs::create_symlink("/dev/zero", path); };
  const auto bound = [](const fs::path& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.string().copy(address.sun_path, sizeof(address.sun_path) - 1);
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    ::close(fd);
  };
  for (const std::function<void(const fs::path&)>& plant :
       std::vector<std::function<void(const fs::path&)>>{pipe, directory, link, device, bound}) {
    fs::remove_all(folder);
    warnings.clear();
    fill();
    fs::remove(folder / "lock");
    fs::remove(folder / "index.kv4");
    const std::vector<std::string> names = {"lock",
                                            "index.kv4",
                                            "index.kv4.new",
                                            tier::segment_name(kSegments + 1),
                                            tier::segment_name(kSegments + 2) + ".new",
                                            tier::segment_name(kSegments + 3),
                                            tier::segment_name(70)};
    for (const std::string& name : names) plant(folder / name);
    expect_to_work();
    for (const std::string& name : names) {
      EXPECT_FALSE(fs::is_regular_file(fs::symlink_status(folder / name))) << name;
      EXPECT_TRUE(fs::exists(fs::symlink_status(folder / name))) << name;
      EXPECT_TRUE(survey_names(name)) << name;
      EXPECT_TRUE(warned_of(name)) << name;
    }
  }
}

// A file name that did not exist when the store was opened.
TEST_F(TierStoreAttack, NewSegmentsReplaceNothing) {
  fill();
  open();
  const Bytes garbage(100, 'x');
  for (const std::uint64_t id : {kSegments + 1, kSegments + 2, kSegments + 4})
    write_file(folder / tier::segment_name(id), garbage);
  for (std::uint64_t i = kRecords; i < 2 * kRecords; ++i)
    ASSERT_EQ(put(*store, record_id(i), random_bytes(i, kPayload)), PutStatus::stored);
  ASSERT_TRUE(store->flush());
  for (const std::uint64_t id : {kSegments + 1, kSegments + 2, kSegments + 4})
    EXPECT_EQ(read_file(folder / tier::segment_name(id)), garbage);
  expect_all(0, 2 * kRecords);
}

TEST_F(TierStoreAttack, CollectKeepsSegmentsThatItMayNotOpen) {
  fill();
  const fs::path closed = folder / tier::segment_name(2);
  const Bytes bytes = read_file(closed);
  for (const auto& entry : fs::directory_iterator(folder)) ASSERT_EQ(::chown(entry.path().c_str(), 65534, 65534), 0);
  ASSERT_EQ(::chown(folder.c_str(), 65534, 65534), 0);
  fs::permissions(closed, fs::perms::none);
  EXPECT_EQ(in_child([&] {
              if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) FAIL();
              open();
              EXPECT_EQ(store->stats().unopened_segments, 1);
              EXPECT_TRUE(warned_of(closed.filename().string()));
              for (std::uint64_t i = 0; i < kRecords; ++i) remove(*store, record_id(i));
              EXPECT_TRUE(store->collect().durable);
              for (std::uint64_t i = 0; i < kRecords; ++i) put(*store, record_id(1000 + i), random_bytes(i, kPayload));
              EXPECT_TRUE(store->close());
              EXPECT_EQ(tier::survey_store(*files, options.directory, false).unreadable_segments(), 1);
            }),
            0);
  fs::permissions(closed, fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_EQ(read_file(closed), bytes);
  open();
  EXPECT_EQ(get(*store, record_id(3)).payload, random_bytes(3, kPayload));
}

int open_descriptors() {
  return static_cast<int>(std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()));
}

// Every segment is read and written, many at a time, with far fewer descriptors than segments.
TEST_F(TierStoreAttack, ManySegmentsNeedFewDescriptors) {
  constexpr std::uint64_t kMany = 60;
  options.read_threads = 3;
  options.segment_bytes = 64 << 10;
  {
    open();
    for (std::uint64_t i = 0; i < kMany; ++i)
      ASSERT_EQ(put(*store, record_id(i), random_bytes(i, 40000)), PutStatus::stored);
    ASSERT_TRUE(store->flush());
    EXPECT_GE(store->stats().segments, static_cast<std::int64_t>(kMany));
    ASSERT_TRUE(store->close());
  }
  for (const int limit : {40, 14}) {
    SCOPED_TRACE(limit);
    if (limit == 14) fs::remove(folder / "index.kv4");
    EXPECT_EQ(in_child([&] {
                const int before = open_descriptors();
                const rlimit few{static_cast<rlim_t>(before + limit - 3), static_cast<rlim_t>(before + limit - 3)};
                if (::setrlimit(RLIMIT_NOFILE, &few) != 0) FAIL();
                files = tier::make_posix_file_system();
                open();
                EXPECT_EQ(store->stats().unopened_segments, 0);
                EXPECT_EQ(store->stats().records, static_cast<std::int64_t>(kMany));
                const auto read = [&](std::uint64_t step) {
                  for (std::uint64_t i = 0; i < kMany; ++i) {
                    const std::uint64_t number = i * step % kMany;
                    ASSERT_EQ(get(*store, record_id(number)).payload, random_bytes(number, 40000)) << number;
                  }
                };
                std::thread other([&] { read(7); });
                read(3);
                other.join();
                for (std::uint64_t i = 0; i < kMany; i += 2) remove(*store, record_id(i));  // writes to many of them
                EXPECT_TRUE(store->flush());
                for (std::uint64_t i = 0; i < kMany; i += 2)
                  ASSERT_EQ(put(*store, record_id(i), random_bytes(i, 40000)), PutStatus::stored);
                EXPECT_TRUE(store->flush());
                read(1);
                EXPECT_TRUE(store->close());
              }),
              0);
  }
  open();
  EXPECT_EQ(store->stats().records, static_cast<std::int64_t>(kMany));
}

TEST_F(TierStoreAttack, ForkedChildNeitherUsesNorReleasesTheStore) {
  fill();
  open();
  EXPECT_EQ(in_child([&] {
              EXPECT_EQ(put(*store, record_id(1), {}), PutStatus::failed);
              EXPECT_EQ(get(*store, record_id(1)).status, GetStatus::missing);
              EXPECT_FALSE(remove(*store, record_id(1)));
              EXPECT_FALSE(store->flush());
              EXPECT_FALSE(store->collect().durable);
              EXPECT_FALSE(store->close());
              store.reset();
            }),
            0);
  EXPECT_EQ(in_child([&] { EXPECT_THROW(DiskStore::open(*files, options), Error); }), 0);
  expect_all(0, kRecords);
  ASSERT_EQ(put(*store, record_id(1000), random_bytes(1, 100)), PutStatus::stored);
  ASSERT_TRUE(store->close());
  EXPECT_EQ(
      in_child([&] { EXPECT_EQ(get(*DiskStore::open(*files, options), record_id(1000)).status, GetStatus::found); }),
      0);
}

TEST_F(TierStoreAttack, DeletedLockLetsNobodyIn) {
  fill();
  open();
  fs::remove(folder / "lock");
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_THROW(DiskStore::open(*files, options), Error);
    EXPECT_THROW(tier::survey_store(*files, options.directory, false), Error);
    write_file(folder / "lock", {});
  }
  store.reset();
  open();
}

// The lock of an older build.
TEST_F(TierStoreAttack, LockFileAloneCountsToo) {
  fill();
  const int fd = ::open((folder / "lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::flock(fd, LOCK_EX | LOCK_NB), 0);
  EXPECT_THROW(DiskStore::open(*files, options), Error);
  ::close(fd);
  open();
}

/// The current index.kv4 with other numbers in its header.
void forge_checkpoint(const fs::path& path, std::uint64_t body_bytes, std::uint64_t next_sequence) {
  Bytes bytes = read_file(path);
  auto* at = reinterpret_cast<std::byte*>(bytes.data());
  if (body_bytes != 0) tier::store_le(at + 24, body_bytes);
  tier::store_le(at + 32, next_sequence);
  tier::store_le(at + 56, digest64(std::span<const std::byte>(at, 56)));
  write_file(path, bytes);
}

TEST_F(TierStoreAttack, HugeCheckpointsAreNotRead) {
  fill();
  const Bytes sound = read_file(folder / "index.kv4");
  for (const std::int64_t bytes : {std::int64_t{1} << 33, std::int64_t{1} << 42}) {
    write_file(folder / "index.kv4", sound);
    forge_checkpoint(folder / "index.kv4", static_cast<std::uint64_t>(bytes), 100);
    if (::truncate((folder / "index.kv4").c_str(), bytes + 4096) != 0) GTEST_SKIP() << "no such files here";
    open();
    expect_all(0, kRecords);
    store.reset();
  }
}

TEST_F(TierStoreAttack, ForgedSequencesDoNotWrap) {
  fill();
  forge_checkpoint(folder / "index.kv4", 0, UINT64_MAX);
  open();
  ASSERT_EQ(put(*store, record_id(0), random_bytes(7, kPayload)), PutStatus::stored);
  ASSERT_TRUE(store->flush());
  const Bytes segment = read_file(folder / tier::segment_name(kSegments + 1));
  const tier::ParsedHeader first =
      tier::parse_header(std::as_bytes(std::span(segment)).subspan(tier::kSegmentDataOffset, tier::kBlockBytes));
  ASSERT_EQ(first.refusal, tier::RecordRefusal::none);
  EXPECT_LT(first.header.sequence, std::uint64_t{1} << 32);
  EXPECT_EQ(get(*store, record_id(0)).payload, random_bytes(7, kPayload));
}

TEST_F(TierStoreAttack, MillionsOfForeignNamesCostNothing) {
  fill();
  std::atomic<int> asked = 0;
  const tier::Listing listing = files->list(options.directory, [&](std::string_view) {
    ++asked;
    return false;
  });
  EXPECT_TRUE(listing.names.empty() && listing.status.ok());
  EXPECT_EQ(asked, static_cast<int>(kSegments) + 2);  // plus the lock and the checkpoint
  for (int i = 0; i < 1000; ++i) write_file(folder / ("foreign-" + std::to_string(i)), {});
  EXPECT_TRUE(tier::survey_store(*files, options.directory, false).sound());
}

}  // namespace
}  // namespace kv4::test
