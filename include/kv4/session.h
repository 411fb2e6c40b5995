// Requests that outlive their cache: saved at any length, restored in another process, on another backend or by another
// worker, and continued as if they had never stopped.
//
// A session is a stream of records (docs/formats.md, "Sessions"): one of the request itself (lengths, token ids,
// canonical image, the open block) and one for each full block, found by the block's chain key. The bytes depend on
// neither backend, arrangement, page alignment, rewind length nor HCA mode; caches that differ in those may exchange
// them.
//
//   save_session_file(cache, request, identity, "chat.kv4s");                   // ... another process
//   RequestId request = restore_session_file(cache, identity, "chat.kv4s").value();
//
// Threads: as KVCacheManager. Errors: a record that is truncated, damaged, foreign, of another layout, other weights,
// another salt or tenant, or not made by a key of the identity's is Error(bad_file) that names the difference; no room
// is a Shortage. Either way the cache is unchanged.
// A restored request cannot be rewound to less than the length it was saved with.
//
// A cache that keeps prefixes with these weights takes only the blocks that it lacks from a session; later prompts of
// the same salt find them. A session saved by such a cache also has the snapshot of its last block boundary, where
// there is one: prompts resume there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv4/cache_keys.h"
#include "kv4/export.h"
#include "kv4/kv_cache_manager.h"

namespace kv4 {

/// The identity of a session; layout and model come from the cache. Without a key of `keys` nobody can make one.
struct SessionIdentity {
  std::string weights_id = {};  // the caller's name for all it computes with: weights, and a rope table if it binds one
  /// The tenant's: a session of another salt is not restored. It keeps tenants' contexts apart and proves nothing: a
  /// reader of one session of a tenant can make another that restores. Only `keys` prove a session's writer.
  std::string salt = {};
  std::uint64_t tenant = 0;  // written into every record
  /// Per full block, for as many of the first as have some: bytes that its key hashes beside tokens (a LoRA id, hashes
  /// of images). For saving only; a session brings its own.
  std::vector<std::vector<std::byte>> block_extra = {};
  TenantId share_of = 0;  // of a prefix cache: the tenant whose share the blocks of a restored session count for
  /// The first key protects saved records. To restore, each record must have been made by one of the keys, unless
  /// accept_unauthenticated. No keys: digests only; a sealed session is refused, and an authenticated one is read as
  /// one that no key protects.
  std::vector<CacheKey> keys = {};
  Protection protection = Protection::sealed;  // of saved sessions, where there are keys
  bool accept_unauthenticated = false;         // for a transition: sessions saved before there were keys
};

/// Takes whole records, header and payload, each valid during the call only. The save passes on its exceptions.
class KV4_API RecordSink {
 public:
  virtual ~RecordSink() = default;
  virtual void write(std::span<const std::byte> record) = 0;  // one record
};

/// Gives whole records, each valid until the next call; an empty one is the end.
class KV4_API RecordSource {
 public:
  virtual ~RecordSource() = default;
  virtual std::span<const std::byte> next() = 0;  // the next record
};

/// Blocks that the receiver has outside the cache's own prefixes. Their bytes are not checked.
class KV4_API BlockSource {
 public:
  virtual ~BlockSource() = default;
  /// Fills out [block_image_bytes]; false: it has no such block, and `out` may hold anything.
  virtual bool get(const BlockKey& key, std::span<std::byte> out) = 0;
};

/// Called after the request's own record and after every block. False stops: a save returns false and leaves no file, a
/// restore returns Shortage::cancelled.
using SessionProgress = std::function<bool(std::int64_t done_bytes, std::int64_t total_bytes)>;

/// False: stopped. The request goes on running; it must not change before save_session returns.
KV4_API bool save_session(KVCacheManager& manager, RequestId request, const SessionIdentity& identity, RecordSink& sink,
                          const SessionProgress& progress = {});
/// Reads to the end of the source, holds the whole session in the host's memory, and only then touches the cache.
KV4_API Expected<RequestId> restore_session(KVCacheManager& manager, const SessionIdentity& identity,
                                            RecordSource& source, const SessionProgress& progress = {});

/// The same in a file, for the owner alone (0600). It appears under its name complete and durable or not at all, and
/// replaces one of that name. An interrupted save may leave `path`.<16 hex digits>.new, which nothing reads.
KV4_API bool save_session_file(KVCacheManager& manager, RequestId request, const SessionIdentity& identity,
                               const std::string& path, const SessionProgress& progress = {});
/// The same from a file.
KV4_API Expected<RequestId> restore_session_file(KVCacheManager& manager, const SessionIdentity& identity,
                                                 const std::string& path, const SessionProgress& progress = {});

// Hand-over to another worker; blocks that it has already are not sent. The caller moves the bytes.
//
//   worker A                                      worker B
//   SessionSender sender(cache, r, identity);     SessionReceiver receiver(cache, identity, &its_blocks);
//   sender.offer(to_b);                     --->  receiver.take(record);
//                                           <---  receiver.wanted()
//   sender.send(wanted, to_b);              --->  receiver.take(record); ...
//   cache.release(r);                             r = receiver.finish();

/// A request as it was when the sender was made. It may go on meanwhile, but not be released or rewound into a full
/// block.
class KV4_API SessionSender {
 public:
  /// Reads the request's state now; blocks are read when they are sent.
  SessionSender(KVCacheManager& manager, RequestId request, const SessionIdentity& identity);
  SessionSender(SessionSender&&) noexcept;
  ~SessionSender();

  /// The keys of the full blocks, in order: for a router that looks for the worker with most of them.
  const std::vector<BlockKey>& keys() const;
  /// The record of the request itself; the receiver finds the keys from its tokens.
  void offer(RecordSink& sink) const;
  /// The blocks of these keys, in this order. Throws Error(bad_argument) for any other key.
  bool send(std::span<const BlockKey> wanted, RecordSink& sink, const SessionProgress& progress = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Collects a session: records in any order, repeats allowed. A refused record throws and leaves the receiver as it
/// was. Only finish() changes the cache.
class KV4_API SessionReceiver {
 public:
  /// `blocks` is asked for every block that the cache does not keep when the request's own record comes; it must live
  /// until then.
  SessionReceiver(KVCacheManager& manager, SessionIdentity identity, BlockSource* blocks = nullptr);
  SessionReceiver(SessionReceiver&&) noexcept;
  ~SessionReceiver();

  /// One record of the session, in memory that nobody else writes to until the call returns.
  void take(std::span<const std::byte> record);
  bool has_offer() const;                        // the request's own record has come
  /// The session's prompt, for tiers that can bring blocks of it into the cache before the rest is asked for. Valid as
  /// long as the receiver lives; empty before the offer.
  Prompt prompt() const;
  /// Missing blocks, in order: those neither kept by the cache nor received. Empty before the offer. A block that the
  /// cache keeps may be evicted before finish(): then it is wanted again.
  std::vector<BlockKey> wanted() const;
  /// Bytes of the records that are here, including those of blocks that were here before; 0 before the offer.
  std::int64_t done_bytes() const;
  std::int64_t total_bytes() const;  // of all records of the session; 0 before the offer
  /// The request, once; throws Error(bad_file) while something is missing. After a shortage it may be called again.
  Expected<RequestId> finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv4
