// Uses every public header and a call of each part, so that a symbol that is not exported fails to link.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kv4/backend.h"
#include "kv4/block_allocator.h"
#include "kv4/error.h"
#include "kv4/export.h"
#include "kv4/foreign_pages.h"
#include "kv4/kv_cache_manager.h"
#include "kv4/layer_cache_handle.h"
#include "kv4/log.h"
#include "kv4/model_config.h"
#include "kv4/options.h"
#include "kv4/paged_kv_pool.h"
#include "kv4/schema.h"
#include "kv4/state_cache_pool.h"
#include "kv4/status_folder.h"
#include "kv4/tensor.h"
#include "kv4/tiered_prefix.h"
#include "kv4/tiers.h"
#include "kv4/version.h"

int main() {
  const kv4::ModelConfig config = kv4::model_preset("v4-flash");
  kv4::CacheOptions options;
  options.layers = {0};  // a window layer: no weights to bind
  options.max_requests = 2;
  options.max_context = 1024;
  options.max_step_tokens = 8;

  kv4::KVCacheManager cache(config, options, kv4::make_cpu_backend(1));
  if (cache.memory_bytes() != kv4::plan_memory(cache.schema()).total_bytes) return 1;
  if (cache.schema().layer(0).spec.kind != kv4::LayerKind::swa) return 2;

  const auto request = cache.admit();
  if (!request) return 3;
  const std::vector<std::int32_t> tokens = {1, 2, 3};
  const std::vector<kv4::StepItem> items = {{.request = *request, .count = 3, .token_ids = tokens}};
  const auto step = cache.prepare_forward(items);
  if (!step) return 4;
  const std::vector<float> rows(3 * static_cast<std::size_t>(config.head_dim), 1.0f);
  cache.acquire(0).append({.raw_kv = kv4::ConstTensorView(rows.data(), {3, config.head_dim})});
  cache.commit(*step);
  if (cache.length(*request) != 3 || cache.token_ids(*request) != tokens) return 5;

  // An exception of the library is caught by its type across the library's boundary.
  try {
    cache.release(12345);
    return 6;
  } catch (const kv4::Error& error) {
    if (error.code() != kv4::ErrorCode::bad_argument || std::strlen(error.what()) == 0) return 7;
  }
  // Tiers keep the cache's blocks.
  options.prefix.enabled = true;
  kv4::KVCacheManager kept(config, options, kv4::make_cpu_backend(1));
  kv4::Tiers tiers(kept.schema(), {.host_bytes = 1 << 20});
  kv4::TieredPrefix tiered(kept, tiers, {.load_bytes = 1 << 20, .save_bytes = 1 << 20});
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  if (tiered.load({tokens, 0, "", {}}, soon) != 0 || !tiered.start_load({tokens, 0, "", {}}, soon).advance()) return 8;
  kept.release(tiered.admit({tokens, 0, "", {}}, soon).value().request);
  if (tiered.save(1) != 0 || !tiered.save_all(soon) || tiered.statistics().dropped != 0) return 9;
  if (tiers.flush(soon).front() != kv4::tier::FlushStatus::kept || tiers.report().front().name != "host") return 10;
  kv4::set_log_sink({});
  // The published status; there is no such folder.
  if (kv4::read_status(cache, &tiers).requests.size() != 1) return 11;
  try {
    kv4::StatusFolder(cache, "/no/such/folder").publish();
    return 12;
  } catch (const kv4::Error& error) {
    if (error.code() != kv4::ErrorCode::bad_file) return 13;
  }
  std::printf("kv4 %s: %s, %lld bytes\n", KV4_VERSION, kv4::cpu_target(), static_cast<long long>(cache.memory_bytes()));
  return 0;
}
