// A running request set aside in host memory, to make room, and taken up again: same bytes, no computation.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kv4/export.h"
#include "kv4/host_memory.h"
#include "kv4/kv_cache_manager.h"

namespace kv4 {

/// Host memory, pinned for a GPU, with room for one request at a time; made once and used again. Move only.
class KV4_API PreemptedRequest {
 public:
  /// `memory`: as large as preempted_bytes() of the longest request.
  explicit PreemptedRequest(HostMemory memory) : memory_(std::move(memory)) {}

  bool empty() const { return lengths_.empty(); }  // holds no request
  /// Room for a request, in bytes.
  std::int64_t capacity_bytes() const { return static_cast<std::int64_t>(memory_.bytes().size()); }
  const std::vector<std::int64_t>& lengths() const { return lengths_; }      // [1 + draft layers]
  const std::vector<std::int32_t>& token_ids() const { return token_ids_; }  // of the request held

 private:
  friend KV4_API void preempt(KVCacheManager& manager, RequestId request, PreemptedRequest& to);
  friend KV4_API Expected<RequestId> resume(KVCacheManager& manager, PreemptedRequest& from);

  HostMemory memory_;  // [blocks, block_image_bytes], then the image
  std::uint64_t layout_id_ = 0;
  std::vector<std::int64_t> lengths_;
  std::vector<std::int32_t> token_ids_;
  PrefixIdentity chain_;
  std::int64_t num_blocks_ = 0, block_bytes_ = 0, image_bytes_ = 0;
};

/// Host memory that preempt() needs for the request at its present length.
KV4_API std::int64_t preempted_bytes(const KVCacheManager& manager, RequestId request);

/// Copies the request out, one transfer per block, and releases it. Throws Error(bad_argument) where `to` is too small
/// or full, Error(bad_state) where the request is in an open step; then nothing has changed.
KV4_API void preempt(KVCacheManager& manager, RequestId request, PreemptedRequest& to);

/// Restores the request in this cache or another one of the same layout, and empties `from`. On a shortage or an error
/// `from` keeps the request. The request cannot be rewound below the length it was preempted with. In its own cache it
/// shares the blocks that are still kept; its other blocks are kept again, unless their weights were invalidated
/// meanwhile.
KV4_API Expected<RequestId> resume(KVCacheManager& manager, PreemptedRequest& from);

}  // namespace kv4
