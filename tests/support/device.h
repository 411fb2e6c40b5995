// The device that the tests run on, and host tensors in its memory.
//
//   kv4_tests                  the CPU
//   kv4_tests --device cuda    the same case list on GPU 0; what is compared with stays on the CPU
//   kv4_tests --device far     on the CPU, in memory that the host cannot touch: finds tests and library code that
//                              would only work on the host
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::test {

enum class Device : std::uint8_t { cpu, far, cuda };

Device device();
void choose_device(Device device);
inline bool off_host() { return device() != Device::cpu; }

/// The backend under test. `threads`: of the CPU. Off the host all callers share one backend, as it is slow to make.
std::shared_ptr<Backend> test_backend(int threads = 1);
/// The backend to compare with the CPU: CUDA, or the far one if that was chosen. Null: see `why_no_device()`.
std::shared_ptr<Backend> parity_backend();
std::string why_no_device();
/// Call before the process ends.
void drop_backends();

/// A file of the source tree: in the tree of the build, or below the current folder on another machine.
inline std::string source_path(const std::string& path) {
  const std::string built = std::string(KV4_SOURCE_DIR) + "/";
  return (std::filesystem::exists(built + "tests") ? built : std::string()) + path;
}

/// Rounds of a randomised test; fewer where each round costs transfers.
inline int rounds(int on_cpu) { return off_host() ? (on_cpu + 3) / 4 : on_cpu; }

/// Bytes from the first element of a view to its last.
inline std::int64_t extent_bytes(const ConstTensorView& t) {
  std::int64_t last = 0;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] == 0) return 0;
    last += (t.shape[d] - 1) * t.strides[d];
  }
  return t.ndim == 0 ? 0 : (last + 1) * static_cast<std::int64_t>(element_bytes(t.dtype));
}

/// A host copy of `bytes` of a backend's memory.
std::vector<std::byte> read_bytes(Backend& backend, const void* from, std::int64_t bytes);
void write_bytes(Backend& backend, void* to, const void* from, std::int64_t bytes);

template <class T>
std::vector<T> read_array(Backend& backend, const T* from, std::int64_t count) {
  const std::vector<std::byte> bytes = read_bytes(backend, from, count * static_cast<std::int64_t>(sizeof(T)));
  std::vector<T> out(static_cast<std::size_t>(count));
  if (count > 0) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

/// Twins of host tensors in a backend's memory; on the host the tensors themselves. Views are valid until clear().
///   put()/put_output() give views, send() copies all of them over, fetch() the outputs back; one transfer each.
class Twins {
 public:
  explicit Twins(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}
  ~Twins();
  Twins(const Twins&) = delete;
  Twins& operator=(const Twins&) = delete;

  ConstTensorView put(const ConstTensorView& host) { return add(host, nullptr); }
  TensorView put_output(const TensorView& host) { return add(host, host.data); }
  void send();
  void fetch();
  void clear();

  const std::shared_ptr<Backend>& backend() const { return backend_; }

 private:
  struct Twin {
    const std::byte* host;
    std::byte* there;
    std::int64_t bytes;
    std::byte* result;  // host memory of an output; null: an input
  };
  struct Chunk {
    std::byte* memory;
    std::int64_t bytes, used;
  };

  template <class Void>
  BasicTensorView<Void> add(const BasicTensorView<Void>& host, void* result);
  std::int64_t packed_bytes(bool outputs_only) const;

  std::shared_ptr<Backend> backend_;
  std::vector<Twin> twins_;
  std::vector<Chunk> chunks_;
  std::vector<std::byte> packed_;
};

/// Readable addresses for a backend's memory: on the host the memory itself, else a copy taken at add().
class Mirror {
 public:
  explicit Mirror(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}
  void add(const void* from, std::int64_t bytes);

  /// `from`, or its copy. Throws std::logic_error for an address outside the added ranges.
  template <class T>
  T* at(T* from) const {
    return backend_->on_host() || from == nullptr
               ? from
               : reinterpret_cast<T*>(const_cast<std::byte*>(find(reinterpret_cast<const std::byte*>(from))));
  }

 private:
  struct Range {
    const std::byte* from;
    std::vector<std::byte> bytes;
  };
  const std::byte* find(const std::byte* from) const;

  std::shared_ptr<Backend> backend_;
  std::vector<Range> ranges_;
};

/// Views whose addresses are all readable on the host: planes and tables of an open step of `cache`.
class HostViews {
 public:
  HostViews(KVCacheManager& cache, std::shared_ptr<Backend> backend);
  SWAView view(SWAView v);
  ClassicalView view(ClassicalView v);
  IndexerView view(IndexerView v);

 private:
  template <class View>
  void tables(View& v);
  void plane(PlaneView& p) const { p.data = mirror_.at(p.data); }

  KVCacheManager& cache_;
  Mirror mirror_;
};

}  // namespace kv4::test
