// Traces of requests: who asked for which prefix, when. A block is what the trace names with one id.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kv4::cli {

// Of a request that is read.
constexpr std::int64_t kMaxRequestTokens = 1 << 22;  // the longest context of the models is 2^20
constexpr std::int64_t kMaxRequestIds = 1 << 15;     // 2^22 tokens by 128

/// Consecutive ids [first, first + count).
struct IdRun {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

struct TraceRequest {
  double time_s = 0;
  std::int64_t input_tokens = 0;
  std::int64_t output_tokens = 0;
  std::vector<IdRun> ids;  // chained: an id stands for its tokens and all before them
};

struct Trace {
  int id_tokens = 0;
  std::vector<TraceRequest> requests;  // in order of time
};

std::int64_t count_ids(const TraceRequest& request);
/// No fewer than the different ids of the trace.
std::int64_t bound_distinct_ids(const Trace& trace);

/// Mooncake JSONL (512 tokens per id) or weka128_rle, plain or gzip; `limit` requests at most (0: all). Throws
/// Error(bad_file) with file and line for whatever is not exactly one of them.
Trace read_trace(const std::string& path, std::int64_t limit = 0);

/// Half of the requests are of conversations that share a few system prompts and end after some turns, half of agents
/// that return again and again with a long, growing context. 128 tokens per id; equal seeds give equal traces.
Trace generate_trace(std::uint64_t seed, std::int64_t requests);

}  // namespace kv4::cli
