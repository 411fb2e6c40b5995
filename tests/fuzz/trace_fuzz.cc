// Any bytes as a trace: refused with an Error, or a trace that keeps the promises of its header. The same for generated
// traces: the first bytes are their seed and number.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "kv4/error.h"
#include "replay_trace.h"

namespace {

using namespace kv4::cli;

void check(bool fine) {
  if (!fine) std::abort();
}

void check_trace(const Trace& trace) {
  check(trace.id_tokens >= 1 && !trace.requests.empty());
  double time = 0;
  std::int64_t ids = 0;
  for (const TraceRequest& request : trace.requests) {
    check(std::isfinite(request.time_s) && request.time_s >= time);
    time = request.time_s;
    check(request.input_tokens >= 1 && request.input_tokens <= kMaxRequestTokens && request.output_tokens >= 0);
    for (const IdRun& run : request.ids) check(run.first >= 0 && run.count >= 1);
    const std::int64_t count = count_ids(request), whole = request.input_tokens / trace.id_tokens;
    check(count == whole || count == whole + (request.input_tokens % trace.id_tokens != 0));
    check(count <= kMaxRequestIds);
    ids += count;
  }
  check(bound_distinct_ids(trace) >= 0 && bound_distinct_ids(trace) <= ids);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // The reader takes a path, so the bytes go into a file in memory.
  static const int file = ::memfd_create("trace", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  check(::ftruncate(file, 0) == 0 && ::pwrite(file, data, size, 0) == static_cast<ssize_t>(size));
  for (const std::int64_t limit : {0, 2}) {
    try {
      const Trace trace = read_trace(path, limit);
      check_trace(trace);
      check(limit == 0 || trace.requests.size() <= 2);
    } catch (const kv4::Error& e) {
      check(e.code() == kv4::ErrorCode::bad_file);
    }
  }
  if (size >= 9 && size % 16 == 0) {
    std::uint64_t seed;
    std::memcpy(&seed, data, sizeof(seed));
    check_trace(generate_trace(seed, 1 + data[8]));
  }
  return 0;
}
