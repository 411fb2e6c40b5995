// The selection of index kernels and their grids on the host; no GPU is needed. A GPU is described by its GPCs, and a
// cluster fits into one.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <numeric>
#include <vector>

#include "backend/cuda/index/grid.cuh"
#include "backend/cuda/index/kernels.h"

namespace {

using namespace kv4;
using cuda::IndexKernel;
using cuda::IndexResult;

struct Gpu {
  std::vector<int> gpcs;  // SMs of each

  cuda::DeviceFacts facts() const { return {true, std::accumulate(gpcs.begin(), gpcs.end(), 0)}; }
  int clusters(int ctas) const {
    int sum = 0;
    for (const int sms : gpcs) sum += sms / ctas;
    return sum;
  }
};
const Gpu kH200{{16, 16, 16, 16, 16, 16, 18, 18}};  // 132 SMs
const Gpu kGpus[] = {kH200, {{16, 16, 14, 14, 18, 18, 18}}, {{18, 18, 14, 14, 14}}};  // 114 and 78 SMs

/// A tile of tokens of one or several requests. Its pointers are never read.
cuda::TokenTile make_tile(Format format, int tokens, int keys) {
  alignas(256) static std::uint8_t memory[256];
  cuda::TokenTile tile;
  ops::IndexParams& p = tile.p;
  const int payload = format == Format::fp8 ? 128 : 64, rows = 32;
  ops::KindDesc& kind = p.layer.kinds[1];
  kind.page.format = format;
  kind.page.shape = {128, 0};
  kind.page.payload = {memory, rows * (payload + 4), payload};
  kind.page.scale = {memory, rows * (payload + 4), 4};
  kind.ratio = 4;
  kind.rows_per_block = rows;
  p.step.num_tokens = p.step.num_items = tile.count = tokens;
  p.step.blocks_per_request = keys / rows;
  p.num_heads = 64;
  p.q = {memory, DType::bf16, 64 * 128};
  p.top = 512;
  p.workspace = memory;
  tile.scores = reinterpret_cast<float*>(memory);
  tile.score_stride = keys;
  tile.query_stride = ops::index_token_bytes(keys, 64, 128) - 4 * std::int64_t{keys};
  tile.skip = p.top;
  return tile;
}

template <class F>
void for_each_tile(F f) {
  for (const Format format : {Format::mxfp4, Format::fp8})
    for (const int tokens : {1, 2, 9, 13, 16, 24, 32, 64, 78, 114, 128, 132, 256, 4096})
      for (const int keys : {2048, 8192, 32768, 262144})
        f(make_tile(format, tokens, keys),
          testing::Message() << to_string(format) << ", " << tokens << " tokens, " << keys << " keys");
}

IndexKernel topk_kernel(const cuda::TokenTile& tile, const cuda::DeviceFacts& device) {
  return select_index({IndexResult::topk, IndexResult::candidates, IndexResult::exact_scores}, tile, device).kernel;
}

TEST(IndexSelect, GridsFillTheGpuAndNoMore) {
  for (const Gpu& gpu : kGpus)
    for_each_tile([&](const cuda::TokenTile& tile, const testing::Message& what) {
      const auto sms = static_cast<unsigned>(gpu.facts().num_sms);
      const unsigned ctas = cuda::score_ctas(tile, gpu.facts());
      ASSERT_GE(ctas, 1u) << what;
      ASSERT_LE(ctas, sms) << what;
      if (cuda::total_kv_tiles(tile) >= 2 * sms) ASSERT_GE(20 * ctas, 19 * (sms - 2)) << what << ", " << sms << " SMs";
    });
}

TEST(IndexSelect, ClustersRunAllAtOnce) {
  for (const Gpu& gpu : kGpus) {
    bool any = false;
    for_each_tile([&](const cuda::TokenTile& tile, const testing::Message& what) {
      const int ctas = cuda::cluster_ctas(tile, gpu.facts());
      any = any || ctas > 0;
      if (ctas > 1) ASSERT_LE(tile.count, gpu.clusters(ctas)) << what << ", " << gpu.facts().num_sms << " SMs";
    });
    EXPECT_TRUE(any);
  }
}

TEST(IndexSelect, KernelsServeWhatTheyAreFor) {
  for (const Gpu& gpu : kGpus)
    for_each_tile([&](const cuda::TokenTile& tile, const testing::Message& what) {
      const bool fp8 = tile.kind().page.format == Format::fp8;
      const IndexKernel kernel = topk_kernel(tile, gpu.facts());
      ASSERT_NE(kernel, IndexKernel::generic) << what;
      if (cuda::max_entries(tile.p) > cuda::kRowNumbers)  // no row of so many scores fits the registers of a CTA
        ASSERT_EQ(kernel, fp8 ? IndexKernel::fp8_candidates : IndexKernel::mxfp4) << what;
      const IndexKernel fast =
          select_index({IndexResult::fast_scores, IndexResult::exact_scores}, tile, gpu.facts()).kernel;
      ASSERT_EQ(fast, fp8 ? IndexKernel::fp8_raw : IndexKernel::mxfp4) << what;
    });
}

TEST(IndexSelect, TokensThatShareKeysAreScoredInGroups) {
  for (const Gpu& gpu : kGpus)
    for_each_tile([&](cuda::TokenTile tile, const testing::Message& what) {
      tile.queries = tile.p.workspace;
      const bool fp8 = tile.kind().page.format == Format::fp8;
      for (const int items : {1, 2, 3, 16, tile.count}) {
        tile.p.step.num_items = items;
        const bool share = tile.count >= 3 * items;
        const IndexKernel fast =
            select_index({IndexResult::fast_scores, IndexResult::exact_scores}, tile, gpu.facts()).kernel;
        ASSERT_EQ(fast, fp8 ? (share ? IndexKernel::fp8_groups : IndexKernel::fp8_raw)
                            : (share ? IndexKernel::mxfp4_groups : IndexKernel::mxfp4))
            << what << " of " << items << " requests";
        if (share)
          ASSERT_EQ(topk_kernel(tile, gpu.facts()),
                    fp8 ? IndexKernel::fp8_candidate_groups : IndexKernel::mxfp4_groups)
              << what;
      }
    });
}

/// Fractions of the SMs decide, not an H200's SM counts.
TEST(IndexSelect, TheNumberOfTokensInOneLaunchFollowsTheSms) {
  std::map<int, int> most;  // tokens whose scores and selection are one launch with clusters, by number of SMs
  for (const Gpu& gpu : kGpus)
    for (int tokens = 1; tokens <= 256; ++tokens)
      if (cuda::cluster_ctas(make_tile(Format::mxfp4, tokens, 8192), gpu.facts()) > 1)
        most[gpu.facts().num_sms] = tokens;
  EXPECT_EQ(most, (std::map<int, int>{{78, 39}, {114, 57}, {132, 66}}));
}

TEST(IndexSelect, OtherGpusAndLayoutsAreGeneric) {
  const cuda::TokenTile tile = make_tile(Format::mxfp4, 16, 8192);
  EXPECT_EQ(topk_kernel(tile, {false, 108}), IndexKernel::generic);
  cuda::TokenTile unaligned = tile;
  unaligned.p.layer.kinds[1].page.payload.data += 8;
  EXPECT_EQ(topk_kernel(unaligned, kH200.facts()), IndexKernel::generic);
  cuda::TokenTile other = tile;
  other.p.layer.kinds[1].page.format = Format::bf16;
  EXPECT_EQ(topk_kernel(other, kH200.facts()), IndexKernel::generic);
}

}  // namespace
