// Replaces remote_tier_test.cc in a build without hiredis.
#include <gtest/gtest.h>

#include "kv4/error.h"
#include "tier/remote_tier.h"

namespace kv4::test {
namespace {

TEST(TierRemote, SaysHowToGetIt) {
  try {
    tier::make_remote_tier({});
    FAIL() << "made";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("libhiredis-dev"), std::string::npos) << e.what();
  }
}

TEST(TierRemote, Cluster) { GTEST_SKIP() << tier::why_no_remote_tier(); }

}  // namespace
}  // namespace kv4::test
