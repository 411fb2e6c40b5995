// JSON nested deeper than the stack gives an error like any other bad file. (Printing such a value recurses per level.)
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "checks/safetensors.h"
#include "kv4/error.h"
#include "kv4/model_config.h"

namespace {

constexpr std::size_t kLevels = 1'000'000;

std::string nested() { return std::string(kLevels, '[') + std::string(kLevels, ']'); }

std::vector<std::byte> safetensors_file(const std::string& header) {
  const std::uint64_t length = header.size();
  std::vector<std::byte> bytes(sizeof length + header.size());
  std::memcpy(bytes.data(), &length, sizeof length);
  std::memcpy(bytes.data() + sizeof length, header.data(), header.size());
  return bytes;
}

TEST(DeepJson, Config) {
  EXPECT_THROW(kv4::parse_model_config(nested()), kv4::Error);
  EXPECT_THROW(kv4::parse_model_config(R"({"num_hidden_layers":)" + nested() + "}"), kv4::Error);
}

TEST(DeepJson, SafeTensors) {
  for (const std::string& header : {nested(), R"({"a":{"dtype":)" + nested() + "}}",
                                    R"({"a":{"dtype":"U8","shape":[)" + nested() + R"(],"data_offsets":[0,0]}})"}) {
    EXPECT_THROW(kv4::checks::parse_safetensors(safetensors_file(header), "deep"), kv4::Error);
  }
}

}  // namespace
