// Stores of chunks.
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "c_api/handles.h"
#include "kv4/chunk_store.h"

using namespace kv4::c_api;

namespace {

template <class A, class B>
constexpr bool same(A a, B b) {
  return static_cast<int>(a) == static_cast<int>(b);
}
static_assert(same(KV4_CHUNK_STATUS_FAILED, kv4::ChunkStatus::failed) &&
              same(KV4_CHUNK_STATUS_REFUSED, kv4::ChunkStatus::refused) &&
              same(KV4_CHUNK_STATUS_NO_SPACE, kv4::ChunkStatus::no_space) &&
              same(KV4_CHUNK_STATUS_TOO_LARGE, kv4::ChunkStatus::too_large) &&
              same(KV4_CHUNK_STATUS_TOO_SMALL, kv4::ChunkStatus::too_small) &&
              same(KV4_CHUNK_STATUS_MISSING, kv4::ChunkStatus::missing) &&
              same(KV4_CHUNK_STATUS_OK, kv4::ChunkStatus::ok));
static_assert(same(KV4_CHUNK_ACTION_FLUSH, kv4::ChunkAction::flush) &&
              same(KV4_CHUNK_ACTION_REMOVE, kv4::ChunkAction::remove) &&
              same(KV4_CHUNK_ACTION_EXISTS, kv4::ChunkAction::exists) &&
              same(KV4_CHUNK_ACTION_GET, kv4::ChunkAction::get) && same(KV4_CHUNK_ACTION_PUT, kv4::ChunkAction::put));
static_assert(same(KV4_CHUNK_PRESENCE_UNKNOWN, kv4::ChunkPresence::unknown) &&
              same(KV4_CHUNK_PRESENCE_THERE, kv4::ChunkPresence::there) &&
              same(KV4_CHUNK_PRESENCE_ABSENT, kv4::ChunkPresence::absent));
static_assert(same(KV4_FLUSH_STATUS_DURABLE, kv4::tier::FlushStatus::durable) &&
              same(KV4_FLUSH_STATUS_KEPT, kv4::tier::FlushStatus::kept) &&
              same(KV4_FLUSH_STATUS_FAILED, kv4::tier::FlushStatus::failed));

kv4_chunk_store_options options_defaults() {
  const kv4::ChunkStoreOptions known;
  auto value = sized<kv4_chunk_store_options>();
  value.host_page_bytes = known.host_page_bytes;
  value.max_chunks = known.max_chunks;
  value.value_follows_key = known.value_follows_key;
  return value;
}

kv4_chunk_call call_defaults() {
  auto value = sized<kv4_chunk_call>();
  value.timeout_ms = std::chrono::duration_cast<std::chrono::milliseconds>(kv4::ChunkCall().timeout).count();
  return value;
}

kv4::ChunkCall call_of(const kv4_chunk_call* given) {
  const kv4_chunk_call in = given == nullptr ? call_defaults() : read_struct(given, call_defaults(), "call");
  kv4::require(in.timeout_ms >= 0 && in.timeout_ms <= kMaxDurationMs, kv4::ErrorCode::bad_argument,
               "call.timeout_ms is {}; 0 to {}", in.timeout_ms, kMaxDurationMs);
  return {in.tenant, std::chrono::milliseconds(in.timeout_ms)};
}

std::vector<kv4::ChunkKey> keys_of(const kv4_bytes* keys, std::int64_t count) {
  std::vector<kv4::ChunkKey> out;
  for (const kv4_bytes& key : list(keys, count, "keys")) out.push_back(bytes(key, "a key"));
  return out;
}

/// The pieces of all values, and how many each value has.
template <class Piece, class Given>
struct Pieces {
  Pieces(const Given* given, const std::int64_t* num_pieces, std::int64_t count) {
    const std::span<const std::int64_t> numbers = list(num_pieces, num_pieces == nullptr ? 0 : count, "num_pieces");
    std::int64_t total = count;
    if (!numbers.empty()) {
      total = 0;
      for (const std::int64_t number : numbers) {
        kv4::require(number >= 0 && number <= kv4::kMaxChunkPieces, kv4::ErrorCode::bad_argument,
                     "num_pieces has {}; 0 to {}", number, kv4::kMaxChunkPieces);
        total += number;
      }
    }
    for (const Given& piece : list(given, total, "pieces")) {
      kv4::require(piece.data != nullptr || piece.length == 0, kv4::ErrorCode::bad_argument,
                   "a piece is NULL and should have {} bytes", piece.length);
      all.push_back({static_cast<typename Piece::pointer>(const_cast<void*>(static_cast<const void*>(piece.data))),
                     piece.length});
    }
    for (std::int64_t i = 0, from = 0; i < count; ++i) {
      const std::int64_t number = numbers.empty() ? 1 : numbers[i];
      of_chunk.push_back(std::span<const Piece>(all).subspan(from, number));
      from += number;
    }
  }

  std::vector<Piece> all;
  std::vector<std::span<const Piece>> of_chunk;
};

}  // namespace

void kv4_chunk_store_options_init(kv4_chunk_store_options* options, size_t size) {
  init_struct(options, size, options_defaults());
}

void kv4_chunk_call_init(kv4_chunk_call* call, size_t size) { init_struct(call, size, call_defaults()); }

void kv4_chunk_results_view_init(kv4_chunk_results_view* view, size_t size) {
  init_struct(view, size, sized<kv4_chunk_results_view>());
}

void kv4_chunk_store_report_init(kv4_chunk_store_report* report, size_t size) {
  init_struct(report, size, sized<kv4_chunk_store_report>());
}

kv4_status kv4_chunk_store_new(const kv4_chunk_store_options* options, kv4_chunk_store** out) {
  return guarded([&] {
    const kv4_chunk_store_options in = read_struct(options, options_defaults(), "options");
    kv4::ChunkStoreOptions wanted;
    wanted.tiers = tiers_options_of(&require_set(in.tiers, "options.tiers"));
    wanted.space = text(in.space, "options.space");
    wanted.host_page_bytes = in.host_page_bytes;
    wanted.max_chunks = in.max_chunks;
    wanted.value_follows_key = in.value_follows_key != 0;
    give_new(out, [&] { return new kv4_chunk_store(wanted); });
  });
}

void kv4_chunk_store_free(kv4_chunk_store* store) { delete store; }

kv4_status kv4_chunk_store_add_memory(kv4_chunk_store* store, kv4_memory memory, uint64_t* out) {
  return guarded([&] {
    kv4::ChunkStore& to = require_set(store, "store").store;
    std::uint64_t& number = require_set(out, "out");
    kv4::require(memory.data != nullptr, kv4::ErrorCode::bad_argument, "memory.data is NULL");
    number = to.add_memory({static_cast<std::byte*>(memory.data), memory.length});
  });
}

kv4_status kv4_chunk_store_remove_memory(kv4_chunk_store* store, uint64_t memory, int32_t* removed) {
  return guarded([&] {
    kv4::ChunkStore& from = require_set(store, "store").store;
    std::int32_t& gone = require_set(removed, "removed");
    gone = from.remove_memory(memory);
  });
}

kv4_status kv4_chunk_store_put(kv4_chunk_store* store, const kv4_bytes* keys, const kv4_bytes* pieces,
                               const int64_t* num_pieces, int64_t count, const kv4_chunk_call* call, uint64_t* batch) {
  return guarded([&] {
    kv4::ChunkStore& to = require_set(store, "store").store;
    std::uint64_t& number = require_set(batch, "batch");
    const std::vector<kv4::ChunkKey> names = keys_of(keys, count);
    const Pieces<std::span<const std::byte>, kv4_bytes> values(pieces, num_pieces, count);
    std::vector<kv4::ChunkPut> chunks(names.size());
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      chunks[i].key = names[i];
      if (values.of_chunk[i].size() == 1)
        chunks[i].value = values.of_chunk[i].front();
      else
        chunks[i].pieces = values.of_chunk[i];
    }
    number = to.put(chunks, call_of(call));
  });
}

kv4_status kv4_chunk_store_get(kv4_chunk_store* store, const kv4_bytes* keys, const kv4_memory* pieces,
                               const int64_t* num_pieces, int64_t count, const kv4_chunk_call* call, uint64_t* batch) {
  return guarded([&] {
    kv4::ChunkStore& from = require_set(store, "store").store;
    std::uint64_t& number = require_set(batch, "batch");
    const std::vector<kv4::ChunkKey> names = keys_of(keys, count);
    const Pieces<std::span<std::byte>, kv4_memory> values(pieces, num_pieces, count);
    std::vector<kv4::ChunkGet> chunks(names.size());
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      chunks[i].key = names[i];
      if (values.of_chunk[i].size() == 1)
        chunks[i].to = values.of_chunk[i].front();
      else
        chunks[i].pieces = values.of_chunk[i];
    }
    number = from.get(chunks, call_of(call));
  });
}

kv4_status kv4_chunk_store_exists(kv4_chunk_store* store, const kv4_bytes* keys, int64_t count,
                                  const kv4_chunk_call* call, uint64_t* batch) {
  return guarded([&] {
    kv4::ChunkStore& of = require_set(store, "store").store;
    std::uint64_t& number = require_set(batch, "batch");
    number = of.exists(keys_of(keys, count), call_of(call));
  });
}

kv4_status kv4_chunk_store_remove(kv4_chunk_store* store, const kv4_bytes* keys, int64_t count,
                                  const kv4_chunk_call* call, uint64_t* batch) {
  return guarded([&] {
    kv4::ChunkStore& from = require_set(store, "store").store;
    std::uint64_t& number = require_set(batch, "batch");
    number = from.remove(keys_of(keys, count), call_of(call));
  });
}

kv4_status kv4_chunk_store_flush(kv4_chunk_store* store, const kv4_chunk_call* call, uint64_t* batch) {
  return guarded([&] {
    kv4::ChunkStore& of = require_set(store, "store").store;
    std::uint64_t& number = require_set(batch, "batch");
    number = of.flush(call_of(call));
  });
}

kv4_status kv4_chunk_store_look_up(const kv4_chunk_store* store, const kv4_bytes* keys, int64_t count, uint64_t tenant,
                                   int32_t* out) {
  return guarded([&] {
    const kv4::ChunkStore& of = require_set(store, "store").store;
    const std::span<std::int32_t> answers = list(out, count, "out");
    const std::vector<kv4::ChunkPresence> known = of.look_up(keys_of(keys, count), tenant);
    std::transform(known.begin(), known.end(), answers.begin(),
                   [](kv4::ChunkPresence presence) { return static_cast<std::int32_t>(presence); });
  });
}

kv4_status kv4_chunk_store_event_fd(const kv4_chunk_store* store, int32_t* fd) {
  return guarded([&] {
    const kv4::ChunkStore& of = require_set(store, "store").store;
    require_set(fd, "fd") = of.event_fd();
  });
}

kv4_status kv4_chunk_store_take(kv4_chunk_store* store, uint64_t batch, int64_t timeout_ms, kv4_chunk_results** out) {
  return guarded([&] {
    kv4::ChunkStore& of = require_set(store, "store").store;
    kv4_chunk_results*& to = require_set(out, "out");
    const kv4::tier::Deadline until = deadline_of(timeout_ms);
    auto made = std::make_unique<kv4_chunk_results>();
    std::optional<kv4::ChunkResults> taken = batch != 0 ? of.take(batch, until) : of.take_any();
    while (!taken && batch == 0 && of.wait(until)) taken = of.take_any();  // another thread may be faster
    if (!taken) return KV4_STOPPED;
    made->results = std::move(*taken);
    for (const kv4::ChunkStatus status : made->results.statuses)
      made->statuses.push_back(static_cast<std::int32_t>(status));
    for (const kv4::tier::FlushStatus status : made->results.flushed)
      made->flushed.push_back(static_cast<std::int32_t>(status));
    to = made.release();
    return KV4_OK;
  });
}

kv4_status kv4_chunk_results_get_view(const kv4_chunk_results* results, kv4_chunk_results_view* out) {
  return guarded([&] {
    const kv4_chunk_results& of = require_set(results, "results");
    auto value = sized<kv4_chunk_results_view>();
    value.batch = of.results.batch;
    value.action = static_cast<std::int32_t>(of.results.action);
    value.count = std::ssize(of.statuses);
    value.statuses = of.statuses.data();
    value.bytes = of.results.bytes.data();
    value.num_flushed = std::ssize(of.flushed);
    value.flushed = of.flushed.data();
    write_struct(out, value, "out");
  });
}

void kv4_chunk_results_free(kv4_chunk_results* results) { delete results; }

kv4_status kv4_chunk_store_close(kv4_chunk_store* store, int64_t timeout_ms, kv4_flush_status* out) {
  return guarded([&] {
    kv4::ChunkStore& of = require_set(store, "store").store;
    kv4_flush_status& reached = require_set(out, "out");
    reached = worst(of.close(deadline_of(timeout_ms)));
  });
}

kv4_status kv4_chunk_store_get_report(const kv4_chunk_store* store, kv4_chunk_store_report* out) {
  return guarded([&] {
    const kv4::ChunkStoreReport from = require_set(store, "store").store.report();
    auto value = sized<kv4_chunk_store_report>();
    value.puts = from.puts;
    value.gets = from.gets;
    value.hits = from.hits;
    value.exists = from.exists;
    value.removes = from.removes;
    value.flushes = from.flushes;
    value.refused = from.refused;
    value.failed = from.failed;
    value.put_bytes = from.put_bytes;
    value.hit_bytes = from.hit_bytes;
    value.trimmed_bytes = from.trimmed_bytes;
    value.damaged = from.damaged;
    value.open_chunks = from.open_chunks;
    value.memory_in_use = from.memory_in_use;
    write_struct(out, value, "out");
  });
}

kv4_status kv4_chunk_store_get_tier_reports(kv4_chunk_store* store, kv4_tier_report* out, int64_t capacity,
                                            int64_t* count) {
  return guarded([&] {
    kv4_chunk_store& of = require_set(store, "store");
    std::int64_t& number = require_set(count, "count");
    const StructArray<kv4_tier_report> room(out, capacity, "out");
    std::vector<kv4::TierReport> reports = of.store.report().tiers;
    number = std::ssize(reports);
    kv4::require(capacity >= number, kv4::ErrorCode::bad_argument, "room for {} elements; there are {}", capacity,
                 number);
    std::vector<std::vector<kv4_failure_count>> failures(reports.size());
    for (std::size_t i = 0; i < reports.size(); ++i)
      for (const auto& [reason, times] : reports[i].failures) failures[i].push_back({reason.c_str(), times});
    const std::lock_guard lock(of.mutex);
    of.reports.swap(reports);
    of.failures.swap(failures);
    for (std::size_t i = 0; i < of.reports.size(); ++i) room.write(i, report_of(of.reports[i], of.failures[i]));
  });
}
