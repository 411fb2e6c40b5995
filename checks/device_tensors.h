// Host tensors in memory that a backend can reach, and a backend's memory in the host's. On a host backend both are the
// tensors themselves: nothing is copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/device_memory.h"
#include "base/aligned_vector.h"
#include "kv4/backend.h"
#include "kv4/layer_cache_handle.h"
#include "kv4/tensor.h"

namespace kv4::checks {

/// `device`: cpu, cuda or cuda:N. Throws Error(bad_argument) for another name, Error(no_device) with the reason where
/// that GPU cannot be used.
std::shared_ptr<Backend> make_backend(const std::string& device, int threads = 1);

/// Dense host tensors as an operation's inputs and outputs. Views hold until clear() or the end; memory is kept.
class DeviceTensors {
 public:
  explicit DeviceTensors(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}

  /// A copy of `host`; an empty tensor stays empty.
  ConstTensorView in(const ConstTensorView& host);
  LayerWeights in(const LayerWeights& host);
  AppendInputs in(const AppendInputs& host);
  /// A tensor of `host`'s size and contents; read_back() copies the result to `host`.
  TensorView out(const TensorView& host);
  void read_back();
  void clear();

 private:
  struct Output {
    TensorView device, host;
  };
  std::byte* take(std::int64_t bytes);
  void* copy(const ConstTensorView& host);

  std::shared_ptr<Backend> backend_;
  std::vector<DeviceMemory> chunks_;
  std::size_t chunk_ = 0;  // the chunk being filled
  std::int64_t used_ = 0;  // bytes used of that chunk
  std::vector<Output> outputs_;
};

/// Copies of a backend's memory; each part is copied at its first use.
class HostCopy {
 public:
  explicit HostCopy(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}

  /// [count] elements, readable by the host while this lives.
  template <class T>
  const T* array(const T* memory, std::int64_t count) {
    return reinterpret_cast<const T*>(bytes(memory, count * static_cast<std::int64_t>(sizeof(T))));
  }
  /// The same plane in the copy of its pool; call array() for the pool first.
  PlaneView plane(const PlaneView& plane) const;

 private:
  struct Part {
    const std::byte* memory;
    AlignedVector<std::byte> copy;
  };
  const std::byte* bytes(const void* memory, std::int64_t count);
  const std::byte* find(const void* memory, std::int64_t count) const;  // nullptr: not copied

  std::shared_ptr<Backend> backend_;
  std::vector<Part> parts_;
};

}  // namespace kv4::checks
