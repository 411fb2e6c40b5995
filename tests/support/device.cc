#include "support/device.h"

#include <algorithm>
#include <stdexcept>

#include "support/far_backend.h"

namespace kv4::test {
namespace {

Device chosen = Device::cpu;
std::shared_ptr<Backend> far_backend, cuda_backend;

std::shared_ptr<Backend> shared_far() {
  if (far_backend == nullptr) far_backend = std::make_shared<FarBackend>(make_cpu_backend(2));
  return far_backend;
}
std::shared_ptr<Backend> shared_cuda() {
  if (cuda_backend == nullptr) cuda_backend = make_cuda_backend();
  return cuda_backend;
}

std::uint8_t* bytes_at(void* p) { return static_cast<std::uint8_t*>(p); }
const std::uint8_t* bytes_at(const void* p) { return static_cast<const std::uint8_t*>(p); }

}  // namespace

Device device() { return chosen; }
void choose_device(Device device) { chosen = device; }

std::shared_ptr<Backend> test_backend(int threads) {
  switch (chosen) {
    case Device::far: return shared_far();
    case Device::cuda: return shared_cuda();
    default: return make_cpu_backend(threads);
  }
}

std::shared_ptr<Backend> parity_backend() {
  if (chosen == Device::far) return shared_far();
  return why_no_cuda().empty() ? shared_cuda() : nullptr;
}

std::string why_no_device() { return chosen == Device::far ? "" : why_no_cuda(); }

void drop_backends() {
  far_backend.reset();
  cuda_backend.reset();
}

std::vector<std::byte> read_bytes(Backend& backend, const void* from, std::int64_t bytes) {
  std::vector<std::byte> out(static_cast<std::size_t>(bytes));
  if (bytes == 0) return out;
  backend.reserve_staging(bytes);
  const ops::CopyPiece piece{bytes_at(from), bytes_at(static_cast<void*>(out.data())), bytes};
  backend.read_pieces({&piece, 1}, out);
  return out;
}

void write_bytes(Backend& backend, void* to, const void* from, std::int64_t bytes) {
  if (bytes == 0) return;
  backend.reserve_staging(bytes);
  const ops::CopyPiece piece{bytes_at(from), bytes_at(to), bytes};
  backend.write_pieces({&piece, 1}, {static_cast<const std::byte*>(from), static_cast<std::size_t>(bytes)});
}

// --- twins

Twins::~Twins() {
  for (const Chunk& c : chunks_) backend_->deallocate(c.memory, c.bytes);
}

template <class Void>
BasicTensorView<Void> Twins::add(const BasicTensorView<Void>& host, void* result) {
  if (backend_->on_host() || host.empty()) return host;
  constexpr std::int64_t kAlignment = 256, kChunkBytes = 1 << 20;
  const std::int64_t bytes = extent_bytes(host);
  const std::int64_t place = std::max((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
  auto chunk = std::find_if(chunks_.begin(), chunks_.end(), [&](const Chunk& c) { return c.bytes - c.used >= place; });
  if (chunk == chunks_.end()) {
    const std::int64_t size = std::max(place, kChunkBytes);
    chunks_.push_back({backend_->allocate(size), size, 0});
    chunk = chunks_.end() - 1;
  }
  std::byte* memory = chunk->memory + chunk->used;
  chunk->used += place;
  twins_.push_back({static_cast<const std::byte*>(host.data), memory, bytes, static_cast<std::byte*>(result)});
  return host.over(static_cast<Void*>(memory));
}
template TensorView Twins::add(const TensorView&, void*);
template ConstTensorView Twins::add(const ConstTensorView&, void*);

std::int64_t Twins::packed_bytes(bool outputs_only) const {
  std::int64_t bytes = 0;
  for (const Twin& t : twins_) bytes += outputs_only && t.result == nullptr ? 0 : t.bytes;
  return bytes;
}

void Twins::send() {
  const std::int64_t total = packed_bytes(false);
  if (total == 0) return;
  packed_.resize(static_cast<std::size_t>(total));
  std::vector<ops::CopyPiece> pieces;
  std::byte* at = packed_.data();
  for (const Twin& t : twins_) {
    if (t.bytes == 0) continue;
    std::memcpy(at, t.host, static_cast<std::size_t>(t.bytes));
    pieces.push_back({bytes_at(static_cast<const void*>(at)), bytes_at(static_cast<void*>(t.there)), t.bytes});
    at += t.bytes;
  }
  backend_->reserve_staging(total);
  backend_->write_pieces(pieces, packed_);
}

void Twins::fetch() {
  const std::int64_t total = packed_bytes(true);
  if (total == 0) return;
  packed_.resize(static_cast<std::size_t>(total));
  std::vector<ops::CopyPiece> pieces;
  std::byte* at = packed_.data();
  for (const Twin& t : twins_) {
    if (t.result == nullptr || t.bytes == 0) continue;
    pieces.push_back({bytes_at(static_cast<const void*>(t.there)), bytes_at(static_cast<void*>(at)), t.bytes});
    at += t.bytes;
  }
  backend_->reserve_staging(total);
  backend_->read_pieces(pieces, packed_);
  at = packed_.data();
  for (const Twin& t : twins_) {
    if (t.result == nullptr || t.bytes == 0) continue;
    std::memcpy(t.result, at, static_cast<std::size_t>(t.bytes));
    at += t.bytes;
  }
}

void Twins::clear() {
  twins_.clear();
  for (Chunk& c : chunks_) c.used = 0;
}

// --- mirrors

void Mirror::add(const void* from, std::int64_t bytes) {
  if (backend_->on_host() || from == nullptr || bytes == 0) return;
  ranges_.push_back({static_cast<const std::byte*>(from), read_bytes(*backend_, from, bytes)});
}

const std::byte* Mirror::find(const std::byte* from) const {
  for (const Range& r : ranges_)
    if (from >= r.from && from < r.from + r.bytes.size()) return r.bytes.data() + (from - r.from);
  for (const Range& r : ranges_)  // a plane of rows without bytes may stand at the end
    if (from == r.from + r.bytes.size()) return r.bytes.data() + r.bytes.size();
  throw std::logic_error("an address that was not mirrored");
}

HostViews::HostViews(KVCacheManager& cache, std::shared_ptr<Backend> backend)
    : cache_(cache), mirror_(std::move(backend)) {
  mirror_.add(cache.kv_pool().base(), cache.kv_pool().memory_bytes());
  mirror_.add(cache.state_pool().base(), cache.state_pool().memory_bytes());
}

SWAView HostViews::view(SWAView v) {
  const std::int64_t items = v.num_items;
  mirror_.add(v.slots, 4 * items);
  mirror_.add(v.positions, 4 * items * v.rows);
  mirror_.add(v.head, 4 * items);
  v.slots = mirror_.at(v.slots);
  v.positions = mirror_.at(v.positions);
  v.head = mirror_.at(v.head);
  for (PlaneView* p : {&v.payload, &v.rope, &v.scale}) plane(*p);
  return v;
}

template <class View>
void HostViews::tables(View& v) {
  mirror_.add(v.block_table, std::int64_t{4} * cache_.schema().options.max_requests * v.blocks_per_request);
  mirror_.add(v.request_rows, 4 * v.num_items);
  mirror_.add(v.lens, 4 * v.num_items);
  v.block_table = mirror_.at(v.block_table);
  v.request_rows = mirror_.at(v.request_rows);
  v.lens = mirror_.at(v.lens);
}

ClassicalView HostViews::view(ClassicalView v) {
  for (PlaneView* p : {&v.payload, &v.rope, &v.scale}) plane(*p);
  tables(v);
  return v;
}

IndexerView HostViews::view(IndexerView v) {
  for (PlaneView* p : {&v.keys, &v.scales, &v.global_scale}) plane(*p);
  tables(v);
  return v;
}

}  // namespace kv4::test
