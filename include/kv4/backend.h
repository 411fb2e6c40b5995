// Where a cache lives and computes. The CPU backend is always there.
#pragma once

#include <memory>

#include "kv4/export.h"

namespace kv4 {

class Backend;  // src/backend/backend.h

/// `threads`: how many threads an operation uses, the caller's included; 1 to 1024. Results do not depend on it.
/// Several caches may share a backend as long as one thread at a time drives them.
KV4_API std::shared_ptr<Backend> make_cpu_backend(int threads = 1);

/// "AVX3", "AVX2", "NEON", ... : the instruction set the row code runs on, or "scalar".
KV4_API const char* cpu_target();

}  // namespace kv4
