// Any bytes as a checkpoint of an index: refused, or records that lie inside their segments. The input's first byte
// decides whether digests are made to fit, so that the fuzzer gets past them.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tier/index_checkpoint.h"
#include "tier/little_endian.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kv4::tier;
  constexpr std::size_t kHeaderBytes = 64;
  constexpr std::uint64_t kLayout = 11;
  if (size == 0) return 0;
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  std::vector<std::byte> file(bytes + 1, bytes + size);
  if (data[0] % 2 == 0 && file.size() >= kHeaderBytes) {
    const std::span<const std::byte> body = std::span<const std::byte>(file).subspan(kHeaderBytes);
    const auto digest = kv4::digest128(body);
    std::memcpy(file.data(), "KV4IDX\r\n\1\0\0\0\0\0\0\0", 16);
    store_le(file.data() + 16, kLayout);
    store_le(file.data() + 24, static_cast<std::uint64_t>(body.size()));
    store_le(file.data() + 40, digest.low);
    store_le(file.data() + 48, digest.high);
    store_le(file.data() + 56, kv4::digest64(std::span<const std::byte>(file).first(56)));
  }
  Checkpoint checkpoint;
  if (!parse_checkpoint(file, kLayout, checkpoint)) return 0;
  for (const auto& [id, segment] : checkpoint.segments) {
    if (segment.id != id || segment.end > segment.bytes) std::abort();
    for (std::size_t i = 0; i < segment.records.size(); i += kCheckpointRecordBytes) {
      const CheckpointRecord record = decode_checkpoint_record(segment.records.subspan(i));
      if (record.offset < kSegmentDataOffset || record.offset + stored_bytes(record.length) > segment.end) std::abort();
    }
  }
  return 0;
}
