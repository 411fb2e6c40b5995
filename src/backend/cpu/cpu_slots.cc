// Pools that the caller keeps: rows by slot, and index scores of key ranges.
#include <algorithm>
#include <cstring>

#include "backend/cpu/compressor.h"
#include "backend/cpu/cpu_backend.h"

namespace kv4::cpu {
namespace {

constexpr std::int64_t kRows = 16;  // of a thread at once

}  // namespace

void CpuBackend::write_slots(const ops::SlotRowsParams& p) {
  const ops::RowPlanes& to = p.rows;
  fit_buffers(to.shape.width);
  pool_.run(p.num_rows, kRows, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t slot = p.slot(row);
      if (slot < 0) continue;
      const std::int64_t block = slot / p.rows_per_block, at = slot % p.rows_per_block;
      kernels_.encode_input(to.format, to.shape, input_row(p.in, row), p.in.dtype, to.payload.at(block, at),
                            to.scale.at(block, at), 1.0f, buffers(worker).tmp.data());
    }
  });
}

void CpuBackend::gather_slots(const ops::SlotRowsParams& p) {
  const ops::RowPlanes& from = p.rows;
  const std::int64_t row_bytes = from.shape.width * static_cast<std::int64_t>(element_bytes(p.out.dtype));
  fit_buffers(from.shape.width);
  pool_.run(p.num_rows, kRows, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t slot = p.slot(row);
      std::uint8_t* out = static_cast<std::uint8_t*>(p.out.data) + row * row_bytes;
      if (p.valid != nullptr) p.valid[row] = slot >= 0;
      if (slot < 0) {
        std::memset(out, 0, row_bytes);
        continue;
      }
      const std::int64_t block = slot / p.rows_per_block, at = slot % p.rows_per_block;
      kernels_.decode(from.format, from.shape, from.payload.at(block, at), from.scale.at(block, at), 1.0f, out,
                      p.out.dtype, buffers(worker).tmp.data());
    }
  });
}

void CpuBackend::make_range_tables(const ops::RangeTablesParams& p) {
  for (std::int64_t token = 0; token < p.ranges.num_tokens; ++token) p.tokens[token] = p.record(token);
  for (std::int64_t i = 0; i < p.table_entries(); ++i) p.block_table[i] = p.page(i);
  if (p.ones != nullptr) std::fill_n(p.ones, ops::kMaxIndexHeads, 1.0f);
}

void CpuBackend::place_scores(const ops::PlaceScoresParams& p) {
  const std::int64_t element = static_cast<std::int64_t>(element_bytes(p.logits.dtype));
  pool_.run(p.ranges.num_tokens, 1, [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t token = first; token < last; ++token) {
      const std::int64_t shift = p.is_compact ? p.ranges.begin(token) : 0;
      const std::int64_t begin = p.ranges.begin(token) - shift, end = p.ranges.end(token) - shift;
      const float* scores = p.scores + token * p.score_stride + shift;
      std::uint8_t* logits = static_cast<std::uint8_t*>(p.logits.data) + token * p.logit_stride * element;
      for (std::int64_t j = 0; j < (p.in_place() ? begin : p.num_logits); ++j) {
        const float x = j >= begin && j < end ? scores[j] : -INFINITY;
        if (p.logits.dtype == DType::bf16) {
          const std::uint16_t bits = codec::bf16_bits(x);
          std::memcpy(logits + 2 * j, &bits, 2);
        } else {
          std::memcpy(logits + 4 * j, &x, 4);
        }
      }
    }
  });
}

}  // namespace kv4::cpu
