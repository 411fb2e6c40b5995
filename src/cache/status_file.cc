#include "cache/status_file.h"

#include <fmt/format.h>
#include <time.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "tier/segment_file.h"

namespace kv4 {

namespace {

/// Writes JSON directly. nlohmann's tree would allocate in its destructor, which ends a process that is out of memory.
class JsonText {
 public:
  template <class T>
  void field(const char* name, const T& value) {
    separate();
    text_.append(1, '"').append(name).append("\":");
    add(value);
  }
  template <class T>
  void add(const T& value) {
    if constexpr (std::is_same_v<T, bool>)
      text_ += value ? "true" : "false";
    else if constexpr (std::is_enum_v<T>)
      add(std::string(to_string(value)));
    else if constexpr (std::is_integral_v<T>)  // a count above the readers' limit is written as the limit
      fmt::format_to(std::back_inserter(text_), "{}",
                     std::cmp_less(kMaxStatusNumber, value) ? kMaxStatusNumber : static_cast<std::int64_t>(value));
    else if constexpr (std::is_convertible_v<T, std::string>)
      text_ += nlohmann::json(std::string(value)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    else if constexpr (requires { typename T::mapped_type; })
      within("{}", [&] {
        for (const auto& [name, each] : value) field(name.c_str(), each);
      });
    else if constexpr (requires { value.begin(); })
      within("[]", [&] {
        for (const auto& each : value) {
          separate();
          add(each);
        }
      });
    else
      within("{}", [&] { write_fields(*this, value); });
  }
  std::string take() { return std::move(text_); }

 private:
  template <class Body>
  void within(const char* brackets, Body&& body) {
    text_ += brackets[0];
    body();
    text_ += brackets[1];
  }
  void separate() {
    if (text_.back() != '[' && text_.back() != '{') text_ += ',';
  }

  std::string text_;
};

}  // namespace

#define KV4_WRITE_FIELD(name) text.field(#name, value.name);
#define KV4_JSON_FIELDS(Type, ...)                                                          \
  static void from_json(const nlohmann::json& nlohmann_json_j, Type& nlohmann_json_t) {     \
    const Type nlohmann_json_default_obj{};                                                 \
    NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(NLOHMANN_JSON_FROM_WITH_DEFAULT, __VA_ARGS__)) \
  }                                                                                         \
  static void write_fields(JsonText& text, const Type& value) {                             \
    NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(KV4_WRITE_FIELD, __VA_ARGS__))                 \
  }

// Unknown fields are ignored, missing ones have their defaults: versions may be mixed.
KV4_JSON_FIELDS(TokenHistogram, counts, sum)
KV4_JSON_FIELDS(TimeHistogram, counts, sum_seconds, sum_ns)
KV4_JSON_FIELDS(CallTimes, admit, prepare_forward, tier_load, tier_save, session_restore, session_save)
KV4_JSON_FIELDS(ShortageCounts, requests, blocks, slots)
KV4_JSON_FIELDS(BuildInfo, version, cuda, compiler)
KV4_JSON_FIELDS(TenantUse, share_blocks, blocks)
KV4_JSON_FIELDS(PrefixStatistics, prompts, hits, prompt_tokens, usable_tokens, replayed_tokens, stored_blocks,
                joined_blocks, inserted_blocks, evicted_blocks, saved_snapshots, restored_snapshots, dropped_snapshots,
                lost_events, blocks, snapshots)
KV4_JSON_FIELDS(CacheStatistics, requests, max_requests, blocks, free_blocks, held_blocks, evictable_blocks, slots,
                free_slots, memory_bytes, tenants, prefix, usable_tokens, replayed_tokens, times, admit_shortages,
                prepare_forward_shortages)
KV4_JSON_FIELDS(RequestStatus, request, lengths, rewind_floor, blocks, shared_blocks, kept_blocks)

namespace tier {
KV4_JSON_FIELDS(TierStats, records, payload_bytes, capacity_bytes, evicted_records, set_aside_records,
                unauthenticated_records, connects, redirects)
}

NLOHMANN_JSON_SERIALIZE_ENUM(Protection, {{Protection::none, "none"},
                                          {Protection::sealed, "sealed"},
                                          {Protection::authenticated, "authenticated"}})
KV4_JSON_FIELDS(TierReport, name, protection, hits, misses, failed_gets, damaged, hit_bytes, stored, failed_puts,
                refused_puts, stored_bytes, promoted, waiting_bytes, open, times_opened, get_times, put_times, tier,
                failure, failure_detail, failures)
KV4_JSON_FIELDS(CacheStatus, build, cache, requests, block_states, tiers)
KV4_JSON_FIELDS(PublishedStatus, model, process, time_ms, boot_id, boot_ms, interval_ms, status)

namespace {

constexpr const char* kFormat = "kv4 status 1";
constexpr std::string_view kPrefix = "inspect-", kQuestion = ".wanted", kAnswer = ".kv4s", kError = ".error";

std::string name_of(const RequestQuestion& question, std::string_view suffix) {
  return fmt::format("{}{}-{:016x}{}", kPrefix, question.request, question.number, suffix);
}

/// Reads a text without keeping it, and stops at the first limit that it exceeds: a tree takes some hundred bytes per
/// value.
class StatusLimits {
 public:
  const std::string& problem() const { return problem_; }

  bool null() { return count(); }
  bool boolean(bool) { return count(); }
  bool number_integer(std::int64_t value) { return whole(value >= -kMaxStatusNumber); }
  bool number_unsigned(std::uint64_t value) { return whole(value <= std::uint64_t{kMaxStatusNumber}); }
  bool number_float(double, const std::string&) { return whole(false); }
  bool string(std::string&) { return count(); }
  bool binary(nlohmann::json::binary_t&) { return count(); }
  bool key(std::string&) { return true; }
  bool start_object(std::size_t) { return enter(); }
  bool start_array(std::size_t) { return enter(); }
  bool end_object() { return leave(); }
  bool end_array() { return leave(); }
  // Leaves out the parser's message, because it repeats the text: the page that shows it may be anybody's.
  bool parse_error(std::size_t byte, const std::string&, const nlohmann::json::exception&) {
    return stop(fmt::format("no JSON from byte {} on", byte));
  }

 private:
  bool stop(std::string why) {
    problem_ = std::move(why);
    return false;
  }
  bool count() { return ++values_ <= kMaxStatusValues || stop(fmt::format("more than {} values", kMaxStatusValues)); }
  bool whole(bool fits) {
    return fits ? count() : stop(fmt::format("a number that is not whole or is beyond {}", kMaxStatusNumber));
  }
  bool enter() {
    return ++depth_ <= kMaxStatusDepth ? count() : stop(fmt::format("nested deeper than {}", kMaxStatusDepth));
  }
  bool leave() {
    --depth_;
    return true;
  }

  std::int64_t values_ = 0;
  int depth_ = 0;
  std::string problem_;
};

void check_counts(const PublishedStatus& p) {
  const auto at_most = [](std::size_t count, std::size_t most, const char* what) {
    require(count <= most, ErrorCode::bad_file, "it is no status of a cache: {} {}; at most {} are read", count, what,
            most);
  };
  at_most(p.model.size(), kMaxStatusNameBytes, "bytes of the model's name");
  at_most(p.boot_id.size(), kMaxStatusNameBytes, "bytes of the boot id");
  at_most(p.status.build.version.size(), kMaxStatusNameBytes, "bytes of the version");
  at_most(p.status.build.compiler.size(), kMaxStatusNameBytes, "bytes of the compiler's name");
  at_most(p.status.requests.size(), kMaxStatusRequests, "requests");
  at_most(p.status.cache.tenants.size(), kMaxStatusTenants, "tenants");
  at_most(p.status.tiers.size(), kMaxStatusTiers, "tiers");
  require(p.interval_ms >= 0 && p.interval_ms <= kMaxStatusIntervalMs, ErrorCode::bad_file,
          "it is no status of a cache: an interval of {} ms; it is 0 to {}", p.interval_ms, kMaxStatusIntervalMs);
  // Prometheus refuses a page with a duplicate series: one cache would take away the series of all others.
  std::set<std::string> names;
  for (const TierReport& tier : p.status.tiers) {
    at_most(tier.name.size(), kMaxStatusNameBytes, "bytes of a tier's name");
    at_most(tier.failures.size(), kMaxStatusReasons, "reasons of failures");
    for (const auto& [reason, unused] : tier.failures) at_most(reason.size(), kMaxStatusNameBytes, "bytes of a reason");
    require(names.insert(tier.name).second, ErrorCode::bad_file, "it is no status of a cache: two tiers '{}'",
            tier.name);
  }
}

}  // namespace

BootTime read_boot_time() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  BootTime out{.boot_id = {}, .ms = std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000};
  std::ifstream("/proc/sys/kernel/random/boot_id") >> out.boot_id;
  return out;
}

Freshness PublishedStatus::freshness(const BootTime& now) const {
  if (boot_id.empty() || boot_id != now.boot_id || boot_ms > now.ms) return Freshness::unknown;
  return now.ms - boot_ms > stale_after_ms() ? Freshness::stale : Freshness::fresh;
}

namespace {

/// Adds the name of the format to the fields.
struct Formatted {
  const char* format;
  const PublishedStatus& published;
};
void write_fields(JsonText& text, const Formatted& value) {
  text.field("format", value.format);
  write_fields(text, value.published);
}

}  // namespace

std::string status_text(const PublishedStatus& published) {
  JsonText json;
  json.add(Formatted{kFormat, published});
  std::string text = json.take();
  require(text.size() <= std::size_t{kMaxStatusBytes}, ErrorCode::bad_state,
          "the status has {} bytes; readers take at most {}", text.size(), kMaxStatusBytes);
  return text;
}

PublishedStatus parse_published_status(std::string_view text) {
  require(text.size() <= std::size_t{kMaxStatusBytes}, ErrorCode::bad_file,
          "it is no status of a cache: {} bytes; at most {} are read", text.size(), kMaxStatusBytes);
  try {
    StatusLimits limits;
    require(nlohmann::json::sax_parse(text, &limits), ErrorCode::bad_file, "it is no status of a cache: {}",
            limits.problem());
    const nlohmann::json in = nlohmann::json::parse(text);
    require(in.is_object() && in.value("format", "") == kFormat, ErrorCode::bad_file,
            "it is no status of a cache: its format is not '{}'", kFormat);
    auto out = in.get<PublishedStatus>();
    check_counts(out);
    return out;
  } catch (const nlohmann::json::exception& e) {
    fail(ErrorCode::bad_file, "it is no status of a cache: {}", e.what());
  }
}

std::string RequestQuestion::question_name() const { return name_of(*this, kQuestion); }
std::string RequestQuestion::answer_name() const { return name_of(*this, kAnswer); }
std::string RequestQuestion::error_name() const { return name_of(*this, kError); }

std::optional<RequestQuestion> parse_question(std::string_view name) {
  RequestQuestion out;
  unsigned long long number = 0;
  if (std::sscanf(std::string(name).c_str(), "inspect-%d-%16llx", &out.request, &number) != 2) return std::nullopt;
  out.number = number;
  return out.request >= 0 && out.question_name() == name ? std::optional(out) : std::nullopt;
}

// Including unfinished files, which a killed process leaves behind.
bool is_of_question(std::string_view name) {
  const std::size_t dot = name.find('.');
  if (dot == name.npos || !parse_question(std::string(name.substr(0, dot)).append(kQuestion))) return false;
  std::string_view rest = name.substr(dot);
  const bool unfinished = rest.ends_with(tier::kUnfinishedSuffix);
  if (!unfinished) return rest == kQuestion || rest == kAnswer || rest == kError;
  rest.remove_suffix(tier::kUnfinishedSuffix.size());
  if (rest == kQuestion || rest == kError) return true;
  if (!rest.starts_with(kAnswer)) return false;  // an unfinished session: its name has one more number
  rest.remove_prefix(kAnswer.size());
  return rest.size() == 1 + 16 && rest[0] == '.' &&
         rest.find_first_not_of("0123456789abcdef", 1) == std::string_view::npos;
}

}  // namespace kv4
