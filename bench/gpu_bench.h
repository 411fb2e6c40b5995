// Shared by the groups of rows: the device, its measured speed, and the results.
#pragma once

#include <cstdint>
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

/// One operation. Bytes: read plus written, each once. Floor: bytes at the copy speed of this run, or a launch if that
/// is longer.
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

struct Bench {
  Bench(int device, bool quick);

  /// Adds the row with its floor, and prints it to standard error, so that an aborted run has printed its results.
  void add(Row row);
  double floor_us(std::int64_t bytes) const;
  /// Bytes at the copy speed, without the launch.
  double copy_us(std::int64_t bytes) const { return static_cast<double>(bytes) / copy_bytes_per_us; }

  bool quick;
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
/// attend with every number of KV splits that may be the fastest, for few tokens.
void add_attend_split_rows(Bench& bench);
/// The same for a prefill.
void add_attend_prefill_split_rows(Bench& bench);
void add_attend_prefill_rows(Bench& bench);
void add_index_rows(Bench& bench);
void add_snapshot_rows(Bench& bench);
void add_control_rows(Bench& bench);
void add_decode_step_rows(Bench& bench);
/// A small case on the GPU and on the CPU: the same image and blocks.
void add_parity_row(Bench& bench);

}  // namespace kv4::bench
