#include "schema/operations.h"

#include "base/check.h"
#include "codec/codec.h"

namespace kv4 {

void require_operations(const CacheSchema& schema, bool has_shared_entries) {
  require(has_shared_entries || !schema.config.shares_entries(), ErrorCode::bad_config,
          "a cache of {} cannot run on this backend, which has no operations on entries that layers share (V4.1); "
          "use make_cpu_backend()",
          schema.config.name);
  if (has_shared_entries) return;
  const Format window = *schema.options.window_format, entries = *schema.options.entry_format;
  for (const Format format : {window, entries})
    require(codec::format_info(format).has_operations, ErrorCode::bad_config,
            "a cache with rows in {} cannot run on this backend, only on the CPU's; use fp8_tile64, fp8_row or bf16",
            to_string(format));
  require(window == entries, ErrorCode::bad_config,
          "a cache with window rows in {} and entries in {} cannot run on this backend, only on the CPU's; set "
          "row_format alone",
          to_string(window), to_string(entries));
}

}  // namespace kv4
