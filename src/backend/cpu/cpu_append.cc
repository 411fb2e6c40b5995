// append and flush: the rows that a token writes.
#include <algorithm>
#include <cstring>

#include "backend/cpu/compressor.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/prefetch.h"

namespace kv4::cpu {
namespace {

// Only the last of R + 1 tokens overwrites a row that the image before the step holds, the image's oldest row. If the
// step runs again, the row is saved already.
void save_undo_row(const ops::WindowDesc& w, int window_tokens, const ops::StepRecord& token) {
  const std::int64_t overwritten = std::int64_t{token.position} - w.rows, slot = token.write_slot;
  if (overwritten < 0 || overwritten != token.length - window_tokens || w.undo_position(slot) == overwritten) return;
  const std::int64_t row = overwritten % w.rows;
  std::memcpy(w.undo_row.payload.at(slot, 0), w.ring.payload.at(slot, row), w.ring.payload.row_stride);
  std::memcpy(w.undo_row.scale.at(slot, 0), w.ring.scale.at(slot, row), w.ring.scale.row_stride);
  w.undo_position(slot) = static_cast<std::int32_t>(overwritten);
}

std::int64_t row_bytes(const ops::InputDesc& rows, codec::RowShape shape) {
  return shape.width * static_cast<std::int64_t>(element_bytes(rows.dtype));
}

// A decode's ring rows lie in different state slots and in no cache: they are prefetched a few tokens before they are
// written. Always inlined, because GCC drops calls of a function that only prefetches.
constexpr std::int64_t kPrefetchTokens = 6;

[[gnu::always_inline]] inline void prefetch_ring_row(const ops::WindowDesc& w, const ops::StepRecord& token) {
  if (token.padded() || token.count > kPrefetchTokens) return;  // the rows of a chunk are consecutive
  const std::int32_t slot = token.write_slot, row = token.position % w.rows;
  const std::uint8_t* payload = w.ring.payload.at(slot, row);
  for (std::int64_t at = 0; at < w.ring.payload.row_stride; at += 64) __builtin_prefetch(payload + at, 1);
  __builtin_prefetch(w.ring.scale.at(slot, row), 1);
}

[[gnu::always_inline]] inline void prefetch_token(const ops::AppendParams& params, std::int64_t index) {
  prefetch_ring_row(params.layer.window, params.step.tokens[index]);
  prefetch(input_row(params.window_rows, index), row_bytes(params.window_rows, params.layer.window.ring.shape));
}

// The page row of a token. The page's global scale is written with its first row.
struct PageRow {
  std::uint8_t *payload, *scale;

  PageRow(const ops::KindDesc& kind, const ops::StepDesc& step, const ops::StepRecord& token) {
    const std::int64_t block = token.block, row = token.position % step.block_tokens / kind.ratio;
    payload = kind.page.payload.at(block, row);
    scale = kind.page.scale.at(block, row);
    if (row == 0 && kind.page.global.data != nullptr) std::memcpy(kind.page.global.at(block, 0), &kind.global_scale, 4);
  }
};

// Quantises a finished row into its row of the page. The Hadamard transform changes `row`.
void store_row(const RowKernels& kernels, const ops::KindDesc& kind, const PageRow& to, float* row) {
  if (kind.hadamard) kernels.hadamard(kind.page.shape.width, row);
  kernels.encode(kind.page.format, kind.page.shape, row, to.payload, to.scale, kind.global_scale);
}

// The entry and the index key of a token close together and have the same RoPE angles.
class Rotation {
 public:
  Rotation(const RowKernels& kernels, RowBuffers& buffers) : kernels_(kernels), buffers_(buffers) {}

  void seek(const ops::RopeDesc& rope, std::int64_t position) {
    const int pairs = rope.rope_dim / 2;
    if (rope.cos != nullptr) {
      cos = rope.cos + position * pairs;
      sin = rope.sin + position * pairs;
      return;
    }
    if (rope.angles.low != table_ || position != at_) {
      kernels_.angles(rope.angles, position, buffers_.cos.data(), buffers_.sin.data());
      table_ = rope.angles.low;
      at_ = position;
    }
    cos = buffers_.cos.data();
    sin = buffers_.sin.data();
  }

  const float* cos = nullptr;
  const float* sin = nullptr;

 private:
  const RowKernels& kernels_;
  RowBuffers& buffers_;
  const double* table_ = nullptr;  // with position: the angles that the buffers hold
  std::int64_t at_ = -1;
};

// Norm and RoPE of a row that comes straight from the projection, as for an entry.
void finish_projection(const RowKernels& kernels, const ops::FrontEndDesc& front, int width, const void* row,
                       DType type, std::int64_t position, Rotation& rotation, RowBuffers& buffers) {
  kernels.load_as_bf16(row, type, width, buffers.row.data());
  rotation.seek(front.rope, position);
  kernels.finish({width, front.norm_weight, front.eps, front.rope.rope_dim / 2, rotation.cos, rotation.sin,
                  buffers.row.data(), buffers.tmp.data()});
}

// Window rows of a step's tokens.
class WindowRows {
 public:
  WindowRows(const RowKernels& kernels, const ops::AppendParams& params, Rotation& rotation, RowBuffers& buffers)
      : kernels_(kernels), params_(params), rotation_(rotation), buffers_(buffers) {}

  /// Stores a token's row into the ring; in a long step also into the scratch, because the ring keeps only the last
  /// rows.
  void write(std::int64_t index) const {
    const ops::StepRecord& token = params_.step.tokens[index];
    const ops::WindowDesc& w = params_.layer.window;
    std::uint8_t* ring_payload = w.ring.payload.at(token.write_slot, token.position % w.rows);
    std::uint8_t* ring_scale = w.ring.scale.at(token.write_slot, token.position % w.rows);
    if (token.in_place()) {
      save_undo_row(w, params_.layer.window_tokens, token);
      quantise(index, ring_payload, ring_scale);
      return;
    }
    write_scratch(index);
    if (token.position < token.end() - w.rows) return;
    std::memcpy(ring_payload, w.scratch.payload.at(0, index), w.ring.payload.row_stride);
    std::memcpy(ring_scale, w.scratch.scale.at(0, index), w.ring.scale.row_stride);
  }

  void write_scratch(std::int64_t index) const {
    const ops::WindowDesc& w = params_.layer.window;
    quantise(index, w.scratch.payload.at(0, index), w.scratch.scale.at(0, index));
  }

 private:
  void quantise(std::int64_t index, std::uint8_t* payload, std::uint8_t* scale) const {
    const ops::RowPlanes& ring = params_.layer.window.ring;
    const DType type = params_.window_rows.dtype;
    const void* row = input_row(params_.window_rows, index);
    float* values = buffers_.row.data();
    if (params_.front_end.norm_weight == nullptr)
      return kernels_.encode_input(ring.format, ring.shape, row, type, payload, scale, 1.0f, values);
    finish_projection(kernels_, params_.front_end, ring.shape.width, row, type, params_.step.tokens[index].position,
                      rotation_, buffers_);
    kernels_.encode(ring.format, ring.shape, values, payload, scale, 1.0f);
  }

  const RowKernels& kernels_;
  const ops::AppendParams& params_;
  Rotation& rotation_;
  RowBuffers& buffers_;
};

// The next token, within a short distance, that closes an entry whose other rows are all stored.
const ops::StepRecord* next_due(const ops::StepRecord* at, const ops::StepRecord* end, std::int32_t ratio) {
  constexpr std::int64_t kLookahead = 8;
  end = at + std::min<std::int64_t>(end - at, kLookahead);
  for (; at < end; ++at)
    if (!at->padded() && at->position == at->length && (at->position + 1) % ratio == 0 && at->position >= 2 * ratio)
      return at;
  return nullptr;
}

// Stores the rows of one kind of tokens [begin, end), which belong to one request. tmp: [width]
void flush_rows(const RowKernels& kernels, const ops::FlushParams& params, int k, std::int64_t begin, std::int64_t end,
                float* tmp) {
  const ops::KindDesc& kind = params.layer.kinds[k];
  const ops::InputDesc& rows = params.rows[k];
  const codec::RowShape shape = kind.page.shape;
  constexpr std::int64_t kRowsAhead = 12;
  begin += kind.ratio - 1 - params.step.tokens[begin].position % kind.ratio;  // the first token that closes an entry
  for (std::int64_t token = begin; token < end; token += kind.ratio) {
    // Most of these rows lie in different pages: no hardware prefetcher follows them.
    if (token + kRowsAhead * kind.ratio < end)
      prefetch(input_row(rows, token + kRowsAhead * kind.ratio), row_bytes(rows, shape));
    if (params.step.tokens[token].block < 0 || (params.valid != nullptr && params.valid[token] == 0)) continue;
    const PageRow to(kind, params.step, params.step.tokens[token]);
    const std::uint8_t* row = input_row(rows, token);
    if (kind.hadamard) {
      kernels.load_as_bf16(row, rows.dtype, shape.width, tmp);
      store_row(kernels, kind, to, tmp);
    } else {
      kernels.encode_input(kind.page.format, shape, row, rows.dtype, to.payload, to.scale, kind.global_scale, tmp);
    }
  }
}

int widest(const ops::LayerDesc& layer) {
  int width = layer.window.ring.shape.width;
  for (int k = 0; k < layer.num_kinds; ++k) width = std::max(width, layer.kinds[k].page.shape.width);
  return width;
}

// Number of rows that an entry of an overlapping kind pools.
int most_sources(const ops::LayerDesc& layer) {
  int rows = 0;
  for (int k = 0; k < layer.num_kinds; ++k)
    if (layer.kinds[k].overlap) rows = std::max(rows, 2 * layer.kinds[k].ratio);
  return rows;
}

}  // namespace

void CpuBackend::append(const ops::AppendParams& params) {
  const ops::LayerDesc& layer = params.layer;
  const ops::StepDesc& step = params.step;
  const int num_kinds = params.kv[0].data == nullptr ? 0 : layer.num_kinds;
  fit_buffers(widest(layer), most_sources(layer));

  // First, per request: fold the rows that this step pushes out of an online ring into the accumulator.
  for (int k = 0; k < num_kinds; ++k) {
    if (!layer.kinds[k].pending.online) continue;
    const Compressor compressor(kernels_, layer.kinds[k], params.kv[k], params.gate[k]);
    pool_.run(step.num_items, 8, [&](std::int64_t begin, std::int64_t end, int worker) {
      for (std::int64_t i = begin; i < end; ++i)
        if (!step.items[i].padded()) compressor.advance(step.items[i], buffers(worker));
    });
  }

  // Then each token independently: no token reads data that another token of the step writes.
  pool_.run(step.num_tokens, 8, [&](std::int64_t begin, std::int64_t end, int worker) {
    RowBuffers& buffer = buffers(worker);
    Rotation rotation(kernels_, buffer);
    const WindowRows window_rows(kernels_, params, rotation, buffer);
    for (std::int64_t i = begin; i < end; ++i) {
      const ops::StepRecord& token = step.tokens[i];
      if (i + kPrefetchTokens < end) prefetch_token(params, i + kPrefetchTokens);
      if (token.padded()) continue;
      const std::int64_t position = token.position;
      const ops::StepRecord* next = i + 1 < end && !step.tokens[i + 1].padded() ? &token + 1 : nullptr;
      window_rows.write(i);
      for (int k = 0; k < num_kinds; ++k) {
        const ops::KindDesc& kind = layer.kinds[k];
        const Compressor compressor(kernels_, kind, params.kv[k], params.gate[k]);
        compressor.store_pending(token, next);
        if ((position + 1) % kind.ratio != 0 || token.block < 0) continue;
        compressor.pool_entry(token, next_due(&token + 1, step.tokens + end, kind.ratio), buffer);
        rotation.seek(params.rope, position + 1 - kind.ratio);
        kernels_.finish({kind.page.shape.width, kind.norm_weight, layer.eps, params.rope.rope_dim / 2, rotation.cos,
                         rotation.sin, buffer.row.data(), buffer.tmp.data()});
        store_row(kernels_, kind, PageRow(kind, step, token), buffer.row.data());
      }
    }
  });
}

// V4.1: an entry and its index key are made from one latent, which is neither rotated nor stored.
void CpuBackend::append_owner(const ops::OwnerAppendParams& params) {
  const ops::AppendParams& rows = params.rows;
  const ops::StepDesc& step = rows.step;
  const ops::KindDesc &entries = rows.layer.kinds[0], &keys = rows.layer.kinds[1];
  const int width = entries.page.shape.width, pairs = rows.rope.rope_dim / 2;
  const float eps = rows.layer.eps;
  fit_buffers(widest(rows.layer), entries.ratio);
  pool_.run(step.num_tokens, 8, [&](std::int64_t begin, std::int64_t end, int worker) {
    RowBuffers& buffer = buffers(worker);
    float* row = buffer.row.data();
    float* key = buffer.key.data();
    Rotation rotation(kernels_, buffer);
    const WindowRows window_rows(kernels_, rows, rotation, buffer);
    const Compressor compressor(kernels_, entries, rows.kv[0], rows.gate[0]);
    for (std::int64_t i = begin; i < end; ++i) {
      const ops::StepRecord& token = step.tokens[i];
      if (rows.window_rows.data != nullptr && i + kPrefetchTokens < end) prefetch_token(rows, i + kPrefetchTokens);
      if (token.padded()) continue;
      if (rows.window_rows.data != nullptr) window_rows.write(i);
      if (entries.ratio > 1)
        compressor.store_pending(token, i + 1 < end && !step.tokens[i + 1].padded() ? &token + 1 : nullptr);
      if ((token.position + 1) % entries.ratio != 0 || token.block < 0) continue;
      if (entries.ratio > 1)
        compressor.pool_entry(token, nullptr, buffer);
      else
        kernels_.load_as_bf16(input_row(rows.kv[0], i), rows.kv[0].dtype, width, row);
      kernels_.finish({width, entries.norm_weight, eps, 0, nullptr, nullptr, row, buffer.tmp.data()});
      if (params.latents != nullptr)
        kernels_.convert({width, row, DType::f32, params.latents + i * params.latent_stride, DType::bf16});
      rotation.seek(rows.rope, std::int64_t{token.position} + 1 - entries.ratio);
      if (params.key_weight != nullptr) {
        const int key_width = keys.page.shape.width;
        kernels_.project({width, row, params.key_weight, key_width, key});
        kernels_.finish(
            {key_width, keys.norm_weight, eps, pairs, rotation.cos, rotation.sin, key, buffer.tmp.data()});
        store_row(kernels_, keys, PageRow(keys, step, token), key);
      }
      kernels_.rotate(pairs, rotation.cos, rotation.sin, row + width - 2 * pairs);
      store_row(kernels_, entries, PageRow(entries, step, token), row);
    }
  });
}

void CpuBackend::append_keys(const ops::KeyAppendParams& params) {
  const ops::StepDesc& step = params.step;
  const ops::KindDesc& keys = params.layer.kinds[1];
  const int width = keys.page.shape.width;
  fit_buffers(width);
  pool_.run(step.num_tokens, 8, [&](std::int64_t begin, std::int64_t end, int worker) {
    RowBuffers& buffer = buffers(worker);
    Rotation rotation(kernels_, buffer);
    for (std::int64_t i = begin; i < end; ++i) {
      const ops::StepRecord& token = step.tokens[i];
      if (token.padded() || (token.position + 1) % keys.ratio != 0 || token.block < 0) continue;
      kernels_.load_as_bf16(input_row(params.keys, i), params.keys.dtype, width, buffer.row.data());
      rotation.seek(params.rope, std::int64_t{token.position} + 1 - keys.ratio);
      kernels_.finish({width, keys.norm_weight, params.layer.eps, params.rope.rope_dim / 2, rotation.cos, rotation.sin,
                       buffer.row.data(), buffer.tmp.data()});
      store_row(kernels_, keys, PageRow(keys, step, token), buffer.row.data());
    }
  });
}

void CpuBackend::quantise_draft_rows(const ops::DraftParams& params) {
  ops::AppendParams rows;
  rows.layer = params.attend.layer;
  rows.step = params.attend.step;
  rows.front_end = params.front_end;
  rows.window_rows = params.rows;
  fit_buffers(rows.layer.window.ring.shape.width);
  pool_.run(rows.step.num_tokens, 8, [&](std::int64_t begin, std::int64_t end, int worker) {
    Rotation rotation(kernels_, buffers(worker));
    const WindowRows window_rows(kernels_, rows, rotation, buffers(worker));
    for (std::int64_t i = begin; i < end; ++i)
      if (!rows.step.tokens[i].padded()) window_rows.write_scratch(i);
  });
}

void CpuBackend::flush(const ops::FlushParams& params) {
  const ops::StepDesc& step = params.step;
  fit_buffers(widest(params.layer));
  pool_.run(step.num_tokens, 32, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t next = begin; begin < end; begin = next) {
      const ops::StepRecord& token = step.tokens[begin];
      next = token.padded() ? begin + 1 : std::min<std::int64_t>(end, token.first_token + token.count);
      for (int k = 0; k < params.layer.num_kinds && !token.padded(); ++k)
        if (params.rows[k].data != nullptr)
          flush_rows(kernels_, params, k, begin, next, buffers(worker).row.data());
    }
  });
}

}  // namespace kv4::cpu
