// One spelling of every policy and mode: the enumerator's own. C++, C, Python, the tool, logs and metrics all read it
// from these tables.
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

/// A value and its spelling.
template <class E>
struct Named {
  E value;
  const char* name;
};

/// All values of an enumeration, in its order. The enumerations below have such tables.
template <class E>
std::span<const Named<E>> names_of();

/// fp8_tile64, fp8_row, bf16, mxfp4, nvfp4, fp8.
template <>
KV4_API std::span<const Named<Format>> names_of<Format>();
/// f32, bf16, i32, u8.
template <>
KV4_API std::span<const Named<DType>> names_of<DType>();
/// online, raw.
template <>
KV4_API std::span<const Named<HcaMode>> names_of<HcaMode>();
/// block_major, layer_major.
template <>
KV4_API std::span<const Named<Arrangement>> names_of<Arrangement>();
/// exact, fast.
template <>
KV4_API std::span<const Named<ScoreMode>> names_of<ScoreMode>();
/// lru, s3fifo, density.
template <>
KV4_API std::span<const Named<EvictionKind>> names_of<EvictionKind>();
/// full, checkpoint, none.
template <>
KV4_API std::span<const Named<SnapshotPolicy::Kind>> names_of<SnapshotPolicy::Kind>();
/// none, sealed, authenticated.
template <>
KV4_API std::span<const Named<Protection>> names_of<Protection>();
/// stored, evicted, snapshot.
template <>
KV4_API std::span<const Named<BlockEvent::Kind>> names_of<BlockEvent::Kind>();
/// failed, kept, durable.
template <>
KV4_API std::span<const Named<tier::FlushStatus>> names_of<tier::FlushStatus>();

}  // namespace kv4
