// Shared by the groups of rows: the device, its measured speed, and the results.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checks/device_tensors.h"
#include "graph_timer.h"
#include "kv4/backend.h"

namespace kv4::bench {

/// The goal of a row.
struct Aim {
  enum class Kind : std::uint8_t { none, most_us, most_ratio, least_share, most_count };
  Kind kind = Kind::none;
  double value = 0;
};

/// One operation. Bytes: read plus written, each counted once. Floor: the longer of the bytes at this run's copy speed
/// and a launch.
struct Row {
  std::string name;
  double us = 0;
  std::int64_t bytes = 0;
  double floor_us = 0;
  Aim aim = {};
  std::string note = {};
  std::string failure = {};  // of a check
  double count = 0;          // of Aim::most_count

  double ratio() const { return floor_us > 0 ? us / floor_us : 0; }
  bool met() const;
  bool ok() const { return failure.empty(); }
};

/// Random numbers on the device, more bytes than L2 holds; slices are used in rotation.
class InputPool {
 public:
  InputPool(std::shared_ptr<Backend> backend, cudaStream_t stream);
  TensorView f32(std::int64_t rows, std::int64_t columns);
  TensorView f32(std::int64_t columns);
  TensorView bf16(std::int64_t rows, std::int64_t columns);

 private:
  struct Rotation {
    DeviceMemory memory;
    std::int64_t next = 0;
    std::byte* take(std::int64_t bytes);
  };
  Rotation f32_, bf16_;
};

/// A launch of an operation, and the input that the preceding kernel of an engine writes: queries for most operations.
struct Launch {
  void* input = nullptr;
  std::int64_t input_bytes = 0;  // a multiple of 16
  std::function<void()> queue;
  const void* like = nullptr;  // bytes to write as the input; null: random bf16 numbers
};
/// Suffix of the names of rows after an ordinary kernel.
constexpr const char* kAfterOrdinary = ", after an ordinary kernel";
using MakeLaunch = std::function<Launch(int)>;

struct Bench {
  Bench(int device, bool quick);

  /// Adds the row with its floor and prints it to standard error, so that an aborted run has printed its results.
  void add(Row row);
  double floor_us(std::int64_t bytes) const;
  /// Adds `row` with the time of one of `count` launches of a graph, and the row "..., after an ordinary kernel". There
  /// a kernel without programmatic launch writes each launch's input first; the row's time is that of both kernels
  /// minus that of a graph of the ordinary kernels alone. In the first row, a graph that repeats one kernel overlaps
  /// each launch with the next. `before` is queued ahead of each replay.
  void add_launches(Row row, int count, const MakeLaunch& make, const std::function<void()>& before = {});
  /// Adds only the row after an ordinary kernel, with the time of `launches_of_row` launches.
  void add_after_ordinary(Row row, int count, const MakeLaunch& make, const std::function<void()>& before = {},
                          int launches_of_row = 1);
  /// Queues a kernel without programmatic launch that writes the launch's input.
  void queue_ordinary(const Launch& launch);
  /// Runs one cell. If it throws, the row `name` has failed and the next cell runs; a lost device ends the group.
  template <class F>
  void cell(const std::string& name, F&& run) {
    try {
      run();
    } catch (const std::exception& e) {
      add_failure(name, e.what());
    }
  }
  /// Adds a failed row. Throws if the device is lost.
  void add_failure(const std::string& name, const std::string& what);
  /// Time of the bytes at the copy speed, without the launch.
  double copy_us(std::int64_t bytes) const { return static_cast<double>(bytes) / copy_bytes_per_us; }

  bool quick;
  int num_sms = 0;
  GraphTimer timer;
  std::shared_ptr<Backend> backend;
  InputPool inputs;
  double copy_bytes_per_us = 0;  // large device-to-device copy, read plus written
  double empty_us = 0;           // an empty kernel in a graph
  std::vector<Row> rows;
};

void add_append_rows(Bench& bench);
void add_prefill_rows(Bench& bench);
void add_gather_rows(Bench& bench);
void add_attend_rows(Bench& bench);
/// attend with every number of KV splits that may be fastest for few tokens.
void add_attend_split_rows(Bench& bench);
/// The same for a prefill.
void add_attend_prefill_split_rows(Bench& bench);
void add_attend_prefill_rows(Bench& bench);
void add_attend_staged_rows(Bench& bench);
void add_index_rows(Bench& bench);
void add_index_prefill_rows(Bench& bench);
void add_snapshot_rows(Bench& bench);
void add_control_rows(Bench& bench);
void add_decode_step_rows(Bench& bench);
void add_prefill_step_rows(Bench& bench);
/// A small case on the GPU and on the CPU gives the same image and blocks.
void add_parity_row(Bench& bench);

}  // namespace kv4::bench
