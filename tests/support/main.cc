// The tests' main: GoogleTest's, with a choice of device.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "support/device.h"

namespace {

using kv4::test::Device;

constexpr int kBadUsage = 2, kNoGpu = 3;

// These suites use no device: they run once, on the CPU. A new suite that is not listed only costs some time.
constexpr const char* kHostOnly =
    "AttendRow.*:Base*:BadConfig*:BlockAllocator*:BlockBudget*:CacheOptionsRefused*:Codec*:CompressRow.*:ContextBudget*:"
    "*DamagedSafeTensors*:DeepJson*:ExpandStep.*:Fork.*:LayerDesc.*:LayerSchedule*:MemoryPlan*:*NoMemory*:"
    "ModelConfigJson*:ModelPreset*:Rope*:*RowFormat*:RowNames*:RowRules*:*RowKernelsTest*:SafeTensors*:Schema*:"
    "ScoreRow.*:SelectRow.*:Tier*";

int usage(const std::string& problem) {
  std::fprintf(stderr,
               "kv4_tests: %s\n"
               "usage: kv4_tests [--device cpu|far|cuda] [--skip-without-gpu] [GoogleTest's flags]\n"
               "  --device cuda       the same tests on GPU 0; without one it ends with %d\n"
               "  --skip-without-gpu  ... or with 0\n"
               "  --device far        on the CPU, in memory that the host cannot touch\n",
               problem.c_str(), kNoGpu);
  return kBadUsage;
}

void leave_out_host_only() {
  const std::string filter = GTEST_FLAG_GET(filter);
  GTEST_FLAG_SET(filter, filter + (filter.find('-') == std::string::npos ? "-" : ":") + kHostOnly);
  std::printf("Left out, they know no device: %s\n", kHostOnly);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  bool skip_without_gpu = false;
  std::string device = "cpu";
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--skip-without-gpu")
      skip_without_gpu = true;
    else if (argument.starts_with("--device="))
      device = argument.substr(9);
    else if (argument == "--device" && i + 1 < argc)
      device = argv[++i];
    else
      return usage("unknown argument '" + std::string(argument) + "'");
  }
  if (device != "cpu" && device != "far" && device != "cuda") return usage("unknown device '" + device + "'");
  if (device == "cuda" && !kv4::why_no_cuda().empty()) {
    std::printf("--device cuda: %s\n", kv4::why_no_cuda().c_str());
    return skip_without_gpu ? 0 : kNoGpu;
  }
  kv4::test::choose_device(device == "cuda" ? Device::cuda : device == "far" ? Device::far : Device::cpu);
  if (device != "cpu") leave_out_host_only();
  const int result = RUN_ALL_TESTS();
  kv4::test::drop_backends();
  return result;
}
