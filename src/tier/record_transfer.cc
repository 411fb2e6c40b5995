#include "tier/record_transfer.h"

#include <algorithm>

namespace kv4::tier {
namespace {

/// The bytes that can move between a file and the caller's memory without a copy: not a partial block at the end.
std::int64_t straight_bytes(const std::byte* data, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % kBlockBytes == 0 ? bytes / kBlockBytes * kBlockBytes : 0;
}

/// Adds a piece; merges it with the last one where they are adjacent in memory.
void push(std::vector<IoPiece>& pieces, std::byte* data, std::int64_t bytes) {
  if (bytes == 0) return;
  if (!pieces.empty() && pieces.back().data + pieces.back().bytes == data)
    pieces.back().bytes += bytes;
  else
    pieces.push_back({data, static_cast<std::size_t>(bytes)});
}

}  // namespace

namespace {

/// Whether the write uses a copy of the payload, its ciphertext.
bool seals(const RecordGuard* guard) { return guard != nullptr && guard->kind() == RecordKind::sealed; }

}  // namespace

std::int64_t RecordWrite::buffer_bytes(std::span<const std::byte> payload, const RecordGuard* guard) {
  if (seals(guard)) return stored_bytes(std::ssize(payload));
  return stored_bytes(std::ssize(payload)) - straight_bytes(payload.data(), std::ssize(payload));
}

void RecordWrite::start(SegmentFile& segment, std::int64_t at, std::int64_t needed_bytes) {
  segment_ = &segment;
  end_ = at;
  free_ = buffer.get(needed_bytes);
  file = &segment.file();
  kind = Kind::write;
  offset = at;
  pieces.clear();
}

std::span<std::byte> RecordWrite::take(std::int64_t bytes) {
  const std::span<std::byte> taken = free_.first(bytes);
  free_ = free_.subspan(taken.size());
  push(pieces, taken.data(), bytes);
  return taken;
}

bool RecordWrite::add(RecordHeader header, std::span<const std::byte> payload, const RecordGuard* guard) {
  const std::span<std::byte> block = take(kBlockBytes);
  bool whole = true;
  if (seals(guard)) {
    const std::span<std::byte> copy = take(whole_blocks(header.length));
    const std::span<std::byte> sealed = copy.first(header.length);
    std::fill(copy.begin() + header.length, copy.end(), std::byte{0});
    whole = guard->protect(header, payload, sealed);
    header.payload_digest = digest128(sealed);
  } else {
    whole = guard == nullptr || guard->protect(header, payload, {});
    header.payload_digest = digest128(payload);
    const std::int64_t straight = straight_bytes(payload.data(), header.length);
    push(pieces, const_cast<std::byte*>(payload.data()), straight);
    const std::span<const std::byte> rest = payload.subspan(straight);
    const std::span<std::byte> copy = take(whole_blocks(header.length - straight));
    std::fill(std::copy(rest.begin(), rest.end(), copy.begin()), copy.end(), std::byte{0});
  }
  if (!whole) header = segment_->dead(header.length);
  segment_->encode_at(end_, header, block);
  end_ += stored_bytes(header.length);
  return whole;
}

std::int64_t RecordRead::buffer_bytes(std::span<const std::byte> to, std::int64_t length) {
  return stored_bytes(length) - straight_bytes(to.data(), std::min<std::int64_t>(std::ssize(to), length));
}

void RecordRead::start(SegmentFile& segment, std::int64_t at, std::int64_t length, std::span<std::byte> to) {
  segment_ = &segment;
  at_ = at;
  const std::int64_t straight = straight_bytes(to.data(), std::min<std::int64_t>(std::ssize(to), length));
  const std::int64_t rest = length - straight;
  const std::span<std::byte> own = buffer.get(kBlockBytes + whole_blocks(rest));
  header_ = own.first(kBlockBytes);
  rest_ = own.subspan(kBlockBytes, straight > 0 ? rest : 0);
  payload_ = straight > 0 ? to.first(length) : own.subspan(kBlockBytes, length);
  file = &segment.file();
  kind = Kind::read;
  tried = false;
  offset = at;
  pieces.clear();
  push(pieces, header_.data(), kBlockBytes);
  if (straight > 0) push(pieces, to.data(), straight);
  push(pieces, own.data() + kBlockBytes, whole_blocks(rest));
}

void RecordRead::clear() { std::fill(payload_.begin(), payload_.end(), std::byte{0}); }

ReadRecord RecordRead::finish() {
  if (!moved.status.ok()) return {RecordRefusal::too_short, moved.status, {}, {}};
  std::copy(rest_.begin(), rest_.end(), payload_.end() - std::ssize(rest_));
  return segment_->check(at_, header_, payload_);
}

}  // namespace kv4::tier
