// Contexts that outlive the process: the next engine finds the saved prefix on disk and computes only the new tokens.
//
//   keep_prefixes [DIRECTORY]      DIRECTORY is left behind for 'kv4 store inspect'
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "kv4/tiered_prefix.h"

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// A window layer and an HCA layer at V4's real sizes; the token ids replace the layers' projections.
struct Engine {
  std::vector<float> bias = std::vector<float>(128 * 512, 0.0f), norm = std::vector<float>(512, 1.0f);
  kv4::KVCacheManager cache;

  explicit Engine(const kv4::CacheOptions& options) : cache(model(), options) {
    cache.bind_weights(1, {{bias.data(), {128, 512}}, {norm.data(), {512}}, {}, {}});
  }

  static kv4::ModelConfig model() {
    kv4::ModelConfig model = kv4::model_preset("v4-flash");
    model.kinds = {kv4::LayerKind::swa, kv4::LayerKind::hca};
    model.num_layers = 2;
    return model;
  }

  /// Computes the missing part of the prompt; returns its number of tokens.
  long long answer(const std::vector<std::int32_t>& prompt, const kv4::Admission& admission) {
    long long computed = 0;
    for (auto at = static_cast<std::size_t>(admission.resume_at); at < prompt.size();) {
      const std::size_t count = std::min<std::size_t>(256, prompt.size() - at);
      const std::span<const std::int32_t> ids = std::span(prompt).subspan(at, count);
      std::vector<float> rows;
      for (const std::int32_t id : ids) rows.insert(rows.end(), 512, static_cast<float>(id % 31) / 31.0f);
      const kv4::TensorView row(rows.data(), {static_cast<std::int64_t>(count), 512});
      const kv4::StepItem item{admission.request, static_cast<std::int32_t>(count), ids};
      const kv4::Step step = cache.prepare_forward({&item, 1}).value();
      cache.acquire(0).append({row, {}, {}, {}, {}});
      cache.acquire(1).append({row, row, row, {}, {}});
      cache.commit(step);
      at += count;
      computed += static_cast<long long>(count);
    }
    cache.release(admission.request);
    return computed;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string directory = argc > 1 ? argv[1] : "keep_prefixes.store";
  kv4::CacheOptions options;
  options.max_context = 8192;
  options.prefix.enabled = true;
  options.prefix.weights_id = "example weights 1";
  std::vector<std::int32_t> prompt;
  for (int i = 0; i < 3000; ++i) prompt.push_back(i * 7 % 1000);

  long long computed[2] = {};
  for (long long& tokens : computed) {  // two processes, one after the other
    Engine engine(options);
    kv4::Tiers tiers(engine.cache.schema(), {.host_bytes = 64 << 20, .directory = directory});
    kv4::TieredPrefix tiered(engine.cache, tiers);
    const auto found = tiered.admit({prompt, 0, "a secret of this tenant", {}}, Clock::now() + 5s);
    tokens = engine.answer(prompt, found.value());
    tiered.save_all(Clock::now() + 60s);  // between steps: tiered.save(16)
    if (tiers.close(Clock::now() + 60s).back() != kv4::tier::FlushStatus::durable) return 1;
  }
  std::printf("%s: %lld of %zu tokens computed, after a restart %lld\n", directory.c_str(), computed[0], prompt.size(),
              computed[1]);
  if (argc < 2) std::filesystem::remove_all(directory);
  return computed[0] == 3000 && computed[1] < 128 ? 0 : 1;
}
