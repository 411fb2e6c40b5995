// The errors that a caller gets without a GPU; these tests need no GPU.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "kv4/backend.h"
#include "kv4/error.h"

namespace {

using namespace kv4;

void expect_no_device(int device) {
  const std::string why = why_no_cuda(device);
  EXPECT_GT(why.size(), 10u) << "no reason in words";
  try {
    make_cuda_backend(device);
    ADD_FAILURE() << "no Error was thrown for GPU " << device;
  } catch (const Error& e) {
    EXPECT_EQ(to_string(e.code()), std::string(to_string(ErrorCode::no_device)));
    EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
  }
}

TEST(CudaAbsent, WithoutAGpuItSaysWhy) {
  if (why_no_cuda().empty()) GTEST_SKIP() << "there is a GPU";
  expect_no_device(0);
}

TEST(CudaAbsent, GpusThatDoNotExist) {
  for (int device : {-1, -1000, 512, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    expect_no_device(device);
    if (!why_no_cuda().empty()) continue;
    EXPECT_NE(why_no_cuda(device).find(std::to_string(device)), std::string::npos) << why_no_cuda(device);
  }
}

}  // namespace
