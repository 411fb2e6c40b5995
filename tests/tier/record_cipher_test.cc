// Sealed payloads: bytes that another implementation gives too, and nothing for whoever lacks the key.
#include "tier/record_cipher.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tier/store_records.h"

namespace kv4::test {
namespace {

using tier::RecordCipher;
using tier::RecordKind;

std::array<std::byte, tier::kCipherKeyBytes> key_of(int first) {
  std::array<std::byte, tier::kCipherKeyBytes> key{};
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(first + static_cast<int>(i));
  return key;
}

tier::RecordHeader header_of(std::int64_t payload_bytes) {
  tier::RecordHeader header;
  header.kind = RecordKind::sealed;
  header.layout_id = 0x0123456789abcdef;
  header.id.tenant = 7;
  for (std::size_t i = 0; i < header.id.key.size(); ++i) header.id.key[i] = static_cast<std::byte>(i);
  header.length = payload_bytes + tier::kSealBytes;
  header.sequence = 3;
  return header;
}

std::vector<std::byte> sealed_with(const RecordCipher& cipher, const tier::RecordHeader& header,
                                   std::span<const std::byte> payload) {
  std::vector<std::byte> sealed(payload.size() + tier::kSealBytes);
  EXPECT_TRUE(cipher.seal(header, payload, sealed));
  return sealed;
}

// The example of docs/formats.md, made by another implementation of HKDF and AES-GCM.
TEST(TierCipher, HasTheDocumentedBytes) {
  const RecordCipher cipher(key_of(0x40));
  RecordCipher::Salt salt;
  for (std::size_t i = 0; i < salt.size(); ++i) salt[i] = static_cast<std::byte>(0x80 + i);
  const std::span<const std::byte> payload = std::as_bytes(std::span("hello", 5));
  tier::RecordHeader header = header_of(5);
  std::vector<std::byte> record(tier::kRecordHeaderBytes + 45);
  const std::span<std::byte> sealed = std::span(record).subspan(tier::kRecordHeaderBytes);
  ASSERT_TRUE(cipher.seal(header, payload, sealed, salt));
  header.payload_digest = digest128(sealed);
  tier::encode_header(header, std::span(record).first<tier::kRecordHeaderBytes>());
  EXPECT_EQ(tier::verify_record(record).refusal, tier::RecordRefusal::none);
  std::string hex;
  for (const std::byte b : record) hex += fmt::format("{:02x}", std::to_integer<unsigned>(b));
  EXPECT_EQ(hex,
            "4b56345245430d0a0100000002000000efcdab89674523010700000000000000000102030405060708090a0b0c0d0e0f"
            "101112131415161718191a1b1c1d1e1f2d00000000000000030000000000000081ca60f0e24435d1940711791e5afc7a"
            "0000000000000000000000000000000000000000000000008260930e25ddb1a278c53a1a07808182838485868788898a"
            "8b8c8d8e8f909192939495969754f1fc1ce686fd6fafa3a659d7dbc098");
}

TEST(TierCipher, OpensWhatItSealed) {
  const RecordCipher cipher(key_of(1));
  for (const std::int64_t length : {0, 1, 15, 16, 17, 4096, 100'000}) {
    const std::vector<std::byte> payload = random_bytes(9, length);
    std::vector<std::byte> sealed = sealed_with(cipher, header_of(length), payload);
    std::vector<std::byte> opened(payload.size());
    ASSERT_TRUE(cipher.open(header_of(length), sealed, opened));
    EXPECT_EQ(opened, payload);
    ASSERT_TRUE(cipher.open(header_of(length), sealed, std::span(sealed).first(payload.size())));  // in place
    EXPECT_TRUE(std::equal(payload.begin(), payload.end(), sealed.begin()));
  }
}

TEST(TierCipher, NoSaltTwice) {
  const RecordCipher cipher(key_of(1));
  std::set<std::vector<std::byte>> salts;
  for (int i = 0; i < 1000; ++i) {
    const std::vector<std::byte> sealed = sealed_with(cipher, header_of(0), {});
    salts.insert({sealed.begin(), sealed.begin() + tier::kSealSaltBytes});
  }
  EXPECT_EQ(salts.size(), 1000u);
}

TEST(TierCipher, OpensNothingElse) {
  const RecordCipher cipher(key_of(1)), other(key_of(2));
  const std::vector<std::byte> payload = random_bytes(9, 50), zeros(50);
  const std::vector<std::byte> sealed = sealed_with(cipher, header_of(50), payload);
  const auto refuses = [&](const RecordCipher& with, const tier::RecordHeader& header,
                           std::span<const std::byte> bytes) {
    std::vector<std::byte> opened(50, std::byte{1});
    EXPECT_FALSE(with.open(header, bytes, opened));
    EXPECT_EQ(opened, zeros);
  };
  refuses(other, header_of(50), sealed);
  for (std::size_t bit = 0; bit < sealed.size() * 8; ++bit) {
    std::vector<std::byte> bytes = sealed;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    refuses(cipher, header_of(50), bytes);
  }
  const auto with = [&](auto&& change) {
    tier::RecordHeader header = header_of(50);
    change(header);
    refuses(cipher, header, sealed);
  };
  with([](auto& h) { h.kind = RecordKind::value; });
  with([](auto& h) { h.layout_id ^= 1; });
  with([](auto& h) { h.id.tenant ^= 1; });
  with([](auto& h) { h.id.key[31] ^= std::byte{1}; });
  with([](auto& h) { h.length += 1; });
  with([](auto& h) { h.sequence += 1; });
}

}  // namespace
}  // namespace kv4::test
