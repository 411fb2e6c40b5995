// Pooling on the CPU: finds the rows of a span, in the ring or in the step's inputs, and pools them in position order.
#pragma once

#include <cstdint>
#include "backend/cpu/row_buffers.h"
#include "backend/cpu/row_kernels.h"
#include "ops/layer_desc.h"

namespace kv4::cpu {

/// A token's row of an input tensor, from `column` on.
inline const std::uint8_t* input_row(const ops::InputDesc& in, std::int64_t token, int column = 0) {
  return static_cast<const std::uint8_t*>(in.data) + (token * in.row_stride + column) * element_bytes(in.dtype);
}

/// The compressor of one row kind. `part`: the request, its tokens in the step, and where its rows are read and
/// written; count 0: stored rows only.
class Compressor {
 public:
  Compressor(const RowKernels& kernels, const ops::KindDesc& kind, ops::InputDesc kv, ops::InputDesc gate)
      : kernels_(kernels), kind_(kind), kv_(kv), gate_(gate) {}

  /// Folds the rows that leave the ring in this step into the accumulator. Idempotent.
  void advance(const ops::StepRecord& part, RowBuffers& buffers) const;
  /// Writes the row of part.position into the ring if it still belongs there after the step. next: the step's next
  /// token or null; its rows are prefetched meanwhile.
  void store_pending(const ops::StepRecord& part, const ops::StepRecord* next) const;
  /// Pools [first of the open span, end) into buffers.acc, without changing the accumulator.
  void pool_open(const ops::StepRecord& part, std::int64_t end, RowBuffers& buffers) const;
  /// Pools the entry that closes at part.position, whose row has been stored, into its mean, buffers.row. next: the
  /// next token, of another request, that closes an entry from stored rows, or null; with overlap these rows are
  /// prefetched meanwhile.
  void pool_entry(const ops::StepRecord& part, const ops::StepRecord* next, RowBuffers& buffers) const;

  /// Saves the first halves of the rows of the span that ends at `end`, kv then gate, as an image holds them.
  void save_span(const ops::StepRecord& part, std::int64_t end, std::uint8_t* out) const;

 private:
  // Rows of positions begin, begin + 1, ... at `column`.
  struct Window {
    const ops::StepRecord& part;
    const ops::StepRecord* next;
    std::int64_t begin;
    int count, column;
  };
  void find_rows(const Window& window, ops::SourceRow* rows) const;
  void pool_rows(const ops::StepRecord& part, RowBuffers& buffers) const;
  // Finds input rows that are needed after this row.
  void find_later_rows(const ops::StepRecord& part, std::int64_t token, int column, ops::SourceRow& row) const;
  // The kv of a stored row that is needed after the row of `position`.
  const std::uint8_t* later_stored(const Window& window, std::int64_t position) const;
  const std::uint8_t* stored_kv(std::int32_t slot, std::int64_t position, int column) const {
    const ops::PendingDesc& p = kind_.pending;
    return p.ring.at(slot, position % p.rows) + column * element_bytes(p.dtype);
  }
  // Folds [begin, end) into acc; fresh: acc is overwritten.
  void fold(const ops::StepRecord& part, std::int64_t begin, std::int64_t end, bool fresh, float* acc) const;
  float* accumulator(std::int32_t slot) const {
    return reinterpret_cast<float*>(kind_.pending.accumulator.at(slot, 0));
  }
  std::int32_t& fold_watermark(std::int32_t slot) const {
    return kind_.pending.fold_watermarks[slot * kind_.pending.fold_watermark_stride];
  }
  int width() const { return kind_.page.shape.width; }

  const RowKernels& kernels_;
  const ops::KindDesc& kind_;
  ops::InputDesc kv_, gate_;
};

}  // namespace kv4::cpu
