// A cache of one layer of each kind through kv4.h, for tests of that interface.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kv4.h"

namespace kv4::test::c_api {

inline constexpr int kTokens = 300, kHeads = 2, kTopk = 8;
inline constexpr kv4_layer_kind kKinds[] = {KV4_LAYER_KIND_SWA, KV4_LAYER_KIND_CSA, KV4_LAYER_KIND_HCA};

inline std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(count);
  for (float& x : out) x = normal(random);
  return out;
}

struct Tensor {
  std::vector<std::int64_t> shape;
  kv4_tensor c{};

  Tensor(const void* data, std::uint8_t code, std::uint8_t bits, std::vector<std::int64_t> shape_in)
      : shape(std::move(shape_in)) {
    c = {const_cast<void*>(data),
         1,
         0,
         static_cast<std::int32_t>(shape.size()),
         code,
         bits,
         1,
         shape.data(),
         nullptr,
         0};
  }
  Tensor(const Tensor&) = delete;
  Tensor(const std::vector<float>& data, std::vector<std::int64_t> shape_in)
      : Tensor(data.data(), 2, 32, std::move(shape_in)) {}
  operator const kv4_tensor*() const { return &c; }
};

inline void expect_error(kv4_status status, kv4_status expected, const char* words) {
  EXPECT_EQ(status, expected) << kv4_last_error();
  EXPECT_NE(std::strstr(kv4_last_error(), words), nullptr) << kv4_last_error() << "\nshould say: " << words;
}

/// One layer of each kind, weights bound; inputs are the same for every request.
class CApi : public testing::Test {
 protected:
  CApi() {
    kv4_model* flash = nullptr;
    EXPECT_EQ(kv4_model_preset("v4-flash", &flash), KV4_OK) << kv4_last_error();
    EXPECT_EQ(kv4_model_with_layers(flash, kKinds, 3, &model), KV4_OK) << kv4_last_error();
    kv4_model_free(flash);
    kv4_cache_options_init(&options, sizeof(kv4_cache_options));
    options.max_requests = 3;
    options.max_context = 1024;
    options.max_rewind_tokens = 4;
    options.prefix_enabled = 1;
    options.weights_id = "w";
    options.snapshots = "full";
  }
  ~CApi() override {
    kv4_cache_free(cache);
    kv4_model_free(model);
  }

  void open() {
    ASSERT_EQ(kv4_cache_new(model, &options, nullptr, &cache), KV4_OK) << kv4_last_error();
    const Tensor csa(bias, {4, 1024}), index(bias, {4, 256}), hca(bias, {128, 512}), wide(norm, {512}),
        narrow(norm, {128});
    kv4_layer_weights weights;
    kv4_layer_weights_init(&weights, sizeof(kv4_layer_weights));
    weights.position_bias = csa;
    weights.norm_weight = wide;
    weights.index_position_bias = index;
    weights.index_norm_weight = narrow;
    ASSERT_EQ(kv4_cache_bind_weights(cache, 1, &weights), KV4_OK) << kv4_last_error();
    kv4_layer_weights_init(&weights, sizeof(kv4_layer_weights));
    weights.position_bias = hca;
    weights.norm_weight = wide;
    ASSERT_EQ(kv4_cache_bind_weights(cache, 2, &weights), KV4_OK) << kv4_last_error();
  }

  /// The inputs of position p are those of row p, so they do not depend on chunks.
  void forward(kv4_request request, std::int32_t count) {
    std::int64_t at = 0;
    ASSERT_EQ(kv4_cache_length(cache, request, 0, &at), KV4_OK);
    const kv4_step_item item = {sizeof(kv4_step_item), request, count, ids.data() + at, at};
    kv4_step step;
    kv4_step_init(&step, sizeof(kv4_step));
    ASSERT_EQ(kv4_cache_prepare_forward(cache, &item, 1, 0, &step), KV4_OK) << kv4_last_error();
    const auto row = [&](std::int64_t width) { return x.data() + at * width; };
    const Tensor raw(row(512), 2, 32, {count, 512}), kv(row(1024), 2, 32, {count, 1024}),
        index_kv(row(256), 2, 32, {count, 256});
    kv4_append_inputs inputs;
    kv4_append_inputs_init(&inputs, sizeof(kv4_append_inputs));
    inputs.raw_kv = raw;
    ASSERT_EQ(kv4_cache_append(cache, 0, &inputs), KV4_OK) << kv4_last_error();
    inputs.kv = inputs.gate = raw;
    ASSERT_EQ(kv4_cache_append(cache, 2, &inputs), KV4_OK) << kv4_last_error();
    inputs.kv = inputs.gate = kv;
    inputs.index_kv = inputs.index_gate = index_kv;
    ASSERT_EQ(kv4_cache_append(cache, 1, &inputs), KV4_OK) << kv4_last_error();
    const Tensor iq(x, {count, kHeads, 128}), iw(x, {count, kHeads}), q(x, {count, kHeads, 512});
    chosen.assign(static_cast<std::size_t>(count * kTopk), -2);
    out.assign(static_cast<std::size_t>(count * kHeads * 512), 0.0f);
    const Tensor topk(chosen.data(), 0, 32, {count, kTopk}), result(out, {count, kHeads, 512});
    kv4_index_inputs indexer;
    kv4_index_inputs_init(&indexer, sizeof(kv4_index_inputs));
    indexer.q = iq;
    indexer.weights = iw;
    ASSERT_EQ(kv4_cache_index_topk(cache, 1, &indexer, topk, nullptr), KV4_OK) << kv4_last_error();
    std::vector<float> scores(static_cast<std::size_t>(count * (kTokens / 4))), fast = scores;
    ASSERT_EQ(kv4_cache_index_scores(cache, 1, &indexer, Tensor(scores, {count, kTokens / 4})), KV4_OK)
        << kv4_last_error();
    indexer.score_mode = "fast";
    ASSERT_EQ(kv4_cache_index_scores(cache, 1, &indexer, Tensor(fast, {count, kTokens / 4})), KV4_OK)
        << kv4_last_error();
    EXPECT_EQ(fast, scores);  // of mxfp4 keys fast scores are the exact ones
    std::vector<std::int32_t> best(chosen.size(), -2);
    const Tensor fast_topk(best.data(), 0, 32, {count, kTopk});
    ASSERT_EQ(kv4_cache_index_topk(cache, 1, &indexer, fast_topk, nullptr), KV4_OK) << kv4_last_error();
    EXPECT_EQ(best, chosen);
    indexer.score_mode = "quick";
    EXPECT_EQ(kv4_cache_index_topk(cache, 1, &indexer, fast_topk, nullptr), KV4_BAD_ARGUMENT);
    EXPECT_NE(std::string(kv4_last_error()).find("exact"), std::string::npos) << kv4_last_error();
    kv4_attend_inputs attend;
    kv4_attend_inputs_init(&attend, sizeof(kv4_attend_inputs));
    attend.q = q;
    attend.topk = topk;
    ASSERT_EQ(kv4_cache_attend(cache, 1, &attend, result, nullptr), KV4_OK) << kv4_last_error();
    ASSERT_EQ(kv4_cache_commit(cache, &step), KV4_OK) << kv4_last_error();
  }

  std::vector<unsigned char> image(kv4_request request) {
    std::int64_t bytes = 0;
    EXPECT_EQ(kv4_cache_image_bytes(cache, request, &bytes), KV4_OK);
    std::vector<unsigned char> image_out(static_cast<std::size_t>(bytes));
    EXPECT_EQ(kv4_cache_export_image(cache, request, image_out.data(), image_out.size()), KV4_OK) << kv4_last_error();
    return image_out;
  }

  std::vector<unsigned char> blocks(kv4_request request) {
    kv4_cache_info info;
    kv4_cache_info_init(&info, sizeof(kv4_cache_info));
    EXPECT_EQ(kv4_cache_get_info(cache, &info), KV4_OK);
    std::int64_t count = 0;
    std::int32_t block_ids[16];
    EXPECT_EQ(kv4_cache_blocks(cache, request, block_ids, 16, &count), KV4_OK);
    std::vector<unsigned char> bytes(static_cast<std::size_t>(count * info.block_image_bytes));
    EXPECT_EQ(kv4_cache_export_blocks(cache, request, bytes.data(), bytes.size()), KV4_OK) << kv4_last_error();
    return bytes;
  }

  kv4_request admit() {
    kv4_request request = KV4_NO_REQUEST;
    EXPECT_EQ(kv4_cache_admit(cache, &request), KV4_OK) << kv4_last_error();
    return request;
  }

  std::vector<float> x = random_floats(kTokens * 1024, 1), bias = random_floats(128 * 1024, 2),
                     norm = random_floats(512, 3);
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(kTokens, 7), chosen;
  std::vector<float> out;
  kv4_model* model = nullptr;
  kv4_cache_options options;
  kv4_cache* cache = nullptr;
};

}  // namespace kv4::test::c_api
