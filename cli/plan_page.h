// `kv4 plan --html`: the memory of a cache as a picture.
#pragma once

#include <string>

#include "plan_figures.h"

namespace kv4::cli {

std::string plan_page(const PlanFigures& figures, const Machine& machine);

}  // namespace kv4::cli
