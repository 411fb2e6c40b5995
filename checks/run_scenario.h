// The scenario of `kv4 run`: several requests at once that are prefilled in chunks, decoded, drafted and rewound,
// forked, released and replaced, in steps that mix all of these.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "inputs.h"
#include "run_steps.h"
#include "work_monitor.h"

namespace kv4::checks {

struct RunSettings {
  ModelConfig config;
  CacheOptions options;  // formats; sizes are filled in
  int requests = 4;
  std::int64_t tokens = 16384;
  std::uint64_t seed = 1;
  int threads = 1;
  std::string device = "cpu";  // a name for make_backend
};
std::int64_t min_tokens(int requests);

/// The roles of requests; with few requests, one has several roles.
enum class Role : std::uint8_t { plain, rewound, forked, fork, guest, successor };

struct Actor {
  std::vector<Role> roles;
  RequestId id = kNoRequest;
  History history;
  std::int64_t length = 0;
  std::int64_t prompt = 0;   // prefilled until here
  std::int64_t decodes = 0;  // decodes left
};

class Scenario {
 public:
  explicit Scenario(const RunSettings& settings);

  void play(WorkMonitor& monitor);
  /// One more token for every request and a padded item; `inspect` sees the open step. Item i is live()[i]; the padding
  /// comes last.
  void last_step(const std::function<void()>& inspect);

  KVCacheManager& manager() { return *manager_; }
  const std::shared_ptr<Backend>& backend() const { return backend_; }
  const SeededWeights& weights() const { return *weights_; }
  const InputGenerator& generator() const { return generator_; }
  std::vector<const Actor*> live() const;
  const StepTimes& times() const { return driver_->times(); }
  std::int64_t tokens() const { return tokens_; }      // committed and kept
  std::int64_t rejected() const { return rejected_; }  // rewound
  std::int64_t padded() const { return padded_; }
  std::int64_t planned_tokens() const { return planned_; }

 private:
  CacheOptions sized_options() const;
  void plan_lengths();
  void admit(Actor& actor);
  void mix();  // runs steps until no request has work left
  std::vector<StepTokens> next_step();
  StepTokens take(Actor& actor, std::int64_t count) const;
  std::int64_t step(const std::vector<StepTokens>& items);  // returns the number of appended tokens
  void reject_drafts(Actor& actor);
  void fork(std::size_t parent);
  void replace(Actor& guest);

  RunSettings settings_;
  InputGenerator generator_;
  std::vector<std::int64_t> prompts_;
  std::int64_t guest_prompt_ = 0;  // of the guest and its successor
  std::int64_t planned_ = 0;
  std::shared_ptr<Backend> backend_;
  std::unique_ptr<SeededWeights> weights_;
  DeviceTensors bound_;  // the weights in the backend's memory
  std::unique_ptr<KVCacheManager> manager_;
  std::unique_ptr<CopyBaseline> copy_;
  std::unique_ptr<StepDriver> driver_;
  std::vector<Actor> actors_;
  WorkMonitor* monitor_ = nullptr;
  std::uint64_t streams_ = 0;
  std::int64_t tokens_ = 0, rejected_ = 0, padded_ = 0;
};

}  // namespace kv4::checks
