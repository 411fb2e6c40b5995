// Traces of requests: which prefixes they ask for, and when. A block is the tokens that the trace names with one id.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kv4::cli {

// Limits of a request that is read.
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
/// An upper bound of the number of distinct ids.
std::int64_t bound_distinct_ids(const Trace& trace);

/// Mooncake JSONL (512 tokens per id) or weka128_rle, plain or gzip; at most `limit` requests (0: all). Throws
/// Error(bad_file) with file and line for any deviation from these formats.
Trace read_trace(const std::string& path, std::int64_t limit = 0);

/// Half of the requests are conversations that share a few system prompts and end after some turns. The other half are
/// agents that return many times with a long, growing context. 128 tokens per id; equal seeds give equal traces.
Trace generate_trace(std::uint64_t seed, std::int64_t requests);

}  // namespace kv4::cli
