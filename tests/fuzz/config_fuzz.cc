// Any bytes as a config.json: a ModelConfig whose schema can be built, or kv4::Error; nothing else.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kv4/error.h"
#include "kv4/model_config.h"
#include "kv4/schema.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  try {
    const kv4::ModelConfig config = kv4::parse_model_config(json);
    kv4::validate(config);  // a parsed config is valid
    try {
      const kv4::CacheSchema schema = kv4::build_schema(config, kv4::CacheOptions{});
      (void)kv4::plan_memory(schema);
    } catch (const kv4::Error&) {
    }
  } catch (const kv4::Error&) {
  }
  return 0;
}
