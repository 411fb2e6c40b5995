#include "tensors.h"

#include <nanobind/stl/string.h>

#include "kv4/error.h"

namespace kv4::python {
namespace {

// The structs of DLPack 1.2 (dmlc/dlpack, dlpack.h), as far as this file reads them.
struct DlDevice {
  std::int32_t type, index;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
static_assert(sizeof(DlTensor) == 48);
struct DlExchange {
  std::uint32_t major, minor;
  void* previous;
  void* allocate;
  void* to_managed;
  void* from_managed;
  int (*read)(void* object, DlTensor* out);  // no reference is taken: `out` is valid as long as the object
  int (*current_stream)(std::int32_t device_type, std::int32_t device, void** out);
};
constexpr int kCpu = 1, kCuda = 2;

struct Torch {
  PyTypeObject* tensor = nullptr;
  const DlExchange* exchange = nullptr;
};

Torch load_torch() {
  const nb::object type = nb::module_::import_("torch").attr("Tensor");
  constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
  if (!nb::hasattr(type, kAttribute))
    throw Error(ErrorCode::bad_state, std::string("this torch is too old: its tensors have no ") + kAttribute +
                                          "; kv4.torch is tested with torch 2.13");
  const nb::object capsule = type.attr(kAttribute);
  Torch torch;
  torch.tensor = reinterpret_cast<PyTypeObject*>(type.ptr());  // lives as long as torch does
  torch.exchange = static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (torch.exchange == nullptr || torch.exchange->major != 1) {
    PyErr_Clear();
    throw Error(ErrorCode::bad_state, "torch's tensors speak another version of DLPack than 1.x");
  }
  return torch;
}

const Torch& torch() {
  static const Torch loaded = load_torch();
  return loaded;
}

Element element_of(const DlTensor& t) {
  enum { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6, kE4m3 = 10, kE8m0 = 14 };
  if (t.lanes != 1) return Element::other;
  switch (t.code << 8 | t.bits) {
    case kFloat << 8 | 32: return Element::f32;
    case kFloat << 8 | 16: return Element::f16;
    case kBfloat << 8 | 16: return Element::bf16;
    case kInt << 8 | 32: return Element::i32;
    case kInt << 8 | 64: return Element::i64;
    case kUInt << 8 | 8: return Element::u8;
    case kInt << 8 | 8: return Element::i8;
    case kE4m3 << 8 | 8: return Element::e4m3;
    case kE8m0 << 8 | 8: return Element::e8m0;
    case kBool << 8 | 8: return Element::boolean;
    default: return Element::other;
  }
}

/// "torch.int64"
std::string dtype_text(nb::handle tensor) {
  const nb::object dtype = tensor.attr("dtype");
  return nb::cast<std::string>(nb::steal<nb::str>(PyObject_Str(dtype.ptr())));
}

std::string place_text(DlDevice device) {
  if (device.type == kCpu) return "cpu";
  if (device.type == kCuda) return "cuda:" + std::to_string(device.index);
  return "device type " + std::to_string(device.type);
}

}  // namespace

const char* element_name(Element element) {
  switch (element) {
    case Element::f32: return "float32";
    case Element::f16: return "float16";
    case Element::bf16: return "bfloat16";
    case Element::i32: return "int32";
    case Element::i64: return "int64";
    case Element::u8: return "uint8";
    case Element::i8: return "int8";
    case Element::e4m3: return "float8_e4m3fn";
    case Element::e8m0: return "float8_e8m0fnu";
    case Element::boolean: return "bool";
    case Element::other: break;
  }
  return "another type";
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int d = 0; d < tensor.ndim; ++d) text += (d > 0 ? ", " : "") + std::to_string(tensor.shape[d]);
  return text + "]";
}

std::int64_t Tensor::element_bytes() const {
  switch (element) {
    case Element::f32:
    case Element::i32: return 4;
    case Element::i64: return 8;
    case Element::f16:
    case Element::bf16: return 2;
    default: return 1;
  }
}

bool Tensor::is_dense(int first) const {
  std::int64_t step = 1;
  for (int d = ndim - 1; d >= first; --d) {
    if (shape[d] != 1 && strides[d] != step) return false;
    step *= shape[d];
  }
  return true;
}

std::int64_t Tensor::row_stride(int first) const {
  std::int64_t stride = -1, step = 0;
  for (int d = first - 1; d >= 0; --d) {
    if (shape[d] == 1) continue;
    if (stride < 0)
      stride = strides[d];
    else if (strides[d] != step)
      return -1;
    step = strides[d] * shape[d];
  }
  if (stride >= 0) return stride;
  std::int64_t dense = 1;  // one row: any stride does
  for (int d = first; d < ndim; ++d) dense *= shape[d];
  return dense;
}

std::int64_t Tensor::rows(int first) const {
  std::int64_t rows = 1;
  for (int d = 0; d < first; ++d) rows *= shape[d];
  return rows;
}

void TensorCall::refuse(const char* name, const std::string& rule) const {
  throw Error(ErrorCode::bad_argument, std::string(operation_) + ": " + name + " " + rule);
}

void TensorCall::require_shape(const Tensor& tensor, std::initializer_list<std::int64_t> shape) const {
  bool same = tensor.ndim == static_cast<int>(shape.size());
  int d = 0;
  for (const std::int64_t size : shape) same = same && tensor.shape[d++] == size;
  if (same) return;
  Tensor wanted;
  wanted.ndim = static_cast<int>(shape.size());
  d = 0;
  for (const std::int64_t size : shape) wanted.shape[d++] = size;
  refuse(tensor.name, "must have the shape " + shape_text(wanted) + "; got " + shape_text(tensor));
}

Tensor TensorCall::read(nb::handle object, const char* name, const Rule& rule) {
  const Torch& library = torch();
  if (Py_TYPE(object.ptr()) != library.tensor && !PyType_IsSubtype(Py_TYPE(object.ptr()), library.tensor))
    refuse(name, "must be a torch.Tensor; got " + nb::cast<std::string>(nb::str(object.type().attr("__name__"))));
  DlTensor t;
  if (library.exchange->read(object.ptr(), &t) != 0) throw nb::python_error();

  Tensor tensor;
  tensor.name = name;
  tensor.object = object;
  tensor.is_there = true;
  tensor.element = element_of(t);
  bool known = false;
  for (const Element element : rule.elements) known = known || element == tensor.element;
  if (!known) {
    std::string allowed;
    for (const Element element : rule.elements)
      allowed += (allowed.empty() ? "" : " or ") + std::string(element_name(element));
    refuse(name, "must be " + allowed + "; got " + dtype_text(object));
  }
  if (t.ndim < rule.min_dims || t.ndim > rule.max_dims) {
    const std::string dims = rule.min_dims == rule.max_dims
                                 ? std::to_string(rule.min_dims)
                                 : std::to_string(rule.min_dims) + " to " + std::to_string(rule.max_dims);
    refuse(name, "must have " + dims + " dimensions; got " + std::to_string(t.ndim));
  }
  const int device = t.device.type == kCuda ? t.device.index : -1;
  if (t.device.type != kCuda && t.device.type != kCpu)
    refuse(name, "must be on the CPU or on a CUDA device; got " + place_text(t.device));
  if (device_ == kUnknown) {
    device_ = device;
    first_ = object;
  }
  if (device_ != device)
    refuse(name, "must be on " + (on_cuda() ? "cuda:" + std::to_string(device_) : std::string("cpu")) +
                     " as the arguments before it; got " + place_text(t.device));
  tensor.data = static_cast<std::uint8_t*>(t.data) + t.byte_offset;
  tensor.ndim = t.ndim;
  for (int d = 0; d < t.ndim; ++d) {
    tensor.shape[d] = t.shape[d];
    tensor.strides[d] = t.strides[d];
  }
  return tensor;
}

Tensor TensorCall::in(nb::handle object, const char* name, const Rule& rule) { return read(object, name, rule); }

Tensor TensorCall::optional(nb::handle object, const char* name, const Rule& rule) {
  if (!object.is_none()) return read(object, name, rule);
  Tensor none;
  none.name = name;
  return none;
}

Tensor TensorCall::rows(nb::handle object, const char* name, const Rule& rule, int dense_from) {
  const Tensor tensor = read(object, name, rule);
  const int first = dense_from >= 0 ? dense_from : tensor.ndim + dense_from;
  if (tensor.is_dense(first) && tensor.row_stride(first) >= 0) return tensor;
  held_.push_back(nb::borrow(object).attr("contiguous")());
  return read(held_.back(), name, rule);
}

Tensor TensorCall::optional_rows(nb::handle object, const char* name, const Rule& rule, int dense_from) {
  return object.is_none() ? optional(object, name, rule) : rows(object, name, rule, dense_from);
}

Tensor TensorCall::out(nb::handle object, const char* name, const Rule& rule) {
  const Tensor tensor = read(object, name, rule);
  if (tensor.is_dense()) return tensor;
  nb::object dense = nb::borrow(object).attr("contiguous")();
  to_finish_.emplace_back(dense, nb::borrow(object));
  return read(dense, name, rule);
}

Tensor TensorCall::optional_out(nb::handle object, const char* name, const Rule& rule) {
  return object.is_none() ? optional(object, name, rule) : out(object, name, rule);
}

void TensorCall::finish() {
  for (const auto& [written, wanted] : to_finish_) wanted.attr("copy_")(written);
}

std::uint8_t* TensorCall::scratch(std::int64_t bytes) {
  static const nb::handle type = nb::object(nb::module_::import_("torch").attr("uint8")).release();
  held_.push_back(nb::borrow(first_).attr("new_empty")(bytes, nb::arg("dtype") = type));
  return read(held_.back(), "scratch", {{Element::u8}, 1, 1}).data;
}

Stream TensorCall::stream() const {
  if (!on_cuda()) return {};
  Stream stream;
  if (torch().exchange->current_stream(kCuda, device_, &stream.handle) != 0) throw nb::python_error();
  return stream;
}

}  // namespace kv4::python
