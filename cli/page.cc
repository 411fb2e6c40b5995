#include "page.h"

#include <fmt/format.h>

#include <cstdio>
#include <fstream>

#include "base/check.h"
#include "plot.h"

namespace kv4::cli {
namespace {

constexpr const char* kHead = R"(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
)";

constexpr const char* kStyle = R"(<style>
:root { color-scheme: light dark; --ink: light-dark(#1f2937, #e5e7eb); --grid: light-dark(#e5e7eb, #374151); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1340px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } .figures { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { flex: 1 1 560px; max-width: 650px; margin: 0; border: 1px solid var(--grid); border-radius: 8px; padding: .5rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .title { font-weight: 600; font-size: 13px; } svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
svg text.legend { font-weight: 600; fill: attr(fill); } svg .grid { stroke: var(--grid); } polyline { stroke-width: 1.8; }
table { border-collapse: collapse; margin: 1rem 0; } td { padding: .15rem 1rem .15rem 0; } td + td { text-align: right; }
</style></head><body>
)";

// Legends take their color from the attribute: a style sheet would override it.
constexpr const char* kFoot = R"(<script>
for (const text of document.querySelectorAll('svg text.legend')) text.style.fill = text.getAttribute('fill');
document.body.dataset.plots = document.querySelectorAll('svg').length;
</script></body></html>
)";

}  // namespace

std::string open_page(const std::string& title) {
  return fmt::format("{}<title>{}</title>{}", kHead, escape_html(title), kStyle);
}

std::string close_page() { return kFoot; }

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << bytes;
  out.close();
  require(!out.fail(), ErrorCode::bad_file, "{} cannot be written; is the folder there, and writable?", path);
}

void replace_file(const std::string& path, const std::string& bytes) {
  const std::string next = path + ".new";
  write_file(next, bytes);
  require(std::rename(next.c_str(), path.c_str()) == 0, ErrorCode::bad_file, "{} cannot be replaced", path);
}

}  // namespace kv4::cli
