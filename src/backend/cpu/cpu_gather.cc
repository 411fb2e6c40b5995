// The gathers: stored rows, decoded into dense tensors. Rows that do not exist are zero.
#include <algorithm>
#include <cstring>

#include "backend/cpu/compressor.h"
#include "backend/cpu/cpu_backend.h"

namespace kv4::cpu {
namespace {

struct RowOut {
  const ops::OutputDesc& out;
  std::size_t row_bytes;

  RowOut(const ops::OutputDesc& o, int width) : out(o), row_bytes(static_cast<std::size_t>(width) * element_bytes(o.dtype)) {}
  void* at(std::int64_t row) const { return static_cast<std::uint8_t*>(out.data) + static_cast<std::size_t>(row) * row_bytes; }
  void zero(std::int64_t row) const { std::memset(at(row), 0, row_bytes); }
};

void decode_row(const RowKernels& kernels, const ops::RowPlanes& rows, std::int64_t block, std::int64_t row, void* out, DType type) {
  float global = 1.0f;
  if (rows.global.data != nullptr) std::memcpy(&global, rows.global.at(block, 0), 4);
  kernels.decode(rows.format, rows.shape, rows.payload.at(block, row), rows.scale.at(block, row), global, out, type);
}

void decode_entry(const RowKernels& kernels, const ops::KindDesc& kind, const ops::StepDesc& step, std::int32_t request, std::int64_t entry,
                  void* out, DType type) {
  const std::int64_t block = step.block_table[std::int64_t{request} * step.blocks_per_request + entry / kind.rows_per_block];
  decode_row(kernels, kind.page, block, entry % kind.rows_per_block, out, type);
}

}  // namespace

void CpuBackend::gather_chosen(const ops::GatherParams& params) {
  const ops::KindDesc& kind = params.layer.kinds[params.kind];
  const ops::StepDesc& step = params.step;
  const RowOut out(params.out, kind.page.shape.width);
  const std::int64_t k = params.rows_per_item;
  pool_.run(step.num_tokens * k, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t token = i / k;
      const std::int32_t request = step.token_rows[token];
      const std::int32_t entry = static_cast<const std::int32_t*>(params.indices.data)[token * params.indices.row_stride + i % k];
      const bool ok = request >= 0 && entry >= 0 && entry < (std::int64_t{step.positions[token]} + 1) / kind.ratio;
      if (ok)
        decode_entry(kernels_, kind, step, request, entry, out.at(i), params.out.dtype);
      else
        out.zero(i);
      if (params.valid != nullptr) params.valid[i] = ok;
    }
  });
}

void CpuBackend::gather_all(const ops::GatherParams& params) {
  const ops::KindDesc& kind = params.layer.kinds[params.kind];
  const ops::StepDesc& step = params.step;
  const RowOut out(params.out, kind.page.shape.width);
  const auto entries_of = [&](std::int32_t request) {
    return request < 0 ? 0 : (std::int64_t{step.lengths[request]} + step.counts[request]) / kind.ratio;
  };
  for (std::int32_t item = 0; item < step.num_items; ++item) params.lens[item] = static_cast<std::int32_t>(entries_of(step.item_rows[item]));
  pool_.run(step.num_items * params.rows_per_item, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int32_t request = step.item_rows[i / params.rows_per_item];
      const std::int64_t entry = i % params.rows_per_item;
      if (entry < entries_of(request))
        decode_entry(kernels_, kind, step, request, entry, out.at(i), params.out.dtype);
      else
        out.zero(i);
    }
  });
}

void CpuBackend::gather_window(const ops::GatherParams& params) {
  const ops::WindowDesc& w = params.layer.window;
  const ops::StepDesc& step = params.step;
  const RowOut out(params.out, w.ring.shape.width);
  const auto first_of = [&](const Span& span) { return std::max<std::int64_t>(0, span.length - (params.layer.window_tokens - 1)); };
  for (std::int32_t item = 0; item < step.num_items; ++item) {
    const std::int32_t request = step.item_rows[item];
    const Span span = request < 0 ? Span{} : span_of(step, request);
    params.first[item] = static_cast<std::int32_t>(first_of(span));
    params.lens[item] = static_cast<std::int32_t>(span.end() - first_of(span));
  }
  pool_.run(step.num_items * params.rows_per_item, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int32_t request = step.item_rows[i / params.rows_per_item];
      const Span span = request < 0 ? Span{} : span_of(step, request);
      const std::int64_t position = first_of(span) + i % params.rows_per_item;
      if (position >= span.end())
        out.zero(i);
      else if (position >= span.length && !span.in_place())
        decode_row(kernels_, w.scratch, 0, span.first_token + position - span.length, out.at(i), params.out.dtype);
      else
        decode_row(kernels_, w.ring, span.read_slot, position % w.rows, out.at(i), params.out.dtype);
    }
  });
}

}  // namespace kv4::cpu
