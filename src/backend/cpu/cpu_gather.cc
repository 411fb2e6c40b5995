// The gathers decode stored rows into dense tensors. Rows that do not exist are zero.
#include <algorithm>
#include <cstring>

#include "backend/cpu/compressor.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/prefetch.h"

namespace kv4::cpu {
namespace {

struct RowOut {
  const ops::OutputDesc& out;
  std::size_t row_bytes;

  RowOut(const ops::OutputDesc& o, int width) : out(o), row_bytes(width * element_bytes(o.dtype)) {}
  void* at(std::int64_t row) const { return static_cast<std::uint8_t*>(out.data) + row * row_bytes; }
  void zero(std::int64_t row, std::int64_t rows = 1) const { std::memset(at(row), 0, rows * row_bytes); }
};

// Decodes `count` rows of a block.
void decode_rows(const RowKernels& kernels, const ops::RowPlanes& rows, std::int64_t block, std::int64_t row,
                 std::int64_t count, const RowOut& out, std::int64_t out_row, float* tmp) {
  const float global = page_scale(rows, block);
  for (std::int64_t i = 0; i < count; ++i)
    kernels.decode(rows.format, rows.shape, rows.payload.at(block, row + i), rows.scale.at(block, row + i), global,
                   out.at(out_row + i), out.out.dtype, tmp);
}

// The page row of a request's entry.
struct PageRow {
  std::int64_t block, row;
};

PageRow page_row(const ops::KindDesc& kind, const ops::StepDesc& step, std::int32_t request, std::int64_t entry) {
  return {step.block_table[std::int64_t{request} * step.blocks_per_request + entry / kind.rows_per_block],
          entry % kind.rows_per_block};
}

// Prefetches the first bytes of `rows` rows: the hardware prefetcher takes over after a few lines.
[[gnu::always_inline]] inline void prefetch_rows(const ops::RowPlanes& page, PageRow from, std::int64_t rows) {
  constexpr std::int64_t kMaxBytes = 4096;
  prefetch(page.payload.at(from.block, from.row), std::min(kMaxBytes, rows * page.payload.row_stride));
  prefetch(page.scale.at(from.block, from.row), std::min(kMaxBytes, rows * page.scale.row_stride));
}

}  // namespace

void CpuBackend::gather_chosen(const ops::GatherParams& params) {
  constexpr std::int64_t kAhead =
      4;  // chosen rows lie anywhere: the next rows are prefetched while this row is decoded
  const ops::KindDesc& kind = params.layer.kinds[params.kind];
  const ops::StepDesc& step = params.step;
  const RowOut out(params.out, kind.page.shape.width);
  const std::int64_t k = params.rows_per_item;
  fit_buffers(kind.page.shape.width);
  pool_.run(step.num_tokens, 1, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t token = begin; token < end; ++token) {
      const ops::StepRecord& at = step.tokens[token];
      const std::int32_t request = at.row;
      const std::int64_t visible = at.padded() ? 0 : (std::int64_t{at.position} + 1) / kind.ratio;
      const std::int32_t* chosen =
          static_cast<const std::int32_t*>(params.indices.data) + token * params.indices.row_stride;
      const auto exists = [&](std::int64_t i) { return i < k && chosen[i] >= 0 && chosen[i] < visible; };
      for (std::int64_t i = 0; i < k; ++i) {
        if (exists(i + kAhead)) prefetch_rows(kind.page, page_row(kind, step, request, chosen[i + kAhead]), 1);
        const std::int64_t row = token * k + i;
        if (exists(i)) {
          const PageRow from = page_row(kind, step, request, chosen[i]);
          decode_rows(kernels_, kind.page, from.block, from.row, 1, out, row, buffers(worker).tmp.data());
        } else {
          out.zero(row);
        }
        if (params.valid != nullptr) params.valid[row] = exists(i);
      }
    }
  });
}

void CpuBackend::gather_all(const ops::GatherParams& params) {
  const ops::KindDesc& kind = params.layer.kinds[params.kind];
  const ops::StepDesc& step = params.step;
  const RowOut out(params.out, kind.page.shape.width);
  const auto entries_of = [&](const ops::StepRecord& item) {
    return item.padded() ? 0 : std::int64_t{item.end()} / kind.ratio;
  };
  fit_buffers(kind.page.shape.width);
  for (std::int32_t item = 0; item < step.num_items; ++item)
    params.lens[item] = static_cast<std::int32_t>(entries_of(step.items[item]));
  pool_.run(step.num_items * params.rows_per_item, 64, [&](std::int64_t begin, std::int64_t end, int worker) {
    float* tmp = buffers(worker).tmp.data();
    for (std::int64_t i = begin; i < end;) {  // the rows of an item, block by block
      const std::int64_t index = i / params.rows_per_item, first = index * params.rows_per_item;
      const ops::StepRecord& item = step.items[index];
      const std::int64_t item_end = std::min(end, first + params.rows_per_item);
      const std::int64_t existing = std::min(item_end, first + entries_of(item));
      for (std::int64_t count = 0; i < existing; i += count) {
        const PageRow from = page_row(kind, step, item.row, i - first);
        count = std::min(existing - i, kind.rows_per_block - from.row);
        if (i + count < existing)
          prefetch_rows(kind.page, page_row(kind, step, item.row, i + count - first), kind.rows_per_block);
        decode_rows(kernels_, kind.page, from.block, from.row, count, out, i, tmp);
      }
      if (i < item_end) out.zero(i, item_end - i);
      i = item_end;
    }
  });
}

void CpuBackend::gather_window(const ops::GatherParams& params) {
  const ops::WindowDesc& w = params.layer.window;
  const ops::StepDesc& step = params.step;
  const RowOut out(params.out, w.ring.shape.width);
  fit_buffers(w.ring.shape.width);
  const auto first_of = [&](const ops::StepRecord& item) {
    return item.padded() ? 0 : std::max(step.window_begin(item), item.length - (params.layer.window_tokens - 1));
  };
  const auto end_of = [](const ops::StepRecord& item) { return item.padded() ? 0 : item.end(); };
  for (std::int32_t i = 0; i < step.num_items; ++i) {
    params.first[i] = first_of(step.items[i]);
    params.lens[i] = end_of(step.items[i]) - first_of(step.items[i]);
  }
  pool_.run(step.num_items * params.rows_per_item, 64, [&](std::int64_t begin, std::int64_t end, int worker) {
    float* tmp = buffers(worker).tmp.data();
    for (std::int64_t i = begin; i < end; ++i) {
      const ops::StepRecord& item = step.items[i / params.rows_per_item];
      const std::int64_t position = first_of(item) + i % params.rows_per_item;
      if (position >= end_of(item))
        out.zero(i);
      else if (position >= item.length && !item.in_place())
        decode_rows(kernels_, w.scratch, 0, item.token_of(position), 1, out, i, tmp);
      else
        decode_rows(kernels_, w.ring, item.read_slot, position % w.rows, 1, out, i, tmp);
    }
  });
}

}  // namespace kv4::cpu
