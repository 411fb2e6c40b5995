#include "page.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/check.h"
#include "chart_script.h"
#include "output.h"
#include "palette.h"
#include "plot.h"

namespace kv4::cli {
namespace {

constexpr const char* kHead = R"(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
)";

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ink: light-dark(#1f2937, #e5e7eb); --faint: light-dark(#5b6472, #a3acba);
        --grid: light-dark(#e5e7eb, #374151); --paper: light-dark(#ffffff, #16191f); }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1340px; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 540px), 1fr)); gap: 1rem; }
figure { min-width: 0; margin: 0; border: 1px solid var(--grid); border-radius: 8px; padding: .5rem; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; } figcaption small { font-weight: 400; color: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; margin: 0; padding: 0; font-size: 13px; min-height: 1.5em; }
.legend i, .tip i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
.plot { position: relative; touch-action: pan-y; user-select: none; cursor: crosshair; border-radius: 4px; }
.plot:focus-visible { outline: 2px solid var(--faint); }
svg { display: block; width: 100%; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; pointer-events: none; }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; } svg .faint { fill: var(--faint); }
svg text.value { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
svg .grid { stroke: var(--grid); } polyline { fill: none; stroke-linejoin: round; }
.cross { stroke: var(--ink); stroke-dasharray: 2 2; } .chosen { fill: none; stroke: var(--faint); }
.selection { fill: var(--faint); opacity: .3; }
.tip { position: absolute; z-index: 1; pointer-events: none; background: var(--paper); border: 1px solid var(--faint); border-radius: 6px;
       padding: .2rem .5rem; font-size: 13px; max-width: 100%; overflow-wrap: anywhere; }
.reset { position: absolute; bottom: -1.6rem; right: 0; z-index: 1; font: inherit; font-size: 12px; cursor: pointer; }
details { font-size: 13px; } details > table { display: block; max-height: 20rem; overflow: auto; }
summary { color: var(--faint); cursor: pointer; }
table { border-collapse: collapse; margin: .5rem 0; }
td, th { padding: .1rem 1rem .1rem 0; text-align: right; font-weight: 400; font-variant-numeric: tabular-nums; }
th { color: var(--faint); } td:first-child, th:first-child { text-align: left; overflow-wrap: anywhere; }
.hint { color: var(--faint); font-size: 13px; }
)";

/// The target where `path` is a symbolic link, so that the link stays.
std::string behind_links(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::canonical(path, error);
  return error ? path : target.string();
}

/// Replaces whatever has that name, including a link to another place.
void make_file(const std::string& path, const std::string& bytes) {
  ::unlink(path.c_str());
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  require(file >= 0, ErrorCode::bad_file, "{} cannot be written; is the folder there, and writable?", path);
  std::size_t done = 0;
  int error = 0;
  while (done < bytes.size() && error == 0) {
    const ssize_t written = ::write(file, bytes.data() + done, bytes.size() - done);
    if (written >= 0)
      done += static_cast<std::size_t>(written);
    else if (errno != EINTR)
      error = errno;
  }
  if (::close(file) != 0 && error == 0) error = errno;
  if (error != 0) throw LostOutput(path, error);
}

}  // namespace

std::string open_page(const std::string& title) {
  return fmt::format("{}<title>{}</title><style>\n{}{}</style></head><body>\n", kHead, escape_html(title),
                     palette_css(), kStyle);
}

std::string close_page(const std::string& script) {
  return fmt::format("<script>{}{}</script></body></html>\n", kChartScript, script);
}

std::string chart_hint() {
  return "<p class=\"hint\">Point at a chart for its values. Drag over a range to zoom in, double-click to zoom out; "
         "or "
         "with the keys: arrows, +, - and 0.</p>\n";
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  require(out.is_open(), ErrorCode::bad_file, "{} cannot be written; is the folder there, and writable?", path);
  errno = 0;
  out << bytes;
  out.close();
  if (out.fail()) throw LostOutput(path, errno);
}

void replace_file(const std::string& path, const std::string& bytes) {
  const std::string target = behind_links(path);
  if (struct stat there{}; ::lstat(target.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
    write_file(target, bytes);
    return;
  }
  const std::string next = target + ".new";
  try {
    make_file(next, bytes);
    require(std::rename(next.c_str(), target.c_str()) == 0, ErrorCode::bad_file, "{} cannot be replaced", path);
  } catch (...) {
    ::unlink(next.c_str());
    throw;
  }
}

}  // namespace kv4::cli
