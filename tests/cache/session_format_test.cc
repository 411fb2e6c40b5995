// The bytes of a session's own record: those of docs/formats.md; anything else is refused.
#include "cache/session_format.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "cache/session_records.h"

namespace kv4::test {
namespace {

const std::int32_t kTokens[] = {1, 2, -1};
const std::byte kImage[] = {std::byte{0xAA}, std::byte{0xBB}, std::byte{0xCC}};
const std::byte kOpenBlock[] = {std::byte{0xDD}, std::byte{0xEE}};

/// The example of docs/formats.md.
SessionParts example() {
  BlockHasher hasher;
  const ChainIdentity chain{.config_digest = hasher.digest("config"),
                            .rope_digest = hasher.digest("rope"),
                            .layout_digest = hasher.digest("layout"),
                            .weights_id = "weights-1",
                            .tenant_salt = "tenant"};
  SessionParts parts;
  parts.block_tokens = 128;
  parts.config_digest = chain.config_digest;
  parts.rope_digest = chain.rope_digest;
  parts.root = hasher.root(chain);
  parts.lengths = {3};
  parts.weights_id = "weights-1";
  parts.layout = "layout";
  parts.token_ids = std::as_bytes(std::span(kTokens));
  parts.image = kImage;
  parts.open_block = kOpenBlock;
  return parts;
}

bool refused(std::span<const std::byte> payload) {
  try {
    parse_session(payload);
    return false;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_file) << e.what();
    return true;
  }
}

TEST(SessionFormat, TheDocumentedBytes) {
  const SessionParts parts = example();
  std::vector<std::byte> record(tier::kRecordHeaderBytes);
  const std::vector<std::byte> payload = encode_session(parts);
  record.insert(record.end(), payload.begin(), payload.end());
  BlockHasher hasher;
  tier::RecordHeader header;
  header.layout_id = digest64("layout");
  header.id = {7, record_key(session_key(hasher, parts, kTokens))};
  finish_record(tier::RecordGuard(), header, record);

  std::ifstream in(source_path("tests/cli/three_tokens.session"), std::ios::binary);
  const std::vector<char> stored{std::istreambuf_iterator<char>(in), {}};
  ASSERT_EQ(stored.size(), 4096u);
  record.resize(4096);
  EXPECT_EQ(std::memcmp(record.data(), stored.data(), 4096), 0);
}

TEST(SessionFormat, PartsComeBack) {
  SessionParts parts = example();
  parts.block_tokens = 2;
  parts.lengths = {3, 0, 500};
  parts.block_extra = {kOpenBlock};
  const std::vector<std::byte> payload = encode_session(parts);
  const SessionParts back = parse_session(payload);
  EXPECT_EQ(back.block_tokens, 2u);
  EXPECT_EQ(back.root, parts.root);
  EXPECT_EQ(back.lengths, parts.lengths);
  EXPECT_EQ(back.weights_id, "weights-1");
  EXPECT_EQ(back.full_blocks(), 1);
  ASSERT_EQ(back.block_extra.size(), 1u);
  EXPECT_EQ(back.block_extra[0].size(), 2u);
  EXPECT_EQ(token_ids_of(back), (std::vector<std::int32_t>{1, 2, -1}));
  EXPECT_EQ(encode_session(back), payload);
}

TEST(SessionFormat, ASnapshotIsAnotherVersion) {
  SessionParts parts = example();
  parts.snapshot = kImage;
  const std::vector<std::byte> payload = encode_session(parts);
  EXPECT_EQ(payload.size(), encode_session(example()).size() + 8 + sizeof(kImage));
  EXPECT_EQ(payload[8], std::byte{2});
  const SessionParts back = parse_session(payload);
  EXPECT_EQ(back.snapshot.size(), sizeof(kImage));
  EXPECT_EQ(back.open_block.size(), sizeof(kOpenBlock));
  EXPECT_EQ(encode_session(back), payload);
  for (std::size_t bytes = 0; bytes < payload.size(); ++bytes) EXPECT_TRUE(refused(std::span(payload).first(bytes)));
  std::vector<std::byte> none = encode_session(example());  // version 2 without a snapshot
  none[8] = std::byte{2};
  none.insert(none.begin() + 144, 8, std::byte{0});
  EXPECT_TRUE(refused(none));
}

TEST(SessionFormat, NeitherShorterNorLonger) {
  const std::vector<std::byte> payload = encode_session(example());
  EXPECT_FALSE(refused(payload));
  for (std::size_t bytes = 0; bytes < payload.size(); ++bytes) EXPECT_TRUE(refused(std::span(payload).first(bytes)));
  std::vector<std::byte> longer = payload;
  longer.push_back(std::byte{0});
  EXPECT_TRUE(refused(longer));
  // Counts that no payload can hold, alone and so that a sum would wrap.
  for (std::size_t place = 112; place < 152; ++place) {
    std::vector<std::byte> changed = payload;
    changed[place] = std::byte{0xFF};
    EXPECT_TRUE(refused(changed)) << place;
  }
  std::vector<std::byte> wrapped = payload;
  std::memset(wrapped.data() + 112, 0xFF, 40);
  EXPECT_TRUE(refused(wrapped));
}

// Different tokens, lengths or kinds of records give different keys.
TEST(SessionFormat, KeysDiffer) {
  BlockHasher hasher;
  SessionParts parts = example();
  const BlockKey key = session_key(hasher, parts, kTokens);
  EXPECT_NE(key, hasher.block(parts.root, kTokens));
  EXPECT_NE(key, session_key(hasher, parts, std::span(kTokens).first(2)));
  parts.lengths = {3, 0};
  EXPECT_NE(key, session_key(hasher, parts, kTokens));
  parts.block_tokens = 1;
  EXPECT_EQ(chain_keys(hasher, parts, kTokens).size(), 3u);
}

/// A small record must not cause large allocations: a key per token, lists of lengths, texts without end.
TEST(SessionFormat, MoreThanAReaderTakesIsRefused) {
  const auto parse = [](const SessionParts& parts) { return refused(encode_session(parts)); };
  SessionParts parts = example();
  parts.block_tokens = 1;
  parts.open_block = {};
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(kMaxSessionBlocks) + 1);
  for (const std::size_t more : {0u, 1u}) {
    parts.lengths = {kMaxSessionBlocks + static_cast<std::int64_t>(more)};
    parts.token_ids = std::as_bytes(std::span(tokens).first(static_cast<std::size_t>(kMaxSessionBlocks) + more));
    EXPECT_EQ(parse(parts), more == 1);
  }
  parts = example();
  parts.lengths.resize(kMaxSessionLengths, 3);
  EXPECT_FALSE(parse(parts));
  parts.lengths.push_back(3);
  EXPECT_TRUE(parse(parts));
  const std::string text(kMaxSessionTextBytes + 1, 'x');
  for (std::string_view SessionParts::*const field : {&SessionParts::weights_id, &SessionParts::layout}) {
    parts = example();
    parts.*field = std::string_view(text).substr(1);
    EXPECT_FALSE(parse(parts));
    parts.*field = text;
    EXPECT_TRUE(parse(parts));
  }
}

}  // namespace
}  // namespace kv4::test
