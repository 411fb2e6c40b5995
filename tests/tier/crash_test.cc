// The store on a disk that crashes, tears, reorders, lies, fails and runs full, beside a map of its allowed contents.
// KV4_TEST_SEED=N runs one seed again.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>

#include "kv4/error.h"
#include "support/simulated_disk.h"
#include "tier/disk_store.h"
#include "tier/store_records.h"

namespace kv4::test {
namespace {

using tier::DiskStore;
using tier::GetStatus;
using tier::PutStatus;

constexpr int kKeys = 10;
constexpr std::uint64_t kMissing = 0;  // as a version: no record

tier::RecordId id_of(int key) {
  return record_id(static_cast<std::uint64_t>(key / 2), static_cast<std::uint64_t>(key % 2));
}

std::vector<std::byte> payload_of(int key, std::uint64_t version) {
  Random random(version * 1000 + static_cast<std::uint64_t>(key));
  const std::int64_t length = random.below(3) ? random.below(3000) : random.below(20000);
  return random_bytes(random.next(), length);
}

/// The allowed versions of a key: after a crash `settled` or one of `later`; while the store runs `now`.
struct Shadow {
  std::uint64_t settled = kMissing;
  std::vector<std::uint64_t> later;
  std::uint64_t now = kMissing;
  bool removed = false, gone = false;  // by the last call; and that call was durable
  bool lost = false;                   // the store missed `now`, and no flush has reported it yet
};

class CrashRun {
 public:
  explicit CrashRun(std::uint64_t seed) : random_(seed), disk_(seed ^ 0xD15C) {
    options_.directory = "store";
    options_.segment_bytes = 64 << 10;
    small_ = random_.below(4) == 0;
    options_.capacity_bytes = small_ ? 3 * options_.segment_bytes : 1 << 30;
    options_.sync_every_bytes = random_.below(2) ? 16 << 10 : 1 << 20;
    options_.queue_depth = static_cast<int>(random_.between(1, 5));
    if (random_.below(4) == 0)
      options_.guard = std::make_shared<tier::RecordGuard>(tier::GuardOptions{
          "disk", {CacheKey{}}, random_.below(2) ? Protection::sealed : Protection::authenticated, false});
    disk_.set_short_transfers(random_.below(2) == 0);
    disk_.set_flips_on_the_way(random_.below(4) == 0);
  }

  void run() {
    for (std::int64_t sessions = random_.between(2, 6); sessions > 0 && !testing::Test::HasFailure(); --sessions) {
      session();
      if (random_.below(4) == 0) close();
      store_.reset();
      // Otherwise only the process died, perhaps after failed calls. Pages that a sync could not write then look clean
      // to the next process, and its own sync does not report them.
      const bool crashed = random_.below(3) != 0;
      if (crashed) disk_.crash();
      disk_.fail_all(false);
      disk_.fail_call_in(-1);
      disk_.set_capacity(std::int64_t{1} << 40);
      if (crashed && random_.below(8) == 0) {
        disk_.damage(static_cast<int>(random_.between(1, 5)));
        damaged_ = true;
      }
    }
  }

 private:
  void session() {
    faulty_ = false;
    if (random_.below(4) == 0) fail_soon(30);
    open();
    if (!store_) return;
    for (auto& [key, shadow] : shadows_) shadow.removed = shadow.gone;
    look_at_all(true);
    for (std::int64_t steps = random_.between(1, 50); steps > 0 && !testing::Test::HasFailure(); --steps) {
      switch (random_.below(24)) {
        case 0:
        case 1:
        case 2: flush(); break;
        case 3:
        case 4: remove(any_key()); break;
        case 5: collect(); break;
        case 6: fail_soon(60); break;
        case 7:
          if (random_.below(3) == 0) {
            disk_.die_in(random_.below(2) ? 0 : random_.below(40));
            faulty_ = true;
          }
          break;
        case 8:
          if (random_.below(4) == 0) {
            disk_.set_capacity(64 << 10);
            faulty_ = true;
          }
          break;
        case 9:
        case 10:
        case 11:
        case 12: look(any_key(), false); break;
        case 13: look_at_all(false); break;
        case 14:
        case 15:
        case 16:
        case 17: put(static_cast<std::size_t>(random_.between(2, 8))); break;
        default: put(1); break;
      }
    }
  }

  int any_key() { return static_cast<int>(random_.below(kKeys)); }

  void fail_soon(std::int64_t calls) {
    disk_.fail_call_in(random_.below(calls));
    faulty_ = true;
  }

  void open() {
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        store_ = DiskStore::open(disk_, options_);
        return;
      } catch (const Error& e) {
        // A damaged version field is refused as another version. Without damage, opening must not fail.
        if (damaged_) return;
        ASSERT_TRUE(faulty_ && attempt == 0) << "does not open: " << e.what();
      }
    }
  }

  bool may_miss() const { return faulty_ || damaged_ || small_; }

  void look_at_all(bool opened) {
    std::vector<tier::RecordId> ids;
    for (int key = 0; key < kKeys; ++key) ids.push_back(id_of(key));
    const std::vector<Got> got = get(*store_, ids);
    for (int key = 0; key < kKeys; ++key) compare(key, got[static_cast<std::size_t>(key)], opened);
  }

  void look(int key, bool opened) { compare(key, get(*store_, id_of(key)), opened); }

  /// The store's answer must be allowed; from then on it is the key's version.
  void compare(int key, const Got& got, bool opened) {
    Shadow& shadow = shadows_[key];
    std::vector<std::uint64_t> allowed{shadow.now};
    if (opened) {
      allowed = shadow.later;
      allowed.push_back(shadow.settled);
    }
    if (got.status == GetStatus::found) {
      const auto match = std::find_if(allowed.begin(), allowed.end(), [&](std::uint64_t version) {
        return version != kMissing && payload_of(key, version) == got.payload;
      });
      ASSERT_NE(match, allowed.end()) << "key " << key << ": wrong bytes";
      shadow.now = *match;
      return;
    }
    // A durably removed record is not known any more, however the index was made.
    ASSERT_TRUE(got.status == GetStatus::missing || !opened || faulty_ || damaged_ || !shadow.gone ||
                !shadow.later.empty())
        << "key " << key << " is named but gone, status " << static_cast<int>(got.status);
    const bool unknown = std::find(allowed.begin(), allowed.end(), kMissing) != allowed.end();
    ASSERT_TRUE(unknown || damaged_ || small_ || (!opened && may_miss()))
        << "key " << key << " is lost, version " << allowed.back() << ", status " << static_cast<int>(got.status)
        << (opened ? ", opened" : ", running") << (faulty_ ? ", faulty" : "");
    if (opened) shadow.now = kMissing;
    if (!opened && got.status == GetStatus::missing) {
      shadow.lost = shadow.lost || shadow.now != kMissing;
      shadow.now = kMissing;
    }
    // A durable record that is missing in a faulty session may come back later.
    if (opened && !unknown) shadow.later.push_back(kMissing);
  }

  /// Puts one batch, which may contain a key several times.
  void put(std::size_t count) {
    std::vector<int> keys;
    std::vector<std::uint64_t> versions;
    std::vector<std::vector<std::byte>> payloads;
    std::vector<tier::PutRequest> requests;
    for (std::size_t i = 0; i < count; ++i) {
      keys.push_back(any_key());
      versions.push_back(++versions_);
      payloads.push_back(payload_of(keys[i], versions[i]));
      requests.push_back({id_of(keys[i]), payloads[i]});
    }
    store_->put(requests);
    small_ = small_ || store_->stats().evicted_records > 0;  // the disk was full before the store reached its capacity
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_TRUE(requests[i].status == PutStatus::stored || may_miss())
          << "put: " << static_cast<int>(requests[i].status);
      Shadow& shadow = shadows_[keys[i]];
      shadow.later.push_back(versions[i]);
      shadow.removed = shadow.gone = false;
      if (requests[i].status != PutStatus::stored) continue;
      shadow.now = versions[i];
      shadow.lost = false;
    }
  }

  void remove(int key) {
    kv4::test::remove(*store_, id_of(key));
    shadows_[key].later.push_back(kMissing);
    shadows_[key].now = kMissing;
    shadows_[key].removed = true;
  }

  void flush() {
    const bool durable = store_->flush();
    flushed(durable, !durable);
  }
  void collect() {
    const tier::CollectResult result = store_->collect();
    flushed(result.durable, !result.durable || result.damaged_records > 0);
  }
  void close() {
    if (!store_) return;
    flush();
    EXPECT_TRUE(store_->close() || may_miss());
  }

  /// `losses`: the store reported possible losses.
  void flushed(bool durable, bool losses) {
    ASSERT_TRUE(durable || may_miss());
    for (auto& [key, shadow] : shadows_) {
      tier::ExistsRequest request{id_of(key)};
      store_->exists({&request, 1});
      if (losses && request.bytes < 0 && (shadow.now != kMissing || shadow.lost)) {
        shadow.now = kMissing;
        shadow.lost = false;
        shadow.later.push_back(kMissing);
      }
      if (!durable) continue;
      shadow.settled = shadow.now;
      shadow.gone = shadow.removed;
      shadow.later.clear();
    }
  }

  Random random_;
  SimulatedDisk disk_;
  tier::StoreOptions options_;
  std::unique_ptr<DiskStore> store_;
  std::map<int, Shadow> shadows_;
  std::uint64_t versions_ = 0;
  bool small_ = false;    // the oldest records may be evicted
  bool damaged_ = false;  // bits on the disk were flipped: records may be lost, but never wrong
  bool faulty_ = false;   // calls of this session fail
};

TEST(TierCrash, NothingWrongNothingDurableLost) {
  const Seeds seeds(10000);
  for (std::uint64_t seed = seeds.first; seed < seeds.end; ++seed) {
    SCOPED_TRACE("KV4_TEST_SEED=" + std::to_string(seed));
    CrashRun(seed).run();
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace kv4::test
