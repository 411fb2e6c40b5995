// Snapshots of running requests: canonical images at block boundaries. A commit copies boundaries that the rings still
// hold; the layers of a long step write those inside it, while they append.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/blocks.h"
#include "cache/layers.h"
#include "cache/prefix_cache.h"
#include "cache/sequence.h"
#include "schema/image_layout.h"

namespace kv4 {

class Snapshots {
 public:
  /// `prefix` null: no request has snapshots, as none publishes its blocks.
  Snapshots(const CacheMemory& memory, const Layers& layers, const Blocks& blocks, PrefixCache* prefix);

  std::int64_t bytes() const { return parts_.bytes; }  // of one

  /// Queues the restore of the state at match.resume_at.
  void restore(std::int32_t slot, const PrefixMatch& match);

  // An open step:
  void begin_step();
  /// Finds places for the boundaries inside a long step of the request: item `item`, `count` tokens.
  void plan_boundaries(std::int32_t row, const Sequence& s, std::size_t item, std::int32_t count);
  bool has_boundaries() const { return !planned_.empty(); }
  /// The part that a layer has to save. `items`: of the step; params.boundaries are valid until the next call.
  void describe_boundaries(int layer, std::span<const ops::StepRecord> items, ops::BoundaryParams& params);
  void note_saved(int layer) { saved_layers_[layer] = true; }
  /// Gives back the places of boundaries that were aborted, or had a snapshot already.
  void give_boundaries();

  // A commit, in this order:
  void reserve(std::int64_t count);  // then save() of so many allocates nothing
  void give_unsaved_boundaries();    // if a layer has not saved its part
  /// Saves snapshots of the boundaries in (old_length, length] of the request.
  void save(std::int32_t row, Sequence& s, std::int64_t old_length);
  void send();

  /// The request's latest snapshot may go.
  void leave_latest(Sequence& s);

 private:
  // A boundary inside a long step, and the place of its snapshot.
  struct PlannedBoundary {
    std::int32_t row = 0;
    std::size_t item = 0;
    std::int64_t position = 0;
    SnapshotId place = kNoSnapshot;
  };

  bool keeps(const Sequence& s, std::int64_t position) const;
  bool wants_latest(std::int64_t position, std::int64_t length) const;
  SnapshotId take(std::int32_t row, Sequence& s, std::int64_t position);

  const CacheMemory& memory_;
  const Layers& layers_;
  const Blocks& blocks_;
  PrefixCache* prefix_;
  ImageLayout parts_;                      // the parts of a snapshot
  std::vector<PlannedBoundary> planned_;   // of the open step
  std::vector<ops::Boundary> boundaries_;  // the same, for the backend
  std::vector<bool> saved_layers_;         // [owned layers] which have saved their part
  // A commit copies all snapshots from the rings at once. Their room is reserved before anything changes.
  std::vector<ops::CopyPiece> pieces_;
  std::vector<SnapshotId> targets_;
  ImageLayout at_;                     // of the current one
  std::size_t pieces_per_snapshot_{};  // at most
};

}  // namespace kv4
