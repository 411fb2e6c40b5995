// A store of chunks: opaque keys and values, over the tiers of kv4/tiers.h, without a cache. For the caches of other
// engines, and for everything else that can be computed again.
//
//   kv4::ChunkStore store({.tiers = {.host_bytes = 8LL << 30, .directory = "/var/cache/chunks", .keys = keys}});
//   const auto id = store.put({{.key = key, .value = value}});          // returns at once
//   ... store.event_fd() becomes readable; store.drain() says what became of each chunk ...
//
// Promises:
//   1. A get that is `ok` gave exactly the bytes of one put of that space, tenant and key. Anything else is a miss:
//      damaged, torn, forged, misplaced records, and those of other keys.
//   2. What a flush reported `durable` is there after a kill or a loss of power, until it is evicted or removed.
//   3. No call but wait(), take(), close() and the destructor waits for a tier, and these wait no longer than they were
//      told to. What finds no room is `refused` at once. Memory is bounded by the options.
//   4. Every batch comes to its end: at its deadline, if not before. Memory that was registered is the exception: the
//      batch ends when no tier reads or writes it any more.
//   5. A get, an exists and a look_up see all puts and removes that were begun before them. A get gives the newest
//   value
//      that is stored, except where a server goes back in time by itself (kv4/tier.h, 1a).
//
// Values are stored without their runs of zeros or of any other repeated 8 bytes: such runs take no room and no time on
// a disk or a wire.
//
// Any thread may call, also at the same time. In a forked child every call throws Error(bad_state), and the parent
// keeps the store.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kv4/export.h"
#include "kv4/tier.h"
#include "kv4/tiers.h"

namespace kv4 {

inline constexpr std::int64_t kMaxChunkKey = 256;                       // bytes of a key; 1 at least
inline constexpr std::int64_t kMaxChunkValue = std::int64_t{64} << 20;  // bytes of a value; 0 at least
inline constexpr std::int64_t kMaxChunkPieces = 1024;                   // of a value in the caller's memory
inline constexpr std::int64_t kMaxChunkBatch = 65536;                   // chunks of one call

/// The tiers of a store of chunks, and its limits.
struct ChunkStoreOptions {
  TiersOptions tiers = {};
  /// What the values are: the model, its layout, a version. Up to 256 bytes. Stores of other spaces share nothing, and
  /// a directory holds one space.
  std::string space = {};
  std::int64_t host_page_bytes =
      16 << 10;                     // of host memory, a multiple of 512: a value and its header take whole pages
  std::int64_t max_chunks = 65536;  // of batches that were begun and not yet taken
  /// False: puts of one key may differ, and a get gives none of them while it is not known which is stored. True: the
  /// value follows from the key (a hash of what it was computed from): an older one is as good.
  bool value_follows_key = false;
};

/// A value to store. The key is copied. The value is copied too, unless it lies in registered memory: then it must not
/// change before the batch has ended.
struct ChunkPut {
  std::span<const std::byte> key;
  std::span<const std::byte> value = {};
  std::span<const std::span<const std::byte>> pieces = {};  // not empty: the value, gathered from these
};

/// A value to read. The memory stays until the batch has ended, whoever owns it; its bytes are valid for `ok` only.
struct ChunkGet {
  std::span<const std::byte> key;
  std::span<std::byte> to = {};                       // at least as long as the value
  std::span<const std::span<std::byte>> pieces = {};  // not empty: the value is scattered to these
};

/// A key: 1 to kMaxChunkKey bytes.
using ChunkKey = std::span<const std::byte>;

/// Of a batch.
struct ChunkCall {
  std::uint64_t tenant = 0;                           // the same key of two tenants is two chunks
  tier::Duration timeout = std::chrono::seconds(30);  // the batch's deadline, from now on
};

/// What became of a chunk of a batch.
enum class ChunkStatus : std::uint8_t {
  ok,         // put: a tier has stored it; get: the value is in place; exists: it is there; remove: all tiers lost it
  missing,    // get, exists
  too_small,  // get: the value has `bytes`, or more
  too_large,  // put: no tier takes so long a value
  no_space,   // put
  refused,    // nothing was done: too much is under way, or no tier takes work now
  failed      // no answer, or not in time. A put may still be stored, whole
};
/// The enumerator's name.
KV4_API const char* to_string(ChunkStatus status);

/// What a batch does.
enum class ChunkAction : std::uint8_t { put, get, exists, remove, flush };

/// The end of a batch.
struct ChunkResults {
  std::uint64_t batch = 0;
  ChunkAction action = ChunkAction::put;
  std::vector<ChunkStatus> statuses;       // in the order of the chunks
  std::vector<std::int64_t> bytes;         // likewise: of the values, for a get that is `ok` or `too_small`; else 0
  std::vector<tier::FlushStatus> flushed;  // of a flush, by tier
  bool all_ok() const;                     // of a flush: no tier failed
};

/// The answer of look_up().
enum class ChunkPresence : std::uint8_t { absent, there, unknown };

/// Counted since the store was made.
struct ChunkStoreReport {
  std::vector<TierReport> tiers;  // the fastest first; bytes as stored, sealed and trimmed
  std::int64_t puts = 0, gets = 0, hits = 0, exists = 0, removes = 0, flushes = 0;  // chunks; flushes: batches
  std::int64_t refused = 0, failed = 0;                                             // chunks
  std::int64_t put_bytes = 0, hit_bytes = 0;                                        // of values
  std::int64_t trimmed_bytes = 0;                                                   // of put_bytes, not stored
  std::int64_t damaged = 0;        // values that a tier found and that were not what was put: misses
  std::int64_t open_chunks = 0;    // now: of batches that were begun and not yet taken
  std::int64_t memory_in_use = 0;  // now: transfers that use registered memory
};

/// Opaque chunks in host memory, on disk, on servers and in tiers of your own. The promises stand at the head of this
/// file.
class KV4_API ChunkStore {
 public:
  /// Throws Error as Tiers, and bad_argument for limits that cannot work. A tier of your own stores each chunk as one
  /// value with a header before it.
  explicit ChunkStore(const ChunkStoreOptions& options);
  /// Calls close() with TiersOptions::close_limit.
  ~ChunkStore();
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;

  /// Registers memory: values in it are neither copied when a batch begins nor when it ends. `owner` keeps it alive, as
  /// long as the store or a transfer needs it; without one it outlives the store. Returns its number.
  std::uint64_t add_memory(std::span<std::byte> memory, std::shared_ptr<void> owner = {});
  /// False: batches with this memory have not ended, and it stays registered; or there is no such memory.
  bool remove_memory(std::uint64_t memory);

  // Each of these begins a batch and returns its number, above 0. Throws Error(bad_argument) for keys, values and
  // batches beyond the limits, before anything is done; Error(out_of_memory).

  /// Begins to store values. Returns the batch's number.
  std::uint64_t put(std::span<const ChunkPut> chunks, const ChunkCall& call = {});
  /// Begins to read values.
  std::uint64_t get(std::span<const ChunkGet> chunks, const ChunkCall& call = {});
  /// Begins to ask which keys have a value.
  std::uint64_t exists(std::span<const ChunkKey> keys, const ChunkCall& call = {});
  /// Begins to remove values.
  std::uint64_t remove(std::span<const ChunkKey> keys, const ChunkCall& call = {});
  /// After everything that was begun before.
  std::uint64_t flush(const ChunkCall& call = {});
  /// As above.
  std::uint64_t put(std::initializer_list<ChunkPut> chunks, const ChunkCall& call = {}) {
    return put(std::span(chunks.begin(), chunks.size()), call);
  }
  /// As above.
  std::uint64_t get(std::initializer_list<ChunkGet> chunks, const ChunkCall& call = {}) {
    return get(std::span(chunks.begin(), chunks.size()), call);
  }

  /// What is known from memory, at once: whether host memory and disk have each chunk. `unknown`: only a server or a
  /// tier of your own can tell; exists() asks it. Throws Error(bad_argument).
  std::vector<ChunkPresence> look_up(std::span<const ChunkKey> keys, std::uint64_t tenant = 0) const;

  /// Readable while batches have ended that nobody has taken. Not to be read or closed.
  int event_fd() const;
  /// All batches that have ended and were not taken.
  std::vector<ChunkResults> drain();
  /// One of them. nullopt: there is none.
  std::optional<ChunkResults> take_any();
  /// Waits until a batch has ended that nobody has taken. False: none has by then.
  bool wait(tier::Deadline until);
  /// Waits for the end of one batch and takes it. nullopt: it has not ended by then, or was taken already.
  std::optional<ChunkResults> take(std::uint64_t batch, tier::Deadline until);

  /// Ends the open batches, flushes and closes the tiers; one answer per tier. Batches that do not end by then fail.
  /// Later calls are refused and miss.
  std::vector<tier::FlushStatus> close(tier::Deadline until);
  /// What has happened so far.
  ChunkStoreReport report() const;

  struct Impl;  // the library's own

 private:
  explicit ChunkStore(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace kv4
