// The cases of `kv4 bench`. A case makes its data once and then repeats its operation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/row_kernels.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::bench {

/// One operation: its time and the bytes it had to touch (0: negligible).
struct Sample {
  double seconds = 0;
  std::int64_t bytes = 0;
  std::int64_t items = 1;    // tokens, rows, requests, ...: see Case::item
  double plain_seconds = 0;  // the same with the plain row code; 0: not measured
  double sgemm_seconds = 0;  // OpenBLAS' matrix products of the same shapes; 0: not measured
};
using Operation = std::function<Sample()>;

struct Case {
  std::string name;
  std::string item;  // what Sample::items counts
  std::function<Operation()> make;
};

struct BenchSettings {
  ModelConfig config;
  int threads = 1;
  const cpu::RowKernels* kernels = &cpu::best_row_kernels();
};

void add_append_cases(std::vector<Case>& cases, const BenchSettings& settings);
void add_context_cases(std::vector<Case>& cases, const BenchSettings& settings);
void add_gather_cases(std::vector<Case>& cases, const BenchSettings& settings);
void add_read_cases(std::vector<Case>& cases, const BenchSettings& settings);
void add_snapshot_cases(std::vector<Case>& cases, const BenchSettings& settings);
void add_control_cases(std::vector<Case>& cases, const BenchSettings& settings);
inline std::vector<Case> all_cases(const BenchSettings& settings) {
  std::vector<Case> cases;
  for (const auto add :
       {add_append_cases, add_gather_cases, add_read_cases, add_snapshot_cases, add_context_cases, add_control_cases})
    add(cases, settings);
  return cases;
}

struct ResidentMemory {
  std::int64_t planned_bytes = 0, grown_bytes = 0;  // planned: without workspaces of index scores and attend

  /// As a share of the plan.
  double difference() const {
    return static_cast<double>(grown_bytes - planned_bytes) / static_cast<double>(planned_bytes);
  }
};

/// Fills pools of at least a gigabyte and measures the growth of the process's resident memory.
ResidentMemory measure_resident_memory(const BenchSettings& settings);

}  // namespace kv4::bench
