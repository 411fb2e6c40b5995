#include "base/log.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace kv4 {
namespace {

struct SilenceAfter {
  ~SilenceAfter() { set_log_sink({}); }
};

TEST(Log, GoesToTheSinkAndNowhereElse) {
  const SilenceAfter silence;
  EXPECT_FALSE(log_wanted());
  log(LogLevel::error, "nobody", "listens", {});
  std::vector<std::string> heard;
  set_log_sink([&](const LogRecord& record) {
    std::string line = std::string(to_string(record.level)) + " " + std::string(record.event);
    for (const LogField& field : record.fields) line += " " + std::string(field.name) + "=" + std::string(field.value);
    heard.push_back(line);
  });
  EXPECT_TRUE(log_wanted());
  log(LogLevel::warning, "tier.opened", "it fails", {{"tier", "disk"}, {"reason", std::to_string(7)}});
  set_log_sink({});
  log(LogLevel::info, "tier.closed", "too late", {});
  EXPECT_EQ(heard, std::vector<std::string>{"warning tier.opened tier=disk reason=7"});
}

TEST(Log, ASinkThatThrowsHarmsNobody) {
  const SilenceAfter silence;
  set_log_sink([](const LogRecord&) { throw std::runtime_error("no"); });
  EXPECT_NO_THROW(log(LogLevel::info, "event", "text", {}));
}

TEST(Log, OneCallAtATimeWhileItIsReplaced) {
  const SilenceAfter silence;
  int calls = 0;  // not atomic: TSan checks the promise of one call at a time
  const auto count = [&](const LogRecord&) { ++calls; };
  set_log_sink(count);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([] {
      for (int j = 0; j < 100; ++j) log(LogLevel::info, "event", "text", {});
    });
  for (int i = 0; i < 20; ++i) set_log_sink(count);
  for (std::thread& thread : threads) thread.join();
  set_log_sink({});
  EXPECT_EQ(calls, 400);
}

}  // namespace
}  // namespace kv4
