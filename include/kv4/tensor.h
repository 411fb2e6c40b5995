// A tensor somebody else owns: pointer, element type, shape, strides (the fields of a DLPack tensor).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

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

/// Never owns. The memory must stay valid for the call it is passed to, or longer where the call says so.
struct TensorView {
  static constexpr int kMaxDims = 4;

  void* data = nullptr;
  DType dtype = DType::f32;
  int ndim = 0;
  std::int64_t shape[kMaxDims] = {};
  std::int64_t strides[kMaxDims] = {};  // in elements

  TensorView() = default;
  /// A dense row-major tensor.
  TensorView(void* data_in, DType dtype_in, std::initializer_list<std::int64_t> dims) : data(data_in), dtype(dtype_in) {
    for (std::int64_t d : dims) {
      if (ndim == kMaxDims) break;
      shape[ndim++] = d;
    }
    std::int64_t step = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      strides[i] = step;
      step *= shape[i];
    }
  }
  /// A dense f32 tensor. The call that takes it decides whether it is written.
  TensorView(const float* p, std::initializer_list<std::int64_t> dims)
      : TensorView(const_cast<float*>(p), DType::f32, dims) {}
  /// A dense i32 tensor.
  TensorView(const std::int32_t* p, std::initializer_list<std::int64_t> dims)
      : TensorView(const_cast<std::int32_t*>(p), DType::i32, dims) {}

  bool empty() const { return data == nullptr; }  // absent: calls with optional tensors accept it
};

}  // namespace kv4
