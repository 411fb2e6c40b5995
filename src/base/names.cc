#include "kv4/names.h"

#include <string>

#include "base/check.h"

namespace kv4 {
namespace {

constexpr Named<Format> kFormats[] = {
    {Format::fp8_tile64, "fp8_tile64"}, {Format::fp8_row, "fp8_row"}, {Format::bf16, "bf16"},
    {Format::mxfp4, "mxfp4"},           {Format::nvfp4, "nvfp4"},     {Format::fp8, "fp8"},
    {Format::fp8_tile32, "fp8_tile32"}, {Format::nvfp4_row, "nvfp4_row"}};
constexpr Named<DType> kDTypes[] = {{DType::f32, "f32"}, {DType::bf16, "bf16"}, {DType::i32, "i32"}, {DType::u8, "u8"}};
constexpr Named<DType> kPendingDTypes[] = {{DType::f32, "f32"}, {DType::bf16, "bf16"}};
constexpr Named<HcaMode> kHcaModes[] = {{HcaMode::online, "online"}, {HcaMode::raw, "raw"}};
constexpr Named<Arrangement> kArrangements[] = {{Arrangement::block_major, "block_major"},
                                                {Arrangement::layer_major, "layer_major"}};
constexpr Named<ScoreMode> kScoreModes[] = {{ScoreMode::exact, "exact"}, {ScoreMode::fast, "fast"}};
constexpr Named<EvictionKind> kEvictions[] = {
    {EvictionKind::lru, "lru"}, {EvictionKind::s3fifo, "s3fifo"}, {EvictionKind::density, "density"}};
constexpr Named<SnapshotPolicy::Kind> kSnapshots[] = {{SnapshotPolicy::Kind::full, "full"},
                                                      {SnapshotPolicy::Kind::checkpoint, "checkpoint"},
                                                      {SnapshotPolicy::Kind::none, "none"}};
constexpr Named<Protection> kProtections[] = {
    {Protection::none, "none"}, {Protection::sealed, "sealed"}, {Protection::authenticated, "authenticated"}};
constexpr Named<BlockEvent::Kind> kEventKinds[] = {{BlockEvent::Kind::stored, "stored"},
                                                   {BlockEvent::Kind::evicted, "evicted"},
                                                   {BlockEvent::Kind::snapshot, "snapshot"}};
constexpr Named<tier::FlushStatus> kFlushStatuses[] = {
    {tier::FlushStatus::failed, "failed"}, {tier::FlushStatus::kept, "kept"}, {tier::FlushStatus::durable, "durable"}};

constexpr std::size_t kMaxShownName = 64;  // of an unknown name

template <class E>
const char* name_of(E value) {
  for (const Named<E>& each : names_of<E>())
    if (each.value == value) return each.name;
  return "unknown";
}

template <class E>
E value_of(std::string_view name, std::span<const Named<E>> all, const char* what) {
  std::string names;
  for (const Named<E>& each : all) {
    if (name == each.name) return each.value;
    names += names.empty() ? "" : ", ";
    names += each.name;
  }
  fail(ErrorCode::bad_argument, "{} '{}' is unknown; use one of: {}", what, name.substr(0, kMaxShownName), names);
}

}  // namespace

template <>
std::span<const Named<Format>> names_of<Format>() {
  return kFormats;
}
template <>
std::span<const Named<DType>> names_of<DType>() {
  return kDTypes;
}
template <>
std::span<const Named<HcaMode>> names_of<HcaMode>() {
  return kHcaModes;
}
template <>
std::span<const Named<Arrangement>> names_of<Arrangement>() {
  return kArrangements;
}
template <>
std::span<const Named<ScoreMode>> names_of<ScoreMode>() {
  return kScoreModes;
}
template <>
std::span<const Named<EvictionKind>> names_of<EvictionKind>() {
  return kEvictions;
}
template <>
std::span<const Named<SnapshotPolicy::Kind>> names_of<SnapshotPolicy::Kind>() {
  return kSnapshots;
}
template <>
std::span<const Named<Protection>> names_of<Protection>() {
  return kProtections;
}
template <>
std::span<const Named<BlockEvent::Kind>> names_of<BlockEvent::Kind>() {
  return kEventKinds;
}
template <>
std::span<const Named<tier::FlushStatus>> names_of<tier::FlushStatus>() {
  return kFlushStatuses;
}

const char* to_string(Format format) { return name_of(format); }
const char* to_string(DType type) { return name_of(type); }
const char* to_string(HcaMode mode) { return name_of(mode); }
const char* to_string(Arrangement arrangement) { return name_of(arrangement); }
const char* to_string(ScoreMode mode) { return name_of(mode); }
const char* to_string(EvictionKind kind) { return name_of(kind); }
const char* to_string(SnapshotPolicy::Kind kind) { return name_of(kind); }
const char* to_string(Protection protection) { return name_of(protection); }
const char* to_string(BlockEvent::Kind kind) { return name_of(kind); }
const char* tier::to_string(FlushStatus status) { return name_of(status); }

Format parse_format(std::string_view name) { return value_of<Format>(name, kFormats, "format"); }
DType parse_pending_dtype(std::string_view name) { return value_of<DType>(name, kPendingDTypes, "pending dtype"); }
HcaMode parse_hca_mode(std::string_view name) { return value_of<HcaMode>(name, kHcaModes, "HCA mode"); }
Arrangement parse_arrangement(std::string_view name) {
  return value_of<Arrangement>(name, kArrangements, "arrangement");
}
ScoreMode parse_score_mode(std::string_view name) { return value_of<ScoreMode>(name, kScoreModes, "score mode"); }
EvictionKind parse_eviction(std::string_view name) {
  return value_of<EvictionKind>(name, kEvictions, "eviction policy");
}
SnapshotPolicy::Kind parse_snapshots(std::string_view name) {
  return value_of<SnapshotPolicy::Kind>(name, kSnapshots, "snapshot policy");
}
Protection parse_protection(std::string_view name) { return value_of<Protection>(name, kProtections, "protection"); }

}  // namespace kv4
