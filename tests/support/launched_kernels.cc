#include "support/launched_kernels.h"

#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>

namespace {

std::mutex mutex;
std::vector<const void*> launches;  // each kernel once

void note(const void* kernel) {
  const std::lock_guard lock(mutex);
  if (std::find(launches.begin(), launches.end(), kernel) == launches.end()) launches.push_back(kernel);
}

}  // namespace

// The linker redirects every launch to __wrap_ (tests/CMakeLists.txt).
extern "C" {
cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) {
  note(kernel);
  return __real_cudaLaunchKernelExC(config, kernel, args);
}
}

namespace kv4::test {

LaunchedKernels::LaunchedKernels() {
  const std::lock_guard lock(mutex);
  launches.clear();
}

std::vector<std::string> LaunchedKernels::names() const {
  const std::lock_guard lock(mutex);
  std::vector<std::string> names;
  for (const void* kernel : launches) {
    const char* mangled = nullptr;
    names.push_back(cudaFuncGetName(&mangled, kernel) == cudaSuccess ? kernel_name(mangled) : "(no name)");
  }
  return names;
}

// void kv4::cuda::(anonymous namespace)::name<arguments>(parameters): the name after the last :: outside of brackets,
// up to the parameters.
std::string kernel_name(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  std::string name = status == 0 ? text.get() : mangled;
  const std::string anonymous = "(anonymous namespace)::";
  for (std::size_t at; (at = name.find(anonymous)) != std::string::npos;) name.erase(at, anonymous.size());
  std::size_t begin = 0, end = name.size();
  int depth = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (depth == 0 && name[i] == '(') {
      end = i;
      break;
    }
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (depth == 0 && (name[i] == ' ' || name[i] == ':')) begin = i + 1;
  }
  return name.substr(begin, end - begin);
}

void expect_launched(const LaunchedKernels& launched, const std::vector<std::string>& wanted) {
  const std::vector<std::string> names = launched.names();
  std::printf("kernels:");
  for (std::size_t i = 0; i < names.size(); ++i) std::printf("%s %s", i == 0 ? "" : ";", names[i].c_str());
  std::printf("\n");
  for (const std::string& want : wanted) {
    const bool with_arguments = want.find('<') != std::string::npos;
    EXPECT_TRUE(std::any_of(names.begin(), names.end(),
                            [&](const std::string& name) {
                              return name == want || (!with_arguments && name.substr(0, name.find('<')) == want);
                            }))
        << want << " was not launched";
  }
}

}  // namespace kv4::test
