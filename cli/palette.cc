#include "palette.h"

#include <fmt/format.h>

namespace kv4::cli {
namespace {

struct Thing {
  std::string_view name, color, on_dark;
};

// Okabe and Ito's colors and Tol's muted ones, which people with any color vision can tell apart. Things that share a
// chart differ; dark colors are brighter on a dark page.
constexpr Thing kThings[] = {
    // Blocks and tokens of a replay, and of a running cache.
    {"found", "#0072b2", "#4aa3df"},
    {"found lately", "#9ad0f5", "#2d5f85"},
    {"computed", "#e69f00", "#e69f00"},
    {"computed again", "#b8860b", "#d9a93c"},
    {"evicted", "#d55e00", "#f07a2b"},
    {"held", "#cc79a7", "#cc79a7"},
    {"kept", "#009e73", "#22b58b"},
    // Policies.
    {"lru", "#332288", "#8f84e8"},
    {"s3fifo", "#44aa99", "#44aa99"},
    {"density", "#cc6677", "#dd7788"},
    // Times of requests.
    {"admit", "#882255", "#d0659c"},
    {"prefill", "#999933", "#b9b94a"},
    // Tiers.
    {"device", "#117733", "#3fae63"},
    {"host", "#56b4e9", "#56b4e9"},
    {"disk", "#aa4499", "#cf6fc0"},
    {"remote", "#ddcc77", "#ddcc77"},
    // Memory of a cache.
    {"CSA entries", "#0072b2", "#4aa3df"},
    {"entries", "#e69f00", "#e69f00"},
    {"index keys", "#009e73", "#22b58b"},
    {"HCA entries", "#e69f00", "#e69f00"},
    {"SWA entries", "#f0e442", "#f0e442"},
    {"windows", "#aa4499", "#cf6fc0"},
    {"CSA pending", "#d55e00", "#f07a2b"},
    {"HCA state", "#56b4e9", "#56b4e9"},
    {"pending rows", "#d55e00", "#f07a2b"},
    {"draft windows", "#332288", "#8f84e8"},
    {"spare slots", "#117733", "#3fae63"},
    {"step workspace", "#882255", "#d0659c"},
    {"index workspace", "#ddcc77", "#ddcc77"},
    {"candidates", "#997700", "#bb9922"},
    {"attend workspace", "#cc6677", "#dd7788"},
    {"undo rows", "#999933", "#b9b94a"},
    {"tables", "#44aa99", "#44aa99"},
    {"token ids", "#cc79a7", "#cc79a7"},
};
constexpr Thing kOther = {"other", "#808080", "#9a9a9a"};

std::string variable(std::string_view name) {
  std::string out = "--";
  for (const char c : name) out += c == ' ' ? '-' : c;
  return out;
}

std::string rule(const Thing& thing) {
  return fmt::format("{}: light-dark({}, {}); ", variable(thing.name), thing.color, thing.on_dark);
}

}  // namespace

std::string color_of(std::string_view thing) {
  for (const Thing& known : kThings)
    if (known.name == thing) return fmt::format("var({})", variable(known.name));
  return fmt::format("var({})", variable(kOther.name));
}

std::string palette_css() {
  std::string out = ":root { ";
  for (const Thing& thing : kThings) out += rule(thing);
  return out + rule(kOther) + "}\n";
}

}  // namespace kv4::cli
