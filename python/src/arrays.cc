#include "arrays.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <string>

#include "kv4/error.h"

namespace kv4::python {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::bad_argument, message); }

std::string class_name(nb::handle object) {
  return nb::cast<std::string>(nb::str(object.type().attr("__module__"))) + "." +
         nb::cast<std::string>(nb::str(object.type().attr("__name__")));
}

bool is_torch(nb::handle object) { return !object.is_none() && class_name(object).starts_with("torch."); }

using Code = nb::dlpack::dtype_code;

bool is_type(nb::dlpack::dtype type, Code code, int bits) {
  return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
}

// NumPy has no bfloat16: uint16 holds its bits.
std::optional<DType> dtype_of(nb::dlpack::dtype type) {
  if (is_type(type, Code::Float, 32)) return DType::f32;
  if (is_type(type, Code::Bfloat, 16) || is_type(type, Code::UInt, 16)) return DType::bf16;
  if (is_type(type, Code::Int, 32)) return DType::i32;
  if (is_type(type, Code::UInt, 8) || is_type(type, Code::Bool, 8)) return DType::u8;
  return std::nullopt;
}

std::string dtype_text(nb::dlpack::dtype type) {
  const char* code = "code ";
  switch (static_cast<Code>(type.code)) {
    case Code::Int: code = "int"; break;
    case Code::UInt: code = "uint"; break;
    case Code::Float: code = "float"; break;
    case Code::Bfloat: code = "bfloat"; break;
    case Code::Complex: code = "complex"; break;
    case Code::Bool: code = "bool"; break;
    default: return code + std::to_string(type.code) + " of " + std::to_string(type.bits) + " bits";
  }
  return code + std::to_string(type.bits);
}

std::string place_text(int type, int index) {
  if (type == nb::device::cpu::value || type == nb::device::cuda_host::value) return "cpu";
  if (type == nb::device::cuda::value) return "cuda:" + std::to_string(index);
  return "DLPack device " + std::to_string(type) + ":" + std::to_string(index);
}

nb::dlpack::dtype dlpack_dtype(DType type) {
  switch (type) {
    case DType::f32: return nb::dtype<float>();
    case DType::bf16: return nb::dtype<std::uint16_t>();
    case DType::i32: return nb::dtype<std::int32_t>();
    case DType::u8: break;
  }
  return nb::dtype<std::uint8_t>();
}

template <class Array>
bool dense(const Array& array) {
  std::int64_t step = 1;
  for (std::size_t d = array.ndim(); d-- > 0;) {
    if (array.shape(d) != 1 && array.stride(d) != step) return false;
    step *= static_cast<std::int64_t>(array.shape(d));
  }
  return true;
}

template <class Array>
Array host_array(nb::handle object, const char* name, const char* what) {
  Array array;
  if (!nb::try_cast<Array>(object, array))
    refuse(std::string(name) + " must be " + what +
           " uint8 memory of the host (NumPy, bytes, a torch CPU tensor); got " + class_name(object));
  const std::string place = place_text(array.device_type(), array.device_id());
  if (place != "cpu") refuse(std::string(name) + " must be on the cpu; it is on " + place);
  if (!is_type(array.dtype(), Code::UInt, 8))
    refuse(std::string(name) + " must be uint8; its dtype is " + dtype_text(array.dtype()));
  if (!dense(array)) refuse(std::string(name) + " must be dense, last dimension fastest");
  return array;
}

}  // namespace

// On a GPU the producer gets our stream, so that its pending work comes before ours. If that is its own current stream
// it does nothing, which a graph capture needs.
nb::object Arguments::source(nb::handle object, const char* name) const {
  if (!device_.on_cuda() || !nb::hasattr(object, "__dlpack_device__")) return nb::borrow(object);
  if (nb::cast<int>(nb::tuple(object.attr("__dlpack_device__")())[0]) != nb::device::cuda::value)
    return nb::borrow(object);  // no stream elsewhere; hold() names the place
  const std::intptr_t handle = reinterpret_cast<std::intptr_t>(stream_.handle);
  const std::intptr_t stream = handle == 0 ? 1 : handle;  // DLPack's name for the default stream
  try {
    // A torch tensor that requires grad gives its memory only after detach().
    const nb::object plain = nb::hasattr(object, "detach") ? object.attr("detach")() : nb::borrow(object);
    return plain.attr("__dlpack__")(nb::arg("stream") = stream);
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_TypeError) || error.matches(PyExc_BufferError) || error.matches(PyExc_ValueError))
      refuse(std::string(name) + " must be on " + device_.name() + "; " + class_name(object) +
             " does not give its memory: " + error.what());
    throw;
  }
}

ConstTensorView Arguments::hold(nb::ndarray<nb::ro> array, const char* name) {
  const std::string place = place_text(array.device_type(), array.device_id());
  if (place != device_.name())
    refuse(std::string(name) + " must be where the cache is, on " + device_.name() + "; it is on " + place);
  const std::optional<DType> dtype = dtype_of(array.dtype());
  if (!dtype)
    refuse(std::string(name) + " must be float32, bfloat16 (or uint16 with its bits), int32 or uint8; its dtype is " +
           dtype_text(array.dtype()));
  if (array.ndim() > TensorView::kMaxDims)
    refuse(std::string(name) + " has " + std::to_string(array.ndim()) + " dimensions; at most " +
           std::to_string(TensorView::kMaxDims) + " are allowed");
  ConstTensorView view;
  view.data = array.data();
  view.dtype = *dtype;
  view.ndim = static_cast<int>(array.ndim());
  for (std::size_t d = 0; d < array.ndim(); ++d) {
    view.shape[d] = static_cast<std::int64_t>(array.shape(d));
    view.strides[d] = array.stride(d);
  }
  held_.push_back(std::move(array));
  return view;
}

ConstTensorView Arguments::in(nb::handle object, const char* name) {
  if (object.is_none()) return {};
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast<nb::ndarray<nb::ro>>(source(object, name), array))
    refuse(std::string(name) +
           " must be an array: NumPy's, a torch tensor, or another one with DLPack or the "
           "buffer protocol; got " +
           class_name(object));
  return hold(std::move(array), name);
}

TensorView Arguments::out(nb::handle object, const char* name) {
  if (object.is_none()) return {};
  nb::ndarray<> array;
  if (!nb::try_cast<nb::ndarray<>>(source(object, name), array))
    refuse(std::string(name) + " must be a writable array (DLPack or the buffer protocol); got " + class_name(object));
  void* const memory = array.data();
  return hold(nb::ndarray<nb::ro>(array), name).over(memory);
}

HostBytes host_bytes(nb::handle object, const char* name) {
  HostBytes out{host_array<nb::ndarray<nb::ro>>(object, name, "dense"), {}};
  out.bytes = {static_cast<const std::byte*>(out.held.data()), out.held.size()};
  return out;
}

HostOutput host_output(nb::handle object, const char* name) {
  HostOutput out{host_array<nb::ndarray<>>(object, name, "writable dense"), {}};
  out.bytes = {static_cast<std::byte*>(out.held.data()), out.held.size()};
  return out;
}

HostOutput host_output(nb::handle object, std::int64_t size, const char* name) {
  HostOutput out = host_output(object, name);
  if (static_cast<std::int64_t>(out.bytes.size()) != size)
    refuse(std::string(name) + " must be " + std::to_string(size) + " bytes; it is " +
           std::to_string(out.bytes.size()));
  return out;
}

nb::object new_array(const Device& device, nb::handle like, const Shape& shape, DType dtype) {
  if (device.on_cuda() || is_torch(like)) {
    static constexpr const char* kNames[] = {"float32", "bfloat16", "int32", "uint8"};
    const nb::object torch = nb::module_::import_("torch");
    return torch.attr("empty")(nb::cast(shape), nb::arg("dtype") = torch.attr(kNames[static_cast<int>(dtype)]),
                               nb::arg("device") = device.name());
  }
  static constexpr const char* kNames[] = {"float32", "uint16", "int32", "uint8"};
  return nb::module_::import_("numpy").attr("empty")(nb::cast(shape),
                                                     nb::arg("dtype") = kNames[static_cast<int>(dtype)]);
}

nb::object new_bytes(const Shape& shape) {
  return nb::module_::import_("numpy").attr("empty")(nb::cast(shape), nb::arg("dtype") = "uint8");
}

nb::object export_memory(const Device& device, const void* data, const Shape& shape, const Shape& strides, DType dtype,
                         nb::handle owner) {
  const std::vector<std::size_t> sizes(shape.begin(), shape.end());
  void* memory = const_cast<void*>(data);
  if (device.on_cuda())
    return nb::cast(nb::ndarray<nb::device::cuda>(memory, sizes.size(), sizes.data(), owner, strides.data(),
                                                  dlpack_dtype(dtype), nb::device::cuda::value, device.cuda_index()));
  return nb::cast(
      nb::ndarray<nb::numpy>(memory, sizes.size(), sizes.data(), owner, strides.data(), dlpack_dtype(dtype)));
}

namespace {

template <class Int>
std::vector<Int> ints_of(nb::handle object, const char* name) {
  const std::string bits = std::to_string(8 * sizeof(Int)) + " bits";
  nb::ndarray<nb::ro> array;
  if (nb::ndarray_check(object) && nb::try_cast<nb::ndarray<nb::ro>>(object, array)) {
    const bool is_i32 = is_type(array.dtype(), Code::Int, 32), is_i64 = is_type(array.dtype(), Code::Int, 64);
    const std::string place = place_text(array.device_type(), array.device_id());
    if (array.ndim() != 1 || !(is_i32 || is_i64) || place != "cpu")
      refuse(std::string(name) + " must be ints, or an int32 or int64 array [n] on the cpu; got " +
             dtype_text(array.dtype()) + " with " + std::to_string(array.ndim()) + " dimensions on " + place);
    std::vector<Int> ints(array.shape(0));
    for (std::size_t i = 0; i < ints.size(); ++i) {
      const std::int64_t at = static_cast<std::int64_t>(i) * array.stride(0);
      const std::int64_t value = is_i32 ? static_cast<const std::int32_t*>(array.data())[at]
                                        : static_cast<const std::int64_t*>(array.data())[at];
      if (value < std::numeric_limits<Int>::min() || value > std::numeric_limits<Int>::max())
        refuse(std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(value) + " does not fit " + bits);
      ints[i] = static_cast<Int>(value);
    }
    return ints;
  }
  std::vector<Int> ints;
  if (!nb::try_cast<std::vector<Int>>(object, ints))
    refuse(std::string(name) + " must be ints of " + bits + ", or an int32 or int64 array [n]; got " +
           class_name(object));
  return ints;
}

}  // namespace

std::vector<std::int32_t> token_ids_of(nb::handle object) {
  return object.is_none() ? std::vector<std::int32_t>{} : ints_of<std::int32_t>(object, "token_ids");
}

std::vector<std::int64_t> slots_of(nb::handle object) { return ints_of<std::int64_t>(object, "slots"); }

}  // namespace kv4::python
