// Checks, error names, the digest and the tensor view's default strides.
#include "base/check.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "base/digest.h"
#include "kv4/error.h"
#include "kv4/tensor.h"

namespace {

using kv4::Error;
using kv4::ErrorCode;

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

template <class F>
std::string config_error(F&& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_config);
    return e.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

TEST(BaseCheck, ProductsAndSumsThatFit) {
  EXPECT_EQ(kv4::checked_mul(0, kLargest, "x"), 0);
  EXPECT_EQ(kv4::checked_mul(kLargest, 1, "x"), kLargest);
  EXPECT_EQ(kv4::checked_mul(std::int64_t{1} << 31, std::int64_t{1} << 31, "x"), std::int64_t{1} << 62);
  EXPECT_EQ(kv4::checked_add(kLargest - 1, 1, "x"), kLargest);
  EXPECT_EQ(kv4::checked_add(0, 0, "x"), 0);
}

TEST(BaseCheck, ProductsAndSumsThatDoNotFitNameTheirFactors) {
  const std::string product =
      config_error([] { kv4::checked_mul(std::int64_t{1} << 32, std::int64_t{1} << 31, "the pool"); });
  EXPECT_NE(product.find("the pool"), std::string::npos) << product;
  EXPECT_NE(product.find("4294967296"), std::string::npos) << product;
  EXPECT_NE(product.find("2147483648"), std::string::npos) << product;
  const std::string sum = config_error([] { kv4::checked_add(kLargest, 1, "the total"); });
  EXPECT_NE(sum.find("the total"), std::string::npos) << sum;
  EXPECT_NE(sum.find("9223372036854775807"), std::string::npos) << sum;
  config_error([] { kv4::checked_mul(-1, 1, "x"); });
  config_error([] { kv4::checked_add(1, -1, "x"); });
}

TEST(BaseCheck, RoundUp) {
  EXPECT_EQ(kv4::round_up(0, 64, "x"), 0);
  EXPECT_EQ(kv4::round_up(1, 64, "x"), 64);
  EXPECT_EQ(kv4::round_up(64, 64, "x"), 64);
  EXPECT_EQ(kv4::round_up(65, 64, "x"), 128);
  EXPECT_EQ(kv4::round_up(1153, 576, "x"), 1728);
  config_error([] { kv4::round_up(kLargest - 10, 64, "x"); });
  config_error([] { kv4::round_up(-64, 64, "x"); });
}

TEST(BaseCheck, CeilDiv) {
  EXPECT_EQ(kv4::ceil_div(0, 128), 0);
  EXPECT_EQ(kv4::ceil_div(1, 128), 1);
  EXPECT_EQ(kv4::ceil_div(128, 128), 1);
  EXPECT_EQ(kv4::ceil_div(129, 128), 2);
}

TEST(BaseCheck, RequireThrowsItsCodeAndText) {
  kv4::require(true, ErrorCode::bad_state, "never seen {}", 1);
  try {
    kv4::require(false, ErrorCode::bad_state, "length is {}; it must be {}", 3, "even");
    FAIL() << "no Error was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_state);
    EXPECT_STREQ(e.what(), "length is 3; it must be even");
  }
}

TEST(BaseNames, EveryCodeAndTypeHasItsOwn) {
  std::set<std::string> names;
  for (ErrorCode code : {ErrorCode::bad_config, ErrorCode::bad_argument, ErrorCode::bad_state, ErrorCode::bad_file,
                         ErrorCode::out_of_memory})
    EXPECT_TRUE(names.insert(kv4::to_string(code)).second);
  EXPECT_EQ(names.count("unknown"), 0u);
  EXPECT_STREQ(kv4::to_string(kv4::DType::f32), "f32");
  EXPECT_STREQ(kv4::to_string(kv4::DType::bf16), "bf16");
  EXPECT_STREQ(kv4::to_string(kv4::DType::i32), "i32");
  EXPECT_STREQ(kv4::to_string(kv4::DType::u8), "u8");
}

TEST(BaseDigest, IsXxh3) {
  // Published vectors of XXH3_64bits without seed: a change would orphan every exported image.
  EXPECT_EQ(kv4::digest64(""), 0x2D06800538D394C2u);
  EXPECT_NE(kv4::digest64("a"), kv4::digest64("b"));
  EXPECT_NE(kv4::digest64(std::string_view("a\0", 2)), kv4::digest64("a"));
}

// A view of read-only memory cannot be written through.
static_assert(!std::is_constructible_v<kv4::TensorView, kv4::ConstTensorView>);
static_assert(!std::is_constructible_v<kv4::TensorView, const float*, std::initializer_list<std::int64_t>>);
static_assert(!std::is_constructible_v<kv4::TensorView, const void*, kv4::DType, std::initializer_list<std::int64_t>>);
static_assert(std::is_convertible_v<kv4::TensorView, kv4::ConstTensorView>);

TEST(BaseTensor, ReadsWhatMayBeWritten) {
  float data[6] = {};
  const kv4::TensorView t(data, {2, 3});
  const kv4::ConstTensorView same = t, other = kv4::ConstTensorView(std::as_const(data), {3, 2});
  EXPECT_EQ(same.data, data);
  EXPECT_EQ(same.shape[1], 3);
  EXPECT_EQ(same.strides[0], 3);
  EXPECT_EQ(other.shape[1], 2);
  float elsewhere[6] = {};
  EXPECT_EQ(other.over<void>(elsewhere).data, elsewhere);
  EXPECT_EQ(other.over<void>(elsewhere).strides[0], 2);
}

TEST(BaseTensor, DenseStrides) {
  float data[24] = {};
  const kv4::TensorView t(data, {2, 3, 4});
  EXPECT_EQ(t.ndim, 3);
  EXPECT_EQ(t.strides[0], 12);
  EXPECT_EQ(t.strides[1], 4);
  EXPECT_EQ(t.strides[2], 1);
  EXPECT_EQ(t.dtype, kv4::DType::f32);
  EXPECT_FALSE(t.empty());
  EXPECT_TRUE(kv4::TensorView().empty());
  try {
    const kv4::TensorView five(data, {1, 1, 1, 1, 24});
    FAIL() << "five dimensions became " << five.ndim;
  } catch (const kv4::Error& error) {
    EXPECT_EQ(error.code(), kv4::ErrorCode::bad_argument);
    EXPECT_STREQ(error.what(), "a tensor has 5 dimensions; at most 4 are allowed");
  }
  EXPECT_EQ(kv4::element_bytes(kv4::DType::f32) + kv4::element_bytes(kv4::DType::i32), 8u);
  EXPECT_EQ(kv4::element_bytes(kv4::DType::bf16) + kv4::element_bytes(kv4::DType::u8), 3u);
}

}  // namespace
