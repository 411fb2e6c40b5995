// The device of a cache: memory and operations. The CPU backend is always there.
#pragma once

#include <memory>
#include <string>

#include "kv4/export.h"

namespace kv4 {

class Backend;  // src/backend/backend.h

/// A queue of device work, owned by the caller: a cudaStream_t. null: the device's default stream. On the CPU it means
/// nothing.
struct Stream {
  void* handle = nullptr;
};

/// `threads`: how many threads an operation uses, the caller's included; 1 to 1024. Results do not depend on it.
/// Several caches may share a backend as long as one thread at a time drives them.
KV4_API std::shared_ptr<Backend> make_cpu_backend(int threads = 1);

/// "AVX3", "AVX2", "NEON", ... : the instruction set the row code runs on, or "scalar".
KV4_API const char* cpu_target();

/// The backend of GPU `device`; its work is queued on `stream`. Throws Error(no_device) if there is no such GPU, if it
/// is too old, or if this build has no CUDA. Caches that share a backend share its stream too.
KV4_API std::shared_ptr<Backend> make_cuda_backend(int device = 0, Stream stream = {});

/// Why make_cuda_backend(device) would fail, or an empty string.
KV4_API std::string why_no_cuda(int device = 0);

}  // namespace kv4
