// progress(done, total): reports how far a long call is, while it works without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>

#include "arrays.h"

namespace kv4::python {

namespace nb = nanobind;

struct Progress : nb::object {
  NB_OBJECT_DEFAULT(Progress, nb::object, "collections.abc.Callable[[int, int], bool | None]", any_object)
};

/// Only False stops: a function that returns None goes on. A `call` of None gives no function.
inline std::function<bool(std::int64_t, std::int64_t)> progress_of(nb::handle call) {
  if (call.is_none()) return {};
  return [call](std::int64_t done, std::int64_t total) {
    const nb::gil_scoped_acquire gil;
    return !call(done, total).is(nb::bool_(false));
  };
}

}  // namespace kv4::python
