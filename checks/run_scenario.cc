#include "run_scenario.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "kv4/error.h"

namespace kv4::checks {
namespace {

constexpr std::int64_t kDecodes = 32;         // per request, before and again after the fork
constexpr std::int64_t kLongDraft = 40;       // drafts of a step that needed a spare slot
constexpr std::int64_t kLongestRewind = 128;  // limit, even if the cache can take back more
constexpr int kStepTokens = 512;
constexpr int kSpareSlots = 2;  // two prefill chunks in one step
constexpr int kPadding = 3;
constexpr int kPaddingEvery = 5;  // steps
constexpr std::int64_t kMinPrompt = 64;

template <class T>
T granted(const Expected<T>& value) {
  if (!value) throw std::runtime_error(fmt::format("the cache ran out of {}", to_string(value.error())));
  return *value;
}

std::int64_t decoded_tokens(int requests) { return kDecodes * (2 * requests + 3) + kLongDraft; }

}  // namespace

std::int64_t min_tokens(int requests) { return decoded_tokens(requests) + (requests + 2) * 2 * kMinPrompt; }

/// Prompt lengths grow like 1 : 2 : 3 ..., and none is round.
void Scenario::plan_lengths() {
  const int n = settings_.requests;
  const std::int64_t left = settings_.tokens - decoded_tokens(n);
  guest_prompt_ = std::clamp<std::int64_t>(left / 16, kMinPrompt, 777);
  const std::int64_t parts = std::int64_t{n} * (n + 1) / 2;
  for (int i = 0; i < n; ++i)
    prompts_.push_back(std::max(kMinPrompt, (left - 2 * guest_prompt_) * (i + 1) / parts - 7 * i - 1));
  planned_ = settings_.tokens;
}

CacheOptions Scenario::sized_options() const {
  const std::int64_t slack = 2 * kDecodes + kLongDraft + 4 * (kLongestRewind + 2);
  CacheOptions options = settings_.options;
  options.max_requests = settings_.requests + 2;  // the guest and the fork
  options.spare_slots = kSpareSlots;
  options.max_step_tokens = kStepTokens;
  options.max_context = *std::max_element(prompts_.begin(), prompts_.end()) + slack;
  if (options.max_context > settings_.config.max_positions) {
    throw Error(
        ErrorCode::bad_argument,
        fmt::format(
            "--tokens {} gives a request of {} tokens, the model has {} positions; lower --tokens or raise --requests",
            settings_.tokens, options.max_context, settings_.config.max_positions));
  }
  const int block = build_schema(settings_.config, options).block_tokens;
  const auto blocks = [&](std::int64_t length) { return (length + slack) / block + 2; };
  options.num_blocks = blocks(guest_prompt_) + blocks(prompts_.back());
  for (const std::int64_t prompt : prompts_) options.num_blocks += blocks(prompt);
  return options;
}

Scenario::Scenario(const RunSettings& settings)
    : settings_(settings),
      generator_(settings.seed),
      backend_(make_backend(settings.device, settings.threads)),
      bound_(backend_) {
  plan_lengths();
  const CacheOptions options = sized_options();
  weights_ = std::make_unique<SeededWeights>(build_schema(settings_.config, options), generator_);
  manager_ = std::make_unique<KVCacheManager>(settings_.config, options, backend_);
  weights_->bind(*manager_, bound_);
  if (settings_.device == "cpu")
    copy_ = std::make_unique<MemcpyBaseline>(settings_.threads);
  else
    copy_ = std::make_unique<DeviceCopyBaseline>(backend_);
  driver_ = std::make_unique<StepDriver>(*manager_, backend_, generator_, copy_.get());
}

std::vector<const Actor*> Scenario::live() const {
  std::vector<const Actor*> out;
  for (const Actor& actor : actors_) {
    if (actor.id != kNoRequest) out.push_back(&actor);
  }
  return out;
}

void Scenario::admit(Actor& actor) { actor.id = granted(manager_->admit()); }

StepTokens Scenario::take(Actor& actor, std::int64_t count) const {
  StepTokens item{actor.id, {}};
  for (std::int64_t i = 0; i < count; ++i) item.tokens.push_back(actor.history.at(actor.length + i));
  actor.length += count;
  return item;
}

std::vector<StepTokens> Scenario::next_step() {
  std::vector<StepTokens> items;
  std::int64_t budget = kStepTokens - kPadding;
  for (Actor& actor : actors_) {
    if (actor.id == kNoRequest || actor.length < actor.prompt || actor.decodes == 0) continue;
    items.push_back(take(actor, 1));
    --actor.decodes;
    --budget;
  }
  if (driver_->times().steps % kPaddingEvery == 1) items.push_back({kNoRequest, std::vector<TokenRef>(kPadding)});
  int chunks = 0;
  for (Actor& actor : actors_) {
    if (actor.id == kNoRequest || actor.length >= actor.prompt || budget == 0 || chunks == kSpareSlots) continue;
    const std::int64_t share = chunks == 0 ? std::max<std::int64_t>(1, budget * 5 / 8) : budget;
    const std::int64_t count = std::min(actor.prompt - actor.length, share);
    items.push_back(take(actor, count));
    budget -= count;
    ++chunks;
  }
  return items;
}

std::int64_t Scenario::step(const std::vector<StepTokens>& items) {
  monitor_->before_step();
  driver_->step(items);
  std::int64_t count = 0;
  for (const StepTokens& item : items)
    (item.request == kNoRequest ? padded_ : count) += static_cast<std::int64_t>(item.tokens.size());
  tokens_ += count;
  return count;
}

void Scenario::mix() {
  for (auto items = next_step();
       std::any_of(items.begin(), items.end(), [](const auto& i) { return i.request != kNoRequest; });
       items = next_step()) {
    monitor_->advance(step(items));
  }
}

/// Rejects drafts of the length that the cache can take back in place, then one through a spare slot. The first `keep`
/// tokens are right.
void Scenario::reject_drafts(Actor& actor) {
  const std::int64_t reach = std::min<std::int64_t>(settings_.options.max_rewind_tokens, kLongestRewind);
  if (reach == 0) return;
  for (const std::int64_t draft :
       {reach + 1, reach + 1, std::min<std::int64_t>(2, reach + 1), std::max(kLongDraft, reach + 2)}) {
    const std::int64_t keep = draft > reach + 1 ? draft - reach : 1 + rejected_ % std::max<std::int64_t>(1, draft - 1);
    const std::uint64_t wrong = ++streams_;
    StepTokens item = take(actor, draft);
    for (auto token = item.tokens.begin() + keep; token != item.tokens.end(); ++token) token->stream = wrong;
    std::vector<StepTokens> items{item};
    step(items);
    actor.length -= draft - keep;
    manager_->rewind(actor.id, actor.length);
    rejected_ += draft - keep;
    tokens_ -= draft - keep;
    monitor_->advance(keep);
  }
}

void Scenario::fork(std::size_t parent) {
  Actor child = actors_[parent];
  child.roles = {Role::fork};
  child.id = granted(manager_->fork(actors_[parent].id));
  child.history.switch_at(child.length, ++streams_);
  actors_.push_back(child);
}

void Scenario::replace(Actor& guest) {
  manager_->release(guest.id);
  guest.id = kNoRequest;
  actors_.push_back({.roles = {Role::successor}, .history = History(++streams_), .prompt = guest_prompt_ + 1});
  admit(actors_.back());
}

void Scenario::play(WorkMonitor& monitor) {
  monitor_ = &monitor;
  const std::size_t count = prompts_.size(), parent = std::min<std::size_t>(1, count - 1);
  for (std::size_t i = 0; i < count; ++i) {
    actors_.push_back({.roles = {}, .history = History(++streams_), .prompt = prompts_[i], .decodes = kDecodes});
    if (i == 0) actors_[i].roles.push_back(Role::rewound);
    if (i == parent) actors_[i].roles.push_back(Role::forked);
    if (i + 1 == count) actors_[i].roles.push_back(Role::plain);
    admit(actors_[i]);
  }
  actors_.push_back(
      {.roles = {Role::guest}, .history = History(++streams_), .prompt = guest_prompt_, .decodes = kDecodes});
  admit(actors_.back());
  mix();
  reject_drafts(actors_[0]);
  fork(parent);
  replace(actors_[count]);
  for (Actor& actor : actors_) actor.decodes = kDecodes;
  mix();
}

void Scenario::last_step(const std::function<void()>& inspect) {
  std::vector<StepTokens> items;
  for (Actor& actor : actors_) {
    if (actor.id != kNoRequest) items.push_back(take(actor, 1));
  }
  tokens_ += static_cast<std::int64_t>(items.size());
  items.push_back({kNoRequest, std::vector<TokenRef>(1)});
  ++padded_;
  driver_->step(items, inspect);
}

}  // namespace kv4::checks
