#include "schema/operations.h"

#include "base/check.h"
#include "codec/codec.h"

namespace kv4 {

void require_operations(const CacheSchema& schema) {
  require(!schema.config.shares_entries(), ErrorCode::bad_config,
          "a cache of {} cannot run in this version, which has no operations on entries that layers share (V4.1); its "
          "config, schedule, formats, schema and plan work: load_model_config, layer_schedule, build_schema, "
          "plan_memory, kv4 plan",
          schema.config.name);
  const Format window = *schema.options.window_format, entries = *schema.options.entry_format;
  for (const Format format : {window, entries})
    require(codec::format_info(format).has_operations, ErrorCode::bad_config,
            "a cache with rows in {} cannot run in this version, only be planned; use fp8_tile64, fp8_row or bf16",
            to_string(format));
  require(window == entries, ErrorCode::bad_config,
          "a cache with window rows in {} and entries in {} cannot run in this version, only be planned; set "
          "row_format alone",
          to_string(window), to_string(entries));
}

}  // namespace kv4
