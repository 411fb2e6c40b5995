#include "kv4/chunk_store.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "tier/chunk_store_impl.h"

namespace kv4 {

using tier::GetStatus;
using tier::PutStatus;
using tier::SharedBytes;

namespace {

constexpr std::size_t kMaxSpaceBytes = 256;
constexpr std::int64_t kLeastPageBytes = 512, kMaxPageBytes = std::int64_t{1} << 30, kMaxOpenChunks = 1 << 24;

const ChunkStoreOptions& checked(const ChunkStoreOptions& options) {
  require(options.space.size() <= kMaxSpaceBytes, ErrorCode::bad_argument, "a space of {} bytes; it may have {}",
          options.space.size(), kMaxSpaceBytes);
  require(options.host_page_bytes >= kLeastPageBytes && options.host_page_bytes <= kMaxPageBytes &&
              options.host_page_bytes % kLeastPageBytes == 0,
          ErrorCode::bad_argument, "host_page_bytes is {}; it must be a multiple of {}, up to {}",
          options.host_page_bytes, kLeastPageBytes, kMaxPageBytes);
  require(options.max_chunks >= 1 && options.max_chunks <= kMaxOpenChunks, ErrorCode::bad_argument,
          "max_chunks is {}; it must be 1 to {}", options.max_chunks, kMaxOpenChunks);
  return options;
}

template <class Byte, class Piece>
std::vector<std::span<std::byte>> pieces_of(std::span<Byte> whole, std::span<const Piece> pieces) {
  const auto writable = [](std::span<Byte> bytes) {
    return std::span(const_cast<std::byte*>(bytes.data()), bytes.size());
  };
  std::vector<std::span<std::byte>> all;
  if (pieces.empty()) return {writable(whole)};
  require(whole.empty(), ErrorCode::bad_argument, "a value is given whole and in {} pieces; give one of them",
          pieces.size());
  require(std::ssize(pieces) <= kMaxChunkPieces, ErrorCode::bad_argument, "a value in {} pieces; {} are the most",
          pieces.size(), kMaxChunkPieces);
  for (const Piece& piece : pieces) all.push_back(writable(piece));
  return all;
}

std::int64_t bytes_of(std::span<const std::span<std::byte>> pieces) {
  std::int64_t bytes = 0;
  for (const std::span<std::byte>& piece : pieces) bytes += std::ssize(piece);
  return bytes;
}

void gather(std::span<const std::span<std::byte>> pieces, std::byte* to) {
  for (const std::span<std::byte>& piece : pieces) {
    if (!piece.empty()) std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
}

}  // namespace

const char* to_string(ChunkStatus status) {
  switch (status) {
    case ChunkStatus::ok: return "ok";
    case ChunkStatus::missing: return "missing";
    case ChunkStatus::too_small: return "too_small";
    case ChunkStatus::too_large: return "too_large";
    case ChunkStatus::no_space: return "no_space";
    case ChunkStatus::refused: return "refused";
    case ChunkStatus::failed: return "failed";
  }
  return "unknown";
}

bool ChunkResults::all_ok() const {
  return std::all_of(statuses.begin(), statuses.end(), [](ChunkStatus s) { return s == ChunkStatus::ok; }) &&
         std::all_of(flushed.begin(), flushed.end(),
                     [](tier::FlushStatus s) { return s != tier::FlushStatus::failed; });
}

// --- callers

ChunkStore::Impl::Impl(const ChunkStoreOptions& options_in, tier::TierStack stack,
                       std::shared_ptr<tier::Clock> clock_in, std::shared_ptr<tier::Wakeup> wakeup_in)
    : options(options_in),
      clock(std::move(clock_in)),
      wakeup(std::move(wakeup_in)),
      content(options.value_follows_key ? tier::Content::of_key : tier::Content::changing),
      protections(std::move(stack.protections)),
      owner(::getpid()),
      chain(std::move(stack.queues), clock) {
  driver = std::make_unique<std::thread>([this] { drive(); });
}

ChunkStore::Impl::EventFd::EventFd() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  require(fd_ >= 0, ErrorCode::bad_state, "the system gives no eventfd: {}", std::system_category().message(errno));
}

ChunkStore::Impl::EventFd::~EventFd() { ::close(fd_); }

void ChunkStore::Impl::EventFd::raise() const {
  const std::uint64_t one = 1;
  (void)!::write(fd_, &one, sizeof one);  // it is full only where it is readable anyway
}

void ChunkStore::Impl::EventFd::lower() const {
  std::uint64_t count;
  (void)!::read(fd_, &count, sizeof count);
}

std::unique_ptr<ChunkStore> ChunkStore::Impl::over(const ChunkStoreOptions& options, tier::TierStack stack,
                                                   std::shared_ptr<tier::Clock> clock,
                                                   std::shared_ptr<tier::Wakeup> wakeup) {
  return std::unique_ptr<ChunkStore>(
      new ChunkStore(std::make_unique<Impl>(checked(options), std::move(stack), std::move(clock), std::move(wakeup))));
}

ChunkStore::ChunkStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

ChunkStore::ChunkStore(const ChunkStoreOptions& options) try {
  tier::needs_sha256();
  checked(options);
  const auto clock = std::make_shared<tier::SteadyClock>();
  const auto wakeup = std::make_shared<tier::Wakeup>(clock);
  tier::StackShape shape{tier::chunk_layout_id(options.space), options.host_page_bytes};
  shape.max_requests = options.max_chunks;
  shape.own_as_records = true;
  shape.on_answer = [wakeup] { wakeup->notify(); };
  impl_ = std::make_unique<Impl>(options, tier::make_stack(options.tiers, shape, clock), clock, wakeup);
} catch (const std::bad_alloc&) {
  fail_for_memory();
} catch (const std::system_error& e) {  // of a thread
  fail(ErrorCode::out_of_memory, "the system refused a thread of a store: {}", e.what());
}

ChunkStore::~ChunkStore() {
  if (!impl_) return;
  if (impl_->forked()) {
    (void)impl_.release();  // its threads are the parent's
    return;
  }
  try {
    (void)close(impl_->clock->now() + impl_->options.tiers.close_limit);
  } catch (...) {  // for want of memory: as after a kill
  }
}

bool ChunkStore::Impl::forked() const { return owner != ::getpid(); }

void ChunkStore::Impl::needs_owner() const {
  require(!forked(), ErrorCode::bad_state, "the store belongs to the process that made it, {}; this is a fork of it",
          owner);
}

ChunkStore::Impl::Batches ChunkStore::Impl::make_batch(ChunkAction action, std::size_t chunks,
                                                       const ChunkCall& call) const {
  needs_owner();
  require(std::cmp_less_equal(chunks, kMaxChunkBatch), ErrorCode::bad_argument, "a batch of {} chunks; {} are the most",
          chunks, kMaxChunkBatch);
  require(call.timeout >= tier::Duration(0), ErrorCode::bad_argument, "a timeout of {} s; it may not be negative",
          std::chrono::duration<double>(call.timeout).count());
  Batches one(1);
  Batch& batch = one.front();
  batch.action = action;
  batch.tenant = call.tenant;
  constexpr auto kLongest = std::chrono::hours(24 * 365);
  batch.deadline = clock->now() + std::min<tier::Duration>(call.timeout, kLongest);
  batch.items.resize(chunks);
  batch.unanswered = chunks;
  batch.results.action = action;
  batch.results.statuses.assign(chunks, ChunkStatus::failed);
  batch.results.bytes.assign(chunks, 0);
  return one;
}

void ChunkStore::Impl::add_item(Batch& batch, std::size_t index, ChunkKey key) const {
  require(!key.empty() && std::cmp_less_equal(key.size(), kMaxChunkKey), ErrorCode::bad_argument,
          "chunk {}: a key of {} bytes; it may have 1 to {}", index, key.size(), kMaxChunkKey);
  batch.items[index].id = {batch.tenant, tier::chunk_id(key)};
}

std::shared_ptr<ChunkStore::Impl::Region> ChunkStore::Impl::region_of(std::span<const std::byte> bytes) const {
  const std::lock_guard lock(mutex);
  for (const auto& [number, region] : regions) {
    const std::span<std::byte> memory = region->memory;
    if (bytes.data() >= memory.data() && bytes.size() <= memory.size() &&
        bytes.data() - memory.data() <= std::ssize(memory) - std::ssize(bytes)) {
      ++region->uses;
      return {region.get(), [used = region](Region*) { --used->uses; }};
    }
  }
  return nullptr;
}

/// A value that is not registered is copied before the call returns.
void ChunkStore::Impl::copy_in(Item& item, ChunkStatus& status) const {
  item.copy = chain.buffer(item.value_bytes);
  if (item.copy)
    gather(item.pieces, item.copy.data.get());
  else
    status = ChunkStatus::refused;
}

std::uint64_t ChunkStore::Impl::submit(Batches one) {
  Batch& batch = one.front();
  const auto chunks = batch.chunks();
  const bool writes_ids = batch.action == ChunkAction::put || batch.action == ChunkAction::remove;
  std::unique_lock lock(mutex);
  const std::uint64_t number = batch.number = batch.results.batch = next_batch;
  const bool room = !closing && counts.open_chunks + chunks <= options.max_chunks;
  if (room) open.insert(number);
  if (room && writes_ids) {
    std::size_t noted = 0;
    try {
      for (; noted < batch.items.size(); ++noted) {
        Queued& entry = queued[batch.items[noted].id];
        ++entry.count;
        entry.there = batch.action == ChunkAction::put;
      }
    } catch (...) {
      batch.items.resize(noted);
      forget_queued(batch);
      open.erase(number);
      throw;
    }
  }
  ++next_batch;
  counts.open_chunks += chunks;
  switch (batch.action) {
    case ChunkAction::put: counts.puts += chunks; break;
    case ChunkAction::get: counts.gets += std::ssize(batch.items); break;
    case ChunkAction::exists: counts.exists += std::ssize(batch.items); break;
    case ChunkAction::remove: counts.removes += std::ssize(batch.items); break;
    case ChunkAction::flush: ++counts.flushes;
  }
  if (room) {
    inbox.splice(inbox.end(), one);
    lock.unlock();
    wakeup->notify();
    return number;
  }
  std::fill(batch.results.statuses.begin(), batch.results.statuses.end(), ChunkStatus::refused);
  counts.refused += std::ssize(batch.items);
  batch.items.clear();
  if (done.empty()) event.raise();
  done.splice(done.end(), one);
  ended.notify_all();
  return number;
}

std::uint64_t ChunkStore::add_memory(std::span<std::byte> memory, std::shared_ptr<void> owner) try {
  impl_->needs_owner();
  require(!memory.empty(), ErrorCode::bad_argument, "there are no bytes to register");
  auto region = std::make_shared<Impl::Region>();
  region->memory = memory;
  region->owner = std::move(owner);
  const std::lock_guard lock(impl_->mutex);
  impl_->regions.emplace(impl_->next_region, std::move(region));
  return impl_->next_region++;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

bool ChunkStore::remove_memory(std::uint64_t memory) {
  impl_->needs_owner();
  std::shared_ptr<Impl::Region> last;  // its owner may do anything: after the lock
  const std::lock_guard lock(impl_->mutex);
  const auto found = impl_->regions.find(memory);
  if (found == impl_->regions.end() || found->second->uses > 0) return false;
  last = std::move(found->second);
  impl_->regions.erase(found);
  return true;
}

std::uint64_t ChunkStore::put(std::span<const ChunkPut> chunks, const ChunkCall& call) try {
  Impl::Batches one = impl_->make_batch(ChunkAction::put, chunks.size(), call);
  Impl::Batch& batch = one.front();
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Impl::Item& item = batch.items[i];
    impl_->add_item(batch, i, chunks[i].key);
    item.pieces = pieces_of(chunks[i].value, chunks[i].pieces);
    item.value_bytes = bytes_of(item.pieces);
    require(item.value_bytes <= kMaxChunkValue, ErrorCode::bad_argument,
            "chunk {}: a value of {} bytes; it may have {}", i, item.value_bytes, kMaxChunkValue);
  }
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Impl::Item& item = batch.items[i];
    item.label = std::make_shared<tier::ChunkLabel>(tier::make_label(chunks[i].key, {0, item.value_bytes}));
    if (item.value_bytes > 0 && item.pieces.size() == 1) item.region = impl_->region_of(item.pieces.front());
    if (!item.region) impl_->copy_in(item, batch.results.statuses[i]);
  }
  return impl_->submit(std::move(one));
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::uint64_t ChunkStore::get(std::span<const ChunkGet> chunks, const ChunkCall& call) try {
  Impl::Batches one = impl_->make_batch(ChunkAction::get, chunks.size(), call);
  Impl::Batch& batch = one.front();
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Impl::Item& item = batch.items[i];
    impl_->add_item(batch, i, chunks[i].key);
    item.pieces = pieces_of(chunks[i].to, chunks[i].pieces);
    item.value_bytes = bytes_of(item.pieces);
    item.label = std::make_shared<tier::ChunkLabel>(tier::make_label(chunks[i].key, {}));
    if (item.value_bytes > 0 && item.pieces.size() == 1) item.region = impl_->region_of(item.pieces.front());
  }
  return impl_->submit(std::move(one));
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::uint64_t ChunkStore::exists(std::span<const ChunkKey> keys, const ChunkCall& call) try {
  Impl::Batches one = impl_->make_batch(ChunkAction::exists, keys.size(), call);
  for (std::size_t i = 0; i < keys.size(); ++i) impl_->add_item(one.front(), i, keys[i]);
  return impl_->submit(std::move(one));
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::uint64_t ChunkStore::remove(std::span<const ChunkKey> keys, const ChunkCall& call) try {
  Impl::Batches one = impl_->make_batch(ChunkAction::remove, keys.size(), call);
  for (std::size_t i = 0; i < keys.size(); ++i) impl_->add_item(one.front(), i, keys[i]);
  return impl_->submit(std::move(one));
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::uint64_t ChunkStore::flush(const ChunkCall& call) try {
  return impl_->submit(impl_->make_batch(ChunkAction::flush, 0, call));
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<ChunkPresence> ChunkStore::look_up(std::span<const ChunkKey> keys, std::uint64_t tenant) const try {
  impl_->needs_owner();
  std::vector<tier::ExistsRequest> requests(keys.size());
  std::vector<ChunkPresence> known(keys.size(), ChunkPresence::unknown);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    require(!keys[i].empty() && std::cmp_less_equal(keys[i].size(), kMaxChunkKey), ErrorCode::bad_argument,
            "chunk {}: a key of {} bytes; it may have 1 to {}", i, keys[i].size(), kMaxChunkKey);
    requests[i].id = {tenant, tier::chunk_id(keys[i])};
  }
  std::vector<bool> queued;
  {
    const std::lock_guard lock(impl_->mutex);
    if (!impl_->queued.empty()) queued.resize(keys.size());
    for (std::size_t i = 0; i < queued.size(); ++i) {
      const auto found = impl_->queued.find(requests[i].id);
      queued[i] = found != impl_->queued.end();
      if (queued[i]) known[i] = found->second.there ? ChunkPresence::there : ChunkPresence::absent;
    }
  }
  impl_->chain.look_up(requests);
  for (std::size_t i = 0; i < keys.size(); ++i)
    if ((queued.empty() || !queued[i]) && requests[i].answered)
      known[i] = requests[i].bytes >= 0 ? ChunkPresence::there : ChunkPresence::absent;
  return known;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

int ChunkStore::event_fd() const { return impl_->event.fd(); }

std::vector<ChunkResults> ChunkStore::drain() try {
  impl_->needs_owner();
  std::vector<ChunkResults> all;
  Impl::Batches taken;  // destroyed after the lock
  const std::lock_guard lock(impl_->mutex);
  all.reserve(impl_->done.size());
  for (Impl::Batch& batch : impl_->done) {
    impl_->counts.open_chunks -= batch.chunks();
    all.push_back(std::move(batch.results));
  }
  taken.splice(taken.end(), impl_->done);
  impl_->event.lower();
  return all;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::optional<ChunkResults> ChunkStore::take_any() {
  impl_->needs_owner();
  Impl::Batches taken;
  const std::lock_guard lock(impl_->mutex);
  if (impl_->done.empty()) return std::nullopt;
  taken.splice(taken.end(), impl_->done, impl_->done.begin());
  return impl_->take_out(taken.front());
}

bool ChunkStore::wait(tier::Deadline until) {
  impl_->needs_owner();
  std::unique_lock lock(impl_->mutex);
  while (impl_->done.empty() && impl_->clock->now() < until) impl_->clock->wait_until(impl_->ended, lock, until);
  return !impl_->done.empty();
}

std::optional<ChunkResults> ChunkStore::take(std::uint64_t batch, tier::Deadline until) {
  impl_->needs_owner();
  Impl::Batches taken;
  std::unique_lock lock(impl_->mutex);
  const auto there = [&](const Impl::Batches& list) {
    return std::find_if(list.begin(), list.end(), [&](const Impl::Batch& b) { return b.number == batch; });
  };
  for (;;) {
    if (const auto found = there(impl_->done); found != impl_->done.end()) {
      taken.splice(taken.end(), impl_->done, found);
      break;
    }
    if (impl_->clock->now() >= until || impl_->open.count(batch) == 0) return std::nullopt;
    impl_->clock->wait_until(impl_->ended, lock, until);
  }
  return impl_->take_out(taken.front());
}

/// Of a batch that was in `done`, under the lock.
ChunkResults ChunkStore::Impl::take_out(Batch& batch) {
  counts.open_chunks -= batch.chunks();
  if (done.empty()) event.lower();
  return std::move(batch.results);
}

std::vector<tier::FlushStatus> ChunkStore::close(tier::Deadline until) try {
  impl_->needs_owner();
  std::unique_ptr<std::thread> driver;
  {
    std::unique_lock lock(impl_->mutex);
    impl_->closing = true;
    while (!impl_->open.empty() && impl_->clock->now() < until) impl_->clock->wait_until(impl_->ended, lock, until);
    impl_->stopping = true;
    driver = std::move(impl_->driver);
  }
  if (!driver)  // closed already
    return std::vector<tier::FlushStatus>(impl_->chain.size(), tier::FlushStatus::failed);
  impl_->wakeup->notify();
  driver->join();
  const std::lock_guard lock(impl_->chain_mutex);
  return impl_->chain.close(until);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

ChunkStoreReport ChunkStore::report() const try {
  impl_->needs_owner();
  const std::lock_guard chain_lock(impl_->chain_mutex);
  ChunkStoreReport report;
  {
    const std::lock_guard lock(impl_->mutex);
    report = impl_->counts;
    for (const auto& [number, region] : impl_->regions) report.memory_in_use += region->uses;
  }
  for (const tier::ChainStats& each : impl_->chain.stats())
    report.tiers.push_back(tier::report_of(each, impl_->protections[report.tiers.size()]));
  return report;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

}  // namespace kv4
