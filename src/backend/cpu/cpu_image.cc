// Canonical images: rings unrolled into position order, and back.
#include <algorithm>
#include <cstring>

#include "backend/cpu/compressor.h"
#include "backend/cpu/cpu_backend.h"

namespace kv4::cpu {
namespace {

// Copies ring rows [first, first + count) of a plane to or from a dense array: at most two pieces where the ring has
// one stride.
template <class CopyPiece>
void for_ring_pieces(const ops::Plane& plane, std::int32_t slot, std::int64_t ring_rows, std::int64_t first,
                     std::int64_t count, CopyPiece copy) {
  std::int64_t done = 0;
  while (done < count) {
    const std::int64_t row = (first + done) % ring_rows;
    const std::int64_t rows = std::min(count - done, ring_rows - row);
    copy(plane.at(slot, row), done * plane.row_stride, static_cast<std::size_t>(rows * plane.row_stride));
    done += rows;
  }
}

// Calls piece(ring bytes, offset in the image, bytes) for everything of the image that is stored as it is.
template <class Piece>
void for_stored_pieces(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                       Piece piece) {
  for (const WindowPart& part : layout.windows) {
    const ops::WindowDesc& w = layers[static_cast<std::size_t>(part.layer)].window;
    for_ring_pieces(
        w.ring.payload, slot, w.rows, part.first, part.count,
        [&](std::uint8_t* ring, std::int64_t at, std::size_t bytes) { piece(ring, part.payload_at + at, bytes); });
    for_ring_pieces(
        w.ring.scale, slot, w.rows, part.first, part.count,
        [&](std::uint8_t* ring, std::int64_t at, std::size_t bytes) { piece(ring, part.scale_at + at, bytes); });
  }
  for (const PendingPart& part : layout.pending) {
    const ops::KindDesc& kind = layers[static_cast<std::size_t>(part.layer)].kinds[part.kind];
    if (!kind.overlap) continue;
    const ops::PendingDesc& p = kind.pending;
    const std::size_t half = static_cast<std::size_t>(kind.page.shape.width) * element_bytes(p.dtype);
    for (std::int64_t i = 0; i < part.previous_count; ++i) {
      std::uint8_t* row = p.ring.at(slot, (part.open_first - part.previous_count + i) % p.rows);
      const std::int64_t at = part.previous_at + i * static_cast<std::int64_t>(2 * half);
      piece(row, at, half);
      piece(row + 2 * half, at + static_cast<std::int64_t>(half), half);
    }
    for_ring_pieces(
        p.ring, slot, p.rows, part.open_first, part.open_count,
        [&](std::uint8_t* ring, std::int64_t at, std::size_t bytes) { piece(ring, part.open_at + at, bytes); });
  }
}

}  // namespace

void CpuBackend::save_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                            std::byte* image) {
  for_stored_pieces(layers, layout, slot, [&](const std::uint8_t* ring, std::int64_t at, std::size_t bytes) {
    std::memcpy(image + at, ring, bytes);
  });
  for (const WindowPart& part : layout.windows) {  // an aborted step may have taken the oldest row's place
    const ops::LayerDesc& layer = layers[static_cast<std::size_t>(part.layer)];
    const ops::WindowDesc& w = layer.window;
    if (part.count < layer.window_tokens || w.displaced_position(slot) != part.first) continue;
    std::memcpy(image + part.payload_at, w.displaced.payload.at(slot, 0),
                static_cast<std::size_t>(w.displaced.payload.row_stride));
    std::memcpy(image + part.scale_at, w.displaced.scale.at(slot, 0),
                static_cast<std::size_t>(w.displaced.scale.row_stride));
  }
  RowBuffers& buffer = buffers(0);
  for (const PendingPart& part : layout.pending) {
    const ops::KindDesc& kind = layers[static_cast<std::size_t>(part.layer)].kinds[part.kind];
    if (kind.overlap || part.open_count == 0) continue;
    const int width = kind.page.shape.width;
    const std::size_t bytes = static_cast<std::size_t>(3 * width) * sizeof(float);
    fit_buffers(width);
    if (kind.bias != nullptr) {
      const Compressor compressor(kernels_, kind, {}, {});
      compressor.pool_open({.length = part.length, .count = 0, .first_token = 0, .read_slot = slot, .write_slot = slot},
                           part.length, buffer);
    } else {  // without weights no row was ever appended here: what was restored, or nothing
      const bool restored = kind.pending.frontiers[slot * kind.pending.frontier_stride] > part.open_first;
      if (restored) std::memcpy(buffer.acc.data(), kind.pending.accumulator.at(slot, 0), bytes);
      kernels_.fold(width, nullptr, 0, !restored, buffer.acc.data());
    }
    std::memcpy(image + part.open_at, buffer.acc.data(), bytes);
  }
}

void CpuBackend::restore_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                               const std::byte* image) {
  for_stored_pieces(layers, layout, slot, [&](std::uint8_t* ring, std::int64_t at, std::size_t bytes) {
    std::memcpy(ring, image + at, bytes);
  });
  for (const PendingPart& part : layout.pending) {
    const ops::KindDesc& kind = layers[static_cast<std::size_t>(part.layer)].kinds[part.kind];
    if (kind.overlap) continue;
    const ops::PendingDesc& p = kind.pending;
    if (part.open_count > 0)
      std::memcpy(p.accumulator.at(slot, 0), image + part.open_at,
                  static_cast<std::size_t>(3 * kind.page.shape.width) * sizeof(float));
    p.frontiers[slot * p.frontier_stride] = static_cast<std::int32_t>(part.length);
  }
}

}  // namespace kv4::cpu
