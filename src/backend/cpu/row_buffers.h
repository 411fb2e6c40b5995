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
  AlignedVector<float> key;             // an index key that is made from a latent
  AlignedVector<float> zeros;           // never written
  AlignedVector<float> keys;            // [kScoreKeys, width]
  std::vector<ops::SourceRow> sources;  // of one entry that is pooled from its rows

  void fit(int width, int num_sources) {
    if (std::ssize(sources) < num_sources) sources.resize(num_sources);
    std::int64_t n = 1;
    while (n < width) n *= 2;
    if (std::ssize(row) >= n) return;
    acc.resize(3 * n);
    keys.resize(kScoreKeys * n);
    for (AlignedVector<float>* buffer : {&tmp, &cos, &sin, &key, &zeros, &row})
      buffer->resize(n);  // `row` last: it then tells that all fit
  }
};

/// Buffers of one thread that attends: some heads of a query, some rows.
struct AttendBuffers {
  AlignedVector<float> heads;     // [heads, width] the query as it came
  AlignedVector<float> q;         // the same, prepared
  AlignedVector<float> rows;      // [kAttendRows, attend_stride]
  AlignedVector<float> acc;       // [heads, attend_stride]
  AlignedVector<float> max, sum;  // [heads]
  AlignedVector<float> tmp;       // [attend_tmp]

  void fit(int num_heads, int width) {
    const std::size_t h = padded_heads(num_heads), w = width,
                      stride = attend_stride(width);
    const auto grow = [](auto& buffer, std::size_t n) {
      if (buffer.size() < n) buffer.resize(n);
    };
    grow(heads, h * w);
    grow(q, h * w);
    grow(rows, kAttendRows * stride);
    grow(acc, h * stride);
    grow(max, h);
    grow(sum, h);
    grow(tmp, attend_tmp(width, num_heads));
  }
};

}  // namespace kv4::cpu
