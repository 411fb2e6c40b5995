// Where snapshots (canonical images at block boundaries) are kept, and what a hit then has to compute again.
#pragma once

#include <cstdint>

namespace kv4 {

using SnapshotId = std::int32_t;
inline constexpr SnapshotId kNoSnapshot = -1;

struct SnapshotPolicy {
  enum class Kind : std::uint8_t {
    full,        // at every block boundary
    checkpoint,  // at the last boundary of a prompt and of an output, and every `period_tokens`
    none         // nowhere: a hit replays the tokens that windows and pending rows depend on
  };
  Kind kind = Kind::checkpoint;
  std::int64_t period_tokens = 8192;  // checkpoint: a multiple of the block
  std::int64_t replay_tokens = 0;     // none: exact is window x layers; one window is bounded, an approximation

  /// Whether the boundary at `position` tokens gets one. `ends_request`: no further boundary in this prompt or output.
  bool keeps(std::int64_t position, bool ends_request) const {
    return kind == Kind::full || (kind == Kind::checkpoint && (ends_request || position % period_tokens == 0));
  }
};

}  // namespace kv4
