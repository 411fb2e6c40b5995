// The CPU backend's operations on one row. The plain table runs ops/ and codec/ unchanged and is the reference; the
// SIMD tables (one per instruction set, chosen at run time) give the same bytes faster.
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

/// A token's query for `score`, and where its scores go.
struct ScoreQuery {
  const std::uint8_t* heads;  // [num_heads, query_bytes(width)], written by prepare_query
  const float* weights;       // [num_heads]
  int count;                  // keys that the token sees
  float* out;                 // [count]
};
constexpr int kScoreTokens = 16;  // queries at once, at most
constexpr int kScoreKeys = 32;    // keys at once, at most

/// Several tokens' queries against consecutive keys, each of which is expanded once.
struct ScoreArgs {
  int num_heads;
  const ScoreQuery* queries;
  int num_queries;
  const ops::RowPlanes& page;
  std::int64_t block, row;  // of the first key
  int count;                // the largest of the queries'
  float* tmp;               // [kScoreKeys, width]
};
/// The global scale of an nvfp4 page; 1 for other formats.
inline float page_scale(const ops::RowPlanes& page, std::int64_t block) {
  float global = 1.0f;
  if (page.global.data != nullptr) std::memcpy(&global, page.global.at(block, 0), 4);
  return global;
}
constexpr std::int64_t query_bytes(std::int64_t width) { return 4 * width + 64; }

/// Arrays over heads are padded to whole vectors: `padded_heads` elements, of which the first num_heads mean something.
constexpr int padded_heads(int num_heads) { return (num_heads + 15) / 16 * 16; }
/// Consecutive rows of floats lie this many elements apart, so that a column of them does not fall into few cache sets.
constexpr int attend_stride(int width) { return width + 16; }
constexpr int kAttendRows = 96;  // at most, at once
/// P and a rescale factor per head, and the rows as pairs of bf16.
constexpr int attend_tmp(int width, int num_heads) {
  return (kAttendRows + 1) * padded_heads(num_heads) + kAttendRows * attend_stride(width / 2);
}

/// q [padded_heads, width] times the softmax scale, in the form that `attend` of the same table reads: as many
/// elements, or fewer.
struct PrepareHeadsArgs {
  int width;
  int num_heads;
  const float* q;
  bool all_bf16;  // these values are, and all rows; a table may then use bf16 products
  float scale;
  float* out;
};

/// Heads against rows. acc [num_heads], rows and acc with attend_stride(width).
struct AttendArgs {
  int width;
  int num_heads;
  const float* q;  // by prepare_heads, with the same all_bf16 and scale
  bool all_bf16;
  float scale;
  float* rows;  // [kAttendRows]; a kernel may write to those from `count` on
  int count;
  float* max;  // [padded_heads] the online softmax so far
  float* sum;  // [padded_heads]
  float* acc;  // [padded_heads]
  float* tmp;  // [attend_tmp]
};
/// Converts `count` elements between f32 and bf16, in either direction; to bf16 rounds to nearest even; NaN becomes
/// canonical. read_later, write_later: rows to prefetch meanwhile, or null.
struct ConvertArgs {
  std::int64_t count;
  const void* from;
  DType from_type;
  void* to;
  DType to_type;
  const void* read_later = nullptr;
  const void* write_later = nullptr;
};

/// out [rows] = weight [rows, width] . latent, rounded to bf16.
struct ProjectArgs {
  int width;
  const float* latent;
  const std::uint16_t* weight;  // bf16
  int rows;
  float* out;
};

struct RowKernels {
  const char* name;
  void (*convert)(const ConvertArgs& args);
  void (*load_as_bf16)(const void* from, DType type, int count, float* to);  // values rounded to bf16
  void (*fold)(int width, const ops::SourceRow* rows, int count, bool fresh, float* acc);
  /// Mean of acc [3, width], rounded to bf16.
  void (*mean)(int width, const float* acc, float* row);
  /// Pools all rows of an entry at once, and takes the mean. acc: room for [3, width]
  void (*pool)(int width, const ops::SourceRow* rows, int count, float* acc, float* row);
  void (*angles)(const RopeAngles& angles, std::int64_t position, float* cos, float* sin);
  void (*finish)(const FinishArgs& args);
  /// Rotates channels [2 * pairs], rounded to bf16.
  void (*rotate)(int pairs, const float* cos, const float* sin, float* channels);
  void (*project)(const ProjectArgs& args);
  void (*hadamard)(int width, float* row);
  void (*encode)(Format format, codec::RowShape shape, const float* x, std::uint8_t* payload, std::uint8_t* scale,
                 float global);  // x: bf16 values
  /// Encodes an input row that is not rounded to bf16 yet. tmp: [width]
  void (*encode_input)(Format format, codec::RowShape shape, const void* x, DType type, std::uint8_t* payload,
                       std::uint8_t* scale, float global, float* tmp);
  void (*decode)(Format format, codec::RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale,
                 float global, void* out, DType out_type, float* tmp);  // tmp: [width]
  /// Converts an encoded query to the form that `score` of the same table reads.
  void (*prepare_query)(Format format, codec::RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale,
                        float global, std::uint8_t* out);
  void (*score)(const ScoreArgs& args);
  void (*prepare_heads)(const PrepareHeadsArgs& args);
  void (*attend)(const AttendArgs& args);
};

const RowKernels& plain_row_kernels();
/// The best table for this machine; the plain table if it has no instruction set with fused multiply-add.
const RowKernels& best_row_kernels();
/// Every table that this machine can run, the plain table first.
std::vector<const RowKernels*> runnable_row_kernels();

}  // namespace kv4::cpu
