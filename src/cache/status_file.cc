#include "cache/status_file.h"

#include <fmt/format.h>

#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "base/check.h"

namespace kv4 {

namespace {

/// Writes JSON as it goes. A tree of nlohmann's would allocate in its destructor, which ends a process without memory.
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
    else if constexpr (std::is_integral_v<T>)
      fmt::format_to(std::back_inserter(text_), "{}", value);
    else if constexpr (std::is_convertible_v<T, std::string>)
      text_ += nlohmann::json(std::string(value)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
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
#define KV4_JSON_FIELDS(Type, ...)                                                               \
  static void from_json(const nlohmann::json& nlohmann_json_j, Type& nlohmann_json_t) {          \
    const Type nlohmann_json_default_obj{};                                                      \
    NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(NLOHMANN_JSON_FROM_WITH_DEFAULT, __VA_ARGS__))      \
  }                                                                                              \
  static void write_fields(JsonText& text, const Type& value) {                                  \
    NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(KV4_WRITE_FIELD, __VA_ARGS__))                      \
  }

// A field that one side does not know is passed over, one that is missing has its default: versions may be mixed.
KV4_JSON_FIELDS(TokenHistogram, counts, sum)
KV4_JSON_FIELDS(TenantUse, share_blocks, blocks)
KV4_JSON_FIELDS(PrefixStatistics, prompts, hits, prompt_tokens, usable_tokens,
                                                replayed_tokens, stored_blocks, joined_blocks, inserted_blocks,
                                                evicted_blocks, saved_snapshots, restored_snapshots, dropped_snapshots,
                                                lost_events, blocks, snapshots)
KV4_JSON_FIELDS(CacheStatistics, requests, max_requests, blocks, free_blocks,
                                                held_blocks, evictable_blocks, slots, free_slots, memory_bytes, tenants,
                                                prefix, usable_tokens, replayed_tokens)
KV4_JSON_FIELDS(RequestStatus, request, lengths, rewind_floor, blocks, shared_blocks,
                                                kept_blocks)

namespace tier {
KV4_JSON_FIELDS(TierStats, records, payload_bytes, capacity_bytes, evicted_records,
                                                set_aside_records, connects, redirects)
}

KV4_JSON_FIELDS(TierReport, name, hits, misses, failed_gets, damaged, hit_bytes, stored,
                                                failed_puts, refused_puts, stored_bytes, promoted, waiting_bytes, open,
                                                times_opened, tier)
KV4_JSON_FIELDS(CacheStatus, cache, requests, block_states, tiers)
KV4_JSON_FIELDS(PublishedStatus, model, process, time_ms, interval_ms, status)

namespace {

constexpr const char* kFormat = "kv4 status 1";
constexpr std::string_view kPrefix = "inspect-", kQuestion = ".wanted", kAnswer = ".kv4s", kError = ".error";

std::string name_of(const RequestQuestion& question, std::string_view suffix) {
  return fmt::format("{}{}-{:016x}{}", kPrefix, question.request, question.number, suffix);
}

}  // namespace

namespace {

/// With the name of the format beside the fields.
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
  JsonText text;
  text.add(Formatted{kFormat, published});
  return text.take();
}

PublishedStatus parse_published_status(std::string_view text) {
  try {
    const nlohmann::json in = nlohmann::json::parse(text);
    require(in.is_object() && in.value("format", "") == kFormat, ErrorCode::bad_file,
            "it is no status of a cache: its format is not '{}'", kFormat);
    return in.get<PublishedStatus>();
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

bool is_of_question(std::string_view name) { return name.starts_with(kPrefix); }

}  // namespace kv4
