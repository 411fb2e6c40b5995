#include "backend/cpu/compressor.h"

#include <algorithm>
#include <cstring>

namespace kv4::cpu {
namespace {

constexpr int kRowsAtOnce = 64;
constexpr std::int64_t kRowsAhead = 4;

ops::RowType read_as(DType stored, DType pending) {
  if (stored == DType::bf16) return ops::RowType::bf16;
  return pending == DType::bf16 ? ops::RowType::f32_as_bf16 : ops::RowType::f32;
}

}  // namespace

void Compressor::find_rows(const Window& window, ops::SourceRow* rows) const {
  const ops::PendingDesc& p = kind_.pending;
  const auto [part, next, begin, count, column] = window;
  const std::size_t gate = p.columns * element_bytes(p.dtype);  // behind its kv
  std::int64_t phase = begin % kind_.ratio;
  for (int i = 0; i < count; ++i) {
    const float* bias = kind_.bias + phase * p.columns + column;
    if (begin + i >= part.length) {
      const std::int64_t token = part.token_of(begin + i);
      rows[i] = {input_row(kv_, token, column), input_row(gate_, token, column), bias, read_as(kv_.dtype, p.dtype), {}};
      find_later_rows(part, token, column, rows[i]);
    } else {
      const std::uint8_t* kv = stored_kv(part.read_slot, begin + i, column);
      const std::uint8_t* later = later_stored(window, begin + i);
      rows[i] = {kv, kv + gate, bias, read_as(p.dtype, p.dtype), {later, later + gate}};
    }
    if (++phase == kind_.ratio) phase = 0;
  }
}

// Without overlap the next rows are in the same ring. With overlap a window is short, and the next request's window
// lies in another state slot.
const std::uint8_t* Compressor::later_stored(const Window& window, std::int64_t position) const {
  const auto [part, next, begin, count, column] = window;
  if (!kind_.overlap) return stored_kv(part.read_slot, position + kRowsAhead, column);
  if (next == nullptr) return stored_kv(part.read_slot, position, column);
  return stored_kv(next->read_slot, position + next->position - part.position, column);
}

// The hardware prefetcher is too late for such short rows. With overlap, two entries each use one half of an input row;
// the row is prefetched whole and line by line, which memory serves fastest: kv while an entry pools its own span,
// gates while it pools the previous span. Beyond the step's last row this row is prefetched itself, so that only the
// caller's memory is touched.
void Compressor::find_later_rows(const ops::StepRecord& part, std::int64_t token, int column,
                                 ops::SourceRow& row) const {
  constexpr std::int64_t kLine = 64;
  const std::int64_t last = part.first_token + part.count - 1;
  const auto later = [&](std::int64_t rows) { return std::min(token + rows, last); };
  if (!kind_.overlap) {
    row.fetch[0] = input_row(kv_, later(kRowsAhead), column);
    row.fetch[1] = input_row(gate_, later(kRowsAhead), column);
    return;
  }
  const std::uint8_t* whole =
      column == 0 ? input_row(gate_, later(2 * kind_.ratio)) : input_row(kv_, later(kind_.ratio));
  row.fetch[0] = whole;
  row.fetch[1] = whole + kLine;
  row.fetch_pace = 2;
}

void Compressor::fold(const ops::StepRecord& part, std::int64_t begin, std::int64_t end, bool fresh, float* acc) const {
  ops::SourceRow rows[kRowsAtOnce];
  do {
    const int count = static_cast<int>(std::min<std::int64_t>(end - begin, kRowsAtOnce));
    find_rows({part, nullptr, begin, count, 0}, rows);
    kernels_.fold(width(), rows, count, fresh, acc);
    fresh = false;
    begin += count;
  } while (begin < end);
}

void Compressor::advance(const ops::StepRecord& part, RowBuffers& buffers) const {
  if (!kind_.pending.online) return;
  const std::int64_t from = fold_watermark(part.read_slot);
  const std::int64_t to = part.end() - kind_.pending.rows;  // rows from here on stay in the ring
  if (to <= from) return;
  const std::int64_t begin = to / kind_.ratio * kind_.ratio;  // begin of the span of `to`
  if (to > begin) {
    const std::size_t bytes = 3 * width() * sizeof(float);
    const bool fresh = from <= begin;
    if (!fresh) std::memcpy(buffers.acc.data(), accumulator(part.read_slot), bytes);
    fold(part, std::max(from, begin), to, fresh, buffers.acc.data());
    std::memcpy(accumulator(part.write_slot), buffers.acc.data(), bytes);
  }
  fold_watermark(part.write_slot) = static_cast<std::int32_t>(to);
}

void Compressor::store_pending(const ops::StepRecord& part, const ops::StepRecord* next) const {
  const ops::PendingDesc& p = kind_.pending;
  if (part.position < part.end() - p.rows) return;
  const std::int64_t token = part.token_of(part.position);
  std::uint8_t* row = p.ring.at(part.write_slot, part.position % p.rows);
  const std::size_t gate = p.columns * element_bytes(p.dtype);
  const std::uint8_t* next_row = next == nullptr ? row : stored_kv(next->write_slot, next->position, 0);
  const std::int64_t next_token = next == nullptr ? token : token + 1;
  kernels_.convert({p.columns, input_row(kv_, token), kv_.dtype, row, p.dtype, input_row(kv_, next_token), next_row});
  kernels_.convert({p.columns, input_row(gate_, token), gate_.dtype, row + gate, p.dtype, input_row(gate_, next_token),
                    next_row + gate});
}

void Compressor::save_span(const ops::StepRecord& part, std::int64_t end, std::uint8_t* out) const {
  const ops::PendingDesc& p = kind_.pending;
  const std::size_t half = width() * element_bytes(p.dtype);
  for (std::int64_t at = end - kind_.ratio; at < end; ++at, out += 2 * half) {
    if (at >= part.length) {
      const std::int64_t token = part.token_of(at);
      kernels_.convert({width(), input_row(kv_, token), kv_.dtype, out, p.dtype});
      kernels_.convert({width(), input_row(gate_, token), gate_.dtype, out + half, p.dtype});
    } else {
      const std::uint8_t* kv = stored_kv(part.read_slot, at, 0);
      std::memcpy(out, kv, half);
      std::memcpy(out + half, kv + 2 * half, half);  // a ring row: both halves of kv, then both of the gate
    }
  }
}

void Compressor::pool_open(const ops::StepRecord& part, std::int64_t end, RowBuffers& buffers) const {
  const std::int64_t begin = (end - 1) / kind_.ratio * kind_.ratio;
  const std::int64_t folded = fold_watermark(part.read_slot);
  const bool fresh = folded <= begin;
  if (!fresh) std::memcpy(buffers.acc.data(), accumulator(part.read_slot), 3 * width() * sizeof(float));
  fold(part, std::max(begin, folded), end, fresh, buffers.acc.data());
}

// The rows of the entry that closes at part.position; V4.1 has no position bias.
void Compressor::pool_rows(const ops::StepRecord& part, RowBuffers& buffers) const {
  const ops::PendingDesc& p = kind_.pending;
  const std::size_t gate = p.columns * element_bytes(p.dtype);
  for (int i = 0; i < kind_.ratio; ++i) {
    ops::SourceRow& row = buffers.sources[i];
    const std::int64_t position = std::int64_t{part.position} + 1 - kind_.ratio + i;
    if (position >= part.length) {
      const std::int64_t token = part.token_of(position);
      row = {input_row(kv_, token), input_row(gate_, token), buffers.zeros.data(), read_as(kv_.dtype, p.dtype), {}};
    } else {
      const std::uint8_t* kv = stored_kv(part.read_slot, position, 0);
      row = {kv, kv + gate, buffers.zeros.data(), read_as(p.dtype, p.dtype), {}};
    }
    row.fetch[0] = row.kv;
    row.fetch[1] = row.gate;
  }
  kernels_.pool(width(), buffers.sources.data(), kind_.ratio, buffers.acc.data(), buffers.row.data());
}

void Compressor::pool_entry(const ops::StepRecord& part, const ops::StepRecord* next, RowBuffers& buffers) const {
  const std::int64_t end = part.position + 1, begin = end - kind_.ratio;
  if (!kind_.overlap && !kind_.pending.folds()) return pool_rows(part, buffers);
  if (!kind_.overlap) {
    pool_open(part, end, buffers);
    return kernels_.mean(width(), buffers.acc.data(), buffers.row.data());
  }
  const int before = begin == 0 ? 0 : kind_.ratio;  // the first entry has no span before its own
  ops::SourceRow* rows = buffers.sources.data();
  ops::StepRecord now = part;
  if (part.count == 1 && part.in_place()) now.length = static_cast<std::int32_t>(end);  // its own row is stored as well
  find_rows({now, next, begin - before, before, 0}, rows);
  find_rows({now, next, begin, kind_.ratio, width()}, rows + before);
  kernels_.pool(width(), rows, before + kind_.ratio, buffers.acc.data(), buffers.row.data());
}

}  // namespace kv4::cpu
