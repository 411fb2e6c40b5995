// One spelling of every policy and mode: the enumerator's own. C++, C, Python, the tool, logs and metrics write it
// alike, and all of them read it from these tables.
#pragma once

#include <span>
#include <string_view>

#include "kv4/cache_keys.h"
#include "kv4/export.h"
#include "kv4/options.h"
#include "kv4/prefix_cache.h"
#include "kv4/tensor.h"
#include "kv4/tier.h"

namespace kv4 {

/// A value and how it is written.
template <class E>
struct Named {
  E value;
  const char* name;
};

/// All values of an enumeration, in its order. There are tables of those below.
template <class E>
std::span<const Named<E>> names_of();

template <>
KV4_API std::span<const Named<Format>> names_of<Format>();
template <>
KV4_API std::span<const Named<DType>> names_of<DType>();
template <>
KV4_API std::span<const Named<HcaMode>> names_of<HcaMode>();
template <>
KV4_API std::span<const Named<Arrangement>> names_of<Arrangement>();
template <>
KV4_API std::span<const Named<ScoreMode>> names_of<ScoreMode>();
template <>
KV4_API std::span<const Named<EvictionKind>> names_of<EvictionKind>();
template <>
KV4_API std::span<const Named<SnapshotPolicy::Kind>> names_of<SnapshotPolicy::Kind>();
template <>
KV4_API std::span<const Named<Protection>> names_of<Protection>();
template <>
KV4_API std::span<const Named<BlockEvent::Kind>> names_of<BlockEvent::Kind>();
template <>
KV4_API std::span<const Named<tier::FlushStatus>> names_of<tier::FlushStatus>();

}  // namespace kv4
