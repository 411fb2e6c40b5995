#include "plan_figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "checks/sizes.h"
#include "kv4/error.h"
#include "kv4/state_cache_pool.h"

namespace kv4::cli {

using namespace checks;

namespace {

constexpr std::int64_t kMaxRequests = 1 << 16;
constexpr std::int64_t kPlaneAlignment = 64;

std::int64_t aligned(std::int64_t bytes) { return (bytes + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment; }

std::vector<RowFigures> row_figures(const CacheSchema& schema) {
  std::vector<RowFigures> out;
  for (const LayerCacheSchema& layer : schema.layers) {
    for (const PageSchema& page : layer.pages) {
      const std::string kind = layer.spec.kind == LayerKind::shared ? fmt::format("ratio {}", page.kind.ratio)
                                                                     : to_string(layer.spec.kind);
      const std::string name =
          fmt::format("{} {}", kind, page.kind.role == RowRole::entry ? "entries" : "index keys");
      auto found = std::find_if(out.begin(), out.end(), [&](const RowFigures& row) { return row.name == name; });
      if (found == out.end()) found = out.insert(out.end(), {name, 0, page.rows_per_block, page.row.bytes(), 0});
      ++found->layers;
      found->block_bytes += page.page_bytes;
    }
  }
  return out;
}

std::vector<StateFigures> state_figures(const CacheSchema& schema) {
  std::vector<StateFigures> out;
  const auto add = [&](const LayerCacheSchema& layer, const char* part, std::int64_t bytes) {
    const std::string name = fmt::format("{} {}", layer.spec.group > 0 ? "draft" : to_string(layer.spec.kind), part);
    auto found = std::find_if(out.begin(), out.end(), [&](const StateFigures& state) { return state.name == name; });
    if (found == out.end()) found = out.insert(out.end(), {name, 0, 0});
    ++found->layers;
    found->bytes += bytes;
  };
  for (const LayerCacheSchema& layer : schema.layers) {
    const WindowSchema& window = layer.window;
    add(layer, "window",
        aligned(std::int64_t{window.rows} * window.row.payload_bytes) +
            aligned(std::int64_t{window.rows} * window.row.scale_bytes));
  }
  for (const LayerCacheSchema& layer : schema.layers) {
    std::int64_t bytes = 0;
    for (std::size_t k = 0; k < layer.pending.size(); ++k) {
      const PendingSchema& pending = layer.pending[k];
      bytes += aligned(pending.rows * pending.row_bytes);
      if (pending.acc_offset >= 0) bytes += aligned(std::int64_t{3} * layer.pages[k].kind.width * 4);
    }
    if (bytes > 0) add(layer, "pending rows", bytes);
  }
  return out;
}

PaperCount count_rows(const CacheSchema& schema) {
  PaperCount out;
  for (const LayerCacheSchema& layer : schema.layers) {
    if (layer.spec.group > 0) continue;
    out.window_bytes_per_request += std::int64_t{schema.config.window} * layer.window.row.bytes();
    for (const PageSchema& page : layer.pages)
      out.bytes_per_token += static_cast<double>(page.row.bytes()) / page.kind.ratio;
  }
  return out;
}

PaperCount paper_count(const ModelConfig& config, const CacheSchema& chosen) {
  CacheOptions paper;  // the defaults are DeepSeek's own formats
  paper.layers = chosen.options.layers;
  paper.max_context = 1;
  try {
    return count_rows(build_schema(config, paper));
  } catch (const Error&) {
    return count_rows(chosen);  // those formats cannot tile the widths
  }
}

std::vector<ImageFigures> image_figures(const CacheSchema& schema) {
  const std::int64_t window = schema.config.window, even = window + window % 2;
  if (schema.options.max_context <= even) return {};
  const auto bytes = [&](std::int64_t length) {
    return image_bytes(schema, std::vector<std::int64_t>(static_cast<std::size_t>(schema.num_groups), length));
  };
  const auto lengths = [](std::int64_t first) { return fmt::format("{}, {}, ...", first, first + 2); };
  return {{"1", bytes(1)}, {lengths(even), bytes(even)}, {lengths(even + 1), bytes(even + 1)}};
}

/// Queries of layer L reach the last window + (window - 1) * (layers behind L) tokens, so it needs their window rows.
std::int64_t replayed_tokens(const ModelConfig& config, int layer) {
  return config.window + std::int64_t{config.window - 1} * (config.num_layers - 1 - layer);
}

std::vector<BoundaryFigures> boundary_figures(const CacheSchema& schema) {
  const ModelConfig& config = schema.config;
  std::int64_t image = 0, encoder = 0, token_layers = 0;
  const int decoder = config.sharing.owners.empty() ? config.num_layers : config.sharing.owners.back();
  for (const LayerCacheSchema& layer : schema.layers) {
    const std::int64_t window = std::int64_t{config.window} * layer.window.row.bytes();
    image += window;
    if (layer.spec.layer < decoder) encoder += window;
    if (layer.spec.group == 0) token_layers += replayed_tokens(config, layer.spec.layer);
  }
  const std::int64_t hashed = config.engram.layers.empty() ? 0 : config.engram.max_ngram - 1;
  std::int64_t exact_ids = replayed_tokens(config, 0);
  for (const int layer : config.engram.layers)
    exact_ids = std::max(exact_ids, replayed_tokens(config, layer) + hashed);
  return {{"image", image, hashed, 0, 0},
          {"encoder image", encoder, hashed, 0, 0},
          {"exact replay", 0, exact_ids, replayed_tokens(config, 0), token_layers},
          {"bounded replay", 0, config.window + hashed, config.window,
           std::int64_t{config.window} * config.num_layers}};
}

CacheSchema sized_schema(const PlanWish& wish, std::int64_t requests, std::int64_t context) {
  if (requests > kMaxRequests) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("--requests {} is too many; a cache holds at most {}", requests, kMaxRequests));
  }
  CacheOptions options = wish.options;
  options.max_requests = static_cast<int>(requests);
  options.max_context = context;
  options.num_blocks = 0;
  return build_schema(wish.config, options);
}

std::int64_t total_bytes(const PlanWish& wish, std::int64_t requests, std::int64_t context) {
  return plan_memory(sized_schema(wish, requests, context)).total_bytes;
}

/// The budget may be off by tables that grow with the context, so the whole plan decides.
Fit fit_context(const PlanWish& wish, std::int64_t requests) {
  const CacheSchema schema = sized_schema(wish, requests, 1);
  std::int64_t context = compute_context_budget(schema, *wish.memory, requests).context;
  while (context > 0) {
    const std::int64_t bytes = total_bytes(wish, requests, context);
    if (bytes <= *wish.memory) return {requests, context, bytes};
    const std::int64_t over = (bytes - *wish.memory) / (schema.block_bytes * requests + 1);
    context = (context - 1) / schema.block_tokens * schema.block_tokens - over * schema.block_tokens;
  }
  return {};
}

Fit fit_requests(const PlanWish& wish, std::int64_t context) {
  std::int64_t low = 0, high = kMaxRequests + 1;  // low fits, high does not
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    bool fits = false;
    try {
      fits = total_bytes(wish, middle, context) <= *wish.memory;
    } catch (const Error&) {
      if (middle == 1) throw;  // the number of requests is not the cause
    }
    (fits ? low : high) = middle;
  }
  return low == 0 ? Fit{} : Fit{low, context, total_bytes(wish, low, context)};
}

std::int64_t checked_context(const PlanWish& wish) {
  const std::int64_t context = wish.context.value_or(wish.config.max_positions);
  if (context > wish.config.max_positions) {
    throw Error(ErrorCode::bad_argument, fmt::format("--context {} is more than the {} positions of {}",
                                                     group_digits(context), group_digits(wish.config.max_positions),
                                                     wish.config.name.empty() ? "the model" : wish.config.name));
  }
  return context;
}

[[noreturn]] void refuse_memory(const PlanWish& wish, std::int64_t requests, std::int64_t context) {
  throw Error(
      ErrorCode::bad_argument,
      fmt::format(
          "--memory {} cannot hold {} of {} tokens: that takes {}; lower --context or --requests, or raise --memory",
          human_bytes(static_cast<double>(*wish.memory)),
          requests == 1 ? "one request" : fmt::format("{} requests", requests), group_digits(context),
          human_bytes(static_cast<double>(total_bytes(wish, requests, context)))));
}

}  // namespace

double PaperCount::bytes(std::int64_t requests, std::int64_t context) const {
  return static_cast<double>(requests) *
         (bytes_per_token * static_cast<double>(context) + static_cast<double>(window_bytes_per_request));
}

PlanFigures compute_plan(const PlanWish& wish) {
  PlanFigures out;
  std::int64_t context = checked_context(wish);
  std::int64_t requests = wish.requests.value_or(1);
  if (wish.memory) {
    out.longest_context = fit_context(wish, requests);
    out.most_requests = fit_requests(wish, context);
    if (!wish.requests) {
      if (out.most_requests->requests == 0) refuse_memory(wish, 1, context);
      requests = out.most_requests->requests;
    } else if (!wish.context) {
      if (out.longest_context->requests == 0) refuse_memory(wish, requests, 1);
      context = out.longest_context->context;
      out.most_requests.reset();
    }
  }
  out.schema = sized_schema(wish, requests, context);
  out.plan = plan_memory(out.schema);
  out.budget = compute_block_budget(out.schema, requests, context);
  out.rows = row_figures(out.schema);
  out.state = state_figures(out.schema);
  out.paper = paper_count(wish.config, out.schema);
  if (wish.config.shares_entries()) {
    out.images = image_figures(out.schema);
    out.boundaries = boundary_figures(out.schema);
  }
  return out;
}

}  // namespace kv4::cli
