#include "codec/codec.h"

#include <iterator>
#include <string>

#include "base/check.h"

namespace kv4 {
namespace codec {
namespace {

constexpr FormatInfo kFormats[] = {
    {Format::fp8_tile64, "fp8_tile64", true, false, Fp8Tile64::kTile, false},
    {Format::fp8_row, "fp8_row", true, false, 2, false},
    {Format::bf16, "bf16", true, true, 1, false},
    {Format::mxfp4, "mxfp4", false, true, Mxfp4::kGroup, false},
    {Format::nvfp4, "nvfp4", false, true, Nvfp4::kGroup, true},
    {Format::fp8, "fp8", false, true, 1, false},
};

}  // namespace

const FormatInfo& format_info(Format format) {
  for (const FormatInfo& info : kFormats)
    if (info.format == format) return info;
  fail(ErrorCode::bad_argument, "format {} is not one of the {} known formats", static_cast<int>(format),
       std::size(kFormats));
}

}  // namespace codec

namespace {

template <class Enum, std::size_t N>
Enum parse_name(std::string_view name, const Enum (&all)[N], const char* what) {
  std::string names;
  for (Enum value : all) {
    if (name == to_string(value)) return value;
    names += names.empty() ? "" : ", ";
    names += to_string(value);
  }
  fail(ErrorCode::bad_argument, "{} '{}' is unknown; use one of: {}", what, name, names);
}

}  // namespace

const char* to_string(Format format) { return codec::format_info(format).name; }
const char* to_string(HcaMode mode) { return mode == HcaMode::online ? "online" : "raw"; }
const char* to_string(Arrangement a) { return a == Arrangement::block_major ? "block_major" : "layer_major"; }

Format parse_format(std::string_view name) {
  Format all[std::size(codec::kFormats)];
  for (std::size_t i = 0; i < std::size(all); ++i) all[i] = codec::kFormats[i].format;
  return parse_name(name, all, "format");
}

HcaMode parse_hca_mode(std::string_view name) {
  static constexpr HcaMode kAll[] = {HcaMode::online, HcaMode::raw};
  return parse_name(name, kAll, "HCA mode");
}

Arrangement parse_arrangement(std::string_view name) {
  static constexpr Arrangement kAll[] = {Arrangement::block_major, Arrangement::layer_major};
  return parse_name(name, kAll, "arrangement");
}

}  // namespace kv4
