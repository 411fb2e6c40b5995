// Any bytes as a record: refused for a reason, or a record that encodes to the same bytes; nothing else. Any bytes as
// the payload of a trimmed chunk: refused, or expanded within the value's memory.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "tier/chunk_coding.h"
#include "tier/record_format.h"

namespace {
constexpr std::size_t kMostExpanded = 1 << 20;
}

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
  // The value's size is that of a sound record, else it follows from the bytes.
  const ChunkCoding coding = record.header.coding();
  const bool chunk = record.refusal == RecordRefusal::none && coding.coding == kTrimmed;
  const std::span<const std::byte> payload =
      chunk ? bytes.subspan(static_cast<std::size_t>(kRecordHeaderBytes)) : bytes.subspan(size < 3 ? size : 3);
  const std::size_t value_bytes = chunk      ? static_cast<std::size_t>(coding.decoded_bytes)
                                  : size < 3 ? 0
                                             : data[0] + 256u * data[1] + 65536u * (data[2] & 3);
  if (value_bytes <= kMostExpanded && payload.size() <= value_bytes) {
    std::vector<std::byte> value(value_bytes);
    if (!payload.empty()) std::memcpy(value.data(), payload.data(), payload.size());
    const bool expanded = expand(value, static_cast<std::int64_t>(payload.size()));
    const std::optional<TrimPlan> plan = expanded ? plan_trim(value) : std::nullopt;
    if (plan) {  // what a value is trimmed to gives the value again
      std::vector<std::byte> again(value_bytes);
      trim(value, *plan, std::span(again).first(static_cast<std::size_t>(plan->payload_bytes)));
      if (!expand(again, plan->payload_bytes) || again != value) std::abort();
    }
  }
  return 0;
}
