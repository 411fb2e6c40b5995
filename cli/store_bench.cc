#include "store_bench.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "checks/sizes.h"
#include "checks/table.h"
#include "interrupts.h"
#include "output.h"

namespace kv4::cli {

using namespace checks;

namespace {

using nlohmann::json;

void print(const json& result) {
  fmt::print("records of {} bytes\n\n", group_digits(result["record_bytes"].get<std::int64_t>()));
  Table speeds("lrr", {"", "MB/s", "CPU-s/GB"});
  for (const auto& [name, speed] : result["speeds"].items())
    speeds.row({name, fmt::format("{:.0f}", speed["mb_per_s"].get<double>()),
                fmt::format("{:.2f}", speed["cpu_s_per_gb"].get<double>())});
  Table ratios("lrrr", {"", "median", "lowest", "highest"});
  for (const auto& [name, ratio] : result["ratios"].items())
    ratios.row({name, fmt::format("{:.2f}", ratio["median"].get<double>()),
                fmt::format("{:.2f}", ratio["lowest"].get<double>()),
                fmt::format("{:.2f}", ratio["highest"].get<double>())});
  fmt::print("{}\n", speeds.str());
  if (!result["ratios"].empty()) fmt::print("{}\n", ratios.str());
}

}  // namespace

int bench_store(StoreBenchFlags flags) {
  catch_interrupts();
  flags.options.interrupted = [] { return interrupted(); };
  const json out = bench::bench_store(flags.options, [&](const json& size) {
    if (!flags.json) print(size);
  });
  if (flags.json)
    fmt::print("{}\n", out.dump(2));
  else if (out.contains("index"))
    fmt::print("{} records: opened in {:.2f} s, without its checkpoint in {:.2f} s; a lookup takes {:.0f} ns\n",
               group_digits(flags.options.index_records), out["index"]["open_s"].get<double>(),
               out["index"]["open_without_checkpoint_s"].get<double>(), out["index"]["lookup_ns"].get<double>());
  if (!flags.json && out.contains("chunk_index"))
    fmt::print(
        "{} chunks of 4 KiB: opened in {:.2f} s, without their checkpoint in {:.2f} s; a lookup takes {:.0f} ns, "
        "in a batch {:.0f} ns\n",
        group_digits(flags.options.index_records), out["chunk_index"]["open_s"].get<double>(),
        out["chunk_index"]["open_without_checkpoint_s"].get<double>(),
        out["chunk_index"]["single_lookup_ns"].get<double>(), out["chunk_index"]["lookup_ns"].get<double>());
  flush_output();
  if (!interrupted()) return 0;
  fmt::print(stderr, "interrupted: what was measured until then is shown\n");
  return interrupted_exit_code();
}

}  // namespace kv4::cli
