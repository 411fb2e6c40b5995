// The operations on pools that the caller keeps, for kv4/torch: tensors in, tensors out, no manager. On the CPU they
// run at once on one backend of this process; on a GPU they are queued on torch's current stream.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>

#include "backend/backend.h"
#include "backend/raw_calls.h"
#include "bindings.h"
#include "codec/codec.h"
#include "kv4/error.h"
#include "tensors.h"

namespace kv4::python {
namespace {

constexpr std::int64_t kMaxWidth = 8192;  // channels of a row
constexpr int kTail = 64;                 // channels that fp8_tile64 and fp8_row keep in bf16
constexpr std::int64_t kKeyPage = 64;     // keys of a page of keys that lie in one piece
constexpr std::int64_t kMaxInt = 0x7FFFFFFF;

using enum Element;

// --- where operations run

struct CpuRunner {
  std::mutex mutex;
  int threads = 1;
  std::shared_ptr<Backend> backend;  // made at the first call
};
CpuRunner& cpu_runner() {
  static CpuRunner runner;
  return runner;
}

template <class Params>
using CpuCall = void (Backend::*)(const Params&);
template <class Params>
using CudaCall = void (*)(int, Stream, const Params&);

/// Runs operations of one call, in order.
class Runner {
 public:
  explicit Runner(const TensorCall& call) : on_cuda_(call.on_cuda()), device_(call.device()), stream_(call.stream()) {
    if (on_cuda_) raw::require_cuda(device_);
  }

  template <class Params>
  void run(CpuCall<Params> on_cpu, CudaCall<Params> on_cuda, const Params& params) const {
    if (on_cuda_) return on_cuda(device_, stream_, params);
    const nb::gil_scoped_release no_gil;
    CpuRunner& runner = cpu_runner();
    const std::lock_guard lock(runner.mutex);
    if (runner.backend == nullptr) runner.backend = make_cpu_backend(runner.threads);
    (runner.backend.get()->*on_cpu)(params);
  }

 private:
  bool on_cuda_;
  int device_;
  Stream stream_;
};

// --- arguments

DType dtype_of(const Tensor& t) {
  switch (t.element) {
    case f32: return DType::f32;
    case bf16: return DType::bf16;
    case i32: return DType::i32;
    default: return DType::u8;
  }
}

ops::InputDesc input(const Tensor& t, int first) { return {t.data, dtype_of(t), t.row_stride(first)}; }

struct RowBytes {
  std::int64_t payload, scale;
};
RowBytes row_bytes(Format format, RowShape shape) {
  return codec::with_codec(format, [&](auto codec) {
    return RowBytes{codec.payload_bytes(shape), codec.scale_bytes(shape)};
  });
}

/// A format of rows or keys that operations on foreign pools take.
Format format_of(const TensorCall& call, const char* name, const std::string& text, bool for_rows, bool for_keys) {
  const Format format = parse_format(text);
  const codec::FormatInfo& info = codec::format_info(format);
  if (!info.has_operations) call.refuse(name, text + " has no operations yet; rows can be fp8_tile64, fp8_row or bf16");
  if (info.has_global)
    call.refuse(name, text + " has a scale per page, which pools of other engines have no place for");
  if (!(for_rows && info.for_rows) && !(for_keys && info.for_keys))
    call.refuse(name, text + (for_rows ? " is a format of index keys; rows can be fp8_tile64, fp8_row or bf16"
                                       : " is a format of rows; index keys can be mxfp4, fp8 or bf16"));
  return format;
}

bool has_tail(Format format) { return format == Format::fp8_tile64 || format == Format::fp8_row; }

RowShape shape_of(const TensorCall& call, const char* name, Format format, std::int64_t width) {
  const int tail = has_tail(format) ? kTail : 0, tile = codec::format_info(format).tile;
  if (width <= tail || width > kMaxWidth || (width - tail) % tile != 0)
    call.refuse(name, "has " + std::to_string(width) + " channels; " + to_string(format) + " takes " +
                          std::to_string(tail + tile) + " to " + std::to_string(kMaxWidth) +
                          (tile > 1 ? ", in steps of " + std::to_string(tile) : ""));
  return {static_cast<std::int32_t>(width), tail};
}

/// A pool: pages of rows, all payloads of a page before all of its scales.
struct Pool {
  ops::RowPlanes rows;
  std::int32_t rows_per_page = 0;
  std::int64_t num_slots = 0;
};

const TensorCall::Rule kPoolRule = {{u8, i8, e4m3, bf16}, 3, 4};

Pool pool_of(const TensorCall& call, const Tensor& t, Format format, RowShape shape) {
  const auto [payload, scale] = row_bytes(format, shape);
  const std::int64_t element = t.element_bytes(), pages = t.shape[0], rows = t.shape[1];
  if (t.element == bf16 && format != Format::bf16)
    call.refuse(t.name,
                "must be uint8 or float8_e4m3fn for rows of " + std::string(to_string(format)) + "; got bfloat16");
  if (t.ndim == 4 && t.shape[2] != 1)
    call.refuse(t.name, "must have one head, [pages, rows, 1, bytes]; got " + shape_text(t));
  if (t.last() * element != payload + scale)
    call.refuse(t.name, "must have rows of " + std::to_string(payload + scale) + " bytes (" +
                            std::string(to_string(format)) + ", " + std::to_string(shape.width) + " channels); got " +
                            std::to_string(t.last() * element));
  if (rows < 1 || rows > kMaxInt) call.refuse(t.name, "must have 1 to 2147483647 rows in a page; got " + shape_text(t));
  const std::int64_t page_bytes = t.strides[0] * element;
  if (t.strides[t.ndim - 1] != 1 || (rows > 1 && t.strides[1] != t.last()))
    call.refuse(t.name, "must have dense pages: strides " + std::to_string(t.last()) +
                            " from row to row and 1 within; got " + std::to_string(t.strides[1]) + " and " +
                            std::to_string(t.strides[t.ndim - 1]));
  if (pages > 1 && page_bytes < rows * (payload + scale))
    call.refuse(t.name, "must have pages that do not overlap: a stride of at least " + std::to_string(rows * t.last()) +
                            "; got " + std::to_string(t.strides[0]));
  Pool pool;
  pool.rows = {format, shape, {t.data, page_bytes, payload}, {t.data + rows * payload, page_bytes, scale}, {}};
  pool.rows_per_page = static_cast<std::int32_t>(rows);
  pool.num_slots = pages * rows;
  return pool;
}

/// The list of an index tensor [tokens, n], [requests, tokens of a request, n] or [tokens, 1, n].
ops::SlotList list_of(const TensorCall& call, const Tensor& slots, const Tensor& lens, const Tensor& q,
                      std::int64_t num_slots) {
  static constexpr std::int32_t kNoSlot = -1;
  const bool by_request = q.ndim == 4;
  const std::int64_t n = slots.last(), each = by_request ? q.shape[1] : 1;
  const bool fits = by_request ? slots.ndim == 3 && slots.shape[0] == q.shape[0] && slots.shape[1] == q.shape[1]
                               : slots.shape[0] == q.shape[0] && (slots.ndim == 2 || slots.shape[1] == 1);
  if (!fits)
    call.refuse(slots.name, std::string("must be ") + (by_request ? "[b, s_q, n]" : "[tokens, n] or [tokens, 1, n]") +
                                " for q " + shape_text(q) + "; got " + shape_text(slots));
  if (n > kMaxInt) call.refuse(slots.name, "is longer than 2147483647");
  ops::SlotList list;
  list.slots = slots.data == nullptr || n == 0 ? &kNoSlot : slots.as<std::int32_t>();
  list.limit = static_cast<std::int32_t>(std::min(num_slots, kMaxInt));
  if (lens) {
    call.require_shape(lens, {q.shape[0]});
    list.lens = lens.as<std::int32_t>();
  }
  if (each == 1) {
    list.stride = slots.shape[0] == 1 ? n : slots.strides[0];
  } else {
    list.tokens_per_request = static_cast<std::int32_t>(each);
    list.request_stride = slots.strides[0];
    list.stride = slots.strides[1];
  }
  if (list.stride != n || each != 1) list.count = static_cast<std::int32_t>(n);
  return list;
}

std::int64_t heads_of(const TensorCall& call, const Tensor& q, std::int64_t most) {
  const std::int64_t heads = q.shape[q.ndim - 2];
  if (heads < 1 || heads > most)
    call.refuse(q.name, "must have 1 to " + std::to_string(most) + " heads; got " + shape_text(q));
  return heads;
}

std::int32_t tokens_of(const TensorCall& call, const Tensor& t, int dims_of_a_token) {
  const std::int64_t tokens = t.rows(t.ndim - dims_of_a_token);
  if (tokens > kMaxInt / 128) call.refuse(t.name, "has too many tokens: " + std::to_string(tokens));
  return static_cast<std::int32_t>(tokens);
}

// --- attend

/// What attend and attend_bf16_rows have in common: all but the rows.
struct AttendTensors {
  Tensor q, sink, out, lse, max_logits, workspace;
};

void fill_attend(const TensorCall& call, const AttendTensors& t, double softmax_scale, bool lse_of_rows,
                 ops::AttendParams& p) {
  const std::int64_t heads = heads_of(call, t.q, ops::kMaxQueryHeads);
  p.num_heads = static_cast<std::int32_t>(heads);
  p.step.num_tokens = tokens_of(call, t.q, 2);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.q = input(t.q, t.q.ndim - 2);
  if (t.sink) {
    call.require_shape(t.sink, {heads});
    p.sink = t.sink.as<float>();
  }
  const auto require_heads = [&](const Tensor& out, int dims) {  // q's shape, or that without channels
    if (!out) return;
    bool same = out.ndim == dims;
    for (int d = 0; d < dims && same; ++d) same = out.shape[d] == t.q.shape[d];
    if (!same)
      call.refuse(out.name, std::string("must have the shape of q") + (dims < t.q.ndim ? " without channels" : "") +
                                ", " + shape_text(t.q) + "; got " + shape_text(out));
  };
  require_heads(t.out, t.q.ndim);
  require_heads(t.lse, t.q.ndim - 1);
  require_heads(t.max_logits, t.q.ndim - 1);
  p.out = {t.out.data, dtype_of(t.out)};
  p.lse = t.lse.as<float>();
  p.lse_mode = lse_of_rows ? ops::LseMode::rows : ops::LseMode::all;
  p.max_logits = t.max_logits.as<float>();
  p.workspace = t.workspace.data;
  p.workspace_bytes = t.workspace ? t.workspace.shape[0] : 0;
}

void attend(nb::handle q, nb::handle cache, nb::handle indices, nb::handle lens, nb::handle extra_cache,
            nb::handle extra_indices, nb::handle extra_lens, nb::handle sink, double softmax_scale,
            const std::string& format, const std::string& extra_format, bool lse_of_rows, nb::handle workspace,
            nb::handle out, nb::handle lse, nb::handle max_logits) {
  TensorCall call("attend");
  AttendTensors t;
  t.q = call.rows(q, "q", {{bf16, f32}, 3, 4}, -2);
  const Tensor pages = call.in(cache, "cache", kPoolRule);
  const Tensor list = call.rows(indices, "indices", {{i32}, 2, 3}, -1);
  const Tensor list_lens = call.optional_rows(lens, "lens", {{i32}, 1, 1}, 0);
  const Tensor extra_pages = call.optional(extra_cache, "extra_cache", kPoolRule);
  const Tensor extra_list = call.optional_rows(extra_indices, "extra_indices", {{i32}, 2, 3}, -1);
  const Tensor extra_list_lens = call.optional_rows(extra_lens, "extra_lens", {{i32}, 1, 1}, 0);
  t.sink = call.optional_rows(sink, "sink", {{f32}, 1, 1}, 0);
  t.workspace = call.optional(workspace, "workspace", {{u8}, 1, 1});
  t.out = call.out(out, "out", {{bf16, f32}, 3, 4});
  t.lse = call.optional_out(lse, "lse", {{f32}, 2, 3});
  t.max_logits = call.optional_out(max_logits, "max_logits", {{f32}, 2, 3});

  ops::AttendParams p;
  fill_attend(call, t, softmax_scale, lse_of_rows, p);
  const auto read_pool = [&](const Tensor& from, const char* name, const std::string& text) {
    const Format of_rows = format_of(call, name, text, true, false);
    return pool_of(call, from, of_rows, shape_of(call, "q", of_rows, t.q.last()));
  };
  const Pool rows = read_pool(pages, "format", format);
  p.layer.window.ring = rows.rows;
  p.layer.window.rows = rows.rows_per_page;
  p.window_slots = list_of(call, list, list_lens, t.q, rows.num_slots);
  if (static_cast<bool>(extra_pages) != static_cast<bool>(extra_list))
    call.refuse("extra_cache", "and extra_indices belong together; one of them is None");
  if (extra_list_lens && !extra_list) call.refuse("extra_lens", "needs extra_cache and extra_indices");
  if (extra_pages) {
    const Pool entries = read_pool(extra_pages, "extra_format", extra_format);
    p.layer.num_kinds = 1;
    p.layer.kinds[0].page = entries.rows;
    p.layer.kinds[0].rows_per_block = entries.rows_per_page;
    p.layer.kinds[0].ratio = 1;
    p.entry_slots = list_of(call, extra_list, extra_list_lens, t.q, entries.num_slots);
  }
  if (call.on_cuda()) {
    p.list_workspace_bytes = ops::attend_list_bytes(p.step.num_tokens, p.num_heads, p.window_slots.max_length(),
                                                    extra_pages ? p.entry_slots.max_length() : 0);
    p.list_workspace = call.scratch(p.list_workspace_bytes);
  }
  if (p.step.num_tokens > 0) Runner(call).run<ops::AttendParams>(&Backend::attend, raw::attend, p);
  call.finish();
}

void attend_bf16_rows(nb::handle q, nb::handle rows, nb::handle indices, nb::handle lens, nb::handle sink,
                      double softmax_scale, bool lse_of_rows, nb::handle out, nb::handle lse, nb::handle max_logits) {
  TensorCall call("attend_bf16_rows");
  AttendTensors t;
  t.q = call.rows(q, "q", {{bf16}, 3, 3}, -2);
  const Tensor from = call.rows(rows, "rows", {{bf16}, 2, 3}, -1);
  const Tensor list = call.rows(indices, "indices", {{i32}, 2, 3}, -1);
  const Tensor list_lens = call.optional_rows(lens, "lens", {{i32}, 1, 1}, 0);
  t.sink = call.optional_rows(sink, "sink", {{f32}, 1, 1}, 0);
  t.out = call.out(out, "out", {{bf16, f32}, 3, 3});
  t.lse = call.optional_out(lse, "lse", {{f32}, 2, 2});
  t.max_logits = call.optional_out(max_logits, "max_logits", {{f32}, 2, 2});

  ops::AttendParams p;
  fill_attend(call, t, softmax_scale, lse_of_rows, p);
  if (from.ndim == 3 && from.shape[1] != 1)
    call.refuse("rows", "must have one head, [n, 1, channels]; got " + shape_text(from));
  const RowShape shape = shape_of(call, "q", Format::bf16, t.q.last());
  if (from.last() != shape.width)
    call.refuse("rows", "must have q's " + std::to_string(shape.width) + " channels; got " + shape_text(from));
  const std::int64_t row_bytes = 2 * from.row_stride(from.ndim - 1);
  p.layer.num_kinds = 1;  // as cuda::attend wants bf16 rows: entries without a window
  p.layer.kinds[0].page = {Format::bf16, shape, {from.data, row_bytes, row_bytes}, {}, {}};
  p.layer.kinds[0].rows_per_block = p.layer.kinds[0].ratio = 1;
  p.entry_slots = list_of(call, list, list_lens, t.q, from.shape[0]);
  if (p.step.num_tokens > 0) Runner(call).run<ops::AttendParams>(&Backend::attend, raw::attend, p);
  call.finish();
}

// --- rows by slot

ops::SlotRowsParams slot_rows(const TensorCall& call, const Tensor& pages, const Tensor& slots, const Tensor& dense,
                              const std::string& format) {
  const Format of_rows = format_of(call, "format", format, true, true);
  const Pool pool = pool_of(call, pages, of_rows, shape_of(call, dense.name, of_rows, dense.last()));
  ops::SlotRowsParams p;
  p.rows = pool.rows;
  p.rows_per_block = pool.rows_per_page;
  p.num_slots = pool.num_slots;
  p.slots = slots.data;
  p.has_wide_slots = slots.element == i64;
  p.num_rows = slots.rows(slots.ndim);
  bool same = dense.ndim == slots.ndim + 1;
  for (int d = 0; d < slots.ndim && same; ++d) same = dense.shape[d] == slots.shape[d];
  if (!same)
    call.refuse(dense.name,
                "must have the shape of slots, " + shape_text(slots) + ", and channels; got " + shape_text(dense));
  return p;
}

void append(nb::handle rows, nb::handle cache, nb::handle slots, const std::string& format) {
  TensorCall call("append");
  const Tensor from = call.rows(rows, "rows", {{bf16, f32}, 2, 2}, -1);
  const Tensor pages = call.in(cache, "cache", kPoolRule);
  const Tensor at = call.rows(slots, "slots", {{i32, i64}, 1, 1}, 0);
  ops::SlotRowsParams p = slot_rows(call, pages, at, from, format);
  p.in = input(from, 1);
  if (p.num_rows > 0 && p.num_slots > 0)
    Runner(call).run<ops::SlotRowsParams>(&Backend::write_slots, raw::write_slots, p);
}

void gather(nb::handle cache, nb::handle slots, const std::string& format, nb::handle out, nb::handle valid) {
  TensorCall call("gather");
  const Tensor pages = call.in(cache, "cache", kPoolRule);
  const Tensor at = call.rows(slots, "slots", {{i32, i64}, 1, 3}, 0);
  const Tensor to = call.out(out, "out", {{bf16, f32}, 2, 4});
  const Tensor there = call.optional_out(valid, "valid", {{boolean, u8}, 1, 3});
  ops::SlotRowsParams p = slot_rows(call, pages, at, to, format);
  p.out = {to.data, dtype_of(to)};
  if (there && there.rows(there.ndim) != p.num_rows)
    call.refuse("valid", "must have the shape of slots, " + shape_text(at) + "; got " + shape_text(there));
  p.valid = there.data;
  if (p.num_rows > 0) Runner(call).run<ops::SlotRowsParams>(&Backend::gather_slots, raw::gather_slots, p);
  call.finish();
}

// --- index scores

/// The parts of an index workspace: records, a block table, scales of one, scores to be placed, and the operation's
/// own. All are aligned to kLine.
struct IndexSpace {
  static constexpr std::int64_t kLine = 256;
  static constexpr std::int64_t kMaxBytes = 128 << 20;       // of the operation's own, if it has more than one token
  static constexpr std::int64_t kMaxScoreBytes = 256 << 20;  // of scores to be placed, likewise
  std::int64_t token_bytes, tiles, score_tokens;
  std::int64_t table_at, ones_at, scores_at, space_at, bytes;

  /// scores: of scores that are placed; 0: they are not.
  IndexSpace(std::int64_t tokens, std::int64_t heads, std::int64_t width, std::int64_t max_keys, std::int64_t table,
             std::int64_t score_stride) {
    const auto lines = [](std::int64_t n) { return (n + kLine - 1) / kLine * kLine; };
    const std::int64_t count = std::max<std::int64_t>(tokens, 1);
    const auto fit = [&](std::int64_t each, std::int64_t limit) {
      return std::clamp<std::int64_t>(limit / std::max<std::int64_t>(each, 1), 1, count);
    };
    token_bytes = ops::index_token_bytes(max_keys, heads, width);
    tiles = fit(token_bytes, kMaxBytes);
    score_tokens = fit(4 * score_stride, kMaxScoreBytes);
    table_at = lines(count * static_cast<std::int64_t>(sizeof(ops::StepRecord)));
    ones_at = table_at + lines(4 * table);
    scores_at = ones_at + lines(4 * ops::kMaxIndexHeads);
    space_at = scores_at + lines(4 * score_stride * score_tokens);
    bytes = space_at + tiles * token_bytes;
  }
};

struct IndexTensors {
  Tensor q, q_scale, weights;
};

const TensorCall::Rule kQueryRule = {{bf16, f32, e4m3, u8, i8}, 3, 4};

IndexTensors index_tensors(TensorCall& call, nb::handle q, nb::handle q_scale, nb::handle weights) {
  IndexTensors t;
  t.q = call.rows(q, "q", kQueryRule, -2);
  t.q_scale = call.optional(q_scale, "q_scale", {{f32, i32, u8, e8m0}, 2, 4});
  t.weights = call.rows(weights, "weights", {{f32}, 2, 3}, -1);
  return t;
}

/// Heads, queries and weights; the shape of a key.
RowShape fill_queries(const TensorCall& call, const IndexTensors& t, Format format, ops::IndexParams& p) {
  const std::int64_t heads = heads_of(call, t.q, ops::kMaxIndexHeads);
  const bool is_encoded = t.q.element != bf16 && t.q.element != f32;
  const bool is_packed = is_encoded && format == Format::mxfp4;
  const RowShape shape = shape_of(call, "q", format, t.q.last() * (is_packed ? 2 : 1));
  p.num_heads = static_cast<std::int32_t>(heads);
  p.step.num_tokens = tokens_of(call, t.q, 2);
  p.q = input(t.q, t.q.ndim - 2);
  if (is_encoded) {
    p.q.dtype = DType::u8;
    if (format == Format::bf16) call.refuse("q", "must be bfloat16 or float32 for keys of bf16");
    const std::int64_t scale = row_bytes(format, shape).scale;
    if (is_packed && !t.q_scale) call.refuse("q_scale", "must be given with queries encoded as mxfp4");
    if (t.q_scale) {
      const std::int64_t bytes = t.q_scale.rows(t.q_scale.ndim) * t.q_scale.element_bytes();
      if (bytes != p.step.num_tokens * heads * scale || !t.q_scale.is_dense())
        call.refuse("q_scale", "must be dense, with " + std::to_string(scale) + " bytes per token and head of q " +
                                   shape_text(t.q) + "; got " + shape_text(t.q_scale) + " of " +
                                   element_name(t.q_scale.element));
      p.q_scale = {t.q_scale.data, DType::u8, heads * scale};
    }
  } else if (t.q_scale) {
    call.refuse("q_scale", "belongs to encoded queries; q is not encoded");
  }
  if (t.weights.last() != heads || t.weights.rows(t.weights.ndim - 1) != p.step.num_tokens)
    call.refuse("weights", "must be [" + std::to_string(p.step.num_tokens) + ", " + std::to_string(heads) + "] for q " +
                               shape_text(t.q) + "; got " + shape_text(t.weights));
  p.weights = input(t.weights, t.weights.ndim - 1);
  return shape;
}

/// lens: [requests] or [tokens], as [requests, tokens of a request] or in one dimension.
void fill_lens(const TensorCall& call, const Tensor& lens, const Tensor& tokens, int token_dims, ops::KeyRanges& r) {
  const bool by_request = tokens.ndim - token_dims == 2;
  const std::int64_t requests = tokens.shape[0], each = by_request ? tokens.shape[1] : 1;
  const bool fits =
      lens.ndim == 1 ? lens.shape[0] == requests : by_request && lens.shape[0] == requests && lens.shape[1] == each;
  if (!fits)
    call.refuse(lens.name,
                "must be [" + std::to_string(requests) + "]" +
                    (by_request ? " or [" + std::to_string(requests) + ", " + std::to_string(each) + "]" : "") +
                    "; got " + shape_text(lens));
  r.num_tokens = static_cast<std::int32_t>(requests * each);
  r.tokens_per_request = static_cast<std::int32_t>(std::max<std::int64_t>(each, 1));
  r.lens = lens.as<std::int32_t>();
  r.has_token_lens = lens.ndim == 2;
}

/// Index scores over pages of a pool.
struct PagedIndex {
  ops::IndexParams p;
  ops::RangeTablesParams tables;

  PagedIndex(TensorCall& call, const IndexTensors& t, const Tensor& pages, const Tensor& lens, const Tensor& table,
             const std::string& format, bool hadamard, const std::string& mode, std::int64_t max_keys) {
    const Format of_keys = format_of(call, "format", format, false, true);
    const RowShape shape = fill_queries(call, t, of_keys, p);
    const Pool pool = pool_of(call, pages, of_keys, shape);
    if (table.shape[0] != t.q.shape[0])
      call.refuse("block_table", "must have a row per request of q " + shape_text(t.q) + "; got " + shape_text(table));
    fill_lens(call, lens, t.q, 2, tables.ranges);
    const std::int64_t room = table.shape[1] * pool.rows_per_page;
    if (room > kMaxInt)
      call.refuse("block_table", "has room for more than 2147483647 keys of a request: " + shape_text(table));
    tables.ranges.max_keys = static_cast<std::int32_t>(pool.num_slots == 0 ? 0 : std::min(max_keys, room));
    tables.page_ids = table.as<std::int32_t>();
    tables.page_id_stride = table.strides[0];
    tables.num_pages = pages.shape[0];
    tables.table_rows = static_cast<std::int32_t>(table.shape[0]);
    tables.table_width = static_cast<std::int32_t>(table.shape[1]);
    p.kind = 0;
    p.mode = parse_score_mode(mode);
    p.layer.num_kinds = 1;
    ops::KindDesc& kind = p.layer.kinds[0];
    kind.page = pool.rows;
    kind.ratio = 1;
    kind.rows_per_block = pool.rows_per_page;
    kind.hadamard = hadamard;
    p.step.num_items = static_cast<std::int32_t>(t.q.shape[0]);
    p.step.blocks_per_request = tables.table_width;
  }

  std::int64_t table_entries() const { return std::int64_t{tables.table_rows} * tables.table_width; }
  std::int64_t max_entries() const { return std::int64_t{p.step.blocks_per_request} * p.layer.kinds[0].rows_per_block; }
};

/// Gives an index operation its tables in the workspace, and queues what fills them.
void make_tables(const Runner& run, ops::RangeTablesParams& tables, const IndexSpace& space, std::uint8_t* workspace,
                 ops::IndexParams& p) {
  tables.tokens = reinterpret_cast<ops::StepRecord*>(workspace);
  if (tables.table_width > 0) tables.block_table = reinterpret_cast<std::int32_t*>(workspace + space.table_at);
  if (p.q.dtype == DType::u8 && p.q_scale.data == nullptr) {
    tables.ones = reinterpret_cast<float*>(workspace + space.ones_at);
    p.q_scale = {tables.ones, DType::u8, 0};
  }
  p.step.tokens = tables.tokens;
  p.step.block_table = tables.block_table;
  p.workspace = workspace + space.space_at;
  p.workspace_bytes = space.tiles * space.token_bytes;
  run.run<ops::RangeTablesParams>(&Backend::make_range_tables, raw::make_range_tables, tables);
}

/// The tokens [first, first + count) of an operation.
ops::IndexParams tokens_from(ops::IndexParams p, std::int64_t first, std::int64_t count) {
  const auto move = [first](ops::InputDesc& in) {
    in.data = static_cast<const std::uint8_t*>(in.data) +
              first * in.row_stride * static_cast<std::int64_t>(element_bytes(in.dtype));
  };
  move(p.q);
  move(p.weights);
  if (p.q_scale.data != nullptr) move(p.q_scale);
  p.step.tokens += first;
  p.step.num_tokens = static_cast<std::int32_t>(count);
  return p;
}
/// Whether scores can be written where the logits belong: fp32, no shift, and no other bytes behind a row.
bool writes_in_place(const Tensor& logits, bool is_compact) {
  return logits.element == f32 && !is_compact && logits.is_dense();
}

void score_and_place(const Runner& run, const ops::IndexParams& p, const ops::KeyRanges& ranges,
                     const IndexSpace& space, std::uint8_t* workspace, const Tensor& logits, std::int64_t score_stride,
                     bool is_compact) {
  ops::PlaceScoresParams place;
  place.logit_stride = logits.shape[0] > 1 ? logits.strides[0] : logits.last();
  place.num_logits = static_cast<std::int32_t>(logits.last());
  place.is_compact = is_compact;
  const bool in_place = writes_in_place(logits, is_compact);
  const std::int64_t tokens = p.step.num_tokens, most = in_place ? tokens : space.score_tokens;
  for (std::int64_t first = 0; first < tokens; first += most) {
    const std::int64_t count = std::min(most, tokens - first);
    ops::IndexParams part = tokens_from(p, first, count);
    place.ranges = ranges;
    place.ranges.first_token = first;
    place.ranges.num_tokens = static_cast<std::int32_t>(count);
    place.logits = {logits.data + first * place.logit_stride * logits.element_bytes(), dtype_of(logits)};
    part.scores =
        in_place ? static_cast<float*>(place.logits.data) : reinterpret_cast<float*>(workspace + space.scores_at);
    part.score_stride = in_place ? place.logit_stride : score_stride;
    place.scores = part.scores;
    place.score_stride = part.score_stride;
    run.run<ops::IndexParams>(&Backend::index_scores, raw::index_scores, part);
    if (!in_place || ranges.ends != nullptr)
      run.run<ops::PlaceScoresParams>(&Backend::place_scores, raw::place_scores, place);
  }
}

const TensorCall::Rule kLogitRule = {{f32, bf16}, 2, 2};

void check_logits(const TensorCall& call, const Tensor& logits, std::int64_t tokens) {
  if (logits.shape[0] != tokens || logits.last() > kMaxInt)
    call.refuse("logits",
                "must have a row for each of " + std::to_string(tokens) + " tokens; got " + shape_text(logits));
  if ((logits.last() > 1 && logits.strides[1] != 1) || (tokens > 1 && logits.strides[0] < logits.last()))
    call.refuse("logits", "must have dense rows that do not overlap");
}

/// Columns of scores: as many as logits, a whole number of 16-byte chunks.
std::int64_t score_columns(std::int64_t keys) { return std::max<std::int64_t>((keys + 63) / 64 * 64, 64); }

void index_scores(nb::handle q, nb::handle q_scale, nb::handle cache, nb::handle weights, nb::handle lens,
                  nb::handle block_table, const std::string& format, bool hadamard, const std::string& mode,
                  nb::handle logits) {
  TensorCall call("index_scores");
  const IndexTensors t = index_tensors(call, q, q_scale, weights);
  const Tensor pages = call.in(cache, "cache", kPoolRule);
  const Tensor key_lens = call.rows(lens, "lens", {{i32}, 1, 2}, 0);
  const Tensor table = call.rows(block_table, "block_table", {{i32}, 2, 2}, -1);
  const Tensor out = call.in(logits, "logits", kLogitRule);
  PagedIndex index(call, t, pages, key_lens, table, format, hadamard, mode, out.last());
  check_logits(call, out, index.p.step.num_tokens);
  if (index.p.step.num_tokens == 0 || out.last() == 0) return;
  const bool in_place = writes_in_place(out, false);
  const std::int64_t stride = in_place ? 0 : score_columns(out.last());
  const IndexSpace space(index.p.step.num_tokens, index.p.num_heads, index.p.layer.kinds[0].page.shape.width,
                         index.max_entries(), index.table_entries(), stride);
  std::uint8_t* const memory = call.scratch(space.bytes);
  const Runner run(call);
  make_tables(run, index.tables, space, memory, index.p);
  score_and_place(run, index.p, index.tables.ranges, space, memory, out, stride, false);
}

void index_topk(nb::handle q, nb::handle q_scale, nb::handle cache, nb::handle weights, nb::handle lens,
                nb::handle block_table, const std::string& format, bool hadamard, const std::string& mode,
                nb::handle indices, nb::handle slots) {
  TensorCall call("index_topk");
  const IndexTensors t = index_tensors(call, q, q_scale, weights);
  const Tensor pages = call.in(cache, "cache", kPoolRule);
  const Tensor key_lens = call.rows(lens, "lens", {{i32}, 1, 2}, 0);
  const Tensor table = call.rows(block_table, "block_table", {{i32}, 2, 2}, -1);
  const Tensor out = call.out(indices, "indices", {{i32}, 2, 2});
  const Tensor out_slots = call.optional_out(slots, "slots", {{i32}, 2, 2});
  PagedIndex index(call, t, pages, key_lens, table, format, hadamard, mode, kMaxInt);
  const std::int64_t tokens = index.p.step.num_tokens, k = out.last();
  if (out.shape[0] != tokens || k < 1 || k > ops::kMaxTopk)
    call.refuse("indices", "must be [" + std::to_string(tokens) + ", k], k from 1 to " + std::to_string(ops::kMaxTopk) +
                               "; got " + shape_text(out));
  if (out_slots) call.require_shape(out_slots, {tokens, k});
  if (tokens == 0) return;
  index.p.top = static_cast<std::int32_t>(k);
  index.p.indices = out.as<std::int32_t>();
  index.p.slots = out_slots.as<std::int32_t>();
  const IndexSpace space(tokens, index.p.num_heads, index.p.layer.kinds[0].page.shape.width, index.max_entries(),
                         index.table_entries(), 0);
  std::uint8_t* const memory = call.scratch(space.bytes);
  const Runner run(call);
  make_tables(run, index.tables, space, memory, index.p);
  run.run<ops::IndexParams>(&Backend::index_topk, raw::index_topk, index.p);
  call.finish();
}

void select_topk(nb::handle scores, nb::handle lens, nb::handle indices) {
  TensorCall call("select_topk");
  const Tensor from = call.rows(scores, "scores", {{f32}, 2, 2}, -1);
  const Tensor key_lens = call.rows(lens, "lens", {{i32}, 1, 1}, 0);
  const Tensor out = call.out(indices, "indices", {{i32}, 2, 2});
  const std::int64_t tokens = from.shape[0], columns = from.last(), k = out.last();
  call.require_shape(key_lens, {tokens});
  if (out.shape[0] != tokens || k < 1 || k > ops::kMaxTopk)
    call.refuse("indices", "must be [" + std::to_string(tokens) + ", k], k from 1 to " + std::to_string(ops::kMaxTopk) +
                               "; got " + shape_text(out));
  if (columns > kMaxInt) call.refuse("scores", "has rows longer than 2147483647");
  if (tokens == 0) return;
  ops::RangeTablesParams tables;
  ops::KeyRanges& ranges = tables.ranges;
  ranges.num_tokens = tokens_of(call, from, 1);
  ranges.lens = key_lens.as<std::int32_t>();
  ranges.max_keys = static_cast<std::int32_t>(columns);
  ops::IndexParams p;
  p.kind = 0;
  p.num_heads = 1;
  p.layer.num_kinds = 1;
  p.layer.kinds[0].ratio = 1;
  p.layer.kinds[0].rows_per_block = 1;
  p.layer.kinds[0].page.shape = {kTail, 0};
  p.step.num_tokens = p.step.num_items = ranges.num_tokens;
  p.step.blocks_per_request = static_cast<std::int32_t>(std::max<std::int64_t>(columns, 1));
  p.scores = from.as<float>();
  p.score_stride = from.row_stride(1);
  p.top = static_cast<std::int32_t>(k);
  p.indices = out.as<std::int32_t>();
  const IndexSpace space(tokens, 1, kTail, p.step.blocks_per_request, 0, 0);
  std::uint8_t* const memory = call.scratch(space.bytes);
  const Runner run(call);
  make_tables(run, tables, space, memory, p);
  run.run<ops::IndexParams>(&Backend::select_topk, raw::select_topk, p);
  call.finish();
}

void index_scores_rows(nb::handle q, nb::handle q_scale, nb::handle keys, nb::handle key_scales, nb::handle weights,
                       nb::handle begins, nb::handle ends, const std::string& format, const std::string& mode,
                       bool is_compact, nb::handle logits) {
  TensorCall call("index_scores_rows");
  const IndexTensors t = index_tensors(call, q, q_scale, weights);
  if (t.q.ndim != 3) call.refuse("q", "must be [tokens, heads, channels]; got " + shape_text(t.q));
  const Tensor from = call.in(keys, "keys", {{e4m3, u8, i8, bf16}, 2, 2});
  const Tensor scales = call.optional(key_scales, "key_scales", {{f32, i32, u8, e8m0}, 1, 3});
  const Tensor first = call.rows(begins, "begins", {{i32}, 1, 1}, 0);
  const Tensor last = call.rows(ends, "ends", {{i32}, 1, 1}, 0);
  const Tensor out = call.in(logits, "logits", kLogitRule);

  ops::IndexParams p;
  const Format of_keys = format_of(call, "format", format, false, true);
  const RowShape shape = fill_queries(call, t, of_keys, p);
  const auto [payload, scale] = row_bytes(of_keys, shape);
  const std::int64_t count = from.shape[0];
  if (from.last() * from.element_bytes() != payload || !from.is_dense())
    call.refuse("keys", "must be dense rows of " + std::to_string(payload) + " bytes (" +
                            std::string(to_string(of_keys)) + ", " + std::to_string(shape.width) + " channels); got " +
                            shape_text(from) + " of " + element_name(from.element));
  if (count > kMaxInt) call.refuse("keys", "has more than 2147483647 rows");
  if ((scale > 0) != static_cast<bool>(scales) ||
      (scales && (scales.rows(scales.ndim) * scales.element_bytes() != count * scale || !scales.is_dense())))
    call.refuse("key_scales", "must be dense, with " + std::to_string(scale) + " bytes for each of " +
                                  std::to_string(count) + " keys" + (scales ? "; got " + shape_text(scales) : ""));
  call.require_shape(first, {p.step.num_tokens});
  call.require_shape(last, {p.step.num_tokens});
  check_logits(call, out, p.step.num_tokens);
  if (p.step.num_tokens == 0 || out.last() == 0) return;

  ops::RangeTablesParams tables;
  ops::KeyRanges& ranges = tables.ranges;
  ranges.num_tokens = p.step.num_tokens;
  ranges.begins = first.as<std::int32_t>();
  ranges.ends = last.as<std::int32_t>();
  ranges.max_keys = static_cast<std::int32_t>(is_compact ? count : std::min(count, out.last()));
  const std::int64_t blocks = std::max<std::int64_t>((count + kKeyPage - 1) / kKeyPage, 1);
  p.kind = 0;
  p.mode = parse_score_mode(mode);
  p.layer.num_kinds = 1;
  ops::KindDesc& kind = p.layer.kinds[0];
  kind.page = {of_keys, shape, {from.data, kKeyPage * payload, payload}, {scales.data, kKeyPage * scale, scale}, {}};
  kind.ratio = 1;
  kind.rows_per_block = kKeyPage;
  p.step.num_items = 1;
  p.step.blocks_per_request = tables.table_width = static_cast<std::int32_t>(blocks);
  tables.table_rows = 1;
  const bool in_place = writes_in_place(out, is_compact);
  const std::int64_t stride = in_place ? 0 : score_columns(ranges.max_keys);
  const IndexSpace space(p.step.num_tokens, p.num_heads, shape.width, blocks * kKeyPage, blocks, stride);
  std::uint8_t* const memory = call.scratch(space.bytes);
  const Runner run(call);
  make_tables(run, tables, space, memory, p);
  score_and_place(run, p, ranges, space, memory, out, stride, is_compact);
}

void set_cpu_threads(int threads) {
  CpuRunner& runner = cpu_runner();
  const std::lock_guard lock(runner.mutex);
  runner.backend = make_cpu_backend(threads);
  runner.threads = threads;
}

}  // namespace

void bind_tensor_calls(nb::module_& m) {
  // Private names: kv4/torch.py has the documents.
  m.def("_tensor_attend", attend, nb::arg("q"), nb::arg("cache"), nb::arg("indices"), nb::arg("lens").none(),
        nb::arg("extra_cache").none(), nb::arg("extra_indices").none(), nb::arg("extra_lens").none(),
        nb::arg("sink").none(), nb::arg("softmax_scale"), nb::arg("format"), nb::arg("extra_format"),
        nb::arg("lse_of_rows"), nb::arg("workspace").none(), nb::arg("out"), nb::arg("lse").none(),
        nb::arg("max_logits").none());
  m.def("_tensor_attend_bf16_rows", attend_bf16_rows, nb::arg("q"), nb::arg("rows"), nb::arg("indices"),
        nb::arg("lens").none(), nb::arg("sink").none(), nb::arg("softmax_scale"), nb::arg("lse_of_rows"),
        nb::arg("out"), nb::arg("lse").none(), nb::arg("max_logits").none());
  m.def("_tensor_append", append, nb::arg("rows"), nb::arg("cache"), nb::arg("slots"), nb::arg("format"));
  m.def("_tensor_gather", gather, nb::arg("cache"), nb::arg("slots"), nb::arg("format"), nb::arg("out"),
        nb::arg("valid").none());
  m.def("_tensor_index_scores", index_scores, nb::arg("q"), nb::arg("q_scale").none(), nb::arg("cache"),
        nb::arg("weights"), nb::arg("lens"), nb::arg("block_table"), nb::arg("format"), nb::arg("hadamard"),
        nb::arg("mode"), nb::arg("logits"));
  m.def("_tensor_index_topk", index_topk, nb::arg("q"), nb::arg("q_scale").none(), nb::arg("cache"), nb::arg("weights"),
        nb::arg("lens"), nb::arg("block_table"), nb::arg("format"), nb::arg("hadamard"), nb::arg("mode"),
        nb::arg("indices"), nb::arg("slots").none());
  m.def("_tensor_select_topk", select_topk, nb::arg("scores"), nb::arg("lens"), nb::arg("indices"));
  m.def("_tensor_index_scores_rows", index_scores_rows, nb::arg("q"), nb::arg("q_scale").none(), nb::arg("keys"),
        nb::arg("key_scales").none(), nb::arg("weights"), nb::arg("begins"), nb::arg("ends"), nb::arg("format"),
        nb::arg("mode"), nb::arg("is_compact"), nb::arg("logits"));
  m.def("_tensor_attend_workspace_bytes", [] { return ops::attend_workspace_bytes(); });
  m.def("_tensor_set_cpu_threads", set_cpu_threads, nb::arg("threads"));
}

}  // namespace kv4::python
