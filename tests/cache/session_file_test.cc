// Sessions in files: complete and durable or absent, readable by another process, and refused when damaged.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "cache/session_file.h"
#include "cache/session_records.h"
#include "support/simulated_disk.h"

namespace kv4::test {
namespace {

namespace fs = std::filesystem;

const Model& tiny() {
  static const Model model(tiny_config());
  return model;
}

/// A folder of its own, removed at the end.
struct Folder {
  fs::path path = fs::temp_directory_path() / ("kv4_session_" + std::to_string(::getpid()));

  Folder() {
    fs::remove_all(path);
    fs::create_directory(path);
  }
  ~Folder() { fs::remove_all(path); }
  std::string file(const std::string& name) const { return (path / name).string(); }
  std::size_t num_files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(path), fs::directory_iterator()));
  }
};

std::vector<char> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

TEST(SessionFile, ForTheOwnerAloneAndNeverThroughALink) {
  const Folder folder;
  Driver driver(tiny(), session_options());
  const RequestId request = driver.admit();
  grow(driver, request, 300);
  const Bytes expected = bytes_of(driver.cache, request);
  const std::string path = folder.file("chat.kv4s"), link = folder.file("link");
  ASSERT_TRUE(save_session_file(driver.cache, request, identity(), path));
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0600u);
  EXPECT_EQ(folder.num_files(), 1u);
  expect_same(bytes_of(driver.cache, restore_session_file(driver.cache, identity(), path).value()), expected, "file");

  fs::create_symlink(path, link);
  expect_refused(ErrorCode::bad_file, link, [&] { (void)restore_session_file(driver.cache, identity(), link); });
  driver.run({{request, 11, 1}});
  ASSERT_TRUE(save_session_file(driver.cache, request, identity(), link));  // replaces the link
  EXPECT_FALSE(fs::is_symlink(link));
  EXPECT_EQ(driver.cache.length(restore_session_file(driver.cache, identity(), link).value()), 301);
  EXPECT_EQ(driver.cache.length(restore_session_file(driver.cache, identity(), path).value()), 300);

  expect_refused(ErrorCode::bad_file, "No such file",
                 [&] { (void)restore_session_file(driver.cache, identity(), folder.file("none")); });
  expect_refused(ErrorCode::bad_file, "No such file",
                 [&] { save_session_file(driver.cache, request, identity(), folder.file("none/chat")); });
  expect_refused(ErrorCode::bad_file, folder.path.string(),
                 [&] { (void)restore_session_file(driver.cache, identity(), folder.path.string()); });
  expect_refused(ErrorCode::bad_file, "its name",
                 [&] { save_session_file(driver.cache, request, identity(), folder.path.string()); });
  expect_refused(ErrorCode::bad_file, path + ": record 0 of a session: the session is of other weights", [&] {
    (void)restore_session_file(driver.cache, {"other", "salt", 7}, path);
  });
}

TEST(SessionFile, StoppedLeavesWhatWasThere) {
  const Folder folder;
  Driver driver(tiny(), session_options());
  const RequestId request = driver.admit();
  const std::string path = folder.file("chat.kv4s");
  grow(driver, request, 200);
  ASSERT_TRUE(save_session_file(driver.cache, request, identity(), path));
  grow(driver, request, 400);
  int told = 0;
  EXPECT_FALSE(save_session_file(driver.cache, request, identity(), path,
                                 [&](std::int64_t, std::int64_t) { return ++told < 3; }));
  EXPECT_THROW(save_session_file(driver.cache, request, identity(), path,
                                 [](std::int64_t, std::int64_t) -> bool { throw std::runtime_error("enough"); }),
               std::runtime_error);
  EXPECT_EQ(folder.num_files(), 1u);
  EXPECT_EQ(driver.cache.length(restore_session_file(driver.cache, identity(), path).value()), 200);
}

TEST(SessionFile, TruncatedOrGrownIsRefused) {
  const Folder folder;
  Driver driver(tiny(), session_options());
  const RequestId request = driver.admit();
  grow(driver, request, 300);
  const std::string path = folder.file("chat.kv4s"), cut = folder.file("cut");
  ASSERT_TRUE(save_session_file(driver.cache, request, identity(), path));
  const std::vector<char> sound = read_file(path);
  std::vector<std::size_t> sizes = {0, 1, 127, 128, 4095, 4096, sound.size() - 4096, sound.size() - 1};
  const auto files = tier::make_posix_file_system({.direct = false});
  SessionFileSource source(*files, path);
  while (!source.next().empty()) sizes.push_back(static_cast<std::size_t>(source.offset()));  // record boundaries
  EXPECT_EQ(sizes.back(), sound.size());
  sizes.pop_back();
  const Occupancy before = occupancy(driver.cache);
  for (const std::size_t size : sizes) {
    SCOPED_TRACE(size);
    write_file(cut, {sound.begin(), sound.begin() + static_cast<std::ptrdiff_t>(size)});
    expect_refused(ErrorCode::bad_file, cut, [&] { (void)restore_session_file(driver.cache, identity(), cut); });
  }
  for (const std::size_t more : {1, 4095, 4096, 8192})
    for (const char filled : {'\0', 'x'}) {
      std::vector<char> grown = sound;
      grown.resize(sound.size() + more, filled);
      write_file(cut, grown);
      expect_refused(ErrorCode::bad_file, cut, [&] { (void)restore_session_file(driver.cache, identity(), cut); });
    }
  EXPECT_EQ(occupancy(driver.cache), before);
}

// A file may claim any size, and digests do not prove it: memory is taken only for bytes that are there, up to a bound.
TEST(SessionFile, WhatTakesMoreMemoryThanItShouldIsRefused) {
  const Folder folder;
  Driver driver(tiny(), session_options());
  const RequestId request = driver.admit();
  grow(driver, request, 300);
  const std::string path = folder.file("chat.kv4s");
  ASSERT_TRUE(save_session_file(driver.cache, request, identity(), path));
  const std::vector<char> sound = read_file(path);
  const auto forge = [&](std::int64_t length, const std::vector<char>& front, std::int64_t file_bytes) {
    tier::RecordHeader header = tier::parse_header(std::as_bytes(std::span(sound))).header;
    header.length = length;
    std::vector<std::byte> bytes(static_cast<std::size_t>(tier::kRecordHeaderBytes));
    tier::encode_header(header, bytes);
    const auto more = std::as_bytes(std::span(front));
    bytes.insert(bytes.end(), more.begin(), more.end());
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    fs::resize_file(path, static_cast<std::uintmax_t>(file_bytes));
  };
  const auto files = tier::make_posix_file_system({.direct = false});
  const auto refused = [&](const std::string& words) {
    expect_refused(ErrorCode::bad_file, words, [&] { (void)restore_session_file(driver.cache, identity(), path); });
    expect_refused(ErrorCode::bad_file, words, [&] { survey_session_file(*files, path); });
  };
  const std::vector<char> front(sound.begin() + tier::kRecordHeaderBytes, sound.begin() + 3584);
  forge(kMaxSessionRecordBytes + 1, front, kMaxSessionRecordBytes + 8192);
  refused("a payload of 67108865 bytes; one of a session has at most 67108864");
  forge(kMaxSessionRecordBytes, front, kMaxSessionRecordBytes + 4096);  // the digest does not fit the zeros
  refused("damaged");
  // Impossible sizes of parts are refused before the rest is read.
  for (const std::size_t at : {112, 116, 120, 124, 135, 143}) {
    SCOPED_TRACE(at);
    std::vector<char> lies = front;
    std::fill_n(lies.begin() + static_cast<std::ptrdiff_t>(at) - (at > 128 ? 7 : 0), at > 128 ? 8 : 4, '\xff');
    lies.resize(4096 * 4, 'x');
    forge(std::ssize(lies) - 512, lies, tier::kRecordHeaderBytes + std::ssize(lies) - 512);
    fs::resize_file(path, static_cast<std::uintmax_t>(4096 * 4));
    refused("what comes before it are more");
  }
  std::vector<char> again = sound;
  write_file(path, again);
  EXPECT_TRUE(restore_session_file(driver.cache, identity(), path));
}

TEST(SessionFile, AFlippedBitIsRefused) {
  Driver driver(tiny(), session_options());
  const RequestId request = driver.admit();
  grow(driver, request, 140);
  SimulatedDisk disk(1);
  const SessionFile file{disk, "dir/chat"};
  ASSERT_TRUE(file.save(driver.cache, request, identity()));
  const std::int64_t bytes = static_cast<std::int64_t>(disk.contents("dir/chat").size());
  const Occupancy before = occupancy(driver.cache);
  Random random(3);
  for (std::int64_t i = 0; i < 600; ++i) {
    const std::int64_t place = i < 300 ? i : random.below(bytes);  // padding too
    const std::byte mask = std::byte{1} << random.below(8);
    SCOPED_TRACE("byte " + std::to_string(place));
    disk.damage("dir/chat", place, mask);
    expect_refused(ErrorCode::bad_file, "dir/chat", [&] { (void)file.restore(driver.cache, identity()); });
    EXPECT_FALSE([&] {
      try {
        return survey_session_file(disk, "dir/chat").sound();
      } catch (const Error&) {
        return false;
      }
    }());
    disk.damage("dir/chat", place, mask);
  }
  EXPECT_EQ(occupancy(driver.cache), before);
  EXPECT_TRUE(survey_session_file(disk, "dir/chat").sound());
  EXPECT_TRUE(file.restore(driver.cache, identity()));
}

// A failing call or a stop of the machine at any point leaves the old session or the new one, complete.
TEST(SessionFile, CrashesAndFailures) {
  Driver driver(tiny(), session_options());
  const RequestId older = driver.admit(), newer = driver.admit();
  driver.feed(older, 5, {150});
  grow(driver, newer, 300);
  for (std::uint64_t seed = 0; seed < static_cast<std::uint64_t>(rounds(1000)); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SimulatedDisk disk(seed);
    disk.set_short_transfers(seed % 2 == 0);
    const SessionFile file{disk, "dir/chat"};
    ASSERT_TRUE(file.save(driver.cache, older, identity()));
    const std::vector<std::byte> old_bytes = disk.contents("dir/chat");
    if (seed % 3 == 0) disk.fail_call_in(static_cast<std::int64_t>(disk.below(14)));
    if (seed % 3 == 1) disk.set_capacity(static_cast<std::int64_t>(old_bytes.size() * (1 + disk.below(3))));
    bool saved = false;
    try {
      saved = file.save(driver.cache, newer, identity());
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_file) << e.what();
    }
    if (seed % 5 != 0) disk.crash();
    disk.fail_call_in(-1);
    const RequestId restored = file.restore(driver.cache, identity()).value();
    const std::int64_t length = driver.cache.length(restored);
    EXPECT_TRUE(length == 300 || (length == 150 && !saved)) << length;
    expect_same(bytes_of(driver.cache, restored), bytes_of(driver.cache, length == 300 ? newer : older), "restored");
    driver.cache.release(restored);
  }
}

TEST(SessionFile, Survey) {
  Driver driver(tiny(), session_options());
  const RequestId request = driver.admit();
  grow(driver, request, 300);
  SimulatedDisk disk(1);
  SessionIdentity who = identity();
  who.block_extra = {{std::byte{1}, std::byte{2}, std::byte{3}}};
  ASSERT_TRUE((SessionFile{disk, "dir/chat"}.save(driver.cache, request, who)));
  const SessionSurvey s = survey_session_file(disk, "dir/chat");
  EXPECT_TRUE(s.sound());
  EXPECT_EQ(s.lengths, (std::vector<std::int64_t>{300, 300, 200}));
  EXPECT_EQ(s.tenant, 7u);
  EXPECT_EQ(s.weights_id, "weights-1");
  EXPECT_EQ(s.layout_id, driver.cache.schema().layout_id);
  EXPECT_EQ(s.full_blocks, 2);
  EXPECT_EQ(s.blocks_found, 2);
  EXPECT_EQ(s.block_bytes, 2 * driver.cache.schema().block_image_bytes);
  EXPECT_EQ(s.open_block_bytes, driver.cache.schema().block_image_bytes);
  EXPECT_EQ(s.image_bytes, driver.cache.image_bytes(request));
  EXPECT_EQ(s.token_bytes, 1200);
  EXPECT_EQ(s.extra_bytes, 3);
  EXPECT_EQ(s.file_bytes, static_cast<std::int64_t>(disk.contents("dir/chat").size()));

  std::vector<std::byte> cut = disk.contents("dir/chat");
  cut.resize(cut.size() - static_cast<std::size_t>(
                              tier::whole_blocks(tier::kRecordHeaderBytes + driver.cache.schema().block_image_bytes)));
  disk.replace("dir/cut", cut);
  const SessionSurvey short_one = survey_session_file(disk, "dir/cut");
  EXPECT_EQ(short_one.problems, (std::vector<std::string>{"1 of 2 full blocks are missing"}));
}

// --- another process

constexpr const char* kFrom = "KV4_SESSION_TEST_FROM";
constexpr const char* kTo = "KV4_SESSION_TEST_TO";
constexpr std::int64_t kBefore = 300, kAfter = 530;

// Runs in a process of its own that the test below starts.
TEST(SessionRestart, DISABLED_GoesOn) {
  const char *from = std::getenv(kFrom), *to = std::getenv(kTo);
  ASSERT_TRUE(from != nullptr && to != nullptr);
  Driver driver(tiny(), other_places(session_options()));
  const RequestId request = restore_session_file(driver.cache, identity(), from).value();
  grow(driver, request, kAfter);
  ASSERT_TRUE(save_session_file(driver.cache, request, identity(), to));
}

int run_child(const std::string& from, const std::string& to) {
  const std::string device = test::device() == Device::cuda ? "cuda" : test::device() == Device::far ? "far" : "cpu";
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv(kFrom, from.c_str(), 1);
    ::setenv(kTo, to.c_str(), 1);
    for (const char* name : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX", "GTEST_OUTPUT"}) ::unsetenv(name);
    ::execl("/proc/self/exe", "kv4_tests", "--gtest_filter=SessionRestart.DISABLED_GoesOn",
            "--gtest_also_run_disabled_tests", ("--device=" + device).c_str(), static_cast<char*>(nullptr));
    ::_exit(127);
  }
  int status = -1;
  return pid > 0 && ::waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(SessionRestart, AnotherProcessGoesOn) {
  const Folder folder;
  const std::string from = folder.file("before"), to = folder.file("after");
  Driver driver(tiny(), session_options());
  const RequestId request = driver.admit();
  grow(driver, request, kBefore);
  ASSERT_TRUE(save_session_file(driver.cache, request, identity(), from));
  grow(driver, request, kAfter);
  ASSERT_EQ(run_child(from, to), 0);
  const RequestId back = restore_session_file(driver.cache, identity(), to).value();
  expect_same(bytes_of(driver.cache, back), bytes_of(driver.cache, request), "after two restarts");
}

}  // namespace
}  // namespace kv4::test
