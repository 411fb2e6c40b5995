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

  RowOut(const ops::OutputDesc& o, int width)
      : out(o), row_bytes(static_cast<std::size_t>(width) * element_bytes(o.dtype)) {}
  void* at(std::int64_t row) const {
    return static_cast<std::uint8_t*>(out.data) + static_cast<std::size_t>(row) * row_bytes;
  }
  void zero(std::int64_t row) const { std::memset(at(row), 0, row_bytes); }
};

void decode_row(const RowKernels& kernels, const ops::RowPlanes& rows, std::int64_t block, std::int64_t row, void* out,
                DType type, float* tmp) {
  float global = 1.0f;
  if (rows.global.data != nullptr) std::memcpy(&global, rows.global.at(block, 0), 4);
  kernels.decode(rows.format, rows.shape, rows.payload.at(block, row), rows.scale.at(block, row), global, out, type,
                 tmp);
}

// Where an entry of a request lies.
struct EntryPlace {
  std::int64_t block, slot;
};

EntryPlace place_of(const ops::KindDesc& kind, const ops::StepDesc& step, std::int32_t request, std::int64_t entry) {
  return {step.block_table[std::int64_t{request} * step.blocks_per_request + entry / kind.rows_per_block],
          entry % kind.rows_per_block};
}

// The first line is read, the others are prefetched: a processor may drop a prefetch whose page is in no TLB, not a
// load.
void prefetch_entry(const ops::RowPlanes& page, EntryPlace place) {
  const std::uint8_t* payload = page.payload.at(place.block, place.slot);
  (void)*static_cast<const volatile std::uint8_t*>(payload);
  for (std::int64_t at = 0; at < page.payload.row_stride; at += 64) __builtin_prefetch(payload + at);
  __builtin_prefetch(page.scale.at(place.block, place.slot));
}

}  // namespace

void CpuBackend::gather_chosen(const ops::GatherParams& params) {
  constexpr std::int64_t kAhead = 4;  // chosen rows lie anywhere: the next ones are fetched while this one is decoded
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
      const auto is_there = [&](std::int64_t i) { return i < k && chosen[i] >= 0 && chosen[i] < visible; };
      for (std::int64_t i = 0; i < k; ++i) {
        if (is_there(i + kAhead)) prefetch_entry(kind.page, place_of(kind, step, request, chosen[i + kAhead]));
        const std::int64_t row = token * k + i;
        if (is_there(i)) {
          const EntryPlace place = place_of(kind, step, request, chosen[i]);
          decode_row(kernels_, kind.page, place.block, place.slot, out.at(row), params.out.dtype,
                     buffers(worker).tmp.data());
        } else {
          out.zero(row);
        }
        if (params.valid != nullptr) params.valid[row] = is_there(i);
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
    for (std::int64_t i = begin; i < end; ++i) {
      const ops::StepRecord& item = step.items[i / params.rows_per_item];
      const std::int64_t entry = i % params.rows_per_item;
      if (entry >= entries_of(item)) {
        out.zero(i);
        continue;
      }
      const EntryPlace place = place_of(kind, step, item.row, entry);
      decode_row(kernels_, kind.page, place.block, place.slot, out.at(i), params.out.dtype, tmp);
    }
  });
}

void CpuBackend::gather_window(const ops::GatherParams& params) {
  const ops::WindowDesc& w = params.layer.window;
  const ops::StepDesc& step = params.step;
  const RowOut out(params.out, w.ring.shape.width);
  fit_buffers(w.ring.shape.width);
  const auto first_of = [&](const ops::StepRecord& item) {
    return std::max(0, item.length - (params.layer.window_tokens - 1));
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
        decode_row(kernels_, w.scratch, 0, item.token_of(position), out.at(i), params.out.dtype, tmp);
      else
        decode_row(kernels_, w.ring, item.read_slot, position % w.rows, out.at(i), params.out.dtype, tmp);
    }
  });
}

}  // namespace kv4::cpu
