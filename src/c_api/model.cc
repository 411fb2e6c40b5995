// Models, backends, memory plans: the calls that need no cache.
#include <string>
#include <vector>

#include "c_api/handles.h"
#include "c_api/options.h"

using namespace kv4::c_api;

namespace {

constexpr kv4::LayerKind kKinds[] = {kv4::LayerKind::swa, kv4::LayerKind::csa, kv4::LayerKind::hca};

}  // namespace

kv4_status kv4_model_preset(const char* name, kv4_model** out) {
  return guarded([&] { give_new(out, [&] { return new kv4_model{kv4::model_preset(c_text(name, "name"))}; }); });
}

kv4_status kv4_model_parse(const char* json, size_t length, kv4_model** out) {
  return guarded([&] {
    require_set(json, "json");
    give_new(out, [&] { return new kv4_model{kv4::parse_model_config({json, length})}; });
  });
}

kv4_status kv4_model_load(const char* path, kv4_model** out) {
  return guarded(
      [&] { give_new(out, [&] { return new kv4_model{kv4::load_model_config(std::string(c_text(path, "path")))}; }); });
}

kv4_status kv4_model_with_layers(const kv4_model* model, const kv4_layer_kind* kinds, int32_t num_layers,
                                 kv4_model** out) {
  return guarded([&] {
    kv4::ModelConfig config = require_set(model, "model").config;
    kv4::require(!config.shares_entries(), kv4::ErrorCode::bad_argument,
                 "{} is a model of V4.1, whose layers share entries; stacks are made of V4's layers", config.name);
    config.kinds.clear();
    for (const kv4_layer_kind kind : list(kinds, num_layers, "kinds")) {
      kv4::require(kind >= KV4_LAYER_KIND_SWA && kind <= KV4_LAYER_KIND_HCA, kv4::ErrorCode::bad_argument,
                   "layer {} is of kind {}; KV4_LAYER_KIND_SWA (0), KV4_LAYER_KIND_CSA (1) or KV4_LAYER_KIND_HCA (2)",
                   config.kinds.size(), static_cast<int>(kind));
      config.kinds.push_back(kKinds[kind]);
    }
    config.num_layers = num_layers;
    config.draft_hint = 0;
    kv4::validate(config);
    give_new(out, [&] { return new kv4_model{std::move(config)}; });
  });
}

void kv4_model_free(kv4_model* model) { delete model; }

void kv4_model_info_init(kv4_model_info* info, size_t size) { init_struct(info, size, sized<kv4_model_info>()); }

kv4_status kv4_model_get_info(const kv4_model* model, kv4_model_info* info) {
  return guarded([&] {
    const kv4::ModelConfig& config = require_set(model, "model").config;
    auto value = sized<kv4_model_info>();
    value.num_layers = config.num_layers;
    value.num_query_heads = config.num_query_heads;
    value.head_dim = config.head_dim;
    value.rope_dim = config.rope_dim;
    value.window = config.window;
    value.index_heads = config.index_heads;
    value.index_dim = config.index_dim;
    value.index_topk = config.index_topk;
    value.csa_ratio = config.csa_ratio;
    value.hca_ratio = config.hca_ratio;
    value.max_positions = config.max_positions;
    write_struct(info, value, "info");
  });
}

kv4_status kv4_model_layer_kind(const kv4_model* model, int32_t layer, kv4_layer_kind* out) {
  return guarded([&] {
    const kv4::ModelConfig& config = require_set(model, "model").config;
    kv4::require(layer >= 0 && layer < config.num_layers, kv4::ErrorCode::bad_argument, "layer {}; 0 to {}", layer,
                 config.num_layers - 1);
    const kv4::LayerKind kind = config.kinds[static_cast<std::size_t>(layer)];
    require_set(out, "out") = kind == kv4::LayerKind::swa   ? KV4_LAYER_KIND_SWA
                              : kind == kv4::LayerKind::csa ? KV4_LAYER_KIND_CSA
                              : kind == kv4::LayerKind::hca ? KV4_LAYER_KIND_HCA
                                                            : KV4_LAYER_KIND_SHARED;
  });
}

kv4_status kv4_backend_cpu(int32_t threads, kv4_backend** out) {
  return guarded([&] {
    give_new(out, [&] { return new kv4_backend{kv4::make_cpu_backend(threads), kDeviceCpu, 0}; });
  });
}

kv4_status kv4_backend_cuda(int32_t device, void* stream, kv4_backend** out) {
  return guarded([&] {
    give_new(out, [&] { return new kv4_backend{kv4::make_cuda_backend(device, {stream}), kDeviceCuda, device}; });
  });
}

void kv4_backend_free(kv4_backend* backend) { delete backend; }

void kv4_cache_options_init(kv4_cache_options* options, size_t size) {
  init_struct(options, size, cache_options_defaults());
}

void kv4_memory_plan_init(kv4_memory_plan* plan, size_t size) { init_struct(plan, size, sized<kv4_memory_plan>()); }

kv4_status kv4_model_plan_memory(const kv4_model* model, const kv4_cache_options* options, kv4_memory_plan* out) {
  return guarded([&] {
    const kv4::MemoryPlan plan =
        kv4::plan_memory(kv4::build_schema(require_set(model, "model").config, cache_options(options)));
    auto value = sized<kv4_memory_plan>();
    value.block_bytes = plan.block_bytes;
    value.state_bytes_per_request = plan.state_bytes_per_request;
    value.draft_bytes_per_request = plan.draft_bytes_per_request;
    value.blocks = plan.blocks;
    value.total_bytes = plan.total_bytes;
    value.bytes_per_token = plan.bytes_per_token;
    write_struct(out, value, "out");
  });
}
