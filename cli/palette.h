// One color per thing in all charts of all pages.
#pragma once

#include <string>
#include <string_view>

namespace kv4::cli {

/// `var(--...)` of a thing: "found", "lru", "CSA entries". Grey for one without its own color, such as foreign tiers.
std::string color_of(std::string_view thing);
/// The variables as style sheet text.
std::string palette_css();

}  // namespace kv4::cli
