// Attention: decodes a tile of a query's rows at a time and applies it to all heads of a group.
#include <algorithm>
#include <cstring>

#include "backend/cpu/compressor.h"
#include "backend/cpu/cpu_backend.h"

namespace kv4::cpu {
namespace {

constexpr int kGroupHeads = 64;     // at most this many heads share a decoded row
constexpr int kMinGroupHeads = 16;  // and at least this many, however many threads wait for work

// Calls f(rows, block, row) for every row of a list of physical slots.
template <class F>
void for_each_slot(const ops::SlotList& list, const ops::RowPlanes& rows, std::int64_t rows_per_block,
                   std::int64_t token, F&& f) {
  const std::int32_t count = list.length(token);
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t slot = list.slot(token, i);
    if (slot >= 0) f(rows, slot / rows_per_block, slot % rows_per_block);
  }
}

// Calls f for the window in position order: rows of a long step's own tokens lie in the scratch, all others in the
// ring.
template <class F>
void for_each_window_row(const ops::LayerDesc& layer, const ops::StepDesc& step, const ops::StepRecord& at, F&& f) {
  const ops::WindowDesc& w = layer.window;
  for (std::int64_t p = std::max(step.window_begin(at), at.position + 1 - layer.window_tokens); p <= at.position; ++p) {
    if (p >= at.length && !at.in_place())
      f(w.scratch, std::int64_t{0}, at.token_of(p));
    else
      f(w.ring, std::int64_t{at.read_slot}, p % w.rows);
  }
}

// Calls f for the window before a draft's item, then for the item's own rows.
template <class F>
void for_each_draft_row(const ops::LayerDesc& layer, const ops::StepDesc& step, const ops::StepRecord& at, F&& f) {
  const ops::WindowDesc& w = layer.window;
  for (std::int64_t p = std::max(step.window_begin(at), at.length - layer.window_tokens); p < at.length; ++p)
    f(w.ring, std::int64_t{at.read_slot}, p % w.rows);
  for (std::int64_t i = 0; i < at.count; ++i) f(w.scratch, std::int64_t{0}, at.first_token + i);
}

template <class F>
void for_each_entry(const ops::AttendParams& p, std::int64_t token, F&& f) {
  const ops::StepRecord& at = p.step.tokens[token];
  const ops::KindDesc& kind = p.layer.kinds[0];
  const std::int32_t* table = p.step.block_table + std::int64_t{at.row} * p.step.blocks_per_request;
  const std::int64_t visible = (std::int64_t{at.position} + 1) / kind.ratio;
  const auto visit = [&](std::int64_t entry) {
    if (entry >= 0 && entry < visible)
      f(kind.page, std::int64_t{table[entry / kind.rows_per_block]}, entry % kind.rows_per_block);
  };
  if (p.chosen.data == nullptr)
    for (std::int64_t entry = 0; entry < visible; ++entry) visit(entry);
  else
    for (std::int64_t i = 0; i < p.num_chosen; ++i)
      visit(static_cast<const std::int32_t*>(p.chosen.data)[token * p.chosen.row_stride + i]);
}

/// Channels of a row. A layer whose window lives in another pool may have entries only.
int width_of(const ops::AttendParams& p) {
  const int width = p.layer.window.ring.shape.width;
  return width > 0 ? width : p.layer.kinds[0].page.shape.width;
}

bool is_padded(const ops::AttendParams& p, std::int64_t token) {
  return p.step.tokens != nullptr && p.step.tokens[token].padded();
}

template <class F>
void for_each_row(const ops::AttendParams& p, bool draft, std::int64_t token, F&& f) {
  if (is_padded(p, token)) return;
  if (draft)
    for_each_draft_row(p.layer, p.step, p.step.tokens[token], f);
  else if (p.window_slots.slots != nullptr)
    for_each_slot(p.window_slots, p.layer.window.ring, p.layer.window.rows, token, f);
  else if (p.step.tokens != nullptr)
    for_each_window_row(p.layer, p.step, p.step.tokens[token], f);
  if (p.entry_slots.slots != nullptr)
    for_each_slot(p.entry_slots, p.layer.kinds[0].page, p.layer.kinds[0].rows_per_block, token, f);
  else if (p.step.tokens != nullptr && p.layer.num_kinds > 0)
    for_each_entry(p, token, f);
}

/// Rows of other formats have a scale of more bits, and so have their values.
bool decodes_to_bf16(Format format) {
  return format == Format::fp8_tile64 || format == Format::bf16 || format == Format::fp8_tile32 ||
         format == Format::nvfp4_row;
}

/// Queries and all rows that they can meet.
bool all_bf16(const ops::AttendParams& p) {
  return p.q.dtype == DType::bf16 && decodes_to_bf16(p.layer.window.ring.format) &&
         (p.layer.num_kinds == 0 || decodes_to_bf16(p.layer.kinds[0].page.format));
}

/// Cosines and sines of the inverse RoPE at a position, [rope_dim / 2] each.
struct InverseAngles {
  const float* cos;
  const float* sin;
};

InverseAngles inverse_angles(const RowKernels& kernels, const ops::RopeDesc& rope, std::int64_t position,
                             RowBuffers& buffers) {
  const int pairs = rope.rope_dim / 2;
  if (rope.cos != nullptr) return {rope.cos + position * pairs, rope.sin + position * pairs};
  kernels.angles(rope.angles, position, buffers.cos.data(), buffers.sin.data());
  return {buffers.cos.data(), buffers.sin.data()};
}

// Rotates the last channels by the negative angle.
void inverse_rope(InverseAngles angles, int pairs, int width, float* row) {
  float* tail = row + width - 2 * pairs;
  for (int i = 0; i < pairs; ++i) {
    const float x0 = tail[2 * i], x1 = tail[2 * i + 1];
    tail[2 * i] = codec::fused(x0, angles.cos[i], x1 * angles.sin[i]);
    tail[2 * i + 1] = codec::fused(x1, angles.cos[i], -(x0 * angles.sin[i]));
  }
}

/// Heads per work item: all of them decode a row once, but threads without work are worse than rows decoded again.
int group_heads(int num_heads, std::int64_t tokens, int threads) {
  int group = std::min(num_heads, kGroupHeads);
  while (group > kMinGroupHeads && tokens * ((num_heads + group - 1) / group) < threads) group = (group + 1) / 2;
  return group;
}

}  // namespace

void CpuBackend::attend_heads(const ops::AttendParams& p, QueryRows window, std::int64_t token, int first_head,
                              int heads, int worker) {
  const int width = width_of(p), stride = attend_stride(width);
  AttendBuffers& b = attend_buffers_[worker];
  kernels_.convert(
      {std::int64_t{heads} * width, input_row(p.q, token, first_head * width), p.q.dtype, b.heads.data(), DType::f32});
  const int lanes = padded_heads(heads);
  std::fill_n(b.heads.begin() + heads * width, (lanes - heads) * width, 0.0f);
  const bool is_bf16 = all_bf16(p);
  kernels_.prepare_heads({width, heads, b.heads.data(), is_bf16, p.softmax_scale, b.q.data()});
  std::fill_n(b.max.begin(), lanes, ops::Attention{}.max);
  std::fill_n(b.sum.begin(), lanes, ops::Attention{}.sum);
  std::fill_n(b.acc.begin(), lanes * stride, 0.0f);

  int count = 0;
  const auto apply_tile = [&] {
    kernels_.attend({width, heads, b.q.data(), is_bf16, p.softmax_scale, b.rows.data(), count, b.max.data(),
                     b.sum.data(), b.acc.data(), b.tmp.data()});
    count = 0;
  };
  const auto add_row = [&](const ops::RowPlanes& rows, std::int64_t block, std::int64_t row) {
    kernels_.decode(rows.format, rows.shape, rows.payload.at(block, row), rows.scale.at(block, row), 1.0f,
                    b.rows.data() + count * stride, DType::f32, nullptr);
    if (++count == kAttendRows) apply_tile();
  };
  for_each_row(p, window == QueryRows::draft, token, add_row);
  if (count > 0) apply_tile();

  const bool padded = is_padded(p, token), rotate = p.inverse_rope.rope_dim > 0 && !padded;
  const InverseAngles angles =
      rotate ? inverse_angles(kernels_, p.inverse_rope, p.step.tokens[token].position, buffers(worker))
             : InverseAngles{};
  for (int h = 0; h < heads; ++h) {
    const ops::Attention state{b.max[h], b.sum[h]};
    const ops::AttentionEnd end =
        ops::end_attention(state, p.sink != nullptr && !padded ? p.sink + first_head + h : nullptr);
    float* acc = b.acc.data() + h * stride;
    for (int c = 0; c < width; ++c) acc[c] *= end.factor;
    if (rotate) inverse_rope(angles, p.inverse_rope.rope_dim / 2, width, acc);
    const std::int64_t at = token * p.num_heads + first_head + h;
    kernels_.convert(
        {width, acc, DType::f32,
         static_cast<std::uint8_t*>(p.out.data) + at * width * static_cast<std::int64_t>(element_bytes(p.out.dtype)),
         p.out.dtype});
    if (p.lse != nullptr) p.lse[at] = p.lse_mode == ops::LseMode::all ? end.lse : ops::lse_of_rows(state);
    if (p.max_logits != nullptr) p.max_logits[at] = state.sum == 0.0f ? -INFINITY : state.max;
  }
}

void CpuBackend::attend(const ops::AttendParams& p) { attend_rows(p, QueryRows::step); }

void CpuBackend::attend_draft(const ops::DraftParams& p) {
  quantise_draft_rows(p);
  attend_rows(p.attend, QueryRows::draft);
}

void CpuBackend::attend_rows(const ops::AttendParams& p, QueryRows window) {
  const int group = group_heads(p.num_heads, p.step.num_tokens, pool_.threads());
  const int groups = (p.num_heads + group - 1) / group;
  fit_buffers(width_of(p), 0, group);
  pool_.run(std::int64_t{p.step.num_tokens} * groups, 1, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t i = begin; i < end; ++i) {
      const int first = static_cast<int>(i % groups) * group;
      attend_heads(p, window, i / groups, first, std::min(group, p.num_heads - first), worker);
    }
  });
}

}  // namespace kv4::cpu
