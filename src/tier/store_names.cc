#include "tier/store_names.h"

#include <algorithm>

#include "base/check.h"
#include "tier/index_checkpoint.h"
#include "tier/segment_file.h"

namespace kv4::tier {
namespace {

bool is_unfinished(std::string_view name) {
  if (!name.ends_with(kUnfinishedSuffix)) return false;
  name.remove_suffix(kUnfinishedSuffix.size());
  return name == kCheckpointName || parse_segment_name(name).has_value();
}

bool looks_like_ours(std::string_view name) {
  return name.starts_with(kSegmentPrefix) || name.starts_with(kCheckpointName) || name == kLockName;
}

}  // namespace

StoreNames list_store(FileSystem& files, const std::string& directory) {
  Listing listing = files.list(directory, looks_like_ours);
  require(listing.status.ok(), ErrorCode::bad_file, "the store {} cannot be listed: {}", directory,
          to_string(listing.status));
  require(listing.whole, ErrorCode::bad_file,
          "the store {} has more than {} files of a store's names; move those away that no store has made", directory,
          kMaxListedNames);
  StoreNames names;
  for (std::string& name : listing.names) {
    if (const std::optional<std::uint64_t> id = parse_segment_name(name)) {
      names.segments.push_back(*id);
    } else if (is_unfinished(name)) {
      names.unfinished.push_back(std::move(name));
    } else if (name == kLockName || name == kCheckpointName) {
      (name == kLockName ? names.lock : names.checkpoint) = true;
    } else if (name.starts_with(kSegmentPrefix)) {
      names.unusable.push_back({std::move(name), "no segment has such a name"});
    }
  }
  std::sort(names.segments.begin(), names.segments.end());
  return names;
}

bool may_follow(std::optional<std::uint64_t> last, std::uint64_t id) {
  return last ? id <= kMaxSegmentId && id - *last <= kMaxSegmentIdStep : id <= kMaxFirstSegmentId;
}

}  // namespace kv4::tier
