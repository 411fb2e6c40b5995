// One function per topic, each in the file of that name; later ones use the types of earlier ones.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "kv4/kv_cache_manager.h"

namespace kv4::python {

namespace nb = nanobind;

void bind_errors(nb::module_& m);
void bind_model(nb::module_& m);
void bind_options(nb::module_& m);
void bind_schema(nb::module_& m);
void bind_pools(nb::module_& m);
void bind_views(nb::module_& m);
void bind_layer(nb::module_& m);
void bind_prefix(nb::module_& m);
void bind_statistics(nb::module_& m);
void bind_manager(nb::module_& m);
void bind_keys(nb::module_& m);
void bind_sessions(nb::module_& m);
void bind_tiers(nb::module_& m);
void bind_chunks(nb::module_& m);
void bind_status(nb::module_& m);
void bind_foreign_pages(nb::module_& m);
void bind_log(nb::module_& m);
void bind_tensor_calls(nb::module_& m);

/// Becomes kv4.ShortageError.
struct NoRoom : std::runtime_error {
  NoRoom(Shortage shortage_in, const std::string& call);
  Shortage shortage;
};

template <class T>
T value_or_raise(Expected<T> expected, const char* call) {
  if (!expected) throw NoRoom(expected.error(), call);
  return *expected;
}

/// Makes a record from its attributes by keyword: Record(name=value, ...).
template <class T, class Class>
void def_keyword_init(Class& record) {
  record.def(
      "__init__",
      [](nb::pointer_and_handle<T> self, const nb::kwargs& fields) {
        new (self.p) T();
        nb::inst_mark_ready(self.h);
        for (const auto& [name, value] : fields) {
          if (!nb::hasattr(self.h, name))
            throw nb::type_error(("there is no attribute " + nb::cast<std::string>(nb::str(name))).c_str());
          nb::setattr(self.h, name, value);
        }
      },
      nb::arg("fields"), nb::sig("def __init__(self, **fields: Any) -> None"),
      "Any attribute by its name; the others keep their defaults.");
}

}  // namespace kv4::python
