#include "schema/layout_text.h"

#include <gtest/gtest.h>

#include <string>

#include "kv4/error.h"

namespace kv4 {
namespace {

TEST(LayoutText, ReadsWhatItDescribes) {
  for (const char* model : {"v4-flash", "v4-pro"})
    for (const Format rows : {Format::fp8_tile64, Format::fp8_row, Format::bf16})
      for (const Format keys : {Format::mxfp4, Format::nvfp4, Format::fp8, Format::bf16})
        for (const int draft_layers : {0, 2})
          for (const bool some : {false, true}) {
            CacheOptions options;
            options.row_format = rows;
            options.index_format = keys;
            options.hadamard = some;
            options.index_global_scale = some ? 0.1f : 1.0f;
            options.pending_dtype = some ? DType::bf16 : DType::f32;
            options.draft_layers = draft_layers;
            options.block_tokens = some ? 256 : 0;
            options.num_blocks = 4;
            const ModelConfig config = model_preset(model);
            if (some) {
              options.layers = {1, 2, 7};
              for (int i = 0; i < draft_layers; ++i) options.layers.push_back(config.num_layers + i);
            }
            const CacheSchema schema = build_schema(config, options);
            const CacheSchema read = parse_layout(describe_layout(schema), 5000);
            EXPECT_EQ(read.block_image_bytes, schema.block_image_bytes);
            EXPECT_EQ(describe_layout(read), describe_layout(schema));
            EXPECT_EQ(read.layers.size(), schema.layers.size());
          }
}

TEST(LayoutText, RefusesWhatItDoesNotKnow) {
  CacheOptions options;
  options.num_blocks = 4;
  const std::string text = describe_layout(build_schema(model_preset("v4-flash"), options));
  EXPECT_NO_THROW(parse_layout(text, 1));
  EXPECT_THROW(parse_layout("", 1), Error);
  EXPECT_THROW(parse_layout("kv4 image 2" + text.substr(11), 1), Error);
  EXPECT_THROW(parse_layout(text + "layer x group 0\n", 1), Error);
  EXPECT_THROW(parse_layout(text.substr(0, text.size() - 20), 1), Error);
  EXPECT_THROW(parse_layout(text + text, 1), Error);
}

}  // namespace
}  // namespace kv4
