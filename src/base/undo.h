#pragma once

#include <utility>

namespace kv4 {

/// Calls `action` if the scope is left before keep(). `action` must not throw.
template <class Action>
class Undo {
 public:
  explicit Undo(Action action) : action_(std::move(action)) {}
  ~Undo() {
    if (armed_) action_();
  }
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;

  void keep() { armed_ = false; }

 private:
  Action action_;
  bool armed_ = true;
};

}  // namespace kv4
