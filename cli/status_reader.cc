#include "status_reader.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <thread>

#include "base/check.h"
#include "page.h"

namespace kv4::cli {
namespace {

constexpr std::chrono::seconds kAnswerLimit{30};

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

PublishedStatus read_published_status(const std::string& directory) {
  const std::string path = directory + "/" + kStatusFileName, text = read_text(path);
  require(!text.empty(), ErrorCode::bad_file, "nobody publishes in {}: there is no {}", directory, kStatusFileName);
  PublishedStatus out;
  try {
    out = parse_published_status(text);
  } catch (const Error& e) {
    fail(e.code(), "{}: {}", path, e.what());
  }
  const std::int64_t now = now_ms();
  require(!out.is_stale(now), ErrorCode::bad_file, "nobody publishes in {} any more: process {} did {} s ago",
          directory, out.process, (now - out.time_ms) / 1000);
  return out;
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
      const std::string why = read_text(failed);
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
