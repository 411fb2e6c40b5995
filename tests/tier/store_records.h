// Records whose bytes follow from their key and version, so that a test knows the allowed contents.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "support/harness.h"
#include "support/sanitized.h"
#include "tier/disk_store.h"

namespace kv4::test {

inline tier::RecordId record_id(std::uint64_t number, std::uint64_t tenant = 0) {
  tier::RecordId id{tenant, {}};
  Random random(number);
  for (std::byte& b : id.key) b = static_cast<std::byte>(random.next() & 0xff);
  return id;
}

inline std::vector<std::byte> random_bytes(std::uint64_t seed, std::int64_t count) {
  Random random(seed);
  std::vector<std::byte> bytes(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    const std::uint64_t word = random.next();
    std::memcpy(bytes.data() + i, &word, std::min<std::size_t>(8, bytes.size() - i));
  }
  return bytes;
}

inline tier::PutStatus put(tier::DiskStore& store, const tier::RecordId& id, std::span<const std::byte> payload) {
  tier::PutRequest request{id, payload};
  store.put({&request, 1});
  return request.status;
}

struct Got {
  tier::GetStatus status = tier::GetStatus::failed;
  std::vector<std::byte> payload;
};

/// Gets all records in one batch.
inline std::vector<Got> get(tier::DiskStore& store, std::span<const tier::RecordId> ids) {
  std::vector<Got> got(ids.size());
  std::vector<tier::GetRequest> requests;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    tier::ExistsRequest there{ids[i]};
    store.exists({&there, 1});
    got[i].payload.resize(static_cast<std::size_t>(std::max<std::int64_t>(there.bytes, 0)));
    requests.push_back({ids[i], got[i].payload});
  }
  store.get(requests);
  for (std::size_t i = 0; i < ids.size(); ++i) got[i].status = requests[i].status;
  return got;
}

inline Got get(tier::DiskStore& store, const tier::RecordId& id) {
  return get(store, std::span<const tier::RecordId>(&id, 1)).front();
}

inline bool remove(tier::DiskStore& store, const tier::RecordId& id) {
  tier::RemoveRequest request{id};
  store.remove({&request, 1});
  return request.removed;
}

/// KV4_TEST_SEED=N runs that seed alone.
struct Seeds {
#if KV4_TSAN
  static constexpr std::uint64_t kShare = 10;  // divides the number of seeds: each takes as much longer
#else
  static constexpr std::uint64_t kShare = 1;
#endif
  std::uint64_t first = 0, end;
  explicit Seeds(std::uint64_t count) : end((std::getenv("KV4_TEST_LONG") != nullptr ? count * 5 : count) / kShare) {
    if (const char* text = std::getenv("KV4_TEST_SEED")) {
      first = std::strtoull(text, nullptr, 10);
      end = first + 1;
    }
  }
};

}  // namespace kv4::test
