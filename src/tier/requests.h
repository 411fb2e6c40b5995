// Requests of kv4/tier.h by id.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv4/tier.h"
#include "tier/little_endian.h"
#include "tier/record_format.h"

namespace kv4::tier {

/// Keys are digests already.
struct RecordIdHash {
  std::size_t operator()(const RecordId& id) const {
    return static_cast<std::size_t>(load_le<std::uint64_t>(id.key.data()) ^ (id.tenant * 0x9e3779b97f4a7c15u));
  }
};

}  // namespace kv4::tier
