// torch's tensors in calls that must be lean: read through the C functions that torch offers to other libraries
// (DLPack's exchange interface), without references and without a Python call per tensor. The module does not link
// torch.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "kv4/backend.h"
#include "kv4/params.h"
#include "kv4/tensor.h"

namespace kv4::python {

namespace nb = nanobind;

/// Element types of tensors that calls meet.
enum class Element : std::uint8_t { f32, f16, bf16, i32, i64, u8, i8, e4m3, e8m0, boolean, other };

/// A tensor of a call: its memory, not its owner. data null: the argument is None.
struct Tensor {
  static constexpr int kMaxDims = 4;

  const char* name = "";
  nb::handle object;
  std::uint8_t* data = nullptr;
  bool is_there = false;
  Element element = Element::other;
  int ndim = 0;
  std::int64_t shape[kMaxDims] = {};
  std::int64_t strides[kMaxDims] = {};  // in elements

  explicit operator bool() const { return is_there; }
  std::int64_t last() const { return shape[ndim - 1]; }
  std::int64_t element_bytes() const;
  /// Whether the dimensions from `first` on are row-major without gaps.
  bool is_dense(int first = 0) const;
  /// The stride of the dimensions before `first` as one; -1: they are not one.
  std::int64_t row_stride(int first) const;
  /// Product of the dimensions before `first`.
  std::int64_t rows(int first) const;
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

/// "[2, 3]"
std::string shape_text(const Tensor& tensor);
const char* element_name(Element element);

/// The tensors of one call of an operation: all on one device. Refusals name the operation and the argument.
class TensorCall {
 public:
  explicit TensorCall(const char* operation) : operation_(operation) {}

  /// A tensor of one of these types, with min_dims to max_dims dimensions.
  struct Rule {
    std::initializer_list<Element> elements;
    int min_dims, max_dims;
  };
  Tensor in(nb::handle object, const char* name, const Rule& rule);
  /// The same; None is allowed.
  Tensor optional(nb::handle object, const char* name, const Rule& rule);
  /// A tensor that is read as rows whose dimensions from `dense_from` on are dense and whose other dimensions are one:
  /// it is copied where it is not so.
  Tensor rows(nb::handle object, const char* name, const Rule& rule, int dense_from);
  Tensor optional_rows(nb::handle object, const char* name, const Rule& rule, int dense_from);
  /// An output; a dense one is made in its place if it is not dense, and copied back by finish().
  Tensor out(nb::handle object, const char* name, const Rule& rule);
  Tensor optional_out(nb::handle object, const char* name, const Rule& rule);
  void finish();
  /// Memory for the call, where its tensors are: torch's, which a CUDA graph may capture.
  std::uint8_t* scratch(std::int64_t bytes);

  bool on_cuda() const { return device_ >= 0; }
  int device() const { return device_; }
  Stream stream() const;  // torch's current one

  /// Throws Error(bad_argument): "attend: q must ...".
  [[noreturn]] void refuse(const char* name, const std::string& rule) const;
  void require_shape(const Tensor& tensor, std::initializer_list<std::int64_t> shape) const;

 private:
  Tensor read(nb::handle object, const char* name, const Rule& rule);

  const char* operation_;
  nb::handle first_;  // a tensor of the call
  int device_ = kUnknown;
  static constexpr int kUnknown = -2;
  std::vector<nb::object> held_;                              // copies
  std::vector<std::pair<nb::object, nb::object>> to_finish_;  // outputs: what the call wrote, where it belongs
};

}  // namespace kv4::python
