// The parameters of the operations: plain structs of addresses and sizes, passed by value to any backend. The manager
// fills them from its schema; an engine that keeps its own pools fills them itself and calls kv4/cuda.h.
#pragma once

#include <cstdint>

#include "kv4/export.h"
#include "kv4/host_device.h"
#include "kv4/options.h"
#include "kv4/tensor.h"

namespace kv4 {

/// `width` channels; the row formats quantise the first width - tail and keep the rest bf16. Index keys have tail 0.
struct RowShape {
  std::int32_t width;
  std::int32_t tail;
};

/// Cos and sin of any position through two small tables of doubles, cos and sin interleaved (build_rope_angles):
/// position = 1024 * high + low, cos(a + b) = cos a cos b - sin a sin b, sin(a + b) = sin a cos b + cos a sin b.
struct RopeAngles {
  static constexpr int kLowBits = 10;
  const double* high = nullptr;  // [ceil(positions / 1024), pairs, 2]
  const double* low = nullptr;   // [1024, pairs, 2]
  std::int32_t pairs = 0;
};

}  // namespace kv4

namespace kv4::ops {

/// Row r of block (or slot) b: data + b * block_stride + r * row_stride.
struct Plane {
  std::uint8_t* data = nullptr;
  std::int64_t block_stride = 0;
  std::int64_t row_stride = 0;

  /// The address of a row.
  KV4_HD std::uint8_t* at(std::int64_t block, std::int64_t row) const {
    return data + block * block_stride + row * row_stride;
  }
};

/// Rows of one format in two planes. `global` is nvfp4's per-page scale, null elsewhere.
struct RowPlanes {
  Format format = Format::bf16;
  RowShape shape{};
  Plane payload;
  Plane scale;
  Plane global;
};

/// The window ring of one layer: a block is a state slot, the row of position p is p mod rows.
struct WindowDesc {
  RowPlanes ring;
  std::int32_t rows = 0;
  RowPlanes scratch;  // rows of a long step by token index; one block
  // The row that the last of R + 1 tokens written in place overwrites. No later query reads it, but the image of the
  // length before the step contains it, so it is saved in case the step is aborted.
  RowPlanes undo_row;                      // a block is a state slot, one row
  std::int32_t* undo_positions = nullptr;  // [slot * undo_row_stride], -1: none
  std::int64_t undo_row_stride = 0;

  /// The position whose row a slot's undo row holds.
  KV4_HD std::int32_t& undo_position(std::int64_t slot) const { return undo_positions[slot * undo_row_stride]; }
};

/// Compressor state of one row kind. Ring row of p: [kv columns | gate columns] at p mod rows of its slot.
struct PendingDesc {
  Plane ring;  // a block is a state slot
  DType dtype = DType::f32;
  std::int32_t columns = 0;
  std::int32_t rows = 0;
  bool online = false;
  Plane accumulator;  // [slot]: fp32 [3, width] max, denominator, numerator; data null with overlap
  std::int32_t* fold_watermarks = nullptr;  // [slot * fold_watermark_stride]: tokens below it are in the accumulator
  std::int64_t fold_watermark_stride = 0;

  /// Whether open spans are folded; an overlapping kind and V4.1's keep their rows.
  KV4_HD bool folds() const { return accumulator.data != nullptr; }
};

/// One row kind: where its rows lie and how they are made.
struct KindDesc {
  RowPlanes page;  // a block is a block id, a row is a slot of the page
  std::int32_t ratio = 0;
  std::int32_t rows_per_block = 0;
  bool overlap = false;
  bool hadamard = false;
  float global_scale = 1.0f;
  PendingDesc pending;
  const float* bias = nullptr;         // [ratio, columns]; null until weights are bound
  const float* norm_weight = nullptr;  // [width]
};

/// A layer's window and row kinds: none for SWA, one for HCA, entries and index keys for CSA.
struct LayerDesc {
  static constexpr int kMaxKinds = 2;
  WindowDesc window;
  std::int32_t window_tokens = 0;  // rows a query sees
  std::int32_t num_kinds = 0;
  KindDesc kinds[kMaxKinds];
  float eps = 0.0f;
};

/// A request's part in a step, or one token of it: a single load tells a kernel all it needs. row -1: padding, which
/// every operation ignores.
struct alignas(16) StepRecord {
  std::int32_t row = -1;         // of the block table
  std::int32_t length = 0;       // committed tokens; positions from here on are the step's own
  std::int32_t count = 0;        // the request's tokens in the step
  std::int32_t first_token = 0;  // index of the first of them in the step
  std::int32_t read_slot = -1;   // state slot
  std::int32_t write_slot = -1;  // another one in a long step
  std::int32_t position = 0;     // of this token; of the first, in an item's record
  std::int32_t block = -1;       // of the position's entries; -1: none.
                                 // In an item's record: entries of positions below it are there already and are kept

  KV4_HD bool padded() const { return row < 0; }                    // belongs to no request
  KV4_HD std::int32_t end() const { return length + count; }        // the request's length after the step
  KV4_HD bool in_place() const { return read_slot == write_slot; }  // the step writes the slot that it reads
  /// The row of a position of the step in its input tensors.
  KV4_HD std::int64_t token_of(std::int64_t at) const { return first_token + at - length; }
};
static_assert(sizeof(StepRecord) == 32);

/// The step as the tables at fixed addresses hold it.
struct StepDesc {
  std::int32_t num_tokens = 0;
  std::int32_t num_items = 0;
  std::int32_t block_tokens = 0;
  std::int32_t blocks_per_request = 0;
  std::int32_t max_length = 0;                // no request is longer after the step; 0: not known, as in a capture
  const StepRecord* tokens = nullptr;         // [num_tokens]
  const StepRecord* items = nullptr;          // [num_items]
  const std::int32_t* block_table = nullptr;  // [rows, blocks_per_request], -1 padded
  /// [rows] positions below it have no window row: a replay began there. null: all have.
  const std::int32_t* window_begins = nullptr;

  /// The first position of the request that has a window row.
  KV4_HD std::int32_t window_begin(const StepRecord& record) const {
    return window_begins == nullptr ? 0 : window_begins[record.row];
  }
};

/// The tables themselves: the outputs of expanding a step.
struct StepTableDesc {
  StepRecord* items = nullptr;             // [max_items]
  StepRecord* tokens = nullptr;            // [max_step_tokens]
  std::int32_t* item_rows = nullptr;       // [max_items] -1: padded
  std::int32_t* item_slots = nullptr;      // [max_items] state slot after the step, -1: padded
  std::int32_t* csa_lens = nullptr;        // [max_items] entries after the step; V4.1: those of ratio 2
  std::int32_t* hca_lens = nullptr;        // [max_items] V4.1: those of ratio 1
  std::int32_t* ring_heads = nullptr;      // [max_items] window row that the next token will take
  std::int32_t* ring_positions = nullptr;  // [max_items, ring_rows] position each window row holds, -1: none
  std::int32_t* block_table = nullptr;     // [max_requests, blocks_per_request]
  std::int32_t* window_begins = nullptr;   // [max_requests]
  std::int32_t dummy_block = -1;           // takes entries that are written but not kept; -1: none are
  std::int32_t blocks_per_request = 0;
  std::int32_t block_tokens = 0;
  std::int32_t ring_rows = 0;
  std::int32_t csa_ratio = 0;
  std::int32_t hca_ratio = 0;
};

/// Entries begin .. begin + count - 1 of a block table row; their values begin at `first_value` of a list.
struct BlockRange {
  std::int32_t row = 0;
  std::int32_t begin = 0;
  std::int32_t count = 0;
  std::int32_t first_value = 0;
};

/// Cos and sin for entries: the engine's table if `cos` is set, else our angles.
struct RopeDesc {
  const float* cos = nullptr;  // [positions, rope_dim / 2]
  const float* sin = nullptr;
  RopeAngles angles;
  std::int32_t rope_dim = 0;
};

/// Rows of `row_stride` elements, last dimension dense.
struct InputDesc {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
};

/// A dense output; the comment at each field has its shape.
struct OutputDesc {
  void* data = nullptr;
  DType dtype = DType::f32;
};

/// Window rows that come straight from the projection: RMS norm and rotation happen in append. weight null: they are
/// done already.
struct FrontEndDesc {
  const float* norm_weight = nullptr;  // [head_dim]
  float eps = 0.0f;
  RopeDesc rope;  // of this layer: SWA layers rotate with another base than the others
};

/// One layer of a step: inputs in, window rows, pending rows, entries and index keys out.
struct AppendParams {
  LayerDesc layer;
  StepDesc step;
  RopeDesc rope;
  FrontEndDesc front_end;
  InputDesc window_rows;               // [tokens, head_dim]
  InputDesc kv[LayerDesc::kMaxKinds];  // [tokens, columns]; data null: window rows only
  InputDesc gate[LayerDesc::kMaxKinds];
};

/// V4.1: one owner of a step. Each of its entries is made from a latent, and so is the entry's index key.
struct OwnerAppendParams {
  /// kv[0] of the entries, and gate[0] for ratio 2; the keys have neither. window_rows.data null: no window rows.
  AppendParams rows;
  const std::uint16_t* key_weight = nullptr;  // bf16 [key width, width]: makes the keys; null: see KeyAppendParams
  /// bf16 [tokens, width] out or null: row i is the latent of the entry that token i completes, other rows stay.
  std::uint16_t* latents = nullptr;
  std::int64_t latent_stride = 0;  // elements
};

/// V4.1: index keys of an owner as projections of its latents, before norm and rotation.
struct KeyAppendParams {
  LayerDesc layer;
  StepDesc step;
  RopeDesc rope;
  InputDesc keys;  // [tokens, key width]: row i belongs to the entry that token i completes
};

/// Finished entries and index keys for the pages.
struct FlushParams {
  LayerDesc layer;
  StepDesc step;
  InputDesc rows[LayerDesc::kMaxKinds];  // [tokens, width]: finished rows of each kind; data null: none of it
  const std::uint8_t* valid = nullptr;   // [tokens] or null
};

/// Stored rows, decoded into a dense tensor.
struct GatherParams {
  LayerDesc layer;
  StepDesc step;
  std::int32_t kind = 0;           // row kind gathered (not for the window)
  std::int64_t rows_per_item = 0;  // second dimension of out
  InputDesc indices;               // gather_chosen: i32 [tokens, rows_per_item]
  OutputDesc out;                  // [tokens | items, rows_per_item, width]
  std::uint8_t* valid = nullptr;   // gather_chosen: [tokens, rows_per_item] or null
  std::int32_t* lens = nullptr;    // gather_all, gather_window: [items]
  std::int32_t* first = nullptr;   // gather_window: [items]
};

/// Limits of index heads, of k, and of query heads.
constexpr std::int32_t kMaxIndexHeads = 64, kMaxTopk = 2048, kMaxQueryHeads = 128;

/// Index queries against the keys a token's position lets it see: j < (position + 1) / ratio. A query is prepared as a
/// key is: rounded to bf16, transformed where keys are, encoded in their format.
struct IndexParams {
  LayerDesc layer;
  StepDesc step;
  std::int32_t kind = 1;       // row kind that holds the keys
  std::int32_t num_heads = 0;  // 1 to 64
  InputDesc q;                 // [tokens, heads, width], heads dense: f32 or bf16, rotated; or u8: encoded payloads
  InputDesc q_scale;           // u8 [tokens, heads, scale bytes], with an encoded q
  InputDesc weights;           // f32 [tokens, heads]
  float* scores = nullptr;     // [tokens, score_stride]; -infinity where nothing is visible. Not for index_topk
  std::int64_t score_stride = 0;
  ScoreMode mode = ScoreMode::exact;  // of index_scores, and of the scores that index_topk selects by
  std::int32_t top = 0;               // k
  std::int32_t* indices = nullptr;    // [tokens, k] entries, -1 filled, in no order
  std::int32_t* slots = nullptr;      // [tokens, k] block * rows_per_block + row of each, -1 filled; or null
  std::uint8_t* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
};

/// V4.1: the blocks of entries that a candidate source keeps for each token of a step. Later index lists are made
/// within them. Block b has the entries [b * block_entries, (b + 1) * block_entries); the block of the newest visible
/// entry scores infinity.
struct CandidateDesc {
  std::int32_t block_entries = 0;
  std::int32_t most = 0;  // blocks kept per token; all, if there are no more
  std::int64_t stride = 0;
  std::int32_t* blocks = nullptr;  // [tokens, stride] ascending
  std::int32_t* counts = nullptr;  // [tokens]

  /// Blocks with an entry that such a token sees.
  KV4_HD std::int64_t blocks_of(std::int64_t visible) const { return (visible + block_entries - 1) / block_entries; }
  /// The longest history of which nothing is masked.
  KV4_HD std::int64_t unmasked_entries() const { return std::int64_t{most} * block_entries; }
  /// Entries of the blocks that are kept for a token: only the last block can be cut.
  KV4_HD std::int64_t entries_of(std::int64_t token, std::int64_t visible) const {
    const std::int64_t count = counts[token];
    if (count == 0) return 0;
    const std::int64_t left = visible - std::int64_t{blocks[token * stride + count - 1]} * block_entries;
    return (count - 1) * block_entries + (left < block_entries ? left : block_entries);
  }
  /// The i-th of these entries.
  KV4_HD std::int64_t entry(std::int64_t token, std::int64_t i) const {
    return std::int64_t{blocks[token * stride + i / block_entries]} * block_entries + i % block_entries;
  }
};

/// Bytes of an index workspace that one token takes: its scores, its encoded queries, the state of its selection. With
/// room for n tokens the operations take n at a time.
constexpr std::int64_t index_token_bytes(std::int64_t max_entries, std::int64_t num_heads, std::int64_t width) {
  constexpr std::int64_t kLine = 256, kSelection = 16384;
  const auto lines = [](std::int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; };
  return lines(4 * max_entries) + lines(num_heads * (4 * width + 64)) + kSelection;
}

/// Tokens of an index workspace that nobody sized: as many as 256 MiB have room for, and at least 128. On an H200 the
/// start and end of two launches take about 10 us, and a tile of that size takes 0.5 to 1 ms.
constexpr std::int64_t default_index_tile_tokens(std::int64_t token_bytes) {
  constexpr std::int64_t kBytes = std::int64_t{256} << 20, kFewest = 128;
  return kBytes / token_bytes > kFewest ? kBytes / token_bytes : kFewest;
}

/// Rows of a query by physical slot, for pools kept elsewhere: row s % rows_per_block of block s / rows_per_block.
struct SlotList {
  const std::int32_t* slots = nullptr;  // [tokens, stride], negative: none; null: the step says which
  std::int64_t stride = 0;
  const std::int32_t* lens = nullptr;  // [tokens] how many count; null: all
  std::int32_t limit = INT32_MAX;      // slots from here on are none either
  // The lists of other engines are `foreign` if they set any of these.
  std::int32_t count = -1;  // slots of a token; -1: `stride` of them
  // Tokens of a request share its entry of `lens`. The list of token t begins at
  // t / tokens_per_request * request_stride + t % tokens_per_request * stride.
  std::int32_t tokens_per_request = 1;
  std::int64_t request_stride = 0;  // for tokens_per_request > 1

  /// A slot that is a row.
  KV4_HD bool has(std::int32_t slot) const { return slot >= 0 && slot < limit; }
  /// Whether a GPU reads such a list with the generic kernel, or with that for bf16 rows.
  KV4_HD bool foreign() const { return limit != INT32_MAX || count >= 0 || tokens_per_request != 1; }
  /// Slots of a token, if all count.
  KV4_HD std::int32_t max_length() const { return count >= 0 ? count : static_cast<std::int32_t>(stride); }
  /// How many slots of a token count.
  KV4_HD std::int32_t length(std::int64_t token) const {
    const std::int32_t most = max_length();
    if (lens == nullptr) return most;
    const std::int32_t given = lens[token / tokens_per_request];
    return given < 0 ? 0 : given < most ? given : most;
  }
  /// Slot i of a token; -1: none.
  KV4_HD std::int32_t slot(std::int64_t token, std::int64_t i) const {
    const std::int64_t first = tokens_per_request == 1
                                   ? token * stride
                                   : token / tokens_per_request * request_stride + token % tokens_per_request * stride;
    const std::int32_t slot = slots[first + i];
    return has(slot) ? slot : -1;
  }
};

/// What `lse` of attend is.
enum class LseMode : std::uint8_t {
  all,   // log of the denominator, the sink included; -infinity without rows and sink
  rows,  // the sink is left out; +infinity without rows (FlashMLA). A sink may be +infinity: the output is 0
};

/// One softmax over a query's window rows and entries, a sink in its denominator.
struct AttendParams {
  LayerDesc layer;  // window and kinds[0]; num_kinds 0: window rows only
  StepDesc step;
  std::int32_t num_heads = 0;  // 1 to 128
  float softmax_scale = 0.0f;
  InputDesc q;                  // bf16 or f32 [tokens, heads, width], heads dense
  const float* sink = nullptr;  // [heads] or null
  InputDesc chosen;             // i32 [tokens, num_chosen] entries, those not visible are ignored;
  std::int32_t num_chosen = 0;  // data null: every visible entry
  SlotList window_slots;        // instead of the step's window: rows of layer.window.ring
  SlotList entry_slots;         // instead of its entries: rows of layer.kinds[0].page
  OutputDesc out;               // bf16 or f32 [tokens, heads, width]
  float* lse = nullptr;         // [tokens, heads]: log of the denominator, or null
  LseMode lse_mode = LseMode::all;
  float* max_logits = nullptr;  // [tokens, heads]: the largest logit of a row, -infinity without rows; or null
  RopeDesc inverse_rope;        // rope_dim > 0: the output's last channels lose the rotation of the query's position
  // Partial outputs of a token's CTAs, and staged rows: attend_workspace_bytes, staged_attend_workspace_bytes, or null.
  // Zero before the first call; calls that share it are queued one after the other.
  std::uint8_t* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
  // Room for foreign lists as the tuned kernels for Hopper read them: attend_list_bytes, or null. Without it the
  // generic kernel takes foreign lists and LseMode::rows.
  std::uint8_t* list_workspace = nullptr;
  std::int64_t list_workspace_bytes = 0;
};

/// Bytes of a list workspace: a slot of each list, two lengths and heads' statistics per token.
constexpr std::int64_t attend_list_bytes(std::int64_t tokens, std::int64_t heads, std::int64_t first,
                                         std::int64_t second) {
  constexpr std::int64_t kLine = 256, kParts = 5;
  return 4 * tokens * (first + second + 2 + heads) + kParts * kLine;
}

/// V4.1's draft stages: an item's queries see the window before the item and all rows of the item, later ones too. Its
/// rows go through the window's format into the scratch and are not stored.
struct DraftParams {
  AttendParams attend;
  FrontEndDesc front_end;
  InputDesc rows;  // [tokens, width]
};

/// Bytes of an attend workspace for so many CTAs; 144 are enough for a Hopper GPU, with one per SM.
KV4_API std::int64_t attend_workspace_bytes(std::int64_t ctas = 144);
/// The same with room for staged rows: with it, long steps on a Hopper GPU decode rows once that many tokens meet.
/// `entries`: no item has more, as the block table or StepDesc::max_length say.
KV4_API std::int64_t staged_attend_workspace_bytes(std::int64_t tokens, std::int64_t items, std::int64_t window_tokens,
                                                   std::int64_t entries);

/// Rows of a pool kept elsewhere, by physical slot: row s % rows_per_block of block s / rows_per_block.
struct SlotRowsParams {
  RowPlanes rows;
  std::int32_t rows_per_block = 0;
  std::int64_t num_slots = 0;     // of the pool; a slot outside of it names no row
  const void* slots = nullptr;    // [num_rows] i32, or i64
  bool has_wide_slots = false;    // they are i64
  std::int64_t num_rows = 0;      // of `in` or `out`
  InputDesc in;                   // write_slots: f32 or bf16 [num_rows, width]; rows without a slot are ignored
  OutputDesc out;                 // gather_slots: f32 or bf16 [num_rows, width]; rows without a slot are zero
  std::uint8_t* valid = nullptr;  // gather_slots: [num_rows] whether the slot names a row, or null

  /// The slot of a row; negative: none.
  KV4_HD std::int64_t slot(std::int64_t row) const {
    const std::int64_t slot = has_wide_slots ? static_cast<const std::int64_t*>(slots)[row]
                                             : std::int64_t{static_cast<const std::int32_t*>(slots)[row]};
    return slot < num_slots ? slot : -1;
  }
};

/// Keys that tokens of other engines see: token t, of request t / tokens_per_request, sees the first `visible` keys of
/// its request, or, with `ends`, keys begins[t] to ends[t] - 1 of keys that all tokens share.
struct KeyRanges {
  std::int32_t num_tokens = 0;
  std::int64_t first_token = 0;  // token t here is first_token + t of the arrays below
  std::int32_t tokens_per_request = 1;
  // [requests] keys that a request's last token sees, each token before it one less; or, with has_token_lens, [tokens]
  const std::int32_t* lens = nullptr;
  bool has_token_lens = false;
  const std::int32_t* begins = nullptr;  // [tokens], with `ends`
  const std::int32_t* ends = nullptr;    // [tokens] instead of lens
  std::int32_t max_keys = 0;             // limit of all of these: what the scores and the block table have room for

  /// A number of keys between 0 and max_keys.
  KV4_HD std::int32_t clamp(std::int64_t keys) const {
    return keys < 0 ? 0 : keys < max_keys ? static_cast<std::int32_t>(keys) : max_keys;
  }
  /// One past the last key that a token sees.
  KV4_HD std::int32_t end(std::int64_t t) const {
    const std::int64_t token = first_token + t;
    if (ends != nullptr) return clamp(ends[token]);
    if (has_token_lens) return clamp(lens[token]);
    const std::int64_t request = token / tokens_per_request;
    return clamp(std::int64_t{lens[request]} - (tokens_per_request - 1) + token % tokens_per_request);
  }
  /// The first key that a token sees.
  KV4_HD std::int32_t begin(std::int64_t t) const { return ends == nullptr ? 0 : clamp(begins[first_token + t]); }
};

/// The tables that index_scores, select_topk and index_topk read, for key ranges: one StepRecord per token, with ratio
/// 1, and the block table, whose page ids other engines wrote.
struct RangeTablesParams {
  KeyRanges ranges;
  StepRecord* tokens = nullptr;            // [num_tokens]
  std::int32_t* block_table = nullptr;     // [table_rows, table_width], or null
  const std::int32_t* page_ids = nullptr;  // [table_rows, page_id_stride] what it becomes; null: 0, 1, 2, ...
  std::int64_t page_id_stride = 0;
  std::int64_t num_pages = 0;  // of the pool; an id outside of it becomes page 0
  std::int32_t table_rows = 0;
  std::int32_t table_width = 0;
  float* ones = nullptr;  // [kMaxIndexHeads] scales of queries that have none; or null

  /// Entry i of the block table.
  KV4_HD std::int32_t page(std::int64_t i) const {
    if (page_ids == nullptr) return static_cast<std::int32_t>(i % table_width);
    const std::int32_t id = page_ids[i / table_width * page_id_stride + i % table_width];
    return id >= 0 && id < num_pages ? id : 0;
  }
  /// Entries of the block table.
  KV4_HD std::int64_t table_entries() const {
    return block_table == nullptr ? 0 : std::int64_t{table_rows} * table_width;
  }
  /// The record of a token.
  KV4_HD StepRecord record(std::int64_t token) const {
    const std::int32_t each = ranges.ends != nullptr ? ranges.num_tokens : ranges.tokens_per_request;
    StepRecord r;
    r.row = static_cast<std::int32_t>(token / each);
    r.position = ranges.end(token) - 1;
    r.length = r.position;
    r.count = 1;
    r.first_token = static_cast<std::int32_t>(token);
    r.read_slot = r.write_slot = r.row;
    return r;
  }
};

/// Scores of key ranges as other engines lay them out: logit j of a token is the score of key j, or of key begin + j.
/// -infinity where the token sees no key.
struct PlaceScoresParams {
  KeyRanges ranges;
  const float* scores = nullptr;  // [num_tokens, score_stride], score j of key j
  std::int64_t score_stride = 0;
  // f32 or bf16 [num_tokens, logit_stride]. `scores` itself, with its stride: only keys before a range are set.
  OutputDesc logits;
  std::int64_t logit_stride = 0;
  std::int32_t num_logits = 0;  // of a token
  bool is_compact = false;      // logit 0 is of the first key that the token sees; not in place

  /// Whether logits take the place of scores.
  KV4_HD bool in_place() const { return logits.data == scores; }
};

/// `bytes` from one place to another. If `when` is set and *when == equals, they come from `instead`.
struct CopyPiece {
  const std::uint8_t* from = nullptr;
  std::uint8_t* to = nullptr;
  std::int64_t bytes = 0;
  const std::uint8_t* instead = nullptr;
  const std::int32_t* when = nullptr;
  std::int32_t equals = 0;

  /// The address that the bytes are copied from.
  KV4_HD const std::uint8_t* source() const { return when != nullptr && *when == equals ? instead : from; }
};

/// An image of a request's state at a position inside a long step.
struct Boundary {
  StepRecord item;
  std::int32_t position = 0;  // one past the last token of the image; a multiple of every ratio
  std::uint8_t* image = nullptr;
};

/// One layer's part of such images, taken after its append. Window rows come from the scratch, or from the ring of the
/// slot that the step reads. The first halves of the last span's pending rows come from the inputs or from that slot.
struct BoundaryParams {
  LayerDesc layer;
  InputDesc kv[LayerDesc::kMaxKinds];  // of the append
  InputDesc gate[LayerDesc::kMaxKinds];
  std::int64_t payload_at = 0, scale_at = 0;           // of the window rows in an image, oldest first
  std::int64_t pending_at[LayerDesc::kMaxKinds] = {};  // of the pending rows of kinds with overlap: kv, gate
  const Boundary* boundaries = nullptr;                // [count], on the host
  std::int32_t count = 0;
};

/// The open span of a kind without overlap at `length` tokens, in state slot `slot`.
struct OpenSpan {
  KindDesc kind;  // bias null: no row was ever appended, only restored ones count
  std::int32_t slot = -1;
  std::int32_t length = 0;
  float* out = nullptr;  // [3, width]
};

/// The most block ids of one update.
constexpr std::int32_t kMaxUpdateValues = 1 << 16;

/// A new step: items and the block table entries that changed since the last one; on the host for Backend, on the
/// device for kv4/cuda.h.
struct StepUpdate {
  StepTableDesc tables;
  std::int32_t num_items = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_ranges = 0;
  std::int32_t num_values = 0;                  // at most kMaxUpdateValues
  const StepRecord* items = nullptr;            // [num_items]
  const std::int32_t* window_begins = nullptr;  // [num_items], see StepDesc; null: 0
  const BlockRange* ranges = nullptr;           // [num_ranges]
  const std::int32_t* block_ids = nullptr;      // [num_values]
};

}  // namespace kv4::ops
