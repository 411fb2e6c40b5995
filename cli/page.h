// A self-contained page of figures and tables: it needs no other file and no server.
#pragma once

#include <string>

namespace kv4::cli {

/// Open and close a page. Headings, tables and `<div class="figures">` of plots go between them; the script at the end
/// draws the plots.
std::string open_page(const std::string& title);
std::string close_page(const std::string& script = "drawCharts();");
/// Explains how to use the charts.
std::string chart_hint();

/// Throws Error(bad_file) where the file cannot be opened, LostOutput where bytes do not arrive.
void write_file(const std::string& path, const std::string& bytes);
/// The same, but a reader finds either the old bytes or the new ones at any time. A symbolic link stays, and its target
/// gets the bytes. Pipes and devices stay too, and are written to.
void replace_file(const std::string& path, const std::string& bytes);

}  // namespace kv4::cli
