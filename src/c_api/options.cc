#include "c_api/options.h"

#include <optional>
#include <string_view>

#include "c_api/handles.h"

namespace kv4::c_api {

kv4_cache_options cache_options_defaults() {
  const CacheOptions known;
  kv4_cache_options out{};
  out.size = sizeof(out);
  out.row_format = out.window_format = out.entry_format = "";
  out.index_format = to_string(known.index_format);
  out.hca_mode = to_string(known.hca_mode);
  out.arrangement = to_string(known.arrangement);
  out.hadamard = known.hadamard;
  out.index_global_scale = known.index_global_scale;
  out.pending_dtype = to_string(known.pending_dtype);
  out.page_alignment = known.page_alignment;
  out.block_tokens = known.block_tokens;
  out.max_rewind_tokens = known.max_rewind_tokens;
  out.draft_layers = known.draft_layers;
  out.max_requests = known.max_requests;
  out.spare_slots = known.spare_slots;
  out.max_context = known.max_context;
  out.num_blocks = known.num_blocks;
  out.max_step_tokens = known.max_step_tokens;
  out.index_tile_tokens = known.index_tile_tokens;
  out.prefix_enabled = known.prefix.enabled;
  out.num_snapshots = known.prefix.num_snapshots;
  out.max_events = known.prefix.max_events;
  out.weights_id = "";
  out.eviction = to_string(known.prefix.eviction);
  out.snapshots = to_string(known.prefix.snapshots.kind);
  out.snapshot_period_tokens = known.prefix.snapshots.period_tokens;
  out.replay_tokens = known.prefix.snapshots.replay_tokens;
  return out;
}

namespace {

std::optional<Format> row_format(const char* name, const char* what) {
  const std::string_view text = c_text(name, what);
  return text.empty() ? std::nullopt : std::optional(parse_format(text));
}

}  // namespace

CacheOptions cache_options(const kv4_cache_options* given) {
  CacheOptions out;
  if (given == nullptr) return out;
  const kv4_cache_options in = read_struct(given, cache_options_defaults(), "options");
  out.row_format = row_format(in.row_format, "options.row_format");
  out.window_format = row_format(in.window_format, "options.window_format");
  out.entry_format = row_format(in.entry_format, "options.entry_format");
  out.index_format = parse_format(c_text(in.index_format, "options.index_format"));
  out.hca_mode = parse_hca_mode(c_text(in.hca_mode, "options.hca_mode"));
  out.arrangement = parse_arrangement(c_text(in.arrangement, "options.arrangement"));
  out.hadamard = in.hadamard != 0;
  out.index_global_scale = in.index_global_scale;
  out.pending_dtype = parse_pending_dtype(c_text(in.pending_dtype, "options.pending_dtype"));
  out.page_alignment = in.page_alignment;
  out.block_tokens = in.block_tokens;
  out.max_rewind_tokens = in.max_rewind_tokens;
  out.draft_layers = in.draft_layers;
  const std::span<const std::int32_t> layers = list(in.layers, in.num_layers, "options.layers");
  out.layers.assign(layers.begin(), layers.end());
  out.max_requests = in.max_requests;
  out.spare_slots = in.spare_slots;
  out.max_context = in.max_context;
  out.num_blocks = in.num_blocks;
  out.max_step_tokens = in.max_step_tokens;
  out.index_tile_tokens = in.index_tile_tokens;
  out.prefix.enabled = in.prefix_enabled != 0;
  out.prefix.num_snapshots = in.num_snapshots;
  out.prefix.max_events = in.max_events;
  out.prefix.weights_id = c_text(in.weights_id, "options.weights_id");
  out.prefix.eviction = parse_eviction(c_text(in.eviction, "options.eviction"));
  out.prefix.snapshots.kind = parse_snapshots(c_text(in.snapshots, "options.snapshots"));
  out.prefix.snapshots.period_tokens = in.snapshot_period_tokens;
  out.prefix.snapshots.replay_tokens = in.replay_tokens;
  const std::span<const std::int64_t> shares = list(in.tenant_shares, in.num_tenants, "options.tenant_shares");
  if (!shares.empty()) out.prefix.tenant_shares.assign(shares.begin(), shares.end());
  return out;
}

}  // namespace kv4::c_api
