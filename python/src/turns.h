// Turns: calls on one object of the library run without the GIL and one at a time.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>

namespace kv4::python {

namespace nb = nanobind;

class Turns {
 public:
  /// Runs `call` in a turn, without the GIL. It must touch no Python object.
  template <class Call>
  auto work(Call&& call) {
    const nb::gil_scoped_release no_gil;
    return inside(call);
  }
  /// The same for a caller that has released the GIL.
  template <class Call>
  auto inside(Call&& call) {
    const Turn turn(*this);
    return call();
  }
  /// For destructors: waits for its turn, and may be called inside one.
  template <class Call>
  void at_end(Call&& call) {
    const nb::gil_scoped_release no_gil;
    at_end_inside(call);
  }
  template <class Call>
  void at_end_inside(Call&& call) {
    const std::lock_guard lock(mutex_);
    call();
  }

 private:
  // A call must not be entered again from its own callback: its objects are in the middle of a change.
  class Turn {
   public:
    explicit Turn(Turns& turns);
    ~Turn() { turns_.busy_ = false; }

   private:
    Turns& turns_;
    std::unique_lock<std::recursive_mutex> lock_;
  };

  std::recursive_mutex mutex_;
  bool busy_ = false;  // under mutex_
};

}  // namespace kv4::python
