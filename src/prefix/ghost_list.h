// Ghosts of evicted blocks, by the fingerprints of their keys. The oldest are forgotten first.
#pragma once

#include <cstdint>
#include <deque>
#include <new>
#include <optional>
#include <unordered_map>

namespace kv4 {

template <class What>
class GhostList {
 public:
  explicit GhostList(std::int64_t capacity) : capacity_(capacity) {}

  /// Where memory is refused, the ghost is not kept: the block is evicted all the same.
  void remember(std::uint64_t fingerprint, const What& what) noexcept {
    try {
      order_.push_back(fingerprint);
      ghosts_[fingerprint] = {first_ + order_.size() - 1, what};
    } catch (const std::bad_alloc&) {
    }
    while (static_cast<std::int64_t>(order_.size()) > capacity_) {
      const auto found = ghosts_.find(order_.front());
      if (found != ghosts_.end() && found->second.number == first_) ghosts_.erase(found);
      order_.pop_front();
      ++first_;
    }
  }

  /// Returns the ghost and forgets it.
  std::optional<What> recall(std::uint64_t fingerprint) {
    const auto found = ghosts_.find(fingerprint);
    if (found == ghosts_.end()) return std::nullopt;
    const What out = found->second.what;
    ghosts_.erase(found);
    return out;
  }

 private:
  struct Ghost {
    std::uint64_t number = 0;  // in the order of age
    What what;
  };
  // recall() erases a ghost from ghosts_ and leaves its place in order_. A place counts only if ghosts_ has its number.
  std::int64_t capacity_;
  std::deque<std::uint64_t> order_;
  std::uint64_t first_ = 0;  // number of order_.front()
  std::unordered_map<std::uint64_t, Ghost> ghosts_;
};

}  // namespace kv4
