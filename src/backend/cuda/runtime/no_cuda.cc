// Replaces the CUDA backend in builds without nvcc.
#include "base/check.h"
#include "kv4/backend.h"

namespace kv4 {

std::string why_no_cuda(int) { return "this build of kv4 has no CUDA; build it where nvcc is found"; }

std::shared_ptr<Backend> make_cuda_backend(int device, Stream) {
  fail(ErrorCode::no_device, "{}", why_no_cuda(device));
}

}  // namespace kv4
