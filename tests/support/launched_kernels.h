// Which kernels a test has launched, by name. Of binaries with CUDA; they are linked so that every launch is seen.
#pragma once

#include <string>
#include <vector>

namespace kv4::test {

/// Kernels that were launched since it was made, from any thread.
class LaunchedKernels {
 public:
  LaunchedKernels();
  /// In the order of their first launches, with template arguments and without namespaces or parameters:
  /// `attend_split_kv<1, false, false, true>`.
  std::vector<std::string> names() const;
};

/// What a kernel's mangled name says: its name with template arguments.
std::string kernel_name(const char* mangled);

/// Prints the names, after "kernels: ", and expects a kernel of every name in `wanted`: with template arguments, or
/// without for any.
void expect_launched(const LaunchedKernels& launched, const std::vector<std::string>& wanted);

}  // namespace kv4::test
