// The cache of one model on one device: its requests, and the steps that write their rows.
//
//   admit -> [prepare_forward -> acquire(layer).append ... for each layer -> commit | abort]* -> release
//
// Threads: one thread at a time drives a cache: the calls of this header, of its handles, and of its sessions and
// tiers. A call that overlaps with another thread's throws Error(bad_state) and does nothing. A cache may go from
// thread to thread, and a callback may call the cache that called it. Different caches are independent. Ownership: the
// manager owns all cache memory. Tensors passed in are only read or written during the call; bound weights and rope
// tables must outlive the manager. Errors: a condition that the caller can plan for is a value (Expected with a
// Shortage); everything else throws kv4::Error. Either way the cache is as it was before the call.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "kv4/backend.h"
#include "kv4/error.h"
#include "kv4/export.h"
#include "kv4/layer_cache_handle.h"
#include "kv4/paged_kv_pool.h"
#include "kv4/schema.h"
#include "kv4/state_cache_pool.h"
#include "kv4/statistics.h"

namespace kv4 {

class InternalKey;  // defined inside the library alone

/// Names a request of one cache; calls refuse the id of a released one.
using RequestId = std::int32_t;
constexpr RequestId kNoRequest = -1;  // a padded item

/// Why there is no value. No room: wait for a release, or preempt a request. `cancelled`: the caller's progress
/// function said stop. `none`: there is a value.
enum class Shortage : std::uint8_t { none, requests, blocks, slots, cancelled };

/// The enumerator's name: "blocks", ...
KV4_API const char* to_string(Shortage shortage);
/// Throws Error(bad_state) that names the shortage and its remedy.
[[noreturn]] KV4_API void throw_shortage(Shortage shortage);

/// A value, or the shortage that kept it from being made.
template <class T>
class [[nodiscard]] Expected {
 public:
  Expected(T value) : value_(std::move(value)) {}                // there is a value
  Expected(Shortage error) : error_(error) {}                    // there is none
  explicit operator bool() const { return value_.has_value(); }  // there is a value
  /// The value, unchecked.
  const T& operator*() const { return *value_; }
  const T* operator->() const { return &*value_; }  // the same
  /// The value; without one throw_shortage(), whose message names the shortage.
  const T& value() const {
    if (!value_) throw_shortage(error_);
    return *value_;
  }
  /// Why there is no value; Shortage::none where there is one.
  Shortage error() const { return error_; }

 private:
  std::optional<T> value_;
  Shortage error_ = Shortage::none;
};

/// The next `count` tokens of a request: a prefill chunk, a decode or a draft. kNoRequest: `count` padded tokens.
struct StepItem {
  RequestId request = kNoRequest;
  std::int32_t count = 1;
  std::span<const std::int32_t> token_ids = {};  // [count]; may be empty for padding and for draft stages
  std::int64_t position = -1;                    // of the first token, must be the request's length; -1: not stated
  /// V4.1: narrowed prefill. Only the last decoder_count tokens, at least a window, have queries in the last owner of
  /// entries and run in the layers behind it, the decoder; 0: all. Entries are those of all tokens. Afterwards the
  /// request cannot be rewound below this step's end, its state is kept for no other prompt, and it has no session.
  std::int32_t decoder_count = 0;
};

/// One forward of a batch; its tokens are the items' tokens in order.
struct Step {
  std::int64_t id = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_items = 0;
  std::int32_t group = 0;
  std::int32_t num_decoder_tokens = 0;  // rows of the decoder's inputs: num_tokens, where no item is narrowed
};

/// A request that begins with the blocks of its prompt that the cache keeps.
struct Admission {
  RequestId request = kNoRequest;
  /// Tokens of the prompt whose entries are kept: whole blocks, and at least one token remains for a query.
  std::int64_t usable_tokens = 0;
  /// The request's length, and the first token to compute. Tokens from here to usable_tokens are replayed: with the
  /// prompt's ids, in steps like any other; their entries stay as they are.
  std::int64_t resume_at = 0;
};

/// The cache: requests, their blocks and state slots, steps, prefixes.
class KV4_API KVCacheManager {
 public:
  /// Allocates all memory: exactly plan_memory(). Throws Error: bad_config, bad_argument, out_of_memory.
  KVCacheManager(const ModelConfig& config, const CacheOptions& options,
                 std::shared_ptr<Backend> backend = make_cpu_backend());
  ~KVCacheManager();
  KVCacheManager(const KVCacheManager&) = delete;
  KVCacheManager& operator=(const KVCacheManager&) = delete;

  /// Constants of a layer, in the backend's memory; a compressor needs its own before the first append.
  void bind_weights(int layer, const LayerWeights& weights);
  /// The engine's own table for CSA and HCA layers, fp32 [positions, rope_dim / 2] each, so that q and entries agree to
  /// the bit. Without it entries are rotated by our own (build_rope_table).
  void bind_rope_table(const ConstTensorView& cos, const ConstTensorView& sin);

  /// An empty request.
  Expected<RequestId> admit();
  /// The request begins with the longest kept prefix of the prompt and shares its blocks. The request's own full blocks
  /// are kept from their commit on. Draft stages begin at resume_at with an empty window. Needs options.prefix.enabled.
  Expected<Admission> admit(const Prompt& prompt);
  /// Reserves all that the step may write, or changes nothing. `group`: 0 = backbone, d + 1 = draft stage d. One step
  /// at a time.
  Expected<Step> prepare_forward(std::span<const StepItem> items, int group = 0);
  /// The layer inside the open step. Throws Error(bad_state) without a step, or where the step is another group's.
  LayerCacheHandle acquire(int layer);
  /// Lengths advance at once; the step's work may still be queued. Later work on the same stream sees it.
  void commit(const Step& step);
  /// Ends the step as if it had never been prepared: lengths and images are those before it.
  void abort(const Step& step);
  /// Whether the work of a committed step is done: only then may its blocks be read off the stream.
  bool finished(const Step& step);

  /// Work is queued on this stream from now on, after all that was queued before. A stream that is being captured does
  /// not wait: order its replays yourself.
  void set_stream(Stream stream);
  /// Waits for all queued work; throws Error(device_failure) if some of it failed.
  void synchronize();

  /// Forgets the tokens from `length` on, down to rewind_floor(): as if they had never been appended.
  void rewind(RequestId request, std::int64_t length, int group = 0);
  std::int64_t rewind_floor(RequestId request, int group = 0) const;  // the shortest length that rewind() takes
  /// A second request with the same tokens: full blocks are shared; the state and an open block are copied.
  Expected<RequestId> fork(RequestId request);
  /// Ends the request. Its blocks are released, or kept for later prompts.
  void release(RequestId request);

  std::int64_t length(RequestId request, int group = 0) const;   // committed tokens of the group
  std::vector<std::int32_t> token_ids(RequestId request) const;  // committed ones of the backbone
  std::vector<BlockId> blocks(RequestId request) const;          // in the order of the tokens
  /// Token ids before the next token of the backbone, the latest first, for V4.1's hashes of them (Engram). Before the
  /// text it is engram.pad_id. A negative id belongs to an image: there and before it they are -1.
  std::vector<std::int32_t> last_token_ids(RequestId request, int count) const;

  /// State and entries of a request as bytes; with the token ids, another cache can continue from them. Throws
  /// Error(bad_state) during a replay without a snapshot: its windows are whole only at the end.
  CanonicalImage export_image(RequestId request) const;
  std::vector<std::byte> export_blocks(RequestId request) const;  // [blocks, block_image_bytes]
  /// The same into the caller's memory of exactly that size; fastest into HostMemory, where transfers from a GPU need
  /// no copy on the way.
  void export_image(RequestId request, std::span<std::byte> out) const;   // [image_bytes(request)]
  void export_blocks(RequestId request, std::span<std::byte> out) const;  // [blocks, block_image_bytes]
  std::int64_t image_bytes(RequestId request) const;                      // size of the image now
  /// A new request from the results of export_image and export_blocks, of this layout.
  Expected<RequestId> import_image(const ImageView& image, std::span<const std::int32_t> token_ids,
                                   std::span<const std::byte> blocks);
  /// The same, and its full blocks are kept as the chain's from now on. Blocks that are kept already are shared: their
  /// bytes are not read, and may be left out (an empty span).
  Expected<RequestId> import_image(const ImageView& image, std::span<const std::int32_t> token_ids,
                                   std::span<const std::span<const std::byte>> blocks, const PrefixIdentity& chain);
  /// The identity of a prompt's blocks with the present weights; {} where no blocks are kept.
  PrefixIdentity identify_prefix(const Prompt& prompt);
  /// The same for a running request.
  PrefixIdentity chain_of(RequestId request) const;

  /// From now on prompts find and publish blocks of these weights; running requests continue with theirs.
  void set_weights_id(std::string_view weights_id);
  /// Forgets everything computed with these weights: no later prompt finds it. Running requests keep their blocks until
  /// they end; blocks that they compute from now on are not kept.
  void invalidate(std::string_view weights_id);
  /// Counters of the prefix cache; zeros where it is off.
  PrefixStatistics prefix_statistics() const;
  /// The state of the cache and its counts.
  CacheStatistics statistics() const;
  /// Moves events (blocks stored and evicted, by key) to `out`, the oldest first, as many as fit. Returns their number.
  std::size_t read_block_events(std::span<BlockEvent> out);

  /// Prefix blocks as bytes, for tiers and other workers. Keys of all full blocks of a prompt, first block first:
  std::vector<BlockKey> block_keys(const Prompt& prompt);
  /// The block that the cache keeps under the key; nullopt: none.
  std::optional<PrefixBlock> find_block(const BlockKey& key) const;
  /// Writes the block as exported, out [block_image_bytes]. False: it is not there.
  bool read_block(const BlockKey& key, std::span<std::byte> out) const;
  /// Writes the snapshot at the block's end, out [snapshot_bytes()]. False: it is not there.
  bool read_snapshot(const BlockKey& key, std::span<std::byte> out) const;
  std::int64_t snapshot_bytes() const;  // of an image at a block boundary
  /// Inserts blocks of the prompt that follow those kept, as if a request had computed them: as many as there is room
  /// for, evicting as a request would. Their bytes are not checked.
  std::int64_t insert_blocks(const Prompt& prompt, std::span<const std::span<const std::byte>> blocks);
  /// Inserts the snapshot at the end of a prefix block. False: the block is not there, or there is no place.
  bool insert_snapshot(const BlockKey& key, std::span<const std::byte> bytes);

  const CacheSchema& schema() const;        // sizes and addresses
  const BlockAllocator& allocator() const;  // holders of blocks
  PagedKVPool& kv_pool();                   // the blocks' memory
  StateCachePool& state_pool();             // the state slots' memory
  int num_requests() const;                 // running ones
  std::vector<RequestId> requests() const;  // running ones
  /// Exactly plan_memory(schema()).total_bytes.
  std::int64_t memory_bytes() const;

  /// The parts of the cache.
  struct Impl;
  /// For the rest of the library only: no other code can make a key.
  Impl& impl(const InternalKey&) const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv4
