// A cache, its requests and its steps.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "c_api/handles.h"
#include "c_api/options.h"
#include "kv4/session.h"
#include "kv4/statistics.h"

using namespace kv4::c_api;

namespace {

kv4_admission admission_defaults() {
  auto value = sized<kv4_admission>();
  value.request = KV4_NO_REQUEST;
  return value;
}

kv4_session_identity identity_defaults() {
  auto value = sized<kv4_session_identity>();
  value.weights_id = "";
  return value;
}

kv4::KVCacheManager& manager(kv4_cache* cache) { return require_set(cache, "cache").manager; }
const kv4::KVCacheManager& manager(const kv4_cache* cache) { return require_set(cache, "cache").manager; }

/// A list of the cache's into the caller's memory.
template <class T>
void copy_list(const std::vector<T>& values, T* out, std::int64_t capacity, std::int64_t* count) {
  const auto size = static_cast<std::int64_t>(values.size());
  require_set(count, "count") = size;
  kv4::require(capacity >= size, kv4::ErrorCode::bad_argument, "room for {} elements; there are {}", capacity, size);
  if (size > 0) std::copy(values.begin(), values.end(), &require_set(out, "out"));
}

std::span<std::byte> writable(void* out, size_t bytes) {
  kv4::require(out != nullptr || bytes == 0, kv4::ErrorCode::bad_argument, "out is NULL and should have {} bytes",
               bytes);
  return {static_cast<std::byte*>(out), bytes};
}

kv4::Step step_of(const kv4_step* step) {
  const kv4_step& in = require_set(step, "step");
  return {.id = in.id, .num_tokens = in.num_tokens, .num_items = in.num_items, .group = in.group};
}

kv4::SessionIdentity identity_of(const kv4_session_identity* given) {
  const kv4_session_identity in = read_struct(given, identity_defaults(), "identity");
  kv4::SessionIdentity out{.weights_id = &require_set(in.weights_id, "identity.weights_id"),
                           .salt = std::string(text(in.salt, "identity.salt")),
                           .tenant = in.tenant};
  for (const kv4_bytes& extra : list(in.block_extra, in.num_block_extra, "identity.block_extra")) {
    const std::span<const std::byte> span = bytes(extra, "identity.block_extra");
    out.block_extra.emplace_back(span.begin(), span.end());
  }
  return out;
}

kv4::SessionProgress progress_of(kv4_progress progress, void* user) {
  if (progress == nullptr) return {};
  return [progress, user](std::int64_t done, std::int64_t total) { return progress(user, done, total) != 0; };
}

/// What kv4_cache_pool gives away, freed by its deleter.
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
    require_set(out, "out") = new kv4_cache{on, {config, cache_options(options), on.backend}};
  });
}

void kv4_cache_free(kv4_cache* cache) { delete cache; }

void kv4_cache_info_init(kv4_cache_info* info) {
  if (info != nullptr) *info = sized<kv4_cache_info>();
}

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

void kv4_layer_weights_init(kv4_layer_weights* weights) {
  if (weights != nullptr) *weights = sized<kv4_layer_weights>();
}

kv4_status kv4_bind_weights(kv4_cache* cache, int32_t layer, const kv4_layer_weights* weights) {
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

kv4_status kv4_bind_rope_table(kv4_cache* cache, const kv4_tensor* cos, const kv4_tensor* sin) {
  return guarded([&] { manager(cache).bind_rope_table(tensor(*cache, cos, "cos"), tensor(*cache, sin, "sin")); });
}

kv4_status kv4_set_stream(kv4_cache* cache, void* stream) {
  return guarded([&] { manager(cache).set_stream({stream}); });
}

kv4_status kv4_synchronize(kv4_cache* cache) {
  return guarded([&] { manager(cache).synchronize(); });
}

// --- requests --------------------------------------------------------------------------------------------------------

void kv4_prompt_init(kv4_prompt* prompt) {
  if (prompt != nullptr) *prompt = sized<kv4_prompt>();
}

void kv4_admission_init(kv4_admission* admission) {
  if (admission != nullptr) *admission = admission_defaults();
}

kv4_status kv4_admit(kv4_cache* cache, kv4_request* out) {
  return guarded([&] {
    require_set(out, "out");
    return give(manager(cache).admit(), out);
  });
}

kv4_status kv4_admit_prompt(kv4_cache* cache, const kv4_prompt* prompt, kv4_admission* out) {
  return guarded([&] {
    kv4::KVCacheManager& to = manager(cache);
    const kv4_prompt in = read_struct(prompt, sized<kv4_prompt>(), "prompt");
    read_struct(out, admission_defaults(), "out");  // refused now rather than with a request nobody knows of
    std::vector<std::string_view> extra;
    for (const kv4_bytes& one : list(in.extra, in.num_extra, "prompt.extra"))
      extra.push_back(text(one, "prompt.extra"));
    const kv4::Expected<kv4::Admission> admitted = to.admit(kv4::Prompt{
        list(in.token_ids, in.num_tokens, "prompt.token_ids"), in.tenant, text(in.salt, "prompt.salt"), extra});
    if (!admitted) return status_of(admitted.error());
    kv4_admission value = admission_defaults();
    value.request = admitted->request;
    value.usable_tokens = admitted->usable_tokens;
    value.resume_at = admitted->resume_at;
    write_struct(out, value, "out");
    return KV4_OK;
  });
}

kv4_status kv4_fork(kv4_cache* cache, kv4_request request, kv4_request* out) {
  return guarded([&] {
    require_set(out, "out");
    return give(manager(cache).fork(request), out);
  });
}

kv4_status kv4_rewind(kv4_cache* cache, kv4_request request, int64_t length, int32_t group) {
  return guarded([&] { manager(cache).rewind(request, length, group); });
}

kv4_status kv4_rewind_floor(const kv4_cache* cache, kv4_request request, int32_t group, int64_t* out) {
  return guarded([&] { require_set(out, "out") = manager(cache).rewind_floor(request, group); });
}

kv4_status kv4_length(const kv4_cache* cache, kv4_request request, int32_t group, int64_t* out) {
  return guarded([&] { require_set(out, "out") = manager(cache).length(request, group); });
}

kv4_status kv4_token_ids(const kv4_cache* cache, kv4_request request, int32_t* out, int64_t capacity, int64_t* count) {
  return guarded([&] { copy_list(manager(cache).token_ids(request), out, capacity, count); });
}

kv4_status kv4_blocks(const kv4_cache* cache, kv4_request request, int32_t* out, int64_t capacity, int64_t* count) {
  return guarded([&] { copy_list(manager(cache).blocks(request), out, capacity, count); });
}

kv4_status kv4_release(kv4_cache* cache, kv4_request request) {
  return guarded([&] { manager(cache).release(request); });
}

// --- steps -----------------------------------------------------------------------------------------------------------

kv4_status kv4_prepare_forward(kv4_cache* cache, const kv4_step_item* items, int64_t num_items, int32_t group,
                               kv4_step* out) {
  return guarded([&] {
    require_set(out, "out");
    std::vector<kv4::StepItem> step_items;
    for (const kv4_step_item& item : list(items, num_items, "items")) {
      const bool has_ids = item.token_ids != nullptr;
      step_items.push_back({.request = item.request,
                            .count = item.count,
                            .token_ids = list(item.token_ids, has_ids ? std::max(item.count, 0) : 0, "token_ids"),
                            .position = item.position});
    }
    const kv4::Expected<kv4::Step> step = manager(cache).prepare_forward(step_items, group);
    if (!step) return status_of(step.error());
    *out = {step->id, step->num_tokens, step->num_items, step->group};
    return KV4_OK;
  });
}

kv4_status kv4_commit(kv4_cache* cache, const kv4_step* step) {
  return guarded([&] { manager(cache).commit(step_of(step)); });
}

kv4_status kv4_abort(kv4_cache* cache, const kv4_step* step) {
  return guarded([&] { manager(cache).abort(step_of(step)); });
}

kv4_status kv4_finished(kv4_cache* cache, const kv4_step* step, int32_t* out) {
  return guarded([&] { require_set(out, "out") = manager(cache).finished(step_of(step)); });
}

// --- requests as bytes -----------------------------------------------------------------------------------------------

kv4_status kv4_image_bytes(const kv4_cache* cache, kv4_request request, int64_t* out) {
  return guarded([&] { require_set(out, "out") = manager(cache).image_bytes(request); });
}

kv4_status kv4_export_image(const kv4_cache* cache, kv4_request request, void* out, size_t bytes) {
  return guarded([&] { manager(cache).export_image(request, writable(out, bytes)); });
}

kv4_status kv4_export_blocks(const kv4_cache* cache, kv4_request request, void* out, size_t bytes) {
  return guarded([&] { manager(cache).export_blocks(request, writable(out, bytes)); });
}

void kv4_import_init(kv4_import* import) {
  if (import != nullptr) *import = sized<kv4_import>();
}

kv4_status kv4_import_image(kv4_cache* cache, const kv4_import* import, kv4_request* out) {
  return guarded([&] {
    require_set(out, "out");
    const kv4_import in = read_struct(import, sized<kv4_import>(), "import");
    const kv4::ImageView image(in.layout_id, list(in.lengths, in.num_lengths, "import.lengths"),
                               bytes(in.image, "import.image"));
    return give(manager(cache).import_image(image, list(in.token_ids, in.num_tokens, "import.token_ids"),
                                            bytes(in.blocks, "import.blocks")),
                out);
  });
}

void kv4_session_identity_init(kv4_session_identity* identity) {
  if (identity != nullptr) *identity = identity_defaults();
}

kv4_status kv4_save_session_file(kv4_cache* cache, kv4_request request, const kv4_session_identity* identity,
                                 const char* path, kv4_progress progress, void* user) {
  return guarded([&] {
    const bool saved = kv4::save_session_file(manager(cache), request, identity_of(identity),
                                              &require_set(path, "path"), progress_of(progress, user));
    return saved ? KV4_OK : KV4_STOPPED;
  });
}

kv4_status kv4_restore_session_file(kv4_cache* cache, const kv4_session_identity* identity, const char* path,
                                    kv4_progress progress, void* user, kv4_request* out) {
  return guarded([&] {
    require_set(out, "out");
    return give(kv4::restore_session_file(manager(cache), identity_of(identity), &require_set(path, "path"),
                                          progress_of(progress, user)),
                out);
  });
}

kv4_status kv4_preempted_bytes(const kv4_cache* cache, kv4_request request, int64_t* out) {
  return guarded([&] { require_set(out, "out") = kv4::preempted_bytes(manager(cache), request); });
}

kv4_status kv4_preempted_new(kv4_cache* cache, int64_t bytes, kv4_preempted** out) {
  return guarded([&] {
    require_set(out, "out") =
        new kv4_preempted{kv4::PreemptedRequest(kv4::HostMemory(require_set(cache, "cache").backend.backend, bytes))};
  });
}

void kv4_preempted_free(kv4_preempted* preempted) { delete preempted; }

kv4_status kv4_preempt(kv4_cache* cache, kv4_request request, kv4_preempted* to) {
  return guarded([&] { kv4::preempt(manager(cache), request, require_set(to, "to").request); });
}

kv4_status kv4_resume(kv4_cache* cache, kv4_preempted* from, kv4_request* out) {
  return guarded([&] {
    require_set(out, "out");
    return give(kv4::resume(manager(cache), require_set(from, "from").request), out);
  });
}

// --- prefix cache ----------------------------------------------------------------------------------------------------

void kv4_prefix_statistics_init(kv4_prefix_statistics* statistics) {
  if (statistics != nullptr) *statistics = sized<kv4_prefix_statistics>();
}

kv4_status kv4_get_prefix_statistics(const kv4_cache* cache, kv4_prefix_statistics* out) {
  return guarded([&] {
    const kv4::PrefixStatistics from = manager(cache).prefix_statistics();
    auto value = sized<kv4_prefix_statistics>();
    value.prompts = from.prompts;
    value.hits = from.hits;
    value.prompt_tokens = from.prompt_tokens;
    value.usable_tokens = from.usable_tokens;
    value.replayed_tokens = from.replayed_tokens;
    value.stored_blocks = from.stored_blocks;
    value.joined_blocks = from.joined_blocks;
    value.inserted_blocks = from.inserted_blocks;
    value.evicted_blocks = from.evicted_blocks;
    value.saved_snapshots = from.saved_snapshots;
    value.restored_snapshots = from.restored_snapshots;
    value.dropped_snapshots = from.dropped_snapshots;
    value.lost_events = from.lost_events;
    value.blocks = from.blocks;
    value.snapshots = from.snapshots;
    write_struct(out, value, "out");
  });
}

kv4_status kv4_read_block_events(kv4_cache* cache, kv4_block_event* out, int64_t capacity, int64_t* count) {
  return guarded([&] {
    kv4::KVCacheManager& from = manager(cache);
    require_set(count, "count");
    const std::span<const kv4_block_event> room = list<kv4_block_event>(out, capacity, "out");
    std::vector<kv4::BlockEvent> events(room.size());
    const std::size_t read = from.read_block_events(events);
    for (std::size_t i = 0; i < read; ++i) {
      std::copy(events[i].key.begin(), events[i].key.end(), out[i].key);
      out[i].kind = events[i].kind == kv4::BlockEvent::Kind::stored    ? KV4_BLOCK_STORED
                    : events[i].kind == kv4::BlockEvent::Kind::evicted ? KV4_BLOCK_EVICTED
                                                                       : KV4_SNAPSHOT_STORED;
      out[i].inserted = events[i].inserted;
    }
    *count = static_cast<std::int64_t>(read);
  });
}

kv4_status kv4_set_weights_id(kv4_cache* cache, const char* weights_id) {
  return guarded([&] { manager(cache).set_weights_id(&require_set(weights_id, "weights_id")); });
}

kv4_status kv4_invalidate(kv4_cache* cache, const char* weights_id) {
  return guarded([&] { manager(cache).invalidate(&require_set(weights_id, "weights_id")); });
}

// --- statistics ------------------------------------------------------------------------------------------------------

double kv4_time_bound(int32_t bucket) {
  const auto& bounds = kv4::TimeHistogram::kBoundsNs;
  if (bucket < 0) return 0;
  if (bucket >= std::ssize(bounds)) return std::numeric_limits<double>::infinity();
  return static_cast<double>(bounds[static_cast<std::size_t>(bucket)]) / 1e9;
}

void kv4_cache_statistics_init(kv4_cache_statistics* statistics) {
  if (statistics != nullptr) *statistics = sized<kv4_cache_statistics>();
}

kv4_status kv4_get_cache_statistics(const kv4_cache* cache, kv4_cache_statistics* out) {
  return guarded([&] {
    const kv4::CacheStatistics from = manager(cache).statistics();
    const auto histogram = [](const kv4::TimeHistogram& times) {
      static_assert(sizeof(kv4_time_histogram::counts) == sizeof(kv4::TimeHistogram::counts));
      kv4_time_histogram copy{{}, times.sum_seconds, times.sum_ns};
      std::copy(times.counts.begin(), times.counts.end(), copy.counts);
      return copy;
    };
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
    write_struct(out, value, "out");
  });
}

// --- a look from outside ---------------------------------------------------------------------------------------------

kv4_status kv4_status_folder_new(kv4_cache* cache, const char* directory, int64_t interval_ms,
                                 kv4_status_folder** out) {
  return guarded([&] {
    const kv4::StatusOptions options{.interval = std::chrono::milliseconds(interval_ms)};
    require_set(out, "out") = new kv4_status_folder{{manager(cache), &require_set(directory, "directory"), options}};
  });
}

kv4_status kv4_status_folder_publish(kv4_status_folder* folder) {
  return guarded([&] {
    kv4::require(require_set(folder, "folder").folder.publish(), kv4::ErrorCode::bad_file,
                 "the status could not be published; the log (status.failed) says why");
  });
}

void kv4_status_folder_free(kv4_status_folder* folder) { delete folder; }
