#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/digest.h"
#include "codec/codec.h"
#include "kv4/schema.h"
#include "schema/layout_text.h"

namespace kv4 {
namespace {

constexpr int kPlaneAlignment = 64;

int default_block_tokens(const std::vector<LayerSpec>& layers, int wanted) {
  std::int64_t lcm = 1;
  for (const LayerSpec& spec : layers)
    for (const RowKind& kind : spec.rows) {
      require(wanted == 0 || wanted % kind.ratio == 0, ErrorCode::bad_config,
              "block_tokens is {}; layer {} makes one entry per {} tokens, so it must be a multiple of {}", wanted,
              spec.layer, kind.ratio, kind.ratio);
      lcm = std::lcm(lcm, static_cast<std::int64_t>(kind.ratio));
      require(lcm <= (1 << 24), ErrorCode::bad_config,
              "the layers' ratios have no common multiple below 2^24; a block cannot hold them");
    }
  return wanted != 0 ? wanted : static_cast<int>(ceil_div(128, lcm) * lcm);
}

void check_format(Format format, bool for_keys, int quantised) {
  const codec::FormatInfo& info = codec::format_info(format);
  require(for_keys ? info.for_keys : info.for_rows, ErrorCode::bad_config, "format {} is not for {}; use {}",
          to_string(info.format), for_keys ? "index keys" : "rows",
          for_keys ? "mxfp4, nvfp4, fp8 or bf16" : "fp8_tile64, fp8_row, bf16, fp8_tile32 or nvfp4_row");
  require(quantised % info.tile == 0, ErrorCode::bad_config,
          "format {} quantises {} channels at a time and cannot tile {}; use {}", to_string(info.format), info.tile,
          quantised, for_keys ? "fp8 or bf16 index keys" : "fp8_row or bf16 rows");
}

// Channels of a row that its format quantises.
int quantised_channels(Format format, const ModelConfig& config) {
  return config.head_dim - (codec::format_info(format).has_tail ? config.rope_dim : 0);
}

// Fills in the row formats that the options leave open: from a wider option, or the model's own.
void fill_in_formats(const ModelConfig& config, CacheOptions& o) {
  const bool shares = config.shares_entries();
  if (!o.window_format) o.window_format = o.row_format.value_or(shares ? Format::fp8_tile32 : Format::fp8_tile64);
  if (!o.entry_format) o.entry_format = o.row_format.value_or(shares ? Format::nvfp4_row : Format::fp8_tile64);
  o.row_format = o.window_format == o.entry_format ? o.window_format : std::nullopt;
  o.hadamard = o.hadamard && !shares;
}

void check_options(const ModelConfig& config, const CacheOptions& o) {
  const auto range = [](const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    require(value >= low && value <= high, ErrorCode::bad_config, "{} is {}; it must be from {} to {}", name, value,
            low, high);
  };
  range("max_rewind_tokens", o.max_rewind_tokens, 0, 1 << 20);
  range("block_tokens", o.block_tokens, 0, 1 << 24);
  range("page_alignment", o.page_alignment, kPlaneAlignment, 1 << 20);
  require(o.page_alignment % kPlaneAlignment == 0, ErrorCode::bad_config,
          "page_alignment is {}; it must be a multiple of {}", o.page_alignment, kPlaneAlignment);
  range("max_requests", o.max_requests, 1, 1 << 16);
  range("spare_slots", o.spare_slots, 0, 1 << 16);
  range("num_snapshots", o.prefix.num_snapshots, 0, 1 << 24);
  range("max_events", o.prefix.max_events, 1, std::int64_t{1} << 32);
  range("max_context", o.max_context, 1, config.max_positions);
  range("num_blocks", o.num_blocks, 0, (std::int64_t{1} << 31) - 1);
  range("max_step_tokens", o.max_step_tokens, 1, 1 << 24);
  range("index_tile_tokens", o.index_tile_tokens, 0, 1 << 24);
  require(o.pending_dtype == DType::f32 || o.pending_dtype == DType::bf16, ErrorCode::bad_config,
          "pending_dtype is {}; it must be f32 or bf16", to_string(o.pending_dtype));
  require(o.index_global_scale > 0.0f && o.index_global_scale <= 1e30f && o.index_global_scale >= 1e-30f,
          ErrorCode::bad_config, "index_global_scale is {}; it must be from 1e-30 to 1e30", o.index_global_scale);
  for (const Format format : {*o.window_format, *o.entry_format})
    check_format(format, false, quantised_channels(format, config));
  for (LayerKind kind : config.kinds) {
    if (kind != LayerKind::csa && kind != LayerKind::shared) continue;
    check_format(o.index_format, true, config.index_dim);
    require(!o.hadamard || (config.index_dim & (config.index_dim - 1)) == 0, ErrorCode::bad_config,
            "the Hadamard transform needs a power of two, index_dim is {}; set hadamard = false", config.index_dim);
    break;
  }
}

RowSchema row_schema(Format format, int width, int rotated) {
  const int tail = codec::format_info(format).has_tail ? rotated : 0;
  const codec::RowShape shape{width, tail};
  return codec::with_any_codec(format, [&](auto codec) -> RowSchema {
    return {format, width, tail, codec.payload_bytes(shape), codec.scale_bytes(shape)};
  });
}

PageSchema page_schema(const ModelConfig& config, const CacheOptions& o, const RowKind& kind, int block_tokens) {
  PageSchema page;
  page.kind = kind;
  const bool key = kind.role == RowRole::index_key;
  page.row = row_schema(key ? o.index_format : *o.entry_format, kind.width, key ? 0 : config.rope_dim);
  page.rows_per_block = block_tokens / kind.ratio;
  page.scale_offset = checked_mul(page.rows_per_block, page.row.payload_bytes, "page");
  std::int64_t bytes = page.scale_offset + checked_mul(page.rows_per_block, page.row.scale_bytes, "page");
  if (codec::format_info(page.row.format).has_global) {
    page.global_offset = round_up(bytes, 4, "page");
    bytes = page.global_offset + 4;
  }
  page.content_bytes = round_up(bytes, kPlaneAlignment, "page");
  page.page_bytes = round_up(bytes, o.page_alignment, "page");
  return page;
}

// Appends `bytes` to the slot at the next plane boundary and returns the offset.
std::int64_t place(std::int64_t& slot_bytes, std::int64_t bytes) {
  const std::int64_t at = slot_bytes;
  slot_bytes = round_up(checked_add(slot_bytes, bytes, "state slot"), kPlaneAlignment, "state slot");
  return at;
}

void place_window(const ModelConfig& config, const CacheOptions& o, LayerCacheSchema& layer, std::int64_t& slot_bytes) {
  WindowSchema& w = layer.window;
  w.row = row_schema(*o.window_format, config.head_dim, config.rope_dim);
  w.rows = config.window + o.max_rewind_tokens;
  w.payload_offset = place(slot_bytes, checked_mul(w.rows, w.row.payload_bytes, "window"));
  w.scale_offset = place(slot_bytes, checked_mul(w.rows, w.row.scale_bytes, "window"));
}

// V4.1 pools an entry of ratio 2 from two rows. An entry of ratio 1, and a key, which comes by entry, need no pending
// rows.
PendingSchema place_shared_pending(const CacheOptions& o, const RowKind& kind, std::int64_t& slot_bytes) {
  PendingSchema p;
  p.dtype = o.pending_dtype;
  if (kind.role == RowRole::index_key || kind.ratio == 1) return p;
  p.columns = kind.width;
  p.rows = kind.ratio + o.max_rewind_tokens;
  p.row_bytes = std::int64_t{2} * p.columns * static_cast<std::int64_t>(element_bytes(p.dtype));
  p.ring_offset = place(slot_bytes, checked_mul(p.rows, p.row_bytes, "pending rows"));
  return p;
}

PendingSchema place_pending(const CacheOptions& o, const RowKind& kind, std::int64_t& slot_bytes) {
  PendingSchema p;
  p.columns = kind.overlap ? 2 * kind.width : kind.width;
  p.dtype = o.pending_dtype;
  p.online = !kind.overlap && o.hca_mode == HcaMode::online;
  p.rows = o.max_rewind_tokens + (kind.overlap ? 2 * kind.ratio : p.online ? 1 : kind.ratio);
  p.row_bytes = std::int64_t{2} * p.columns * static_cast<std::int64_t>(element_bytes(p.dtype));
  if (!kind.overlap) p.acc_offset = place(slot_bytes, std::int64_t{3} * kind.width * 4);
  p.ring_offset = place(slot_bytes, checked_mul(p.rows, p.row_bytes, "pending rows"));
  return p;
}

std::vector<LayerSpec> owned_layers(std::vector<LayerSpec> all, const std::vector<int>& wanted) {
  if (wanted.empty()) return all;
  std::vector<LayerSpec> out;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    require(wanted[i] >= 0 && wanted[i] < static_cast<int>(all.size()), ErrorCode::bad_config,
            "layers[{}] is {}; the model has layers 0 to {}, draft stages included", i, wanted[i], all.size() - 1);
    require(i == 0 || wanted[i] > wanted[i - 1], ErrorCode::bad_config,
            "layers[{}] is {} after {}; list each layer once, ascending", i, wanted[i], wanted[i ? i - 1 : 0]);
    out.push_back(all[wanted[i]]);
  }
  const auto owns = [&](int layer) { return std::binary_search(wanted.begin(), wanted.end(), layer); };
  for (const LayerSpec& spec : out) {  // entries, lists and candidates do not cross from one cache to another
    for (const RowKind& kind : spec.rows)
      require(owns(kind.owner_layer), ErrorCode::bad_config,
              "layers has {} without {}, whose entries it reads; cut a V4.1 model before an owner of entries",
              spec.layer, kind.owner_layer);
    require(spec.ranker < 0 || owns(spec.ranker), ErrorCode::bad_config,
            "layers has {} without {}, whose index list it reads; cut a V4.1 model before an owner of entries",
            spec.layer, spec.ranker);
    require(spec.candidate_source < 0 || owns(spec.candidate_source), ErrorCode::bad_config,
            "layers has {} without {}, within whose candidates it ranks; cut a V4.1 model before an owner of entries",
            spec.layer, spec.candidate_source);
  }
  return out;
}

void place_pages(CacheSchema& schema) {
  for (LayerCacheSchema& layer : schema.layers)
    for (PageSchema& page : layer.pages) {
      page.offset = schema.block_bytes;
      schema.block_bytes = checked_add(schema.block_bytes, page.page_bytes, "block");
      schema.block_image_bytes = checked_add(schema.block_image_bytes, page.content_bytes, "block");
    }
}

// Needs num_blocks, which needs block_bytes: the second pass over the pages.
void arrange_pages(CacheSchema& schema) {
  const CacheOptions& o = schema.options;
  checked_mul(schema.block_bytes, o.num_blocks, "paged pool");
  for (LayerCacheSchema& layer : schema.layers)
    for (PageSchema& page : layer.pages) {
      const bool block_major = o.arrangement == Arrangement::block_major;
      page.block_stride = block_major ? schema.block_bytes : page.page_bytes;
      if (!block_major) page.offset *= o.num_blocks;
    }
}

// The words that a V4.1 layout's title has and V4's does not.
constexpr const char* kSharedEntriesWords = " shared entries";

std::string describe_rope(const RopeSpec& r) {
  return fmt::format("{} {} {} {} {} {}", r.theta, r.yarn, r.factor, r.original_length, r.beta_fast, r.beta_slow);
}

}  // namespace

std::string describe_layout(const CacheSchema& s) {
  const ModelConfig& c = s.config;
  const CacheOptions& o = s.options;
  std::string text =
      fmt::format("kv4 image 1{}\nhead {} rope {} window {} index {} eps {}\nropes {} / {}\n",
                  c.shares_entries() ? kSharedEntriesWords : "", c.head_dim, c.rope_dim, c.window, c.index_dim,
                  c.rms_eps, describe_rope(c.rope_main), describe_rope(c.rope_compress));
  std::string rows = to_string(*o.window_format);
  if (o.entry_format != o.window_format) rows += std::string("/") + to_string(*o.entry_format);
  text += fmt::format("rows {} keys {} hadamard {} global {} pending {} block {}\n", rows, to_string(o.index_format),
                      o.hadamard, o.index_global_scale, to_string(o.pending_dtype), s.block_tokens);
  for (const LayerCacheSchema& layer : s.layers) {
    text += fmt::format("layer {} group {}", layer.spec.layer, layer.spec.group);
    for (const PageSchema& page : layer.pages)
      text += fmt::format(" [{} {} {}]", page.kind.ratio, page.kind.overlap, page.kind.width);
    text += '\n';
  }
  return text;
}

const LayerCacheSchema& CacheSchema::layer(int model_layer) const {
  for (const LayerCacheSchema& l : layers)
    if (l.spec.layer == model_layer) return l;
  fail(ErrorCode::bad_argument, "layer {} is not in this cache, which owns {} of the model's layers ({} to {})",
       model_layer, layers.size(), layers.front().spec.layer, layers.back().spec.layer);
}

CacheSchema build_schema(const ModelConfig& config, const CacheOptions& given) {
  CacheSchema schema;
  schema.config = config;
  schema.options = given;
  const CacheOptions& options = schema.options;
  const std::vector<LayerSpec> all = layer_schedule(config, options.draft_layers);
  fill_in_formats(config, schema.options);
  check_options(config, options);
  schema.num_groups = 1 + options.draft_layers;
  schema.block_tokens = default_block_tokens(all, options.block_tokens);
  schema.options.block_tokens = schema.block_tokens;
  schema.blocks_per_request = static_cast<int>(ceil_div(options.max_context, schema.block_tokens));

  for (LayerSpec& spec : owned_layers(all, options.layers))
    schema.layers.push_back({.spec = std::move(spec), .window = {}, .pages = {}, .pending = {}});
  for (LayerCacheSchema& layer : schema.layers)
    if (layer.spec.group == 0) place_window(config, options, layer, schema.slot_bytes);
  for (LayerCacheSchema& layer : schema.layers)
    for (const RowKind& kind : layer.spec.rows) {
      if (kind.owner_layer != layer.spec.layer) continue;
      layer.pages.push_back(page_schema(config, options, kind, schema.block_tokens));
      layer.pending.push_back(config.shares_entries() ? place_shared_pending(options, kind, schema.slot_bytes)
                                                      : place_pending(options, kind, schema.slot_bytes));
    }
  for (LayerCacheSchema& layer : schema.layers)
    if (layer.spec.group != 0) place_window(config, options, layer, schema.slot_bytes);

  for (LayerCacheSchema& layer : schema.layers) {
    layer.window.undo_row_offset = schema.undo_row_bytes;
    schema.undo_row_bytes += layer.window.row.bytes();
  }
  schema.undo_row_bytes = round_up(schema.undo_row_bytes, kPlaneAlignment, "undo rows");

  place_pages(schema);
  if (options.num_blocks == 0) {
    schema.options.num_blocks = compute_block_budget(schema, options.max_requests, options.max_context).blocks;
    require(schema.options.num_blocks < (std::int64_t{1} << 31), ErrorCode::bad_config,
            "{} requests of {} tokens need {} blocks; block ids are 31 bits", options.max_requests, options.max_context,
            schema.options.num_blocks);
  }
  arrange_pages(schema);
  schema.layout_id = digest64(describe_layout(schema));
  return schema;
}

}  // namespace kv4
