// A tensor without ownership: pointer, element type, shape, strides (the fields of a DLPack tensor).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "kv4/export.h"

namespace kv4 {

/// Element types that calls take; each call says which.
enum class DType : std::uint8_t { f32, bf16, i32, u8 };

/// The enumerator's name: "f32", ...
KV4_API const char* to_string(DType type);

/// Size of one element.
constexpr std::size_t element_bytes(DType type) {
  return type == DType::f32 || type == DType::i32 ? 4 : type == DType::bf16 ? 2 : 1;
}

/// Error(bad_argument): a tensor has at most TensorView::kMaxDims dimensions.
[[noreturn]] KV4_API void throw_too_many_dims(std::size_t dims);

/// Never owns. The memory must stay valid for the call it is passed to, or longer where the call says so. `Void`: void,
/// or const void where the memory is only read.
template <class Void>
struct BasicTensorView {
  static constexpr int kMaxDims = 4;
  template <class T>
  using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;  // const where the memory is only read

  Void* data = nullptr;
  DType dtype = DType::f32;
  int ndim = 0;
  std::int64_t shape[kMaxDims] = {};
  std::int64_t strides[kMaxDims] = {};  // in elements

  BasicTensorView() = default;
  /// A dense row-major tensor. Throws Error(bad_argument) for more than kMaxDims dimensions.
  BasicTensorView(Void* data_in, DType dtype_in, std::initializer_list<std::int64_t> dims)
      : data(data_in), dtype(dtype_in) {
    if (dims.size() > kMaxDims) throw_too_many_dims(dims.size());
    for (std::int64_t d : dims) shape[ndim++] = d;
    std::int64_t step = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      strides[i] = step;
      step *= shape[i];
    }
  }
  /// A dense f32 tensor.
  BasicTensorView(Element<float>* p, std::initializer_list<std::int64_t> dims)
      : BasicTensorView(static_cast<Void*>(p), DType::f32, dims) {}
  /// A dense i32 tensor.
  BasicTensorView(Element<std::int32_t>* p, std::initializer_list<std::int64_t> dims)
      : BasicTensorView(static_cast<Void*>(p), DType::i32, dims) {}
  /// A view to write converts to a view to read.
  template <class Other>
  requires(std::is_const_v<Void> && !std::is_const_v<Other>) BasicTensorView(const BasicTensorView<Other>& tensor)
      : BasicTensorView(tensor.over(static_cast<Void*>(tensor.data))) {}

  /// The same type, shape and strides in other memory. `Other`: void or const void.
  template <class Other>
  BasicTensorView<Other> over(Other* memory) const {
    BasicTensorView<Other> out;
    out.data = memory;
    out.dtype = dtype;
    out.ndim = ndim;
    for (int i = 0; i < kMaxDims; ++i) {
      out.shape[i] = shape[i];
      out.strides[i] = strides[i];
    }
    return out;
  }

  bool empty() const { return data == nullptr; }  // absent: calls with optional tensors accept it
};

/// A tensor that a call writes.
using TensorView = BasicTensorView<void>;
/// A tensor that a call only reads; every TensorView is one, too.
using ConstTensorView = BasicTensorView<const void>;

}  // namespace kv4
