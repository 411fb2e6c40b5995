// The calls of an attention layer during a step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv4/export.h"
#include "kv4/options.h"
#include "kv4/schema.h"
#include "kv4/tensor.h"

namespace kv4 {

/// A layer's constants, fp32 and dense, in the memory of the cache's backend; bound once with
/// KVCacheManager::bind_weights, not copied.
struct LayerWeights {
  ConstTensorView position_bias;        // [ratio, columns]: columns = 2 * head_dim (CSA), head_dim (HCA)
  ConstTensorView norm_weight;          // [head_dim]
  ConstTensorView index_position_bias;  // CSA: [ratio, 2 * index_dim]
  ConstTensorView index_norm_weight;    // CSA: [index_dim]
  ConstTensorView raw_norm_weight{};    // any layer, optional: [head_dim], of the projection that gives window rows
  /// V4.1's owners, which have no biases: bf16 [index_dim, head_dim], optional. With it append makes the index keys.
  ConstTensorView index_key_weight{};
};

/// One row per token of the step, padding included. bf16 or fp32; fp32 window rows are rounded to bf16.
struct AppendInputs {
  ConstTensorView raw_kv;      // [tokens, head_dim]: normed and rotated window rows, or see raw_is_projection
  ConstTensorView kv;          // CSA, HCA: [tokens, columns]; V4.1's owners: [tokens, head_dim]
  ConstTensorView gate;        // CSA, HCA: [tokens, columns]; V4.1's owners of ratio 2: [tokens, head_dim]
  ConstTensorView index_kv;    // CSA: [tokens, 2 * index_dim]
  ConstTensorView index_gate;  // CSA: [tokens, 2 * index_dim]
  /// raw_kv comes straight from the projection: append norms it (raw_norm_weight must be bound) and rotates its last
  /// rope_dim channels, with the engine's table where one is bound.
  bool raw_is_projection = false;
};

/// Entries made elsewhere: after rotation; index keys before the Hadamard transform. Row i is written iff valid[i] != 0
/// and token i closes an entry.
struct FlushInputs {
  ConstTensorView entries;     // [tokens, head_dim]
  ConstTensorView index_keys;  // CSA: [tokens, index_dim]; V4.1: normed and rotated, or empty (append_index_keys)
  ConstTensorView valid;       // [tokens] u8; empty: all
};

/// Index queries, one per token of the step and head. 1 to 64 heads: a rank may hold a part of the model's.
struct IndexInputs {
  /// [tokens, heads, index_dim] f32 or bf16, rotated: it is transformed and encoded as keys are; or u8 [tokens, heads,
  /// payload bytes of a key]: done already.
  ConstTensorView q;
  ConstTensorView q_scale;  // with an encoded q: u8 [tokens, heads, scale bytes of a key]
  ConstTensorView weights;  // [tokens, heads] f32, final: every factor of the score is in it
};

/// Queries, normed and rotated. Rows and queries are multiplied in fp32 (bf16 on a GPU's tensor cores).
struct AttendInputs {
  ConstTensorView q;       // [tokens, heads, head_dim] f32 or bf16, 1 to 128 heads
  ConstTensorView sink{};  // [heads] f32, or empty: none
  /// i32 [tokens, k] entries, those not visible are ignored; empty: all visible.
  ConstTensorView topk{};
  float softmax_scale = 0.0f;  // 0: head_dim^-0.5
  bool inverse_rope = false;   // undo the rotation of the output's last rope_dim channels by the query's position
};

/// V4.1: the queries of drafts and the rows of their blocks, one per token of the step. An item is one draft.
struct DraftInputs {
  ConstTensorView raw_kv;          // [tokens, head_dim], as for append
  bool raw_is_projection = false;  // as for append
  AttendInputs attend;             // without topk
};

/// K = V: both name the same dense tensor.
struct KVPair {
  TensorView k;
  TensorView v;
};

/// Row r of block b: data + b * block_stride + r * row_stride, `row_bytes` long.
struct PlaneView {
  std::byte* data = nullptr;
  std::int64_t block_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t row_bytes = 0;
};

/// Views never own and hold until the step ends. Arrays are per item of the step; a padded item has slot, row or length
/// -1 or 0.
struct SWAView {
  PlaneView payload;  // a "block" is a state slot, a row is position mod rows
  PlaneView rope;     // the bf16 tail inside the payload
  PlaneView scale;
  std::int32_t num_items = 0;
  std::int32_t rows = 0;
  const std::int32_t* slots = nullptr;      // [num_items], -1: padded
  const std::int32_t* positions = nullptr;  // [num_items, rows]: which position each row holds after the step, -1: none
  const std::int32_t* head = nullptr;       // [num_items]: the row that the token after the step will take
};

/// Entries of the layer: the pages and the block table. Lifetime as SWAView.
struct ClassicalView {
  PlaneView payload;
  PlaneView rope;
  PlaneView scale;
  std::int32_t num_items = 0;
  std::int32_t rows_per_block = 0;
  std::int32_t blocks_per_request = 0;
  const std::int32_t* block_table = nullptr;   // [max_requests, blocks_per_request], -1 padded
  const std::int32_t* request_rows = nullptr;  // [num_items]: row of block_table, -1: padded
  const std::int32_t* lens = nullptr;          // [num_items]: entries that exist after the step
};

/// Index keys of the layer, likewise.
struct IndexerView {
  PlaneView keys;
  PlaneView scales;
  PlaneView global_scale;  // nvfp4: one fp32 per block; else data is null
  std::int32_t num_items = 0;
  std::int32_t rows_per_block = 0;
  std::int32_t blocks_per_request = 0;
  const std::int32_t* block_table = nullptr;
  const std::int32_t* request_rows = nullptr;
  const std::int32_t* lens = nullptr;
};

/// V4.1: the blocks of entries that the candidate source kept for each token of the step, ascending. Block b has the
/// entries [b * block_entries, (b + 1) * block_entries). Lifetime as SWAView.
struct CandidateView {
  std::int32_t block_entries = 0;
  std::int32_t num_tokens = 0;
  std::int64_t stride = 0;
  const std::int32_t* blocks = nullptr;  // [num_tokens, stride]
  const std::int32_t* counts = nullptr;  // [num_tokens]
};

class KVCacheManager;

/// A light value, valid for the step it was acquired in. Every call checks shapes and types before the first write;
/// running any of them again in the same step gives the same bytes. Padded tokens are ignored and their output rows are
/// zero.
class KV4_API LayerCacheHandle {
 public:
  /// Index of the layer in the model.
  int layer() const;
  int num_query_heads() const;             // of the model
  int head_dim() const;                    // width of an entry and of a window row
  const LayerCacheSchema& schema() const;  // sizes of the layer

  /// Writes window rows, pending rows, due entries and due index keys in one pass. V4.1's layers without entries of
  /// their own take raw_kv only.
  void append(const AppendInputs& inputs);
  /// V4.1's owners: also writes latents bf16 [tokens, head_dim], from which the caller makes the index keys. Row i is
  /// the latent, before rotation, of the entry that token i completes; other rows stay as they are.
  void append(const AppendInputs& inputs, const TensorView& latents);
  /// V4.1's owners, after such an append: index_keys [tokens, index_dim], f32 or bf16, before norm and rotation. Row i
  /// is read iff token i completes an entry.
  void append_index_keys(const ConstTensorView& index_keys);
  /// Only the window rows: raw_kv [tokens, head_dim].
  void write_swa(const ConstTensorView& raw_kv);
  /// Entries and index keys made elsewhere. Such a request has no pending rows: do not append to it later.
  void flush_compression(const FlushInputs& inputs);

  /// Chosen entries. indices [tokens, k] i32 (anything but a visible entry gives a zero row); out [tokens, k, head_dim]
  /// f32 or bf16; valid [tokens, k] u8 or empty.
  KVPair gather_compressed_kv(const ConstTensorView& indices, const TensorView& out, const TensorView& valid = {});
  /// All entries of each item after the step. out [items, n, head_dim], n at least the longest; lens [items] i32.
  KVPair gather_all_compressed_kv(const TensorView& out, const TensorView& lens);
  /// The same for index keys, as stored (transformed if Hadamard is on). out [items, n, index_dim].
  TensorView gather_all_index_keys(const TensorView& out, const TensorView& lens);
  /// Window rows that the step's queries see, by item: positions first[i] .. first[i] + lens[i] - 1, the last being the
  /// item's last token; a query at t uses those in (t - window, t]. out [items, n, head_dim], n at least min(length,
  /// window - 1) + count.
  KVPair gather_swa_kv(const TensorView& out, const TensorView& lens, const TensorView& first);

  /// score[t, j] = sum over heads of weight * relu(q . key j): exact, to the bit as docs/formats.md says, or fast,
  /// within its error bound. scores [tokens, n] f32, n at least the longest item's entries; -infinity where a token
  /// sees none.
  void index_scores(const IndexInputs& inputs, const TensorView& scores, ScoreMode mode = ScoreMode::exact);
  /// The k best entries that each token sees, of given scores (the sum of several ranks', say). indices [tokens, k]
  /// i32, in no order, -1 filled; of equal scores the smaller index, NaN last. slots [tokens, k] i32 or empty: block *
  /// rows_per_block + row of each.
  void select_topk(const ConstTensorView& scores, const TensorView& indices, const TensorView& slots = {});
  /// index_scores and select_topk in one call: the k best by exact scores, or by fast ones, with scores in the cache's
  /// workspace. k from 1 to 2048.
  ///
  /// V4.1: the layers that follow read the same list, so keep it until the next layer that ranks. The candidate
  /// source's select_topk and index_topk also keep its candidates until the step ends. Later layers need them: their
  /// scores of other entries are -infinity, and their lists are made within them.
  void index_topk(const IndexInputs& inputs, const TensorView& indices, const TensorView& slots = {},
                  ScoreMode mode = ScoreMode::exact);

  /// Attention of each token over its window rows and entries, once append of this layer has run. out [tokens, heads,
  /// head_dim] f32 or bf16; lse [tokens, heads] f32 or empty: log of the softmax's denominator, the sink included.
  void attend(const AttendInputs& inputs, const TensorView& out, const TensorView& lse = {});

  /// V4.1's draft stages: attention of the queries of drafts. All queries of an item see the last window of the
  /// committed rows and all rows of the item, which are quantised as window rows are and not stored. Nothing of the
  /// cache changes: abort the step afterwards.
  void attend_draft(const DraftInputs& inputs, const TensorView& out, const TensorView& lse = {});

  /// The candidates that this layer picked or ranks within, once the candidate source has made its list.
  CandidateView read_candidate_view();
  /// Planes and tables of the window, for kernels of the caller.
  SWAView read_swa_view();
  ClassicalView read_classical_view();  // the same for entries
  IndexerView read_indexer_view();      // the same for index keys

 private:
  friend class KVCacheManager;
  LayerCacheHandle(KVCacheManager* manager, int index, std::int64_t step)
      : manager_(manager), index_(index), step_(step) {}
  KVCacheManager* manager_;
  int index_;  // among the owned layers
  std::int64_t step_;
};

}  // namespace kv4
