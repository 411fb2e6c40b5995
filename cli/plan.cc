#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/check.h"
#include "cache_flags.h"
#include "checks/sizes.h"
#include "checks/table.h"
#include "commands.h"
#include "key_flags.h"
#include "page.h"
#include "plan_figures.h"
#include "plan_page.h"

namespace kv4::cli {

using namespace checks;

namespace {

struct PlanFlags {
  ModelFlags model;
  FormatFlags formats;
  KeyFlags keys;
  std::optional<std::string> context, requests, memory, weights;
  std::string gpus = "1";
  std::string draft_layers = "0", spare_slots = "1", step_tokens = "512";
  std::string html;
  bool json = false;
};

constexpr std::int64_t kMaxGpus = 4096;

Machine read_machine(const PlanFlags& flags) {
  Machine out;
  out.gpus = parse_count(flags.gpus, "--gpus", 1, kMaxGpus);
  if (flags.memory) out.gpu_bytes = parse_bytes(*flags.memory, "--memory");
  if (flags.weights) out.weight_bytes = parse_bytes(*flags.weights, "--weights");
  require(!out.gpu_bytes || *out.gpu_bytes <= INT64_MAX / out.gpus, ErrorCode::bad_argument,
          "--memory {} of {} GPUs is too large", *flags.memory, out.gpus);
  return out;
}

/// The memory of all GPUs minus the weights.
std::optional<std::int64_t> cache_memory(const Machine& machine, const PlanFlags& flags) {
  if (!machine.gpu_bytes) return std::nullopt;
  const std::int64_t all = *machine.gpu_bytes * machine.gpus, left = all - machine.weight_bytes.value_or(0);
  require(left > 0, ErrorCode::bad_argument, "--weights {} leaves nothing of {} in {} {}; raise --gpus or --memory",
          *flags.weights, human_bytes(static_cast<double>(all)), machine.gpus, machine.gpus == 1 ? "GPU" : "GPUs");
  return left;
}

PlanWish read_wish(const PlanFlags& flags, const Machine& machine) {
  PlanWish wish;
  wish.config = read_model(flags.model);
  apply(flags.formats, wish.options);
  wish.options.draft_layers = static_cast<int>(parse_count(flags.draft_layers, "--draft-layers", 0, 1024));
  wish.options.spare_slots = static_cast<int>(parse_count(flags.spare_slots, "--spare-slots", 0, 1 << 16));
  wish.options.max_step_tokens = static_cast<int>(parse_tokens(flags.step_tokens, "--step-tokens", 1 << 24));
  if (flags.context) wish.context = parse_tokens(*flags.context, "--context");
  if (flags.requests) wish.requests = parse_count(*flags.requests, "--requests", 1, 1 << 16);
  wish.memory = cache_memory(machine, flags);
  return wish;
}

std::string count_layers(const ModelConfig& config) {
  const auto count = [&](LayerKind kind) { return std::count(config.kinds.begin(), config.kinds.end(), kind); };
  std::string out = fmt::format("{} layers", config.num_layers);
  if (const auto n = count(LayerKind::swa)) out += fmt::format(", {} SWA", n);
  if (const auto n = count(LayerKind::csa))
    out += fmt::format(", {} CSA (an entry per {} tokens)", n, config.csa_ratio);
  if (const auto n = count(LayerKind::hca)) out += fmt::format(", {} HCA (an entry per {})", n, config.hca_ratio);
  if (const auto n = count(LayerKind::shared))
    out += fmt::format(", {} that read entries of {} owners by {} lists", n, config.sharing.owners.size(),
                       config.sharing.index_sources.size());
  return out;
}

void print_per_token(const PlanFigures& figures) {
  fmt::print("\nGrows with the context (one block = {} tokens)\n", figures.schema.block_tokens);
  Table table("lrrrrr", {"part", "layers", "rows/block", "bytes/row", "bytes/block", "bytes/token"});
  for (const RowFigures& row : figures.rows) {
    table.row({row.name, group_digits(row.layers), group_digits(row.rows_per_block), group_digits(row.row_bytes),
               group_digits(row.block_bytes),
               two_places(static_cast<double>(row.block_bytes) / figures.schema.block_tokens)});
  }
  table.rule();
  table.row({"total", "", "", "", group_digits(figures.plan.block_bytes), two_places(figures.plan.bytes_per_token)});
  table.row({"paper's count", "", "", "", "", two_places(figures.paper.bytes_per_token)});
  fmt::print("{}", table.str());
}

void print_per_request(const PlanFigures& figures) {
  fmt::print("\nFixed for each running request\n");
  Table table("lrr", {"part", "layers", "bytes"});
  for (const StateFigures& state : figures.state)
    table.row({state.name, group_digits(state.layers), group_digits(state.bytes)});
  table.rule();
  table.row({"state of a request", "", group_digits(figures.plan.state_bytes_per_request)});
  if (figures.plan.draft_bytes_per_request > 0)
    table.row({"its draft stages", "", group_digits(figures.plan.draft_bytes_per_request)});
  table.row({"paper's count (windows)", "", group_digits(figures.paper.window_bytes_per_request)});
  fmt::print("{}", table.str());
}

void print_boundaries(const PlanFigures& figures) {
  if (figures.boundaries.empty()) return;
  fmt::print("\nImage of a request\n");
  Table images("lr", {"length", "bytes"});
  for (const ImageFigures& image : figures.images) images.row({image.length, group_digits(image.bytes)});
  fmt::print("{}\nTo resume at a block boundary, beside its blocks\n", images.str());
  Table table("lrrrr", {"with", "bytes", "token ids", "tokens again", "token-layers"});
  for (const BoundaryFigures& boundary : figures.boundaries)
    table.row({boundary.name, group_digits(boundary.bytes), group_digits(boundary.token_ids),
               group_digits(boundary.replayed), group_digits(boundary.token_layers)});
  fmt::print("{}", table.str());
}

void print_cache(const PlanFigures& figures) {
  const CacheOptions& options = figures.schema.options;
  const std::int64_t held = std::int64_t{options.max_requests} * options.max_context;
  fmt::print("\nThe whole cache: {} {} of {} tokens, {} blocks (10 % headroom)\n", group_digits(options.max_requests),
             options.max_requests == 1 ? "request" : "requests", group_digits(options.max_context),
             group_digits(figures.plan.blocks));
  const auto total = static_cast<double>(figures.plan.total_bytes);
  const int bar_width = std::clamp(terminal_width() - 50, 10, 40);
  Table table("lrrl", {"part", "bytes", "share", ""});
  for (const MemoryPart& part : figures.plan.parts) {
    const double share = static_cast<double>(part.bytes) / total;
    table.row({part.name, group_digits(part.bytes), share < 0.0005 ? "< 0.1 %" : fmt::format("{:.1f} %", share * 100),
               draw_bar(share, bar_width)});
  }
  table.rule();
  table.row({"total", group_digits(figures.plan.total_bytes), human_bytes(total)});
  fmt::print("{}\n", table.str());
  for (const MemoryPart& part : figures.plan.parts) {
    if (part.name == "spare slots" || part.name == "step workspace" || part.name == "tables")
      fmt::print("  {}: {}\n", part.name, part.note);
  }
  const double paper = figures.paper.bytes(options.max_requests, options.max_context);
  fmt::print(
      "  the same {} tokens at the paper's count: {} ({} bytes a token and the windows;\n  no padding, headroom, "
      "pending rows or tables)\n",
      group_digits(held), human_bytes(paper), two_places(figures.paper.bytes_per_token));
}

void print_weights(const PlanFigures& figures, const Machine& machine) {
  if (!machine.weight_bytes) {
    fmt::print("\n{}.\n", kNoWeightsText);
    if (machine.gpus > 1)
      fmt::print("The cache on each of {} GPUs, spread evenly: {}\n", machine.gpus,
                 human_bytes(static_cast<double>(figures.plan.total_bytes) / static_cast<double>(machine.gpus)));
    return;
  }
  const double weights = static_cast<double>(*machine.weight_bytes),
               all = weights + static_cast<double>(figures.plan.total_bytes);
  fmt::print("\nWith weights of {}: {}", human_bytes(weights), human_bytes(all));
  if (machine.gpus > 1)
    fmt::print(", {} on each of {} GPUs where both are spread evenly",
               human_bytes(all / static_cast<double>(machine.gpus)), machine.gpus);
  fmt::print("\n");
}

void print_fit(const PlanFigures& figures, const PlanWish& wish, const Machine& machine) {
  if (!wish.memory) return;
  fmt::print("\nIn {} ({} bytes)", human_bytes(static_cast<double>(*wish.memory)), group_digits(*wish.memory));
  if (machine.gpus > 1 || machine.weight_bytes)
    fmt::print(": {} x {}{}", machine.gpus, human_bytes(static_cast<double>(*machine.gpu_bytes)),
               machine.weight_bytes
                   ? fmt::format(" without weights of {}", human_bytes(static_cast<double>(*machine.weight_bytes)))
                   : "");
  fmt::print("\n");
  const CacheOptions& options = figures.schema.options;
  if (wish.context && wish.requests) {
    const bool fits = figures.plan.total_bytes <= *wish.memory;
    fmt::print(
        "  {} x {} tokens: {}\n", group_digits(options.max_requests), human_tokens(options.max_context),
        fits ? "fits"
             : fmt::format("does not fit, it takes {}", human_bytes(static_cast<double>(figures.plan.total_bytes))));
  }
  const std::int64_t asked_requests = wish.requests.value_or(1),
                     asked_context = wish.context.value_or(wish.config.max_positions);
  if (const auto& fit = figures.longest_context) {
    fmt::print("  {} {}: {}{}\n", group_digits(asked_requests), asked_requests == 1 ? "request" : "requests",
               fit->requests == 0
                   ? "no room"
                   : fmt::format("{} tokens{}", group_digits(fit->context), asked_requests == 1 ? "" : " each"),
               fit->context == wish.config.max_positions ? ", all that the model can address" : "");
  }
  if (const auto& fit = figures.most_requests) {
    fmt::print("  {} tokens each: {} {}\n", group_digits(asked_context), group_digits(fit->requests),
               fit->requests == 1 ? "request" : "requests");
  }
}

nlohmann::ordered_json fit_json(const std::optional<Fit>& fit) {
  if (!fit) return nullptr;
  return {{"requests", fit->requests}, {"context", fit->context}, {"total_bytes", fit->total_bytes}};
}

nlohmann::ordered_json to_json(const PlanFigures& figures, const PlanWish& wish, const Machine& machine,
                               Protection protection) {
  const CacheSchema& schema = figures.schema;
  nlohmann::ordered_json parts = nlohmann::ordered_json::array(), rows = parts, state = parts;
  for (const MemoryPart& part : figures.plan.parts)
    parts.push_back({{"name", part.name}, {"bytes", part.bytes}, {"note", part.note}});
  for (const RowFigures& row : figures.rows) {
    rows.push_back({{"name", row.name},
                    {"layers", row.layers},
                    {"rows_per_block", row.rows_per_block},
                    {"row_bytes", row.row_bytes},
                    {"block_bytes", row.block_bytes},
                    {"bytes_per_token", static_cast<double>(row.block_bytes) / schema.block_tokens}});
  }
  for (const StateFigures& part : figures.state)
    state.push_back({{"name", part.name}, {"layers", part.layers}, {"bytes", part.bytes}});
  nlohmann::ordered_json out = {{"model", schema.config.name},
                                {"layers", schema.layers.size()},
                                {"formats", describe_formats(schema)},
                                {"context", schema.options.max_context},
                                {"requests", schema.options.max_requests},
                                {"block_tokens", schema.block_tokens},
                                {"block_bytes", figures.plan.block_bytes},
                                {"bytes_per_token", figures.plan.bytes_per_token},
                                {"state_bytes_per_request", figures.plan.state_bytes_per_request},
                                {"draft_bytes_per_request", figures.plan.draft_bytes_per_request},
                                {"blocks", figures.plan.blocks},
                                {"blocks_per_request", figures.budget.blocks_per_request},
                                {"total_bytes", figures.plan.total_bytes}};
  out["parts"] = parts;
  out["rows"] = rows;
  out["state"] = state;
  out["paper"] = {{"bytes_per_token", figures.paper.bytes_per_token},
                  {"window_bytes_per_request", figures.paper.window_bytes_per_request},
                  {"total_bytes", figures.paper.bytes(schema.options.max_requests, schema.options.max_context)}};
  if (!figures.boundaries.empty()) {
    nlohmann::ordered_json images = nlohmann::ordered_json::array(), boundaries = images;
    for (const ImageFigures& image : figures.images)
      images.push_back({{"length", image.length}, {"bytes", image.bytes}});
    for (const BoundaryFigures& boundary : figures.boundaries)
      boundaries.push_back({{"name", boundary.name},
                            {"bytes", boundary.bytes},
                            {"token_ids", boundary.token_ids},
                            {"replayed_tokens", boundary.replayed},
                            {"token_layers", boundary.token_layers}});
    out["images"] = images;
    out["boundaries"] = boundaries;
  }
  out["tier_protection"] = to_string(protection);
  out["gpus"] = machine.gpus;
  out["weights_bytes"] =
      machine.weight_bytes ? nlohmann::ordered_json(*machine.weight_bytes) : nlohmann::ordered_json();
  if (wish.memory) {
    out["memory"] = {{"bytes", *machine.gpu_bytes},
                     {"cache_bytes", *wish.memory},
                     {"fits", figures.plan.total_bytes <= *wish.memory},
                     {"longest_context", fit_json(figures.longest_context)},
                     {"most_requests", fit_json(figures.most_requests)}};
  }
  return out;
}

void run_plan(const PlanFlags& flags) {
  const Machine machine = read_machine(flags);
  const PlanWish wish = read_wish(flags, machine);
  const PlanFigures figures = compute_plan(wish);
  const Protection protection = flags.keys.read().empty() ? Protection::none : Protection::sealed;
  if (!flags.html.empty()) write_file(flags.html, plan_page(figures, machine));
  if (flags.json) {
    fmt::print("{}\n", to_json(figures, wish, machine, protection).dump(2));
    return;
  }
  fmt::print("{}: {}, window {}\n{}\n", wish.config.name.empty() ? "model" : wish.config.name,
             count_layers(wish.config), wish.config.window, describe_formats(figures.schema));
  print_per_token(figures);
  print_per_request(figures);
  print_boundaries(figures);
  print_cache(figures);
  if (protection == Protection::none)
    fmt::print("\nTiers: {}\n(--key-file, docs/security.md)\n", kNoKeyText);
  else
    fmt::print("\nTiers: records outside host memory are sealed with the keys of {}.\n", flags.keys.path());
  print_weights(figures, machine);
  print_fit(figures, wish, machine);
}

}  // namespace
}  // namespace kv4::cli

void add_plan(CLI::App& app, int& exit_code) {
  using namespace kv4::cli;
  CLI::App* command = app.add_subcommand("plan", "What a cache costs, to the byte, and what fits into a memory");
  auto flags = std::make_shared<PlanFlags>();
  add_flags(*command, flags->model);
  command
      ->add_option(
          "--context", flags->context,
          "tokens of the longest request, for example 128K or 1M (K and M are binary); default: the model's limit")
      ->type_name("TOKENS")
      ->group("Size");
  command->add_option("--requests", flags->requests, "requests at a time; default: 1, or as many as fit into --memory")
      ->type_name("N")
      ->group("Size");
  command->add_option("--memory", flags->memory, "bytes to fit into, of each GPU, for example 141GB or 80GiB")
      ->type_name("BYTES")
      ->group("Size");
  command
      ->add_option("--weights", flags->weights,
                   "bytes of the model's weights, which take their part of the memory; without it they are not counted")
      ->type_name("BYTES")
      ->group("Size");
  command->add_option("--gpus", flags->gpus, "GPUs that weights and cache are spread over, evenly")
      ->capture_default_str()
      ->type_name("N")
      ->group("Size");
  command->add_option("--draft-layers", flags->draft_layers, "extra SWA-only draft stages")
      ->capture_default_str()
      ->type_name("N")
      ->group("Size");
  command->add_option("--spare-slots", flags->spare_slots, "requests with a long step at the same time")
      ->capture_default_str()
      ->type_name("N")
      ->group("Size");
  command->add_option("--step-tokens", flags->step_tokens, "tokens of the largest step")
      ->capture_default_str()
      ->type_name("TOKENS")
      ->group("Size");
  add_flags(*command, flags->formats);
  add_flags(*command, flags->keys);
  command->add_option("--html", flags->html, "also write a page with the memory as a picture")->type_name("FILE");
  command->add_flag("--json", flags->json, "figures as JSON");
  command->footer(
      "Examples:\n"
      "  kv4 plan                                               V4-Flash, one request of the model's full context\n"
      "  kv4 plan --model v4-pro --context 128K --requests 64   the cache of 64 requests of 131,072 tokens\n"
      "  kv4 plan --memory 141GB --context 1M                   how many requests of 1M tokens fit\n"
      "  kv4 plan --memory 80GiB --requests 16                  how long 16 requests can get\n"
      "  kv4 plan --memory 141GB --gpus 8 --weights 690GB       how many requests fit beside the weights\n"
      "  kv4 plan --config config.json --rows bf16 --json\n"
      "  kv4 plan --context 128K --requests 16 --html plan.html");
  command->callback([flags, &exit_code] {
    run_plan(*flags);
    exit_code = 0;
  });
}
