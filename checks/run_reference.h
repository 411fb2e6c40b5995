// An independent, plain computation of the stored rows and of their expected values: double precision, no code of the
// library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "inputs.h"
#include "kv4/schema.h"

namespace kv4::checks {

struct PlainRow {
  std::vector<float> values;
  std::vector<float> half_steps;  // allowed distance between a stored value and the value before rounding
};

/// `global`: nvfp4's second scale.
PlainRow decode_plain(const RowSchema& row, const std::byte* payload, const std::byte* scale, float global);

/// A compressed row before quantisation, with the specified rounding points.
struct ReferenceRow {
  std::vector<double> values;
  double tolerance = 0;  // two bf16 steps of the largest value; twice that after a Hadamard transform
};

class PlainModel {
 public:
  PlainModel(const CacheSchema& schema, const InputGenerator& generator, const SeededWeights& weights)
      : schema_(schema), generator_(generator), weights_(weights) {}
  /// Row `entry` of row kind `kind` of the `layer`-th owned layer.
  ReferenceRow compressed(const History& history, std::size_t layer, std::size_t kind, std::int64_t entry) const;

 private:
  std::vector<double> pooled(const History& history, std::size_t layer, std::size_t kind, std::int64_t entry) const;
  void rotate(std::vector<double>& row, std::int64_t position) const;

  const CacheSchema& schema_;
  const InputGenerator& generator_;
  const SeededWeights& weights_;
};

}  // namespace kv4::checks
