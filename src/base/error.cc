#include "kv4/error.h"

#include "base/check.h"
#include "kv4/tensor.h"

namespace kv4 {

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::bad_config: return "bad_config";
    case ErrorCode::bad_argument: return "bad_argument";
    case ErrorCode::bad_state: return "bad_state";
    case ErrorCode::bad_file: return "bad_file";
    case ErrorCode::out_of_memory: return "out_of_memory";
    case ErrorCode::no_device: return "no_device";
    case ErrorCode::device_failure: return "device_failure";
  }
  return "unknown";
}

namespace {

const Error no_memory(ErrorCode::out_of_memory,
                      "the machine refused memory; nothing has changed: free some, or ask for less, and call again");

}  // namespace

void fail_for_memory() { throw no_memory; }  // a copy shares the text

std::int64_t checked_mul(std::int64_t a, std::int64_t b, const char* what) {
  std::int64_t out = 0;
  require(a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, &out), ErrorCode::bad_config,
          "{}: {} x {} does not fit 63 bits; ask for fewer requests, blocks or tokens", what, a, b);
  return out;
}

std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* what) {
  std::int64_t out = 0;
  require(a >= 0 && b >= 0 && !__builtin_add_overflow(a, b, &out), ErrorCode::bad_config,
          "{}: {} + {} does not fit 63 bits; ask for fewer requests, blocks or tokens", what, a, b);
  return out;
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple, const char* what) {
  return checked_add(value, multiple - 1, what) / multiple * multiple;
}

void throw_too_many_dims(std::size_t dims) {
  fail(ErrorCode::bad_argument, "a tensor has {} dimensions; at most {} are allowed", dims, TensorView::kMaxDims);
}

}  // namespace kv4
