// `kv4 bench` where kv4 was built without Google Benchmark.
#include <CLI/CLI.hpp>

#include "base/check.h"
#include "commands.h"

void add_bench(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand("bench", "Speed of every operation (this kv4 was built without it)");
  command->allow_extras();
  command->callback([] {
    kv4::fail(kv4::ErrorCode::bad_argument,
              "bench: this kv4 has no benchmarks, since it was built without Google Benchmark, as wheels are; build it "
              "from the tree: ./run, then build/kv4 bench");
  });
}
