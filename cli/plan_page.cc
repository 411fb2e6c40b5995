#include "plan_page.h"

#include <fmt/format.h>

#include <algorithm>

#include "cache_flags.h"
#include "page.h"
#include "plot.h"
#include "sizes.h"

namespace kv4::cli {
namespace {

const char* const kColors[] = {"#2563eb", "#059669", "#d97706", "#7c3aed", "#dc2626", "#0891b2", "#6b7280"};

/// All of the cache as one bar, each part as wide as its share; a part says its bytes when pointed at.
std::string draw_whole(const MemoryPlan& plan) {
  constexpr double kWidth = 1000, kHeight = 60;
  std::string out = fmt::format(
      "<figure style=\"flex:1 1 100%;max-width:none\"><svg viewBox=\"0 0 {} {}\" data-part=\"whole\">"
      "<text class=\"title\" x=\"0\" y=\"16\">The whole cache: {}</text>\n",
      kWidth, kHeight + 60, human_bytes(static_cast<double>(plan.total_bytes)));
  double x = 0, legend_x = 0;
  for (std::size_t i = 0; i < plan.parts.size(); ++i) {
    const MemoryPart& part = plan.parts[i];
    const double width = static_cast<double>(part.bytes) / static_cast<double>(plan.total_bytes) * kWidth;
    const char* color = kColors[i % std::size(kColors)];
    const std::string words =
        fmt::format("{}: {} bytes, {:.2f} %", part.name, group_digits(part.bytes), width / kWidth * 100);
    out +=
        fmt::format("<rect x=\"{:.2f}\" y=\"28\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\"><title>{}</title></rect>\n",
                    x, width, kHeight, color, escape_html(words));
    x += width;
    if (width < kWidth / 500) continue;  // no room for its name either
    out += fmt::format("<text class=\"legend\" fill=\"{}\" x=\"{:.0f}\" y=\"{}\">{}</text>\n", color, legend_x,
                       kHeight + 50, escape_html(part.name));
    legend_x += 16 + 7.0 * static_cast<double>(part.name.size());
  }
  return out + "</svg></figure>\n";
}

std::string table_of(const PlanFigures& figures) {
  std::string out = "<table>\n";
  const auto row = [&](const std::string& name, const std::string& value) {
    out += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", escape_html(name), escape_html(value));
  };
  const CacheOptions& options = figures.schema.options;
  row("requests", group_digits(options.max_requests));
  row("tokens of each", group_digits(options.max_context));
  row("bytes per token", fmt::format("{:.2f}", figures.plan.bytes_per_token));
  row("bytes per token, the paper's count", fmt::format("{:.2f}", figures.paper.bytes_per_token));
  row(fmt::format("bytes of a block ({} tokens)", figures.schema.block_tokens), group_digits(figures.plan.block_bytes));
  row("state of a request, bytes", group_digits(figures.plan.state_bytes_per_request));
  row("blocks", group_digits(figures.plan.blocks));
  row("bytes in all", group_digits(figures.plan.total_bytes));
  return out + "</table>\n";
}

}  // namespace

std::string plan_page(const PlanFigures& figures) {
  const std::string name = figures.schema.config.name.empty() ? "model" : figures.schema.config.name;
  std::vector<Bar> parts, rows, state;
  for (const MemoryPart& part : figures.plan.parts) parts.push_back({part.name, static_cast<double>(part.bytes)});
  for (const RowFigures& row : figures.rows)
    rows.push_back({row.name, static_cast<double>(row.block_bytes) / figures.schema.block_tokens});
  for (const StateFigures& part : figures.state) state.push_back({part.name, static_cast<double>(part.bytes)});
  return open_page("kv4 plan") +
         fmt::format("<h1>The cache of {}</h1>\n<p>{}</p>\n", escape_html(name),
                     escape_html(describe_formats(figures.schema.options))) +
         table_of(figures) + "<div class=\"figures\">\n" + draw_whole(figures.plan) + draw_bars("By part", "B", parts) +
         draw_bars("A token's bytes, by row", "B", rows) + draw_bars("A request's state, by part", "B", state) +
         "</div>\n" + close_page();
}

}  // namespace kv4::cli
