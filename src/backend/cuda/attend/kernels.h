// How the tuned attend divides a token's work among the CTAs of a cluster. For dispatch.cu, and for what
// measures it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "kv4/params.h"

namespace kv4::cuda {

constexpr int kMaxCluster = 16, kMostRunWindow = 128;

/// Together at most kMaxCluster, but for those that merge through memory. Blocks with the same rows and other channels
/// score those rows each.
struct AttendSplit {
  int rows;             // parts
  int channels;         // parts of V's channels: 1, 2 or 4
  bool paired = false;  // two blocks with other heads convert each row once; for an even number of 64 heads
  // Parts are not blocks of a cluster: they merge through params.workspace, and there may be more of them, as many as
  // have a place there. All channels.
  bool through_memory = false;
  // One part, all channels, not paired: as many CTAs as run at once take tokens in turn.
  bool in_rounds = false;
  // One part, all channels: two blocks have neighbouring tokens and convert rows for each other; in rounds or not. Not
  // for chosen entries or slot lists.
  bool neighbours = false;
  // persistent_window.cu: the step's window alone, of 1 to kMostRunWindow tokens.
  bool in_runs = false;
  // One part, all channels, not paired: a kernel that can do nothing else, for few rows.
  bool alone = false;
  // single_pass_window.cu: the step's window alone, of 1 to kMostRunWindow tokens, in one go; 1 or 2 parts of the
  // channels.
  bool in_one_go = false;
};

AttendSplit split_of(const ops::AttendParams& params);
/// The tuned kernel only.
cudaError_t attend_split(const ops::AttendParams& params, const AttendSplit& split, cudaStream_t stream);

cudaError_t attend_runs(const ops::AttendParams& params, cudaStream_t stream);
/// channel_parts: 1 or 2.
cudaError_t attend_window(const ops::AttendParams& params, int channel_parts, cudaStream_t stream);

/// How small_batch.cu divides a token.
struct SmallSplit {
  int heads;  // of a CTA: 8 or 16
  int parts;  // of the rows: a power of two up to kMaxCluster, or 9 (not with one stage)
  // Tiles of rows in shared memory: 1, for at most 80 rows in each part; 2, for at most 128; 3, for any number. 16
  // heads have three. With fewer, two CTAs share an SM.
  int stages;
};
/// Null where the other kernel is faster, which takes so many hundredths of a microsecond. most_rows: of any token.
std::optional<SmallSplit> small_split_of(const ops::AttendParams& params, std::int64_t most_rows, double other);
cudaError_t attend_small(const ops::AttendParams& params, const SmallSplit& split, cudaStream_t stream);

}  // namespace kv4::cuda
