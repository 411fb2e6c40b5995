// attend's kernels in one table: the problems that each can run, its variants with their limits and estimated times,
// and its launch. select.cc holds the table and chooses from it, dispatch.cu queries the GPU and launches.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "kv4/params.h"
#include "schema/attend_workspace.h"

namespace kv4::cuda {

constexpr int kMaxCluster = 16;      // CTAs
constexpr int kMaxWindowRows = 128;  // of the two window kernels
constexpr int kAttendTile = 64;      // heads of a CTA, rows of a KV tile, channels of a scale
constexpr int kAttendWidth = 512, kAttendTail = 64;
/// Rows of a KV split in small_batch.cu with one stage, and with two.
constexpr int kOneStageRows = 80, kTwoStageRows = 2 * kAttendTile;
constexpr int kNineSplits = 9;  // of small_batch.cu: eight of them reduce; 9 x 128 rows are two tiles each, not three

/// Combination in memory: KV splits of a token, and arrival counters in the workspace (8 bytes each).
constexpr int kMaxMemorySplits = 160, kMaxArrivalCounters = ops::kAttendCounterBytes / 8;

enum class AttendKernel {
  split_kv,            ///< split_kv.cu: the KV splits form a cluster and combine through distributed shared memory
  split_kv_in_memory,  ///< split_kv.cu: the KV splits combine through params.workspace
  unsplit,             ///< split_kv.cu: one KV split, without any code that combines; for few rows
  persistent,          ///< persistent.cu: as many CTAs as run at once; many tokens of few requests
  token_pair,          ///< token_pair.cu: persistent 2-CTA pairs with two consecutive tokens
  persistent_window,   ///< persistent_window.cu: windows only, many tokens of few requests
  single_pass_window,  ///< single_pass_window.cu: windows only, one or two tokens per SM
  small_batch,         ///< small_batch.cu: few tokens
  staged,              ///< staged.cu: many tokens; a pass of its own decodes the rows into bf16 before
  bf16_rows,           ///< staged.cu: the caller's bf16 rows, by list
  generic,             ///< generic.cu: any format, width, type and GPU
};

/// The division of a token's work among CTAs.
struct AttendSplit {
  AttendKernel kernel = AttendKernel::generic;
  int kv_splits = 1;
  int channel_splits = 1;   // of V; CTAs with the same rows and different channels all compute the scores of those rows
  bool cta_pair = false;    // two CTAs with different heads convert each row once; for an even number of head tiles
  int heads = kAttendTile;  // of a CTA; small_batch: 8 or 16
  int stages = 2;           // KV tiles in shared memory; small_batch: 1 to 3

  bool operator==(const AttendSplit&) const = default;
};

/// One variant of a kernel, with its limits. Its estimated time in hundredths of a microsecond is
/// start + per_split * KV splits + per_tile * tiles of a KV split + per_row * rows of a KV split.
struct AttendVariant {
  int channel_splits = 1;
  bool cta_pair = false;
  int heads = kAttendTile, stages = 2;
  int min_kv_splits = 1, max_kv_splits = 1;
  std::int64_t max_split_rows = INT64_MAX;  // rows of a KV split
  double start = 0, per_split = 0, per_tile = 0, per_row = 0;
};

struct AttendKernelInfo {
  AttendKernel kernel;
  const char* name;
  /// Whether the kernel computes this problem, divided in this way. Performance is not considered.
  bool (*can_run)(const ops::AttendParams&, const AttendSplit&);
  std::span<const AttendVariant> variants;
  cudaError_t (*launch)(const ops::AttendParams&, const AttendSplit&, cudaStream_t);
};

/// Indexed by AttendKernel.
std::span<const AttendKernelInfo> attend_kernels();
/// The kernel and its divisions in words, for benchmarks and tests.
std::string describe(const AttendSplit& split);

/// Facts about a GPU that selection depends on.
struct AttendGpu {
  /// Clusters that run at once, by the number of their CTAs. [kMaxCluster + 1]
  using Clusters = std::array<int, kMaxCluster + 1>;

  bool is_sm90 = false;
  int num_sms = 0;
  Clusters wgmma{};                       // of CTAs that take an SM each: all kernels but small_batch
  std::array<Clusters, 4> small_batch{};  // [variant of small_batch]
};
/// The current device. Its clusters are counted once.
const AttendGpu& attend_gpu();

/// A pure function of its arguments: it calls no CUDA function and reads no memory that the params point to.
AttendSplit select_attend(const ops::AttendParams& params, const AttendGpu& gpu);
/// cudaErrorInvalidValue if the kernel cannot run it.
cudaError_t attend_split(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);

// --- the table's entries

cudaError_t launch_split_kv(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);
cudaError_t launch_split_kv_in_memory(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);
cudaError_t launch_unsplit(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);
cudaError_t launch_persistent(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);
cudaError_t launch_token_pair(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);
cudaError_t launch_persistent_window(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);
cudaError_t launch_single_pass_window(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);
cudaError_t launch_small_batch(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);
cudaError_t launch_staged(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);
cudaError_t launch_bf16_rows(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);
cudaError_t launch_generic(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);

/// Occupancy queries for attend_gpu().
AttendGpu::Clusters count_wgmma_clusters();
std::array<AttendGpu::Clusters, 4> count_small_batch_clusters();

// --- properties of a problem

/// Channels of a row. A layer whose window lives in another pool may have entries only.
KV4_HD std::int32_t width_of(const ops::AttendParams& p) {
  return p.layer.window.ring.shape.width > 0 ? p.layer.window.ring.shape.width : p.layer.kinds[0].page.shape.width;
}
inline int head_tiles_of(const ops::AttendParams& p) { return (p.num_heads + kAttendTile - 1) / kAttendTile; }
/// L2 already holds most rows that several tokens of a request share.
inline bool shares_rows(const ops::StepDesc& step) {
  constexpr int kSharers = 8;
  return step.num_items > 0 && step.num_tokens / step.num_items >= kSharers;
}

}  // namespace kv4::cuda
