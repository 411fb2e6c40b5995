// Any bytes as a server's replies, in pieces of any size: an accepted reply is within the gate's limits and hiredis
// parses it; the pieces make no difference; nothing else.
#include <hiredis/hiredis.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "tier/redis_reply_gate.h"
#include "tier/redis_slots.h"

namespace {

using namespace kv4::tier;

constexpr ReplyLimits kLimits = {.depth = 4, .elements = 64, .bulk_bytes = 256, .total_bytes = 1024};

struct Size {
  int depth = 0;
  std::int64_t elements = 0;
};

Size size_of(const redisReply& reply) {
  Size out;
  if (reply.type != REDIS_REPLY_ARRAY) {
    if (static_cast<std::int64_t>(reply.len) > kLimits.total_bytes) std::abort();
    if (reply.type == REDIS_REPLY_STRING && static_cast<std::int64_t>(reply.len) > kLimits.bulk_bytes) std::abort();
    return out;
  }
  for (std::size_t i = 0; i < reply.elements; ++i) {
    const Size inner = size_of(*reply.element[i]);
    out.depth = std::max(out.depth, inner.depth);
    out.elements += inner.elements + 1;
  }
  ++out.depth;
  return out;
}

struct Outcome {
  int replies = 0;
  bool refused = false;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome read(const char* data, std::size_t size, std::size_t piece) {
  const std::unique_ptr<redisReader, void (*)(redisReader*)> reader(redisReaderCreate(), redisReaderFree);
  ReplyGate gate;
  Outcome out;
  for (std::size_t at = 0; at < size;) {
    std::size_t taken = 0;
    const ReplyGate::Verdict verdict = gate.look({data + at, std::min(piece, size - at)}, kLimits, taken);
    if (verdict == ReplyGate::Verdict::refused) {
      if (gate.failure().reason == FailureReason::none || gate.failure().detail.empty()) std::abort();
      out.refused = true;
      return out;
    }
    if (redisReaderFeed(reader.get(), data + at, taken) != REDIS_OK) std::abort();
    at += taken;
    if (verdict == ReplyGate::Verdict::more) continue;
    void* object = nullptr;
    if (redisReaderGetReply(reader.get(), &object) != REDIS_OK) {  // numbers that only the gate can read: "007"
      out.refused = true;
      return out;
    }
    if (object == nullptr || reader->pos != reader->len) std::abort();
    const Size tree = size_of(*static_cast<redisReply*>(object));
    if (tree.depth > kLimits.depth || tree.elements > kLimits.elements) std::abort();
    freeReplyObject(object);
    ++out.replies;
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto* bytes = reinterpret_cast<const char*>(data + 1);
  const Outcome whole = read(bytes, size - 1, size), pieces = read(bytes, size - 1, 1 + data[0] % 16);
  if (whole != pieces) std::abort();
  (void)parse_redirect({bytes, size - 1}, {"127.0.0.1", 1});
  return 0;
}
