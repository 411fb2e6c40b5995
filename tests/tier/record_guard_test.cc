// Protected records: the same bytes as another implementation's, and nothing for a reader without the key.
#define OPENSSL_SUPPRESS_DEPRECATED  // RAND_set_rand_method
#include "tier/record_guard.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "kv4/error.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using tier::GuardOptions;
using tier::RecordGuard;
using tier::RecordKind;
using tier::RecordRefusal;

CacheKey key_of(int first) {
  CacheKey key{};
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(first + static_cast<int>(i));
  return key;
}

GuardOptions with(std::vector<CacheKey> keys, Protection protection = Protection::sealed) {
  return {"disk", std::move(keys), protection, false};
}

tier::RecordHeader header_of(std::int64_t payload_bytes) {
  tier::RecordHeader header;
  header.layout_id = 0x0123456789abcdef;
  header.id.tenant = 7;
  for (std::size_t i = 0; i < header.id.key.size(); ++i) header.id.key[i] = static_cast<std::byte>(i);
  header.length = payload_bytes;
  header.sequence = 3;
  return header;
}

struct Protected {
  tier::RecordHeader header;
  std::vector<std::byte> stored;
};

Protected protect(const RecordGuard& guard, std::span<const std::byte> payload) {
  Protected out{header_of(std::ssize(payload)), {payload.begin(), payload.end()}};
  EXPECT_TRUE(guard.protect(out.header, out.stored, out.stored));  // in place
  return out;
}

// The examples of docs/formats.md, made by another implementation of HKDF and AES-GCM.
TEST(TierGuard, HasTheDocumentedBytes) {
  tier::SealSalt salt;
  for (std::size_t i = 0; i < salt.size(); ++i) salt[i] = static_cast<std::byte>(0x80 + i);
  const std::span<const std::byte> payload = std::as_bytes(std::span("hello", 5));
  for (const Protection protection : {Protection::sealed, Protection::authenticated}) {
    const RecordGuard guard(with({key_of(0x40)}, protection));
    tier::RecordHeader header = header_of(5);
    std::vector<std::byte> stored(payload.begin(), payload.end());
    ASSERT_TRUE(guard.protect(header, payload, stored, salt));
    header.payload_digest = digest128(stored);
    std::vector<std::byte> record(tier::kRecordHeaderBytes);
    tier::encode_header(header, record);
    record.insert(record.end(), stored.begin(), stored.end());
    EXPECT_EQ(tier::verify_record(record).refusal, RecordRefusal::none);
    std::string hex;
    for (const std::byte b : record) hex += fmt::format("{:02x}", std::to_integer<unsigned>(b));
    EXPECT_EQ(hex,
              protection == Protection::sealed
                  ? "4b56345245430d0a0200000002000000efcdab8967452301070000000000000005000000000000000500000000000000"
                    "03000000000000002000000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
                    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
                    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
                    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
                    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
                    "0000000000000000000000000000000000000000000000000000000000000000fd8ed587928688b3e8544fb23b8e8ae5"
                    "808182838485868788898a8b8c8d8e8f9091929394959697af86b330e447f91d2ac2a0844fcc82650000000000000000"
                    "2f7a9d0dde86736dc47e67038a83226b0000000000000000000000000000000000000000000000000000000000000000"
                    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
                    "000000000000000000000000000000000000000000000000c00874177a41a2ec5d71a0e8cb"
                  : "4b56345245430d0a0200000003000000efcdab8967452301070000000000000005000000000000000500000000000000"
                    "03000000000000002000000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
                    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
                    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
                    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
                    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
                    "0000000000000000000000000000000000000000000000000000000000000000fd8ed587928688b3e8544fb23b8e8ae5"
                    "808182838485868788898a8b8c8d8e8f90919293949596978e4ac6fab1af4964bd87476494133eb30000000000000000"
                    "1838525eaacf79c77f3e1b07adc1e9b50000000000000000000000000000000000000000000000000000000000000000"
                    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
                    "0000000000000000000000000000000000000000000000005725a4b31a66e1fd68656c6c6f");
  }
}

TEST(TierGuard, OpensWhatItProtected) {
  for (const Protection protection : {Protection::sealed, Protection::authenticated}) {
    const RecordGuard guard(with({key_of(1)}, protection));
    for (const std::int64_t length : {0, 1, 15, 16, 17, 4096, 100'000}) {
      const std::vector<std::byte> payload = random_bytes(9, length);
      Protected record = protect(guard, payload);
      EXPECT_EQ(record.stored == payload, protection == Protection::authenticated || length == 0);
      std::vector<std::byte> opened(payload.size());
      ASSERT_EQ(guard.open(record.header, record.stored, opened), RecordRefusal::none);
      EXPECT_EQ(opened, payload);
      ASSERT_EQ(guard.open(record.header, record.stored, record.stored), RecordRefusal::none);  // in place
      EXPECT_EQ(record.stored, payload);
    }
  }
}

TEST(TierGuard, NoSaltTwice) {
  const RecordGuard guard(with({key_of(1)}));
  std::set<tier::SealSalt> salts;
  for (int i = 0; i < 1000; ++i) salts.insert(protect(guard, {}).header.salt);
  EXPECT_EQ(salts.size(), 1000u);
}

/// While the object lives, OpenSSL's random bytes are always the same, as in copies of one virtual machine.
struct SameRandomBytes {
  RAND_METHOD method{};
  SameRandomBytes() {
    method.bytes = [](unsigned char* out, int bytes) {
      std::memset(out, 0x5a, static_cast<std::size_t>(bytes));
      return 1;
    };
    method.status = [] { return 1; };
    RAND_set_rand_method(&method);
  }
  ~SameRandomBytes() { RAND_set_rand_method(nullptr); }
  SameRandomBytes(const SameRandomBytes&) = delete;
  SameRandomBytes& operator=(const SameRandomBytes&) = delete;
};

// Two records with the same salt would share key and nonce, and AES-GCM would reveal both.
TEST(TierGuard, CopiesOfAMachineHaveSaltsOfTheirOwn) {
  using Clock = std::chrono::system_clock;
  const SameRandomBytes same;
  for (const Protection protection : {Protection::sealed, Protection::authenticated}) {
    const RecordGuard guard(with({key_of(1)}, protection));
    const std::vector<std::byte> payload = random_bytes(9, 50);
    std::set<tier::SealSalt> salts;
    const auto write = [&](auto&& change) {
      Protected record{header_of(50), payload};
      change(record.header);
      ASSERT_TRUE(guard.protect(record.header, payload, record.stored));
      EXPECT_TRUE(salts.insert(record.header.salt).second);
      std::vector<std::byte> opened(50);
      EXPECT_EQ(guard.open(record.header, record.stored, opened), RecordRefusal::none);
      EXPECT_EQ(opened, payload);
    };
    for (int i = 0; i < 3; ++i) {  // the same record at different times
      write([](tier::RecordHeader&) {});
      for (const auto now = Clock::now(); Clock::now() == now;) continue;
    }
    write([](tier::RecordHeader& header) { ++header.sequence; });
    write([](tier::RecordHeader& header) { ++header.id.tenant; });
    write([](tier::RecordHeader& header) { header.id.key[31] ^= std::byte{1}; });
    write([](tier::RecordHeader& header) { ++header.layout_id; });
  }
}

TEST(TierGuard, OpensNothingElse) {
  for (const Protection protection : {Protection::sealed, Protection::authenticated}) {
    const RecordGuard guard(with({key_of(1)}, protection));
    const std::vector<std::byte> payload = random_bytes(9, 50);
    const Protected sound = protect(guard, payload);
    const auto refuses = [&](const RecordGuard& reader, const Protected& record, RecordRefusal refusal) {
      std::vector<std::byte> opened(50, std::byte{1});
      EXPECT_EQ(reader.open(record.header, record.stored, opened), refusal);
      EXPECT_NE(opened, payload);
    };
    refuses(RecordGuard(with({key_of(2)}, protection)), sound, RecordRefusal::wrong_key);
    GuardOptions elsewhere = with({key_of(1)}, protection);
    elsewhere.tier = "remote";
    refuses(RecordGuard(elsewhere), sound, RecordRefusal::forged);
    for (std::size_t bit = 0; bit < sound.stored.size() * 8; ++bit) {
      Protected record = sound;
      record.stored[bit / 8] ^= std::byte{1} << (bit % 8);
      refuses(guard, record, RecordRefusal::forged);
    }
    const auto changed = [&](RecordRefusal refusal, auto&& change) {
      Protected record = sound;
      change(record.header);
      refuses(guard, record, refusal);
    };
    changed(RecordRefusal::unauthenticated, [](auto& h) { h.kind = RecordKind::value; });
    changed(RecordRefusal::forged,
            [](auto& h) { h.kind = h.kind == RecordKind::sealed ? RecordKind::authenticated : RecordKind::sealed; });
    changed(RecordRefusal::forged, [](auto& h) { h.layout_id ^= 1; });
    changed(RecordRefusal::forged, [](auto& h) { h.id.tenant ^= 1; });
    changed(RecordRefusal::forged, [](auto& h) { h.id.key[31] ^= std::byte{1}; });
    changed(RecordRefusal::forged, [](auto& h) { h.sequence += 1; });
    changed(RecordRefusal::forged, [](auto& h) { h.salt[0] ^= std::byte{1}; });
    changed(RecordRefusal::forged, [](auto& h) { h.tag[15] ^= std::byte{1}; });
    changed(RecordRefusal::wrong_key, [](auto& h) { h.key_id[0] ^= std::byte{1}; });
  }
}

TEST(TierGuard, KeysRotate) {
  const std::vector<std::byte> payload = random_bytes(9, 50);
  const Protected old = protect(RecordGuard(with({key_of(1)})), payload);
  const RecordGuard both(with({key_of(2), key_of(1)}));
  std::vector<std::byte> opened(50);
  EXPECT_EQ(both.open(old.header, old.stored, opened), RecordRefusal::none);
  EXPECT_EQ(opened, payload);
  const Protected fresh = protect(both, payload);  // the first key writes
  EXPECT_EQ(RecordGuard(with({key_of(2)})).open(fresh.header, fresh.stored, opened), RecordRefusal::none);
  EXPECT_EQ(RecordGuard(with({key_of(1)})).open(fresh.header, fresh.stored, opened), RecordRefusal::wrong_key);
}

TEST(TierGuard, BelievesWhatItIsToldTo) {
  const std::vector<std::byte> payload = random_bytes(9, 50);
  const RecordGuard without;
  const Protected plain = protect(without, payload), sealed = protect(RecordGuard(with({key_of(1)})), payload),
                  authenticated = protect(RecordGuard(with({key_of(1)}, Protection::authenticated)), payload);
  std::vector<std::byte> opened(50);
  EXPECT_EQ(without.open(plain.header, plain.stored, opened), RecordRefusal::none);
  EXPECT_EQ(without.open(authenticated.header, authenticated.stored, opened), RecordRefusal::none);  // anyone may
  EXPECT_EQ(without.open(sealed.header, sealed.stored, opened), RecordRefusal::wrong_key);
  GuardOptions options = with({key_of(1)});
  EXPECT_EQ(RecordGuard(options).open(plain.header, plain.stored, opened), RecordRefusal::unauthenticated);
  options.accept_unauthenticated = true;
  EXPECT_EQ(RecordGuard(options).open(plain.header, plain.stored, opened), RecordRefusal::none);
  EXPECT_EQ(opened, payload);
  options.protection = Protection::none;
  EXPECT_THROW(RecordGuard{options}, Error);
  options = with(std::vector<CacheKey>(kMaxCacheKeys + 1));
  EXPECT_THROW(RecordGuard{options}, Error);
}

bool openssl_refused = false;

/// Runs in a process of its own that the test below starts: OpenSSL takes other allocators only before its first call.
TEST(TierGuardMemory, DISABLED_Comes) {
  ASSERT_EQ(CRYPTO_set_mem_functions(
                [](std::size_t bytes, const char*, int) { return openssl_refused ? nullptr : std::malloc(bytes); },
                [](void* at, std::size_t bytes, const char*, int) {
                  return openssl_refused ? nullptr : std::realloc(at, bytes);
                },
                [](void* at, const char*, int) { std::free(at); }),
            1);
  std::byte random{};
  ASSERT_EQ(RAND_bytes(reinterpret_cast<unsigned char*>(&random), 1), 1);
  openssl_refused = true;
  EXPECT_THROW(RecordGuard(with({key_of(1)})), Error);
  openssl_refused = false;
  const RecordGuard guard(with({key_of(1)}));
  const std::vector<std::byte> payload = random_bytes(9, 1000);
  const Protected record = protect(guard, payload);
  std::vector<std::byte> opened(payload.size());
  EXPECT_EQ(guard.open(record.header, record.stored, opened), RecordRefusal::none);
  EXPECT_EQ(opened, payload);
}

// Keys work once memory is available, even if OpenSSL had none at the first try.
TEST(TierGuardMemory, WantOfItPasses) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    for (const char* name : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX", "GTEST_OUTPUT"}) ::unsetenv(name);
    ::execl("/proc/self/exe", "kv4_tests", "--gtest_filter=TierGuardMemory.DISABLED_Comes",
            "--gtest_also_run_disabled_tests", static_cast<char*>(nullptr));
    ::_exit(127);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace kv4::test
