#include "codec/codec.h"

#include <iterator>

#include "base/check.h"

namespace kv4 {
namespace codec {
namespace {

constexpr FormatInfo kFormats[] = {
    {Format::fp8_tile64, true, false, Fp8Tile64::kTile, false},
    {Format::fp8_row, true, false, 2, false},
    {Format::bf16, true, true, 1, false},
    {Format::mxfp4, false, true, Mxfp4::kGroup, false},
    {Format::nvfp4, false, true, Nvfp4::kGroup, true},
    {Format::fp8, false, true, 1, false},
    {Format::fp8_tile32, true, false, Fp8Tile32::kTile, false, false, false},
    {Format::nvfp4_row, true, false, Nvfp4Row::kGroup, false, false, false},
};

}  // namespace

const FormatInfo& format_info(Format format) {
  for (const FormatInfo& info : kFormats)
    if (info.format == format) return info;
  fail(ErrorCode::bad_argument, "format {} is not one of the {} known formats", static_cast<int>(format),
       std::size(kFormats));
}

}  // namespace codec
}  // namespace kv4
