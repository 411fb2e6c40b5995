#include "tier/host_tier.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/check.h"

namespace kv4::tier {

HostTier::HostTier(const HostTierOptions& options, std::shared_ptr<Clock> clock)
    : options_(options), clock_(std::move(clock)) {
  require(options.page_bytes >= kRecordHeaderBytes, ErrorCode::bad_argument,
          "pages of {} bytes; a record's header needs {}", options.page_bytes, kRecordHeaderBytes);
  require(options.capacity_bytes >= options.page_bytes && options.capacity_bytes % options.page_bytes == 0,
          ErrorCode::bad_argument, "a capacity of {} bytes; it must be a multiple of the page's {}",
          options.capacity_bytes, options.page_bytes);
  const std::int64_t pages = options.capacity_bytes / options.page_bytes;
  require(pages < kNoPage, ErrorCode::bad_argument, "{} pages are too many; make them larger than {} bytes", pages,
          options.page_bytes);
  memory_.reset(new (std::nothrow) std::byte[static_cast<std::size_t>(options.capacity_bytes)]);
  require(memory_ != nullptr, ErrorCode::out_of_memory, "no {} bytes of host memory for a tier",
          options.capacity_bytes);
  next_page_.resize(static_cast<std::size_t>(pages));
  for (std::int64_t i = 0; i < pages; ++i)
    next_page_[static_cast<std::size_t>(i)] = i + 1 < pages ? static_cast<std::uint32_t>(i + 1) : kNoPage;
  free_page_ = 0;
  free_pages_ = pages;
}

std::int64_t HostTier::pages_for(std::int64_t length) const {
  return ceil_div(kRecordHeaderBytes + length, options_.page_bytes);
}

void HostTier::put(std::span<PutRequest> requests, Deadline deadline) {
  for (PutRequest& request : requests)
    request.status = clock_->now() < deadline ? put_one(request.id, request.payload) : PutStatus::failed;
}

PutStatus HostTier::put_one(const RecordId& id, std::span<const std::byte> payload) {
  const auto length = static_cast<std::int64_t>(payload.size());
  if (length > kMaxPayloadBytes || pages_for(length) > static_cast<std::int64_t>(next_page_.size()))
    return PutStatus::too_large;
  if (const auto old = index_.find(id); old != index_.end()) drop(old->second);
  while (free_pages_ < pages_for(length)) {
    drop(std::prev(records_.end()));
    ++counts_.evicted_records;
  }

  RecordHeader header;
  header.layout_id = options_.layout_id;
  header.id = id;
  header.length = length;
  header.sequence = next_sequence_++;
  header.payload_digest = digest128(payload);
  std::array<std::byte, kRecordHeaderBytes> bytes;
  encode_header(header, bytes);

  records_.push_front({id, length, take_pages(pages_for(length))});
  index_.emplace(id, records_.begin());
  counts_.payload_bytes += length;
  write(records_.front().first_page, 0, bytes);
  write(records_.front().first_page, kRecordHeaderBytes, payload);
  return PutStatus::stored;
}

void HostTier::get(std::span<GetRequest> requests, Deadline deadline) {
  for (GetRequest& request : requests) request.status = clock_->now() < deadline ? get_one(request) : GetStatus::failed;
}

GetStatus HostTier::get_one(GetRequest& request) {
  request.bytes = 0;
  const auto found = index_.find(request.id);
  if (found == index_.end()) return GetStatus::missing;
  const auto record = found->second;
  request.bytes = record->length;
  if (static_cast<std::int64_t>(request.to.size()) < record->length) return GetStatus::too_small;

  std::array<std::byte, kRecordHeaderBytes> bytes;
  read(record->first_page, 0, bytes);
  const auto payload = request.to.first(static_cast<std::size_t>(record->length));
  read(record->first_page, kRecordHeaderBytes, payload);
  // The copy is what is checked: it is what the caller uses.
  const ParsedHeader parsed = parse_header(bytes);
  if (parsed.refusal != RecordRefusal::none || parsed.header.kind != RecordKind::value ||
      parsed.header.id != request.id || parsed.header.layout_id != options_.layout_id ||
      parsed.header.length != record->length || parsed.header.payload_digest != digest128(payload)) {
    drop(record);
    ++counts_.set_aside_records;
    return GetStatus::damaged;
  }
  records_.splice(records_.begin(), records_, record);
  return GetStatus::found;
}

void HostTier::exists(std::span<ExistsRequest> requests, Deadline deadline) {
  for (ExistsRequest& request : requests) {
    const auto found = index_.find(request.id);
    request.answered = clock_->now() < deadline;
    request.bytes = request.answered && found != index_.end() ? found->second->length : -1;
  }
}

void HostTier::remove(std::span<RemoveRequest> requests, Deadline deadline) {
  for (RemoveRequest& request : requests) {
    request.removed = false;
    request.answered = clock_->now() < deadline;
    const auto found = index_.find(request.id);
    if (!request.answered || found == index_.end()) continue;
    drop(found->second);
    request.removed = true;
  }
}

TierStats HostTier::stats() {
  TierStats stats = counts_;
  stats.records = static_cast<std::int64_t>(records_.size());
  stats.capacity_bytes = options_.capacity_bytes;
  return stats;
}

std::int64_t HostTier::used_bytes() const {
  return (static_cast<std::int64_t>(next_page_.size()) - free_pages_) * options_.page_bytes;
}

std::vector<std::span<std::byte>> HostTier::pages_of(const RecordId& id) {
  std::vector<std::span<std::byte>> pages;
  const Record& record = *index_.at(id);
  for_pieces(record.first_page, 0, kRecordHeaderBytes + record.length,
             [&](std::span<std::byte> bytes, std::int64_t) { pages.push_back(bytes); });
  return pages;
}

std::uint32_t HostTier::take_pages(std::int64_t count) {
  const std::uint32_t first = free_page_;
  std::uint32_t last = first;
  for (std::int64_t i = 1; i < count; ++i) last = next_page_[last];
  free_page_ = std::exchange(next_page_[last], kNoPage);
  free_pages_ -= count;
  return first;
}

void HostTier::drop(Records::iterator record) {
  std::uint32_t last = record->first_page;
  while (next_page_[last] != kNoPage) last = next_page_[last];
  next_page_[last] = std::exchange(free_page_, record->first_page);
  free_pages_ += pages_for(record->length);
  counts_.payload_bytes -= record->length;
  index_.erase(record->id);
  records_.erase(record);
}

template <class Piece>
void HostTier::for_pieces(std::uint32_t page_index, std::int64_t offset, std::int64_t count, Piece&& piece) const {
  for (; offset >= options_.page_bytes; offset -= options_.page_bytes) page_index = next_page_[page_index];
  for (std::int64_t done = 0; done < count; offset = 0, page_index = next_page_[page_index]) {
    const std::int64_t bytes = std::min(options_.page_bytes - offset, count - done);
    piece(std::span(page(page_index) + offset, static_cast<std::size_t>(bytes)), done);
    done += bytes;
  }
}

void HostTier::write(std::uint32_t page_index, std::int64_t offset, std::span<const std::byte> from) {
  for_pieces(page_index, offset, static_cast<std::int64_t>(from.size()),
             [&](std::span<std::byte> to, std::int64_t at) { std::memcpy(to.data(), from.data() + at, to.size()); });
}

void HostTier::read(std::uint32_t page_index, std::int64_t offset, std::span<std::byte> to) const {
  for_pieces(page_index, offset, static_cast<std::int64_t>(to.size()), [&](std::span<std::byte> from, std::int64_t at) {
    std::memcpy(to.data() + at, from.data(), from.size());
  });
}

}  // namespace kv4::tier
