// The CUDA backend's way of calling its GPU, with simulated calls and a simulated GPU; no GPU is needed.
#include "backend/cuda/runtime/device_calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace kv4::cuda {
namespace {

// The GPU of these tests.
int current_device = 0;
bool is_lost = false;
int looks = 0;           // number of checks for loss
int device_at_look = 0;  // current device at the last check

class PretendedGuard {
 public:
  explicit PretendedGuard(int device) : previous_(current_device) { current_device = device; }
  ~PretendedGuard() { current_device = previous_; }

 private:
  int previous_;
};

bool look() {
  ++looks;
  device_at_look = current_device;
  return is_lost;
}

using Calls = DeviceCalls<PretendedGuard, int>;

class DeviceCallsTest : public testing::Test {
 protected:
  static constexpr int kDevice = 3, kStream = 77;

  void SetUp() override {
    current_device = 0;
    is_lost = false;
    looks = 0;
  }

  /// A failing launch that throws as check() does.
  void launch_that_fails() {
    const Calls::Call call(calls_);
    fail(ErrorCode::device_failure, "a kernel that was queued before failed");
  }

  Calls calls_{kDevice, kStream, look};
};

TEST_F(DeviceCallsTest, AGoodCallAsksNothing) {
  {
    const Calls::Call call(calls_);
    EXPECT_EQ(current_device, kDevice);
    EXPECT_EQ(call.stream(), kStream);
    call.stream() = kStream + 1;
  }
  EXPECT_EQ(Calls::Call(calls_).stream(), kStream + 1);
  EXPECT_EQ(current_device, 0);
  EXPECT_EQ(looks, 0);
  EXPECT_FALSE(calls_.lost());
}

TEST_F(DeviceCallsTest, AFailureThatTheGpuSurvivesIsForgotten) {
  EXPECT_THROW(launch_that_fails(), Error);
  EXPECT_EQ(looks, 1);
  EXPECT_EQ(device_at_look, kDevice) << "another GPU was asked";
  EXPECT_FALSE(calls_.lost());
  EXPECT_NO_THROW(Calls::Call call(calls_));
}

TEST_F(DeviceCallsTest, AfterALostGpuEveryCallIsRefused) {
  is_lost = true;
  EXPECT_THROW(launch_that_fails(), Error);
  EXPECT_TRUE(calls_.lost());
  is_lost = false;  // the driver's later answers do not matter
  for (int i = 0; i < 2; ++i) {
    try {
      const Calls::Call call(calls_);
      ADD_FAILURE() << "a call on a lost GPU began";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::device_failure);
      EXPECT_NE(std::string(e.what()).find("context of GPU 3 is lost"), std::string::npos) << e.what();
    }
  }
  EXPECT_EQ(looks, 1) << "a GPU that is known to be lost was asked again";
  EXPECT_EQ(current_device, 0);
}

TEST_F(DeviceCallsTest, CallsInsideCallsAndWhileAnExceptionIsUnderWay) {
  struct AtTheEnd {  // like a destructor that frees GPU memory while another exception unwinds a function
    Calls& calls;
    ~AtTheEnd() { const Calls::Call call(calls); }
  };
  is_lost = true;
  try {
    const AtTheEnd end{calls_};
    throw 1;
  } catch (int) {
  }
  EXPECT_EQ(looks, 0) << "the call itself did not fail";
  EXPECT_THROW(
      {
        const Calls::Call outer(calls_);
        launch_that_fails();
      },
      Error);
  EXPECT_TRUE(calls_.lost());
}

TEST_F(DeviceCallsTest, MemoryOfALostGpuIsGivenBack) {
  is_lost = true;
  EXPECT_THROW(launch_that_fails(), Error);
  const Calls::LastCall call(calls_);
  EXPECT_EQ(call.stream(), kStream);
  EXPECT_EQ(current_device, kDevice);
}

// --- every call of the backend is covered

std::string text_of(const std::string& file) {
  std::ifstream in(std::filesystem::path(KV4_SOURCE_DIR) / "src/backend/cuda" / file);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::vector<std::string> overrides_of(const std::string& header) {
  std::vector<std::string> names;
  const std::regex pattern(R"((\w+)\([^;{}]*\)\s*(?:const\s*)?override)");
  for (std::sregex_iterator i(header.begin(), header.end(), pattern), end; i != end; ++i) names.push_back((*i)[1]);
  return names;
}

std::string body_of(const std::string& source, const std::string& name) {
  const std::size_t begin = source.find(" CudaBackend::" + name + "(");
  if (begin == std::string::npos) return {};
  std::size_t at = source.find('{', begin);
  const std::size_t first = at;
  for (int depth = 0; at < source.size(); ++at) {
    depth += source[at] == '{' ? 1 : source[at] == '}' ? -1 : 0;
    if (depth == 0) break;
  }
  return source.substr(first, at - first);
}

TEST(CudaBackendSource, EveryOperationIsACall) {
  if (!std::filesystem::exists(KV4_SOURCE_DIR)) GTEST_SKIP() << "the sources are not here: " KV4_SOURCE_DIR;
  const std::string source = text_of("runtime/cuda_backend.cc");
  const std::vector<std::string> names = overrides_of(text_of("runtime/cuda_backend.h"));
  ASSERT_GT(names.size(), 30u) << "the pattern no longer fits runtime/cuda_backend.h";
  const std::vector<std::string> giving_back = {"deallocate", "deallocate_host"};
  for (const char* name : {"index_scores", "select_topk", "index_topk", "attend", "append", "gather_window"})
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  for (const std::string& name : names) {
    if (name == "on_host" || name == "CudaBackend") continue;
    const std::string body = body_of(source, name);
    const bool gives_back = std::find(giving_back.begin(), giving_back.end(), name) != giving_back.end();
    const bool is_call = body.find("const Call call(calls_)") != std::string::npos ||
                         body.find("queue(cuda::" + name + ",") != std::string::npos;
    if (gives_back) {
      EXPECT_NE(body.find("const LastCall call(calls_)"), std::string::npos) << name;
    } else {
      EXPECT_TRUE(is_call) << name << " does not look at or set the lost GPU's flag:\n" << body;
    }
  }
  EXPECT_EQ(source.find("DeviceGuard"), std::string::npos) << "a Call has one";
}

}  // namespace
}  // namespace kv4::cuda
