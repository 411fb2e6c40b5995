// The record: its bytes, and the reasons of refusals.
#include "tier/record_format.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "tier/little_endian.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using tier::RecordRefusal;

tier::RecordHeader header_of(std::span<const std::byte> payload) {
  tier::RecordHeader header;
  header.layout_id = 0x1122334455667788;
  header.id = record_id(1, 7);
  header.sequence = 42;
  header.length = static_cast<std::int64_t>(payload.size());
  header.payload_digest = digest128(payload);
  return header;
}

std::vector<std::byte> record_of(const tier::RecordHeader& header, std::span<const std::byte> payload) {
  std::vector<std::byte> bytes(tier::kRecordHeaderBytes);
  tier::encode_header(header, bytes);
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  return bytes;
}

RecordRefusal refusal_of(const tier::RecordHeader& header, std::span<const std::byte> payload = {}) {
  return tier::verify_record(record_of(header, payload)).refusal;
}

TEST(TierRecord, ComesBack) {
  for (const std::int64_t length : {0, 1, 127, 128, 129, 3967, 3968, 3969, 100'000}) {
    const std::vector<std::byte> payload = random_bytes(static_cast<std::uint64_t>(length), length);
    const tier::RecordHeader header = header_of(payload);
    const tier::ParsedHeader parsed = tier::verify_record(record_of(header, payload));
    ASSERT_EQ(parsed.refusal, RecordRefusal::none);
    EXPECT_EQ(parsed.header.id, header.id);
    EXPECT_EQ(parsed.header.length, length);
    EXPECT_EQ(parsed.header.sequence, 42u);
    EXPECT_EQ(parsed.header.layout_id, header.layout_id);
    EXPECT_EQ(parsed.header.payload_digest, header.payload_digest);
  }
}

// The example of docs/formats.md.
TEST(TierRecord, HasTheDocumentedBytes) {
  const char* text = "hello";
  const std::span<const std::byte> payload = std::as_bytes(std::span(text, 5));
  tier::RecordHeader header;
  header.layout_id = 0x0123456789abcdef;
  header.id.tenant = 7;
  for (std::size_t i = 0; i < header.id.key.size(); ++i) header.id.key[i] = static_cast<std::byte>(i);
  header.length = 5;
  header.sequence = 3;
  header.payload_digest = digest128(payload);
  std::string hex;
  for (const std::byte b : record_of(header, payload)) hex += fmt::format("{:02x}", std::to_integer<unsigned>(b));
  EXPECT_EQ(hex,
            "4b56345245430d0a0200000000000000efcdab8967452301070000000000000005000000000000000500000000000000"
            "03000000000000002000000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
            "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
            "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
            "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
            "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
            "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
            "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
            "1838525eaacf79c77f3e1b07adc1e9b50000000000000000000000000000000000000000000000000000000000000000"
            "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
            "0000000000000000000000000000000000000000000000003cb1a54d8b0161c768656c6c6f");
}

TEST(TierRecord, EverySingleBitCounts) {
  const std::vector<std::byte> payload = random_bytes(5, 300);
  const std::vector<std::byte> sound = record_of(header_of(payload), payload);
  for (std::size_t bit = 0; bit < sound.size() * 8; ++bit) {
    std::vector<std::byte> bytes = sound;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(tier::verify_record(bytes).refusal, RecordRefusal::none) << "bit " << bit;
  }
}

TEST(TierRecord, SaysWhatIsWrong) {
  const std::vector<std::byte> payload = random_bytes(5, 300);
  const std::vector<std::byte> sound = record_of(header_of(payload), payload);
  const auto refusal_with = [&](std::size_t byte) {
    std::vector<std::byte> bytes = sound;
    bytes[byte] ^= std::byte{4};
    return tier::verify_record(bytes).refusal;
  };
  EXPECT_EQ(refusal_with(0), RecordRefusal::foreign);
  EXPECT_EQ(refusal_with(8), RecordRefusal::other_version);
  EXPECT_EQ(refusal_with(40), RecordRefusal::damaged_header);
  EXPECT_EQ(refusal_with(509), RecordRefusal::damaged_header);
  EXPECT_EQ(refusal_with(600), RecordRefusal::damaged_payload);
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{127}, std::size_t{128}, std::size_t{511},
                                 std::size_t{512}, sound.size() - 1})
    EXPECT_EQ(tier::verify_record(std::span(sound).first(size)).refusal, RecordRefusal::too_short);

  tier::RecordHeader header = header_of({});
  header.kind = tier::RecordKind::dead;
  EXPECT_EQ(refusal_of(header), RecordRefusal::dead);
  header.kind = static_cast<tier::RecordKind>(4);
  EXPECT_EQ(refusal_of(header), RecordRefusal::unknown_kind);
  header = header_of({});
  header.length = tier::kMaxPayloadBytes + 1;
  EXPECT_EQ(refusal_of(header), RecordRefusal::bad_length);
  header.length = -1;
  EXPECT_EQ(refusal_of(header), RecordRefusal::bad_length);
  header = header_of({});
  header.version = 1;
  header.kind = tier::RecordKind::sealed;
  header.length = tier::kSealBytesV1 - 1;
  EXPECT_EQ(refusal_of(header), RecordRefusal::bad_length);

  // Unknown field values with a fitting digest.
  const auto refusal_of_bytes = [&](std::size_t at, std::uint16_t value) {
    std::vector<std::byte> bytes = record_of(header_of({}), {});
    tier::store_le(bytes.data() + at, value);
    tier::store_le(bytes.data() + 504, digest64(std::span<const std::byte>(bytes).first(504)));
    return tier::verify_record(bytes).refusal;
  };
  EXPECT_EQ(refusal_of_bytes(14, 1), RecordRefusal::unknown_kind);   // only chunks are coded
  EXPECT_EQ(refusal_of_bytes(56, 36), RecordRefusal::unknown_kind);  // a key of another length
  EXPECT_EQ(refusal_of_bytes(40, 7), RecordRefusal::bad_length);     // decoded longer than stored, without a coding
  for (const std::size_t at : {59, 100, 318, 320, 340, 370, 400, 502})
    EXPECT_EQ(refusal_of_bytes(at, 1), RecordRefusal::reserved_not_zero) << at;
}

tier::RecordHeader chunk_header(std::string_view key, std::span<const std::byte> payload) {
  tier::RecordHeader header = header_of(payload);
  header.label = tier::make_label(std::as_bytes(std::span(key)), {tier::kNotCoded, std::ssize(payload)});
  header.id.key = tier::chunk_id(header.label->key_span());
  return header;
}

TEST(TierRecord, ChunksComeBack) {
  const std::vector<std::byte> payload = random_bytes(5, 300);
  for (const std::size_t size : {1, 31, 32, 33, 36, 255, 256}) {
    const std::string key(size, 'k');
    tier::RecordHeader header = chunk_header(key, payload);
    for (const std::int64_t decoded : {std::int64_t{300}, std::int64_t{301}, tier::kMaxChunkBytes}) {
      header.label->coding = {decoded == 300 ? tier::kNotCoded : tier::kTrimmed, decoded};
      const tier::ParsedHeader parsed = tier::verify_record(record_of(header, payload));
      ASSERT_EQ(parsed.refusal, RecordRefusal::none) << size << " " << decoded;
      EXPECT_EQ(parsed.header.id, header.id);
      ASSERT_TRUE(parsed.header.label);
      EXPECT_TRUE(std::ranges::equal(parsed.header.label->key_span(), std::as_bytes(std::span(key))));
      EXPECT_EQ(parsed.header.coding(), header.coding());
    }
  }
}

// The id is a hash of the key: no key names another record, not even one of 32 bytes that is an id.
TEST(TierRecord, AChunkIsNotTheRecordOfThatId) {
  const tier::Key id = tier::chunk_id(std::as_bytes(std::span("a key", 5)));
  EXPECT_NE(tier::chunk_id(id), id);
  EXPECT_NE(tier::chunk_id(std::as_bytes(std::span("a key", 5))), tier::chunk_id(std::as_bytes(std::span("a kez", 5))));
  EXPECT_NE(tier::chunk_id(std::as_bytes(std::span("a\0", 2))), tier::chunk_id(std::as_bytes(std::span("a", 1))));
}

TEST(TierRecord, EverySingleBitOfAChunkCounts) {
  const std::vector<std::byte> payload = random_bytes(5, 30);
  const std::vector<std::byte> sound = record_of(chunk_header("a chunk of another engine", payload), payload);
  for (std::size_t bit = 0; bit < sound.size() * 8; ++bit) {
    std::vector<std::byte> bytes = sound;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(tier::verify_record(bytes).refusal, RecordRefusal::none) << "bit " << bit;
  }
}

TEST(TierRecord, SaysWhatIsWrongWithAChunk) {
  const std::vector<std::byte> payload = random_bytes(5, 30);
  const std::vector<std::byte> sound = record_of(chunk_header("key", payload), payload);
  const auto refusal_of_bytes = [&](std::size_t at, auto value) {
    std::vector<std::byte> bytes = sound;
    tier::store_le(bytes.data() + at, value);
    tier::store_le(bytes.data() + 504, digest64(std::span<const std::byte>(bytes).first(504)));
    return tier::verify_record(bytes).refusal;
  };
  EXPECT_EQ(refusal_of_bytes(14, std::uint16_t{2}), RecordRefusal::unknown_kind);    // zstd
  EXPECT_EQ(refusal_of_bytes(14, std::uint16_t{1}), RecordRefusal::bad_length);      // trimmed, and as long as before
  EXPECT_EQ(refusal_of_bytes(56, std::uint16_t{0}), RecordRefusal::unknown_kind);    // no key
  EXPECT_EQ(refusal_of_bytes(56, std::uint16_t{257}), RecordRefusal::unknown_kind);  // a longer one than there is room
  EXPECT_EQ(refusal_of_bytes(56, std::uint16_t{2}), RecordRefusal::reserved_not_zero);
  EXPECT_EQ(refusal_of_bytes(40, std::uint64_t{31}), RecordRefusal::bad_length);
  EXPECT_EQ(refusal_of_bytes(40, ~std::uint64_t{0}), RecordRefusal::bad_length);
  EXPECT_EQ(refusal_of_bytes(58, std::uint8_t{0}), RecordRefusal::unknown_kind);  // a block's key has 32 bytes
  for (const int value : {2, 3, 255})
    EXPECT_NE(refusal_of_bytes(58, static_cast<std::uint8_t>(value)), RecordRefusal::none);
  std::vector<std::byte> bytes = record_of(chunk_header("key", payload), payload);
  tier::store_le(bytes.data() + 14, std::uint16_t{1});
  tier::store_le(bytes.data() + 40, static_cast<std::uint64_t>(tier::kMaxChunkBytes + 1));
  tier::store_le(bytes.data() + 504, digest64(std::span<const std::byte>(bytes).first(504)));
  EXPECT_EQ(tier::verify_record(bytes).refusal, RecordRefusal::bad_length);
}

// A record of 0.1 keeps its meaning.
TEST(TierRecord, VersionOneComesBack) {
  const std::vector<std::byte> payload = random_bytes(5, 300);
  tier::RecordHeader header = header_of(payload);
  header.version = 1;
  std::vector<std::byte> bytes(tier::kRecordHeaderBytesV1);
  tier::encode_header(header, bytes);
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  const tier::ParsedHeader parsed = tier::verify_record(bytes);
  ASSERT_EQ(parsed.refusal, RecordRefusal::none);
  EXPECT_EQ(parsed.header.version, 1);
  EXPECT_EQ(parsed.header.header_bytes(), 128);
  EXPECT_EQ(parsed.header.id, header.id);
  EXPECT_EQ(parsed.header.sequence, 42u);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::vector<std::byte> other = bytes;
    other[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(tier::verify_record(other).refusal, RecordRefusal::none) << "bit " << bit;
  }
}

}  // namespace
}  // namespace kv4::test
