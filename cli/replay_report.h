// A replay as a page with plots: one file, nothing fetched from elsewhere.
#pragma once

#include <string>

#include "replay_data.h"

namespace kv4::cli {

/// More replays that a report makes, of all policies at several capacities and of every kind of snapshots.
constexpr std::int64_t kReportReplays = 20;

/// Throws Error(bad_file) where the file cannot be written.
void write_report(const std::string& path, const std::string& name, const Trace& trace, const ReplayOptions& options,
                  const DataReplayResult& data);

}  // namespace kv4::cli
