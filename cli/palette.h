// One color per thing in all charts of all pages.
#pragma once

#include <string>
#include <string_view>

namespace kv4::cli {

/// `var(--...)` of a thing: "found", "lru", "CSA entries". Grey for what has no color of its own, as tiers of others.
std::string color_of(std::string_view thing);
/// The variables, for a style sheet.
std::string palette_css();

}  // namespace kv4::cli
