// Requests as bytes: canonical images and blocks, exported and imported.
#pragma once

#include <cstdint>
#include <span>

#include "cache/blocks.h"
#include "cache/layers.h"
#include "cache/prefix_chains.h"
#include "cache/request_table.h"
#include "cache/snapshots.h"
#include "kv4/kv_cache_manager.h"

namespace kv4 {

// KVCacheManager documents these calls.
class Images {
 public:
  Images(CacheMemory& memory, PrefixCache* prefix, const Layers& layers, RequestTable& requests, Blocks& blocks,
         Snapshots& snapshots, PrefixChains& chains);

  std::int64_t image_bytes(RequestId request) const;
  void export_image(RequestId request, std::span<std::byte> out) const;
  void export_blocks(RequestId request, std::span<const BlockId> ids, std::span<std::byte> out) const;
  Expected<RequestId> import_image(const ImageView& image, std::span<const std::int32_t> token_ids,
                                   std::span<const std::span<const std::byte>> blocks, const PrefixIdentity& chain);

 private:
  CacheMemory& memory_;
  PrefixCache* prefix_;
  const Layers& layers_;
  RequestTable& requests_;
  Blocks& blocks_;
  Snapshots& snapshots_;
  PrefixChains& chains_;
};

}  // namespace kv4
