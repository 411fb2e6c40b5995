// The index by hand: matches, pins, eviction, quotas, snapshots, events, refusals.
#include "prefix/prefix_index.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kv4/error.h"
#include "kv4/names.h"
#include "prefix/chains.h"

namespace {

using kv4::BlockEvent;
using kv4::BlockKey;
using kv4::EvictionKind;
using kv4::kNoNode;
using kv4::PrefixIndex;
using kv4::PrefixIndexOptions;
using kv4::PrefixMatch;
using kv4::NodeId;
using kv4::SnapshotPolicy;
using kv4::test::chain;
using Kind = SnapshotPolicy::Kind;

PrefixIndexOptions options(std::int64_t capacity, std::vector<std::int64_t> shares = {0}) {
  PrefixIndexOptions out;
  out.capacity_blocks = capacity;
  out.tenant_shares = std::move(shares);
  return out;
}

std::int64_t matched(const PrefixIndex& index, const std::string& text) {
  return index.match(chain(text), static_cast<std::int64_t>(text.size()) * 128).matched_blocks;
}

template <class F>
std::string refusal(F&& call) {
  try {
    call();
  } catch (const kv4::Error& e) {
    return e.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

TEST(PrefixIndex, FindsTheLongestPrefix) {
  PrefixIndex index(options(16));
  EXPECT_EQ(matched(index, "abc"), 0);
  const std::vector<kv4::BlockId> blocks{7, 8, 9};
  EXPECT_EQ(index.insert(0, chain("abc"), blocks).new_blocks, 3);
  EXPECT_EQ(index.insert(0, chain("abd")).new_blocks, 1);
  EXPECT_EQ(index.size(), 4);
  EXPECT_EQ(matched(index, "abcx"), 3);
  EXPECT_EQ(matched(index, "abd"), 3);
  EXPECT_EQ(matched(index, "abx"), 2);
  EXPECT_EQ(matched(index, "bcd"), 0) << "the same tokens behind others are another block";
  const NodeId c = index.find(chain("abc").back()), b = index.parent(c);
  EXPECT_EQ(index.block(c), 9);
  EXPECT_EQ(index.block(b), 8);
  EXPECT_EQ(index.children(b), 2);
  EXPECT_EQ(index.tokens(c), 384);
  EXPECT_EQ(index.parent(index.parent(b)), kNoNode);
}

TEST(PrefixIndex, AtLeastOneTokenIsLeftForAQuery) {
  PrefixIndex index(options(16));
  index.insert(0, chain("abcd"));
  const auto usable = [&](std::int64_t prompt) {
    std::vector<BlockKey> keys = chain("abcd");
    keys.resize(static_cast<std::size_t>(std::min<std::int64_t>(4, prompt / 128)));
    return index.match(keys, prompt).usable_tokens;
  };
  for (const auto& [prompt, expected] : std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 0},
                                                                                           {1, 0},
                                                                                           {127, 0},
                                                                                           {128, 0},
                                                                                           {129, 128},
                                                                                           {255, 128},
                                                                                           {256, 128},
                                                                                           {257, 256},
                                                                                           {383, 256},
                                                                                           {384, 256},
                                                                                           {385, 384},
                                                                                           {511, 384},
                                                                                           {512, 384},
                                                                                           {513, 512},
                                                                                           {9999, 512}})
    EXPECT_EQ(usable(prompt), expected) << prompt;
  EXPECT_NE(refusal([&] { index.match(chain("abcd"), 511); }).find("3 full blocks"), std::string::npos);
}

TEST(PrefixIndex, EvictsTheDeepestOfTheOldestFirst) {
  PrefixIndex index(options(6));
  index.insert(0, chain("abc"));
  index.insert(0, chain("xyz"));
  index.insert(0, chain("ab"));  // c is the oldest now, then z
  EXPECT_EQ(index.insert(0, chain("pq")).evicted.size(), 2u);
  EXPECT_EQ(matched(index, "abc"), 2);
  EXPECT_EQ(matched(index, "xyz"), 2);
  EXPECT_EQ(matched(index, "pq"), 2);
  for (const std::string expected : {"xy", "x", "ab", "a", "pq", "p"}) {
    EXPECT_EQ(index.evict(0)->key, chain(expected).back()) << expected;
  }
  EXPECT_FALSE(index.evict(0));
  EXPECT_EQ(index.size(), 0);
}

TEST(PrefixIndex, AChainLongerThanTheIndexKeepsItsHead) {
  PrefixIndex index(options(3));
  index.insert(0, chain("xy"));
  const PrefixIndex::Inserted inserted = index.insert(0, chain("abcde"));
  EXPECT_EQ(inserted.blocks, 3);
  EXPECT_EQ(inserted.evicted.size(), 2u);
  EXPECT_EQ(matched(index, "abcde"), 3);
}

TEST(PrefixIndex, PinnedBlocksStay) {
  for (const auto& [kind, name] : kv4::names_of<EvictionKind>()) {
    SCOPED_TRACE(name);
    PrefixIndexOptions o = options(4);
    o.eviction = kind;
    PrefixIndex index(o);
    index.insert(0, chain("abcd"));
    const NodeId b = index.find(chain("ab").back());
    index.pin(b);
    index.pin(b);
    EXPECT_EQ(index.references(b), 2);
    EXPECT_EQ(index.insert(0, chain("wxyz")).blocks, 2) << "c and d made room";
    EXPECT_EQ(matched(index, "abcd"), 2);
    index.unpin(b);
    EXPECT_EQ(index.insert(0, chain("pqrs")).blocks, 2);
    index.unpin(b);
    EXPECT_EQ(index.insert(0, chain("mnop")).blocks, 4);
    EXPECT_EQ(matched(index, "abcd"), 0);
  }
}

TEST(PrefixIndex, ARunningRequestAddsBlocksAsTheyFill) {
  PrefixIndex index(options(3));
  const auto a = index.append(0, kNoNode, chain("a")[0], 5);
  const auto b = index.append(0, a->id, chain("ab")[1], 6);
  EXPECT_TRUE(b->is_new);
  EXPECT_EQ(matched(index, "ab"), 2) << "a prefix of a running request is found";
  const auto again = index.append(0, kNoNode, chain("a")[0], 9);
  EXPECT_FALSE(again->is_new);
  EXPECT_EQ(index.block(again->id), 5);
  EXPECT_EQ(index.references(a->id), 2);
  const auto x = index.append(0, a->id, chain("ax")[1]);
  EXPECT_FALSE(index.append(0, x->id, chain("axy")[2])) << "full";
  EXPECT_FALSE(index.evict(0)) << "all are in use";
  index.unpin(x->id);
  EXPECT_EQ(index.evict(0)->key, chain("ax")[1]);
  index.unpin(b->id);
  EXPECT_EQ(index.evict(0)->block, 6);
  EXPECT_EQ(index.evict(0)->block, 5);
}

TEST(PrefixIndex, NobodyIsEvictedBelowHisShare) {
  PrefixIndex index(options(10, {4, 0, 2}));
  index.insert(0, chain("abcdef"));
  index.insert(2, chain("uv"));
  for (const std::string text : {"1234", "5678", "90AB", "CDEFGHIJKLMN"}) {  // a flood
    index.insert(1, chain(text));
    EXPECT_GE(index.tenant_size(0), 4);
    EXPECT_EQ(index.tenant_size(2), 2);
  }
  EXPECT_EQ(matched(index, "abcdef"), 4);
  EXPECT_EQ(index.tenant_size(1), 4);
  index.insert(0, chain("abcdef"));  // takes from the flood, which has no share
  EXPECT_EQ(matched(index, "abcdef"), 6);
  EXPECT_EQ(index.tenant_size(1), 2);
  EXPECT_EQ(matched(index, "uv"), 2);
  index.insert(2, chain("UVWXYZ"));
  EXPECT_EQ(index.tenant_size(0), 4) << "he gave what was above his share";
}

TEST(PrefixIndex, ResumesAtTheNewestSnapshot) {
  PrefixIndex index(options(16));
  index.insert(0, chain("abcdef"));
  const auto at = [&](std::size_t blocks) { return index.find(chain("abcdef")[blocks - 1]); };
  EXPECT_EQ(index.match(chain("abcdef"), 1000).resume_at, 0);
  EXPECT_EQ(index.match(chain("abcdef"), 1000).snapshot, kv4::kNoSnapshot);
  EXPECT_EQ(index.attach_snapshot(at(2), 20), kv4::kNoSnapshot);
  index.attach_snapshot(at(6), 60);
  PrefixMatch match = index.match(chain("abcdef"), 1000);
  EXPECT_EQ(match.usable_tokens, 768);
  EXPECT_EQ(match.resume_at, 768);
  EXPECT_EQ(match.replayed_tokens(), 0);
  EXPECT_EQ(match.snapshot, 60);
  match = index.match(chain("abcdef"), 768);  // the last block cannot be used, nor can its snapshot
  EXPECT_EQ(match.matched_blocks, 6);
  EXPECT_EQ(match.usable_tokens, 640);
  EXPECT_EQ(match.id, at(5));
  EXPECT_EQ(match.resume_at, 256);
  EXPECT_EQ(match.replayed_tokens(), 384);
  EXPECT_EQ(match.snapshot, 20);
  EXPECT_EQ(index.detach_snapshot(at(2)), 20);
  EXPECT_EQ(index.match(chain("abcdef"), 768).resume_at, 0);
  EXPECT_EQ(index.evict(0)->snapshot, 60) << "who evicts a block frees its snapshot";
}

TEST(PrefixIndex, WithoutSnapshotsTheLastTokensAreReplayed) {
  PrefixIndexOptions o = options(16);
  o.snapshots = {.kind = Kind::none, .replay_tokens = 128 * 3};  // a model of 3 layers
  PrefixIndex index(o);
  index.insert(0, chain("abcdef"));
  PrefixMatch match = index.match(chain("abcdef"), 1000);
  EXPECT_EQ(match.usable_tokens, 768);
  EXPECT_EQ(match.resume_at, 384);
  EXPECT_EQ(match.snapshot, kv4::kNoSnapshot);
  match = index.match(chain("ab"), 300);
  EXPECT_EQ(match.resume_at, 0);
  EXPECT_EQ(match.replayed_tokens(), 256);
}

TEST(PrefixIndex, WhereSnapshotsAreKept) {
  const SnapshotPolicy full{.kind = Kind::full}, checkpoint{.kind = Kind::checkpoint}, none{.kind = Kind::none};
  EXPECT_TRUE(full.keeps(128, false));
  EXPECT_FALSE(checkpoint.keeps(8064, false));
  EXPECT_TRUE(checkpoint.keeps(8064, true));
  EXPECT_TRUE(checkpoint.keeps(8192, false));
  EXPECT_FALSE(none.keeps(8192, true));
}

TEST(PrefixIndex, EventsAreBounded) {
  PrefixIndexOptions o = options(2);
  o.max_events = 3;
  PrefixIndex index(o);
  index.insert(0, chain("ab"));
  std::vector<BlockEvent> events(8);
  ASSERT_EQ(index.read_events(std::span(events).first(1)), 1u);
  EXPECT_EQ(events[0].key, chain("a")[0]);
  EXPECT_EQ(events[0].kind, BlockEvent::Kind::stored);
  index.insert(0, chain("xy"));  // b, then a evicted; x and y stored
  EXPECT_EQ(index.lost_events(), 2u);
  ASSERT_EQ(index.read_events(events), 3u);
  EXPECT_EQ(events[0].key, chain("x")[0]);
  EXPECT_EQ(events[1].key, chain("a")[0]);
  EXPECT_EQ(events[1].kind, BlockEvent::Kind::evicted);
  EXPECT_EQ(events[2].key, chain("xy")[1]);
  EXPECT_EQ(index.read_events(events), 0u);
}

TEST(PrefixIndex, RefusesWithAReason) {
  const auto says = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  says(refusal([] { PrefixIndex(options(0)); }), "capacity_blocks is 0");
  says(refusal([] { PrefixIndex(options(4, {3, 2})); }), "add up to 5");
  says(refusal([] { PrefixIndex(options(4, {})); }), "0 tenants");
  PrefixIndexOptions o = options(4);
  o.snapshots.period_tokens = 100;
  says(refusal([&] { PrefixIndex{o}; }), "multiples of 128");
  o.snapshots = {.kind = Kind::none};
  says(refusal([&] { PrefixIndex{o}; }), "replay_tokens is 0");

  PrefixIndex index(options(4));
  index.insert(0, chain("ab"));
  const NodeId a = index.find(chain("a")[0]);
  says(refusal([&] { index.unpin(a); }), "once too often");
  says(refusal([&] { index.pin(3); }), "id 3 holds no block");
  says(refusal([&] { index.pin(-7); }), "id -7");
  says(refusal([&] { index.append(0, a, chain("ax")[1]); }), "not pinned");
  says(refusal([&] { index.append(1, kNoNode, chain("q")[0]); }), "tenant 1");
  const std::vector<BlockKey> foreign{chain("ab")[1]};
  says(refusal([&] { index.insert(0, foreign); }), "one chain");
  const std::vector<BlockKey> twice{chain("a")[0], chain("a")[0]};
  says(refusal([&] { index.insert(0, twice); }), "one chain");
  EXPECT_EQ(index.references(a), 0) << "a refused insert leaves no pin";
  EXPECT_EQ(matched(index, "ab"), 2);
}

}  // namespace
