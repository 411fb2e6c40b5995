#include <algorithm>
#include <random>

#include "base/check.h"
#include "replay_trace.h"

namespace kv4::cli {
namespace {

constexpr int kIdTokens = 128;
constexpr int kSystemPrompts = 8;

/// A kind of user: sizes in tokens, times in seconds; ranges are uniform, both ends included.
struct Habit {
  std::int64_t system_low, system_high;
  std::int64_t input_low, input_high;    // added per turn by the user or a tool
  std::int64_t output_low, output_high;  // added per turn by the model
  std::int64_t turns_low, turns_high;
  std::int64_t pause_low, pause_high;
};
constexpr Habit kConversation{512, 2048, 64, 2048, 64, 1024, 1, 12, 20, 600};
constexpr Habit kAgent{8192, 24576, 256, 4096, 64, 1024, 20, 120, 3, 60};
constexpr std::int64_t kArrival = 30;  // seconds to the next session, on average

/// std::uniform_int_distribution may differ between libraries; traces may not.
std::int64_t pick(std::mt19937_64& random, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
}

class Generator {
 public:
  explicit Generator(std::uint64_t seed) : random_(seed) {}

  /// Appends the requests of one session that begins at `start`.
  void add_session(bool agent, double start, std::vector<TraceRequest>& out) {
    const Habit& habit = agent ? kAgent : kConversation;
    std::vector<IdRun> ids{system_prompt(agent, habit)};
    std::int64_t full = ids[0].count, tokens = full * kIdTokens;  // ids cover full blocks
    double time = start;
    for (std::int64_t turn = pick(random_, habit.turns_low, habit.turns_high); turn > 0; --turn) {
      tokens += pick(random_, habit.input_low, habit.input_high);
      grow(ids, full, tokens);
      const std::int64_t output = pick(random_, habit.output_low, habit.output_high);
      out.push_back({.time_s = time, .input_tokens = tokens, .output_tokens = output, .ids = ids});
      tokens += output;
      time += static_cast<double>(pick(random_, habit.pause_low, habit.pause_high));
    }
  }

  double next_arrival() { return static_cast<double>(pick(random_, 1, 2 * kArrival - 1)); }

 private:
  IdRun system_prompt(bool agent, const Habit& habit) {
    IdRun& prompt = prompts_[agent ? 1 : 0][random_() % kSystemPrompts];
    if (prompt.count == 0) prompt = take(pick(random_, habit.system_low, habit.system_high) / kIdTokens);
    return prompt;
  }
  IdRun take(std::int64_t count) {
    const IdRun run{next_id_, count};
    next_id_ += count;
    return run;
  }
  void grow(std::vector<IdRun>& ids, std::int64_t& full, std::int64_t tokens) {
    const std::int64_t more = tokens / kIdTokens - full;
    if (more > 0) ids.push_back(take(more));
    full += more;
  }

  std::mt19937_64 random_;
  std::int64_t next_id_ = 0;
  IdRun prompts_[2][kSystemPrompts];
};

}  // namespace

Trace generate_trace(std::uint64_t seed, std::int64_t requests) {
  require(requests >= 1, ErrorCode::bad_argument, "{} requests; a generated trace has at least 1", requests);
  Generator generator(seed);
  Trace trace{.id_tokens = kIdTokens, .requests = {}};
  std::int64_t of_kind[2] = {0, 0};  // conversations, agents: equal numbers of requests
  for (double start = 0; of_kind[0] + of_kind[1] < requests; start += generator.next_arrival()) {
    const bool agent = of_kind[1] < of_kind[0];
    const std::size_t before = trace.requests.size();
    generator.add_session(agent, start, trace.requests);
    of_kind[agent ? 1 : 0] += static_cast<std::int64_t>(trace.requests.size() - before);
  }
  std::stable_sort(trace.requests.begin(), trace.requests.end(),
                   [](const TraceRequest& a, const TraceRequest& b) { return a.time_s < b.time_s; });
  trace.requests.resize(requests);
  return trace;
}

}  // namespace kv4::cli
