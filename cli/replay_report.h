// A replay as a page with plots: one file that loads nothing from elsewhere.
#pragma once

#include <string>

#include "replay_data.h"

namespace kv4::cli {

/// Further replays for a report: all policies at several capacities, and every kind of snapshots.
constexpr std::int64_t kReportReplays = 20;

/// The report of one replay; the caller owns everything in it.
struct Report {
  std::string name;  // of the trace
  const Trace& trace;
  const ReplayOptions& options;
  const DataReplayResult& data;
  std::string model;
  double bytes_per_token = 0;  // of the trace's blocks; 0: capacities are shown in tokens only
};

/// Throws Error(bad_file) where the file cannot be written.
void write_report(const std::string& path, const Report& report);

}  // namespace kv4::cli
