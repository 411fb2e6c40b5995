// The files in a store's directory, by name alone: anybody may have put anything there.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tier/file_system.h"

namespace kv4::tier {

inline constexpr std::string_view kLockName = "lock";
/// A store has at most so many segments; the oldest makes room.
inline constexpr std::size_t kMaxSegments = std::size_t{1} << 18;
static_assert(kMaxSegments < kMaxListedNames);

struct SetAsideFile {
  std::string name, reason;
};

struct StoreNames {
  std::vector<std::uint64_t> segments;    // ids of names that segments may have, ascending
  std::vector<std::string> unfinished;    // segments that a crash left behind
  std::vector<SetAsideFile> unusable;     // left alone
  bool lock = false, checkpoint = false;  // the names exist, as regular files or not
};

/// Throws Error(bad_file) where the directory cannot be listed or has too many names that look like a store's. Other
/// names do not count.
StoreNames list_store(FileSystem& files, const std::string& directory);

/// Whether `id` may be the next segment id after `last`, or the first. A store counts ids up and drops the oldest
/// segments. So it never gave an id far beyond the one before; believing such an id would soon use up the ids.
bool may_follow(std::optional<std::uint64_t> last, std::uint64_t id);
inline constexpr std::uint64_t kMaxFirstSegmentId = std::uint64_t{1} << 59, kMaxSegmentIdStep = std::uint64_t{1} << 40;
inline constexpr std::uint64_t kMaxSegmentId = std::uint64_t{1} << 60;
static_assert(kMaxFirstSegmentId + kMaxSegmentIdStep * kMaxListedNames <= kMaxSegmentId);

}  // namespace kv4::tier
