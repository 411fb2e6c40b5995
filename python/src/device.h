// Python's Backend: the library's, with the place of its memory, its turns, and the stream that work is queued on.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "kv4/backend.h"
#include "kv4/kv_cache_manager.h"
#include "turns.h"

namespace kv4::python {

namespace nb = nanobind;

class Device {
 public:
  /// cuda_index -1: the CPU, with `threads`. `stream`: the one that the backend was made with; empty: follow torch.
  Device(std::shared_ptr<Backend> backend, int cuda_index, std::optional<Stream> stream, int threads = 1)
      : backend_(std::move(backend)),
        cuda_index_(cuda_index),
        threads_(threads),
        pinned_(stream),
        current_(stream.value_or(Stream{}).handle) {}

  const std::shared_ptr<Backend>& backend() const { return backend_; }
  bool on_cuda() const { return cuda_index_ >= 0; }
  int cuda_index() const { return cuda_index_; }
  int threads() const { return threads_; }
  std::string name() const { return on_cuda() ? "cuda:" + std::to_string(cuda_index_) : "cpu"; }

  /// The stream of a call: `named` if given, else the stream set before, else torch's current one, else the present
  /// one.
  Stream choose_stream(nb::handle named) const;
  void pin_stream(std::optional<Stream> stream) { pinned_ = stream; }

  /// Runs `call` without the GIL, one at a time among all caches on this backend. It must touch no Python object.
  template <class Call>
  auto work(Call&& call) {
    return turns_.work(call);
  }
  /// The same with the work of `manager` queued on `stream`.
  template <class Call>
  auto work_on(KVCacheManager& manager, Stream stream, Call&& call) {
    return work([&] {
      if (on_cuda() && stream.handle != current_) {
        manager.set_stream(stream);
        current_ = stream.handle;
      }
      return call();
    });
  }
  /// For destructors: waits for its turn, and may be called inside one.
  template <class Call>
  void at_end(Call&& call) {
    turns_.at_end(call);
  }

 private:
  std::shared_ptr<Backend> backend_;
  int cuda_index_;
  int threads_;
  std::optional<Stream> pinned_;
  std::atomic<void*> current_;  // the stream that the backend queues on; changed in a turn
  Turns turns_;
};

/// From an int, or an object with `cuda_stream` (torch.cuda.Stream) or `__cuda_stream__` (the CUDA Python protocol).
Stream parse_stream(nb::handle stream);

}  // namespace kv4::python
