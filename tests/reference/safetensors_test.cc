// The reader of the reference vectors: its results, and that it refuses every damaged file.
#include "checks/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "kv4/error.h"
#include "support/device.h"

namespace kv4::checks {
namespace {

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* at = reinterpret_cast<const std::byte*>(text.data());
  return {at, at + text.size()};
}

std::string with_length(const std::string& header, std::uint64_t length, const std::string& data) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + header + data;
}

SafeTensors parse(const std::string& header, const std::string& data) {
  return parse_safetensors(bytes_of(with_length(header, header.size(), data)), "file.safetensors");
}

template <class Call>
std::string refused(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_file);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

const char* const kTwo = R"({"__metadata__":{"n":"7","eps":"1e-06","word":"two","far":"99999999999999999999"},)"
                         R"("x":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
                         R"("empty":{"dtype":"I32","shape":[0,16],"data_offsets":[8,8]},)"
                         R"("b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},)"
                         R"("u":{"dtype":"U8","shape":[3],"data_offsets":[12,15]}})";
const std::string kTwoData("\0\0\x80\x3f\0\0\x20\xc0\x80\x3f\x20\xc0\1\2\xff", 15);  // 1, -2.5; 1, -2.5; 1, 2, 255

TEST(SafeTensors, GivesTensorsByName) {
  const SafeTensors file = parse(kTwo, kTwoData);
  EXPECT_EQ(file.tensor_names(), (std::vector<std::string>{"b", "empty", "u", "x"}));
  EXPECT_EQ(file.floats("x", {2, 1}), (std::vector<float>{1.0f, -2.5f}));
  EXPECT_EQ(file.floats("b", {-1}), (std::vector<float>{1.0f, -2.5f}));
  EXPECT_EQ(file.halves("b", {2}), (std::vector<std::uint16_t>{0x3f80, 0xc020}));
  EXPECT_EQ(file.octets("u", {3}), (std::vector<std::uint8_t>{1, 2, 255}));
  EXPECT_TRUE(file.ints("empty", {0, -1}).empty());
  EXPECT_TRUE(file.contains("x"));
  EXPECT_FALSE(file.contains("y"));
  EXPECT_EQ(file.tensor("x").type, StoredType::f32);
  EXPECT_EQ(file.tensor("x").bytes.size(), 8u);
}

TEST(SafeTensors, CopiesKeepTheirOwnBytes) {
  SafeTensors copy;
  {
    const SafeTensors file = parse(kTwo, kTwoData);
    copy = file;
  }
  EXPECT_EQ(copy.floats("x", {2, 1}), (std::vector<float>{1.0f, -2.5f}));
}

TEST(SafeTensors, Metadata) {
  const SafeTensors file = parse(kTwo, kTwoData);
  EXPECT_EQ(file.metadata_int("n", 1, 7), 7);
  EXPECT_DOUBLE_EQ(file.metadata_double("eps"), 1e-6);
  EXPECT_EQ(file.metadata("word"), "two");
  EXPECT_NE(refused([&] { file.metadata_int("n", 8, 10); }).find("'7', allowed are integers from 8 to 10"),
            std::string::npos);
  EXPECT_NE(refused([&] { file.metadata_int("word", 0, 10); }).find("'two'"), std::string::npos);
  EXPECT_NE(refused([&] { file.metadata_int("far", 0, 10); }).find("'far'"), std::string::npos);
  EXPECT_NE(refused([&] { file.metadata_double("word"); }).find("'two'"), std::string::npos);
  EXPECT_NE(refused([&] { file.metadata("none"); }).find("'none'"), std::string::npos);
}

TEST(SafeTensors, NamesWhatIsMissingOrOfAnotherKind) {
  const SafeTensors file = parse(kTwo, kTwoData);
  const std::string missing = refused([&] { file.tensor("y"); });
  EXPECT_NE(missing.find("file.safetensors"), std::string::npos);
  EXPECT_NE(missing.find("'y'"), std::string::npos);
  EXPECT_NE(missing.find("b, empty, u, x"), std::string::npos);
  EXPECT_NE(refused([&] { file.floats("u", {3}); }).find("is U8, wanted F32 or BF16"), std::string::npos);
  EXPECT_NE(refused([&] { file.floats("x", {1, 2}); }).find("[2, 1], wanted [1, 2]"), std::string::npos);
  EXPECT_NE(refused([&] { file.floats("x", {2}); }).find("[2, 1], wanted [2]"), std::string::npos);
  EXPECT_NE(refused([&] { file.ints("x", {2, 1}); }).find("wanted I32"), std::string::npos);
}

struct Damage {
  const char* name;
  std::string header;
  std::string data;
  const char* says;
};

const Damage kDamages[] = {
    {"NotJson", "{\"x\":", "", "not a JSON object"},
    {"NotAnObject", "[1,2]", "", "not a JSON object"},
    {"EmptyHeader", "", "", "not a JSON object"},
    {"BrokenUtf8", "{\"\xff\":1}", "", "not a JSON object"},
    {"MetadataNotTexts", R"({"__metadata__":{"n":7}})", "", "'n'"},
    {"MetadataNotAnObject", R"({"__metadata__":[]})", "", "__metadata__"},
    {"TensorNotAnObject", R"({"x":3})", "", "'x' needs dtype"},
    {"NoShape", R"({"x":{"dtype":"U8","data_offsets":[0,1]}})", "a", "'x' needs dtype"},
    {"UnknownType", R"({"x":{"dtype":"F7","shape":[1],"data_offsets":[0,1]}})", "a", "dtype F7, known are BOOL"},
    {"TypeNotAText", R"({"x":{"dtype":[3],"shape":[1],"data_offsets":[0,1]}})", "a", "dtype array"},
    {"NegativeSize", R"({"x":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", "a", "size -1"},
    {"FractionalSize", R"({"x":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", "a", "size 1.5"},
    {"ShapeNotAList", R"({"x":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", "a", "needs a shape"},
    {"TooManyDims", R"({"x":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", "a", "needs a shape"},
    {"HugeSize", R"({"x":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1]}})", "a",
     "size 18446744073709551615"},
    {"ProductWraps", R"({"x":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", "", "more than"},
    {"SizeNotShape", R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "abcd", "4 bytes, wanted 8"},
    {"OffsetsReversed", R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", "a", "[1, 0)"},
    {"OffsetsNotTwo", R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[1]}})", "a", "[begin, end]"},
    {"OffsetsNotNumbers", R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,"1"]}})", "a", "[begin, end]"},
    {"PastTheEnd", R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "a", "[0, 2) of 1 data bytes"},
    {"Overlap",
     R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
     "abc", "overlap"},
    {"Hole", R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", "ab", "hole"},
    {"LeftOver", R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "ab", "2 data bytes, the tensors take 1"},
};

class DamagedSafeTensors : public testing::TestWithParam<Damage> {};

TEST_P(DamagedSafeTensors, IsRefused) {
  const Damage& damage = GetParam();
  const std::string message = refused([&] { parse(damage.header, damage.data); });
  EXPECT_NE(message.find("file.safetensors: "), std::string::npos) << message;
  EXPECT_NE(message.find(damage.says), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(Headers, DamagedSafeTensors, testing::ValuesIn(kDamages),
                         [](const testing::TestParamInfo<Damage>& damage) { return std::string(damage.param.name); });

TEST(SafeTensors, EveryTruncationIsRefused) {
  const std::string whole = with_length(kTwo, std::strlen(kTwo), kTwoData);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_THROW(parse_safetensors(bytes_of(whole.substr(0, length)), "cut"), Error) << length;
  }
}

TEST(SafeTensors, HeaderLengthBeyondTheFile) {
  for (std::uint64_t length : {std::uint64_t{3}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    const std::string message = refused([&] { parse_safetensors(bytes_of(with_length("{}", length, "")), "long"); });
    EXPECT_NE(message.find("header of " + std::to_string(length) + " bytes, at most 2"), std::string::npos) << message;
  }
}

TEST(SafeTensors, LoadsTheReferenceVectors) {
  const std::string root = test::source_path("tests/reference/vectors/");
  for (const char* name : {"hf_swa", "hf_csa", "hf_hca"}) {
    const SafeTensors file = load_safetensors(root + name + ".safetensors");
    const std::int64_t tokens = file.metadata_int("n_tokens", 1, 1 << 20);
    EXPECT_FALSE(file.floats("swa_kv", {tokens, file.metadata_int("head_dim", 1, 1 << 16)}).empty());
  }
  EXPECT_EQ(load_safetensors(root + "codecs.safetensors").floats("e4m3.decode", {256}).size(), 256u);
}

TEST(SafeTensors, PathsThatCannotBeRead) {
  const std::string root = test::source_path("tests/reference/");
  EXPECT_NE(refused([&] { load_safetensors(root + "none.safetensors"); }).find("none.safetensors"), std::string::npos);
  EXPECT_NE(refused([&] { load_safetensors(root); }).find("cannot be read"), std::string::npos);
}

}  // namespace
}  // namespace kv4::checks
