// Lists of pieces to copy for a canonical image: the parts that are stored unchanged, with rings unrolled into position
// order.
#pragma once

#include <span>
#include <vector>

#include "kv4/params.h"
#include "schema/image_layout.h"

namespace kv4 {

/// The same pieces, none larger than `max_bytes`, a multiple of 16.
std::vector<ops::CopyPiece> cut_pieces(std::span<const ops::CopyPiece> pieces, std::int64_t max_bytes);

/// From the rings of a state slot to `image`, an address on host or device. Without the accumulators of open spans.
std::vector<ops::CopyPiece> pieces_to_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout,
                                            std::int32_t slot, std::uint8_t* image);
/// The same, appended to `out`; allocates nothing if `out` has room for most_pieces_to_image() more.
void add_pieces_to_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                         std::uint8_t* image, std::vector<ops::CopyPiece>& out);
std::size_t most_pieces_to_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout);

/// From `image` into a state slot that was reset, accumulators included.
std::vector<ops::CopyPiece> pieces_from_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout,
                                              std::int32_t slot, const std::uint8_t* image);

}  // namespace kv4
