// Canonical images: unrolls rings into position order, and back.
#include <algorithm>
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
    const ops::KindDesc& kind = layers[part.layer].kinds[part.kind];
    if (!kind.pending.folds() || part.open_count == 0) continue;
    const int width = kind.page.shape.width;
    const std::size_t bytes = 3 * width * sizeof(float);
    fit_buffers(width);
    if (kind.bias != nullptr) {
      ops::StepRecord stored;
      stored.length = static_cast<std::int32_t>(part.length);
      stored.read_slot = stored.write_slot = slot;
      Compressor(kernels_, kind, {}, {}).pool_open(stored, part.length, buffer);
    } else {  // without weights no row was ever appended here: take the restored accumulator, if any
      const bool restored = kind.pending.fold_watermarks[slot * kind.pending.fold_watermark_stride] > part.open_first;
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
    const ops::KindDesc& kind = layers[part.layer].kinds[part.kind];
    if (kind.pending.folds())
      kind.pending.fold_watermarks[slot * kind.pending.fold_watermark_stride] = static_cast<std::int32_t>(part.length);
  }
}

void CpuBackend::save_boundaries(const ops::BoundaryParams& params) {
  const ops::WindowDesc& w = params.layer.window;
  pool_.run(params.count, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const ops::StepRecord& item = params.boundaries[i].item;
      const std::int32_t position = params.boundaries[i].position;
      std::uint8_t* image = params.boundaries[i].image;
      const std::int32_t first = std::max(0, position - params.layer.window_tokens);
      for (std::int32_t p = first; p < position; ++p) {
        const bool in_step = p >= item.length;
        const ops::RowPlanes& rows = in_step ? w.scratch : w.ring;
        const std::int64_t block = in_step ? 0 : item.read_slot, row = in_step ? item.token_of(p) : p % w.rows;
        const auto copy = [&](const ops::Plane& plane, std::int64_t at) {
          std::memcpy(image + at + (p - first) * plane.row_stride, plane.at(block, row), plane.row_stride);
        };
        copy(rows.payload, params.payload_at);
        copy(rows.scale, params.scale_at);
      }
      for (int k = 0; k < params.layer.num_kinds; ++k)
        if (params.layer.kinds[k].overlap)
          Compressor(kernels_, params.layer.kinds[k], params.kv[k], params.gate[k])
              .save_span(item, position, image + params.pending_at[k]);
    }
  });
}

}  // namespace kv4::cpu
