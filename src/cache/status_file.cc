#include "cache/status_file.h"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/check.h"

namespace kv4 {

// A field that one side does not know is passed over, one that is missing has its default: versions may be mixed.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(TokenHistogram, counts, sum)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(TenantUse, share_blocks, blocks)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(PrefixStatistics, prompts, hits, prompt_tokens, usable_tokens,
                                                replayed_tokens, stored_blocks, joined_blocks, inserted_blocks,
                                                evicted_blocks, saved_snapshots, restored_snapshots, dropped_snapshots,
                                                lost_events, blocks, snapshots)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(CacheStatistics, requests, max_requests, blocks, free_blocks,
                                                held_blocks, evictable_blocks, slots, free_slots, memory_bytes, tenants,
                                                prefix, usable_tokens, replayed_tokens)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(RequestStatus, request, lengths, rewind_floor, blocks, shared_blocks,
                                                kept_blocks)

namespace tier {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(TierStats, records, payload_bytes, capacity_bytes, evicted_records,
                                                set_aside_records, connects, redirects)
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(TierReport, name, hits, misses, failed_gets, damaged, hit_bytes, stored,
                                                failed_puts, refused_puts, stored_bytes, promoted, waiting_bytes, open,
                                                times_opened, tier, failure, failure_detail, failures)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(CacheStatus, cache, requests, block_states, tiers)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(PublishedStatus, model, process, time_ms, interval_ms, status)

namespace {

constexpr const char* kFormat = "kv4 status 1";
constexpr std::string_view kPrefix = "inspect-", kQuestion = ".wanted", kAnswer = ".kv4s", kError = ".error";

std::string name_of(const RequestQuestion& question, std::string_view suffix) {
  return fmt::format("{}{}-{:016x}{}", kPrefix, question.request, question.number, suffix);
}

}  // namespace

std::string status_text(const PublishedStatus& published) {
  nlohmann::json out = published;
  out["format"] = kFormat;
  return out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
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
