#include "replay_data.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "base/check.h"
#include "checks/copy_baseline.h"
#include "checks/device_tensors.h"
#include "checks/inputs.h"
#include "checks/run_steps.h"
#include "interrupts.h"
#include "kv4/tiered_prefix.h"
#include "tier/tiers_impl.h"

namespace kv4::cli {

using namespace checks;

namespace {

constexpr int kRunning = 4;                  // requests at once
constexpr std::int64_t kMostGenerated = 32;  // tokens of an answer that are actually appended
constexpr int kChunk = 512, kColdChunk = 384;
constexpr std::chrono::seconds kRemoteTrial(10);  // for servers to answer before the replay begins

/// The tokens of one request, as streams named by the trace's ids.
class Text {
 public:
  Text(const Trace& trace, const TraceRequest& request, std::uint64_t number)
      : id_tokens_(trace.id_tokens), input_tokens_(request.input_tokens), own_(~number - 1) {
    for (const IdRun& run : request.ids)
      for (std::int64_t i = 0; i < run.count; ++i) ids_.push_back(run.first + i);
  }
  /// The answer and the prompt's tokens without an id are this request's own.
  TokenRef at(std::int64_t position) const {
    const std::int64_t id = position / id_tokens_;
    const bool named = position < input_tokens_ && id < static_cast<std::int64_t>(ids_.size());
    return {named ? static_cast<std::uint64_t>(ids_[id]) : own_, position};
  }
  std::vector<TokenRef> range(std::int64_t begin, std::int64_t end) const {
    std::vector<TokenRef> out;
    for (std::int64_t p = begin; p < end; ++p) out.push_back(at(p));
    return out;
  }

 private:
  std::int64_t id_tokens_, input_tokens_;
  std::uint64_t own_;
  std::vector<std::int64_t> ids_;
};

/// A cache with its weights and a driver of its steps.
struct Engine {
  Engine(const ModelConfig& config, const CacheOptions& options, const DataReplayOptions& replay,
         const InputGenerator& generator)
      : backend(make_backend(replay.device, replay.threads)),
        weights(build_schema(config, options), generator),
        bound(backend),
        manager(config, options, backend),
        driver(manager, backend, generator) {
    weights.bind(manager, bound);
  }
  std::shared_ptr<Backend> backend;
  SeededWeights weights;
  DeviceTensors bound;
  KVCacheManager manager;
  StepDriver driver;
};

bool has_tiers(const TiersOptions& options) {
  return options.host_bytes > 0 || !options.directory.empty() || !options.servers.empty();
}

std::int64_t count_differences(std::span<const std::byte> a, std::span<const std::byte> b) {
  std::int64_t out = static_cast<std::int64_t>(std::max(a.size(), b.size()) - std::min(a.size(), b.size()));
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) out += a[i] != b[i];
  return out;
}

class DataReplay {
 public:
  DataReplay(const Trace& trace, const DataReplayOptions& options)
      : trace_(trace),
        options_(options),
        generator_(options.seed),
        random_(options.seed),
        warm_(options.config, warm_options(), options, generator_),
        cold_(options.config, cold_options(), options, generator_) {
    result_.cache.tenants.resize(options.tenants);
    result_.cache.capacity_ids = options.capacity_tokens / trace.id_tokens;
    result_.cache.share_tokens = warm_.manager.schema().options.prefix.tenant_shares[0] * 128;
    if (has_tiers(options.tiers)) {
      TiersOptions below = options.tiers;
      below.backend = warm_.backend;
      tiers_.emplace(warm_.manager.schema(), below);
      if (!options.remote_optional && !below.servers.empty()) try_remote();
      tiered_.emplace(warm_.manager, *tiers_);
    }
    if (!options.status.empty())
      status_.emplace(warm_.manager, options.status,
                      StatusOptions{.tiers = tiers_ ? &*tiers_ : nullptr, .keys = options.tiers.keys});
  }

  DataReplayResult run() {
    const auto requests = static_cast<std::int64_t>(trace_.requests.size());
    const std::int64_t interval = std::max<std::int64_t>(1, (requests + kReplayIntervals - 1) / kReplayIntervals);
    std::int64_t number = 0;
    for (const TraceRequest& request : trace_.requests) {
      if (interrupted()) break;
      if (number % interval == 0) result_.cache.over_time.emplace_back();
      serve(request, static_cast<std::uint64_t>(number++));
      if (options_.request_done) options_.request_done();
      watch(false);
    }
    while (!running_.empty()) retire();
    const PrefixStatistics kept = warm_.manager.prefix_statistics();
    const CacheSchema& schema = warm_.manager.schema();
    const std::vector<std::int64_t> lengths(schema.num_groups, schema.block_tokens);
    result_.stored_bytes = kept.blocks * schema.block_bytes + kept.snapshots * image_bytes(schema, lengths);
    if (tiers_) count_tiers();
    watch(true);
    return std::move(result_);
  }

 private:
  struct Running {
    RequestId id;
    Text text;
    std::int64_t length, end;
  };

  CacheOptions warm_options() const {
    CacheOptions out = options_.cache;
    out.max_requests = kRunning + 1;
    out.spare_slots = 1;
    out.max_step_tokens = kChunk;
    out.num_blocks = options_.capacity_tokens / 128;
    out.max_context = out.num_blocks * 128;
    out.prefix.enabled = true;
    out.prefix.weights_id = "replay";
    out.prefix.num_snapshots = static_cast<int>(std::clamp<std::int64_t>(out.num_blocks / 8, 16, 4096));
    out.prefix.tenant_shares = equal_shares(out.num_blocks, options_.tenants);
    return out;
  }
  CacheOptions cold_options() const {
    CacheOptions out = warm_options();
    out.max_requests = 1;
    out.max_step_tokens = kColdChunk;
    out.prefix = {};
    return out;
  }

  static tier::Deadline in(std::chrono::seconds time) { return std::chrono::steady_clock::now() + time; }

  /// Throws Error where servers do not work, so that a long replay does not start.
  void try_remote() {
    const tier::RecordId any{};
    const tier::Deadline end = in(kRemoteTrial);
    for (bool answered = false; !answered && std::chrono::steady_clock::now() < end;) {
      tier::TierChain::Ticket asked = Tiers::Impl::of(*tiers_).chain.exists({&any, 1}, end);
      (void)asked.wait(end);
      answered = asked.take()[0].status != tier::GetStatus::failed;
      for (const TierReport& tier : tiers_->report())
        require(tier.failure.empty(), ErrorCode::bad_state,
                "the {} tier does not work: {} ({}); --remote-optional replays without it", tier.name,
                tier.failure_detail, tier.failure);
      if (!answered) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      require(answered || interrupted() || std::chrono::steady_clock::now() < end, ErrorCode::bad_state,
              "the remote tier gives no answer within {} s; --remote-optional replays without it",
              kRemoteTrial.count());
    }
  }

  void count_tiers() {
    tiers_->flush(in(std::chrono::seconds(interrupted() ? 2 : 60)));
    result_.loaded_blocks = tiered_->statistics().loaded_blocks;
    result_.tiers = tiers_->report();
  }

  void watch(bool last) {
    if (options_.watch)
      options_.watch({result_.cache.total, result_.skipped_requests, warm_.manager, tiers_ ? &*tiers_ : nullptr, last});
  }

  void retire() {
    warm_.manager.release(running_.front().id);
    running_.pop_front();
  }

  /// Nullopt: the prompt does not fit, even when all other requests have left.
  std::optional<Admission> admit(const Prompt& prompt) {
    for (;;) {
      const Stopwatch watch;
      const Expected<Admission> out =
          tiered_ ? tiered_->admit(prompt, in(std::chrono::seconds(10))) : warm_.manager.admit(prompt);
      if (out) {
        result_.admit_s.push_back(watch.seconds());
        return *out;
      }
      if (running_.empty()) return std::nullopt;
      retire();
    }
  }

  /// Runs the newest request's next chunk and a token of each other one. False: no room, and no request left to retire.
  bool step(Running& newest, std::int64_t prompt_tokens) {
    for (;;) {
      std::vector<StepTokens> items;
      for (const Running& other : running_)
        if (other.length < other.end) items.push_back({other.id, {other.text.at(other.length)}});
      const std::int64_t room = kChunk - static_cast<std::int64_t>(items.size());
      const std::int64_t to = std::min(prompt_tokens, newest.length + room);
      items.push_back({newest.id, newest.text.range(newest.length, to)});
      if (warm_.driver.try_step(items) == Shortage::none) {
        for (Running& other : running_) other.length += other.length < other.end;
        result_.computed_tokens += static_cast<std::int64_t>(items.size()) - 1 + to - newest.length;
        newest.length = to;
        if (status_) status_->publish();
        return true;
      }
      if (running_.empty()) return false;
      retire();
    }
  }

  void serve(const TraceRequest& request, std::uint64_t number) {
    const std::int64_t tokens = request.input_tokens;
    Text text(trace_, request, number);
    std::vector<std::int32_t> ids;
    for (std::int64_t p = 0; p < tokens; ++p) ids.push_back(generator_.token_id(text.at(p)));
    const TenantId tenant = tenant_of(request, options_.tenants);
    const std::string salt = "tenant " + std::to_string(tenant);
    if (tokens + kMostGenerated > warm_.manager.schema().options.max_context) {
      ++result_.skipped_requests;
      return;
    }
    const std::optional<Admission> admission = admit({.token_ids = ids, .tenant = tenant, .salt = salt, .extra = {}});
    if (!admission) {
      ++result_.skipped_requests;
      return;
    }
    Running newest{admission->request, std::move(text), admission->resume_at,
                   tokens + std::min(request.output_tokens, kMostGenerated)};
    const Stopwatch watch;
    while (newest.length < tokens) {
      if (step(newest, tokens)) continue;
      warm_.manager.release(newest.id);
      result_.admit_s.pop_back();
      ++result_.skipped_requests;
      return;
    }
    result_.prefill_s.push_back(watch.seconds());
    count(request, *admission);
    if (std::generate_canonical<double, 53>(random_) < options_.verify) verify(newest, tokens);
    running_.push_back(std::move(newest));
    if (tiered_) tiered_->save(std::numeric_limits<std::int64_t>::max());
    if (running_.size() > kRunning) retire();
  }

  void count(const TraceRequest& request, const Admission& admission) {
    ReplayCounts counts{.requests = 1, .ids = request.input_tokens / 128, .input_tokens = request.input_tokens};
    counts.hit_tokens = admission.usable_tokens;
    counts.hit_ids = admission.usable_tokens / 128;
    counts.hits = admission.usable_tokens > 0;
    counts.recomputed_tokens = admission.usable_tokens - admission.resume_at;
    const std::int64_t evicted = warm_.manager.prefix_statistics().evicted_blocks;
    counts.evicted_ids = evicted - evicted_;
    evicted_ = evicted;
    ReplayResult& cache = result_.cache;
    cache.total.add(counts);
    cache.over_time.back().add(counts);
    cache.tenants[tenant_of(request, options_.tenants)].add(counts);
    if (counts.hits > 0) cache.recomputed.push_back(counts.recomputed_tokens);
  }

  /// Appends the same tokens to an empty cache, in other chunks, and compares.
  void verify(const Running& warm, std::int64_t tokens) {
    const RequestId id = cold_.manager.admit().value();
    for (std::int64_t at = 0; at < tokens; at += kColdChunk) {
      const StepTokens chunk{id, warm.text.range(at, std::min(tokens, at + kColdChunk))};
      cold_.driver.step({&chunk, 1});
    }
    result_.wrong_bytes +=
        count_differences(cold_.manager.export_image(id).bytes, warm_.manager.export_image(warm.id).bytes) +
        count_differences(cold_.manager.export_blocks(id), warm_.manager.export_blocks(warm.id));
    result_.verified_blocks += static_cast<std::int64_t>(cold_.manager.blocks(id).size());
    ++result_.verified_requests;
    cold_.manager.release(id);
  }

  const Trace& trace_;
  const DataReplayOptions& options_;
  InputGenerator generator_;
  std::mt19937_64 random_;
  Engine warm_, cold_;
  std::optional<Tiers> tiers_;
  std::optional<TieredPrefix> tiered_;
  std::optional<StatusFolder> status_;
  std::deque<Running> running_;
  std::int64_t evicted_ = 0;
  DataReplayResult result_;
};

}  // namespace

DataReplayResult replay_data(const Trace& trace, const DataReplayOptions& options) {
  return DataReplay(trace, options).run();
}

}  // namespace kv4::cli
