// The selection of attend's kernels on the host; no GPU is needed. A GPU is described by its GPCs, and a cluster fits
// into one.
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "backend/cuda/attend/foreign.cuh"
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/staged.cuh"
#include "kv4/schema.h"

namespace {

using namespace kv4;
using cuda::AttendKernel;
using cuda::AttendSplit;

/// SMs per GPC.
cuda::AttendGpu make_gpu(std::initializer_list<int> gpcs) {
  cuda::AttendGpu gpu;
  gpu.is_sm90 = true;
  gpu.num_sms = std::accumulate(gpcs.begin(), gpcs.end(), 0);
  const auto clusters = [&](int ctas, int ctas_per_sm) {
    int sum = 0;
    for (const int sms : gpcs) sum += sms * ctas_per_sm / ctas;
    return sum;
  };
  for (int ctas = 1; ctas <= cuda::kMaxCluster; ++ctas) gpu.wgmma[static_cast<std::size_t>(ctas)] = clusters(ctas, 1);
  const auto variants = cuda::attend_kernels()[static_cast<std::size_t>(AttendKernel::small_batch)].variants;
  for (std::size_t i = 0; i < variants.size(); ++i)
    for (const int splits : {1, 2, 4, 8, cuda::kNineSplits, 16})
      if (variants[i].stages > 1 || splits != cuda::kNineSplits)
        gpu.small_batch[i][static_cast<std::size_t>(splits)] = clusters(splits, variants[i].stages <= 2 ? 2 : 1);
  return gpu;
}

const cuda::AttendGpu kH200 = make_gpu({16, 16, 16, 16, 16, 16, 18, 18});
const cuda::AttendGpu kGpus[] = {kH200, make_gpu({16, 16, 14, 14, 18, 18, 18}), make_gpu({18, 18, 14, 14, 14})};

/// A supported problem. The arrays that the params point to are never read.
ops::AttendParams make_params(int requests, int tokens_per_request, int heads) {
  static const ops::StepRecord record;
  ops::AttendParams p;
  p.layer.window.ring.format = p.layer.kinds[0].page.format = Format::fp8_tile64;
  p.layer.window.ring.shape = p.layer.kinds[0].page.shape = {512, 64};
  p.layer.window_tokens = 128;
  p.step.tokens = &record;
  p.step.num_tokens = requests * tokens_per_request;
  p.step.num_items = requests;
  p.num_heads = heads;
  p.softmax_scale = 1.0f;
  p.q.dtype = DType::bf16;
  p.q.row_stride = heads * 512;
  return p;
}

enum class Kind { swa, csa, hca };
const char* name_of(Kind kind) { return kind == Kind::swa ? "SWA" : kind == Kind::csa ? "CSA" : "HCA"; }

void add_entries(ops::AttendParams& p, Kind kind, int context) {
  static const std::int32_t entry = 0;
  if (kind == Kind::swa) return;
  p.layer.num_kinds = 1;
  p.layer.kinds[0].ratio = kind == Kind::csa ? 4 : 128;
  p.layer.kinds[0].rows_per_block = 128 / p.layer.kinds[0].ratio;
  p.step.blocks_per_request = (context + 127) / 128;
  if (kind == Kind::csa) {
    p.chosen.data = &entry;
    p.num_chosen = 512;
  }
}

void add_workspace(ops::AttendParams& p) {
  alignas(16) static std::uint8_t workspace[16];
  p.workspace = workspace;
  p.workspace_bytes = ops::attend_workspace_bytes();
}

AttendKernel kernel_of(const ops::AttendParams& p) { return select_attend(p, kH200).kernel; }

template <class F>
void for_each_problem(F f) {
  for (const int requests : {1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 200, 256})
    for (const int tokens : {1, 2, 4, 16, 256, 1024})
      for (const int heads : {8, 16, 32, 64, 128})
        for (const Kind kind : {Kind::swa, Kind::csa, Kind::hca})
          for (const int context : {128, 1024, 16384, 131072, 1048576})
            for (const bool workspace : {false, true}) {
              ops::AttendParams p = make_params(requests, tokens, heads);
              add_entries(p, kind, context);
              if (workspace) add_workspace(p);
              f(p, testing::Message() << requests << " requests, " << tokens << " tokens each, " << heads << " heads, "
                                      << name_of(kind) << ", context " << context
                                      << (workspace ? ", with a workspace" : ""));
            }
}

TEST(AttendSelect, ChoosesWhatCanRun) {
  for (const cuda::AttendGpu& gpu : kGpus)
    for_each_problem([&](const ops::AttendParams& p, const testing::Message& what) {
      const AttendSplit split = select_attend(p, gpu);
      ASSERT_NE(split.kernel, AttendKernel::generic) << what;
      ASSERT_TRUE(cuda::attend_kernels()[static_cast<std::size_t>(split.kernel)].can_run(p, split))
          << describe(split) << ": " << what;
    });
}

// A change of the selection must be deliberate and measured; then it changes these numbers, too.
TEST(AttendSelect, IsTheMeasuredOne) {
  std::map<std::string, int> counts;
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a over all choices
  for (const cuda::AttendGpu& gpu : kGpus)
    for_each_problem([&](const ops::AttendParams& p, const testing::Message&) {
      const AttendSplit s = select_attend(p, gpu);
      ++counts[cuda::attend_kernels()[static_cast<std::size_t>(s.kernel)].name];
      for (const int x :
           {static_cast<int>(s.kernel), s.kv_splits, s.channel_splits, static_cast<int>(s.cta_pair), s.heads, s.stages})
        hash = (hash ^ static_cast<std::uint64_t>(x)) * 1099511628211u;
    });
  const std::map<std::string, int> kCounts = {
      {"persistent", 3920}, {"persistent window", 3920}, {"single-pass window", 4030}, {"small batch", 4739},
      {"split-KV", 7174},   {"split-KV in memory", 151}, {"token pair", 4930},         {"unsplit", 3536},
  };
  EXPECT_EQ(counts, kCounts);
  EXPECT_EQ(hash, 10309254485343543549u);
}

TEST(AttendSelect, UnsupportedProblemsAreGeneric) {
  ops::AttendParams p = make_params(1, 1, 64);
  EXPECT_EQ(select_attend(p, cuda::AttendGpu{}).kernel, AttendKernel::generic);
  p.q.dtype = DType::f32;
  EXPECT_EQ(kernel_of(p), AttendKernel::generic);
  p = make_params(1, 1, 64);
  p.layer.window.ring.shape = {256, 64};
  EXPECT_EQ(kernel_of(p), AttendKernel::generic);
}

TEST(AttendSelect, ForeignListsAndFlashMlaLseAreGeneric) {
  static const std::int32_t slot = 0;
  static float number;
  ops::AttendParams plain = make_params(4, 1, 64);
  plain.step.tokens = nullptr;
  plain.window_slots = {&slot, 128, nullptr};
  add_entries(plain, Kind::hca, 4096);
  plain.entry_slots = {&slot, 512, &slot};
  ASSERT_NE(kernel_of(plain), AttendKernel::generic);
  const auto expect_generic = [&](auto change) {
    ops::AttendParams p = plain;
    change(p);
    EXPECT_EQ(kernel_of(p), AttendKernel::generic);
    for (const cuda::AttendKernelInfo& kernel : cuda::attend_kernels())
      for (const cuda::AttendVariant& v : kernel.variants) {
        const AttendSplit split{kernel.kernel, v.min_kv_splits, v.channel_splits, v.cta_pair, v.heads, v.stages};
        EXPECT_FALSE(kernel.can_run(p, split)) << kernel.name;
      }
  };
  expect_generic([](ops::AttendParams& p) { p.window_slots.count = 100; });
  expect_generic([](ops::AttendParams& p) { p.entry_slots.limit = 1 << 20; });
  expect_generic([](ops::AttendParams& p) { p.entry_slots.tokens_per_request = 2; });
  expect_generic([](ops::AttendParams& p) { p.lse_mode = ops::LseMode::rows; });
  expect_generic([](ops::AttendParams& p) { p.max_logits = &number; });
}

TEST(AttendSelect, DenseBf16RowsByListHaveAKernel) {
  alignas(16) static std::uint8_t row[16];
  static const std::int32_t slot = 0;
  static float number;
  ops::AttendParams rows = make_params(4, 1, 64);
  rows.layer = {};
  rows.layer.num_kinds = 1;
  rows.layer.kinds[0].rows_per_block = 32;
  rows.layer.kinds[0].page = {Format::bf16, {512, 0}, {row, 32 * 1024, 1024}, {}, {}};
  rows.step.tokens = nullptr;
  rows.entry_slots = {&slot, 70, &slot, 1 << 20, 64};
  rows.sink = rows.lse = rows.max_logits = &number;
  for (const ops::LseMode mode : {ops::LseMode::all, ops::LseMode::rows}) {
    rows.lse_mode = mode;
    EXPECT_EQ(kernel_of(rows), AttendKernel::bf16_rows);
    EXPECT_EQ(select_attend(rows, cuda::AttendGpu{}).kernel, AttendKernel::generic);
  }
  const auto expect_generic = [&](auto change) {
    ops::AttendParams p = rows;
    change(p);
    EXPECT_EQ(kernel_of(p), AttendKernel::generic);
  };
  expect_generic([](ops::AttendParams& p) { p.layer.kinds[0].page.payload.row_stride = 1040; });
  expect_generic([](ops::AttendParams& p) { p.layer.kinds[0].page.payload.block_stride += 1024; });
  expect_generic([](ops::AttendParams& p) { p.layer.kinds[0].page.payload.data = row + 8; });
  expect_generic([](ops::AttendParams& p) { p.layer.kinds[0].page.format = Format::fp8_tile64; });
  expect_generic([](ops::AttendParams& p) { p.layer.kinds[0].page.shape.width = 256; });
  expect_generic([](ops::AttendParams& p) { p.q.dtype = DType::f32; });
  expect_generic([](ops::AttendParams& p) { p.entry_slots.tokens_per_request = 2; });
  expect_generic([](ops::AttendParams& p) { p.window_slots = {&slot, 1, nullptr}; });
}

TEST(AttendSelect, AListWorkspaceMakesForeignListsPlain) {
  static const std::int32_t slot = 0;
  alignas(256) static std::uint8_t workspace[256];
  static float number;
  ops::AttendParams p = make_params(4, 1, 64);
  p.step.tokens = nullptr;
  p.sink = p.lse = &number;
  p.lse_mode = ops::LseMode::rows;
  add_entries(p, Kind::hca, 4096);
  p.window_slots = {&slot, 131, nullptr, 1 << 20, 128};
  p.entry_slots = {&slot, 512, &slot, INT32_MAX, -1, 2, 1024};
  p.list_workspace = workspace;
  p.list_workspace_bytes = ops::attend_list_bytes(4, 64, 128, 512);
  ASSERT_EQ(kernel_of(p), AttendKernel::generic);
  const cuda::ForeignAttend foreign = cuda::plan_foreign(p);
  ASSERT_TRUE(foreign.is_possible);
  const ops::AttendParams& plain = foreign.plain;
  EXPECT_NE(kernel_of(plain), AttendKernel::generic);
  EXPECT_FALSE(plain.window_slots.foreign() || plain.entry_slots.foreign());
  EXPECT_EQ(plain.window_slots.max_length(), 128);
  EXPECT_EQ(plain.entry_slots.max_length(), 512);
  EXPECT_EQ(plain.sink, nullptr);
  // All parts lie in the workspace, one behind the other.
  const std::uint8_t* at = workspace;
  const auto expect_part = [&](const void* part, std::int64_t bytes) {
    EXPECT_GE(static_cast<const std::uint8_t*>(part), at);
    at = static_cast<const std::uint8_t*>(part) + bytes;
  };
  expect_part(plain.lse, 4 * 4 * 64);
  expect_part(plain.window_slots.slots, 4 * 4 * 128);
  expect_part(plain.window_slots.lens, 4 * 4);
  expect_part(plain.entry_slots.slots, 4 * 4 * 512);
  expect_part(plain.entry_slots.lens, 4 * 4);
  EXPECT_LE(at - workspace, p.list_workspace_bytes);

  const auto expect_impossible = [&](auto change) {
    ops::AttendParams other = p;
    change(other);
    EXPECT_FALSE(cuda::plan_foreign(other).is_possible);
  };
  expect_impossible([](ops::AttendParams& o) { --o.list_workspace_bytes; });
  expect_impossible([](ops::AttendParams& o) { o.list_workspace = nullptr; });
  expect_impossible([](ops::AttendParams& o) { o.max_logits = &number; });
  expect_impossible([](ops::AttendParams& o) { o.inverse_rope.rope_dim = 64; });
}

TEST(AttendSelect, FewTokensAreASmallBatch) {
  ops::AttendParams p = make_params(1, 1, 64);
  EXPECT_EQ(kernel_of(p), AttendKernel::small_batch);
  add_entries(p, Kind::csa, 32768);
  EXPECT_EQ(select_attend(p, kH200),
            (AttendSplit{AttendKernel::small_batch, 8, 1, false, 8, 1}));  // 640 rows: 80 in each split
}

/// For any number of heads: a list too long for a cluster, with a workspace.
TEST(AttendSelect, ALongListIsCombinedInMemory) {
  for (const int heads : {64, 128}) {
    SCOPED_TRACE(testing::Message() << heads << " heads");
    ops::AttendParams p = make_params(1, 1, heads);
    add_entries(p, Kind::hca, 1 << 20);
    EXPECT_NE(kernel_of(p), AttendKernel::split_kv_in_memory);
    add_workspace(p);
    EXPECT_EQ(kernel_of(p), AttendKernel::split_kv_in_memory);
    EXPECT_GT(select_attend(p, kH200).kv_splits, cuda::kMaxCluster);
  }
}

TEST(AttendSelect, ChunksThatMeetTheirRowsOftenAreStaged) {
  ops::AttendParams p = make_params(1, 4096, 64);
  add_workspace(p);
  add_entries(p, Kind::csa, 131072);
  EXPECT_NE(kernel_of(p), AttendKernel::staged) << "no room";
  p.workspace_bytes += cuda::staged_rows(p).bytes;
  EXPECT_EQ(kernel_of(p), AttendKernel::staged);
  --p.workspace_bytes;
  EXPECT_NE(kernel_of(p), AttendKernel::staged);
  p.workspace_bytes += std::int64_t{300} << 20;
  p.step.num_tokens = 256;
  EXPECT_NE(kernel_of(p), AttendKernel::staged) << "each row is met five times";
  p.step.max_length = 16384;
  EXPECT_EQ(kernel_of(p), AttendKernel::staged) << "no request is as long as the table allows";
  p.step.num_tokens = 255;
  EXPECT_NE(kernel_of(p), AttendKernel::staged) << "too few tokens for a launch more";
  p.step.num_tokens = 256;
  p.step.num_items = 256;
  EXPECT_NE(kernel_of(p), AttendKernel::staged) << "nothing is shared";
  p = make_params(1, 4096, 64);
  add_workspace(p);
  p.workspace_bytes += std::int64_t{300} << 20;
  EXPECT_EQ(kernel_of(p), AttendKernel::persistent_window) << "windows are read directly";
}

// Every chunk that would be staged with any workspace is staged with the one that a cache plans.
TEST(AttendSelect, PlannedWorkspacesHaveRoomForStagedRows) {
  CacheOptions o;
  int staged = 0;
  for (const char* model : {"v4-flash", "v4-pro"})
    for (const int most : {512, 4096})
      for (const int context : {1 << 13, 1 << 17, 1 << 20}) {
        o.max_step_tokens = most;
        o.max_context = context;
        const ModelConfig config = model_preset(model);
        std::int64_t planned = 0;
        for (const MemoryPart& part : plan_memory(build_schema(config, o)).parts)
          if (part.name == "attend workspace") planned = part.bytes;
        for (const Kind kind : {Kind::csa, Kind::hca})
          for (const int tokens : {200, 256, 512, 1024, 4096})
            for (const int length : {1 << 12, 1 << 13, 1 << 16, 1 << 17, 1 << 20}) {
              if (tokens > most || length > context || tokens > length) continue;
              SCOPED_TRACE(testing::Message() << model << ", " << name_of(kind) << ", " << tokens << " of " << most
                                              << " tokens, " << length << " of " << context);
              ops::AttendParams p = make_params(1, tokens, 64);
              add_entries(p, kind, context);
              if (kind == Kind::csa) p.num_chosen = config.index_topk;
              p.step.max_length = length;
              add_workspace(p);
              p.workspace_bytes = std::int64_t{1} << 40;
              const bool pays = kernel_of(p) == AttendKernel::staged;
              staged += pays ? 1 : 0;
              p.workspace_bytes = planned;
              EXPECT_EQ(kernel_of(p) == AttendKernel::staged, pays);
            }
      }
  EXPECT_GE(staged, 50);
}

TEST(AttendSelect, PrefillsFollowFromSharedRows) {
  for (const int heads : {64, 128}) {
    SCOPED_TRACE(testing::Message() << heads << " heads");
    ops::AttendParams p = make_params(1, 1024, heads);
    EXPECT_EQ(kernel_of(p) == AttendKernel::persistent_window, heads == 64);
    add_entries(p, Kind::hca, 131072);
    EXPECT_EQ(kernel_of(p), AttendKernel::token_pair);
    EXPECT_FALSE(select_attend(p, kH200).cta_pair);
    p.step.num_items = 1024;  // one token each
    EXPECT_NE(kernel_of(p), AttendKernel::token_pair);
    p.step.num_items = 1;
    add_entries(p, Kind::csa, 131072);
    EXPECT_NE(kernel_of(p), AttendKernel::token_pair);
    EXPECT_EQ(kernel_of(p) == AttendKernel::persistent, heads == 64);
  }
}

}  // namespace
