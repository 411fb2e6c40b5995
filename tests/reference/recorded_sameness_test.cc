// The sameness of tests/property on recorded inputs: any split, every layout, rewinds and images give the same bytes in
// every format.
#include <filesystem>

#include "backend/cpu/cpu_backend.h"
#include "checks/safetensors.h"
#include "support/harness.h"

namespace kv4::test {
namespace {

using checks::SafeTensors;

// One recorded layer and its inputs by position.
struct RecordedLayer {
  ModelConfig config;
  std::int64_t tokens = 0;
  std::vector<float> rows, kv, gate, index_kv, index_gate, bias, norm, index_bias, index_norm;
  LayerWeights weights;

  RecordedLayer(const std::string& directory, LayerKind kind) {
    const std::string name = kind == LayerKind::swa ? "swa" : kind == LayerKind::csa ? "csa" : "hca";
    const SafeTensors file = checks::load_safetensors(directory + "/hf_" + name + ".safetensors");
    const int head = static_cast<int>(file.metadata_int("head_dim", 1, 4096)),
              index = static_cast<int>(file.metadata_int("index_head_dim", 1, 4096));
    config = base_config(head, static_cast<int>(file.metadata_int("rope_dim", 2, 512)), index,
                         static_cast<int>(file.metadata_int("sliding_window", 1, 4096)), 4, 128, {kind});
    tokens = file.metadata_int("n_tokens", 1, 1 << 20);
    rows = file.floats("swa_kv", {tokens, head});
    if (kind == LayerKind::swa) return;
    const std::int64_t columns = kind == LayerKind::csa ? 2 * head : head;
    kv = file.floats("comp_kv", {tokens, columns});
    gate = file.floats("comp_gate", {tokens, columns});
    bias = file.floats("comp_position_bias", {-1, columns});
    norm = file.floats("comp_norm_weight", {head});
    const int ratio = static_cast<int>(static_cast<std::int64_t>(bias.size()) / columns);
    (kind == LayerKind::csa ? config.csa_ratio : config.hca_ratio) = ratio;
    weights.position_bias = {bias.data(), {ratio, columns}};
    weights.norm_weight = {norm.data(), {head}};
    if (kind == LayerKind::hca) return;
    index_kv = file.floats("idx_kv", {tokens, 2 * index});
    index_gate = file.floats("idx_gate", {tokens, 2 * index});
    index_bias = file.floats("idx_position_bias", {ratio, 2 * index});
    index_norm = file.floats("idx_norm_weight", {index});
    weights.index_position_bias = {index_bias.data(), {ratio, 2 * index}};
    weights.index_norm_weight = {index_norm.data(), {index}};
  }

  ConstTensorView whole(const std::vector<float>& all) const {
    if (all.empty()) return {};
    return {all.data(), {tokens, static_cast<std::int64_t>(all.size()) / tokens}};
  }
};

// A recorded layer in a backend's memory.
class PlacedLayer {
 public:
  PlacedLayer(const RecordedLayer& layer, std::shared_ptr<Backend> backend) : twins_(std::move(backend)) {
    weights = layer.weights;
    for (ConstTensorView* t :
         {&weights.position_bias, &weights.norm_weight, &weights.index_position_bias, &weights.index_norm_weight})
      *t = twins_.put(*t);
    const std::vector<float>* const host[] = {&layer.rows, &layer.kv, &layer.gate, &layer.index_kv, &layer.index_gate};
    for (int i = 0; i < 5; ++i) inputs_[i] = twins_.put(layer.whole(*host[i]));
    twins_.send();
  }

  AppendInputs part(std::int64_t first, std::int64_t count) const {
    ConstTensorView parts[5];
    for (int i = 0; i < 5; ++i) {
      if (inputs_[i].empty()) continue;
      parts[i] = inputs_[i];
      parts[i].data = static_cast<const float*>(parts[i].data) + first * parts[i].strides[0];
      parts[i].shape[0] = count;
    }
    return {parts[0], parts[1], parts[2], parts[3], parts[4]};
  }

  LayerWeights weights;

 private:
  Twins twins_;
  ConstTensorView inputs_[5];
};

void append(KVCacheManager& cache, RequestId request, const PlacedLayer& layer, std::int64_t count) {
  const std::int64_t first = cache.length(request);
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(count), 1);
  const StepItem item{request, static_cast<std::int32_t>(count), ids, first};
  const Step step = cache.prepare_forward({&item, 1}).value();
  cache.acquire(0).append(layer.part(first, count));
  cache.commit(step);
}

std::unique_ptr<KVCacheManager> make_cache(const RecordedLayer& layer, const PlacedLayer& placed,
                                           const CacheOptions& options, std::shared_ptr<Backend> backend) {
  auto cache = std::make_unique<KVCacheManager>(layer.config, options, std::move(backend));
  if (!layer.kv.empty()) cache->bind_weights(0, placed.weights);
  return cache;
}

void check_directory(const std::string& directory) {
  Random random(31);
  for (LayerKind kind : {LayerKind::swa, LayerKind::csa, LayerKind::hca}) {
    const RecordedLayer layer(directory, kind);
    const std::shared_ptr<Backend> judge = cpu::make_cpu_backend_on(1, cpu::plain_row_kernels()),
                                   tested = test_backend(2);
    const PlacedLayer here(layer, judge), there(layer, tested);
    for (const FormatCase& f : format_cases()) {
      CacheOptions o = options_for(f);
      o.max_context = o.max_step_tokens = static_cast<int>(layer.tokens) + 8;
      o.hca_mode = HcaMode::raw;
      const auto single = make_cache(layer, here, o, judge);
      const RequestId one = single->admit().value();
      for (std::int64_t t = 0; t < layer.tokens; ++t) append(*single, one, here, 1);
      const Bytes want = bytes_of(*single, one);

      o.hca_mode = HcaMode::online;
      o.max_rewind_tokens = 6;
      o.arrangement = Arrangement::layer_major;
      const auto cache = make_cache(layer, there, o, tested);
      const std::string what = std::string(to_string(kind)) + " " + f.name();
      const RequestId whole = cache->admit().value(), pieces = cache->admit().value();
      append(*cache, whole, there, layer.tokens);
      expect_same(bytes_of(*cache, whole), want, what + " whole");
      while (cache->length(pieces) < layer.tokens) {  // random steps, some of them aborted and repeated
        append(*cache, pieces, there,
               std::min(layer.tokens - cache->length(pieces), random.between(1, random.below(3) ? 5 : 60)));
        if (random.below(3) == 0)
          cache->rewind(pieces, random.between(cache->rewind_floor(pieces), cache->length(pieces)));
      }
      expect_same(bytes_of(*cache, pieces), want, what + " in pieces");
    }
  }
}

TEST(RecordedSameness, OwnVectors) { check_directory(source_path("tests/reference/vectors")); }

TEST(RecordedSameness, RecordedVectors) {
  const std::string directory = source_path("../shared/golden");
  if (!std::filesystem::exists(directory)) GTEST_SKIP() << "no recorded vectors beside the checkout (../shared/golden)";
  check_directory(directory);
}

}  // namespace
}  // namespace kv4::test
