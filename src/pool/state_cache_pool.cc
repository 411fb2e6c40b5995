#include "kv4/state_cache_pool.h"

#include <array>

#include "backend/backend.h"
#include "base/check.h"
#include "ops/layer_desc.h"
#include "schema/operations.h"

namespace kv4 {
namespace {

// One int32 per slot and layer.
std::int64_t position_bytes(const CacheSchema& schema, std::int64_t slots) {
  return round_up(checked_mul(slots, 4 * static_cast<std::int64_t>(schema.layers.size()), "state pool"), 64,
                  "state pool");
}

std::vector<ops::LayerDesc> describe_all(const CacheSchema& schema, const StateCachePool& pool) {
  std::vector<ops::LayerDesc> out;
  for (std::size_t i = 0; i < schema.layers.size(); ++i)
    out.push_back(ops::describe_layer(
        schema, static_cast<int>(i),
        {nullptr, pool.base(), pool.fold_watermarks(), pool.undo_rows(), pool.undo_positions(), nullptr}));
  return out;
}

}  // namespace

StateCachePool::StateCachePool(const CacheSchema& schema, std::shared_ptr<Backend> backend)
    : schema_(schema), backend_(std::move(backend)) {
  require_operations(schema, backend_->shared_entries() != nullptr);
  num_slots_ = schema.options.max_requests + schema.options.spare_slots;
  const std::int64_t slots = checked_mul(schema.slot_bytes, num_slots_, "state pool");
  const std::int64_t undo = checked_mul(schema.undo_row_bytes, num_slots_, "state pool");
  const std::int64_t positions = position_bytes(schema, num_slots_);
  bytes_ = checked_add(checked_add(slots, undo, "state pool"), 2 * positions, "state pool");
  taken_.resize(num_slots_);
  free_.reserve(num_slots_);
  for (std::int32_t s = num_slots_ - 1; s >= 0; --s) free_.push_back(s);
  backend_->reserve_staging(schema.slot_bytes);  // no image is larger
  base_ = backend_->allocate(bytes_);
  undo_rows_ = base_ + slots;
  fold_watermarks_ = reinterpret_cast<std::int32_t*>(undo_rows_ + undo);
  undo_positions_ = reinterpret_cast<std::int32_t*>(undo_rows_ + undo + positions);
  backend_->fill(undo_rows_ + undo + positions, 0xFF, positions);  // -1: none
}

StateCachePool::~StateCachePool() { backend_->deallocate(base_, bytes_); }

std::optional<std::int32_t> StateCachePool::acquire_slot() {
  if (free_.empty()) return std::nullopt;
  const std::int32_t slot = free_.back();
  free_.pop_back();
  taken_[slot] = true;
  return slot;
}

void StateCachePool::check_held(std::int32_t slot) const {
  require(slot >= 0 && slot < num_slots_ && taken_[slot], ErrorCode::bad_argument,
          "state slot {} is not held; slots are 0 to {}", slot, num_slots_ - 1);
}

void StateCachePool::release_slot(std::int32_t slot) {
  check_held(slot);
  taken_[slot] = false;
  free_.push_back(slot);
}

void StateCachePool::reset_slot(std::int32_t slot) {
  check_held(slot);
  const std::int64_t layers = static_cast<std::int64_t>(schema_.layers.size());
  backend_->fill(base_ + slot * schema_.slot_bytes, 0x00, schema_.slot_bytes);
  backend_->fill(reinterpret_cast<std::byte*>(fold_watermarks_ + slot * layers), 0x00, 4 * layers);
  backend_->fill(reinterpret_cast<std::byte*>(undo_positions_ + slot * layers), 0xFF, 4 * layers);  // -1
}

void StateCachePool::copy_slot(std::int32_t from, std::int32_t to) {
  check_held(from);
  check_held(to);
  const std::int64_t layers = static_cast<std::int64_t>(schema_.layers.size());
  std::array<ops::CopyPiece, 4> pieces;  // a step allocates nothing
  std::size_t count = 0;
  const auto add = [&](void* base, std::int64_t bytes) {
    std::uint8_t* at = static_cast<std::uint8_t*>(base);
    if (bytes > 0) pieces[count++] = {at + from * bytes, at + to * bytes, bytes};
  };
  add(base_, schema_.slot_bytes);
  add(undo_rows_, schema_.undo_row_bytes);
  add(fold_watermarks_, 4 * layers);
  add(undo_positions_, 4 * layers);
  backend_->copy_pieces(std::span(pieces).first(count));
}

CanonicalImage StateCachePool::save(std::int32_t slot, std::span<const std::int64_t> lengths,
                                    std::span<const float* const> bias) const try {
  CanonicalImage image{
      schema_.layout_id, {lengths.begin(), lengths.end()}, std::vector<std::byte>(image_bytes(schema_, lengths))};
  save(slot, lengths, bias, image.bytes);
  return image;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void StateCachePool::save(std::int32_t slot, std::span<const std::int64_t> lengths, std::span<const float* const> bias,
                          std::span<std::byte> out) const try {
  check_held(slot);
  const ImageLayout layout = image_layout(schema_, lengths);
  require(std::ssize(out) == layout.bytes, ErrorCode::bad_argument,
          "the image of {} tokens has {} bytes; got room for {}", lengths[0], layout.bytes, out.size());
  std::vector<ops::LayerDesc> layers = describe_all(schema_, *this);
  require(bias.size() == layers.size(), ErrorCode::bad_argument, "save needs one bias per owned layer: {}, got {}",
          layers.size(), bias.size());
  for (std::size_t i = 0; i < layers.size(); ++i) layers[i].kinds[0].bias = bias[i];
  backend_->save_image(layers, layout, slot, out.data());
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void StateCachePool::check(const ImageView& image) const try {
  require(image.layout_id == schema_.layout_id, ErrorCode::bad_argument,
          "the image was made for another model, layer set or format (layout {:016x}, this cache is {:016x})",
          image.layout_id, schema_.layout_id);
  const std::int64_t bytes = image_layout(schema_, image.lengths).bytes;
  require(std::ssize(image.bytes) == bytes, ErrorCode::bad_argument,
          "the image has {} bytes; one of {} tokens has {}: it is truncated or damaged", image.bytes.size(),
          image.lengths[0], bytes);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void StateCachePool::restore(std::int32_t slot, const ImageView& image) try {
  check_held(slot);
  check(image);
  const std::vector<ops::LayerDesc> layers = describe_all(schema_, *this);
  const ImageLayout layout = image_layout(schema_, image.lengths);
  reset_slot(slot);
  backend_->restore_image(layers, layout, slot, image.bytes.data());
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

}  // namespace kv4
