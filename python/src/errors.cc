// kv4::Error and Shortage as the exceptions of kv4/errors.py.
#include <exception>

#include "bindings.h"
#include "kv4/error.h"

namespace kv4::python {
namespace {

const char* class_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::bad_config: return "ConfigError";
    case ErrorCode::bad_argument: return "ArgumentError";
    case ErrorCode::bad_state: return "StateError";
    case ErrorCode::bad_file: return "FileError";
    case ErrorCode::out_of_memory: return "OutOfMemoryError";
    case ErrorCode::no_device: return "NoDeviceError";
    case ErrorCode::device_failure: return "DeviceFailureError";
  }
  return "Error";
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const nb::object type = nb::module_::import_("kv4.errors").attr(class_of(error.code()));
    PyErr_SetString(type.ptr(), error.what());
  } catch (const NoRoom& error) {
    const nb::object type = nb::module_::import_("kv4.errors").attr("ShortageError");
    PyErr_SetObject(type.ptr(), type(error.what(), error.shortage).ptr());
  }
}

std::string no_room_message(Shortage shortage, const std::string& call) {
  const char* what = shortage == Shortage::requests ? "all max_requests are running"
                     : shortage == Shortage::blocks ? "too few blocks are free"
                                                    : "no spare slot is free for a long step";
  return call + ": " + what + " (Shortage." + to_string(shortage) + "); nothing has changed";
}

}  // namespace

NoRoom::NoRoom(Shortage shortage_in, const std::string& call)
    : std::runtime_error(no_room_message(shortage_in, call)), shortage(shortage_in) {}

void bind_errors(nb::module_& m) {
  nb::enum_<Shortage>(m, "Shortage", "Why there was no room; kv4.ShortageError carries one.")
      .value("none", Shortage::none)
      .value("requests", Shortage::requests)
      .value("blocks", Shortage::blocks)
      .value("slots", Shortage::slots)
      .value("cancelled", Shortage::cancelled);
  nb::register_exception_translator(translate);
}

}  // namespace kv4::python
