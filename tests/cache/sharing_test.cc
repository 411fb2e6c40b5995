// Shared and private data of requests: forks and copies on write, padding, draft stages, a part of the layers; and
// memory.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "cache/small_cache.h"
#include "kv4/host_memory.h"
#include "schema/image_layout.h"
#include "support/sanitized.h"

namespace {

using namespace kv4;
using small::expect_error;
using small::expect_same_bytes;
using small::request_state;
using small::SmallCache;
using small::state_of;
using small::token_ids;

std::vector<std::int32_t> joined(std::vector<std::int32_t> a, const std::vector<std::int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// --- forks

TEST(CacheFork, SharesFullBlocksAndCopiesTheOpenOne) {
  SmallCache s;
  const RequestId a = s.request(1, 37);
  const RequestId b = s.cache.fork(a).value();
  const std::vector<BlockId> of_a = s.cache.blocks(a), of_b = s.cache.blocks(b);
  ASSERT_EQ(of_b.size(), 3u);
  EXPECT_EQ(of_a[0], of_b[0]);
  EXPECT_EQ(of_a[1], of_b[1]);
  EXPECT_NE(of_a[2], of_b[2]);
  EXPECT_EQ(s.cache.allocator().reference_count(of_a[0]), 2);
  EXPECT_EQ(s.cache.allocator().reference_count(of_a[2]), 1);
  EXPECT_EQ(s.cache.allocator().num_held(), 4);
  expect_same_bytes(s.cache, a, s.cache, b);
  EXPECT_EQ(s.cache.rewind_floor(b), s.cache.rewind_floor(a));

  s.run({{a, 1, 9}, {b, 2, 20}});
  EXPECT_EQ(s.cache.token_ids(a), token_ids(1, 0, 46));
  EXPECT_EQ(s.cache.token_ids(b), joined(token_ids(1, 0, 37), token_ids(2, 37, 20)));
  small::CpuCache alone;
  expect_same_bytes(s.cache, a, alone.cache, alone.request(1, 46));
  s.cache.release(a);
  EXPECT_EQ(s.cache.allocator().reference_count(of_a[0]), 1);
  EXPECT_EQ(s.cache.token_ids(b), joined(token_ids(1, 0, 37), token_ids(2, 37, 20)));
  s.cache.release(b);
  EXPECT_EQ(s.cache.allocator().num_free(), 20);
}

TEST(CacheFork, OfNothingAndAtABlockBoundary) {
  SmallCache s;
  const RequestId empty = s.cache.fork(s.admit()).value();
  EXPECT_EQ(s.cache.length(empty), 0);
  const RequestId a = s.request(1, 32), b = s.cache.fork(a).value();
  EXPECT_EQ(s.cache.blocks(a), s.cache.blocks(b));
  EXPECT_EQ(s.cache.allocator().num_held(), 2);
  s.run({{b, 1, 1}, {empty, 4, 18}});
  small::CpuCache alone;
  expect_same_bytes(s.cache, a, alone.cache, alone.request(1, 32));
  expect_same_bytes(s.cache, b, alone.cache, alone.request(1, 33));
  expect_same_bytes(s.cache, empty, alone.cache, alone.request(4, 18));
}

TEST(CacheFork, WritingIntoASharedBlockCopiesItFirst) {
  SmallCache s;
  const RequestId parent = s.request(1, 32);
  const RequestId child = s.cache.fork(parent).value();
  const small::RequestState child_before = request_state(s.cache, child);
  const BlockId shared = s.cache.blocks(parent)[1];
  s.cache.rewind(parent, 30);
  EXPECT_EQ(s.cache.blocks(parent)[1], shared) << "rewinding alone copies nothing";
  EXPECT_EQ(s.cache.token_ids(parent), token_ids(1, 0, 30));

  Step step = s.prepare({{parent, 2, 2}});
  EXPECT_EQ(s.cache.allocator().num_held(), 3);
  s.append(step);
  EXPECT_EQ(request_state(s.cache, child), child_before) << "before commit";
  s.cache.abort(step);
  EXPECT_EQ(s.cache.blocks(parent)[1], shared);
  EXPECT_EQ(s.cache.allocator().reference_count(shared), 2);
  EXPECT_EQ(s.cache.allocator().num_held(), 2);

  s.run({{parent, 2, 2}});
  EXPECT_NE(s.cache.blocks(parent)[1], shared);
  EXPECT_EQ(s.cache.blocks(parent)[0], s.cache.blocks(child)[0]);
  EXPECT_EQ(s.cache.allocator().reference_count(shared), 1);
  EXPECT_EQ(request_state(s.cache, child), child_before);
  EXPECT_EQ(s.cache.token_ids(parent), joined(token_ids(1, 0, 30), token_ids(2, 30, 2)));
  EXPECT_EQ(s.cache.token_ids(child), token_ids(1, 0, 32));

  small::CpuCache alone;
  const RequestId same = alone.request(1, 30);
  alone.run({{same, 2, 2}});
  expect_same_bytes(s.cache, parent, alone.cache, same);
}

TEST(CacheFork, BothSidesRewindIntoTheSameBlockInOneStep) {
  SmallCache s;
  const RequestId a = s.request(1, 32), b = s.cache.fork(a).value(), c = s.cache.fork(b).value();
  const small::RequestState c_before = request_state(s.cache, c);
  s.cache.rewind(a, 29);
  s.cache.rewind(b, 31);
  s.run({{a, 2, 4}, {kNoRequest, 0, 1}, {b, 3, 4}});
  EXPECT_EQ(request_state(s.cache, c), c_before);
  small::CpuCache alone;
  const RequestId x = alone.request(1, 29), y = alone.request(1, 31);
  alone.run({{x, 2, 4}});
  alone.run({{y, 3, 4}});
  expect_same_bytes(s.cache, a, alone.cache, x);
  expect_same_bytes(s.cache, b, alone.cache, y);
  for (RequestId r : {a, b, c}) s.cache.release(r);
  EXPECT_EQ(s.cache.allocator().num_free(), 20);
}

TEST(CacheFork, CopyOnWriteThatFindsNoBlockChangesNothing) {
  CacheOptions o = small::options();
  o.num_blocks = 2;
  SmallCache s(o);
  const RequestId a = s.request(1, 32), b = s.cache.fork(a).value();
  s.cache.rewind(a, 30);
  const small::CacheState before = state_of(s.cache, {a, b});
  EXPECT_EQ(s.try_prepare({{a, 2, 1}}).error(), Shortage::blocks);
  EXPECT_EQ(state_of(s.cache, {a, b}), before);
  s.cache.release(b);
  EXPECT_TRUE(s.try_prepare({{a, 2, 1}})) << "its own block again: no copy needed";
}

// --- images

TEST(CacheImport, BeforeWeightsAreBound) {
  small::CpuCache source;
  SmallCache target(small::options(), small::config(), false);
  for (std::int32_t length : {3, 21, 32, 45}) {
    const RequestId a = source.request(1, length);
    const RequestId b =
        target.cache
            .import_image(source.cache.export_image(a), source.cache.token_ids(a), source.cache.export_blocks(a))
            .value();
    expect_same_bytes(target.cache, b, source.cache, a);
    source.cache.release(a);
    target.cache.release(b);
  }
}

TEST(CacheImport, GoesOnAsIfNeverInterrupted) {
  for (std::int32_t length : {1, 4, 6, 16, 21, 23, 32, 45}) {
    small::CpuCache source;
    SmallCache target;
    const RequestId a = source.request(1, length);
    const RequestId b =
        target.cache
            .import_image(source.cache.export_image(a), source.cache.token_ids(a), source.cache.export_blocks(a))
            .value();
    for (std::int32_t count : {1, 2, 11, 1}) {
      source.run({{a, 1, count}});
      target.run({{b, 1, count}});
    }
    SCOPED_TRACE(length);
    expect_same_bytes(target.cache, b, source.cache, a);
  }
}

// The pending rows of a CSA layer in an image, computed from the inputs as docs/formats.md lists them.
TEST(CacheImage, HoldsThePendingRowsThatEntriesStillNeed) {
  SmallCache s;
  for (std::int64_t n : {2, 4, 5, 22, 23, 24}) {
    const RequestId r = s.request(1, static_cast<std::int32_t>(n));
    const CanonicalImage image = s.cache.export_image(r);
    const ImageLayout layout = image_layout(s.cache.schema(), image.lengths);
    for (const PendingPart& part : layout.pending) {
      if (part.layer == 2) continue;  // HCA: an accumulator
      const std::int64_t width = part.kind == 0 ? 80 : 32, open = n / 4 * 4;
      std::vector<float> want;
      const auto add = [&](std::int64_t p, small::Input which, std::int64_t columns) {
        for (std::int64_t c = 0; c < columns; ++c)
          want.push_back(small::input_value(1, part.layer, p, static_cast<small::Input>(which + 2 * part.kind), c));
      };
      for (std::int64_t p = open - (open > 0 ? 4 : 0); p < n; ++p) {
        const std::int64_t columns = p < open ? width : 2 * width;  // previous span: the next entry's columns only
        add(p, small::kKv, columns);
        add(p, small::kGate, columns);
      }
      const std::int64_t at = open > 0 ? part.previous_at : part.open_at;
      ASSERT_LE(static_cast<std::size_t>(at) + 4 * want.size(), image.bytes.size());
      EXPECT_EQ(std::memcmp(image.bytes.data() + at, want.data(), 4 * want.size()), 0)
          << "layer " << part.layer << " length " << n;
    }
    s.cache.release(r);
  }
}

TEST(CacheImport, ThroughMemoryOfTheCaller) {
  SmallCache s;
  for (std::int32_t n : {0, 5, 37}) {
    const RequestId a = s.request(1, n);
    const CanonicalImage image = s.cache.export_image(a);
    const std::vector<std::byte> blocks = s.cache.export_blocks(a);
    ASSERT_EQ(s.cache.image_bytes(a), static_cast<std::int64_t>(image.bytes.size()));
    HostMemory memory(s.backend, s.cache.image_bytes(a) + static_cast<std::int64_t>(blocks.size()));
    const HostMemory moved = std::move(memory);
    const std::span<std::byte> image_out = moved.bytes().first(image.bytes.size()),
                               blocks_out = moved.bytes().subspan(image.bytes.size());
    std::fill(moved.bytes().begin(), moved.bytes().end(), std::byte{0xA5});
    s.cache.export_image(a, image_out);
    s.cache.export_blocks(a, blocks_out);
    EXPECT_TRUE(std::equal(image_out.begin(), image_out.end(), image.bytes.begin()));
    EXPECT_TRUE(std::equal(blocks_out.begin(), blocks_out.end(), blocks.begin()));

    const ImageView view(s.cache.schema().layout_id, image.lengths, image_out);
    const RequestId b = s.cache.import_image(view, s.cache.token_ids(a), blocks_out).value();
    EXPECT_EQ(s.cache.export_image(b), image);
    EXPECT_EQ(s.cache.export_blocks(b), blocks);

    std::vector<std::byte> other(image.bytes.size() + 1);
    expect_error(ErrorCode::bad_argument, {std::to_string(image.bytes.size()), std::to_string(other.size())},
                 [&] { s.cache.export_image(a, other); });
    other.resize(blocks.size() + 1);
    expect_error(ErrorCode::bad_argument, {std::to_string(other.size())}, [&] { s.cache.export_blocks(a, other); });
    s.cache.release(a);
    s.cache.release(b);
  }
}

TEST(CacheImport, RefusesWhatDoesNotBelong) {
  SmallCache s;
  const RequestId a = s.request(1, 37);
  const CanonicalImage image = s.cache.export_image(a);
  const std::vector<std::int32_t> ids = s.cache.token_ids(a);
  const std::vector<std::byte> blocks = s.cache.export_blocks(a);
  const small::CacheState before = state_of(s.cache, {a});
  const auto refused = [&](const char* what, auto change) {
    SCOPED_TRACE(what);
    CanonicalImage i = image;
    std::vector<std::int32_t> t = ids;
    std::vector<std::byte> b = blocks;
    change(i, t, b);
    expect_error(ErrorCode::bad_argument, {}, [&] { (void)s.cache.import_image(i, t, b); });
    EXPECT_EQ(state_of(s.cache, {a}), before);
  };
  refused("another layout", [](auto& i, auto&, auto&) { i.layout_id += 1; });
  refused("a shorter image", [](auto& i, auto&, auto&) { i.bytes.pop_back(); });
  refused("a longer image", [](auto& i, auto&, auto&) { i.bytes.push_back({}); });
  refused("another length", [](auto& i, auto&, auto&) { i.lengths[0] = 38; });
  refused("a negative length", [](auto& i, auto&, auto&) { i.lengths[0] = -37; });
  refused("too long for the cache", [](auto& i, auto& t, auto&) { i.lengths[0] = 97, t.resize(97); });
  refused("no lengths", [](auto& i, auto&, auto&) { i.lengths.clear(); });
  refused("a draft length too many", [](auto& i, auto&, auto&) { i.lengths.push_back(0); });
  refused("a token too few", [](auto&, auto& t, auto&) { t.pop_back(); });
  refused("a block too few", [&](auto&, auto&, auto& b) { b.resize(b.size() / 3 * 2); });
  refused("a byte too many", [](auto&, auto&, auto& b) { b.push_back({}); });
  CacheOptions other = small::options();
  other.row_format = Format::bf16;
  SmallCache foreign(other);
  expect_error(ErrorCode::bad_argument, {}, [&] { (void)foreign.cache.import_image(image, ids, blocks); });
  EXPECT_EQ(foreign.cache.num_requests(), 0);
}

// --- padding

TEST(CachePadding, IsIgnoredByEveryLayer) {
  SmallCache s;
  small::CpuCache alone;
  const RequestId a = s.admit(), b = s.admit(), x = alone.admit(), y = alone.admit();
  const std::int32_t counts[] = {3, 20, 1, 1, 11};
  for (std::int32_t n : counts) {
    s.run({{kNoRequest, 0, 2}, {a, 1, n}, {kNoRequest, 0, 1}, {kNoRequest, 0, 3}, {b, 2, 2}, {kNoRequest, 0, 5}});
    alone.run({{x, 1, n}});
    alone.run({{y, 2, 2}});
  }
  expect_same_bytes(s.cache, a, alone.cache, x);
  expect_same_bytes(s.cache, b, alone.cache, y);
}

TEST(CachePadding, AStepOfNothingElse) {
  SmallCache s;
  const RequestId a = s.request(1, 20);
  const small::CacheState before = state_of(s.cache, {a});
  const std::vector<std::byte> pool = s.block_memory(), slots = s.slot_memory();
  s.run({{kNoRequest, 0, 40}, {kNoRequest, 0, 24}});
  EXPECT_EQ(state_of(s.cache, {a}), before);
  EXPECT_TRUE(s.block_memory() == pool) << "not a byte written";
  EXPECT_TRUE(s.slot_memory() == slots) << "not a byte written";
}

// --- draft stages

TEST(CacheDrafts, HaveTheirOwnLengths) {
  CacheOptions o = small::options();
  o.draft_layers = 2;
  SmallCache s(o);
  const RequestId r = s.request(1, 20);
  const std::vector<BlockId> blocks = s.cache.blocks(r);
  s.run({{r, 1, 22}}, 1);
  s.run({{r, 1, 3}}, 2);
  EXPECT_EQ(s.cache.length(r), 20);
  EXPECT_EQ(s.cache.length(r, 1), 22);
  EXPECT_EQ(s.cache.length(r, 2), 3);
  EXPECT_EQ(s.cache.blocks(r), blocks) << "drafts keep windows only";
  EXPECT_EQ(s.cache.token_ids(r), token_ids(1, 0, 20));
  EXPECT_EQ(s.cache.export_image(r).lengths, (std::vector<std::int64_t>{20, 22, 3}));
  EXPECT_EQ(s.cache.rewind_floor(r, 1), 19);
  const small::RequestState before = request_state(s.cache, r);
  s.run({{r, 7, 3}}, 1);
  s.cache.rewind(r, 22, 1);
  EXPECT_EQ(s.cache.export_image(r), before.image) << "rejected draft tokens leave no trace";
  for (int bad : {-1, 3}) {
    expect_error(ErrorCode::bad_argument, {std::to_string(bad)}, [&] { s.cache.length(r, bad); });
    expect_error(ErrorCode::bad_argument, {std::to_string(bad)}, [&] { s.cache.rewind(r, 3, bad); });
    expect_error(ErrorCode::bad_argument, {std::to_string(bad)}, [&] { s.cache.rewind_floor(r, bad); });
    expect_error(ErrorCode::bad_argument, {std::to_string(bad)}, [&] { (void)s.try_prepare({{r, 1, 1}}, bad); });
  }
}

TEST(CacheDrafts, DoNotTouchTheBackboneNorEachOther) {
  CacheOptions o = small::options();
  o.draft_layers = 2;
  SmallCache s(o);
  small::CpuCache plain(o);
  const RequestId r = s.admit(), p = plain.admit();
  for (std::int32_t n : {5, 1, 30, 2}) {
    s.run({{r, 1, n}});
    s.run({{r, 3, 2 * n}}, 2);
    s.run({{r, 2, 1}}, 1);
    plain.run({{p, 1, n}});
  }
  plain.run({{p, 3, 60}}, 2);
  plain.run({{p, 3, 16}}, 2);
  for (int i = 0; i < 4; ++i) plain.run({{p, 2, 1}}, 1);
  expect_same_bytes(s.cache, r, plain.cache, p);
  const RequestId f = s.cache.fork(r).value();
  EXPECT_EQ(s.cache.length(f, 2), 76);
  expect_same_bytes(s.cache, f, s.cache, r);
}

TEST(CacheDrafts, LayersBelongToTheirGroup) {
  CacheOptions o = small::options();
  o.draft_layers = 2;
  SmallCache s(o);
  const RequestId r = s.admit();
  for (int group = 0; group < 3; ++group) {
    const Step step = s.prepare({{r, 1, 1}}, group);
    EXPECT_EQ(step.group, group);
    for (int layer = 0; layer < 6; ++layer) {
      const int owner = layer < 4 ? 0 : layer - 3;
      if (owner == group) {
        EXPECT_EQ(s.cache.acquire(layer).layer(), layer);
      } else {
        expect_error(ErrorCode::bad_state, {"layer " + std::to_string(layer), "group " + std::to_string(owner)},
                     [&] { s.cache.acquire(layer); });
      }
    }
    for (int bad : {-1, 6}) expect_error(ErrorCode::bad_argument, {std::to_string(bad)}, [&] { s.cache.acquire(bad); });
    s.cache.abort(step);
  }
  const std::vector<StepItem> without_ids = {{r, 4, {}, -1}};
  const Step step = s.cache.prepare_forward(without_ids, 2).value();
  s.cache.abort(step);
  expect_error(ErrorCode::bad_argument, {"0 token ids"}, [&] { (void)s.cache.prepare_forward(without_ids, 0); });
}

// --- a part of the layers

// The bytes of one layer in a request's image and blocks.
std::vector<std::byte> layer_bytes(const KVCacheManager& cache, RequestId request, int model_layer) {
  const CacheSchema& schema = cache.schema();
  const CanonicalImage image = cache.export_image(request);
  const ImageLayout layout = image_layout(schema, image.lengths);
  std::vector<std::byte> out;
  const auto take = [&](const std::vector<std::byte>& from, std::int64_t at, std::int64_t bytes) {
    out.insert(out.end(), from.begin() + at, from.begin() + at + bytes);
  };
  const auto mine = [&](int index) { return schema.layers[static_cast<std::size_t>(index)].spec.layer == model_layer; };
  for (const WindowPart& part : layout.windows) {
    if (!mine(part.layer)) continue;
    const RowSchema& row = schema.layer(model_layer).window.row;
    take(image.bytes, part.payload_at, part.count * row.payload_bytes);
    take(image.bytes, part.scale_at, part.count * row.scale_bytes);
  }
  for (const PendingPart& part : layout.pending) {
    if (!mine(part.layer)) continue;
    const PendingSchema& p = schema.layer(model_layer).pending[static_cast<std::size_t>(part.kind)];
    const bool overlap = p.acc_offset < 0;
    take(image.bytes, part.previous_at, overlap ? part.previous_count * p.row_bytes / 2 : 0);
    take(image.bytes, part.open_at,
         overlap               ? part.open_count * p.row_bytes
         : part.open_count > 0 ? 3 * p.columns * 4
                               : 0);
  }
  const std::vector<std::byte> blocks = cache.export_blocks(request);
  for (std::int64_t at = 0; at < static_cast<std::int64_t>(blocks.size());)
    for (const LayerCacheSchema& layer : schema.layers)
      for (const PageSchema& page : layer.pages) {
        if (layer.spec.layer == model_layer) take(blocks, at, page.content_bytes);
        at += page.content_bytes;
      }
  return out;
}

TEST(CachePipeline, ASubsetOfLayersHoldsTheSameBytes) {
  CacheOptions o = small::options();
  small::CpuCache full(o);
  o.layers = {1, 2};
  SmallCache part(o);
  EXPECT_LT(part.cache.memory_bytes(), full.cache.memory_bytes());
  const RequestId a = full.admit(), b = part.admit();
  for (std::int32_t n : {3, 1, 18, 2, 30, 1}) {
    full.run({{a, 1, n}});
    part.run({{b, 1, n}});
  }
  EXPECT_EQ(full.cache.length(a), 55);
  for (int layer : {1, 2}) {
    const std::vector<std::byte> bytes = layer_bytes(full.cache, a, layer);
    EXPECT_GT(bytes.size(), 1000u);
    EXPECT_EQ(bytes, layer_bytes(part.cache, b, layer)) << layer;
  }
  EXPECT_EQ(full.cache.token_ids(a), part.cache.token_ids(b));
  EXPECT_NE(full.cache.schema().layout_id, part.cache.schema().layout_id);
  const Step step = part.prepare({{b, 1, 1}});
  for (int layer : {0, 3})
    expect_error(ErrorCode::bad_argument, {std::to_string(layer)}, [&] { part.cache.acquire(layer); });
  part.cache.abort(step);
  expect_error(ErrorCode::bad_argument, {"3"}, [&] { part.cache.bind_weights(3, {}); });
}

// --- memory

TEST(CacheMemory, IsWhatThePlanSays) {
  for (int variant = 0; variant < 6; ++variant) {
    CacheOptions o = small::options();
    ModelConfig c = small::config();
    if (variant == 1) o.arrangement = Arrangement::layer_major, o.page_alignment = 576;
    if (variant == 2) o.hca_mode = HcaMode::raw, o.pending_dtype = DType::bf16, o.max_rewind_tokens = 0;
    if (variant == 3) o.draft_layers = 3, o.max_requests = 7, o.spare_slots = 0, o.num_blocks = 0;
    if (variant == 4) o.layers = {2}, o.row_format = Format::bf16, o.max_context = 4000;
    if (variant == 5) c = small::config({LayerKind::swa, LayerKind::swa});
    const KVCacheManager cache(c, o, kv4::test::test_backend());
    const MemoryPlan plan = plan_memory(cache.schema());
    EXPECT_EQ(cache.memory_bytes(), plan.total_bytes) << variant;
    std::int64_t sum = 0;
    for (const MemoryPart& part : plan.parts) sum += part.bytes;
    EXPECT_EQ(sum, plan.total_bytes) << variant;
  }
}

constexpr bool kSanitized = KV4_SANITIZED;  // reserves more address space than the limit below

// Builds a cache in 2 GiB of address space: 0 if that is an Error(out_of_memory).
template <class Change>
int build_in_little_memory(Change change) {
  const rlimit limit{2u << 30, 2u << 30};
  setrlimit(RLIMIT_AS, &limit);
  CacheOptions o = small::options();
  change(o);
  try {
    KVCacheManager cache(small::config(), o);
  } catch (const Error& e) {
    return e.code() == ErrorCode::out_of_memory ? 0 : 2;
  } catch (const std::bad_alloc&) {
    return 3;
  }
  return 1;
}

TEST(CacheMemoryDeathTest, RefusedMemoryIsAnError) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need the address space";
  if (kv4::test::off_host()) GTEST_SKIP() << "about the host's memory; the GPU's is in parity/graph_test.cc";
  const auto refused = [](const char* what, auto change) {
    EXPECT_EXIT(std::_Exit(build_in_little_memory(change)), testing::ExitedWithCode(0), "") << what;
  };
  refused("all block ids", [](CacheOptions& o) { o.num_blocks = (std::int64_t{1} << 31) - 1; });
  refused("20 million blocks", [](CacheOptions& o) { o.num_blocks = 20'000'000; });
  refused("slots", [](CacheOptions& o) { o.max_requests = 65536, o.max_rewind_tokens = 100'000; });
  refused("step workspace", [](CacheOptions& o) { o.max_step_tokens = 1 << 24; });
}

}  // namespace
