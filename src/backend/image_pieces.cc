#include "backend/image_pieces.h"

#include <algorithm>

namespace kv4 {
namespace {

// Calls piece for the ring rows [first, first + count) of a plane, dense in the image: at most two pieces if the ring
// has one stride.
template <class Piece>
void for_ring_pieces(const ops::Plane& plane, std::int32_t slot, std::int64_t ring_rows, std::int64_t first,
                     std::int64_t count, std::int64_t at, Piece piece) {
  std::int64_t done = 0;
  while (done < count) {
    const std::int64_t row = (first + done) % ring_rows;
    const std::int64_t rows = std::min(count - done, ring_rows - row);
    piece(plane.at(slot, row), at + done * plane.row_stride, rows * plane.row_stride);
    done += rows;
  }
}

template <class Piece>
void for_pending_pieces(const ops::KindDesc& kind, const PendingPart& part, std::int32_t slot, Piece piece) {
  const ops::PendingDesc& p = kind.pending;
  if (p.rows == 0) return;
  const std::int64_t half = kind.page.shape.width * static_cast<std::int64_t>(element_bytes(p.dtype));
  for (std::int64_t i = 0; i < part.previous_count; ++i) {
    std::uint8_t* row = p.ring.at(slot, (part.open_first - part.previous_count + i) % p.rows);
    const std::int64_t at = part.previous_at + i * 2 * half;
    piece(row, at, half);
    piece(row + 2 * half, at + half, half);
  }
  for_ring_pieces(p.ring, slot, p.rows, part.open_first, part.open_count, part.open_at, piece);
}

}  // namespace

std::vector<ops::CopyPiece> cut_pieces(std::span<const ops::CopyPiece> pieces, std::int64_t max_bytes) {
  std::vector<ops::CopyPiece> out;
  for (const ops::CopyPiece& piece : pieces)
    for (std::int64_t at = 0; at < piece.bytes; at += max_bytes) {
      ops::CopyPiece& part = out.emplace_back(piece);
      part.from += at;
      part.to += at;
      part.bytes = std::min(piece.bytes - at, max_bytes);
      if (part.instead != nullptr) part.instead += at;
    }
  return out;
}

std::vector<ops::CopyPiece> pieces_to_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout,
                                            std::int32_t slot, std::uint8_t* image) {
  std::vector<ops::CopyPiece> out;
  add_pieces_to_image(layers, layout, slot, image, out);
  return out;
}

std::size_t most_pieces_to_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout) {
  constexpr std::size_t kPerRing = 2;  // the ring wraps once
  std::size_t count =
      layout.windows.size() * 2 * (1 + kPerRing);  // payload and scale; the oldest row is a piece of its own
  for (const PendingPart& part : layout.pending) {
    const ops::KindDesc& kind = layers[part.layer].kinds[part.kind];
    count += 2 * kind.ratio + kPerRing;  // halves of the previous span's rows; open rows
  }
  return count;
}

void add_pieces_to_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                         std::uint8_t* image, std::vector<ops::CopyPiece>& out) {
  const auto add = [&](const std::uint8_t* ring, std::int64_t at, std::int64_t bytes) {
    out.push_back({ring, image + at, bytes});
  };
  for (const WindowPart& part : layout.windows) {
    const ops::LayerDesc& layer = layers[part.layer];
    const ops::WindowDesc& w = layer.window;
    struct Source {
      ops::Plane ring, undo_row;
      std::int64_t at;
    };
    for (const Source& s : {Source{w.ring.payload, w.undo_row.payload, part.payload_at},
                            Source{w.ring.scale, w.undo_row.scale, part.scale_at}}) {
      const std::int64_t bytes = s.ring.row_stride;
      const bool full = part.count == layer.window_tokens;  // an aborted step may have overwritten the oldest row
      if (full)
        out.push_back({s.ring.at(slot, part.first % w.rows), image + s.at, bytes, s.undo_row.at(slot, 0),
                       &w.undo_position(slot), static_cast<std::int32_t>(part.first)});
      const std::int64_t skip = full ? 1 : 0;
      for_ring_pieces(s.ring, slot, w.rows, part.first + skip, part.count - skip, s.at + skip * bytes, add);
    }
  }
  for (const PendingPart& part : layout.pending) {
    const ops::KindDesc& kind = layers[part.layer].kinds[part.kind];
    if (!kind.pending.folds()) for_pending_pieces(kind, part, slot, add);
  }
}

std::vector<ops::CopyPiece> pieces_from_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout,
                                              std::int32_t slot, const std::uint8_t* image) {
  std::vector<ops::CopyPiece> out;
  const auto add = [&](std::uint8_t* ring, std::int64_t at, std::int64_t bytes) {
    out.push_back({image + at, ring, bytes});
  };
  for (const WindowPart& part : layout.windows) {
    const ops::WindowDesc& w = layers[part.layer].window;
    for_ring_pieces(w.ring.payload, slot, w.rows, part.first, part.count, part.payload_at, add);
    for_ring_pieces(w.ring.scale, slot, w.rows, part.first, part.count, part.scale_at, add);
  }
  for (const PendingPart& part : layout.pending) {
    const ops::KindDesc& kind = layers[part.layer].kinds[part.kind];
    if (!kind.pending.folds())
      for_pending_pieces(kind, part, slot, add);
    else if (part.open_count > 0)
      add(kind.pending.accumulator.at(slot, 0), part.open_at, std::int64_t{3} * kind.page.shape.width * 4);
  }
  return out;
}

}  // namespace kv4
