#include "kv4/preempted_request.h"

#include <algorithm>

#include "base/check.h"

namespace kv4 {
namespace {

std::int64_t blocks_bytes(const KVCacheManager& manager, RequestId request) {
  return static_cast<std::int64_t>(manager.blocks(request).size()) * manager.schema().block_image_bytes;
}

}  // namespace

std::int64_t preempted_bytes(const KVCacheManager& manager, RequestId request) {
  return blocks_bytes(manager, request) + manager.image_bytes(request);
}

void preempt(KVCacheManager& manager, RequestId request, PreemptedRequest& to) {
  require(to.empty(), ErrorCode::bad_argument, "there is a request of {} tokens in it already; resume that one first",
          to.token_ids_.size());
  const std::int64_t blocks = blocks_bytes(manager, request), image = manager.image_bytes(request);
  require(blocks + image <= to.capacity_bytes(), ErrorCode::bad_argument,
          "request {} needs {} bytes of host memory; there are {}", request, blocks + image, to.capacity_bytes());
  std::vector<std::int64_t> lengths;
  for (int group = 0; group < manager.schema().num_groups; ++group) lengths.push_back(manager.length(request, group));
  std::vector<std::int32_t> token_ids = manager.token_ids(request);
  ChainName chain = manager.chain_of(request);
  const std::span<std::byte> memory = to.memory_.bytes();
  manager.export_blocks(request, memory.first(static_cast<std::size_t>(blocks)));
  manager.export_image(request, memory.subspan(static_cast<std::size_t>(blocks), static_cast<std::size_t>(image)));
  manager.release(request);

  to.layout_id_ = manager.schema().layout_id;
  to.lengths_ = std::move(lengths);
  to.token_ids_ = std::move(token_ids);
  to.chain_ = std::move(chain);
  to.blocks_bytes_ = blocks;
  to.image_bytes_ = image;
}

Expected<RequestId> resume(KVCacheManager& manager, PreemptedRequest& from) {
  require(!from.empty(), ErrorCode::bad_argument, "there is no request in it; preempt one first");
  const std::span<const std::byte> memory = from.memory_.bytes();
  const std::size_t all_blocks = static_cast<std::size_t>(from.blocks_bytes_),
                    block_bytes = static_cast<std::size_t>(manager.schema().block_image_bytes);
  const ImageView image(from.layout_id_, from.lengths_,
                        memory.subspan(all_blocks, static_cast<std::size_t>(from.image_bytes_)));
  std::vector<std::span<const std::byte>> blocks;
  for (std::size_t at = 0; at < all_blocks; at += block_bytes)
    blocks.push_back(memory.subspan(at, std::min(block_bytes, all_blocks - at)));
  const Expected<RequestId> request = manager.import_image(image, from.token_ids_, blocks, from.chain_);
  if (!request) return request;
  from.lengths_.clear();
  from.token_ids_.clear();
  return request;
}

}  // namespace kv4
