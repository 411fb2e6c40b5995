// Blocks as bytes: copy, save, load, in both arrangements.
#include "kv4/paged_kv_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "backend/device_memory.h"
#include "kv4/error.h"
#include "pool/small_schema.h"
#include "support/device.h"

namespace {

using kv4::Arrangement;
using kv4::CacheSchema;
using kv4::PagedKVPool;

constexpr std::uint32_t kSeed = 7;
using Bytes = std::vector<std::byte>;

CacheSchema schema_of(Arrangement arrangement, int alignment = 64) {
  kv4::CacheOptions o = kv4::test_pool::small_options();
  o.arrangement = arrangement;
  o.page_alignment = alignment;
  return kv4::build_schema(kv4::test_pool::small_config(), o);
}

std::shared_ptr<kv4::Backend> backend() { return kv4::test::test_backend(); }

void fill(PagedKVPool& pool, std::uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(static_cast<std::size_t>(pool.memory_bytes()));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 255);
  kv4::test::write_bytes(*backend(), pool.base(), bytes.data(), pool.memory_bytes());
}

Bytes all(const PagedKVPool& pool) { return kv4::test::read_bytes(*backend(), pool.base(), pool.memory_bytes()); }

Bytes saved(const CacheSchema& schema, const PagedKVPool& pool, kv4::BlockId block, int tokens) {
  Bytes out(static_cast<std::size_t>(schema.block_image_bytes), std::byte{0xEE});
  pool.save_block(block, tokens, out);
  return out;
}

// The image as the header describes it: pages in model order, rows of the first `tokens` tokens, zeros elsewhere.
Bytes expected_image(const CacheSchema& schema, const Bytes& pool, kv4::BlockId block, int tokens) {
  Bytes out;
  for (const kv4::LayerCacheSchema& layer : schema.layers)
    for (const kv4::PageSchema& page : layer.pages) {
      Bytes part(static_cast<std::size_t>(page.content_bytes));
      const std::byte* from = pool.data() + page.offset + block * page.block_stride;
      const int rows = tokens / page.kind.ratio;
      const auto copy = [&](std::int64_t at, std::int64_t bytes) { std::copy_n(from + at, bytes, part.begin() + at); };
      copy(0, std::int64_t{rows} * page.row.payload_bytes);
      copy(page.scale_offset, std::int64_t{rows} * page.row.scale_bytes);
      if (page.global_offset >= 0 && rows > 0) copy(page.global_offset, 4);
      out.insert(out.end(), part.begin(), part.end());
    }
  return out;
}

TEST(PagedKVPool, MemoryIsExactAndZero) {
  for (Arrangement a : {Arrangement::block_major, Arrangement::layer_major})
    for (int alignment : {64, 576}) {
      const CacheSchema s = schema_of(a, alignment);
      const PagedKVPool pool(s, backend());
      EXPECT_EQ(pool.memory_bytes(), s.block_bytes * 6);
      const Bytes bytes = all(pool);
      EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; }));
    }
}

TEST(PagedKVPool, CopyTouchesOnlyItsTarget) {
  for (Arrangement a : {Arrangement::block_major, Arrangement::layer_major}) {
    const CacheSchema s = schema_of(a);
    PagedKVPool pool(s, backend());
    fill(pool, kSeed);
    std::vector<Bytes> before;
    for (kv4::BlockId b = 0; b < 6; ++b) before.push_back(saved(s, pool, b, 16));
    EXPECT_NE(before[4], before[1]);
    pool.copy_block(4, 1);
    before[1] = before[4];
    for (kv4::BlockId b = 0; b < 6; ++b)
      EXPECT_EQ(saved(s, pool, b, 16), before[static_cast<std::size_t>(b)]) << "block " << b;
  }
}

TEST(PagedKVPool, SavesTheRowsOfTheFirstTokens) {
  for (Arrangement a : {Arrangement::block_major, Arrangement::layer_major})
    for (int alignment : {64, 576}) {
      const CacheSchema s = schema_of(a, alignment);
      PagedKVPool pool(s, backend());
      fill(pool, kSeed);
      const Bytes bytes = all(pool);
      for (int tokens = 0; tokens <= 16; ++tokens)
        for (kv4::BlockId b : {0, 3, 5})
          ASSERT_EQ(saved(s, pool, b, tokens), expected_image(s, bytes, b, tokens))
              << "block " << b << " tokens " << tokens;
    }
}

TEST(PagedKVPool, ImagesMoveBetweenArrangements) {
  const CacheSchema from_schema = schema_of(Arrangement::block_major),
                    to_schema = schema_of(Arrangement::layer_major, 576);
  ASSERT_EQ(from_schema.block_image_bytes, to_schema.block_image_bytes);
  PagedKVPool from(from_schema, backend()), to(to_schema, backend());
  fill(from, kSeed);
  fill(to, kSeed + 1);
  std::vector<Bytes> kept;
  for (kv4::BlockId b = 0; b < 6; ++b) kept.push_back(saved(to_schema, to, b, 16));
  kept[2] = saved(from_schema, from, 5, 16);
  to.load_block(2, kept[2]);
  for (kv4::BlockId b = 0; b < 6; ++b)
    EXPECT_EQ(saved(to_schema, to, b, 16), kept[static_cast<std::size_t>(b)]) << "block " << b;
}

TEST(PagedKVPool, RefusesBadBlocksAndSizes) {
  const CacheSchema s = schema_of(Arrangement::layer_major);
  PagedKVPool pool(s, backend());
  fill(pool, kSeed);
  const Bytes before = all(pool);
  Bytes image(static_cast<std::size_t>(s.block_image_bytes)), shorter(image.size() - 1), longer(image.size() + 1);
  for (kv4::BlockId bad : {-1, 6, 1 << 30}) {
    EXPECT_THROW(pool.copy_block(bad, 0), kv4::Error);
    EXPECT_THROW(pool.copy_block(0, bad), kv4::Error);
    EXPECT_THROW(pool.save_block(bad, 16, image), kv4::Error);
    EXPECT_THROW(pool.load_block(bad, image), kv4::Error);
  }
  for (Bytes* wrong : {&shorter, &longer}) {
    EXPECT_THROW(pool.save_block(0, 16, *wrong), kv4::Error);
    EXPECT_THROW(pool.load_block(0, *wrong), kv4::Error);
  }
  EXPECT_EQ(all(pool), before);
}

TEST(PagedKVPool, RefusesTokensOutsideTheBlock) {
  const CacheSchema s = schema_of(Arrangement::block_major);
  PagedKVPool pool(s, backend());
  fill(pool, kSeed);
  constexpr std::size_t kGuard = 4096;
  Bytes guarded(static_cast<std::size_t>(s.block_image_bytes) + 2 * kGuard, std::byte{0x5A});
  const std::span<std::byte> out = std::span(guarded).subspan(kGuard, static_cast<std::size_t>(s.block_image_bytes));
  for (int bad : {17, 32, 40})
    EXPECT_THROW(pool.save_block(1, bad, out), kv4::Error) << bad << " tokens of a block of 16";
  for (int bad : {-1, -16}) EXPECT_THROW(pool.save_block(1, bad, out), kv4::Error) << bad;
  for (std::size_t i = 0; i < kGuard; ++i) {
    ASSERT_EQ(guarded[i], std::byte{0x5A});
    ASSERT_EQ(guarded[guarded.size() - 1 - i], std::byte{0x5A}) << "written past the image";
  }
}

TEST(PagedKVPool, AModelWithoutEntriesHasEmptyBlocks) {
  kv4::ModelConfig c = kv4::test_pool::small_config();
  c.kinds = {kv4::LayerKind::swa, kv4::LayerKind::swa, kv4::LayerKind::swa};
  const CacheSchema s = kv4::build_schema(c, kv4::test_pool::small_options());
  PagedKVPool pool(s, backend());
  EXPECT_EQ(pool.memory_bytes(), 0);
  Bytes image;
  pool.save_block(0, 16, image);
  pool.load_block(1, image);
  pool.copy_block(0, 1);
}

// Short lists of many bytes may take another code path than those of few bytes: whole pieces, short ones among large
// ones, one that begins or ends between multiples of 16.
TEST(CopyPieces, LargePieces) {
  constexpr std::int64_t kStride = 600 << 10, kPieces = 21;
  const std::shared_ptr<kv4::Backend> device = backend();
  kv4::DeviceMemory from(device, kPieces * kStride), to(device, kPieces * kStride);
  Bytes source(static_cast<std::size_t>(kPieces * kStride));
  std::mt19937_64 random(kSeed);
  for (std::size_t i = 0; i < source.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(source.data() + i, &word, 8);
  }
  kv4::test::write_bytes(*device, from.data(), source.data(), kPieces * kStride);
  const auto check = [&](std::int64_t shift, std::int64_t cut) {
    device->fill(to.data(), 0xEE, kPieces * kStride);
    Bytes expected(source.size(), std::byte{0xEE});
    std::vector<kv4::ops::CopyPiece> pieces;
    for (std::int64_t i = 0; i < kPieces; ++i) {
      const std::int64_t at = i * kStride + shift, bytes = i % 5 == 3 ? 48 * i : kStride - cut - 4096 * i;
      const std::int64_t source_at = (kPieces - 1 - i) * kStride + shift;
      pieces.push_back({reinterpret_cast<const std::uint8_t*>(from.data()) + source_at,
                        reinterpret_cast<std::uint8_t*>(to.data()) + at, bytes});
      std::copy_n(source.begin() + source_at, bytes, expected.begin() + at);
    }
    device->copy_pieces(pieces);
    EXPECT_EQ(kv4::test::read_bytes(*device, to.data(), kPieces * kStride), expected)
        << "shift " << shift << ", cut " << cut;
  };
  check(0, 0);
  check(0, 16);
  check(16, 112);
  check(8, 40);
  check(0, 1);
}

}  // namespace
