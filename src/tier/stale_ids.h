// Ids for which a tier may still have an older record, because a put or remove was refused or failed. They are misses
// until a put or remove succeeds.
//
// The set has a limit. Further ids go into a filter and never leave it: other ids may then miss, too.
#pragma once

#include <cstdint>
#include <new>
#include <unordered_set>
#include <vector>

#include "tier/requests.h"

namespace kv4::tier {

class StaleIds {
 public:
  explicit StaleIds(std::size_t limit) : limit_(limit), filter_(kFilterBits) {}

  void add(const RecordId& id) noexcept {
    if (ids_.contains(id)) return;
    try {
      if (ids_.size() < limit_) {
        ids_.insert(id);
        return;
      }
    } catch (const std::bad_alloc&) {  // the filter needs no more memory
    }
    filter_[bit_of(id)] = filter_used_ = true;
  }
  /// The last put or remove of the id has succeeded.
  void settle(const RecordId& id) { ids_.erase(id); }
  bool has(const RecordId& id) const {
    return (filter_used_ && filter_[bit_of(id)]) || (!ids_.empty() && ids_.contains(id));
  }
  std::size_t size() const { return ids_.size(); }

 private:
  static constexpr std::size_t kFilterBits = std::size_t{1} << 20;
  static std::size_t bit_of(const RecordId& id) { return RecordIdHash()(id) % kFilterBits; }

  std::size_t limit_;
  std::unordered_set<RecordId, RecordIdHash> ids_;
  std::vector<bool> filter_;
  bool filter_used_ = false;
};

}  // namespace kv4::tier
