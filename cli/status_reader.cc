#include "status_reader.h"

#include <chrono>
#include <filesystem>
#include <random>
#include <thread>

#include "base/check.h"
#include "base/input_file.h"
#include "interrupts.h"
#include "page.h"

namespace kv4::cli {
namespace {

constexpr std::chrono::seconds kAnswerLimit{30};
constexpr std::chrono::seconds kChangeLimit{3};    // how long a single look waits for a change
constexpr std::int64_t kMaxAnswerBytes = 1 << 16;  // of an error

PublishedStatus read_status_file(const std::string& directory) {
  const std::string path = directory + "/" + kStatusFileName;
  std::error_code ignored;
  require(std::filesystem::exists(path, ignored), ErrorCode::bad_file, "nobody publishes in {}: there is no {}",
          directory, kStatusFileName);
  const std::string text = read_input_file(path, kMaxStatusBytes, "a status", Links::refused);
  try {
    return parse_published_status(text);
  } catch (const Error& e) {
    fail(e.code(), "{}: {}", path, e.what());
  }
}

}  // namespace

// A status with another boot's clock comes from another machine or from before a restart. A change tells which of the
// two it is; the reader's own clock measures the time since then.
PublishedStatus StatusReader::read() {
  PublishedStatus out = read_status_file(directory_);
  const auto now = std::chrono::steady_clock::now();
  const std::pair mark(out.boot_id, out.boot_ms != 0 ? out.boot_ms : out.time_ms);
  if (mark_ && *mark_ != mark) changed_ = now;
  mark_ = mark;
  const bool seen_to_change = changed_ && now - *changed_ <= std::chrono::milliseconds(out.stale_after_ms());
  const BootTime boot = read_boot_time();
  const Freshness freshness = out.freshness(boot);
  require(freshness != Freshness::stale || seen_to_change, ErrorCode::bad_file,
          "nobody publishes in {} any more: process {} did {} s ago", directory_, out.process,
          (boot.ms - out.boot_ms) / 1000);
  require(freshness != Freshness::unknown || seen_to_change, ErrorCode::bad_file,
          "nobody is seen to publish in {}: its status is of another boot or machine, and has not changed", directory_);
  return out;
}

PublishedStatus read_published_status(const std::string& directory) {
  StatusReader reader(directory);
  if (read_status_file(directory).freshness(read_boot_time()) != Freshness::unknown) return reader.read();
  for (const auto end = std::chrono::steady_clock::now() + kChangeLimit;;) {
    try {
      return reader.read();
    } catch (const Error&) {
      if (std::chrono::steady_clock::now() > end || interrupted()) throw;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

AskedRequest::AskedRequest(const std::string& directory, RequestId request) {
  std::random_device random;
  const RequestQuestion question{request, (std::uint64_t{random()} << 32) | random()};
  const auto place = [&](const std::string& name) { return directory + "/" + name; };
  const std::string asked = place(question.question_name()), failed = place(question.error_name());
  path_ = place(question.answer_name());
  replace_file(asked, "");
  for (const auto end = std::chrono::steady_clock::now() + kAnswerLimit; !std::filesystem::exists(path_);) {
    if (std::filesystem::exists(failed)) {
      const std::string why = read_input_file(failed, kMaxAnswerBytes, "an answer", Links::refused);
      std::filesystem::remove(failed);
      fail(ErrorCode::bad_argument, "{}", why);
    }
    if (std::chrono::steady_clock::now() > end) {
      std::filesystem::remove(asked);
      fail(ErrorCode::bad_file, "the cache that publishes in {} does not answer: it takes no steps", directory);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

AskedRequest::~AskedRequest() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

}  // namespace kv4::cli
