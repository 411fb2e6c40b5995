// State slots: ownership, reset, copy, and canonical images by hand.
#include "kv4/state_cache_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kv4/error.h"
#include "pool/small_schema.h"
#include "support/device.h"

namespace {

using kv4::CacheSchema;
using kv4::CanonicalImage;
using kv4::StateCachePool;

constexpr std::uint32_t kSeed = 31;
using Bytes = std::vector<std::byte>;

CacheSchema small_schema(int rewind = 0, int drafts = 0) {
  kv4::CacheOptions o = kv4::test_pool::small_options();
  o.max_rewind_tokens = rewind;
  o.draft_layers = drafts;
  return kv4::build_schema(kv4::test_pool::small_config(), o);
}

std::shared_ptr<kv4::Backend> backend() { return kv4::test::test_backend(); }

// Rings and accumulators of a slot, and how far each is folded.
Bytes slot_bytes(const CacheSchema& s, const StateCachePool& pool, int slot) {
  const std::int64_t layers = static_cast<std::int64_t>(s.layers.size());
  Bytes out = kv4::test::read_bytes(*backend(), pool.base() + slot * s.slot_bytes, s.slot_bytes);
  const Bytes f = kv4::test::read_bytes(*backend(), pool.fold_watermarks() + slot * layers, 4 * layers);
  out.insert(out.end(), f.begin(), f.end());
  return out;
}

// The undo row of each layer that an in-place step saved: [layers] positions and the bytes.
std::vector<std::int32_t> undo_positions(const CacheSchema& s, const StateCachePool& pool, int slot) {
  const std::int64_t layers = static_cast<std::int64_t>(s.layers.size());
  return kv4::test::read_array(*backend(), pool.undo_positions() + slot * layers, layers);
}
Bytes undo_row_bytes(const CacheSchema& s, const StateCachePool& pool, int slot) {
  return kv4::test::read_bytes(*backend(), pool.undo_rows() + slot * s.undo_row_bytes, s.undo_row_bytes);
}

void fill(const CacheSchema& s, StateCachePool& pool) {
  std::mt19937 random(kSeed);
  const auto byte = [&] { return static_cast<std::byte>(random() & 255); };
  const auto write = [](void* to, const auto& values) {
    kv4::test::write_bytes(*backend(), to, values.data(),
                           static_cast<std::int64_t>(values.size() * sizeof(values.front())));
  };
  Bytes slots(static_cast<std::size_t>(s.slot_bytes * pool.num_slots())),
      undo_rows(static_cast<std::size_t>(s.undo_row_bytes * pool.num_slots()));
  std::generate(slots.begin(), slots.end(), byte);
  std::generate(undo_rows.begin(), undo_rows.end(), byte);
  std::vector<std::int32_t> fold_watermarks, positions;
  for (std::size_t i = 0; i < static_cast<std::size_t>(pool.num_slots()) * s.layers.size(); ++i) {
    fold_watermarks.push_back(static_cast<std::int32_t>(i + 1));
    positions.push_back(-2 - static_cast<std::int32_t>(i));
  }
  write(pool.base(), slots);
  write(pool.undo_rows(), undo_rows);
  write(pool.fold_watermarks(), fold_watermarks);
  write(pool.undo_positions(), positions);
}

// The bias of an HCA layer, in the backend's memory.
struct Bias {
  std::vector<float> zeros = std::vector<float>(8 * 32);
  kv4::test::Twins twins{backend()};
  const float* data = static_cast<const float*>(twins.put(kv4::TensorView(zeros.data(), {8, 32})).data);
  Bias() { twins.send(); }
};

void hold_all(StateCachePool& pool) {
  while (pool.acquire_slot()) {
  }
}

bool is_zero(const Bytes& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

TEST(StateCachePool, SlotsAreHandedOutOnceEach) {
  const CacheSchema s = small_schema();
  StateCachePool pool(s, backend());
  EXPECT_EQ(pool.num_slots(), 3) << "requests and spares";
  EXPECT_EQ(pool.num_free(), 3);
  std::set<std::int32_t> seen;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(seen.insert(pool.acquire_slot().value()).second);
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), 2);
  EXPECT_EQ(pool.acquire_slot(), std::nullopt);
  pool.release_slot(1);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.acquire_slot(), 1);
}

TEST(StateCachePool, RefusesSlotsThatAreNotHeld) {
  const CacheSchema s = small_schema();
  StateCachePool pool(s, backend());
  pool.acquire_slot();
  for (std::int32_t bad : {-1, 1, 3, 1 << 30}) {
    try {
      pool.release_slot(bad);
      FAIL() << "no Error was thrown for " << bad;
    } catch (const kv4::Error& e) {
      EXPECT_EQ(e.code(), kv4::ErrorCode::bad_argument);
      EXPECT_NE(std::string(e.what()).find(std::to_string(bad)), std::string::npos);
    }
  }
  pool.release_slot(0);
  EXPECT_THROW(pool.release_slot(0), kv4::Error) << "twice";
  EXPECT_EQ(pool.num_free(), 3);
}

TEST(StateCachePool, MemoryIsExactAndZero) {
  for (int rewind : {0, 5})
    for (int drafts : {0, 2}) {
      const CacheSchema s = small_schema(rewind, drafts);
      const StateCachePool pool(s, backend());
      const std::int64_t positions = (3 * 4 * static_cast<std::int64_t>(s.layers.size()) + 63) / 64 * 64;
      EXPECT_EQ(s.undo_row_bytes, (44 * static_cast<std::int64_t>(s.layers.size()) + 63) / 64 * 64)
          << "one row per window";
      EXPECT_EQ(pool.memory_bytes(), 3 * (s.slot_bytes + s.undo_row_bytes) + 2 * positions);
      for (int slot = 0; slot < 3; ++slot) EXPECT_TRUE(is_zero(slot_bytes(s, pool, slot)));
    }
}

TEST(StateCachePool, ResetAndCopyTouchOneSlot) {
  const CacheSchema s = small_schema(2, 1);
  StateCachePool pool(s, backend());
  hold_all(pool);
  fill(s, pool);
  const Bytes first = slot_bytes(s, pool, 0), last = slot_bytes(s, pool, 2);
  const std::vector<std::int32_t> first_undo = undo_positions(s, pool, 0);
  pool.reset_slot(1);
  EXPECT_TRUE(is_zero(slot_bytes(s, pool, 1)));
  EXPECT_EQ(undo_positions(s, pool, 1), std::vector<std::int32_t>(s.layers.size(), -1));
  EXPECT_EQ(slot_bytes(s, pool, 0), first);
  EXPECT_EQ(slot_bytes(s, pool, 2), last);
  pool.copy_slot(2, 1);
  EXPECT_EQ(slot_bytes(s, pool, 1), last);
  EXPECT_EQ(undo_positions(s, pool, 1), undo_positions(s, pool, 2));
  EXPECT_EQ(undo_row_bytes(s, pool, 1), undo_row_bytes(s, pool, 2));
  EXPECT_EQ(undo_positions(s, pool, 0), first_undo);
  EXPECT_EQ(slot_bytes(s, pool, 0), first);
  EXPECT_EQ(slot_bytes(s, pool, 2), last);
}

// A slot that does not exist lies outside the pool's memory, so each call runs in its own process. (Only on the host: a
// GPU's context does not survive a fork, and there the call would not break the host's process.)
template <class F>
void expect_refused(F&& call) {
  if (kv4::test::off_host()) {
    EXPECT_THROW(call(), kv4::Error);
    return;
  }
  EXPECT_EXIT(
      {
        try {
          call();
        } catch (const kv4::Error& e) {
          std::_Exit(e.code() == kv4::ErrorCode::bad_argument ? 0 : 2);
        }
        std::_Exit(1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(StateCachePoolDeathTest, RefusesSlotsThatDoNotExist) {
  const CacheSchema s = small_schema();
  StateCachePool pool(s, backend());
  hold_all(pool);
  const std::vector<std::int64_t> lengths = {4};
  const std::vector<const float*> bias(3);
  for (std::int32_t bad : {-1, 3, 1 << 24}) {
    SCOPED_TRACE(bad);
    expect_refused([&] { pool.reset_slot(bad); });
    expect_refused([&] { pool.copy_slot(bad, 0); });
    expect_refused([&] { pool.copy_slot(0, bad); });
    expect_refused([&] { pool.save(bad, lengths, bias); });
    expect_refused([&] { pool.restore(bad, pool.save(0, lengths, bias)); });
  }
}

// --- images

// Written out from docs/formats.md: windows first, then the rows that pending entries still need.
std::int64_t expected_bytes(const CacheSchema& s, std::int64_t n) {
  const std::int64_t element = 4;
  std::int64_t bytes = 0;
  for (const kv4::LayerCacheSchema& layer : s.layers) {
    bytes += std::min<std::int64_t>(n, 8) * (24 + 16 + 4);
    for (const kv4::PageSchema& page : layer.pages) {
      const std::int64_t width = page.kind.width, ratio = page.kind.ratio;
      if (page.kind.overlap)
        bytes += (n >= ratio ? ratio * 2 * width * element : 0) + n % ratio * 4 * width * element;
      else
        bytes += n % ratio != 0 ? 3 * width * 4 : 0;
    }
  }
  return bytes;
}

TEST(StateCachePool, ImageBytes) {
  for (int rewind : {0, 7}) {
    const CacheSchema s = small_schema(rewind);
    for (std::int64_t n = 0; n <= 64; ++n) EXPECT_EQ(kv4::image_bytes(s, std::vector{n}), expected_bytes(s, n)) << n;
  }
  const CacheSchema s = small_schema(0, 2);
  EXPECT_EQ(kv4::image_bytes(s, std::vector<std::int64_t>{0, 3, 20}), (3 + 8) * 44);
  for (const std::vector<std::int64_t>& bad :
       std::vector<std::vector<std::int64_t>>{{}, {1}, {1, 2}, {1, 2, 3, 4}, {-1, 0, 0}, {0, 65, 0}, {INT64_MAX, 0, 0}})
    EXPECT_THROW(kv4::image_bytes(s, bad), kv4::Error);
}

TEST(StateCachePool, WindowRowsAreSavedInPositionOrder) {
  const CacheSchema s = small_schema(3);  // rings of 11 rows
  StateCachePool pool(s, backend());
  hold_all(pool);
  // Row of position p in layer 0: payload byte 0 is p, scale byte 0 is 100 + p.
  const kv4::WindowSchema& w = s.layers[0].window;
  Bytes slot(static_cast<std::size_t>(s.slot_bytes));
  for (int p = 20; p < 31; ++p) {
    slot[static_cast<std::size_t>(w.payload_offset + p % 11 * w.row.payload_bytes)] = static_cast<std::byte>(p);
    slot[static_cast<std::size_t>(w.scale_offset + p % 11 * w.row.scale_bytes)] = static_cast<std::byte>(100 + p);
  }
  kv4::test::write_bytes(*backend(), pool.base() + s.slot_bytes, slot.data(), s.slot_bytes);
  const std::vector<std::int64_t> lengths = {31};
  const Bias bias;
  const CanonicalImage image = pool.save(1, lengths, std::vector<const float*>{nullptr, nullptr, bias.data});
  EXPECT_EQ(image.layout_id, s.layout_id);
  EXPECT_EQ(image.lengths, lengths);
  ASSERT_EQ(static_cast<std::int64_t>(image.bytes.size()), expected_bytes(s, 31));
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(image.bytes[static_cast<std::size_t>(i * 40)], static_cast<std::byte>(23 + i));
    EXPECT_EQ(image.bytes[static_cast<std::size_t>(8 * 40 + i * 4)], static_cast<std::byte>(123 + i));
  }
}

// The slot has no undo row: the image's oldest row is the ring's, although position 0 is the first.
TEST(StateCachePool, ASlotThatWasNeverResetHasNoUndoRow) {
  const CacheSchema schema = small_schema();
  StateCachePool pool(schema, backend());
  const std::int32_t slot = pool.acquire_slot().value();
  const kv4::WindowSchema& window = schema.layers[0].window;
  const Bytes row(static_cast<std::size_t>(window.row.payload_bytes), std::byte{0x5A});
  kv4::test::write_bytes(*backend(), pool.base() + slot * schema.slot_bytes + window.payload_offset, row.data(),
                         window.row.payload_bytes);
  const std::vector<std::int64_t> lengths{schema.config.window};
  const std::vector<const float*> bias(schema.layers.size(), nullptr);
  const CanonicalImage image = pool.save(slot, lengths, bias);
  for (int i = 0; i < window.row.payload_bytes; ++i)
    ASSERT_EQ(image.bytes[static_cast<std::size_t>(i)], std::byte{0x5A});
}

TEST(StateCachePool, RestoreGivesTheImageBack) {
  std::mt19937 random(kSeed);
  for (int rewind : {0, 5})
    for (std::int64_t n : {0, 1, 3, 4, 7, 8, 9, 15, 16, 33, 64}) {
      const CacheSchema s = small_schema(rewind, 1);
      StateCachePool pool(s, backend());
      hold_all(pool);
      fill(s, pool);
      CanonicalImage image{
          s.layout_id, {n, n / 2}, Bytes(static_cast<std::size_t>(kv4::image_bytes(s, std::vector{n, n / 2})))};
      for (std::byte& b : image.bytes)
        b = static_cast<std::byte>(random() & 0x3F);  // no NaN: an accumulator's NaN has one pattern only
      const Bytes other = slot_bytes(s, pool, 2);
      pool.restore(1, image);
      EXPECT_EQ(slot_bytes(s, pool, 2), other);
      const Bias bias;
      EXPECT_EQ(pool.save(1, image.lengths, std::vector<const float*>{nullptr, nullptr, bias.data, nullptr}), image)
          << "length " << n << " seed " << kSeed;
      EXPECT_EQ(pool.save(1, image.lengths, std::vector<const float*>(4)), image)
          << "before weights are bound, length " << n;
    }
}

TEST(StateCachePool, RefusesForeignAndDamagedImages) {
  const CacheSchema s = small_schema();
  StateCachePool pool(s, backend());
  hold_all(pool);
  fill(s, pool);
  const Bias bias;
  const std::vector<const float*> biases = {nullptr, nullptr, bias.data};
  const CanonicalImage good = pool.save(0, std::vector<std::int64_t>{20}, biases);
  pool.check(good);
  const Bytes before = slot_bytes(s, pool, 1);
  std::vector<CanonicalImage> bad(7, good);
  bad[0].layout_id ^= 1;
  bad[1].bytes.pop_back();
  bad[2].bytes.push_back({});
  bad[3].lengths = {21};
  bad[4].lengths = {};
  bad[5].lengths = {20, 0};
  bad[6].lengths = {-1};
  for (std::size_t i = 0; i < bad.size(); ++i) {
    EXPECT_THROW(pool.check(bad[i]), kv4::Error) << i;
    EXPECT_THROW(pool.restore(1, bad[i]), kv4::Error) << i;
    EXPECT_EQ(slot_bytes(s, pool, 1), before) << i;
  }
  EXPECT_THROW(pool.save(0, std::vector<std::int64_t>{65}, biases), kv4::Error) << "longer than max_context";
  EXPECT_THROW(pool.save(0, std::vector<std::int64_t>{20}, std::vector<const float*>(2)), kv4::Error)
      << "one bias per layer";
}

}  // namespace
