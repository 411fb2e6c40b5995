#include "kv4/names.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "kv4/error.h"

namespace kv4::test {
namespace {

template <class E, class Parse>
void expect_inverse(Parse&& parse) {
  std::set<std::string> names;
  int number = 0;
  for (const Named<E>& each : names_of<E>()) {
    EXPECT_EQ(static_cast<int>(each.value), number++) << each.name << ": in the order of the enumeration";
    EXPECT_STREQ(to_string(each.value), each.name);
    EXPECT_EQ(parse(each.name), each.value) << each.name;
    EXPECT_TRUE(names.insert(each.name).second) << each.name << " twice";
  }
  for (const std::string& wrong : {std::string(), std::string("Exact"), std::string(100'000, 'x')}) try {
      (void)parse(wrong);
      ADD_FAILURE() << "'" << wrong << "' was taken";
    } catch (const Error& e) {
      const std::string what = e.what();
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      EXPECT_LT(what.size(), 300u);
      for (const std::string& name : names) EXPECT_NE(what.find(name), std::string::npos) << what;
    }
}

TEST(Names, ParseIsTheInverseOfToString) {
  expect_inverse<Format>(parse_format);
  expect_inverse<HcaMode>(parse_hca_mode);
  expect_inverse<Arrangement>(parse_arrangement);
  expect_inverse<ScoreMode>(parse_score_mode);
  expect_inverse<EvictionKind>(parse_eviction);
  expect_inverse<SnapshotPolicy::Kind>(parse_snapshots);
  expect_inverse<Protection>(parse_protection);
}

TEST(Names, PendingRowsAreFloats) {
  EXPECT_EQ(parse_pending_dtype("f32"), DType::f32);
  EXPECT_EQ(parse_pending_dtype("bf16"), DType::bf16);
  for (const char* other : {"i32", "u8", "fp32", "float32", "F32"}) EXPECT_THROW(parse_pending_dtype(other), Error);
}

TEST(Names, ValuesThatAreNone) {
  EXPECT_STREQ(to_string(static_cast<Format>(99)), "unknown");
  EXPECT_STREQ(to_string(BlockEvent::Kind::snapshot), "snapshot");
  EXPECT_STREQ(tier::to_string(tier::FlushStatus::durable), "durable");
  EXPECT_STREQ(to_string(DType::u8), "u8");
}

}  // namespace
}  // namespace kv4::test
