// `kv4 store bench`: the disk store against the disk itself, in one run.
#pragma once

#include "bench/store_cases.h"

namespace kv4::cli {

struct StoreBenchFlags {
  bench::StoreBenchOptions options;
  bool json = false;
};

int bench_store(StoreBenchFlags flags);

}  // namespace kv4::cli
