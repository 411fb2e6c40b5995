// The script that draws charts in a page, with values under the pointer and a zoom.
#pragma once

namespace kv4::cli {

/// Defines `chart(figure, data)`, `format(value, unit)`, `make(tag, properties, ...children)` and `drawCharts()`, which
/// draws every figure of the page. Text becomes text nodes only, never markup.
extern const char* const kChartScript;

}  // namespace kv4::cli
