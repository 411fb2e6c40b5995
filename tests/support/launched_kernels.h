// The names of the kernels that a test launches. For binaries with CUDA, which are linked so that every launch is seen.
#pragma once

#include <string>
#include <vector>

namespace kv4::test {

/// Kernels launched since the object was made, from any thread.
class LaunchedKernels {
 public:
  LaunchedKernels();
  /// In the order of their first launches, with template arguments and without namespaces or parameters:
  /// `attend_split_kv<1, false, false, true>`.
  std::vector<std::string> names() const;
};

/// The name in a kernel's mangled name, with template arguments.
std::string kernel_name(const char* mangled);

/// Prints the names, after "kernels: ", and expects a kernel for every name in `wanted`. A name with template arguments
/// needs exactly these; one without allows any.
void expect_launched(const LaunchedKernels& launched, const std::vector<std::string>& wanted);

}  // namespace kv4::test
