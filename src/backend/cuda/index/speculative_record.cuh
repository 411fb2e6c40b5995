// A CTA reads its token's record and block ids before the grid dependency wait, as they are then, and validates them
// after it.
#pragma once

#include <cstdint>

#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/index/token_tile.cuh"

namespace kv4::cuda {

__device__ inline const ops::StepRecord* record_of(const TokenTile& tile, int token) {
  return tile.p.step.tokens + tile.first + token;
}

/// The record and block ids that an assignment was computed from before the grid dependency wait. With it the loads of
/// keys are issued right after the wait; a Validation checks it meanwhile.
struct SpeculativeRecord {
  bool is_there = false;    // same for all threads of the CTA; if not, they compute the assignment after the wait
  std::int32_t token = -1;  // token whose record this thread has read, or -1
  std::int32_t row = 0, position = 0;  // of that record
  std::int32_t ids = -1;               // block ids of the lane's first keys (KeyPipeline)

  /// The fields of a token's record that decide the assignment. A second call gives the same values, even if the
  /// record is written meanwhile.
  __device__ ops::StepRecord load(const TokenTile& tile, int token_in) {
    if (token != token_in) {
      const ops::StepRecord record = load_record_l2(record_of(tile, token_in));
      token = token_in;
      row = record.row;
      position = record.position;
    }
    ops::StepRecord seen;
    seen.row = row;
    seen.position = position;
    return seen;
  }
};

/// Reads the record and block ids again after the wait. The constructor issues the loads.
class Validation {
 public:
  template <class Keys>
  __device__ Validation(const TokenTile& tile, const Keys& keys, const SpeculativeRecord& speculative)
      : row_(speculative.row), position_(speculative.position), ids_(speculative.ids) {
    if (!speculative.is_there) return;
    ids_ = keys.first_ids();
    if (speculative.token < 0) return;
    const ops::StepRecord* const record = record_of(tile, speculative.token);
    row_ = record->row;
    position_ = record->position;
  }
  __device__ bool holds(const SpeculativeRecord& speculative) {
    asm volatile("" : "+r"(row_), "+r"(position_), "+r"(ids_));  // the loads are not waited for earlier
    const bool same = row_ == speculative.row & position_ == speculative.position & ids_ == speculative.ids;
    row_ = position_ = ids_ = 0;  // frees the registers for the loop that follows
    return same;
  }

 private:
  std::int32_t row_, position_, ids_;
};

}  // namespace kv4::cuda
