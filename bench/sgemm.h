// OpenBLAS' matrix product, where the machine has the library: a core's attainable rate, in the same run.
#pragma once

#include <memory>

namespace kv4::bench {

class Sgemm {
 public:
  /// nullptr without OpenBLAS (Debian: libopenblas0-pthread). Its products run on one thread.
  static std::shared_ptr<const Sgemm> load();

  /// out [m, n] = a [m, k] times b [k, n], or times the transpose of b [n, k].
  void multiply(int m, int n, int k, const float* a, const float* b, bool b_transposed, float* out) const;

 private:
  using Function = void (*)(int order, int a_order, int b_order, int m, int n, int k, float alpha, const float* a,
                            int a_stride, const float* b, int b_stride, float beta, float* out, int out_stride);
  explicit Sgemm(Function function) : function_(function) {}

  Function function_;
};

}  // namespace kv4::bench
