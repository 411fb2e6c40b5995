// Trimmed values: every value comes back, runs cost nothing, and foreign bytes are refused.
#include "tier/chunk_coding.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tier/little_endian.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using Bytes = std::vector<std::byte>;

/// Expands the value's trimmed payload. Empty: it was not trimmed.
Bytes trimmed(const Bytes& value) {
  const auto plan = tier::plan_trim(value);
  if (!plan) return {};
  Bytes payload(static_cast<std::size_t>(plan->payload_bytes));
  tier::trim(value, *plan, payload);
  return payload;
}

void expect_round_trip(const Bytes& value) {
  const Bytes payload = trimmed(value);
  if (payload.empty()) return;
  ASSERT_LT(payload.size(), value.size());
  Bytes again(value.size(), std::byte{0x5a});
  std::copy(payload.begin(), payload.end(), again.begin());
  ASSERT_TRUE(tier::expand(again, std::ssize(payload)));
  EXPECT_EQ(again, value);
}

TEST(ChunkCoding, ZerosCostNothing) {
  for (const std::int64_t size : {1024, 4096, 65536, 1'002'240, 1'002'241, 1'002'247}) {
    const Bytes value(static_cast<std::size_t>(size));
    EXPECT_LE(trimmed(value).size(), 48u) << size;
    expect_round_trip(value);
  }
  // vLLM's block of 8 tokens: some state, the rest untouched.
  Bytes value(1'002'240);
  const Bytes state = random_bytes(3, 61'440);
  std::copy(state.begin(), state.end(), value.begin() + 123'456);
  EXPECT_LE(trimmed(value).size(), state.size() + 80);
  expect_round_trip(value);
}

// The example of docs/formats.md.
TEST(ChunkCoding, HasTheDocumentedBytes) {
  Bytes value(1033);
  for (std::size_t at = 0; at < 8; ++at) value[at] = static_cast<std::byte>(at + 1);
  value.back() = std::byte{9};
  std::string hex;
  for (const std::byte b : trimmed(value)) hex += fmt::format("{:02x}", std::to_integer<unsigned>(b));
  EXPECT_EQ(hex,
            "010203040506070809"
            "08000000000400000000000000000000"
            "01000000000000000000000000000000"
            "02000000");
}

TEST(ChunkCoding, RepeatedWordsAreRuns) {
  Bytes value(100'000);
  const Bytes word = random_bytes(9, 8);
  for (std::size_t i = 0; i < value.size(); ++i) value[i] = word[i % 8];
  EXPECT_LE(trimmed(value).size(), 40u);
  expect_round_trip(value);
}

TEST(ChunkCoding, WhatDoesNotRepeatStaysAsItIs) {
  EXPECT_FALSE(tier::plan_trim({}));
  for (const std::int64_t size : {1, 8, 511, 512, 1024, 450'944}) {
    EXPECT_FALSE(tier::plan_trim(random_bytes(1, size))) << size;
  }
  Bytes few = random_bytes(1, 1 << 20);  // 2 KiB of 1 MiB: not worth a copy
  std::fill_n(few.begin() + 5000, 2048, std::byte{0});
  EXPECT_FALSE(tier::plan_trim(few));
}

/// Values of literal pieces and runs of all lengths and phases.
Bytes random_value(Random& random) {
  Bytes value;
  const std::int64_t pieces = random.between(1, 12);
  for (std::int64_t i = 0; i < pieces; ++i) {
    const std::int64_t size = random.below(3) == 0 ? random.between(0, 40'000) : random.between(0, 3000);
    if (random.below(2) == 0) {
      const Bytes literal = random_bytes(random.next(), size);
      value.insert(value.end(), literal.begin(), literal.end());
    } else {
      const Bytes word = random.below(2) == 0 ? Bytes(8) : random_bytes(random.next(), 8);
      for (std::int64_t j = 0; j < size; ++j) value.push_back(word[static_cast<std::size_t>(j) % 8]);
    }
  }
  return value;
}

TEST(ChunkCoding, EveryValueComesBack) {
  Random random(26);
  int coded = 0;
  for (int i = 0; i < 400; ++i) {
    const Bytes value = random_value(random);
    coded += tier::plan_trim(value).has_value();
    expect_round_trip(value);
    ASSERT_FALSE(HasFailure()) << "value " << i;
  }
  EXPECT_GT(coded, 100);
}

// A run of kLeastRepeatedBytes is found wherever it begins.
TEST(ChunkCoding, RunsAreFoundAtAnyOffset) {
  for (std::int64_t at = 0; at < 1100; ++at) {
    Bytes value = random_bytes(4, 4096);
    std::fill_n(value.begin() + at, tier::kLeastRepeatedBytes + 7, std::byte{0});
    const auto plan = tier::plan_trim(value);
    ASSERT_TRUE(plan) << at;
    EXPECT_LE(plan->payload_bytes, 4096 - tier::kLeastRepeatedBytes + 40) << at;
    expect_round_trip(value);
  }
}

TEST(ChunkCoding, ForeignBytesAreRefused) {
  Bytes value(8192);
  const Bytes literal = random_bytes(1, 2000);
  std::copy(literal.begin(), literal.end(), value.begin());
  const Bytes sound = trimmed(value);
  const auto accepts = [](const Bytes& payload, std::size_t size) {
    Bytes to(std::max(size, payload.size()));
    std::copy(payload.begin(), payload.end(), to.begin());
    return tier::expand(std::span(to).first(size), std::ssize(payload));
  };
  ASSERT_TRUE(accepts(sound, 8192));
  EXPECT_FALSE(accepts(sound, 8200));  // the value of another size
  EXPECT_FALSE(accepts(sound, 8184));
  EXPECT_FALSE(accepts(sound, sound.size() - 1));
  EXPECT_FALSE(accepts({}, 8192));
  EXPECT_FALSE(accepts(Bytes(3), 8192));
  EXPECT_FALSE(accepts(Bytes(4), 8192));  // no runs, and bytes to fill
  const auto with = [&](std::size_t from_end, std::uint32_t number) {
    Bytes payload = sound;
    tier::store_le(payload.data() + payload.size() - from_end, number);
    return payload;
  };
  EXPECT_FALSE(accepts(with(4, 0xffffffff), 8192));  // the number of runs
  EXPECT_FALSE(accepts(with(4, 0), 8192));
  EXPECT_FALSE(accepts(with(20, 0xffffffff), 8192));  // literal bytes
  EXPECT_FALSE(accepts(with(16, 0xfffffff8), 8192));  // repeated bytes
  EXPECT_FALSE(accepts(with(16, 12), 8192));
  // Any bytes: refused, or a value of exactly this size; the sanitizers look at the rest.
  Random random(7);
  for (int i = 0; i < 20'000; ++i) {
    Bytes payload = random_bytes(random.next(), random.between(4, 200));
    if (random.below(2) == 0) payload = sound;
    for (std::int64_t j = random.between(0, 3); j > 0; --j)
      payload[payload.size() - 1 -
              static_cast<std::size_t>(random.below(std::min<std::int64_t>(40, std::ssize(payload))))] ^=
          static_cast<std::byte>(1 + random.below(255));
    (void)accepts(payload, 8192);
  }
}

}  // namespace
}  // namespace kv4::test
