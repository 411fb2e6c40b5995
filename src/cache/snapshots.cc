#include "cache/snapshots.h"

#include <algorithm>
#include <utility>

#include "backend/image_pieces.h"

namespace kv4 {

Snapshots::Snapshots(const CacheMemory& memory, const Layers& layers, const Blocks& blocks, PrefixCache* prefix)
    : memory_(memory),
      layers_(layers),
      blocks_(blocks),
      prefix_(prefix),
      parts_(snapshot_layout(memory.schema, memory.schema.block_tokens)),
      saved_layers_(layers.all().size()),
      at_(parts_) {
  const CacheOptions& options = memory.schema.options;
  planned_.reserve(options.max_step_tokens / blocks.tokens() + options.max_requests);
  boundaries_.reserve(planned_.capacity());
  if (prefix != nullptr) pieces_per_snapshot_ = most_pieces_to_image(layers.all(), parts_);
}

void Snapshots::restore(std::int32_t slot, const PrefixMatch& match) {
  if (match.resume_at == 0) return;
  std::vector<ops::CopyPiece> pieces;
  if (match.snapshot != kNoSnapshot)
    pieces = pieces_from_image(layers_.all(), snapshot_layout(memory_.schema, match.resume_at), slot,
                               prefix_->address(match.snapshot));
  // Spans before this are closed, so nothing of them is to be folded.
  for (const PendingPart& part : parts_.pending) {
    const ops::KindDesc& kind = layers_[part.layer].kinds[part.kind];
    const ops::PendingDesc& p = kind.pending;
    if (p.folds())
      pieces.push_back({prefix_->boundary(match.resume_at / blocks_.tokens()),
                        reinterpret_cast<std::uint8_t*>(p.fold_watermarks + slot * p.fold_watermark_stride), 4});
  }
  memory_.backend->copy_pieces(pieces);
}

bool Snapshots::keeps(const Sequence& s, std::int64_t position) const {
  return prefix_->index.snapshots().keeps(position, position == s.chain.prompt_end);
}

// The last boundary before `length` may turn out to be the boundary of the output.
bool Snapshots::wants_latest(std::int64_t position, std::int64_t length) const {
  return prefix_->index.snapshots().kind == SnapshotPolicy::Kind::checkpoint &&
         position == length / blocks_.tokens() * blocks_.tokens();
}

void Snapshots::begin_step() {
  planned_.clear();
  std::fill(saved_layers_.begin(), saved_layers_.end(), false);
}

// Plans the boundaries that the rings will not hold after the step.
void Snapshots::plan_boundaries(std::int32_t row, const Sequence& s, std::size_t item, std::int32_t count) {
  if (!s.chain.publishes || s.chain.narrowed) return;
  const std::int64_t end = s.length() + count, step = blocks_.tokens();
  for (std::int64_t position = (s.length() / step + 1) * step;
       position < end - memory_.schema.options.max_rewind_tokens; position += step) {
    if (!keeps(s, position) && !wants_latest(position, end)) continue;
    const SnapshotId place = prefix_->take_place();
    if (place == kNoSnapshot) return;
    planned_.push_back({row, item, position, place});
  }
}

void Snapshots::describe_boundaries(int layer, std::span<const ops::StepRecord> items, ops::BoundaryParams& params) {
  boundaries_.clear();
  for (const PlannedBoundary& b : planned_)
    boundaries_.push_back({items[b.item], static_cast<std::int32_t>(b.position), prefix_->address(b.place)});
  params.boundaries = boundaries_.data();
  params.count = static_cast<std::int32_t>(boundaries_.size());
  const WindowPart& window = parts_.windows[layer];
  params.payload_at = window.payload_at;
  params.scale_at = window.scale_at;
  for (const PendingPart& part : parts_.pending)
    if (part.layer == layer) params.pending_at[part.kind] = part.previous_at;
}

void Snapshots::give_boundaries() {
  for (const PlannedBoundary& b : planned_) prefix_->give_place(b.place);
  planned_.clear();
}

void Snapshots::give_unsaved_boundaries() {
  if (planned_.empty()) return;
  for (int layer = 0; layer < std::ssize(saved_layers_); ++layer)
    if (memory_.schema.layers[layer].spec.group == 0 && !saved_layers_[layer]) return give_boundaries();
}

void Snapshots::leave_latest(Sequence& s) {
  if (s.chain.latest != kNoNode) prefix_->leave(std::exchange(s.chain.latest, kNoNode), false);
}

// The snapshot of a committed boundary: the one that the step's layers have saved, or one from the rings. kNoSnapshot:
// there is no room, or the rings no longer hold its rows.
SnapshotId Snapshots::take(std::int32_t row, Sequence& s, std::int64_t position) {
  for (PlannedBoundary& b : planned_)
    if (b.row == row && b.position == position) return std::exchange(b.place, kNoSnapshot);
  const GroupProgress& g = s.groups[0];
  if (position < std::max(g.highest - memory_.schema.options.max_rewind_tokens, g.floor)) return kNoSnapshot;
  leave_latest(s);  // its place may be the only one to take
  const SnapshotId place = prefix_->take_place();
  if (place == kNoSnapshot) return place;
  if (std::find(targets_.begin(), targets_.end(), place) != targets_.end()) send();
  snapshot_layout(memory_.schema, position, at_);
  add_pieces_to_image(layers_.all(), at_, s.slot, prefix_->address(place), pieces_);
  targets_.push_back(place);
  return place;
}

void Snapshots::send() {
  if (targets_.empty()) return;
  memory_.backend->copy_pieces(pieces_);
  pieces_.clear();
  targets_.clear();
}

void Snapshots::reserve(std::int64_t count) {
  if (prefix_ == nullptr) return;
  const std::int64_t most = std::min<std::int64_t>(count, prefix_->num_places());
  pieces_.reserve(most * pieces_per_snapshot_);
  targets_.reserve(most);
}

void Snapshots::save(std::int32_t row, Sequence& s, std::int64_t old_length) {
  const std::int64_t first = old_length / blocks_.tokens() + 1, last = s.length() / blocks_.tokens();
  if (first > last || prefix_->index.snapshots().kind == SnapshotPolicy::Kind::none) return;
  // Newest first: if there are too few places, the newest has one.
  NodeId slot = s.chain.tail;
  for (std::int64_t i = s.chain.blocks; i > last; --i) slot = prefix_->index.parent(slot);  // skips a replay's rest
  for (std::int64_t i = last; i >= first; --i, slot = prefix_->index.parent(slot)) {
    const std::int64_t position = i * blocks_.tokens();
    const bool kept = keeps(s, position), latest = !kept && wants_latest(position, s.length());
    if (!kept && !latest) continue;
    if (prefix_->index.snapshot(slot) == kNoSnapshot) {
      const SnapshotId place = take(row, s, position);
      if (place == kNoSnapshot) continue;
      prefix_->attach(slot, place);
    }
    if (kept) prefix_->keep(slot);
    if (latest) prefix_->stay(slot);
    if (i == last) leave_latest(s);
    if (latest) s.chain.latest = slot;
  }
}

}  // namespace kv4
