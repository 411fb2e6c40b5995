#include "kv4/status_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cache/session_file.h"
#include "cache/small_cache.h"
#include "cache/status_file.h"
#include "kv4/log.h"

namespace kv4 {
namespace {

namespace fs = std::filesystem;
using small::SmallCache;

/// A folder of its own for each test.
class StatusFolderTest : public ::testing::Test {
 protected:
  StatusFolderTest() {
    const auto* const test = ::testing::UnitTest::GetInstance()->current_test_info();
    parent_ = fs::path(::testing::TempDir()) / (std::string("kv4_status_") + test->name());
    fs::remove_all(parent_);
    fs::create_directory(parent_);
    folder_ = (parent_ / "cache").string();
  }
  ~StatusFolderTest() override { fs::remove_all(parent_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::string text(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  PublishedStatus read() const { return parse_published_status(text(kStatusFileName)); }
  RequestQuestion ask(RequestId request, std::uint64_t number) const {
    const RequestQuestion question{request, number};
    std::ofstream(path(question.question_name())).flush();
    return question;
  }

  const StatusOptions always_{.interval = std::chrono::milliseconds(0)};
  fs::path parent_;
  std::string folder_;
};

CacheOptions keeping_prefixes() {
  CacheOptions o = small::options();
  o.prefix.enabled = true;
  o.prefix.weights_id = "weights";
  o.prefix.num_snapshots = 4;
  return o;
}

TEST_F(StatusFolderTest, SaysHowTheCacheStands) {
  SmallCache small(keeping_prefixes());
  const std::int64_t set_aside = small.cache.allocator().num_held();  // on a device
  StatusFolder status(small.cache, folder_, always_);
  EXPECT_EQ(fs::status(folder_).permissions(), fs::perms::owner_all);
  const std::vector<std::int32_t> ids = small::token_ids(1, 0, 40);
  const RequestId first = small.cache.admit({.token_ids = ids, .tenant = 0, .salt = {}, .extra = {}}).value().request;
  small.run({{first, 1, 40}});
  const RequestId second = small.cache.fork(first).value();
  ASSERT_TRUE(status.publish());

  const PublishedStatus found = read();
  EXPECT_EQ(found.model, "small");
  EXPECT_EQ(found.interval_ms, 0);
  EXPECT_EQ(found.freshness(read_boot_time()), Freshness::fresh);
  EXPECT_EQ(found.freshness({found.boot_id, found.boot_ms + 4000}), Freshness::fresh);
  EXPECT_EQ(found.freshness({found.boot_id, found.boot_ms + 6000}), Freshness::stale);
  EXPECT_EQ(found.freshness({found.boot_id, found.boot_ms - 1}), Freshness::unknown);
  EXPECT_EQ(found.freshness({"another", found.boot_ms}), Freshness::unknown);
  const CacheStatus& s = found.status;
  EXPECT_EQ(s.cache.requests, 2);
  EXPECT_EQ(s.cache.prefix.prompts, 1);
  EXPECT_EQ(s.cache.prefix.stored_blocks, 2);
  EXPECT_EQ(s.cache.usable_tokens.counts[0], 1);
  EXPECT_EQ(s.cache.memory_bytes, small.cache.memory_bytes());
  // 40 tokens: two full published blocks, shared with the fork, and an open block of each request.
  EXPECT_EQ(s.block_states.size(), 20u);
  EXPECT_EQ(std::count(s.block_states.begin(), s.block_states.end(), 'h'), 4 + set_aside);
  ASSERT_EQ(s.requests.size(), 2u);
  for (const RequestStatus& request : s.requests) {
    EXPECT_TRUE(request.request == first || request.request == second);
    EXPECT_EQ(request.lengths, std::vector<std::int64_t>{40});
    EXPECT_EQ(request.rewind_floor, small.cache.rewind_floor(request.request));
    EXPECT_EQ(request.blocks, 3);
    EXPECT_EQ(request.shared_blocks, 2);
    EXPECT_EQ(request.kept_blocks, 2);
  }

  small.cache.release(first);
  small.cache.release(second);
  ASSERT_TRUE(status.publish());
  const CacheStatus after = read().status;
  EXPECT_TRUE(after.requests.empty());
  EXPECT_EQ(std::count(after.block_states.begin(), after.block_states.end(), 'k'), 2);
}

// Whatever the umask, the operator's permissions on the folder apply to figures; a request's tokens stay private.
TEST_F(StatusFolderTest, FiguresAreReadableByWhomTheFolderIs) {
  SmallCache small;
  const RequestId request = small.admit();
  const auto mode = [](const std::string& file) { return static_cast<unsigned>(fs::status(file).permissions()); };
  for (const auto& [folder, figures] :
       {std::pair(0700u, 0600u), std::pair(0750u, 0640u), std::pair(0755u, 0644u), std::pair(0711u, 0600u)}) {
    fs::create_directory(folder_);
    fs::permissions(folder_, static_cast<fs::perms>(folder));
    const mode_t before = umask(0077);
    StatusFolder status(small.cache, folder_, always_);
    const RequestQuestion known{request, 1}, unknown{request + 1, 2};
    ask(known.request, known.number);
    EXPECT_TRUE(status.publish());
    ask(unknown.request, unknown.number);
    EXPECT_TRUE(status.publish());
    umask(before);
    EXPECT_EQ(mode(path(kStatusFileName)), figures);
    EXPECT_EQ(mode(path(known.answer_name())), 0600u);
    EXPECT_EQ(mode(path(unknown.error_name())), 0600u);
    EXPECT_EQ(mode(folder_), folder);
  }
}

// A mode of 0750 admits the folder's group, which need not be the process's own.
TEST_F(StatusFolderTest, FiguresStayTheOwnersWhereTheFolderIsOfAnotherGroup) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a folder to a group that it is not in, and then be nobody";
  constexpr uid_t kNobody = 65534;
  constexpr gid_t kOfOthers = 54321;
  SmallCache small;
  for (const auto& [folder, figures] : {std::pair(0750u, 0600u), std::pair(0755u, 0644u), std::pair(0700u, 0600u)}) {
    fs::create_directory(folder_);
    fs::permissions(folder_, static_cast<fs::perms>(folder));
    ASSERT_EQ(chown(folder_.c_str(), kNobody, kOfOthers), 0);
    ASSERT_EQ(setegid(kNobody), 0);
    ASSERT_EQ(seteuid(kNobody), 0);
    {
      StatusFolder status(small.cache, folder_, always_);
      EXPECT_TRUE(status.publish());
      EXPECT_EQ(static_cast<unsigned>(fs::status(path(kStatusFileName)).permissions()), figures);
    }
    ASSERT_EQ(seteuid(0), 0);
    ASSERT_EQ(setegid(0), 0);
    fs::remove_all(folder_);
  }
}

// A published request contains its prompt: where there is a key, only its holder can read it.
TEST_F(StatusFolderTest, WhatIsAskedForIsSealed) {
  SmallCache small;
  CacheKey key{}, other{};
  key.fill(std::byte{1});
  other.fill(std::byte{2});
  StatusOptions options = always_;
  options.keys = {key, other};
  StatusFolder status(small.cache, folder_, options);
  const RequestId request = small.admit();
  small.run({{request, 5, 37}});
  const RequestQuestion question = ask(request, 1);
  ASSERT_TRUE(status.publish());
  const auto files = tier::make_posix_file_system({.direct = false});
  const auto survey = [&](std::vector<CacheKey> keys) {
    SessionIdentity identity;
    identity.keys = std::move(keys);
    return survey_session_file(*files, path(question.answer_name()), identity);
  };
  EXPECT_THROW((void)survey({}), Error);
  EXPECT_THROW((void)survey({other}), Error);
  const SessionSurvey found = survey({key});
  EXPECT_TRUE(found.sound() && found.authentic);
  EXPECT_EQ(found.protection, Protection::sealed);
  const std::vector<std::int32_t> ids = small.cache.token_ids(request);
  const std::string bytes = text(question.answer_name());
  EXPECT_EQ(bytes.find(std::string(reinterpret_cast<const char*>(ids.data()), 4 * ids.size())), std::string::npos);

  options.keys.resize(kMaxCacheKeys + 1);
  EXPECT_THROW(StatusFolder(small.cache, (parent_ / "more").string(), options), Error);
}

// Foreign files stay, whatever their names begin with.
TEST_F(StatusFolderTest, TakesAwayItsOwnFilesOnly) {
  SmallCache small;
  fs::create_directory(folder_);
  const std::vector<std::string> own = {
      "inspect-7-0000000000000001.wanted", "inspect-7-0000000000000001.wanted.new",
      "inspect-7-0000000000000001.kv4s",   "inspect-7-0000000000000001.kv4s.00000000000000ab.new",
      "inspect-0-00000000000000ff.error",  "inspect-0-00000000000000ff.error.new"};
  const std::vector<std::string> others = {"inspect-notes.txt",
                                           "inspect-",
                                           "inspect-7-0000000000000001",
                                           "inspect-7-0000000000000001.kv4s.bak",
                                           "inspect-7-0000000000000001.kv4s.new",
                                           "inspect-7-0000000000000001.kv4s.00000000000000AB.new",
                                           "inspect-7-1.kv4s",
                                           "inspect-07-0000000000000001.kv4s",
                                           "inspect--1-0000000000000001.kv4s",
                                           "inspect-7-00000000000000zz.kv4s",
                                           "my-inspect-7-0000000000000001.kv4s"};
  for (const auto& names : {own, others})
    for (const std::string& name : names) std::ofstream(path(name)).flush();
  const StatusFolder status(small.cache, folder_, always_);
  for (const std::string& name : own) EXPECT_FALSE(fs::exists(path(name))) << name;
  for (const std::string& name : others) EXPECT_TRUE(fs::exists(path(name))) << name;
}

TEST_F(StatusFolderTest, NotMoreOftenThanItsInterval) {
  SmallCache small;
  StatusFolder status(small.cache, folder_, {.interval = std::chrono::hours(1)});
  EXPECT_TRUE(status.publish());
  const std::string first = text(kStatusFileName);
  small.admit();
  EXPECT_TRUE(status.publish());
  EXPECT_EQ(text(kStatusFileName), first);
  ask(0, 1);
  EXPECT_TRUE(status.publish());
  EXPECT_TRUE(fs::exists(path(RequestQuestion{0, 1}.question_name())));
}

// The published request equals a saved one, and the running request continues as if undisturbed.
TEST_F(StatusFolderTest, GivesARunningRequest) {
  SmallCache small, alone;
  StatusFolder status(small.cache, folder_, always_);
  const RequestId request = small.admit(), other = alone.admit();
  small.run({{request, 5, 37}});
  alone.run({{other, 5, 37}});
  const RequestQuestion question = ask(request, 0xABC);
  ASSERT_TRUE(status.publish());
  EXPECT_FALSE(fs::exists(path(question.question_name())));
  EXPECT_EQ(fs::status(path(question.answer_name())).permissions(), fs::perms::owner_read | fs::perms::owner_write);

  const auto files = tier::make_posix_file_system({.direct = false});
  const SessionSurvey survey = survey_session_file(*files, path(question.answer_name()));
  EXPECT_TRUE(survey.sound());
  EXPECT_EQ(survey.lengths, std::vector<std::int64_t>{37});
  const SessionIdentity anybody{.weights_id = survey.weights_id, .salt = {}};
  EXPECT_THROW((void)restore_session_file(alone.cache, anybody, path(question.answer_name())), Error);

  small.run({{request, 5, 20}});
  alone.run({{other, 5, 20}});
  EXPECT_EQ(small.cache.export_image(request).bytes, alone.cache.export_image(other).bytes);
  EXPECT_EQ(small.cache.export_blocks(request), alone.cache.export_blocks(other));
}

TEST_F(StatusFolderTest, OneQuestionAtATimeAndErrorsAsWords) {
  SmallCache small;
  StatusFolder status(small.cache, folder_, always_);
  const RequestId request = small.admit();
  small.run({{request, 1, 5}});
  const RequestQuestion good = ask(request, 1), again = ask(request, 2), bad = ask(77, 3);
  for (const char* const name : {"inspect-.wanted", "inspect-1-2.wanted", "inspect-0-00000000000000zz.wanted", "other"})
    std::ofstream(path(name)).flush();
  const auto answered = [&] {
    return fs::exists(path(good.answer_name())) + fs::exists(path(again.answer_name())) +
           fs::exists(path(bad.error_name()));
  };
  for (int round = 1; round <= 3; ++round) {
    EXPECT_TRUE(status.publish());
    EXPECT_EQ(answered(), round);
  }
  EXPECT_TRUE(text(bad.error_name()).starts_with("request 77 does not run")) << text(bad.error_name());
  EXPECT_FALSE(fs::exists(path(bad.answer_name())));

  // During a step the request still has the state of the last commit.
  const Step step = small.prepare({{request, 1, 1}});
  small.append(step);
  const RequestQuestion meanwhile = ask(request, 4);
  EXPECT_TRUE(status.publish());
  EXPECT_EQ(text(meanwhile.answer_name()), text(good.answer_name()));
  small.cache.commit(step);
  EXPECT_EQ(small.cache.length(request), 6);
}

TEST_F(StatusFolderTest, OneCacheAtATime) {
  SmallCache small;
  {
    StatusFolder status(small.cache, folder_, always_);
    status.publish();
    std::ofstream(path("inspect-1-0000000000000001.kv4s")).flush();
    EXPECT_TRUE(fs::exists(path(kStatusFileName)));
    try {
      StatusFolder second(small.cache, folder_);
      ADD_FAILURE() << "two in one folder";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_state);
      EXPECT_NE(std::string(e.what()).find(folder_), std::string::npos);
    }
  }
  EXPECT_FALSE(fs::exists(path(kStatusFileName)));  // the publisher has ended
  StatusFolder next(small.cache, folder_, always_);
  EXPECT_FALSE(fs::exists(path("inspect-1-0000000000000001.kv4s")));  // of the publisher before
  EXPECT_THROW(StatusFolder(small.cache, (parent_ / "no" / "such").string()), Error);
}

TEST_F(StatusFolderTest, AForkedChildTakesNothingAway) {
  SmallCache small;
  auto status = std::make_unique<StatusFolder>(small.cache, folder_, always_);
  ASSERT_TRUE(status->publish());
  const std::string before = text(kStatusFileName);
  const RequestQuestion question = ask(0, 1);
  const pid_t child = ::fork();
  if (child == 0) {
    EXPECT_FALSE(status->publish());
    status.reset();
    ::_exit(HasFailure() ? 1 : 0);
  }
  int ended = -1;
  ASSERT_EQ(::waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0);
  EXPECT_EQ(text(kStatusFileName), before);
  EXPECT_TRUE(fs::exists(path(question.question_name())));
  EXPECT_TRUE(status->publish());
  EXPECT_EQ(read().process, ::getpid());
}

TEST_F(StatusFolderTest, AFolderThatIsLostIsNoReasonToStop) {
  SmallCache small;
  StatusFolder status(small.cache, folder_, always_);
  ASSERT_TRUE(status.publish());
  fs::remove_all(folder_);
  int told = 0;
  set_log_sink([&](const LogRecord& record) { told += record.event == "status.failed"; });
  EXPECT_FALSE(status.publish());
  EXPECT_FALSE(status.publish());
  EXPECT_EQ(told, 1);
  fs::create_directory(folder_);
  EXPECT_TRUE(status.publish());
  fs::remove_all(folder_);
  EXPECT_FALSE(status.publish());
  EXPECT_EQ(told, 2);
  set_log_sink({});
}

TEST(StatusText, GoesThereAndBack) {
  PublishedStatus in{.model = "m", .process = 7, .time_ms = 123456789012, .interval_ms = 5, .status = {}};
  in.status.cache.tenants = {{3, 4}, {5, 6}};
  in.status.cache.usable_tokens.add(200);
  in.status.requests = {{.request = 9, .lengths = {3, 2}, .rewind_floor = 1, .blocks = 1}};
  in.status.block_states = "hkf";
  TierReport tier;
  tier.name = "disk \"a\"";
  tier.open = true;
  tier.times_opened = 3;
  tier.failure = "wrong_password";
  tier.failure_detail = "a:1: WRONGPASS";
  tier.failures = {{"wrong_password", 4}};
  tier.tier.payload_bytes = std::int64_t{1} << 50;
  in.status.tiers = {tier};
  const std::string text = status_text(in);
  const PublishedStatus out = parse_published_status(text);
  EXPECT_EQ(status_text(out), text);
  EXPECT_EQ(out.status.requests[0].lengths, (std::vector<std::int64_t>{3, 2}));
  EXPECT_EQ(out.status.cache.usable_tokens.sum, 200);
  EXPECT_EQ(out.status.tiers[0].name, tier.name);
  EXPECT_TRUE(out.status.tiers[0].open);
  EXPECT_EQ(out.status.tiers[0].times_opened, 3);
  EXPECT_EQ(out.status.tiers[0].failure, tier.failure);
  EXPECT_EQ(out.status.tiers[0].failure_detail, tier.failure_detail);
  EXPECT_EQ(out.status.tiers[0].failures, tier.failures);
  for (const char* const bad : {"", "{", "[]", "{}", R"({"format": "kv4 status 2"})",
                                R"({"format": "kv4 status 1", "status": {"tiers": 3}})", R"({"format": 1})"})
    EXPECT_THROW((void)parse_published_status(bad), Error) << bad;
}

// Texts of unknown origin: refused with a reason, in memory bounded by the text's size.
TEST(StatusText, HostileOnesAreRefused) {
  const auto refusal = [](const std::string& text) {
    try {
      (void)parse_published_status(text);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_file);
      return std::string(e.what());
    }
    return std::string("taken");
  };
  const auto with = [](const std::string& field) { return R"({"format": "kv4 status 1", )" + field + "}"; };
  const auto repeated = [](const std::string& text, int times) {
    std::string out;
    for (int i = 0; i < times; ++i) out += text + (i + 1 < times ? "," : "");
    return out;
  };
  EXPECT_EQ(refusal(with(R"("model": "m")")), "taken");
  const std::pair<std::string, const char*> cases[] = {
      {std::string(static_cast<std::size_t>(kMaxStatusBytes) + 1, ' '), "at most 16777216"},
      {std::string(1000, '['), "nested deeper"},
      {with("\"x\": [" + repeated("0", (1 << 20) + 1) + "]"), "values"},
      {with(R"("process": 1e300)"), "not whole"},
      {with(R"("process": 18446744073709551615)"), "not whole"},
      {with(R"("process": -9223372036854775808)"), "not whole"},
      {with(R"("interval_ms": 3600001)"), "interval"},
      {with(R"("interval_ms": -1)"), "interval"},
      {with("\"model\": \"" + std::string(257, 'm') + "\""), "model's name"},
      {with(R"("status": {"tiers": [{"name": "a"}, {"name": "a"}]})"), "two tiers"},
      {with("\"status\": {\"tiers\": [" + repeated("{}", 17) + "]}"), "17 tiers"},
      {with("\"status\": {\"cache\": {\"tenants\": [" + repeated("{}", 257) + "]}}"), "257 tenants"}};
  for (const auto& [text, reason] : cases)
    EXPECT_NE(refusal(text).find(reason), std::string::npos) << reason << ": " << refusal(text);
  // The message on a page contains none of the text.
  for (const std::string& text :
       {std::string("geheim"), std::string("\"geheim"), with("geheim"), with("\"geheim\" 1")}) {
    EXPECT_NE(refusal(text).find("no JSON from byte"), std::string::npos) << refusal(text);
    EXPECT_EQ(refusal(text).find("geheim"), std::string::npos) << refusal(text);
  }
}

}  // namespace
}  // namespace kv4
