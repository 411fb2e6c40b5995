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
};

/// One row per token of the step, padding included. bf16 or fp32; fp32 window rows are rounded to bf16.
struct AppendInputs {
  ConstTensorView raw_kv;      // [tokens, head_dim]: normed and rotated window rows, or see raw_is_projection
  ConstTensorView kv;          // CSA, HCA: [tokens, columns]
  ConstTensorView gate;        // CSA, HCA: [tokens, columns]
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
  ConstTensorView index_keys;  // CSA: [tokens, index_dim]
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

  /// Writes window rows, pending rows, due entries and due index keys in one pass.
  void append(const AppendInputs& inputs);
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
  void index_topk(const IndexInputs& inputs, const TensorView& indices, const TensorView& slots = {},
                  ScoreMode mode = ScoreMode::exact);

  /// Attention of each token over its window rows and entries, once append of this layer has run. out [tokens, heads,
  /// head_dim] f32 or bf16; lse [tokens, heads] f32 or empty: log of the softmax's denominator, the sink included.
  void attend(const AttendInputs& inputs, const TensorView& out, const TensorView& lse = {});

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
