#include "run_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "sizes.h"

namespace kv4::checks {
namespace {

constexpr std::int64_t kWholeTokens = 8192;  // limit of a step that replays a whole request
constexpr std::int64_t kLargestChunk = 257;
constexpr std::int64_t kContinuation = 130;  // tokens that both an imported copy and its original append

const char* check_name(Role role) {
  switch (role) {
    case Role::plain: return "chunked == whole";
    case Role::rewound: return "rewind == never appended";
    case Role::forked: return "forked == alone";
    case Role::fork: return "fork == separate";
    case Role::successor: return "reused slot == fresh";
    case Role::guest: break;
  }
  return "released";
}

template <class Bytes>
std::string first_difference(const char* what, const Bytes& a, const Bytes& b) {
  if (a.size() != b.size()) return fmt::format("{}: {} bytes, expected {}", what, a.size(), b.size());
  const auto [at, other] = std::mismatch(a.begin(), a.end(), b.begin());
  if (at == a.end()) return "";
  return fmt::format("{}: byte {} of {} is {:#04x}, expected {:#04x}", what, at - a.begin(), a.size(),
                     static_cast<unsigned>(*at), static_cast<unsigned>(*other));
}

struct Exported {
  CanonicalImage image;
  std::vector<std::byte> blocks;
};

Exported export_request(const KVCacheManager& manager, RequestId request) {
  return {manager.export_image(request), manager.export_blocks(request)};
}

std::string compare(const Exported& got, const Exported& expected) {
  if (got.image.layout_id != expected.image.layout_id) return "the images have different layouts";
  if (got.image.lengths != expected.image.lengths) return "the images have different lengths";
  const std::string state = first_difference("image", got.image.bytes, expected.image.bytes);
  return state.empty() ? first_difference("blocks", got.blocks, expected.blocks) : state;
}

/// Changes options that change no exported byte.
CacheOptions other_layout(const CacheOptions& options, std::int64_t longest) {
  CacheOptions out = options;
  out.hca_mode = options.hca_mode == HcaMode::online ? HcaMode::raw : HcaMode::online;
  out.arrangement =
      options.arrangement == Arrangement::block_major ? Arrangement::layer_major : Arrangement::block_major;
  out.page_alignment = options.page_alignment == 576 ? 64 : 576;
  out.max_rewind_tokens = 0;
  out.max_requests = 2;
  out.spare_slots = 2;
  out.max_step_tokens = static_cast<int>(std::clamp<std::int64_t>(longest, 2 * kLargestChunk, kWholeTokens));
  out.num_blocks = 0;
  return out;
}

void append_from(StepDriver& driver, RequestId request, const History& history, std::int64_t start,
                 std::int64_t count) {
  StepTokens item{request, {}};
  for (std::int64_t i = 0; i < count; ++i) item.tokens.push_back(history.at(start + i));
  driver.step(std::span(&item, 1));
}

/// Replays the request in one step if `whole` allows it, or in chunks of 1 to kLargestChunk tokens.
void replay(StepDriver& driver, RequestId request, const Actor& actor, std::int64_t whole, WorkMonitor& monitor) {
  std::uint64_t state = static_cast<std::uint64_t>(actor.length);
  for (std::int64_t at = 0; at < actor.length;) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const std::int64_t chunk = whole > 0 ? whole : 1 + static_cast<std::int64_t>((state >> 33) % kLargestChunk);
    const std::int64_t count = std::min(chunk, actor.length - at);
    monitor.before_step();
    append_from(driver, request, actor.history, at, count);
    monitor.advance(count);
    at += count;
  }
}

/// An imported copy and its original give the same results when both continue.
Check check_import(KVCacheManager& manager, StepDriver& driver, RequestId original, const Actor& actor,
                   const Exported& exported, const InputGenerator& generator) {
  std::vector<std::int32_t> token_ids;
  for (std::int64_t t = 0; t < actor.length; ++t) token_ids.push_back(generator.token_id(actor.history.at(t)));
  const Expected<RequestId> copy = manager.import_image(exported.image, token_ids, exported.blocks);
  const char* name = "imported == original";
  if (!copy) return {name, false, fmt::format("no room: {}", to_string(copy.error()))};
  const std::int64_t count = std::min(kContinuation, manager.schema().options.max_context - actor.length);
  append_from(driver, original, actor.history, actor.length, count);
  append_from(driver, *copy, actor.history, actor.length, 1);
  append_from(driver, *copy, actor.history, actor.length + 1, count - 1);
  const std::string difference = compare(export_request(manager, *copy), export_request(manager, original));
  manager.release(*copy);
  return {name, difference.empty(), difference.empty() ? fmt::format("{} more tokens", count) : difference};
}

}  // namespace

Check check_memory(Scenario& scenario) {
  const std::int64_t planned = plan_memory(scenario.manager().schema()).total_bytes,
                     held = scenario.manager().memory_bytes();
  return {"memory == plan", planned == held,
          fmt::format("{} bytes, planned {}", group_digits(held), group_digits(planned))};
}

std::vector<Check> check_replays(Scenario& scenario, const RunSettings& settings, WorkMonitor& monitor) {
  std::vector<Check> out;
  const std::vector<const Actor*> actors = scenario.live();
  std::int64_t longest = 0;
  for (const Actor* actor : actors) longest = std::max(longest, actor->length);
  CacheOptions options = other_layout(scenario.manager().schema().options, longest);
  options.max_context = std::min(longest + kContinuation, settings.config.max_positions);
  DeviceTensors bound(scenario.backend());
  KVCacheManager manager(settings.config, options, scenario.backend());
  scenario.weights().bind(manager, bound);
  StepDriver driver(manager, scenario.backend(), scenario.generator());

  for (const Actor* actor : actors) {
    const bool whole = std::find(actor->roles.begin(), actor->roles.end(), Role::plain) != actor->roles.end();
    const Expected<RequestId> request = manager.admit();
    if (!request) throw std::runtime_error("the cache for replays has no room");
    replay(driver, *request, *actor, whole ? options.max_step_tokens : 0, monitor);
    const Exported played = export_request(scenario.manager(), actor->id);
    const std::string difference = compare(played, export_request(manager, *request));
    for (const Role role : actor->roles) {
      const bool skipped = role == Role::rewound && settings.options.max_rewind_tokens == 0;
      const std::string fine =
          skipped ? "nothing was rewound: --rewind is 0" : fmt::format("{} tokens, image and blocks", actor->length);
      out.push_back({check_name(role), difference.empty(), difference.empty() ? fine : difference});
    }
    if (whole) out.push_back(check_import(manager, driver, *request, *actor, played, scenario.generator()));
    manager.release(*request);
  }
  return out;
}

Check check_release(Scenario& scenario) {
  KVCacheManager& manager = scenario.manager();
  for (const Actor* actor : scenario.live()) manager.release(actor->id);
  const std::int32_t held = manager.allocator().num_held();
  return {"all returned", held == 0 && manager.num_requests() == 0,
          fmt::format("{} blocks and {} requests held after the last release", held, manager.num_requests())};
}

}  // namespace kv4::checks
