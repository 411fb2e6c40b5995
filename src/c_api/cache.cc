// A cache, its requests, its steps and its statistics.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "c_api/handles.h"
#include "c_api/options.h"
#include "kv4/statistics.h"

using namespace kv4::c_api;

namespace {

kv4_step step_of(const kv4::Step& from) {
  auto value = sized<kv4_step>();
  value.id = from.id;
  value.num_tokens = from.num_tokens;
  value.num_items = from.num_items;
  value.group = from.group;
  return value;
}

kv4::Step step_of(const kv4_step* step) {
  const kv4_step in = read_struct(step, sized<kv4_step>(), "step");
  return {.id = in.id, .num_tokens = in.num_tokens, .num_items = in.num_items, .group = in.group};
}

kv4_step_item item_defaults() {
  auto value = sized<kv4_step_item>();
  value.request = KV4_NO_REQUEST;
  value.count = 1;
  value.position = -1;
  return value;
}

/// The tensor that kv4_cache_pool gives away; its deleter frees it.
struct PoolTensor {
  kv4_managed_tensor managed{};
  std::int64_t shape[1] = {};
};

}  // namespace

kv4_status kv4_cache_new(const kv4_model* model, const kv4_cache_options* options, kv4_backend* backend,
                         kv4_cache** out) {
  return guarded([&] {
    const kv4::ModelConfig& config = require_set(model, "model").config;
    const kv4_backend on = backend != nullptr ? *backend : kv4_backend{kv4::make_cpu_backend(), kDeviceCpu, 0};
    give_new(out, [&] { return new kv4_cache{on, {config, cache_options(options), on.backend}}; });
  });
}

void kv4_cache_free(kv4_cache* cache) { delete cache; }

void kv4_cache_info_init(kv4_cache_info* info, size_t size) { init_struct(info, size, sized<kv4_cache_info>()); }

kv4_status kv4_cache_get_info(const kv4_cache* cache, kv4_cache_info* info) {
  return guarded([&] {
    const kv4::KVCacheManager& from = manager(cache);
    auto value = sized<kv4_cache_info>();
    value.num_blocks = from.allocator().num_blocks();
    value.held_blocks = from.allocator().num_held();
    value.available_blocks = from.allocator().num_available();
    value.block_tokens = from.schema().block_tokens;
    value.block_bytes = from.schema().block_bytes;
    value.block_image_bytes = from.schema().block_image_bytes;
    value.memory_bytes = from.memory_bytes();
    value.num_requests = from.num_requests();
    value.layout_id = from.schema().layout_id;
    write_struct(info, value, "info");
  });
}

kv4_status kv4_cache_pool(kv4_cache* cache, kv4_managed_tensor** out) {
  return guarded([&] {
    const kv4::PagedKVPool& pool = manager(cache).kv_pool();
    require_set(out, "out");
    auto owned = std::make_unique<PoolTensor>();
    owned->shape[0] = pool.memory_bytes();
    kv4_tensor& tensor = owned->managed.tensor;
    tensor.data = pool.base();
    tensor.device_type = cache->backend.device_type;
    tensor.device_id = cache->backend.device_id;
    tensor.ndim = 1;
    tensor.dtype_code = 1;
    tensor.dtype_bits = 8;
    tensor.dtype_lanes = 1;
    tensor.shape = owned->shape;
    owned->managed.manager_ctx = owned.get();
    owned->managed.deleter = [](kv4_managed_tensor* self) { delete static_cast<PoolTensor*>(self->manager_ctx); };
    *out = &owned.release()->managed;
  });
}

void kv4_layer_weights_init(kv4_layer_weights* weights, size_t size) {
  init_struct(weights, size, sized<kv4_layer_weights>());
}

kv4_status kv4_cache_bind_weights(kv4_cache* cache, int32_t layer, const kv4_layer_weights* weights) {
  return guarded([&] {
    kv4::KVCacheManager& to = manager(cache);
    const kv4_layer_weights in = read_struct(weights, sized<kv4_layer_weights>(), "weights");
    const auto view = [&](const kv4_tensor* tensor, const char* what) { return optional_tensor(*cache, tensor, what); };
    to.bind_weights(
        layer, {view(in.position_bias, "position_bias"), view(in.norm_weight, "norm_weight"),
                view(in.index_position_bias, "index_position_bias"), view(in.index_norm_weight, "index_norm_weight"),
                view(in.raw_norm_weight, "raw_norm_weight")});
  });
}

kv4_status kv4_cache_bind_rope_table(kv4_cache* cache, const kv4_tensor* cos, const kv4_tensor* sin) {
  return guarded([&] { manager(cache).bind_rope_table(tensor(*cache, cos, "cos"), tensor(*cache, sin, "sin")); });
}

kv4_status kv4_cache_set_stream(kv4_cache* cache, void* stream) {
  return guarded([&] { manager(cache).set_stream({stream}); });
}

kv4_status kv4_cache_synchronize(kv4_cache* cache) {
  return guarded([&] { manager(cache).synchronize(); });
}

// --- requests --------------------------------------------------------------------------------------------------------

kv4_status kv4_cache_admit(kv4_cache* cache, kv4_request* out) {
  return guarded([&] {
    require_set(out, "out");
    return give(manager(cache).admit(), out);
  });
}

kv4_status kv4_cache_fork(kv4_cache* cache, kv4_request request, kv4_request* out) {
  return guarded([&] {
    require_set(out, "out");
    return give(manager(cache).fork(request), out);
  });
}

kv4_status kv4_cache_rewind(kv4_cache* cache, kv4_request request, int64_t length, int32_t group) {
  return guarded([&] { manager(cache).rewind(request, length, group); });
}

kv4_status kv4_cache_rewind_floor(const kv4_cache* cache, kv4_request request, int32_t group, int64_t* out) {
  return guarded([&] { require_set(out, "out") = manager(cache).rewind_floor(request, group); });
}

kv4_status kv4_cache_length(const kv4_cache* cache, kv4_request request, int32_t group, int64_t* out) {
  return guarded([&] { require_set(out, "out") = manager(cache).length(request, group); });
}

kv4_status kv4_cache_token_ids(const kv4_cache* cache, kv4_request request, int32_t* out, int64_t capacity,
                               int64_t* count) {
  return guarded([&] { copy_list<std::int32_t>(manager(cache).token_ids(request), out, capacity, count); });
}

kv4_status kv4_cache_blocks(const kv4_cache* cache, kv4_request request, int32_t* out, int64_t capacity,
                            int64_t* count) {
  return guarded([&] { copy_list<std::int32_t>(manager(cache).blocks(request), out, capacity, count); });
}

kv4_status kv4_cache_release(kv4_cache* cache, kv4_request request) {
  return guarded([&] { manager(cache).release(request); });
}

// --- steps -----------------------------------------------------------------------------------------------------------

void kv4_step_item_init(kv4_step_item* item, size_t size) { init_struct(item, size, item_defaults()); }

void kv4_step_init(kv4_step* step, size_t size) { init_struct(step, size, sized<kv4_step>()); }

kv4_status kv4_cache_prepare_forward(kv4_cache* cache, const kv4_step_item* items, int64_t num_items, int32_t group,
                                     kv4_step* out) {
  return guarded([&] {
    struct_bytes(out, "out");
    const StructArray<const kv4_step_item> given(items, num_items, "items");
    std::vector<kv4::StepItem> step_items;
    step_items.reserve(given.size());
    for (std::size_t i = 0; i < given.size(); ++i) {
      const kv4_step_item item = given.read(i, item_defaults());
      const bool has_ids = item.token_ids != nullptr;
      step_items.push_back({.request = item.request,
                            .count = item.count,
                            .token_ids = list(item.token_ids, has_ids ? std::max(item.count, 0) : 0, "token_ids"),
                            .position = item.position});
    }
    const kv4::Expected<kv4::Step> step = manager(cache).prepare_forward(step_items, group);
    if (!step) return status_of(step.error());
    write_struct(out, step_of(*step), "out");
    return KV4_OK;
  });
}

kv4_status kv4_cache_commit(kv4_cache* cache, const kv4_step* step) {
  return guarded([&] { manager(cache).commit(step_of(step)); });
}

kv4_status kv4_cache_abort(kv4_cache* cache, const kv4_step* step) {
  return guarded([&] { manager(cache).abort(step_of(step)); });
}

kv4_status kv4_cache_finished(kv4_cache* cache, const kv4_step* step, int32_t* out) {
  return guarded([&] { require_set(out, "out") = manager(cache).finished(step_of(step)); });
}

// --- statistics ------------------------------------------------------------------------------------------------------

double kv4_time_histogram_bound(int32_t bucket) {
  const auto& bounds = kv4::TimeHistogram::kBoundsNs;
  if (bucket < 0) return 0;
  if (bucket >= std::ssize(bounds)) return std::numeric_limits<double>::infinity();
  return static_cast<double>(bounds[static_cast<std::size_t>(bucket)]) / 1e9;
}

void kv4_cache_statistics_init(kv4_cache_statistics* statistics, size_t size) {
  init_struct(statistics, size, sized<kv4_cache_statistics>());
}

kv4_status kv4_cache_get_statistics(const kv4_cache* cache, kv4_cache_statistics* out) {
  return guarded([&] {
    const kv4::CacheStatistics from = manager(cache).statistics();
    const auto sum = [](const kv4::ShortageCounts& counts) { return counts.requests + counts.blocks + counts.slots; };
    auto value = sized<kv4_cache_statistics>();
    value.requests = from.requests;
    value.max_requests = from.max_requests;
    value.blocks = from.blocks;
    value.free_blocks = from.free_blocks;
    value.held_blocks = from.held_blocks;
    value.evictable_blocks = from.evictable_blocks;
    value.slots = from.slots;
    value.free_slots = from.free_slots;
    value.memory_bytes = from.memory_bytes;
    value.admit_shortages = sum(from.admit_shortages);
    value.prepare_forward_shortages = sum(from.prepare_forward_shortages);
    value.admit = histogram(from.times.admit);
    value.prepare_forward = histogram(from.times.prepare_forward);
    value.session_save = histogram(from.times.session_save);
    value.session_restore = histogram(from.times.session_restore);
    value.tier_save = histogram(from.times.tier_save);
    value.tier_load = histogram(from.times.tier_load);
    write_struct(out, value, "out");
  });
}
