#include "replay_trace.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/check.h"
#include "base/input_file.h"

namespace kv4::cli {
namespace {

using nlohmann::json;

constexpr int kMooncakeIdTokens = 512;
// A trace may come from anybody: a line as JSON takes up to 20 times its bytes, a run of ids 16 bytes, a request 64.
constexpr std::size_t kMaxLineBytes = 1 << 20;
constexpr std::int64_t kMaxTraceBytes = std::int64_t{1} << 32;  // unpacked
constexpr std::int64_t kMaxTraceRequests = 1 << 22;
constexpr std::int64_t kMaxTraceRuns = 1 << 24;               // of all requests
constexpr std::int64_t kMaxTraceIds = std::int64_t{1} << 30;  // of all requests; each costs a lookup
constexpr std::int64_t kMaxId = std::int64_t{1} << 53;
constexpr std::string_view kRunLengthFormat = "weka128_rle v1";
// Each session of the run-length form has its own clock.
constexpr double kSessionStartS = 20, kLongestGapS = 300;

/// Lines of a file, gzip or not.
class LineReader {
 public:
  explicit LineReader(const std::string& path) : path_(path), file_(gzdopen(InputFile(path).release(), "rb"), gzclose) {
    require(file_ != nullptr, ErrorCode::bad_file, "{}: cannot be opened; give a readable trace", path);
    gzbuffer(file_.get(), 1 << 18);
  }

  bool next(std::string& line) {
    line.clear();
    while (!line.ends_with('\n') && (at_ < filled_ || fill())) {
      const std::string_view left(buffer_.data() + at_, filled_ - at_);
      const std::size_t taken = std::min(left.find('\n'), left.size() - 1) + 1;
      line += left.substr(0, taken);
      at_ += taken;
      require(line.size() <= kMaxLineBytes, ErrorCode::bad_file, "{}:{}: a line of more than {} bytes", path_,
              number_ + 1, kMaxLineBytes);
    }
    if (line.empty()) return false;
    ++number_;
    return true;
  }

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) const {
    fail(ErrorCode::bad_file, "{}:{}: {}", path_, number_, fmt::format(text, std::forward<Args>(args)...));
  }

 private:
  bool fill() {
    const int got = gzread(file_.get(), buffer_.data(), static_cast<unsigned>(buffer_.size()));
    int code = Z_OK;
    const char* text = gzerror(file_.get(), &code);
    require(got >= 0 && (code == Z_OK || code == Z_STREAM_END), ErrorCode::bad_file, "{}:{}: damaged or truncated: {}",
            path_, number_ + 1, text);
    at_ = 0;
    filled_ = got;
    bytes_ += got;
    require(bytes_ <= kMaxTraceBytes, ErrorCode::bad_file, "{}:{}: more than {} bytes, unpacked; split the trace",
            path_, number_ + 1, kMaxTraceBytes);
    return got > 0;
  }

  std::string path_;
  std::unique_ptr<gzFile_s, int (*)(gzFile)> file_;
  std::vector<char> buffer_ = std::vector<char>(1 << 16);
  std::size_t at_ = 0, filled_ = 0;  // unread part of the buffer
  std::int64_t number_ = 0, bytes_ = 0;
};

/// The fields of one line; every refusal names file and line.
struct Line {
  const LineReader& reader;
  const json& object;

  const json& field(const char* name) const {
    const auto found = object.find(name);
    if (found == object.end()) reader.refuse("there is no field '{}'", name);
    return *found;
  }
  std::int64_t whole(const json& value, const char* name, std::int64_t low, std::int64_t high) const {
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() &&
         value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())))
      reader.refuse("'{}' is {}, not a whole number from {} to {}", name, excerpt(value), low, high);
    const auto number = value.get<std::int64_t>();
    if (number < low || number > high) reader.refuse("'{}' is {}, outside {} to {}", name, number, low, high);
    return number;
  }
  std::int64_t whole(const char* name, std::int64_t low, std::int64_t high) const {
    return whole(field(name), name, low, high);
  }
  double seconds(const char* name, double unit) const {
    const json& value = field(name);
    const double number = value.is_number() ? value.get<double>() : -1;
    if (!(number >= 0) || !std::isfinite(number)) reader.refuse("'{}' is {}, not a time", name, excerpt(value));
    return number * unit;
  }
  const json& list(const char* name) const {
    const json& value = field(name);
    if (!value.is_array()) reader.refuse("'{}' is {}, not a list", name, excerpt(value));
    return value;
  }

  static std::string excerpt(const json& value) {
    constexpr std::size_t kLongest = 40;
    if (value.is_structured()) return value.is_array() ? "a list" : "an object";
    const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
  }
};

void add_run(std::vector<IdRun>& runs, IdRun run) {
  if (!runs.empty() && runs.back().first + runs.back().count == run.first)
    runs.back().count += run.count;
  else
    runs.push_back(run);
}

void check_ids(const LineReader& reader, const TraceRequest& request, std::int64_t expected) {
  const std::int64_t ids = count_ids(request);
  if (ids != expected) reader.refuse("{} ids for {} input tokens, which make {}", ids, request.input_tokens, expected);
  if (ids > kMaxRequestIds) reader.refuse("{} ids; a request has at most {}", ids, kMaxRequestIds);
  std::vector<IdRun> sorted = request.ids;
  std::sort(sorted.begin(), sorted.end(), [](const IdRun& a, const IdRun& b) { return a.first < b.first; });
  for (std::size_t i = 1; i < sorted.size(); ++i)
    if (sorted[i - 1].first + sorted[i - 1].count > sorted[i].first)
      reader.refuse("id {} stands twice in a request; an id stands for all tokens before it", sorted[i].first);
}

TraceRequest read_mooncake(const Line& line) {
  TraceRequest request;
  request.time_s = line.seconds("timestamp", 1e-3);
  request.input_tokens = line.whole("input_length", 1, kMaxRequestTokens);
  request.output_tokens = line.whole("output_length", 0, kMaxRequestTokens);
  for (const json& id : line.list("hash_ids")) add_run(request.ids, {line.whole(id, "hash_ids", 0, kMaxId), 1});
  check_ids(line.reader, request, ceil_div(request.input_tokens, kMooncakeIdTokens));
  return request;
}

struct Session {
  double told_s = 0;  // its own clock
  double time_s = 0;  // ours
};

TraceRequest read_run_length(const Line& line, int id_tokens, std::map<std::int64_t, Session>& sessions) {
  TraceRequest request;
  const std::int64_t number = line.whole("s", 0, kMaxId);
  const double told = line.seconds("t", 1);
  const auto [found, is_new] = sessions.try_emplace(number);
  Session& session = found->second;
  if (is_new) {
    session = {told, kSessionStartS * static_cast<double>(number)};
  } else {
    if (told < session.told_s) line.reader.refuse("'t' is {}, but its session was at {} already", told, session.told_s);
    session = {told, session.time_s + std::min(told - session.told_s, kLongestGapS)};
  }
  request.time_s = session.time_s;
  request.input_tokens = line.whole("i", 1, kMaxRequestTokens);
  request.output_tokens = line.whole("o", 0, kMaxRequestTokens);
  for (const json& run : line.list("r")) {
    if (!run.is_array() || run.size() != 2)
      line.reader.refuse("'r' holds {}, not [first_id, count]", Line::excerpt(run));
    add_run(request.ids, {line.whole(run[0], "r", 0, kMaxId), line.whole(run[1], "r", 1, kMaxRequestTokens)});
  }
  check_ids(line.reader, request, request.input_tokens / id_tokens);
  return request;
}

/// Sums over all requests.
struct TraceTotals {
  std::int64_t requests = 0, runs = 0, ids = 0;

  void add(const LineReader& reader, const TraceRequest& request) {
    grow(reader, requests, 1, kMaxTraceRequests, "requests");
    grow(reader, runs, static_cast<std::int64_t>(request.ids.size()), kMaxTraceRuns, "runs of ids");
    grow(reader, ids, count_ids(request), kMaxTraceIds, "ids");
  }

 private:
  static void grow(const LineReader& reader, std::int64_t& total, std::int64_t more, std::int64_t most,
                   const char* what) {
    total += more;
    if (total > most) reader.refuse("more than {} {}; split the trace", most, what);
  }
};

}  // namespace

std::int64_t count_ids(const TraceRequest& request) {
  std::int64_t count = 0;
  for (const IdRun& run : request.ids) count += run.count;
  return count;
}

std::int64_t bound_distinct_ids(const Trace& trace) {
  std::int64_t low = std::numeric_limits<std::int64_t>::max(), high = -1, all = 0;
  for (const TraceRequest& request : trace.requests)
    for (const IdRun& run : request.ids) {
      low = std::min(low, run.first);
      high = std::max(high, run.first + run.count - 1);
      all += run.count;
    }
  return all == 0 ? 0 : std::min(all, high - low + 1);
}

Trace read_trace(const std::string& path, std::int64_t limit) {
  LineReader reader(path);
  Trace trace{.id_tokens = kMooncakeIdTokens, .requests = {}};
  bool run_length = false;
  std::map<std::int64_t, Session> sessions;
  TraceTotals totals;
  std::string text;
  for (bool first = true; reader.next(text); first = false) {
    const json object = json::parse(text, nullptr, false);
    if (!object.is_object()) reader.refuse("not a JSON object");
    const Line line{reader, object};
    if (first && object.contains("format")) {
      if (object["format"] != kRunLengthFormat)
        reader.refuse("the format is {}; only \"{}\" is known", Line::excerpt(object["format"]), kRunLengthFormat);
      trace.id_tokens = static_cast<int>(line.whole("block_tokens", 1, 1 << 20));
      run_length = true;
      continue;
    }
    trace.requests.push_back(run_length ? read_run_length(line, trace.id_tokens, sessions) : read_mooncake(line));
    trace.requests.back().ids.shrink_to_fit();
    totals.add(reader, trace.requests.back());
  }
  std::stable_sort(trace.requests.begin(), trace.requests.end(),
                   [](const TraceRequest& a, const TraceRequest& b) { return a.time_s < b.time_s; });
  require(!trace.requests.empty(), ErrorCode::bad_file, "{}: there is no request in it", path);
  if (limit > 0 && limit < static_cast<std::int64_t>(trace.requests.size())) trace.requests.resize(limit);
  return trace;
}

}  // namespace kv4::cli
