// Windows and pending rows: one fixed slot per running request, and spares for long steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kv4/backend.h"
#include "kv4/export.h"
#include "kv4/schema.h"
#include "kv4/tensor.h"

namespace kv4 {

/// The state that a request needs to continue: windows, then pending rows, nothing else (docs/formats.md). Independent
/// of ring sizes, rewind length, HCA mode, arrangement, backend and history.
struct CanonicalImage {
  std::uint64_t layout_id = 0;
  std::vector<std::int64_t> lengths;  // [1 + draft layers]: tokens of the backbone and of each draft stage
  std::vector<std::byte> bytes;

  bool operator==(const CanonicalImage&) const = default;
};

/// An image whose bytes lie anywhere, for example in HostMemory. Owns nothing.
struct ImageView {
  std::uint64_t layout_id = 0;            // of the schema
  std::span<const std::int64_t> lengths;  // [1 + draft layers]
  std::span<const std::byte> bytes;

  /// `bytes_in` must outlive the view.
  ImageView(std::uint64_t layout, std::span<const std::int64_t> lengths_in, std::span<const std::byte> bytes_in)
      : layout_id(layout), lengths(lengths_in), bytes(bytes_in) {}
  /// The image's own bytes.
  ImageView(const CanonicalImage& image) : ImageView(image.layout_id, image.lengths, image.bytes) {}
};

/// Bytes of the image of a request with these lengths.
KV4_API std::int64_t image_bytes(const CacheSchema& schema, std::span<const std::int64_t> lengths);

/// Owns the slots' memory. Not thread-safe.
class KV4_API StateCachePool {
 public:
  /// Allocates the memory of the backend. The schema must live as long.
  StateCachePool(const CacheSchema& schema, std::shared_ptr<Backend> backend);
  ~StateCachePool();
  StateCachePool(const StateCachePool&) = delete;
  StateCachePool& operator=(const StateCachePool&) = delete;

  /// A free slot; nullopt: all are taken.
  std::optional<std::int32_t> acquire_slot();
  /// Frees the slot.
  void release_slot(std::int32_t slot);
  void reset_slot(std::int32_t slot);                  // all zero: nothing of an earlier request remains
  void copy_slot(std::int32_t from, std::int32_t to);  // state and undo rows; queued

  /// `bias`: per owned layer the compressor's position bias [ratio, width] where the image needs one (an open HCA
  /// span), else nullptr.
  CanonicalImage save(std::int32_t slot, std::span<const std::int64_t> lengths,
                      std::span<const float* const> bias) const;
  /// The same into out [image_bytes].
  void save(std::int32_t slot, std::span<const std::int64_t> lengths, std::span<const float* const> bias,
            std::span<std::byte> out) const;
  /// The inverse of save(). Throws as check().
  void restore(std::int32_t slot, const ImageView& image);
  /// Throws Error(bad_argument) if the image has another layout than this cache, or its size does not fit its lengths.
  void check(const ImageView& image) const;

  /// Slot 0; an address of the backend.
  std::byte* base() const { return base_; }
  /// [num_slots, num_layers]: tokens below it are folded into the layer's accumulator.
  std::int32_t* fold_watermarks() const { return fold_watermarks_; }
  /// [num_slots, undo_row_bytes].
  std::byte* undo_rows() const { return undo_rows_; }
  /// [num_slots, num_layers]: the position of each undo row, -1: none.
  std::int32_t* undo_positions() const { return undo_positions_; }
  std::int32_t num_slots() const { return num_slots_; }  // requests and spares
  /// Slots that nobody holds.
  std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
  /// Slots, undo rows, and 8 bytes per slot and layer (rounded up to 128).
  std::int64_t memory_bytes() const { return bytes_; }

 private:
  void check_held(std::int32_t slot) const;

  const CacheSchema& schema_;
  std::shared_ptr<Backend> backend_;
  std::byte* base_ = nullptr;
  std::int32_t* fold_watermarks_ = nullptr;
  std::byte* undo_rows_ = nullptr;
  std::int32_t* undo_positions_ = nullptr;
  std::int32_t num_slots_ = 0;
  std::int64_t bytes_ = 0;
  std::vector<std::int32_t> free_;
  std::vector<bool> taken_;
};

}  // namespace kv4
