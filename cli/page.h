// A page of figures and tables that needs nothing else: no file, no server.
#pragma once

#include <string>

namespace kv4::cli {

/// Up to the open body, and from there to the end. Between them: headings, tables, `<div class="figures">` of plots,
/// which the script at the end draws.
std::string open_page(const std::string& title);
std::string close_page(const std::string& script = "drawCharts();");
/// How charts are used.
std::string chart_hint();

/// Throws Error(bad_file) where it cannot be opened, LostOutput where bytes do not arrive.
void write_file(const std::string& path, const std::string& bytes);
/// The same; a reader finds the old bytes or the new ones at any time. A symbolic link stays, and its file gets the
/// bytes. Pipes and devices stay, too, and are written into.
void replace_file(const std::string& path, const std::string& bytes);

}  // namespace kv4::cli
