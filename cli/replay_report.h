// A replay as a page with plots: one file, nothing fetched from elsewhere.
#pragma once

#include <string>

#include "replay_data.h"

namespace kv4::cli {

/// More replays that a report makes, of all policies at several capacities and of every kind of snapshots.
constexpr std::int64_t kReportReplays = 20;

/// Of one replay; all of it is the caller's.
struct Report {
  std::string name;  // of the trace
  const Trace& trace;
  const ReplayOptions& options;
  const DataReplayResult& data;
  std::string model;
  double bytes_per_token = 0;  // of its blocks; 0: capacities are shown in tokens only
};

/// Throws Error(bad_file) where the file cannot be written.
void write_report(const std::string& path, const Report& report);

}  // namespace kv4::cli
