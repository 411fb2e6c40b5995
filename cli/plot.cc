#include "plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "checks/sizes.h"

namespace kv4::cli {

using namespace checks;

namespace {

using nlohmann::ordered_json;

const char* const kUnitNames[] = {"count", "bytes", "tokens", "share", "seconds"};
const char* const kMarkNames[] = {"lines", "stack", "groups"};

const char* name_of(Unit unit) { return kUnitNames[static_cast<int>(unit)]; }

/// Whole numbers have grouped digits, others two decimals.
std::string plain_number(double value) {
  if (value == std::floor(value)) return group_digits(static_cast<std::int64_t>(value));
  return fmt::format("{:.2f}", value);
}

/// JSON for a script element: no text in it can end the element.
std::string script_json(const ordered_json& data) {
  std::string out;
  for (const char c : data.dump(-1, ' ', true, ordered_json::error_handler_t::replace))
    out += c == '<' ? "\\u003c" : std::string(1, c);
  return out;
}

using Named = std::pair<std::string, std::string>;  // name and color

std::string legend_of(const std::vector<Named>& things) {
  std::string out = "<ul class=\"legend\">";
  for (const auto& [name, color] : things)
    out += fmt::format("<li><i style=\"background:{}\"></i>{}</li>", color, escape_html(name));
  return out + "</ul>";
}

std::string row_of(const std::vector<std::string>& cells, const char* tag) {
  std::string out = "<tr>";
  for (const std::string& cell : cells) out += fmt::format("<{0}>{1}</{0}>", tag, escape_html(cell));
  return out + "</tr>\n";
}

struct Figure {
  std::string title;
  std::vector<Named> legend;
  std::string rows;  // of the table
  ordered_json data;
  bool wide = false;
};

std::string draw_figure(const Figure& figure) {
  const std::string title = escape_html(figure.title);
  return fmt::format(
      "<figure class=\"chart{}\"><figcaption>{}</figcaption>{}<div class=\"plot\" tabindex=\"0\" role=\"img\" "
      "aria-label=\"{}; the figures are "
      "below\"></div>\n<details><summary>Figures</summary><table>\n{}</table></details>"
      "\n<script type=\"application/json\">{}</script></figure>\n",
      figure.wide ? " wide" : "", title, legend_of(figure.legend), title, figure.rows, script_json(figure.data));
}

ordered_json numbers(const std::vector<double>& values) {
  ordered_json out = ordered_json::array();
  for (const double v : values) out.push_back(std::isfinite(v) ? ordered_json(v) : ordered_json());
  return out;
}

ordered_json json_of(const Panel& panel) {
  ordered_json series = ordered_json::array();
  for (const Series& s : panel.series)
    series.push_back({{"name", s.name}, {"color", s.color}, {"values", numbers(s.values)}, {"dashed", s.dashed}});
  return {{"label", panel.label},
          {"unit", name_of(panel.unit)},
          {"marks", kMarkNames[static_cast<int>(panel.marks)]},
          {"high", panel.high},
          {"series", series}};
}

}  // namespace

std::string format_value(double value, Unit unit) {
  if (!std::isfinite(value)) return "none";
  switch (unit) {
    case Unit::bytes: return human_bytes(value);
    case Unit::share: return fmt::format("{:.1f} %", 100 * value);
    case Unit::seconds: return human_seconds(value);
    case Unit::tokens:
    case Unit::count: break;
  }
  return plain_number(value);
}

std::string escape_html(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? ' ' : c;
    }
  }
  return out;
}

std::string draw(const Plot& plot) {
  Figure figure{.title = plot.title, .legend = {}, .rows = {}, .data = {}};
  std::vector<std::string> head{plot.x_label};
  if (plot.bytes_per_token > 0) head.push_back("bytes of " + plot.bytes_of);
  ordered_json panels = ordered_json::array();
  for (const Panel& panel : plot.panels) {
    panels.push_back(json_of(panel));
    for (const Series& s : panel.series) {
      figure.legend.emplace_back(s.name, s.color);
      head.push_back(s.name);
    }
  }
  figure.rows = row_of(head, "th");
  for (std::size_t i = 0; i < plot.x.size(); ++i) {
    std::vector<std::string> cells{format_value(plot.x[i], plot.x_unit)};
    if (plot.bytes_per_token > 0) cells.push_back(human_bytes(plot.x[i] * plot.bytes_per_token));
    for (const Panel& panel : plot.panels)
      for (const Series& s : panel.series) cells.push_back(format_value(s.values[i], panel.unit));
    figure.rows += row_of(cells, "td");
  }
  figure.data = {{"type", "lines"},
                 {"x",
                  {{"label", plot.x_label},
                   {"unit", name_of(plot.x_unit)},
                   {"even", plot.even},
                   {"bytes_per_token", plot.bytes_per_token},
                   {"bytes_of", plot.bytes_of},
                   {"values", numbers(plot.x)}}},
                 {"panels", panels}};
  return draw_figure(figure);
}

std::string draw(const BarChart& chart) {
  Figure figure{.title = chart.title, .legend = {}, .rows = {}, .data = {}, .wide = chart.wide};
  ordered_json bars = ordered_json::array();
  bool labelled = true;
  for (const Bar& bar : chart.bars) {
    ordered_json parts = ordered_json::array();
    for (const BarPart& part : bar.parts) {
      const Named named(part.name, part.color);
      labelled = labelled && part.name == bar.name;
      if (std::find(figure.legend.begin(), figure.legend.end(), named) == figure.legend.end())
        figure.legend.push_back(named);
      parts.push_back({{"name", part.name}, {"color", part.color}, {"value", part.value}});
      std::string name = bar.parts.size() > 1 ? part.name : bar.name;
      if (chart.unit == Unit::bytes) name += ": " + plain_number(part.value) + " bytes";
      figure.rows += row_of({name, format_value(part.value, chart.unit)}, "td");
    }
    bars.push_back({{"name", bar.name}, {"parts", parts}});
  }
  if (labelled) figure.legend.clear();  // every bar has its name beside it
  figure.data = {
      {"type", "bars"}, {"label", chart.label}, {"unit", name_of(chart.unit)}, {"high", chart.high}, {"bars", bars}};
  return draw_figure(figure);
}

}  // namespace kv4::cli
