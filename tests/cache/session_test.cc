// Sessions: a restored request equals the saved one, at any length and between any two compatible caches; everything
// else is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "cache/session_records.h"
#include "kv4/host_memory.h"
#include "kv4/preempted_request.h"

namespace kv4::test {
namespace {

const std::vector<std::int64_t> kLengths = {0,   1,   2,   3,   4,   5,   127, 128, 129, 130,
                                            255, 256, 257, 383, 384, 385, 511, 512, 513};

const Model& tiny() {
  static const Model model(tiny_config());
  return model;
}

// --- round trips

// One request grows from length to length. At each length it is saved and restored in the other cache, where the copy
// grows to the next length: both have the same bytes.
void follow(Driver& from, Driver& to, const std::vector<std::int64_t>& lengths) {
  const RequestId request = from.admit();
  RequestId restored = kNoRequest;
  for (const std::int64_t length : lengths) {
    const std::string what = "length " + std::to_string(length);
    grow(from, request, length);
    const Bytes expected = bytes_of(from.cache, request);
    if (restored != kNoRequest) {
      grow(to, restored, length);
      expect_same(bytes_of(to.cache, restored), expected, what + ", continued");
      to.cache.release(restored);
    }
    restored = restore(to.cache, save(from.cache, request));
    expect_same(bytes_of(to.cache, restored), expected, what + ", restored");
  }
}

class SessionRoundTrip : public testing::TestWithParam<FormatCase> {};
INSTANTIATE_TEST_SUITE_P(Formats, SessionRoundTrip, testing::ValuesIn(all_format_cases()),
                         [](const auto& format) { return format.param.name(); });

TEST_P(SessionRoundTrip, AtEveryBoundary) {
  if (GetParam().shared && test_backend()->shared_entries() == nullptr)
    GTEST_SKIP() << "this backend has no operations of V4.1";
  const Model model(tiny_config(GetParam()));
  const CacheOptions here = session_options(GetParam());
  Driver from(model, here), to(model, other_places(here), make_cpu_backend());
  follow(from, to, kLengths);
  Driver back(model, here, make_cpu_backend()), again(model, other_places(here));
  follow(back, again, {2, 127, 130, 256, 385});
}

TEST(SessionRoundTrip, RealWidths) {
  const Model model(real_config());
  CacheOptions here = session_options();
  here.draft_layers = 0;
  Driver from(model, here), to(model, other_places(here), make_cpu_backend());
  follow(from, to, {5, 127, 128, 257, 384});
}

TEST(SessionRoundTrip, LongOnes) {
  CacheOptions here = session_options();
  here.max_context = 8192;
  here.num_blocks = 160;
  CacheOptions there = other_places(here);
  there.num_blocks = 80;
  Driver from(tiny(), here), to(tiny(), there, make_cpu_backend());
  follow(from, to, {4097, 8064, 8190});
}

TEST(SessionRoundTrip, OtherRequestsAreLeftAlone) {
  Driver from(tiny(), session_options()), to(tiny(), session_options());
  const RequestId request = from.admit(), other = to.admit();
  grow(from, request, 300);
  to.feed(other, 5, {200, 17});
  const Bytes before = bytes_of(to.cache, other);
  const RequestId restored = restore(to.cache, save(from.cache, request));
  EXPECT_EQ(to.cache.rewind_floor(restored), 300);
  to.feed(restored, 11, {30});
  expect_same(bytes_of(to.cache, other), before, "the other request");
}

// The request was rewound and forked, and is in the middle of an open step of its own.
TEST(SessionRoundTrip, WhateverItsHistory) {
  Driver from(tiny(), session_options()), to(tiny(), session_options());
  for (int round = 0; round < rounds(12); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Random random(static_cast<std::uint64_t>(round) + 41);
    const std::int64_t length = random.between(1, 400);
    const RequestId plain = to.admit(), first = from.admit();
    for (std::int32_t chunk : random_chunks(random, length, 90)) to.run({{plain, 11, chunk}});
    for (std::int32_t chunk : random_chunks(random, length, 90)) {
      from.run({{first, 11, chunk}});
      const std::int64_t now = from.cache.length(first);
      from.run({{first, 99, 3}});
      from.cache.rewind(first, now);
    }
    const RequestId request = from.cache.fork(first).value();
    from.run({{first, 77, 5}});
    const Step step = from.prepare({{request, 11, 2}}).value();
    from.append(step);
    const RequestId restored = restore(to.cache, save(from.cache, request));
    from.cache.abort(step);
    expect_same(bytes_of(to.cache, restored), bytes_of(to.cache, plain), "restored");
    to.run({{plain, 11, 40}});
    for (int i = 0; i < 4; ++i) to.run({{restored, 11, 10}});
    expect_same(bytes_of(to.cache, restored), bytes_of(to.cache, plain), "continued");
    for (RequestId r : {first, request}) from.cache.release(r);
    for (RequestId r : {plain, restored}) to.cache.release(r);
  }
}

TEST(SessionRoundTrip, NoRoomIsAShortage) {
  Driver from(tiny(), session_options());
  const RequestId request = from.admit();
  grow(from, request, 300);
  RecordList records = save(from.cache, request);
  CacheOptions small = session_options();
  small.num_blocks = 2;
  Driver few_blocks(tiny(), small);
  EXPECT_EQ(restore_session(few_blocks.cache, identity(), records).error(), Shortage::blocks);
  small.num_blocks = 20;
  small.max_requests = 1;
  Driver one(tiny(), small);
  one.admit();
  const Occupancy before = occupancy(one.cache);
  records.at = 0;
  EXPECT_EQ(restore_session(one.cache, identity(), records).error(), Shortage::requests);
  EXPECT_EQ(occupancy(one.cache), before);
}

TEST(SessionRoundTrip, ProgressAndStop) {
  Driver driver(tiny(), session_options());
  const RequestId request = driver.admit();
  grow(driver, request, 400);
  std::vector<std::int64_t> told;
  std::int64_t total = 0;
  const auto note = [&](std::int64_t done, std::int64_t all) {
    told.push_back(done);
    total = all;
    return true;
  };
  RecordList records;
  ASSERT_TRUE(save_session(driver.cache, request, identity(), records, note));
  std::int64_t written = 0;
  for (const auto& record : records.list) written += static_cast<std::int64_t>(record.size());
  ASSERT_EQ(told.size(), 4u);  // its own record and three full blocks
  EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
  EXPECT_EQ(told.front(), static_cast<std::int64_t>(records.list[0].size()));
  EXPECT_EQ(told.back(), total);
  EXPECT_EQ(total, written);
  const std::vector<std::int64_t> saving = std::exchange(told, {});
  ASSERT_TRUE(restore_session(driver.cache, identity(), records, note));
  EXPECT_EQ(told, saving);

  const auto stop = [&](std::int64_t done, std::int64_t) { return done < saving[1]; };
  const Occupancy before = occupancy(driver.cache);
  records.at = 0;
  const Expected<RequestId> stopped = restore_session(driver.cache, identity(), records, stop);
  EXPECT_FALSE(stopped);
  EXPECT_EQ(stopped.error(), Shortage::cancelled);
  try {
    stopped.value();
    FAIL() << "value() gave a request";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_state);
    EXPECT_NE(std::string(error.what()).find("cancelled"), std::string::npos) << error.what();
  }
  EXPECT_EQ(occupancy(driver.cache), before);
  RecordList part;
  EXPECT_FALSE(save_session(driver.cache, request, identity(), part, stop));
  EXPECT_EQ(part.list.size(), 2u);
}

// --- refusals

TEST(SessionRefused, OtherCachesAndNames) {
  Driver from(tiny(), session_options());
  const RequestId request = from.admit();
  grow(from, request, 300);
  const RecordList records = save(from.cache, request);

  const auto refused = [&](ErrorCode code, const std::string& part, const SessionIdentity& who, const CacheOptions& o,
                           const ModelConfig& config) {
    SCOPED_TRACE(part);
    KVCacheManager cache(config, o, test_backend());
    const Occupancy before = occupancy(cache);
    expect_refused(code, part, [&] { restore(cache, records, who); });
    EXPECT_EQ(occupancy(cache), before);
  };
  const auto named = [&](const std::string& part, auto change) {
    SessionIdentity who = identity();
    change(who);
    refused(ErrorCode::bad_file, part, who, session_options(), tiny_config());
  };
  named("other weights: 'weights-1' there, 'weights-2' here", [](SessionIdentity& i) { i.weights_id = "weights-2"; });
  named("another salt", [](SessionIdentity& i) { i.salt = "pepper"; });
  named("tenant 7", [](SessionIdentity& i) { i.tenant = 8; });

  const auto optioned = [&](ErrorCode code, const std::string& part, auto change) {
    CacheOptions o = session_options();
    change(o);
    refused(code, part, identity(), o, tiny_config());
  };
  const ErrorCode file = ErrorCode::bad_file;
  optioned(file, "another layout: 'rows fp8_tile64", [](CacheOptions& o) { o.row_format = Format::bf16; });
  optioned(file, "keys nvfp4", [](CacheOptions& o) { o.index_format = Format::nvfp4; });
  optioned(file, "hadamard false", [](CacheOptions& o) { o.hadamard = false; });
  optioned(file, "pending bf16", [](CacheOptions& o) { o.pending_dtype = DType::bf16; });
  optioned(file, "block 256", [](CacheOptions& o) { o.block_tokens = 256; });
  optioned(file, "'layer 5 group 2' there, '' here", [](CacheOptions& o) { o.draft_layers = 1; });
  optioned(file, "layer 0 group 0", [](CacheOptions& o) { o.layers = {1, 2}; });
  optioned(ErrorCode::bad_argument, "max_context", [](CacheOptions& o) { o.max_context = 256; });

  const auto configured = [&](const std::string& part, auto change) {
    ModelConfig c = tiny_config();
    change(c);
    refused(file, part, identity(), session_options(), c);
  };
  configured("another model", [](ModelConfig& c) { c.index_topk = 5; });
  configured("ropes", [](ModelConfig& c) { c.rope_compress.theta = 150000; });
  configured("window 16", [](ModelConfig& c) { c.window = 16; });
}

TEST(SessionRefused, EveryFlippedBit) {
  Driver from(tiny(), session_options()), to(tiny(), session_options());
  const RequestId request = from.admit();
  grow(from, request, 260);
  const RecordList sound = save(from.cache, request);
  const Occupancy before = occupancy(to.cache);
  Random random(5);
  for (std::size_t r = 0; r < sound.list.size(); ++r) {
    std::vector<std::size_t> places(tier::kRecordHeaderBytes + kSessionFixedBytes);
    for (std::size_t i = 0; i < places.size(); ++i) places[i] = i;
    for (int i = 0; i < 200; ++i)
      places.push_back(static_cast<std::size_t>(random.below(static_cast<std::int64_t>(sound.list[r].size()))));
    for (const std::size_t place : places) {
      SCOPED_TRACE("record " + std::to_string(r) + ", byte " + std::to_string(place));
      RecordList records = sound;
      records.list[r][place] ^= std::byte{1} << random.below(8);
      expect_refused(ErrorCode::bad_file, "record " + std::to_string(r), [&] { restore(to.cache, records); });
    }
  }
  EXPECT_EQ(occupancy(to.cache), before);
  restore(to.cache, sound);
}

// A record with fitting digests and wrong contents: every bit of the session's fields and token ids.
TEST(SessionRefused, EveryFieldByItself) {
  Driver from(tiny(), session_options()), to(tiny(), session_options());
  const RequestId request = from.admit();
  grow(from, request, 130);
  const RecordList sound = save(from.cache, request);
  const auto payload = std::span(sound.list[0]).subspan(tier::kRecordHeaderBytes);
  const SessionParts parts = parse_session(payload);
  const std::size_t end = static_cast<std::size_t>(parts.image.data() - payload.data());
  for (std::size_t place = 0; place < end; ++place)
    for (int bit = 0; bit < 8; bit += place < kSessionFixedBytes + 24 ? 1 : 7) {
      SCOPED_TRACE("byte " + std::to_string(place) + ", bit " + std::to_string(bit));
      RecordList records = sound;
      records.list[0][tier::kRecordHeaderBytes + place] ^= std::byte{1} << bit;
      encode_again(records.list[0]);
      EXPECT_THROW(restore(to.cache, records), Error);
    }
  // The same for the fields of a header.
  const auto headed = [&](std::size_t r, const std::string& part, auto change) {
    RecordList records = sound;
    tier::RecordHeader header = tier::parse_header(records.list[r]).header;
    change(header);
    encode_again(header, records.list[r]);
    expect_refused(ErrorCode::bad_file, part, [&] { restore(to.cache, records); });
  };
  for (std::size_t r : {0, 1}) {
    headed(r, "tenant 8", [](tier::RecordHeader& h) { h.id.tenant = 8; });
    headed(r, "layout", [](tier::RecordHeader& h) { h.layout_id ^= 1; });
    headed(r, "in a wrong place", [](tier::RecordHeader& h) { h.place = 1; });
    headed(r, "dead", [](tier::RecordHeader& h) { h.kind = tier::RecordKind::dead; });
    headed(r, r == 0 ? "its key" : "not of this session", [](tier::RecordHeader& h) { h.id.key[5] ^= std::byte{1}; });
  }
  EXPECT_EQ(to.cache.num_requests(), 0);
}

TEST(SessionRefused, BytesTooManyOrTooFew) {
  Driver from(tiny(), session_options()), to(tiny(), session_options());
  const RequestId request = from.admit();
  grow(from, request, 130);
  const RecordList sound = save(from.cache, request);
  for (std::size_t r : {0, 1}) {
    RecordList longer = sound, shorter = sound;
    longer.list[r].push_back(std::byte{0});
    expect_refused(ErrorCode::bad_file, "1 bytes more", [&] { restore(to.cache, longer); });
    shorter.list[r].pop_back();
    expect_refused(ErrorCode::bad_file, "too short", [&] { restore(to.cache, shorter); });
    // The same, sealed.
    longer = shorter = sound;
    longer.list[r].push_back(std::byte{0});
    shorter.list[r].pop_back();
    for (RecordList* list : {&longer, &shorter}) {
      encode_again(list->list[r]);
      expect_refused(ErrorCode::bad_file, "bytes", [&] { restore(to.cache, *list); });
    }
  }
  expect_refused(ErrorCode::bad_file, "own record is missing", [&] { restore(to.cache, {}); });
  EXPECT_EQ(to.cache.num_requests(), 0);
}

// --- hand-over

/// Blocks by key, as in a prefix cache.
struct BlocksByKey : BlockSource {
  std::map<BlockKey, std::vector<std::byte>> blocks;
  int asked = 0;

  bool get(const BlockKey& key, std::span<std::byte> out) override {
    ++asked;
    const auto found = blocks.find(key);
    if (found == blocks.end()) {
      std::fill(out.begin(), out.end(), std::byte{0xEE});  // allowed; must have no effect
      return false;
    }
    std::copy(found->second.begin(), found->second.end(), out.begin());
    return true;
  }
  void keep(const std::vector<std::byte>& record) {
    const tier::RecordHeader header = tier::parse_header(record).header;
    blocks[block_key(header.id.key)] = {record.begin() + tier::kRecordHeaderBytes, record.end()};
  }
};

TEST(SessionHandOver, SendsWhatTheOtherSideLacks) {
  Driver from(tiny(), session_options()), to(tiny(), other_places(session_options()), make_cpu_backend());
  const RequestId request = from.admit();
  grow(from, request, 600);
  const Bytes expected = bytes_of(from.cache, request);
  const RecordList all = save(from.cache, request);
  ASSERT_EQ(all.list.size(), 5u);
  for (const unsigned has : {0b0000u, 0b0001u, 0b0111u, 0b1111u, 0b1010u}) {
    SCOPED_TRACE("has " + std::to_string(has));
    BlocksByKey kept;
    for (std::size_t i = 0; i < 4; ++i)
      if ((has >> i & 1u) != 0) kept.keep(all.list[i + 1]);
    SessionSender sender(from.cache, request, identity());
    ASSERT_EQ(sender.keys().size(), 4u);
    SessionReceiver receiver(to.cache, identity(), &kept);
    EXPECT_FALSE(receiver.has_offer());
    EXPECT_TRUE(receiver.wanted().empty());

    RecordList sent;
    sender.offer(sent);
    receiver.take(sent.next());
    EXPECT_TRUE(receiver.has_offer());
    EXPECT_EQ(kept.asked, 4);
    std::vector<BlockKey> lacking;
    for (std::size_t i = 0; i < 4; ++i)
      if ((has >> i & 1u) == 0) lacking.push_back(sender.keys()[i]);
    EXPECT_EQ(receiver.wanted(), lacking);
    EXPECT_EQ(receiver.total_bytes() - receiver.done_bytes(),
              static_cast<std::int64_t>(lacking.size() * all.list[1].size()));

    EXPECT_TRUE(sender.send(receiver.wanted(), sent));
    EXPECT_EQ(sent.list.size(), 1 + lacking.size());
    for (auto record = sent.next(); !record.empty(); record = sent.next()) receiver.take(record);
    const RequestId restored = receiver.finish().value();
    expect_same(bytes_of(to.cache, restored), expected, "handed over");
    expect_refused(ErrorCode::bad_state, "restored already", [&] { (void)receiver.finish(); });
    expect_refused(ErrorCode::bad_state, "restored already", [&] { receiver.take(sent.list[0]); });
    to.cache.release(restored);
  }
}

TEST(SessionHandOver, AnyOrderAndAnyNumber) {
  Driver from(tiny(), session_options()), to(tiny(), session_options());
  const RequestId request = from.admit();
  grow(from, request, 600);
  const RecordList all = save(from.cache, request);
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Random random(static_cast<std::uint64_t>(round));
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < all.list.size(); ++i)
      for (std::int64_t n = random.between(1, 2); n > 0; --n)
        order.insert(order.begin() + random.below(static_cast<std::int64_t>(order.size()) + 1), i);
    RecordList mixed;
    for (const std::size_t i : order) mixed.list.push_back(all.list[i]);
    // Before the session's own record, the receiver takes as many blocks as a request may have.
    const RequestId restored = restore(to.cache, mixed);
    expect_same(bytes_of(to.cache, restored), bytes_of(from.cache, request), "mixed");
    to.cache.release(restored);
  }
}

TEST(SessionHandOver, MissingRecordsAreWaitedFor) {
  Driver from(tiny(), session_options()), to(tiny(), session_options());
  const RequestId request = from.admit();
  grow(from, request, 600);
  const RecordList all = save(from.cache, request);
  for (std::size_t lost = 0; lost < all.list.size(); ++lost) {
    SessionReceiver receiver(to.cache, identity());
    const Occupancy before = occupancy(to.cache);
    for (std::size_t i = 0; i < all.list.size(); ++i)
      if (i != lost) receiver.take(all.list[i]);
    expect_refused(ErrorCode::bad_file,
                   lost == 0
                       ? "own record is missing"
                       : "1 of the session's 4 full blocks are missing; the first is block " + std::to_string(lost - 1),
                   [&] { (void)receiver.finish(); });
    EXPECT_EQ(occupancy(to.cache), before);
    receiver.take(all.list[lost]);
    SessionReceiver moved = std::move(receiver);
    const RequestId restored = moved.finish().value();
    expect_same(bytes_of(to.cache, restored), bytes_of(from.cache, request), "complete");
    to.cache.release(restored);
  }
}

TEST(SessionHandOver, ForeignRecordsAreRefused) {
  Driver from(tiny(), session_options()), to(tiny(), session_options());
  const RequestId request = from.admit(), other = from.admit();
  grow(from, request, 300);
  from.feed(other, 5, {300});
  const RecordList mine = save(from.cache, request), others = save(from.cache, other);
  SessionReceiver receiver(to.cache, identity());
  receiver.take(mine.list[0]);
  expect_refused(ErrorCode::bad_file, "not of this session", [&] { receiver.take(others.list[1]); });
  expect_refused(ErrorCode::bad_file, "another session", [&] { receiver.take(others.list[0]); });
  receiver.take(mine.list[1]);
  std::vector<std::byte> changed = mine.list[1];
  changed.back() ^= std::byte{1};
  encode_again(changed);
  expect_refused(ErrorCode::bad_file, "other bytes", [&] { receiver.take(changed); });
  receiver.take(mine.list[2]);
  const RequestId restored = receiver.finish().value();
  expect_same(bytes_of(to.cache, restored), bytes_of(from.cache, request), "in spite of all");

  // A block of another session comes first: the offer reveals it.
  SessionReceiver mixed(to.cache, identity());
  mixed.take(others.list[1]);
  expect_refused(ErrorCode::bad_file, "not of this session", [&] { mixed.take(mine.list[0]); });
  EXPECT_FALSE(mixed.has_offer());
  // The number of records before the offer is limited.
  SessionReceiver flooded(to.cache, identity());
  const int most = to.cache.schema().blocks_per_request;
  for (int i = 0; i < most; ++i) flooded.take(mine.list[1]);
  expect_refused(ErrorCode::bad_file, "records came before", [&] { flooded.take(mine.list[1]); });
}

TEST(SessionHandOver, TheRequestMayGoOnMeanwhile) {
  Driver from(tiny(), session_options()), to(tiny(), session_options());
  const RequestId request = from.admit();
  grow(from, request, 300);
  const Bytes expected = bytes_of(from.cache, request);
  SessionSender sender(from.cache, request, identity());
  from.run({{request, 11, 100}});
  RecordList sent;
  sender.offer(sent);
  EXPECT_TRUE(sender.send(sender.keys(), sent));
  expect_same(bytes_of(to.cache, restore(to.cache, sent)), expected, "as it was offered");

  BlockKey unknown = sender.keys()[0];
  unknown[0] ^= 1;
  expect_refused(ErrorCode::bad_argument, "is not of request", [&] { sender.send({&unknown, 1}, sent); });
  from.cache.release(request);
  expect_refused(ErrorCode::bad_argument, "request", [&] { sender.send(sender.keys(), sent); });
}

TEST(SessionHandOver, ARewoundRequestIsNotSent) {
  Driver from(tiny(), session_options());
  const RequestId request = from.admit();
  from.feed(request, 11, {126, 3});
  SessionSender sender(from.cache, request, identity());
  ASSERT_EQ(sender.keys().size(), 1u);
  from.cache.rewind(request, 127);
  RecordList sent;
  expect_refused(ErrorCode::bad_state, "rewound", [&] { sender.send(sender.keys(), sent); });
  from.run({{request, 12, 3}});  // other tokens
  expect_refused(ErrorCode::bad_state, "rewound", [&] { sender.send(sender.keys(), sent); });
  EXPECT_TRUE(sent.list.empty());
}

TEST(SessionHandOver, KeysAreThoseOfThePrefixIndex) {
  Driver driver(tiny(), session_options());
  const RequestId request = driver.admit();
  grow(driver, request, 300);
  SessionIdentity who = identity();
  who.block_extra = {{std::byte{1}, std::byte{2}}};
  const SessionSender plain(driver.cache, request, identity()), extra(driver.cache, request, who);

  BlockHasher hasher;
  const BlockKey root = hasher.root(identify_chain(driver.cache.schema(), "weights-1", "salt"));
  const std::vector<std::int32_t> ids = driver.cache.token_ids(request);
  const BlockKey first = hasher.block(root, std::span(ids).first(128)),
                 second = hasher.block(first, std::span(ids).subspan(128, 128));
  EXPECT_EQ(plain.keys(), (std::vector{first, second}));
  const BlockKey with = hasher.block(root, std::span(ids).first(128), who.block_extra[0]);
  EXPECT_EQ(extra.keys(), (std::vector{with, hasher.block(with, std::span(ids).subspan(128, 128))}));

  // A session brings its extra bytes along; the restoring side need not know them.
  const Bytes expected = bytes_of(driver.cache, request);
  expect_same(bytes_of(driver.cache, restore(driver.cache, save(driver.cache, request, who))), expected, "extra");
  who.block_extra.resize(3);
  expect_refused(ErrorCode::bad_argument, "3 full blocks", [&] { save(driver.cache, request, who); });
}

// --- preempt and resume

TEST(Preempt, ComesBackWithTheSameBytes) {
  Driver driver(tiny(), session_options()), whole(tiny(), session_options(), make_cpu_backend());
  PreemptedRequest aside(HostMemory(driver.backend, 4 << 20));
  RequestId request = driver.admit();
  const RequestId never = whole.admit();
  for (const std::int64_t length : kLengths) {
    grow(driver, request, length);
    grow(whole, never, length);
    EXPECT_LE(preempted_bytes(driver.cache, request), aside.capacity_bytes());
    preempt(driver.cache, request, aside);
    EXPECT_EQ(driver.cache.num_requests(), 0);
    EXPECT_EQ(driver.cache.allocator().num_held(), 0);
    EXPECT_EQ(aside.lengths()[0], length);
    EXPECT_EQ(aside.token_ids().size(), static_cast<std::size_t>(length));
    driver.cache.release(driver.admit());  // another request in between
    request = resume(driver.cache, aside).value();
    EXPECT_TRUE(aside.empty());
    expect_same(bytes_of(driver.cache, request), bytes_of(whole.cache, never), "length " + std::to_string(length));
  }
}

// The blocks of this cache have no bytes.
TEST(Preempt, WindowsOnly) {
  CacheOptions o = session_options();
  o.layers = {0};
  Driver driver(tiny(), o);
  ASSERT_EQ(driver.cache.schema().block_image_bytes, 0);
  RequestId request = driver.admit();
  grow(driver, request, 300);
  const Bytes expected = bytes_of(driver.cache, request);
  PreemptedRequest aside(HostMemory(driver.backend, preempted_bytes(driver.cache, request)));
  preempt(driver.cache, request, aside);
  request = resume(driver.cache, aside).value();
  expect_same(bytes_of(driver.cache, request), expected, "resumed");

  // Refused by a cache of another layout; the session is still there.
  preempt(driver.cache, request, aside);
  Driver other(tiny(), session_options());
  EXPECT_THROW((void)resume(other.cache, aside), Error);
  EXPECT_FALSE(aside.empty());
}

TEST(Preempt, AShortageKeepsIt) {
  CacheOptions o = session_options();
  o.num_blocks = 4;
  Driver driver(tiny(), o);
  const RequestId request = driver.admit(), other = driver.admit();
  grow(driver, request, 300);
  const Bytes expected = bytes_of(driver.cache, request);
  PreemptedRequest aside(HostMemory(driver.backend, preempted_bytes(driver.cache, request)));
  preempt(driver.cache, request, aside);
  driver.feed(other, 5, {200});
  EXPECT_EQ(resume(driver.cache, aside).error(), Shortage::blocks);
  EXPECT_EQ(resume(driver.cache, aside).error(), Shortage::blocks);
  EXPECT_FALSE(aside.empty());
  driver.cache.release(other);
  expect_same(bytes_of(driver.cache, resume(driver.cache, aside).value()), expected, "resumed");
}

TEST(Preempt, RefusalsChangeNothing) {
  Driver driver(tiny(), session_options());
  const RequestId request = driver.admit(), other = driver.admit();
  grow(driver, request, 300);
  driver.feed(other, 5, {40});
  const Bytes before = bytes_of(driver.cache, request);
  const std::int64_t bytes = preempted_bytes(driver.cache, request);
  PreemptedRequest small(HostMemory(driver.backend, bytes - 1)), aside(HostMemory(driver.backend, bytes));
  expect_refused(ErrorCode::bad_argument, std::to_string(bytes), [&] { preempt(driver.cache, request, small); });
  expect_refused(ErrorCode::bad_argument, "no request", [&] { (void)resume(driver.cache, small); });
  const Step step = driver.prepare({{request, 11, 1}}).value();
  expect_refused(ErrorCode::bad_state, "", [&] { preempt(driver.cache, request, aside); });
  EXPECT_TRUE(aside.empty());
  driver.cache.abort(step);
  expect_same(bytes_of(driver.cache, request), before, "refused");
  preempt(driver.cache, other, aside);
  expect_refused(ErrorCode::bad_argument, "40 tokens in it", [&] { preempt(driver.cache, request, aside); });

  CacheOptions bf16 = session_options();
  bf16.row_format = Format::bf16;
  Driver another(tiny(), bf16);
  expect_refused(ErrorCode::bad_argument, "layout", [&] { (void)resume(another.cache, aside); });
  EXPECT_FALSE(aside.empty());
  EXPECT_EQ(driver.cache.length(resume(driver.cache, aside).value()), 40);
}

// --- whose records

CacheKey session_key_of(unsigned char first) { return {std::byte{first}}; }

SessionIdentity with_keys(std::vector<CacheKey> keys, Protection protection = Protection::sealed) {
  SessionIdentity who = identity();
  who.keys = std::move(keys);
  who.protection = protection;
  return who;
}

TEST(SessionKeys, ProtectedSessionsComeBack) {
  for (const Protection protection : {Protection::sealed, Protection::authenticated}) {
    Driver from(tiny(), session_options()), to(tiny(), session_options());
    const RequestId request = from.admit();
    grow(from, request, 260);
    const RecordList plain = save(from.cache, request);
    const RecordList records = save(from.cache, request, with_keys({session_key_of(1)}, protection));
    ASSERT_EQ(records.list.size(), plain.list.size());
    for (std::size_t r = 0; r < records.list.size(); ++r) {
      ASSERT_EQ(records.list[r].size(), plain.list[r].size());
      const bool same = std::equal(records.list[r].begin() + tier::kRecordHeaderBytes, records.list[r].end(),
                                   plain.list[r].begin() + tier::kRecordHeaderBytes);
      EXPECT_EQ(same, protection == Protection::authenticated);
    }
    // A reader with several keys; blocks before the session's own record.
    RecordList turned = records;
    std::reverse(turned.list.begin(), turned.list.end());
    const RequestId back = restore(to.cache, turned, with_keys({session_key_of(2), session_key_of(1)}));
    expect_same(bytes_of(to.cache, back), bytes_of(from.cache, request), to_string(protection));
  }
}

// One session file of a tenant contains as much as his salt: the root is in it.
TEST(SessionKeys, AStrangerWithOneSessionCannotMakeAnother) {
  Driver from(tiny(), session_options()), to(tiny(), session_options());
  const RequestId request = from.admit();
  grow(from, request, 130);
  const auto forge = [](RecordList records) {
    std::vector<std::byte>& own = records.list[0];
    const tier::RecordHeader header = tier::parse_header(own).header;
    const auto payload = std::span(own).subspan(static_cast<std::size_t>(header.header_bytes()));
    payload[payload.size() - 1] ^= std::byte{1};  // of the image or the open block
    encode_again(own);
    return records;
  };
  const auto unprotected = [](RecordList records) {
    for (std::vector<std::byte>& record : records.list) {
      tier::RecordHeader header = tier::parse_header(record).header;
      header.kind = tier::RecordKind::value;
      header.key_id = {};
      header.salt = {};
      header.tag = {};
      encode_again(header, record);
    }
    return records;
  };
  const RecordList plain = save(from.cache, request);
  to.cache.release(restore(to.cache, forge(plain)));  // the reason for keys

  const Occupancy before = occupancy(to.cache);
  const SessionIdentity who = with_keys({session_key_of(1)});
  for (const Protection protection : {Protection::sealed, Protection::authenticated}) {
    const RecordList sound = save(from.cache, request, with_keys({session_key_of(1)}, protection));
    expect_refused(ErrorCode::bad_file, "forged", [&] { restore(to.cache, forge(sound), who); });
    expect_refused(ErrorCode::bad_file, "not authenticated", [&] { restore(to.cache, unprotected(sound), who); });
  }
  expect_refused(ErrorCode::bad_file, "not authenticated", [&] { restore(to.cache, plain, who); });
  expect_refused(ErrorCode::bad_file, "not authenticated", [&] { restore(to.cache, forge(plain), who); });
  const RecordList other = save(from.cache, request, with_keys({session_key_of(2)}));
  expect_refused(ErrorCode::bad_file, "not among those given", [&] { restore(to.cache, other, who); });
  expect_refused(ErrorCode::bad_file, "needs the key", [&] { restore(to.cache, other); });
  // Blocks of the stranger's own in an intact session.
  RecordList mixed = save(from.cache, request, who);
  mixed.list[1] = plain.list[1];
  expect_refused(ErrorCode::bad_file, "not authenticated", [&] { restore(to.cache, mixed, who); });
  EXPECT_EQ(occupancy(to.cache), before);

  SessionIdentity lenient = who;
  lenient.accept_unauthenticated = true;
  restore(to.cache, plain, lenient);
}

}  // namespace
}  // namespace kv4::test
