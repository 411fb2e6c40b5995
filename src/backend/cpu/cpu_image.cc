// Canonical images: rings unrolled into position order, and back.
#include <cstring>

#include "backend/cpu/compressor.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/image_pieces.h"

namespace kv4::cpu {

void CpuBackend::save_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                            std::byte* image) {
  copy_pieces(pieces_to_image(layers, layout, slot, reinterpret_cast<std::uint8_t*>(image)));
  RowBuffers& buffer = buffers(0);
  for (const PendingPart& part : layout.pending) {
    const ops::KindDesc& kind = layers[static_cast<std::size_t>(part.layer)].kinds[part.kind];
    if (kind.overlap || part.open_count == 0) continue;
    const int width = kind.page.shape.width;
    const std::size_t bytes = static_cast<std::size_t>(3 * width) * sizeof(float);
    fit_buffers(width);
    if (kind.bias != nullptr) {
      ops::StepRecord stored;
      stored.length = static_cast<std::int32_t>(part.length);
      stored.read_slot = stored.write_slot = slot;
      Compressor(kernels_, kind, {}, {}).pool_open(stored, part.length, buffer);
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
  copy_pieces(pieces_from_image(layers, layout, slot, reinterpret_cast<const std::uint8_t*>(image)));
  for (const PendingPart& part : layout.pending) {
    const ops::KindDesc& kind = layers[static_cast<std::size_t>(part.layer)].kinds[part.kind];
    if (!kind.overlap)
      kind.pending.frontiers[slot * kind.pending.frontier_stride] = static_cast<std::int32_t>(part.length);
  }
}

}  // namespace kv4::cpu
