#include "tier/host_tier.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/undo.h"

namespace kv4::tier {
namespace {

constexpr std::int64_t kMaxPages = 0xffffffff;

const HostTierOptions& checked(const HostTierOptions& options) {
  require(options.page_bytes >= kRecordHeaderBytes, ErrorCode::bad_argument,
          "pages of {} bytes; a record's header needs {}", options.page_bytes, kRecordHeaderBytes);
  require(options.capacity_bytes >= options.page_bytes && options.capacity_bytes % options.page_bytes == 0,
          ErrorCode::bad_argument, "a capacity of {} bytes; it must be a multiple of the page's {}",
          options.capacity_bytes, options.page_bytes);
  const std::int64_t pages = options.capacity_bytes / options.page_bytes;
  require(pages < kMaxPages, ErrorCode::bad_argument, "{} pages are too many; make them larger than {} bytes", pages,
          options.page_bytes);
  require(options.threads >= 1, ErrorCode::bad_argument, "{} threads that read; there must be one at least",
          options.threads);
  return options;
}

}  // namespace

HostTier::HostTier(const HostTierOptions& options, std::shared_ptr<Clock> clock)
    : options_(options),
      clock_(std::move(clock)),
      memory_(options.backend ? options.backend : make_cpu_backend(), checked(options).capacity_bytes) {
  const std::int64_t pages = options.capacity_bytes / options.page_bytes;
  next_page_.resize(pages);
  for (std::int64_t i = 0; i < pages; ++i) next_page_[i] = i + 1 < pages ? static_cast<std::uint32_t>(i + 1) : kNoPage;
  free_page_ = 0;
  free_pages_ = pages;
}

std::int64_t HostTier::pages_for(std::int64_t length) const {
  return ceil_div(kRecordHeaderBytes + length, options_.page_bytes);
}

void HostTier::put(std::span<PutRequest> requests, Deadline deadline) {
  for (PutRequest& request : requests) request.status = clock_->now() < deadline ? put_one(request) : PutStatus::failed;
}

PutStatus HostTier::put_one(const PutRequest& request) {
  const RecordId& id = request.id;
  const std::span<const std::byte> payload = request.payload;
  const auto length = static_cast<std::int64_t>(payload.size());
  const std::int64_t pages = pages_for(length);
  if (length > kMaxPayloadBytes || pages > static_cast<std::int64_t>(next_page_.size())) return PutStatus::too_large;
  RecordHeader header;
  header.layout_id = options_.layout_id;
  header.id = id;
  header.set_label(request.label);
  header.length = length;
  header.sequence = next_sequence_++;
  header.payload_digest = digest128(payload);
  std::array<std::byte, kRecordHeaderBytes> bytes;
  encode_header(header, bytes);

  Records added{{id, length, kNoPage}};
  {
    const std::lock_guard lock(mutex_);
    if (const auto old = index_.find(id); old != index_.end()) drop(old->second);
    if (!make_room(pages)) return PutStatus::no_space;
    added.front().first_page = take_pages(pages);
  }
  write(added.front().first_page, 0, bytes);
  write(added.front().first_page, kRecordHeaderBytes, payload);
  const std::lock_guard lock(mutex_);
  Undo give_back([&] { give_pages(added.front()); });
  index_.emplace(id, added.begin());  // a splice keeps iterators
  give_back.keep();
  records_.splice(records_.begin(), added);
  counts_.payload_bytes += length;
  return PutStatus::stored;
}

bool HostTier::make_room(std::int64_t pages) {
  for (auto last = records_.end(); free_pages_ < pages && last != records_.begin();) {
    --last;
    if (last->readers > 0) continue;
    drop(last++);
    ++counts_.evicted_records;
  }
  return free_pages_ >= pages;
}

void HostTier::get(std::span<GetRequest> requests, Deadline deadline) {
  for (GetRequest& request : requests) request.status = clock_->now() < deadline ? get_one(request) : GetStatus::failed;
}

GetStatus HostTier::get_one(GetRequest& request) {
  request.bytes = 0;
  Records::iterator record;
  {
    const std::lock_guard lock(mutex_);
    const auto found = index_.find(request.id);
    if (found == index_.end()) return GetStatus::missing;
    record = found->second;
    request.bytes = record->length;
    if (static_cast<std::int64_t>(request.to.size()) < record->length) return GetStatus::too_small;
    ++record->readers;
    records_.splice(records_.begin(), records_, record);
  }
  const std::size_t length = record->length;
  const std::shared_ptr<HostTier> own = request.view_allowed ? weak_from_this().lock() : nullptr;
  if (own && pages_for(record->length) == 1) {
    std::byte* const bytes = page(record->first_page);
    if (is_sound(*record, {bytes, kRecordHeaderBytes}, {bytes + kRecordHeaderBytes, length}, request.coding)) {
      request.view = {bytes + kRecordHeaderBytes, [own, record](std::byte*) { own->end_reading(record, true); }};
      return GetStatus::found;
    }
    end_reading(record, false);
    return GetStatus::damaged;
  }
  std::array<std::byte, kRecordHeaderBytes> header;
  read(record->first_page, 0, header);
  const auto payload = request.to.first(length);
  read(record->first_page, kRecordHeaderBytes, payload);
  const bool sound = is_sound(*record, header, payload, request.coding);  // of the copy, which the caller uses
  if (!sound) std::fill(payload.begin(), payload.end(), std::byte{0});
  end_reading(record, sound);
  return sound ? GetStatus::found : GetStatus::damaged;
}

void HostTier::end_reading(Records::iterator record, bool sound) {
  const std::lock_guard lock(mutex_);
  --record->readers;
  const auto found = index_.find(record->id);
  const bool linked = found != index_.end() && found->second == record;
  if (linked && !sound) {
    ++counts_.set_aside_records;
    drop(record);
  } else if (!linked && record->readers == 0) {  // dropped while it was read
    give_pages(*record);
    unlinked_.erase(record);
  }
}

bool HostTier::is_sound(const Record& record, std::span<const std::byte> header, std::span<const std::byte> payload,
                        ChunkCoding& coding) const {
  const ParsedHeader parsed = parse_header(header);
  coding = parsed.header.coding();
  return parsed.refusal == RecordRefusal::none && parsed.header.kind == RecordKind::value &&
         parsed.header.id == record.id && parsed.header.layout_id == options_.layout_id &&
         parsed.header.length == record.length && parsed.header.payload_digest == digest128(payload);
}

void HostTier::exists(std::span<ExistsRequest> requests, Deadline deadline) {
  if (clock_->now() < deadline) {
    (void)look_up(requests);
    return;
  }
  for (ExistsRequest& request : requests) request = {request.id};
}

bool HostTier::look_up(std::span<ExistsRequest> requests) const {
  const std::lock_guard lock(mutex_);
  for (ExistsRequest& request : requests) {
    const auto found = index_.find(request.id);
    request.answered = true;
    request.bytes = found != index_.end() ? found->second->length : -1;
  }
  return true;
}

void HostTier::remove(std::span<RemoveRequest> requests, Deadline deadline) {
  const std::lock_guard lock(mutex_);
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
  const std::lock_guard lock(mutex_);
  TierStats stats = counts_;
  stats.records = static_cast<std::int64_t>(records_.size());
  stats.capacity_bytes = options_.capacity_bytes;
  return stats;
}

std::int64_t HostTier::used_bytes() const {
  const std::lock_guard lock(mutex_);
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

void HostTier::give_pages(const Record& record) {
  std::uint32_t last = record.first_page;
  while (next_page_[last] != kNoPage) last = next_page_[last];
  next_page_[last] = std::exchange(free_page_, record.first_page);
  free_pages_ += pages_for(record.length);
}

void HostTier::drop(Records::iterator record) {
  counts_.payload_bytes -= record->length;
  index_.erase(record->id);
  if (record->readers > 0) {
    unlinked_.splice(unlinked_.begin(), records_, record);
    return;
  }
  give_pages(*record);
  records_.erase(record);
}

template <class Piece>
void HostTier::for_pieces(std::uint32_t page_index, std::int64_t offset, std::int64_t count, Piece&& piece) const {
  for (; offset >= options_.page_bytes; offset -= options_.page_bytes) page_index = next_page_[page_index];
  for (std::int64_t done = 0; done < count; offset = 0, page_index = next_page_[page_index]) {
    const std::int64_t bytes = std::min(options_.page_bytes - offset, count - done);
    piece(std::span(page(page_index) + offset, bytes), done);
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
