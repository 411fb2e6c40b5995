#include "plan_page.h"

#include <fmt/format.h>

#include "cache_flags.h"
#include "checks/sizes.h"
#include "page.h"
#include "palette.h"
#include "plot.h"

namespace kv4::cli {

using namespace checks;

namespace {

/// The part of the plan that a row kind or a state part belongs to.
std::string part_of(const std::string& name) {
  if (name == "draft window") return "draft windows";
  if (name.starts_with("ratio ") && name.ends_with(" entries")) return "entries";
  if (name == "shared pending rows") return "pending rows";
  if (name.ends_with("window")) return "windows";
  if (name.ends_with("index keys")) return "index keys";
  if (name == "CSA pending rows") return "CSA pending";
  if (name == "HCA pending rows") return "HCA state";
  return name;
}

Bar bar_of(const std::string& name, double value) {
  const std::string part = part_of(name);
  return {name, {{part, color_of(part), value}}};
}

/// The whole cache as one bar.
BarChart whole(const MemoryPlan& plan) {
  BarChart out{.title = fmt::format("The whole cache: {}", human_bytes(static_cast<double>(plan.total_bytes))),
               .label = "bytes",
               .unit = Unit::bytes,
               .bars = {{"all parts", {}}},
               .wide = true,
               .high = static_cast<double>(plan.total_bytes)};
  for (const MemoryPart& part : plan.parts)
    out.bars[0].parts.push_back({part.name, color_of(part.name), static_cast<double>(part.bytes)});
  return out;
}

std::string both(std::int64_t bytes) {
  return fmt::format("{} ({} bytes)", human_bytes(static_cast<double>(bytes)), group_digits(bytes));
}

std::string table_of(const PlanFigures& figures, const Machine& machine) {
  std::string out = "<table>\n";
  const auto row = [&](const std::string& name, const std::string& value) {
    out += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", escape_html(name), escape_html(value));
  };
  const CacheOptions& options = figures.schema.options;
  row("requests", group_digits(options.max_requests));
  row("tokens of each", group_digits(options.max_context));
  row("a token", two_places(figures.plan.bytes_per_token) + " B");
  row("a token, the paper's count", two_places(figures.paper.bytes_per_token) + " B");
  row(fmt::format("a block of {} tokens", figures.schema.block_tokens), both(figures.plan.block_bytes));
  row("a request's state", both(figures.plan.state_bytes_per_request));
  row("blocks", group_digits(figures.plan.blocks));
  row("all of it", both(figures.plan.total_bytes));
  const double all =
      static_cast<double>(figures.plan.total_bytes) + static_cast<double>(machine.weight_bytes.value_or(0));
  if (machine.weight_bytes) {
    row("weights", both(*machine.weight_bytes));
    row("with weights", human_bytes(all));
  }
  if (machine.gpus > 1)
    row(fmt::format("on each of {} GPUs, spread evenly", group_digits(machine.gpus)),
        human_bytes(all / static_cast<double>(machine.gpus)));
  if (machine.gpu_bytes) row("memory of each GPU", both(*machine.gpu_bytes));
  out += "</table>\n";
  if (!machine.weight_bytes) out += fmt::format("<p>{}.</p>\n", kNoWeightsText);
  return out;
}

}  // namespace

std::string plan_page(const PlanFigures& figures, const Machine& machine) {
  const std::string name = figures.schema.config.name.empty() ? "model" : figures.schema.config.name;
  BarChart parts{.title = "Bytes by part", .label = "bytes", .unit = Unit::bytes, .bars = {}};
  BarChart rows{.title = "Bytes of a token, by row", .label = "bytes per token", .unit = Unit::bytes, .bars = {}};
  BarChart state{.title = "Bytes of a request's state, by part", .label = "bytes", .unit = Unit::bytes, .bars = {}};
  for (const MemoryPart& part : figures.plan.parts)
    parts.bars.push_back(bar_of(part.name, static_cast<double>(part.bytes)));
  for (const RowFigures& row : figures.rows)
    rows.bars.push_back(bar_of(row.name, static_cast<double>(row.block_bytes) / figures.schema.block_tokens));
  for (const StateFigures& part : figures.state)
    state.bars.push_back(bar_of(part.name, static_cast<double>(part.bytes)));
  return open_page("kv4 plan") +
         fmt::format("<h1>The cache of {}</h1>\n<p>{}</p>\n", escape_html(name),
                     escape_html(describe_formats(figures.schema))) +
         table_of(figures, machine) + chart_hint() + "<div class=\"figures\">\n" + draw(whole(figures.plan)) +
         draw(parts) + draw(rows) + draw(state) + "</div>\n" + close_page();
}

}  // namespace kv4::cli
