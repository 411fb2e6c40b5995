// What the CPU backend does to one row. The plain table runs ops/ and codec/ as they are and is the judge; the SIMD
// tables (one per instruction set, chosen at run time) give the same bytes faster.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "codec/row_shape.h"
#include "kv4/options.h"
#include "kv4/params.h"
#include "kv4/tensor.h"
#include "ops/attend_row.h"
#include "ops/compress_row.h"
#include "schema/rope.h"

namespace kv4::cpu {

/// row [width]: a mean, rounded to bf16, and the finished row in its place; cos, sin [pairs]; tmp [width rounded up to
/// a power of two]
struct FinishArgs {
  int width;
  const float* norm_weight;
  float eps;
  int pairs;
  const float* cos;
  const float* sin;
  float* row;
  float* tmp;
};

/// A query's heads against keys that follow each other. queries: [num_heads, query_bytes(width)], as prepare_query
/// leaves them.
struct ScoreArgs {
  int num_heads;
  const std::uint8_t* queries;
  const float* weights;  // [num_heads]
  const ops::RowPlanes& page;
  std::int64_t block, row;  // of the first key
  int count;
  float* out;  // [count]
  float* tmp;  // [kScoreKeys, width]
};
/// nvfp4's second scale of a page; 1 where there is none.
inline float page_scale(const ops::RowPlanes& page, std::int64_t block) {
  float global = 1.0f;
  if (page.global.data != nullptr) std::memcpy(&global, page.global.at(block, 0), 4);
  return global;
}
constexpr int kScoreKeys = 32;  // the most at once
constexpr std::int64_t query_bytes(std::int64_t width) { return 4 * width + 64; }

/// Heads against rows. q: [num_heads, width], times the softmax scale; rows: [count, width]; state and acc [num_heads,
/// width]: the softmax so far; tmp: [num_heads, kAttendRows].
struct AttendArgs {
  int width;
  int num_heads;
  const float* q;
  const float* rows;
  int count;
  ops::Attention* state;
  float* acc;
  float* tmp;
};
constexpr int kAttendRows = 32;  // the most at once
/// count elements; f32 and bf16, either way; to bf16 rounds to nearest even; NaN becomes the one pattern. Rows that
/// will be read and written later are brought into a cache meanwhile, or null.
struct ConvertArgs {
  std::int64_t count;
  const void* from;
  DType from_type;
  void* to;
  DType to_type;
  const void* read_later = nullptr;
  const void* write_later = nullptr;
};

struct RowKernels {
  const char* name;
  void (*convert)(const ConvertArgs& args);
  void (*load_as_bf16)(const void* from, DType type, int count, float* to);  // values rounded to bf16
  void (*fold)(int width, const ops::SourceRow* rows, int count, bool fresh, float* acc);
  /// Mean of what acc [3, width] holds, rounded to bf16.
  void (*mean)(int width, const float* acc, float* row);
  /// The same of all rows of an entry at once. acc: room for [3, width]
  void (*pool)(int width, const ops::SourceRow* rows, int count, float* acc, float* row);
  void (*angles)(const RopeAngles& angles, std::int64_t position, float* cos, float* sin);
  void (*finish)(const FinishArgs& args);
  void (*hadamard)(int width, float* row);
  void (*encode)(Format format, codec::RowShape shape, const float* x, std::uint8_t* payload, std::uint8_t* scale,
                 float global);  // x: bf16 values
  /// The same from an input row that is not rounded to bf16 yet. tmp: [width]
  void (*encode_input)(Format format, codec::RowShape shape, const void* x, DType type, std::uint8_t* payload,
                       std::uint8_t* scale, float global, float* tmp);
  void (*decode)(Format format, codec::RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale,
                 float global, void* out, DType out_type, float* tmp);  // tmp: [width]
  /// An encoded query as `score` of the same table wants it.
  void (*prepare_query)(Format format, codec::RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale,
                        float global, std::uint8_t* out);
  void (*score)(const ScoreArgs& args);
  void (*attend)(const AttendArgs& args);
};

const RowKernels& plain_row_kernels();
/// The best table for this machine; the plain one where no instruction set with fused multiply-add is there.
const RowKernels& best_row_kernels();
/// Every table this machine can run, the plain one first.
std::vector<const RowKernels*> runnable_row_kernels();

}  // namespace kv4::cpu
