// append and flush for all sizes: a CTA per token and role, rows in shared memory, the arithmetic of ops/ and codec/
// unchanged. Bound by its barriers. It serves sizes and alignments that the tuned kernel does not support.
#include "backend/cuda/append/generic.cuh"

#include <algorithm>

#include "backend/cuda/rows/cta_group.cuh"
#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "codec/codec.h"
#include "kv4/cuda.h"
#include "ops/compress_row.h"
#include "schema/rope.h"

namespace kv4::cuda {
namespace {

constexpr int kThreads = 128;

/// Shared memory: acc [3, width], row [width], tmp [width rounded up to a power of two], cos and sin [pairs], and one
/// float of scratch.
struct Buffers {
  float *acc, *row, *tmp, *cos, *sin, *scratch;

  __device__ Buffers(float* base, int width, int rope_dim) {
    acc = base;
    row = acc + 3 * width;
    cos = row + width;
    sin = cos + rope_dim / 2;
    scratch = sin + rope_dim / 2;
    tmp = scratch + 1;
  }
  static std::size_t bytes(int width, int rope_dim) {
    int power = 1;
    while (power < width) power *= 2;
    return sizeof(float) * static_cast<std::size_t>(4 * width + rope_dim + 1 + power);
  }
};

__device__ const std::uint8_t* input_row(const ops::InputDesc& in, std::int64_t token, int column = 0) {
  return static_cast<const std::uint8_t*>(in.data) +
         (token * in.row_stride + column) * static_cast<std::int64_t>(element_bytes(in.dtype));
}

__device__ ops::RowType read_as(DType stored, DType rounded) {
  if (stored == DType::bf16) return ops::RowType::bf16;
  return rounded == DType::bf16 ? ops::RowType::f32_as_bf16 : ops::RowType::f32;
}

__device__ void convert(CtaGroup g, const void* from, DType from_type, int count, std::uint8_t* to, DType to_type) {
  const ops::RowType type = read_as(from_type, DType::f32);
  for (int c = g.lane(); c < count; c += g.size()) {
    const float x = ops::load_element(from, type, c);
    if (to_type == DType::f32)
      reinterpret_cast<float*>(to)[c] = codec::canonical_nan(x);
    else
      reinterpret_cast<std::uint16_t*>(to)[c] = codec::bf16_bits(x);
  }
}

__device__ void load_angles(CtaGroup g, const ops::RopeDesc& rope, std::int64_t position, const Buffers& b) {
  const int pairs = rope.rope_dim / 2;
  for (int i = g.lane(); i < pairs; i += g.size()) {
    if (rope.cos != nullptr) {
      b.cos[i] = rope.cos[position * pairs + i];
      b.sin[i] = rope.sin[position * pairs + i];
    } else {
      rope_angle(rope.angles, position, i, &b.cos[i], &b.sin[i]);
    }
  }
  g.sync();
}

__device__ void copy(CtaGroup g, std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) {
  for (std::int64_t i = g.lane(); i < bytes; i += g.size()) to[i] = from[i];
}

// --- window rows

__device__ void save_undo_row(CtaGroup g, const ops::WindowDesc& w, int window_tokens, const ops::StepRecord& r) {
  const std::int64_t overwritten = std::int64_t{r.position} - w.rows, slot = r.write_slot;
  if (overwritten < 0 || overwritten != r.length - window_tokens || w.undo_position(slot) == overwritten) return;
  copy(g, w.undo_row.payload.at(slot, 0), w.ring.payload.at(slot, overwritten % w.rows), w.ring.payload.row_stride);
  copy(g, w.undo_row.scale.at(slot, 0), w.ring.scale.at(slot, overwritten % w.rows), w.ring.scale.row_stride);
  g.sync();
  if (g.lane() == 0) w.undo_position(slot) = static_cast<std::int32_t>(overwritten);
}

__device__ void append_window_row(CtaGroup g, const ops::AppendParams& p, const ops::StepRecord& r, std::int64_t token,
                                  const Buffers& b) {
  const ops::WindowDesc& w = p.layer.window;
  const int width = w.ring.shape.width;
  const void* in = input_row(p.window_rows, token);
  const ops::RowType type = read_as(p.window_rows.dtype, DType::bf16);
  if (p.front_end.norm_weight == nullptr) {
    for (int c = g.lane(); c < width; c += g.size()) b.row[c] = ops::load_element(in, type, c);
  } else {  // finish_row of a pool of one row: numerator x, denominator 1
    for (int c = g.lane(); c < width; c += g.size()) {
      b.acc[width + c] = 1.0f;
      b.acc[2 * width + c] = ops::load_element(in, type, c);
    }
    load_angles(g, p.front_end.rope, r.position, b);
    ops::finish_row(g, width, b.acc, p.front_end.norm_weight, p.front_end.eps, p.front_end.rope.rope_dim / 2, b.cos,
                    b.sin, b.row, b.tmp);
  }
  if (r.in_place()) save_undo_row(g, w, p.layer.window_tokens, r);
  g.sync();
  const auto encode = [&](const ops::RowPlanes& to, std::int64_t block, std::int64_t row) {
    codec::with_codec(w.ring.format, [&](auto codec) {
      codec.encode(g, w.ring.shape, b.row, to.payload.at(block, row), to.scale.at(block, row), 1.0f);
    });
  };
  if (!r.in_place()) encode(w.scratch, 0, token);
  if (r.in_place() || r.position >= r.end() - w.rows) encode(w.ring, r.write_slot, r.position % w.rows);
}

// --- entries and index keys

// Quantises the finished row b.row into its row of the page.
__device__ void store_row(CtaGroup g, const ops::KindDesc& kind, const ops::StepDesc& step, int position, int block,
                          const Buffers& b) {
  if (kind.hadamard) ops::hadamard_row(g, kind.page.shape.width, b.row);
  const int row = position % step.block_tokens / kind.ratio;
  codec::with_codec(kind.page.format, [&](auto codec) {
    codec.encode(g, kind.page.shape, b.row, kind.page.payload.at(block, row), kind.page.scale.at(block, row),
                 kind.global_scale);
  });
  if (row == 0 && g.lane() == 0 && kind.page.global.data != nullptr)
    memcpy(kind.page.global.at(block, 0), &kind.global_scale, 4);
}

/// The compressor of one kind for one request. Each thread touches only its own channels until a row is
/// finished.
class Compressor {
 public:
  __device__ Compressor(CtaGroup g, const ops::AppendParams& p, int k, const ops::StepRecord& r, const Buffers& b)
      : g_(g), p_(p), kind_(p.layer.kinds[k]), kv_(p.kv[k]), gate_(p.gate[k]), r_(r), b_(b) {}

  // The rows of an online ring must be folded before the step overwrites them, so one CTA does the whole request of a
  // step in place.
  __device__ void run() const {
    if (kind_.overlap || !r_.in_place()) {
      store_pending(r_.position);
      close(r_.position);
      if (r_.position == r_.end() - 1) advance();
      return;
    }
    if (r_.position != r_.length) return;
    advance();
    for (int at = r_.length; at < r_.end(); ++at) store_pending(at);
    for (int at = r_.length; at < r_.end(); ++at) close(at);
  }

 private:
  __device__ int width() const { return kind_.page.shape.width; }
  __device__ std::int32_t& fold_watermark(int slot) const {
    return kind_.pending.fold_watermarks[slot * kind_.pending.fold_watermark_stride];
  }
  __device__ float* accumulator(int slot) const {
    return reinterpret_cast<float*>(kind_.pending.accumulator.at(slot, 0));
  }

  __device__ ops::SourceRow row_at(int position, int column) const {
    const ops::PendingDesc& pending = kind_.pending;
    ops::SourceRow row{};
    row.bias = kind_.bias + std::int64_t{position % kind_.ratio} * pending.columns + column;
    if (position >= r_.length) {
      row.kv = input_row(kv_, r_.token_of(position), column);
      row.gate = input_row(gate_, r_.token_of(position), column);
      row.type = read_as(kv_.dtype, pending.dtype);
    } else {
      const std::int64_t bytes = static_cast<std::int64_t>(element_bytes(pending.dtype));
      const std::uint8_t* kv = pending.ring.at(r_.read_slot, position % pending.rows) + column * bytes;
      row.kv = kv;
      row.gate = kv + pending.columns * bytes;
      row.type = read_as(pending.dtype, pending.dtype);
    }
    return row;
  }

  __device__ void fold(int begin, int end, bool fresh, const float* start) const {
    if (!fresh)
      for (int c = g_.lane(); c < width(); c += g_.size())
        for (int part = 0; part < 3; ++part) b_.acc[part * width() + c] = start[part * width() + c];
    for (int at = begin; at < end; ++at, fresh = false) {
      const ops::SourceRow row = row_at(at, 0);
      ops::fold_rows(g_, width(), &row, 1, fresh, b_.acc);
    }
  }

  __device__ void advance() const {
    if (!kind_.pending.online) return;
    const int from = fold_watermark(r_.read_slot), to = r_.end() - kind_.pending.rows;
    if (to <= from) return;
    const int begin = to / kind_.ratio * kind_.ratio;
    if (to > begin) {
      fold(max(from, begin), to, from <= begin, accumulator(r_.read_slot));
      float* acc = accumulator(r_.write_slot);
      for (int c = g_.lane(); c < width(); c += g_.size())
        for (int part = 0; part < 3; ++part) acc[part * width() + c] = b_.acc[part * width() + c];
    }
    g_.sync();  // all threads have read the fold watermark
    if (g_.lane() == 0) fold_watermark(r_.write_slot) = to;
    g_.sync();
  }

  __device__ void store_pending(int position) const {
    const ops::PendingDesc& pending = kind_.pending;
    if (position < r_.end() - pending.rows) return;
    std::uint8_t* row = pending.ring.at(r_.write_slot, position % pending.rows);
    convert(g_, input_row(kv_, r_.token_of(position)), kv_.dtype, pending.columns, row, pending.dtype);
    convert(g_, input_row(gate_, r_.token_of(position)), gate_.dtype, pending.columns,
            row + pending.columns * static_cast<std::int64_t>(element_bytes(pending.dtype)), pending.dtype);
  }

  __device__ void close(int position) const {
    const int begin = position + 1 - kind_.ratio;
    if ((position + 1) % kind_.ratio != 0) return;
    if (kind_.overlap) {
      const int first = begin == 0 ? 0 : begin - kind_.ratio;  // the first entry has no span before its own
      const auto row = [&](int i) { return row_at(first + i, first + i < begin ? 0 : width()); };
      ops::pool_rows(g_, width(), position + 1 - first, row, b_.acc);
    } else {
      const int folded = fold_watermark(r_.read_slot);
      fold(max(begin, folded), position + 1, folded <= begin, accumulator(r_.read_slot));
    }
    load_angles(g_, p_.rope, begin, b_);
    ops::finish_row(g_, width(), b_.acc, kind_.norm_weight, p_.layer.eps, p_.rope.rope_dim / 2, b_.cos, b_.sin, b_.row,
                    b_.tmp);
    store_row(g_, kind_, p_.step, position, p_.step.tokens[r_.token_of(position)].block, b_);
    g_.sync();
  }

  CtaGroup g_;
  const ops::AppendParams& p_;
  const ops::KindDesc& kind_;
  const ops::InputDesc &kv_, &gate_;
  const ops::StepRecord& r_;
  const Buffers& b_;
};

/// Role 0 is the window, role k + 1 kind k.
__global__ void __launch_bounds__(kThreads) append_generic_kernel(const __grid_constant__ ops::AppendParams p) {
  extern __shared__ float shared[];
  const std::int64_t token = blockIdx.x % p.step.num_tokens;
  const int role = static_cast<int>(blockIdx.x / p.step.num_tokens);
  const ops::StepRecord r = p.step.tokens[token];
  if (r.padded()) return;
  const int width = role == 0 ? p.layer.window.ring.shape.width : p.layer.kinds[role - 1].page.shape.width;
  const Buffers b(shared, width, max(p.rope.rope_dim, p.front_end.rope.rope_dim));
  const CtaGroup g(b.scratch);
  if (role == 0)
    append_window_row(g, p, r, token, b);
  else
    Compressor(g, p, role - 1, r, b).run();
}

__global__ void __launch_bounds__(kThreads) flush_kernel(const __grid_constant__ ops::FlushParams p) {
  extern __shared__ float shared[];
  const std::int64_t token = blockIdx.x;
  const ops::StepRecord r = p.step.tokens[token];
  if (r.padded() || (p.valid != nullptr && p.valid[token] == 0)) return;
  for (int k = 0; k < p.layer.num_kinds; ++k) {
    const ops::KindDesc& kind = p.layer.kinds[k];
    if ((r.position + 1) % kind.ratio != 0) continue;
    const int width = kind.page.shape.width;
    const Buffers b(shared, width, 0);
    const CtaGroup g(b.scratch);
    const void* in = input_row(p.rows[k], token);
    for (int c = g.lane(); c < width; c += g.size())
      b.row[c] = ops::load_element(in, read_as(p.rows[k].dtype, DType::bf16), c);
    g.sync();
    store_row(g, kind, p.step, r.position, r.block, b);
    g.sync();
  }
}

int widest(const ops::LayerDesc& layer) {
  int width = layer.window.ring.shape.width;
  for (int k = 0; k < layer.num_kinds; ++k) width = std::max(width, layer.kinds[k].page.shape.width);
  return width;
}

}  // namespace

cudaError_t append_generic(const ops::AppendParams& p, cudaStream_t stream) {
  if (p.step.num_tokens <= 0) return cudaSuccess;
  const int roles = 1 + (p.kv[0].data == nullptr ? 0 : p.layer.num_kinds);
  const std::size_t shared = Buffers::bytes(widest(p.layer), std::max(p.rope.rope_dim, p.front_end.rope.rope_dim));
  return launch_in_order(append_generic_kernel, static_cast<unsigned>(p.step.num_tokens * roles), kThreads, shared,
                         stream, p);
}

cudaError_t flush(const ops::FlushParams& p, cudaStream_t stream) {
  const NvtxRange range("kv4 launch flush", true);
  if (p.step.num_tokens <= 0) return cudaSuccess;
  return launch_in_order(flush_kernel, static_cast<unsigned>(p.step.num_tokens), kThreads,
                         Buffers::bytes(widest(p.layer), 0), stream, p);
}

}  // namespace kv4::cuda
