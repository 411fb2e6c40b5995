// Records whose bytes follow from their key and version, so that a test knows what it may read.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "support/harness.h"
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
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.next() >> 32 & 0xff);
  return bytes;
}

inline tier::PutStatus put(tier::DiskStore& store, const tier::RecordId& id, std::span<const std::byte> payload) {
  tier::PutRequest request{id, payload};
  store.put({&request, 1});
  return request.status;
}

struct Got {
  tier::GetStatus status;
  std::vector<std::byte> payload;
};

inline Got get(tier::DiskStore& store, const tier::RecordId& id) {
  tier::ExistsRequest there{id};
  store.exists({&there, 1});
  std::vector<std::byte> to(static_cast<std::size_t>(std::max<std::int64_t>(there.bytes, 0)));
  tier::GetRequest request{id, to};
  store.get({&request, 1});
  return {request.status, std::move(to)};
}

inline bool remove(tier::DiskStore& store, const tier::RecordId& id) {
  tier::RemoveRequest request{id};
  store.remove({&request, 1});
  return request.removed;
}

/// KV4_TEST_SEED=N runs that seed alone.
struct Seeds {
  std::uint64_t first = 0, end;
  explicit Seeds(std::uint64_t count) : end(std::getenv("KV4_TEST_LONG") != nullptr ? count * 5 : count) {
    if (const char* text = std::getenv("KV4_TEST_SEED")) {
      first = std::strtoull(text, nullptr, 10);
      end = first + 1;
    }
  }
};

}  // namespace kv4::test
