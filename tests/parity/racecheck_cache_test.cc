// Small steps of a cache for compute-sanitizer's racecheck, and checks of racecheck's lists: see racecheck.h.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "kv4/cuda.h"
#include "parity/racecheck.h"
#include "parity/twin_caches.h"
#include "support/launched_kernels.h"

#define KV4_NEEDS_GPU() \
  if (!kv4::why_no_cuda().empty()) GTEST_SKIP() << kv4::why_no_cuda()

namespace kv4::test {
namespace {

class RacecheckCache : public testing::TestWithParam<std::size_t> {};

// A prefill, decodes with padding, and all gathers.
TEST_P(RacecheckCache, AppendsAndGathers) {
  KV4_NEEDS_GPU();
  const LaunchedKernels launched;
  const Model model(real_config());
  CacheOptions o = options_for(format_cases()[GetParam()]);
  o.max_context = o.max_step_tokens = 300;
  o.max_requests = 2;
  TwinCaches t(model, o, {}, make_cuda_backend());
  const RequestId a = t.admit(), b = t.admit();
  t.run({{a, 1, 200}});
  t.run({{b, 2, 9}, {kNoRequest, 0, 1}, {a, 1, 3}});
  const Step step = t.prepare({{a, 1, 1}, {b, 2, 1}}).value();
  t.append(step);
  t.check_gathers(step, 1, "open step");
  t.commit(step);
  for (const RequestId r : {a, b}) t.check(r, "at the end");
  expect_launched(launched, {"prefill_kernel", "decode_kernel", "gather_rows", "gather_chosen_rows", "expand"});
}

INSTANTIATE_TEST_SUITE_P(, RacecheckCache, testing::Values(0, 5), [](const auto& i) {
  std::string name = format_cases()[i.param].name();
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return name;
});

TEST(RacecheckCacheCopy, OfManyBytes) {
  KV4_NEEDS_GPU();
  int major = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  if (major != 9) GTEST_SKIP() << "bulk copies are for Hopper";
  const LaunchedKernels launched;
  constexpr std::int64_t kBytes = std::int64_t{4} << 20;  // two pieces: enough bytes for bulk copies
  std::vector<std::uint8_t> bytes(2 * kBytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 2654435761u >> 24);
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 2 * bytes.size()), cudaSuccess);
  std::uint8_t *const from = static_cast<std::uint8_t*>(memory), *const to = from + bytes.size();
  ASSERT_EQ(cudaMemcpy(from, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), cudaSuccess);
  ASSERT_EQ(cudaMemset(to, 0, bytes.size()), cudaSuccess);
  const ops::CopyPiece pieces[] = {{from, to, kBytes}, {from + kBytes, to + kBytes, kBytes}};
  EXPECT_EQ(cuda::copy_few_pieces(pieces, nullptr), cudaSuccess);
  std::vector<std::uint8_t> got(bytes.size());
  EXPECT_EQ(cudaMemcpy(got.data(), to, got.size(), cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_TRUE(got == bytes);
  cudaFree(memory);
  expect_launched(launched, {"copy_bulk"});
}

// --- the lists

/// Tuned kernels of the sources, each with its body.
std::map<std::string, std::string> tuned_kernels() {
  std::map<std::string, std::string> kernels;
  const std::regex pattern(R"(__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\()");
  for (const auto& file :
       std::filesystem::recursive_directory_iterator(std::filesystem::path(KV4_SOURCE_DIR) / "src/backend/cuda")) {
    const std::string name = file.path().filename().string();
    if (name.find("generic.") != std::string::npos || name.find(".cu") == std::string::npos) continue;
    std::ifstream in(file.path());
    std::ostringstream text;
    text << in.rdbuf();
    const std::string source = text.str();
    for (std::sregex_iterator i(source.begin(), source.end(), pattern), end; i != end; ++i) {
      const std::size_t begin = static_cast<std::size_t>(i->position());
      kernels[(*i)[1]] = source.substr(begin, source.find("\n}\n", begin) - begin);
    }
  }
  return kernels;
}

TEST(RacecheckList, HasEveryTunedKernelOfTheSources) {
  if (!std::filesystem::exists(KV4_SOURCE_DIR)) GTEST_SKIP() << "the sources are not here: " KV4_SOURCE_DIR;
  std::set<std::string> listed;
  listed.insert(std::begin(kRacecheckAttend), std::end(kRacecheckAttend));
  listed.insert(std::begin(kRacecheckIndex), std::end(kRacecheckIndex));
  listed.insert(std::begin(kRacecheckCache), std::end(kRacecheckCache));
  const std::map<std::string, std::string> kernels = tuned_kernels();
  EXPECT_GT(kernels.size(), 20u) << "the pattern does not match the sources";
  for (const auto& [name, body] : kernels) {
    const bool has_none = std::find(std::begin(kWithoutSharedMemory), std::end(kWithoutSharedMemory), name) !=
                          std::end(kWithoutSharedMemory);
    EXPECT_TRUE(listed.count(name) == 1 || has_none) << name << " is in no list of racecheck.h";
    if (has_none) {
      EXPECT_EQ(body.find("__shared__"), std::string::npos) << name << " has shared memory";
    }
  }
  for (const std::string& name : listed) EXPECT_EQ(kernels.count(name), 1u) << name << " is not a kernel";
}

TEST(RacecheckList, KernelNamesAreReadable) {
  EXPECT_EQ(
      kernel_name("_ZN3kv44cuda44_GLOBAL__N__10c0ffee_11_split_kv_cu_60b9a69215attend_split_kvILi1ELb0ELb0ELb1EEEvNS_"
                  "3ops12AttendParamsEii"),
      "attend_split_kv<1, false, false, true>");
  EXPECT_EQ(kernel_name("_ZN3kv44cuda12_GLOBAL__N_117attend_persistentENS_3ops12AttendParamsEib"), "attend_persistent");
  EXPECT_EQ(kernel_name("_Z6kernelISt6vectorIiSaIiEEEvT_"), "kernel<std::vector<int, std::allocator<int> > >");
}

}  // namespace
}  // namespace kv4::test
