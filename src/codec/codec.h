// The table of all formats. A new format is one header beside this file, one line here and one table row in codec.cc.
#pragma once

#include <utility>

#include "codec/bf16_row.h"
#include "codec/fp8_key.h"
#include "codec/fp8_row.h"
#include "codec/fp8_tile32.h"
#include "codec/fp8_tile64.h"
#include "codec/mxfp4.h"
#include "codec/nvfp4.h"
#include "codec/nvfp4_row.h"
#include "kv4/options.h"

namespace kv4::codec {

/// Calls f with the codec of a format that every backend has. GPU kernels instantiate all of these.
template <class F>
KV4_HD auto with_codec(Format format, F&& f) {
  switch (format) {
    case Format::fp8_tile64: return f(Fp8Tile64{});
    case Format::fp8_row: return f(Fp8Row{});
    case Format::mxfp4: return f(Mxfp4{});
    case Format::nvfp4: return f(Nvfp4{});
    case Format::fp8: return f(Fp8Key{});
    case Format::bf16: break;
    case Format::fp8_tile32:
    case Format::nvfp4_row: break;  // with_any_codec has them
  }
  return f(Bf16Row{});
}

/// The same for every format, on the host.
template <class F>
auto with_any_codec(Format format, F&& f) {
  if (format == Format::fp8_tile32) return f(Fp8Tile32{});
  if (format == Format::nvfp4_row) return f(Nvfp4Row{});
  return with_codec(format, std::forward<F>(f));
}

struct FormatInfo {
  Format format;
  bool for_rows;    // used by window rows and entries
  bool for_keys;    // used by index keys
  int tile;         // quantised channels must be a multiple of this
  bool has_global;  // one fp32 scale per page
  bool has_tail = true;        // rows keep the rotated channels bf16
  bool has_operations = true;  // on every backend; false: on the CPU only
};

const FormatInfo& format_info(Format format);

}  // namespace kv4::codec
