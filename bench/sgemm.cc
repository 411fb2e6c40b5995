#include "sgemm.h"

#include <dlfcn.h>

namespace kv4::bench {

std::shared_ptr<const Sgemm> Sgemm::load() {
  void* const library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);  // stays open: its threads may still run
  if (library == nullptr) return nullptr;
  const auto function = reinterpret_cast<Function>(dlsym(library, "cblas_sgemm"));
  const auto set_threads = reinterpret_cast<void (*)(int)>(dlsym(library, "openblas_set_num_threads"));
  if (function == nullptr || set_threads == nullptr) return nullptr;
  set_threads(1);
  return std::shared_ptr<const Sgemm>(new Sgemm(function));
}

void Sgemm::multiply(int m, int n, int k, const float* a, const float* b, bool b_transposed, float* out) const {
  constexpr int kRowMajor = 101, kAsItIs = 111, kTransposed = 112;
  function_(kRowMajor, kAsItIs, b_transposed ? kTransposed : kAsItIs, m, n, k, 1.0f, a, k, b, b_transposed ? k : n,
            0.0f, out, n);
}

}  // namespace kv4::bench
