// Any bytes as a record: refused for a reason, or a record that encodes to the same bytes; nothing else.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#include "tier/record_format.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kv4::tier;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  const ParsedHeader header = parse_header(bytes), record = verify_record(bytes);
  if (header.refusal == RecordRefusal::none) {
    std::byte again[kRecordHeaderBytes];
    encode_header(header.header, again);
    if (std::memcmp(again, data, static_cast<std::size_t>(header.header.header_bytes())) != 0) std::abort();
  }
  if (record.refusal == RecordRefusal::none &&
      (header.refusal != RecordRefusal::none ||
       size < static_cast<std::size_t>(record.header.header_bytes() + record.header.length)))
    std::abort();
  return 0;
}
