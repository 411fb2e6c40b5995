#include "device.h"

#include <nanobind/stl/string.h>

#include "kv4/error.h"

namespace kv4::python {

Stream parse_stream(nb::handle stream) {
  const auto handle_of = [](nb::handle value) {
    return Stream{reinterpret_cast<void*>(nb::cast<std::uintptr_t>(value))};
  };
  if (nb::isinstance<nb::int_>(stream)) return handle_of(stream);
  if (nb::hasattr(stream, "cuda_stream")) return handle_of(stream.attr("cuda_stream"));
  if (nb::hasattr(stream, "__cuda_stream__")) return handle_of(nb::tuple(stream.attr("__cuda_stream__")())[1]);
  throw Error(ErrorCode::bad_argument,
              "stream must be an int (a cudaStream_t), a torch.cuda.Stream or an object with __cuda_stream__; got " +
                  nb::cast<std::string>(nb::str(stream.type().attr("__name__"))));
}

namespace {

// torch's current stream of a GPU, if torch is there and uses it.
std::optional<Stream> torch_stream(int cuda_index) {
  const nb::dict modules = nb::module_::import_("sys").attr("modules");
  if (!modules.contains("torch")) return std::nullopt;
  const nb::object torch = modules["torch"];
  if (!nb::hasattr(torch, "cuda")) return std::nullopt;  // its import has not finished
  const nb::object cuda = torch.attr("cuda");
  if (!nb::cast<bool>(cuda.attr("is_initialized")())) return std::nullopt;
  return parse_stream(cuda.attr("current_stream")(cuda_index));
}

}  // namespace

Stream Device::choose_stream(nb::handle named) const {
  if (!on_cuda()) return {};
  if (!named.is_none()) return parse_stream(named);
  if (pinned_) return *pinned_;
  return torch_stream(cuda_index_).value_or(Stream{current_});
}

}  // namespace kv4::python
