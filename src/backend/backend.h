// The seam to the device: memory, and one call per operation with a plain params struct. The CPU backend runs calls at
// once; others run them in stream order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/layer_desc.h"
#include "schema/image_layout.h"

namespace kv4 {

class Backend {
 public:
  Backend() = default;
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  /// Zeroed, aligned to 4096; nullptr for 0 bytes. Throws Error(out_of_memory).
  virtual std::byte* allocate(std::int64_t bytes) = 0;
  virtual void deallocate(std::byte* memory, std::int64_t bytes) = 0;
  virtual void copy(std::byte* to, const std::byte* from, std::int64_t bytes) = 0;
  virtual void fill(std::byte* memory, std::uint8_t value, std::int64_t bytes) = 0;

  /// Window rows, pending rows, due entries and index keys of all the step's tokens.
  virtual void append(const ops::AppendParams& params) = 0;
  virtual void flush(const ops::FlushParams& params) = 0;
  virtual void gather_chosen(const ops::GatherParams& params) = 0;
  virtual void gather_all(const ops::GatherParams& params) = 0;
  virtual void gather_window(const ops::GatherParams& params) = 0;

  /// Canonical image of one slot. layers: one per owned layer. image: [layout.bytes] on the host.
  virtual void save_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                          std::byte* image) = 0;
  virtual void restore_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                             const std::byte* image) = 0;
};

}  // namespace kv4
