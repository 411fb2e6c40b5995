#include "tier/guarded_tier.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

namespace kv4::tier {

GuardedTier::GuardedTier(std::shared_ptr<Tier> inner, std::shared_ptr<const RecordGuard> guard, std::uint64_t layout_id)
    : inner_(std::move(inner)),
      guard_(std::move(guard)),
      layout_id_(layout_id),
      // The time, so that sequences also grow over restarts of the process.
      next_sequence_(static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count())) {}

void GuardedTier::put(std::span<PutRequest> requests, Deadline deadline) {
  std::vector<std::unique_ptr<std::byte[]>> records;
  std::vector<PutRequest> inner;
  std::vector<std::size_t> asked;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    PutRequest& request = requests[i];
    request.status = PutStatus::too_large;
    if (std::ssize(request.payload) > kMaxPayloadBytes) continue;
    request.status = PutStatus::failed;
    const std::size_t bytes = request.payload.size();
    auto record = std::make_unique_for_overwrite<std::byte[]>(kRecordHeaderBytes + bytes);
    const std::span<std::byte> stored{record.get() + kRecordHeaderBytes, bytes};
    RecordHeader header;
    header.layout_id = layout_id_;
    header.id = request.id;
    header.set_label(request.label);
    header.length = static_cast<std::int64_t>(bytes);
    header.sequence = next_sequence_++;
    if (!guard_->protect(header, request.payload, stored)) continue;
    if (header.kind != RecordKind::sealed) std::copy(request.payload.begin(), request.payload.end(), stored.begin());
    header.payload_digest = digest128(stored);
    encode_header(header, {record.get(), kRecordHeaderBytes});
    inner.push_back({request.id, {record.get(), kRecordHeaderBytes + bytes}});
    records.push_back(std::move(record));
    asked.push_back(i);
  }
  if (!inner.empty()) inner_->put(inner, deadline);
  for (std::size_t i = 0; i < inner.size(); ++i) requests[asked[i]].status = inner[i].status;
}

void GuardedTier::get(std::span<GetRequest> requests, Deadline deadline) {
  std::vector<std::unique_ptr<std::byte[]>> buffers;
  std::vector<GetRequest> inner;
  for (const GetRequest& request : requests) {
    const std::size_t bytes = kRecordHeaderBytes + request.to.size();
    inner.push_back(
        {request.id, {buffers.emplace_back(std::make_unique_for_overwrite<std::byte[]>(bytes)).get(), bytes}});
    inner.back().view_allowed = true;
  }
  inner_->get(inner, deadline);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    GetRequest& request = requests[i];
    const GetRequest& answer = inner[i];
    request.status = answer.status;
    request.bytes = std::max(kRecordHeaderBytes, answer.bytes) - kRecordHeaderBytes;
    if (answer.status != GetStatus::found) continue;
    // The lengths that a foreign tier reports are not believed either.
    const std::int64_t most = answer.view ? kRecordHeaderBytes + kMaxPayloadBytes : std::ssize(answer.to);
    request.status = GetStatus::damaged;
    request.bytes = 0;
    if (answer.bytes < 0 || answer.bytes > most) continue;
    const auto bytes = static_cast<std::size_t>(answer.bytes);
    std::span<std::byte> value = answer.to.first(std::min(bytes, answer.to.size()));
    std::vector<std::byte> longer;
    // Others may write to the tier's own memory (a shared file, say): only a copy stays as it was checked.
    if (answer.view && bytes <= answer.to.size()) {
      std::copy_n(answer.view.get(), bytes, value.begin());
    } else if (answer.view) {
      longer.assign(answer.view.get(), answer.view.get() + bytes);
      value = longer;
    }
    take(request, value);
  }
}

void GuardedTier::take(GetRequest& request, std::span<const std::byte> value) {
  const ParsedHeader parsed = parse_header(value);
  const RecordHeader& header = parsed.header;
  const bool record = parsed.refusal == RecordRefusal::none && header.version == kRecordVersion &&
                      std::ssize(value) == header.header_bytes() + header.length;
  std::span<const std::byte> stored = value;
  RecordRefusal refusal = RecordRefusal::unauthenticated;
  if (record) {
    stored = value.subspan(header.header_bytes());
    refusal = header.id == request.id && header.layout_id == layout_id_ ? RecordRefusal::none : RecordRefusal::forged;
  } else if (guard_->believes(RecordKind::value)) {  // a value put before there were keys
    refusal = RecordRefusal::none;
  }
  const std::int64_t length = std::ssize(stored);
  const bool fits = std::ssize(request.to) >= length;
  std::vector<std::byte> scratch;  // for check(): a length counts only after a key has verified it
  const RecordHeader plain;
  const RecordHeader& of = record ? header : plain;
  if (refusal == RecordRefusal::none)
    refusal = fits ? guard_->open(of, stored, request.to.first(length)) : guard_->check(of, stored, scratch);
  // A key's tag covers all bytes; without a key the digest does.
  const bool tagged = guard_->has_keys() && header.kind != RecordKind::value;
  if (refusal == RecordRefusal::none && record && !tagged &&
      digest128(fits ? request.to.first(length) : stored) != header.payload_digest) {
    refusal = RecordRefusal::damaged_payload;
    if (fits) std::fill_n(request.to.begin(), length, std::byte{0});
  }
  switch (refusal) {
    case RecordRefusal::none:
      request.status = fits ? GetStatus::found : GetStatus::too_small;
      request.bytes = length;
      request.coding = of.coding();
      return;
    case RecordRefusal::unauthenticated:
    case RecordRefusal::wrong_key:
      ++unauthenticated_records_;
      request.status = GetStatus::missing;
      return;
    default: ++forged_records_; request.status = GetStatus::damaged;
  }
}

void GuardedTier::exists(std::span<ExistsRequest> requests, Deadline deadline) {
  inner_->exists(requests, deadline);
  for (ExistsRequest& request : requests)
    if (request.bytes >= 0) request.bytes = std::max<std::int64_t>(0, request.bytes - kRecordHeaderBytes);
}

bool GuardedTier::look_up(std::span<ExistsRequest> requests) const {
  if (!inner_->look_up(requests)) return false;
  for (ExistsRequest& request : requests)
    if (request.bytes >= 0) request.bytes = std::max<std::int64_t>(0, request.bytes - kRecordHeaderBytes);
  return true;
}

TierStats GuardedTier::stats() {
  TierStats stats = inner_->stats();
  if (stats.records >= 0 && stats.payload_bytes >= 0)
    stats.payload_bytes = std::max<std::int64_t>(0, stats.payload_bytes - stats.records * kRecordHeaderBytes);
  stats.unauthenticated_records += unauthenticated_records_;
  stats.set_aside_records += forged_records_;
  return stats;
}

}  // namespace kv4::tier
