// The table of attend's kernels, and the selection from it. Host code without CUDA calls: the facts about the GPU are
// arguments (AttendGpu), so that tests/parity/attend_select_test.cu runs without one.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>

#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/staged.cuh"
#include "backend/cuda/runtime/aligned.h"

namespace kv4::cuda {
namespace {

using ops::AttendParams;

// --- the limits of each kernel

/// Row planes that are never read have no data.
bool can_read(const ops::RowPlanes& rows) {
  return rows.payload.data == nullptr ||
         (rows.format == Format::fp8_tile64 && rows.shape.width == kAttendWidth && rows.shape.tail == kAttendTail &&
          is_aligned(rows.payload, 16) && is_aligned(rows.scale, 8));
}

/// Whether the kernels for Hopper support the queries and outputs.
bool is_tiled(const AttendParams& p) {
  return width_of(p) == kAttendWidth && p.q.dtype == DType::bf16 && is_aligned(p.q.data, 16) &&
         p.q.row_stride % 8 == 0 && is_aligned(p.out.data, 16) && p.inverse_rope.rope_dim <= kAttendTail &&
         p.softmax_scale > 0.0f;
}

/// Whether all of them also support the rows, lists and further outputs.
bool is_supported(const AttendParams& p) {
  return is_tiled(p) && can_read(p.layer.window.ring) && can_read(p.layer.window.scratch) &&
         (p.layer.num_kinds == 0 || can_read(p.layer.kinds[0].page)) && !p.window_slots.foreign() &&
         !p.entry_slots.foreign() && p.lse_mode == ops::LseMode::all && p.max_logits == nullptr;
}

/// Whether the step alone determines the rows of a query.
bool sees_all(const AttendParams& p) {
  return p.step.tokens != nullptr && p.window_slots.slots == nullptr && p.entry_slots.slots == nullptr &&
         p.chosen.data == nullptr;
}

bool is_window(const AttendParams& p) {
  return p.layer.num_kinds == 0 && p.layer.window_tokens >= 1 && p.layer.window_tokens <= kMaxWindowRows;
}

/// CTAs that have a place in the workspace.
std::int64_t workspace_ctas(const AttendParams& p) {
  if (p.workspace == nullptr || !is_aligned(p.workspace, 16)) return 0;
  const std::int64_t partials = (p.workspace_bytes - ops::kAttendCounterBytes) / ops::kAttendPartialBytes;
  return std::clamp<std::int64_t>(partials, 0, kMaxArrivalCounters);
}

bool runs_split_kv(const AttendParams& p, const AttendSplit& s) {
  const bool channels = s.channel_splits == 1 || (!s.cta_pair && (s.channel_splits == 2 || s.channel_splits == 4));
  return is_supported(p) && channels && s.kv_splits >= 1 &&
         s.kv_splits * s.channel_splits * (s.cta_pair ? 2 : 1) <= kMaxCluster &&
         (!s.cta_pair || head_tiles_of(p) % 2 == 0);
}
bool runs_split_kv_in_memory(const AttendParams& p, const AttendSplit& s) {
  return is_supported(p) && s.channel_splits == 1 && s.kv_splits >= 1 && s.kv_splits <= kMaxMemorySplits &&
         std::int64_t{p.step.num_tokens} * head_tiles_of(p) * s.kv_splits <= workspace_ctas(p) &&
         (!s.cta_pair || head_tiles_of(p) % 2 == 0);
}
bool runs_whole_tokens(const AttendParams& p, const AttendSplit&) { return is_supported(p); }
bool runs_token_pair(const AttendParams& p, const AttendSplit&) { return is_supported(p) && sees_all(p); }
bool runs_window(const AttendParams& p, const AttendSplit& s) {
  return is_supported(p) && sees_all(p) && is_window(p) && (s.channel_splits == 1 || s.channel_splits == 2);
}
bool runs_small_batch(const AttendParams& p, const AttendSplit& s) {
  const bool compiled = (s.heads == 8 && s.stages >= 1 && s.stages <= 3) || (s.heads == 16 && s.stages == 3);
  const bool splits =
      std::has_single_bit(static_cast<unsigned>(s.kv_splits)) ? s.kv_splits <= kMaxCluster : s.kv_splits == kNineSplits;
  return is_supported(p) && compiled && splits && (s.kv_splits != kNineSplits || s.stages > 1);
}
bool is_by_step(const AttendParams& p) {
  return p.step.tokens != nullptr && p.window_slots.slots == nullptr && p.entry_slots.slots == nullptr;
}
bool runs_staged(const AttendParams& p, const AttendSplit&) {
  const ops::StepDesc& step = p.step;
  const StagedRows rows = staged_rows(p);
  return is_supported(p) && is_by_step(p) && step.num_items > 0 && step.num_items <= kMaxStagedItems &&
         (step.items != nullptr || step.num_items == 1) && p.workspace != nullptr && is_aligned(p.workspace, 16) &&
         rows.bytes / kStagedRowBytes <= INT32_MAX && ops::attend_workspace_bytes() + rows.bytes <= p.workspace_bytes;
}
bool runs_bf16_rows(const AttendParams& p, const AttendSplit&) {
  const ops::KindDesc& kind = p.layer.kinds[0];
  const ops::Plane& rows = kind.page.payload;
  const bool is_dense =
      rows.row_stride == kStagedRowBytes && rows.block_stride == std::int64_t{kind.rows_per_block} * kStagedRowBytes;
  return is_tiled(p) && p.layer.num_kinds == 1 && kind.page.format == Format::bf16 &&
         kind.page.shape.width == kAttendWidth && kind.rows_per_block >= 1 && is_dense && is_aligned(rows.data, 16) &&
         p.entry_slots.slots != nullptr && p.entry_slots.tokens_per_request == 1 && p.window_slots.slots == nullptr &&
         (p.step.tokens == nullptr || p.layer.window_tokens == 0);
}
bool runs_anything(const AttendParams&, const AttendSplit&) { return true; }

// --- the table

// Estimated times were fitted on an H200 on 2026-11-15, combination in memory on 2026-11-16. To fit them again:
// `kv4_gpu_bench --only attend_splits` for decodes, `--only attend_prefill_splits` for prefills.
constexpr AttendVariant kSplitKv[] = {
    {.cta_pair = true, .start = 800, .per_tile = 240},
    {.cta_pair = true, .min_kv_splits = 2, .max_kv_splits = 8, .start = 980, .per_split = 28, .per_tile = 190},
    {.start = 800, .per_tile = 278},
    {.min_kv_splits = 2, .max_kv_splits = 16, .start = 980, .per_split = 28, .per_tile = 220},
    {.channel_splits = 2, .start = 660, .per_tile = 260},
    {.channel_splits = 2, .min_kv_splits = 2, .max_kv_splits = 8, .start = 760, .per_split = 30, .per_tile = 220},
    {.channel_splits = 4, .start = 560, .per_tile = 275},
    {.channel_splits = 4, .min_kv_splits = 2, .max_kv_splits = 4, .start = 600, .per_split = 50, .per_tile = 220}};
// At most 96 splits: 130 of a tile each took longer than 65 of two.
constexpr AttendVariant kSplitKvInMemory[] = {
    {.cta_pair = true, .min_kv_splits = 2, .max_kv_splits = 96, .start = 1300, .per_tile = 210},
    {.min_kv_splits = 2, .max_kv_splits = 96, .start = 1320, .per_tile = 245}};
static_assert(kSplitKvInMemory[0].max_kv_splits <= kMaxMemorySplits);
constexpr AttendVariant kSinglePassWindow[] = {{.max_split_rows = kMaxWindowRows, .start = 930},
                                               {.channel_splits = 2, .max_split_rows = kMaxWindowRows, .start = 750}};
// best_small_batch adds kPerReducedHead and kLargeCluster.
constexpr AttendVariant kSmallBatch[] = {
    {.heads = 8, .stages = 1, .max_kv_splits = 16, .max_split_rows = kOneStageRows, .start = 420, .per_row = 3.8},
    {.heads = 8, .stages = 2, .max_kv_splits = 16, .max_split_rows = kTwoStageRows, .start = 420, .per_row = 3.8},
    {.heads = 8, .stages = 3, .max_kv_splits = 16, .start = 420, .per_row = 3.8},
    {.heads = 16, .stages = 3, .max_kv_splits = 16, .start = 620, .per_row = 5.0}};
static_assert(std::size(kSmallBatch) == std::tuple_size_v<decltype(AttendGpu::small_batch)>);
constexpr double kPerReducedHead = 15;  // of the heads that a warp reduces
constexpr double kLargeCluster = 300;   // for 16 CTAs of 8 heads, which crowd a GPC
// A second fit of split_kv in a cluster, by all rows of a token: it ranks the best of split_kv against small_batch.
// kSplitKv ranks the splits among each other. The two fits differ, and one in place of both would change the selection.
constexpr double kSplitKvStart = 1050, kSplitKvPerTokenRow = 0.36;
// Rules choose the others, no estimate does.
constexpr AttendVariant kUnsplit[] = {{.max_split_rows = 20 * kAttendTile}};
constexpr AttendVariant kWholeToken[] = {{}}, kWholeWindow[] = {{.max_split_rows = kMaxWindowRows}};

constexpr AttendKernelInfo kKernels[] = {
    {AttendKernel::split_kv, "split-KV", runs_split_kv, kSplitKv, launch_split_kv},
    {AttendKernel::split_kv_in_memory, "split-KV in memory", runs_split_kv_in_memory, kSplitKvInMemory,
     launch_split_kv_in_memory},
    {AttendKernel::unsplit, "unsplit", runs_whole_tokens, kUnsplit, launch_unsplit},
    {AttendKernel::persistent, "persistent", runs_whole_tokens, kWholeToken, launch_persistent},
    {AttendKernel::token_pair, "token pair", runs_token_pair, kWholeToken, launch_token_pair},
    {AttendKernel::persistent_window, "persistent window", runs_window, kWholeWindow, launch_persistent_window},
    {AttendKernel::single_pass_window, "single-pass window", runs_window, kSinglePassWindow, launch_single_pass_window},
    {AttendKernel::small_batch, "small batch", runs_small_batch, kSmallBatch, launch_small_batch},
    {AttendKernel::staged, "staged", runs_staged, kWholeToken, launch_staged},
    {AttendKernel::bf16_rows, "bf16 rows", runs_bf16_rows, kWholeToken, launch_bf16_rows},
    {AttendKernel::generic, "generic", runs_anything, {}, launch_generic},
};
constexpr bool is_indexed_by_kernel() {
  for (std::size_t i = 0; i < std::size(kKernels); ++i)
    if (kKernels[i].kernel != static_cast<AttendKernel>(i)) return false;
  return true;
}
static_assert(is_indexed_by_kernel());

// --- selection

struct Candidate {
  AttendSplit split;
  double time = std::numeric_limits<double>::infinity();  // hundredths of a microsecond, as in the table

  void take_if_faster(const Candidate& other) {
    if (other.time < time) *this = other;
  }
};

AttendSplit split_of(AttendKernel kernel, const AttendVariant& v, std::int64_t kv_splits) {
  return {kernel, static_cast<int>(kv_splits), v.channel_splits, v.cta_pair, v.heads, v.stages};
}

std::int64_t ceil_div(std::int64_t x, std::int64_t by) { return (x + by - 1) / by; }

/// An upper bound of the rows of any query.
std::int64_t max_rows(const AttendParams& p) {
  std::int64_t rows = p.window_slots.slots != nullptr ? p.window_slots.stride : p.layer.window_tokens;
  if (p.entry_slots.slots != nullptr)
    rows += p.entry_slots.stride;
  else if (p.layer.num_kinds > 0)
    rows += p.chosen.data != nullptr ? p.num_chosen
                                     : std::int64_t{p.step.blocks_per_request} * p.layer.kinds[0].rows_per_block;
  return rows;
}

class Selection {
 public:
  Selection(const AttendParams& p, const AttendGpu& gpu)
      : p_(p),
        gpu_(gpu),
        head_tiles_(head_tiles_of(p)),
        work_tiles_(p.step.num_tokens * head_tiles_),
        rows_(max_rows(p)),
        tiles_(std::max<std::int64_t>(ceil_div(rows_, kAttendTile), 1)),
        is_one_wave_(work_tiles_ <= gpu.wgmma[1]) {}

  AttendSplit best() const {
    Candidate best = best_of_wgmma();
    best.take_if_faster(best_small_batch());
    return best.split;
  }

 private:
  /// The best of all kernels but small_batch, with a time that compares with small_batch's.
  Candidate best_of_wgmma() const {
    // Persistent CTAs are for many tokens of few requests. Measured with 1,024 tokens of one request; 128 requests of
    // one token each are slower with them.
    const bool for_persistent = !is_one_wave_ && shares_rows(p_.step);
    if (for_persistent && meets_often()) return {{.kernel = AttendKernel::staged}, 0.0};
    if (sees_all(p_) && is_window(p_) && !for_persistent) return single_pass_window();
    const Candidate in_memory = best_in_memory(), in_cluster = best_in_cluster();
    const double cluster_time = kSplitKvStart + kSplitKvPerTokenRow * static_cast<double>(rows_);
    if (in_memory.time <= in_cluster.time) return {in_memory.split, std::min(cluster_time, in_memory.time)};
    return {without_split(in_cluster.split, for_persistent), cluster_time};
  }

  /// Replaces split_kv where nothing is split.
  AttendSplit without_split(const AttendSplit& split, bool for_persistent) const {
    const auto whole = [](AttendKernel kernel) { return AttendSplit{.kernel = kernel}; };
    if (split.kv_splits * split.channel_splits > 1) return split;
    if (for_persistent && sees_all(p_) && p_.layer.num_kinds > 0) return whole(AttendKernel::token_pair);
    if (split.cta_pair) return split;
    if (!for_persistent) return rows_fit(kUnsplit[0]) ? whole(AttendKernel::unsplit) : split;
    return whole(sees_all(p_) && is_window(p_) ? AttendKernel::persistent_window : AttendKernel::persistent);
  }

  /// Whether the rows are read so often that a pass over them pays, which decodes them once.
  bool meets_often() const {
    if (p_.layer.num_kinds == 0) return false;  // windows alone: 218 us, not 190
    if (p_.step.num_tokens < ops::kFewestStagedTokens || !runs_staged(p_, {})) return false;
    const std::int64_t entries = std::min<std::int64_t>(
        max_entries(p_), p_.chosen.data != nullptr ? p_.num_chosen : std::numeric_limits<std::int64_t>::max());
    return p_.step.num_tokens * (p_.layer.window_tokens + entries) >=
           ops::kFewestMeetings * (staged_rows(p_).bytes / kStagedRowBytes);
  }

  Candidate single_pass_window() const {
    const bool has_idle_sms = 4 * work_tiles_ <= gpu_.wgmma[1];  // then the next launch fits beside this one, too
    const AttendVariant& v = kSinglePassWindow[has_idle_sms ? 1 : 0];
    return {split_of(AttendKernel::single_pass_window, v, 1), v.start};
  }

  /// As many KV splits as run at once and have a place in the workspace, but no more than their equal numbers of tiles
  /// need.
  Candidate best_in_memory() const {
    Candidate best;
    for (const AttendVariant& v : kSplitKvInMemory) {
      const int pair_size = v.cta_pair ? 2 : 1;
      if (head_tiles_ % pair_size != 0) continue;
      const std::int64_t clusters = gpu_.wgmma[pair_size];
      const std::int64_t ctas = std::min<std::int64_t>(workspace_ctas(p_), clusters * pair_size);
      const std::int64_t most = std::min<std::int64_t>(ctas / work_tiles_, v.max_kv_splits);
      if (most < v.min_kv_splits) continue;
      const std::int64_t kv_splits = ceil_div(tiles_, ceil_div(tiles_, most));
      if (kv_splits < v.min_kv_splits) continue;
      best.take_if_faster({split_of(AttendKernel::split_kv_in_memory, v, kv_splits), time_of(v, kv_splits)});
    }
    return best;
  }

  /// The best of the splits whose clusters all run at once; without a split any number of CTAs is possible.
  Candidate best_in_cluster() const {
    Candidate best;
    for (const AttendVariant& v : kSplitKv) {
      const int pair_size = v.cta_pair ? 2 : 1;
      if (head_tiles_ % pair_size != 0) continue;
      for (int kv_splits = v.min_kv_splits; kv_splits <= v.max_kv_splits; ++kv_splits) {
        const int ctas = kv_splits * v.channel_splits * pair_size;
        const bool fits = work_tiles_ / pair_size <= gpu_.wgmma[ctas];
        if (!fits && kv_splits * v.channel_splits > 1) continue;
        best.take_if_faster({split_of(AttendKernel::split_kv, v, kv_splits), time_of(v, kv_splits)});
      }
    }
    return best;
  }

  /// The best of the splits whose clusters all run at once.
  Candidate best_small_batch() const {
    // No number between nine and 16: two such clusters do not fit into a GPC of an H200.
    constexpr int kSplitCounts[] = {1, 2, 4, 8, kNineSplits, 16};
    Candidate best;
    for (std::size_t i = 0; i < std::size(kSmallBatch); ++i)
      for (const int kv_splits : kSplitCounts) {
        const AttendVariant& v = kSmallBatch[i];
        const std::int64_t clusters = p_.step.num_tokens * ceil_div(p_.num_heads, v.heads);
        const std::int64_t split_rows = ceil_div(rows_, kv_splits);
        if (clusters > gpu_.small_batch[i][kv_splits] || split_rows > v.max_split_rows) continue;
        const int reducers = static_cast<int>(std::bit_floor(static_cast<unsigned>(kv_splits)));
        const bool saves_tile = ceil_div(split_rows, kAttendTile) < ceil_div(ceil_div(rows_, reducers), kAttendTile);
        if (kv_splits > reducers && !saves_tile) continue;            // 640 rows: 7.6 to 8.0 us
        const bool shares_sms = clusters * kv_splits > gpu_.num_sms;  // two CTAs on one SM
        const double time = v.start + kPerReducedHead * v.heads / reducers +
                            v.per_row * static_cast<double>(split_rows) * (shares_sms ? 2 : 1) +
                            (kv_splits == kMaxCluster && v.heads == 8 ? kLargeCluster : 0);
        best.take_if_faster({split_of(AttendKernel::small_batch, v, kv_splits), time});
      }
    return best;
  }

  double time_of(const AttendVariant& v, std::int64_t kv_splits) const {
    return v.start + v.per_split * static_cast<double>(kv_splits) +
           v.per_tile * static_cast<double>(ceil_div(tiles_, kv_splits));
  }
  bool rows_fit(const AttendVariant& v) const { return rows_ <= v.max_split_rows; }

  const AttendParams& p_;
  const AttendGpu& gpu_;
  const std::int64_t head_tiles_, work_tiles_;  // work_tiles_: 64 heads of a token each
  const std::int64_t rows_, tiles_;             // of a token
  const bool is_one_wave_;                      // a CTA for each work tile, all at once
};

}  // namespace

std::span<const AttendKernelInfo> attend_kernels() { return kKernels; }

AttendSplit select_attend(const AttendParams& p, const AttendGpu& gpu) {
  constexpr AttendSplit kRows{.kernel = AttendKernel::bf16_rows};
  if (gpu.is_sm90 && runs_bf16_rows(p, kRows)) return kRows;
  return gpu.is_sm90 && is_supported(p) ? Selection(p, gpu).best() : AttendSplit{};
}

std::string describe(const AttendSplit& s) {
  std::string text = kKernels[static_cast<std::size_t>(s.kernel)].name;
  if (s.kv_splits > 1) text += ", " + std::to_string(s.kv_splits) + " KV splits";
  if (s.channel_splits > 1) text += ", " + std::to_string(s.channel_splits) + " channel splits";
  if (s.cta_pair) text += ", 2-CTA pair";
  if (s.kernel == AttendKernel::small_batch)
    text += ", " + std::to_string(s.heads) + " heads, " + std::to_string(s.stages) + " stages";
  return text;
}

}  // namespace kv4::cuda
