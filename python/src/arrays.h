// Arrays in and out without copies: DLPack and the buffer protocol on one side, TensorView on the other.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "device.h"
#include "kv4/tensor.h"

namespace kv4::python {

inline bool any_object(PyObject*) { return true; }

/// Objects that offer their memory, and other arguments, for signatures. The calls that use them check their type, so
/// that the message can name them.
struct ArrayLike : nb::object {
  NB_OBJECT_DEFAULT(ArrayLike, nb::object, "kv4.typing.ArrayLike", any_object)
};
struct TokenIds : nb::object {
  NB_OBJECT_DEFAULT(TokenIds, nb::object, "collections.abc.Sequence[int] | kv4.typing.ArrayLike", any_object)
};
struct Slots : nb::object {
  NB_OBJECT_DEFAULT(Slots, nb::object, "collections.abc.Sequence[int] | kv4.typing.ArrayLike", any_object)
};
struct StreamLike : nb::object {
  NB_OBJECT_DEFAULT(StreamLike, nb::object, "kv4.typing.Stream", any_object)
};
/// The result of a call: a NumPy array, a torch tensor, or an object for from_dlpack.
struct AnyArray : nb::object {
  NB_OBJECT_DEFAULT(AnyArray, nb::object, "typing.Any", any_object)
  AnyArray(nb::object array) : nb::object(std::move(array)) {}
};
template <class... Arrays>
nb::typed<nb::tuple, Arrays...> array_tuple(const Arrays&... arrays) {
  return nb::borrow<nb::typed<nb::tuple, Arrays...>>(nb::make_tuple(arrays...));
}

/// The arrays of one call, held until it has returned.
class Arguments {
 public:
  explicit Arguments(const Device& device, Stream stream = {}) : device_(device), stream_(stream) {}

  /// None gives an empty view. Throws Error(bad_argument) if the object is no array, lies elsewhere than the cache, or
  /// has a type that no call takes.
  ConstTensorView in(nb::handle object, const char* name);
  /// The same; the array must be writable.
  TensorView out(nb::handle object, const char* name);
  /// Gives up the held objects, to be kept longer.
  std::vector<nb::ndarray<nb::ro>> take() { return std::move(held_); }

 private:
  nb::object source(nb::handle object, const char* name) const;
  ConstTensorView hold(nb::ndarray<nb::ro> array, const char* name);

  const Device& device_;
  Stream stream_;
  std::vector<nb::ndarray<nb::ro>> held_;
};

/// Dense uint8 memory of the host: bytes, a NumPy array, a torch CPU tensor.
struct HostBytes {
  nb::ndarray<nb::ro> held;
  std::span<const std::byte> bytes;
};
HostBytes host_bytes(nb::handle object, const char* name);
/// The same, writable.
struct HostOutput {
  nb::ndarray<> held;
  std::span<std::byte> bytes;
};
HostOutput host_output(nb::handle object, const char* name);
/// The same; the memory must be exactly `size` long.
HostOutput host_output(nb::handle object, std::int64_t size, const char* name);

using Shape = std::vector<std::int64_t>;

/// A new array where the cache is: a torch tensor if `like` is one or the cache is on a GPU, else NumPy's.
nb::object new_array(const Device& device, nb::handle like, const Shape& shape, DType dtype);
/// A new uint8 NumPy array.
nb::object new_bytes(const Shape& shape);

/// Memory of the cache as an array: NumPy's on the CPU, on a GPU an object for from_dlpack. The array keeps `owner`
/// alive.
nb::object export_memory(const Device& device, const void* data, const Shape& shape, const Shape& strides, DType dtype,
                         nb::handle owner);

/// A vector as a NumPy array that owns it.
template <class T>
nb::object own_array(std::vector<T> values, std::initializer_list<std::size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(kept->data(), shape, owner));
}
template <class T>
nb::object own_array(std::vector<T> values) {
  const std::size_t size = values.size();
  return own_array(std::move(values), {size});
}

/// Takes any sequence of ints, or an int32 or int64 array [n] of the host.
std::vector<std::int32_t> token_ids_of(nb::handle object);
std::vector<std::int64_t> slots_of(nb::handle object);

}  // namespace kv4::python
