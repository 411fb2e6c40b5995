// The life of a request: admit, prepare, commit, abort, rewind, release; and shortages.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "cache/small_cache.h"

namespace {

using namespace kv4;
using small::expect_error;
using small::SmallCache;
using small::state_of;
using small::token_ids;

// --- life cycle

TEST(CacheLife, AdmitAppendRelease) {
  SmallCache s;
  EXPECT_EQ(s.cache.num_requests(), 0);
  const RequestId r = s.admit();
  EXPECT_EQ(s.cache.num_requests(), 1);
  EXPECT_EQ(s.cache.length(r), 0);
  EXPECT_TRUE(s.cache.blocks(r).empty());
  EXPECT_TRUE(s.cache.token_ids(r).empty());
  EXPECT_TRUE(s.cache.export_image(r).bytes.empty());
  const Step step = s.prepare({{r, 1, 17}});
  EXPECT_EQ(step.num_tokens, 17);
  EXPECT_EQ(step.num_items, 1);
  EXPECT_EQ(step.group, 0);
  EXPECT_EQ(s.cache.length(r), 0) << "not before commit";
  s.append(step);
  s.cache.commit(step);
  EXPECT_EQ(s.cache.length(r), 17);
  EXPECT_EQ(s.cache.token_ids(r), token_ids(1, 0, 17));
  EXPECT_EQ(s.cache.blocks(r).size(), 2u);
  EXPECT_EQ(s.cache.allocator().num_held(), 2);
  s.run({{r, 1, 1}});
  EXPECT_EQ(s.cache.length(r), 18);
  EXPECT_EQ(s.cache.allocator().num_held(), 2);
  s.cache.release(r);
  EXPECT_EQ(s.cache.num_requests(), 0);
  EXPECT_EQ(s.cache.allocator().num_free(), 20);
  EXPECT_EQ(s.cache.state_pool().num_free(), 6);
}

TEST(CacheLife, NothingOfAReleasedRequestRemains) {
  SmallCache used;
  small::CpuCache fresh;
  for (std::uint64_t stream = 50; stream < 54; ++stream)
    used.request(stream, 60 - static_cast<std::int32_t>(stream % 7));
  for (int row = 3; row >= 0; --row) used.cache.release(row);
  for (std::int32_t length : {1, 5, 40}) {
    const RequestId a = used.request(9, length), b = fresh.request(9, length);
    small::expect_same_bytes(used.cache, a, fresh.cache, b);
    used.cache.release(a);
    fresh.cache.release(b);
  }
}

TEST(CacheLife, IdsAreNotReusedSoon) {
  SmallCache s;
  std::set<RequestId> seen;
  for (int i = 0; i < 1000; ++i) {
    const RequestId a = s.admit(), b = s.admit();
    EXPECT_GE(a, 0);
    ASSERT_TRUE(seen.insert(a).second) << i;
    ASSERT_TRUE(seen.insert(b).second) << i;
    s.cache.release(i % 2 == 0 ? a : b);
    s.cache.release(i % 2 == 0 ? b : a);
  }
}

TEST(CacheLife, UnknownAndReleasedIdsAreRefusedEverywhere) {
  SmallCache s;
  const RequestId kept = s.request(1, 20), gone = s.request(2, 20);
  s.cache.release(gone);
  RequestId successor = s.request(3, 20);  // takes the row that became free
  ASSERT_EQ(successor % 4, gone % 4);
  const small::CacheState before = state_of(s.cache, {kept, successor});
  for (RequestId bad : {gone, RequestId{-1}, RequestId{-2}, RequestId{2}, RequestId{4000},
                        std::numeric_limits<RequestId>::max(), std::numeric_limits<RequestId>::min()}) {
    const std::vector<std::string> id = {std::to_string(bad)};
    const auto refused = [&](auto&& call) { expect_error(ErrorCode::bad_argument, id, call); };
    refused([&] { s.cache.release(bad); });
    refused([&] { s.cache.rewind(bad, 18); });
    refused([&] { s.cache.rewind_floor(bad); });
    refused([&] { (void)s.cache.fork(bad); });
    refused([&] { s.cache.length(bad); });
    refused([&] { s.cache.token_ids(bad); });
    refused([&] { s.cache.blocks(bad); });
    refused([&] { s.cache.export_image(bad); });
    refused([&] { s.cache.export_blocks(bad); });
    if (bad != kNoRequest) {
      const std::vector<std::int32_t> ids = {7};
      const std::vector<StepItem> items = {{kept, 1, ids, -1}, {bad, 1, ids, -1}};
      refused([&] { (void)s.cache.prepare_forward(items); });
    }
    EXPECT_EQ(state_of(s.cache, {kept, successor}), before) << bad;
  }
}

TEST(CacheLife, ReleaseTwice) {
  SmallCache s;
  const RequestId a = s.request(1, 20), b = s.request(2, 20);
  s.cache.release(a);
  const small::CacheState before = state_of(s.cache, {b});
  expect_error(ErrorCode::bad_argument, {std::to_string(a), "released"}, [&] { s.cache.release(a); });
  EXPECT_EQ(state_of(s.cache, {b}), before);
}

// --- the order of calls

TEST(CacheOrder, OneStepAtATime) {
  SmallCache s;
  const RequestId a = s.request(1, 5), b = s.request(2, 5);
  expect_error(ErrorCode::bad_state, {"prepare_forward"}, [&] { s.cache.acquire(0); });
  expect_error(ErrorCode::bad_state, {}, [&] { s.cache.commit({}); });
  expect_error(ErrorCode::bad_state, {}, [&] { s.cache.abort({}); });
  const Step first = s.prepare({{a, 1, 2}});
  expect_error(ErrorCode::bad_state, {std::to_string(first.id)}, [&] { (void)s.try_prepare({{b, 2, 1}}); });
  for (auto&& call :
       {std::function<void()>([&] { s.cache.release(a); }), std::function<void()>([&] { s.cache.rewind(a, 5); }),
        std::function<void()>([&] { (void)s.cache.fork(a); })})
    expect_error(ErrorCode::bad_state, {std::to_string(a)}, call);
  expect_error(ErrorCode::bad_state, {}, [&] { s.cache.bind_weights(1, s.weights[1]->views); });
  Step other = first;
  other.id += 1;
  expect_error(ErrorCode::bad_state, {std::to_string(other.id)}, [&] { s.cache.commit(other); });
  expect_error(ErrorCode::bad_state, {std::to_string(other.id)}, [&] { s.cache.abort(other); });
  s.append(first);
  s.cache.commit(first);
  EXPECT_EQ(s.cache.length(a), 7);
}

TEST(CacheOrder, RequestsOutsideTheStepMayChange) {
  SmallCache s;
  const RequestId a = s.request(1, 5), b = s.request(2, 20);
  const Step step = s.prepare({{a, 1, 3}});
  s.cache.rewind(b, 18);
  const RequestId c = s.cache.fork(b).value();
  s.cache.release(b);
  const RequestId d = s.admit();
  s.append(step);
  s.cache.commit(step);
  EXPECT_EQ(s.cache.length(a), 8);
  EXPECT_EQ(s.cache.length(c), 18);
  EXPECT_EQ(s.cache.length(d), 0);
  small::CpuCache alone;
  small::expect_same_bytes(s.cache, a, alone.cache, alone.request(1, 8));
}

TEST(CacheOrder, EndedStepsAndTheirHandlesAreRefused) {
  for (bool commits : {true, false}) {
    SmallCache s;
    const RequestId r = s.request(1, 20);
    const Step step = s.prepare({{r, 1, 1}});
    LayerCacheHandle handle = s.cache.acquire(1);
    small::Inputs in = s.inputs(handle.schema());
    s.append(step);
    commits ? s.cache.commit(step) : s.cache.abort(step);
    const small::CacheState before = state_of(s.cache, {r});
    std::vector<float> out(80 * 40);
    std::vector<std::int32_t> index(40);
    const TensorView lens(index.data(), {1}), first(index.data() + 1, {1});
    const auto refused = [&](auto&& call) {
      expect_error(ErrorCode::bad_state, {"layer 1", std::to_string(step.id)}, call);
    };
    for (int again = 0; again < 2; ++again) {
      refused([&] { handle.append(in.views()); });
      refused([&] { handle.write_swa(in.view(small::kRaw)); });
      refused([&] { handle.flush_compression({}); });
      refused([&] {
        handle.gather_compressed_kv(TensorView(index.data(), {1, 1}), TensorView(out.data(), {1, 1, 80}));
      });
      refused([&] { handle.gather_all_compressed_kv(TensorView(out.data(), {1, 6, 80}), lens); });
      refused([&] { handle.gather_all_index_keys(TensorView(out.data(), {1, 6, 32}), lens); });
      refused([&] { handle.gather_swa_kv(TensorView(out.data(), {1, 9, 80}), lens, first); });
      refused([&] { handle.read_swa_view(); });
      refused([&] { handle.read_classical_view(); });
      refused([&] { handle.read_indexer_view(); });
      if (again == 0) {
        expect_error(ErrorCode::bad_state, {}, [&] { s.cache.commit(step); });
        expect_error(ErrorCode::bad_state, {}, [&] { s.cache.abort(step); });
        EXPECT_EQ(state_of(s.cache, {r}), before);
      }
      if (again == 0) s.prepare({{r, 1, 1}});  // another step is open: still not this one's
    }
    EXPECT_EQ(handle.layer(), 1);
    EXPECT_EQ(handle.head_dim(), 80);
    EXPECT_EQ(handle.num_query_heads(), 3);
  }
}

// --- what prepare refuses

TEST(CachePrepare, RefusesBadItemsAndChangesNothing) {
  SmallCache s;
  const RequestId a = s.request(1, 20), b = s.request(2, 90);
  const small::CacheState before = state_of(s.cache, {a, b});
  const std::vector<std::int32_t> ids(64, 5);
  const auto tokens = [&](std::size_t n) { return std::span(ids).first(n); };
  const auto refused = [&](const std::vector<StepItem>& items, const std::vector<std::string>& parts, int group = 0) {
    expect_error(ErrorCode::bad_argument, parts, [&] { (void)s.cache.prepare_forward(items, group); });
    EXPECT_EQ(state_of(s.cache, {a, b}), before);
  };
  refused({}, {"0"});
  refused(std::vector<StepItem>(9, StepItem{}), {"9", "8"});
  refused({{a, 0, {}, -1}}, {"count 0"});
  refused({{a, -3, {}, -1}}, {"-3"});
  refused({{a, 65, std::vector<std::int32_t>(65), -1}}, {"65", "64"});
  refused({{kNoRequest, std::numeric_limits<std::int32_t>::max(), {}, -1},
           {kNoRequest, std::numeric_limits<std::int32_t>::max(), {}, -1}},
          {"64"});
  refused({{a, 40, tokens(40), -1}, {kNoRequest, 25, {}, -1}}, {"65"});
  refused({{a, 1, tokens(1), -1}, {a, 1, tokens(1), -1}}, {"twice"});
  refused({{b, 7, tokens(7), -1}}, {"97", "96"});
  refused({{a, 3, tokens(2), -1}}, {"2", "3"});
  refused({{a, 3, {}, -1}}, {"0", "3"});
  for (std::int64_t jump : {std::int64_t{0}, std::int64_t{19}, std::int64_t{21},
                            std::numeric_limits<std::int64_t>::max(), std::int64_t{-2}})
    refused({{a, 1, tokens(1), jump}}, {std::to_string(jump), "20"});
  refused({{kNoRequest, 1, {}, -1}, {a, 1, tokens(1), -1}, {b, 1, tokens(1), 20}}, {"item 2", "90"});
  refused({{a, 1, tokens(1), -1}}, {"group is 1"}, 1);
  refused({{a, 1, tokens(1), -1}}, {"group is -1"}, -1);
  const std::vector<StepItem> good = {{a, 1, tokens(1), 20}};
  ASSERT_TRUE(s.cache.prepare_forward(good)) << "and nothing was left open";
}

// --- no room

TEST(CacheShortage, Requests) {
  SmallCache s;
  std::vector<RequestId> all;
  for (int i = 0; i < 4; ++i) all.push_back(s.request(static_cast<std::uint64_t>(i), 3 + i));
  const small::CacheState before = state_of(s.cache, all);
  EXPECT_FALSE(s.cache.admit());
  EXPECT_EQ(s.cache.admit().error(), Shortage::requests);
  try {
    s.cache.admit().value();
    FAIL() << "value() gave a request";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_state);
    EXPECT_NE(std::string(error.what()).find("all max_requests are running (shortage: requests)"), std::string::npos);
  }
  EXPECT_EQ(s.cache.fork(all[0]).error(), Shortage::requests);
  EXPECT_EQ(s.cache.import_image(s.cache.export_image(all[1]), s.cache.token_ids(all[1]), s.cache.export_blocks(all[1]))
                .error(),
            Shortage::requests);
  EXPECT_EQ(state_of(s.cache, all), before);
  s.cache.release(all[2]);
  EXPECT_TRUE(s.cache.admit());
}

TEST(CacheShortage, BlocksInAnyItem) {
  CacheOptions o = small::options();
  o.num_blocks = 6;
  SmallCache s(o);
  const RequestId a = s.request(1, 20), b = s.request(2, 30), c = s.request(3, 10);  // 2 + 2 + 1 of 6
  const small::CacheState before = state_of(s.cache, {a, b, c});
  for (const std::vector<small::Part>& step :
       std::vector<std::vector<small::Part>>{{{a, 1, 30}},                       // 2 more
                                             {{a, 1, 1}, {b, 2, 3}, {c, 3, 8}},  // the third item's second block
                                             {{c, 3, 7}, {kNoRequest, 0, 2}, {b, 2, 3}}}) {
    const Expected<Step> got = s.try_prepare(step);
    EXPECT_FALSE(got);
    EXPECT_EQ(got.error(), Shortage::blocks);
    EXPECT_EQ(state_of(s.cache, {a, b, c}), before);
  }
  s.run({{a, 1, 12}, {b, 2, 3}});  // b gets the last block
  EXPECT_EQ(s.cache.allocator().num_available(), 0);
  EXPECT_EQ(s.cache.fork(c).error(), Shortage::blocks) << "its open block needs a copy";
  EXPECT_TRUE(s.cache.fork(a)) << "full blocks are shared";
  small::CpuCache alone;
  small::expect_same_bytes(s.cache, b, alone.cache, alone.request(2, 33));
}

TEST(CacheShortage, BlocksOfAnImport) {
  CacheOptions o = small::options();
  o.num_blocks = 6;
  SmallCache s(o);
  small::CpuCache source;
  const RequestId a = s.request(1, 50);  // 4 of 6
  const RequestId other = source.request(2, 40);
  const small::CacheState before = state_of(s.cache, {a});
  const auto import = [&] {
    return s.cache.import_image(source.cache.export_image(other), source.cache.token_ids(other),
                                source.cache.export_blocks(other));
  };
  EXPECT_EQ(import().error(), Shortage::blocks);
  EXPECT_EQ(state_of(s.cache, {a}), before);
  s.cache.release(a);
  small::expect_same_bytes(s.cache, import().value(), source.cache, other);
}

TEST(CacheShortage, SlotsForLongSteps) {
  CacheOptions o = small::options();
  o.spare_slots = 1;
  SmallCache s(o);
  std::vector<RequestId> all;
  for (std::uint64_t i = 0; i < 4; ++i) all.push_back(s.request(i, 3));
  const small::CacheState before = state_of(s.cache, all);
  const Expected<Step> two = s.try_prepare({{all[0], 0, 5}, {all[1], 1, 4}, {all[2], 2, 5}});
  EXPECT_EQ(two.error(), Shortage::slots) << "5 tokens are more than R + 1 = 4, in two requests";
  EXPECT_EQ(state_of(s.cache, all), before);
  s.run({{all[0], 0, 5}, {all[1], 1, 4}});
  s.run({{all[2], 2, 30}});
  EXPECT_EQ(s.cache.state_pool().num_free(), 1);
  s.cache.release(all[3]);
  s.run({{all[0], 0, 5}, {all[1], 1, 5}});  // a free request's slot serves too
  const Step open = s.prepare({{all[0], 0, 5}, {all[1], 1, 5}});
  EXPECT_EQ(s.cache.admit().error(), Shortage::slots) << "until the step ends";
  s.cache.abort(open);
  EXPECT_TRUE(s.cache.admit());
  small::CpuCache alone;
  small::expect_same_bytes(s.cache, all[1], alone.cache, alone.request(1, 12));
}

TEST(CacheShortage, NoSpareSlotsAtAll) {
  CacheOptions o = small::options();
  o.spare_slots = 0;
  o.max_requests = 1;
  SmallCache s(o);
  const RequestId r = s.admit();
  EXPECT_EQ(s.try_prepare({{r, 1, 5}}).error(), Shortage::slots);
  s.run({{r, 1, 4}});
  EXPECT_EQ(s.cache.length(r), 4);
  EXPECT_STREQ(to_string(Shortage::slots), "slots");
  EXPECT_STREQ(to_string(Shortage::blocks), "blocks");
  EXPECT_STREQ(to_string(Shortage::requests), "requests");
  EXPECT_STREQ(to_string(Shortage::none), "none");
  EXPECT_STREQ(to_string(Shortage::cancelled), "cancelled");
  EXPECT_EQ(Expected<int>(1).error(), Shortage::none);
}

// --- abort

TEST(CacheAbort, ReturnsEverything) {
  for (bool written : {false, true}) {
    SmallCache s;
    const RequestId a = s.request(1, 15), b = s.request(2, 16), c = s.admit();
    const RequestId shared = s.cache.fork(b).value();
    s.cache.rewind(b, 14);  // the next token needs a copy of a shared block
    small::CacheState before = state_of(s.cache, {a, b, c, shared});
    const Step step = s.prepare({{a, 7, 3}, {kNoRequest, 0, 2}, {b, 8, 20}, {c, 9, 30}});
    EXPECT_NE(s.cache.allocator().num_free(), before.free_blocks);
    if (written) s.append(step);
    s.cache.abort(step);
    small::CacheState after = state_of(s.cache, {a, b, c, shared});
    if (written) {  // rows that 3 tokens overwrote in place are lost; b and c wrote spare slots
      EXPECT_EQ(after.requests[0].floors[0], 15);
      after.requests[0].floors = before.requests[0].floors;
    }
    EXPECT_EQ(after, before);
    s.run({{a, 1, 3}, {b, 2, 20}, {c, 3, 30}});
    small::CpuCache alone;
    small::expect_same_bytes(s.cache, a, alone.cache, alone.request(1, 18));
    small::expect_same_bytes(s.cache, c, alone.cache, alone.request(3, 30));
    small::expect_same_bytes(s.cache, shared, alone.cache, alone.request(2, 16));
  }
}

// R + 1 tokens written in place overwrite every row that no query needs any more, the image's oldest included.
TEST(CacheAbort, OfTheLongestStepInPlaceLeavesTheImage) {
  CacheOptions o = small::options();
  o.draft_layers = 1;
  for (std::int32_t length : {3, 7, 8, 9, 20, 31}) {
    SCOPED_TRACE(length);
    SmallCache s(o);
    small::CpuCache alone(o);
    const RequestId a = s.request(1, length), same = alone.request(1, length);
    s.run({{a, 3, length}}, 1);
    alone.run({{same, 3, length}}, 1);
    for (std::int32_t count : {4, 4, 2, 4, 1}) {
      for (int group : {0, 1}) {
        const Step step = s.prepare({{a, static_cast<std::uint64_t>(7 + count), count}}, group);
        s.append(step);
        small::expect_same_bytes(s.cache, a, alone.cache, same);
        s.append(step);  // once more
        s.cache.abort(step);
        small::expect_same_bytes(s.cache, a, alone.cache, same);
      }
    }
    const RequestId fork = s.cache.fork(a).value();
    small::expect_same_bytes(s.cache, fork, alone.cache, same);
    const RequestId import =
        alone.cache.import_image(s.cache.export_image(a), s.cache.token_ids(a), s.cache.export_blocks(a)).value();
    for (std::int32_t count : {1, 9, 4}) {
      s.run({{a, 1, count}, {fork, 1, count}});
      alone.run({{same, 1, count}, {import, 1, count}});
    }
    small::expect_same_bytes(s.cache, a, alone.cache, same);
    small::expect_same_bytes(s.cache, fork, alone.cache, same);
    small::expect_same_bytes(alone.cache, import, alone.cache, same);
  }
}

// --- rewind

TEST(CacheRewind, FloorAndRange) {
  SmallCache s;
  const RequestId r = s.request(1, 34);
  EXPECT_EQ(s.cache.rewind_floor(r), 31);
  const small::CacheState before = state_of(s.cache, {r});
  for (std::int64_t bad : {std::int64_t{30}, std::int64_t{0}, std::int64_t{-1}, std::int64_t{35},
                           std::numeric_limits<std::int64_t>::max()})
    expect_error(ErrorCode::bad_argument, {std::to_string(bad), "31", "34"}, [&] { s.cache.rewind(r, bad); });
  EXPECT_EQ(state_of(s.cache, {r}), before);
  s.cache.rewind(r, 34);
  EXPECT_EQ(state_of(s.cache, {r}), before);
  s.cache.rewind(r, 32);
  EXPECT_EQ(s.cache.blocks(r).size(), 2u) << "the third block is free again";
  EXPECT_EQ(s.cache.allocator().num_held(), 2);
  EXPECT_EQ(s.cache.rewind_floor(r), 31) << "h is the highest position ever written";
  s.run({{r, 1, 1}});
  EXPECT_EQ(s.cache.rewind_floor(r), 31);
  s.run({{r, 1, 4}});
  EXPECT_EQ(s.cache.rewind_floor(r), 34);
  EXPECT_EQ(s.cache.token_ids(r), token_ids(1, 0, 37));
}

TEST(CacheRewind, ToNothing) {
  SmallCache s;
  const RequestId r = s.request(1, 3);
  s.cache.rewind(r, 0);
  EXPECT_EQ(s.cache.length(r), 0);
  EXPECT_EQ(s.cache.allocator().num_held(), 0);
  EXPECT_TRUE(s.cache.token_ids(r).empty());
  s.run({{r, 5, 21}});
  small::CpuCache alone;
  small::expect_same_bytes(s.cache, r, alone.cache, alone.request(5, 21));
}

TEST(CacheRewind, AnImportIsTheFloor) {
  SmallCache s;
  const RequestId a = s.request(1, 21);
  const RequestId b =
      s.cache.import_image(s.cache.export_image(a), s.cache.token_ids(a), s.cache.export_blocks(a)).value();
  EXPECT_EQ(s.cache.rewind_floor(b), 21);
  expect_error(ErrorCode::bad_argument, {"20"}, [&] { s.cache.rewind(b, 20); });
  s.run({{b, 1, 2}});
  EXPECT_EQ(s.cache.rewind_floor(b), 21);
}

}  // namespace
