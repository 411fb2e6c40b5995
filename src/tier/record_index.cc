#include "tier/record_index.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace kv4::tier {

std::size_t RecordIndex::find_cell(const RecordId& id, std::uint64_t hash) const {
  std::size_t i = home(hash);
  while (cells_[i].number != kNone && !(cells_[i].tag == tag(hash) && record(cells_[i].number).id == id))
    i = (i + 1) & mask();
  return i;
}

std::optional<RecordEntry> RecordIndex::find(const RecordId& id) const {
  std::optional<RecordEntry> found;
  visit(id, [&](const RecordEntry& entry) { found = entry; });
  return found;
}

// Prefetches cells, then records, so that the lookups of a batch wait for memory together.
void RecordIndex::look_up(std::span<ExistsRequest> requests) const {
  constexpr std::size_t kCellsAhead = 16, kRecordsAhead = 8;
  const std::lock_guard lock(mutex_);
  const auto home_cell = [&](std::size_t i) -> const Cell& { return cells_[home(hash(requests[i].id))]; };
  for (std::size_t i = 0; i < requests.size() + kCellsAhead; ++i) {
    if (i < requests.size()) __builtin_prefetch(&home_cell(i));
    if (i >= kRecordsAhead && i - kRecordsAhead < requests.size()) {
      const std::uint32_t number = home_cell(i - kRecordsAhead).number;
      if (number != kNone) __builtin_prefetch(&record(number));
    }
    if (i < kCellsAhead) continue;
    ExistsRequest& request = requests[i - kCellsAhead];
    const std::uint32_t number = find_number(request.id);
    const bool there = number != kNone && !record(number).entry.set_aside;
    request.bytes = there ? record(number).entry.payload_bytes() : -1;
    request.answered = true;
  }
}

void RecordIndex::make_room(std::int64_t records) {
  const std::lock_guard lock(mutex_);
  const std::size_t cells = std::bit_ceil(static_cast<std::size_t>(size_ + records) * 2);
  if (cells > cells_.size()) resize(cells);
  while (std::ssize(free_) + std::ssize(chunks_) * std::int64_t{kChunkRecords} - std::int64_t{next_number_} < records)
    add_chunk();
}

std::optional<RecordEntry> RecordIndex::put(const RecordId& id, const RecordEntry& entry) {
  const std::lock_guard lock(mutex_);
  if (static_cast<std::size_t>(size_ + 1) * 2 > cells_.size()) resize(cells_.size() * 2);
  const std::uint64_t h = hash(id);
  Cell& cell = cells_[find_cell(id, h)];
  std::optional<RecordEntry> before;
  if (cell.number != kNone) {
    before = record(cell.number).entry;
    count(*before, -1);
  } else {
    if (free_.empty() && next_number_ == chunks_.size() * kChunkRecords) add_chunk();
    const std::uint32_t number = free_.empty() ? next_number_++ : free_.back();
    if (!free_.empty()) free_.pop_back();
    cell = {tag(h), number};
    record(number).id = id;
    ++size_;
  }
  record(cell.number).entry = entry;
  count(entry, 1);
  return before;
}

void RecordIndex::erase(const RecordId& id) noexcept {
  const std::lock_guard lock(mutex_);
  std::size_t gap = find_cell(id, hash(id));
  if (cells_[gap].number == kNone) return;
  free_.push_back(cells_[gap].number);
  count(record(cells_[gap].number).entry, -1);
  --size_;
  for (std::size_t i = (gap + 1) & mask(); cells_[i].number != kNone; i = (i + 1) & mask()) {
    const std::size_t wanted = home(hash(record(cells_[i].number).id));
    if (((i - wanted) & mask()) < ((i - gap) & mask())) continue;  // it would move before its home
    cells_[gap] = cells_[i];
    gap = i;
  }
  cells_[gap] = {};
}

bool RecordIndex::set_aside(const RecordId& id, const RecordPlace& place) {
  const std::lock_guard lock(mutex_);
  const std::uint32_t number = find_number(id);
  if (number == kNone) return false;
  RecordEntry& entry = record(number).entry;
  if (entry.set_aside || entry.place != place) return false;
  count(entry, -1);
  entry.set_aside = true;
  return true;
}

void RecordIndex::clear() {
  const std::lock_guard lock(mutex_);
  cells_.assign(1024, {});
  chunks_.clear();
  free_.clear();
  next_number_ = 0;
  size_ = sound_records_ = payload_bytes_ = 0;
}

void RecordIndex::reserve(std::int64_t records) {
  const std::lock_guard lock(mutex_);
  resize(std::max(cells_.size(), std::bit_ceil(static_cast<std::size_t>(records) * 2)));
}

std::int64_t RecordIndex::size() const {
  const std::lock_guard lock(mutex_);
  return size_;
}

std::int64_t RecordIndex::sound_records() const {
  const std::lock_guard lock(mutex_);
  return sound_records_;
}

std::int64_t RecordIndex::payload_bytes() const {
  const std::lock_guard lock(mutex_);
  return payload_bytes_;
}

void RecordIndex::add_chunk() {
  const std::size_t numbers = (chunks_.size() + 1) * kChunkRecords;
  if (free_.capacity() < numbers) free_.reserve(std::max(numbers, 2 * free_.capacity()));
  chunks_.push_back(std::make_unique<Chunk>());
}

void RecordIndex::resize(std::size_t cells) {
  const std::vector<Cell> old = std::exchange(cells_, std::vector<Cell>(cells));
  for (const Cell& cell : old) {
    if (cell.number == kNone) continue;
    std::size_t i = home(hash(record(cell.number).id));
    while (cells_[i].number != kNone) i = (i + 1) & mask();
    cells_[i] = cell;
  }
}

void RecordIndex::count(const RecordEntry& entry, int sign) {
  if (entry.set_aside) return;
  sound_records_ += sign;
  payload_bytes_ += sign * entry.payload_bytes();
}

}  // namespace kv4::tier
