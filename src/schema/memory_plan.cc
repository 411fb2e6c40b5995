#include <algorithm>

#include "base/check.h"
#include "kv4/block_allocator.h"
#include "kv4/params.h"
#include "kv4/schema.h"
#include "schema/attend_workspace.h"
#include "schema/image_layout.h"
#include "schema/rope.h"
#include "schema/table_layout.h"

namespace kv4 {
namespace {

constexpr int kHeadroomPercent = 10;

// The bytes of one block or one slot, by part.
struct PartBytes {
  std::int64_t csa_entries = 0, index_keys = 0, hca_entries = 0, shared_entries = 0;  // of one block
  std::int64_t windows = 0, csa_pending = 0, hca_state = 0, shared_pending = 0, draft_windows = 0;  // of one slot
};

PartBytes part_bytes(const CacheSchema& schema) {
  PartBytes out;
  const auto plane = [&](std::int64_t& part, std::int64_t bytes) { part += round_up(bytes, 64, "plane"); };
  const bool shared = schema.config.shares_entries();
  for (const LayerCacheSchema& layer : schema.layers) {
    std::int64_t& windows = layer.spec.group == 0 ? out.windows : out.draft_windows;
    plane(windows, std::int64_t{layer.window.rows} * layer.window.row.payload_bytes);
    plane(windows, std::int64_t{layer.window.rows} * layer.window.row.scale_bytes);
    for (std::size_t k = 0; k < layer.pages.size(); ++k) {
      const PageSchema& page = layer.pages[k];
      const PendingSchema& pending = layer.pending[k];
      (page.kind.role == RowRole::index_key ? out.index_keys
       : shared                             ? out.shared_entries
       : page.kind.overlap                  ? out.csa_entries
                                            : out.hca_entries) += page.page_bytes;
      std::int64_t& part = shared ? out.shared_pending : page.kind.overlap ? out.csa_pending : out.hca_state;
      if (pending.acc_offset >= 0) plane(part, std::int64_t{3} * page.kind.width * 4);
      plane(part, pending.rows * pending.row_bytes);
    }
  }
  const std::int64_t sum =
      out.windows + out.csa_pending + out.hca_state + out.shared_pending + out.draft_windows;
  require(sum == schema.slot_bytes, ErrorCode::bad_state,
          "state slot parts add up to {} of {} bytes: a bug in kv4, please report it", sum, schema.slot_bytes);
  return out;
}

// One table for layers with entries, another for layers without.
int num_rope_tables(const CacheSchema& schema) {
  const auto has_entries = [](const LayerCacheSchema& l) { return !l.spec.rows.empty(); };
  return std::any_of(schema.layers.begin(), schema.layers.end(), has_entries) +
         !std::all_of(schema.layers.begin(), schema.layers.end(), has_entries);
}

}  // namespace

TableLayout table_layout(const CacheSchema& schema) {
  const CacheOptions& o = schema.options;
  TableLayout t;
  t.max_items = std::int64_t{2} * o.max_requests;
  const auto take = [&](std::int64_t count) {
    const std::int64_t at = t.total;
    t.total = checked_add(t.total, round_up(count, 16, "tables"), "tables");
    return at;
  };
  constexpr std::int64_t kRecordInts = 8;
  t.items = take(checked_mul(t.max_items, kRecordInts, "tables"));
  t.tokens = take(checked_mul(o.max_step_tokens, kRecordInts, "tables"));
  t.item_rows = take(t.max_items);
  t.item_slots = take(t.max_items);
  t.csa_lens = take(t.max_items);
  t.hca_lens = take(t.max_items);
  t.ring_heads = take(t.max_items);
  t.ring_positions = take(checked_mul(t.max_items, schema.config.window + o.max_rewind_tokens, "tables"));
  t.window_begins = take(o.max_requests);
  if (schema.config.shares_entries()) {
    const std::int64_t records = checked_add(t.max_items, std::int64_t{2} * o.max_step_tokens, "tables");
    t.narrowed_count = checked_add(checked_mul(records, kRecordInts, "tables"), o.max_requests, "tables");
    t.narrowed = take(t.narrowed_count);
  }
  t.block_table = take(checked_mul(o.max_requests, schema.blocks_per_request, "block table"));
  return t;
}

ScratchLayout scratch_layout(const CacheSchema& schema) {
  ScratchLayout out;
  const auto take = [&](std::int64_t row_bytes) {
    const std::int64_t at = out.bytes;
    const std::int64_t plane = checked_mul(schema.options.max_step_tokens, row_bytes, "step workspace");
    out.bytes = checked_add(out.bytes, round_up(plane, 64, "step workspace"), "step workspace");
    return at;
  };
  for (const LayerCacheSchema& layer : schema.layers) {
    const std::int64_t payload_at = take(layer.window.row.payload_bytes);
    out.layers.push_back({payload_at, take(layer.window.row.scale_bytes)});
  }
  return out;
}

SnapshotPlaces snapshot_places(const CacheSchema& schema) {
  const PrefixOptions& prefix = schema.options.prefix;
  if (!prefix.enabled || prefix.snapshots.kind == SnapshotPolicy::Kind::none) return {};
  return {prefix.num_snapshots,
          round_up(snapshot_layout(schema, schema.block_tokens).bytes, 256, "a place for a snapshot")};
}

std::int64_t prefix_index_bytes(const CacheSchema& schema) {
  const PrefixOptions& prefix = schema.options.prefix;
  if (!prefix.enabled) return 0;
  const std::int64_t blocks = schema.options.num_blocks;
  return checked_mul(blocks, kPrefixEntryBytes, "prefix index") + prefix_cells(blocks) * kPrefixCellBytes +
         checked_mul(prefix.max_events, kPrefixEventBytes, "prefix events") +
         4 * (std::int64_t{schema.blocks_per_request} + 1);
}

namespace {

/// Index workspace of one token, 0 without index keys.
std::int64_t index_token_bytes(const CacheSchema& schema) {
  std::int64_t token = 0;
  for (const LayerCacheSchema& layer : schema.layers)
    for (const PageSchema& page : layer.pages)
      if (page.kind.role == RowRole::index_key)
        token = std::max(token, ops::index_token_bytes(std::int64_t{schema.blocks_per_request} * page.rows_per_block,
                                                       ops::kMaxIndexHeads, page.kind.width));
  return token;
}

}  // namespace

std::int64_t index_tile_tokens(const CacheSchema& schema) {
  const std::int64_t asked = schema.options.index_tile_tokens, token = index_token_bytes(schema);
  const std::int64_t tokens = asked > 0 || token == 0 ? asked : ops::default_index_tile_tokens(token);
  return std::min<std::int64_t>(tokens, schema.options.max_step_tokens);
}

std::int64_t index_workspace_bytes(const CacheSchema& schema) {
  return checked_mul(index_token_bytes(schema), index_tile_tokens(schema), "index workspace");
}

CandidateLayout candidate_layout(const CacheSchema& schema) {
  const EntrySharing& sharing = schema.config.sharing;
  CandidateLayout out;
  for (const LayerCacheSchema& layer : schema.layers)
    if (layer.spec.candidate_source >= 0) {
      const std::int64_t entries =
          checked_mul(schema.blocks_per_request, schema.block_tokens / layer.spec.rows[0].ratio, "candidates");
      out.stride =
          std::min<std::int64_t>(sharing.candidate_topk_blocks, ceil_div(entries, sharing.candidate_block_size));
    }
  if (out.stride == 0) return out;
  const std::int64_t tokens = schema.options.max_step_tokens;
  out.counts_at = checked_mul(checked_mul(4, tokens, "candidates"), out.stride, "candidates");
  out.bytes = checked_add(out.counts_at, 4 * tokens, "candidates");
  return out;
}

std::int64_t ops::attend_workspace_bytes(std::int64_t ctas) { return kAttendCounterBytes + ctas * kAttendPartialBytes; }

std::int64_t ops::staged_attend_workspace_bytes(std::int64_t tokens, std::int64_t items, std::int64_t window_tokens,
                                                std::int64_t entries) {
  return attend_workspace_bytes() + staged_bytes(tokens, items, window_tokens, entries);
}

// Staged rows have room for one request in a step of the most tokens: for its longest context, or for as many rows as
// such a step meets often.
std::int64_t attend_workspace_bytes(const CacheSchema& schema) {
  constexpr std::int64_t kLongList = 1536;  // up to this length a cluster of CTAs is as fast
  const std::int64_t tokens = schema.options.max_step_tokens;
  std::int64_t bytes = 0;
  for (const LayerCacheSchema& layer : schema.layers) {
    if (layer.pages.empty() || layer.pages[0].row.format != Format::fp8_tile64 ||
        layer.pages[0].row.width != ops::kAttendPartialWidth)
      continue;
    const std::int64_t entries = std::int64_t{schema.blocks_per_request} * layer.pages[0].rows_per_block;
    if (layer.pages.size() == 1 && entries > kLongList) bytes = std::max(bytes, ops::attend_workspace_bytes());
    if (tokens < ops::kFewestStagedTokens) continue;
    const std::int64_t window = schema.config.window;
    const std::int64_t chosen = layer.pages.size() > 1 ? schema.config.index_topk : entries;
    const std::int64_t often =
        checked_mul(tokens, window + std::min(entries, chosen), "attend workspace") / ops::kFewestMeetings;
    bytes = std::max(bytes, ops::staged_attend_workspace_bytes(tokens, 1, window, std::min(entries, often)));
  }
  return bytes;
}

BlockBudget compute_block_budget(const CacheSchema& schema, std::int64_t requests, std::int64_t context) {
  require(requests >= 1 && context >= 1, ErrorCode::bad_argument,
          "a budget needs at least 1 request and 1 token; got {} and {}", requests, context);
  BlockBudget out;
  out.blocks_per_request = ceil_div(context, schema.block_tokens);
  const std::int64_t exact = checked_mul(requests, out.blocks_per_request, "block budget");
  out.blocks = ceil_div(checked_mul(exact, 100 + kHeadroomPercent, "block budget"), 100);
  const PartBytes parts = part_bytes(schema);
  out.csa_entry_bytes = checked_mul(out.blocks, parts.csa_entries, "block budget");
  out.index_key_bytes = checked_mul(out.blocks, parts.index_keys, "block budget");
  out.hca_entry_bytes = checked_mul(out.blocks, parts.hca_entries, "block budget");
  out.shared_entry_bytes = checked_mul(out.blocks, parts.shared_entries, "block budget");
  out.bytes = checked_mul(out.blocks, schema.block_bytes, "block budget");
  return out;
}

ContextBudget compute_context_budget(const CacheSchema& schema, std::int64_t bytes, std::int64_t requests) {
  require(bytes >= 0 && requests >= 1, ErrorCode::bad_argument,
          "a budget needs bytes >= 0 and at least 1 request; got {} and {}", bytes, requests);
  constexpr std::int64_t kMaxBlocks = (std::int64_t{1} << 31) - 1;
  CacheOptions options = schema.options;
  options.max_requests = static_cast<int>(std::min<std::int64_t>(requests, 1 << 16));
  const auto context_of = [&](std::int64_t blocks) {
    const std::int64_t whole = blocks * 100 / (100 + kHeadroomPercent) / requests * schema.block_tokens;
    return std::min(whole, schema.config.max_positions);
  };
  // Tables grow with the context too, so the largest count that fits is searched for rather than solved for.
  const auto fits = [&](std::int64_t blocks) {
    options.num_blocks = blocks;
    options.max_context = std::max<std::int64_t>(1, context_of(blocks));
    return plan_memory(build_schema(schema.config, options)).total_bytes <= bytes;
  };
  std::int64_t low = 0, high = std::min(kMaxBlocks, bytes / std::max<std::int64_t>(1, schema.block_bytes));
  while (low < high) {
    const std::int64_t middle = low + (high - low + 1) / 2;
    if (fits(middle))
      low = middle;
    else
      high = middle - 1;
  }
  return {low, context_of(low)};
}

MemoryPlan plan_memory(const CacheSchema& schema) {
  const CacheOptions& o = schema.options;
  const PartBytes parts = part_bytes(schema);
  MemoryPlan plan;
  plan.block_bytes = schema.block_bytes;
  plan.bytes_per_token = static_cast<double>(schema.block_bytes) / schema.block_tokens;
  plan.state_bytes_per_request = schema.slot_bytes - parts.draft_windows;
  plan.draft_bytes_per_request = parts.draft_windows;
  plan.blocks = o.num_blocks;

  const auto add = [&](const char* name, std::int64_t count, std::int64_t bytes, std::string note) {
    const std::int64_t product = checked_mul(count, bytes, name);
    if (product == 0) return;
    plan.parts.push_back({name, product, std::move(note)});
    plan.total_bytes = checked_add(plan.total_bytes, product, "total");
  };
  const std::string blocks = fmt::format("{} blocks", o.num_blocks);
  const std::string requests = fmt::format("{} requests", o.max_requests);
  add("CSA entries", o.num_blocks, parts.csa_entries, blocks);
  add("entries", o.num_blocks, parts.shared_entries, blocks);
  add("index keys", o.num_blocks, parts.index_keys, blocks);
  add("HCA entries", o.num_blocks, parts.hca_entries, blocks);
  add("windows", o.max_requests, parts.windows, requests);
  add("CSA pending", o.max_requests, parts.csa_pending, requests);
  add("HCA state", o.max_requests, parts.hca_state, requests);
  add("pending rows", o.max_requests, parts.shared_pending, requests);
  add("draft windows", o.max_requests, parts.draft_windows, fmt::format("{}, {} stages", requests, o.draft_layers));
  add("spare slots", o.spare_slots, schema.slot_bytes,
      fmt::format("{} for requests in a step of more than {} of their tokens", o.spare_slots, o.max_rewind_tokens + 1));
  add("step workspace", 1, scratch_layout(schema).bytes, fmt::format("window rows of {} tokens", o.max_step_tokens));
  add("index workspace", 1, index_workspace_bytes(schema),
      fmt::format("scores and queries of {} tokens", index_tile_tokens(schema)));
  add("candidates", 1, candidate_layout(schema).bytes,
      fmt::format("blocks of entries of {} tokens", o.max_step_tokens));
  add("attend workspace", 1, attend_workspace_bytes(schema), "partial outputs of KV splits, rows of a chunk in bf16");
  const SnapshotPlaces places = snapshot_places(schema);
  add("snapshots", places.count, places.bytes, fmt::format("{} images at block boundaries", places.count));
  add("prefix index", 1, prefix_index_bytes(schema), "keys, counts and order of prefix blocks, events");
  const std::int64_t slots = std::int64_t{o.max_requests} + o.spare_slots;
  add("undo rows", slots, schema.undo_row_bytes,
      fmt::format("{} slots, one window row per layer, for aborted steps", slots));
  std::int64_t tables = checked_mul(4, table_layout(schema).total, "tables");
  tables += 4 * checked_mul(o.max_requests, schema.blocks_per_request, "tables");  // the host's copy of the block table
  tables +=
      2 * round_up(checked_mul(slots, 4 * static_cast<std::int64_t>(schema.layers.size()), "tables"), 64, "tables");
  tables += BlockAllocator::memory_bytes(o.num_blocks);
  tables += 8 * num_rope_tables(schema) * rope_angle_count(schema.config.rope_dim, o.max_context);
  add("tables", 1, tables, "block tables, step records, reference counts, rope angles");
  add("token ids", o.num_blocks, std::int64_t{4} * schema.block_tokens, blocks);
  return plan;
}

}  // namespace kv4
