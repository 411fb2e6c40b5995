#pragma once

#include <cstddef>
#include <vector>

#include "backend/cpu/row_kernels.h"
#include "base/aligned_vector.h"
#include "ops/compress_row.h"

namespace kv4::cpu {

/// Buffers of one thread that works on a row. The caller grows them before the threads start, so that no thread
/// allocates.
struct RowBuffers {
  AlignedVector<float> acc;  // [3, width]
  AlignedVector<float> row, tmp, cos, sin;
  AlignedVector<float> keys;            // [kScoreKeys, width]
  std::vector<ops::SourceRow> sources;  // of one entry of an overlapping kind

  void fit(int width, int num_sources) {
    if (sources.size() < static_cast<std::size_t>(num_sources)) sources.resize(static_cast<std::size_t>(num_sources));
    std::size_t n = 1;
    while (n < static_cast<std::size_t>(width)) n *= 2;
    if (row.size() >= n) return;
    acc.resize(3 * n);
    keys.resize(kScoreKeys * n);
    for (AlignedVector<float>* buffer : {&tmp, &cos, &sin, &row})
      buffer->resize(n);  // `row` last: it then tells that all fit
  }
};

/// Buffers of one thread that attends: some heads of a query, some rows.
struct AttendBuffers {
  AlignedVector<float> q, acc;  // [heads, width]
  AlignedVector<float> rows;    // [kAttendRows, width]
  AlignedVector<float> p;       // [heads, kAttendRows]
  std::vector<ops::Attention> state;

  void fit(int heads, int width) {
    const std::size_t h = static_cast<std::size_t>(heads), w = static_cast<std::size_t>(width);
    const auto grow = [](auto& buffer, std::size_t n) {
      if (buffer.size() < n) buffer.resize(n);
    };
    grow(q, h * w);
    grow(acc, h * w);
    grow(rows, kAttendRows * w);
    grow(p, h * kAttendRows);
    grow(state, h);
  }
};

}  // namespace kv4::cpu
