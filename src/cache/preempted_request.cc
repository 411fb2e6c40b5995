#include "kv4/preempted_request.h"

#include "base/check.h"
#include "cache/cache_call.h"

namespace kv4 {
namespace {

std::int64_t blocks_bytes(const KVCacheManager& manager, RequestId request) {
  return static_cast<std::int64_t>(manager.blocks(request).size()) * manager.schema().block_image_bytes;
}

}  // namespace

std::int64_t preempted_bytes(const KVCacheManager& manager, RequestId request) {
  const CacheCall call(manager);
  return blocks_bytes(manager, request) + manager.image_bytes(request);
}

void preempt(KVCacheManager& manager, RequestId request, PreemptedRequest& to) try {
  const CacheCall call(manager);
  require(to.empty(), ErrorCode::bad_argument, "there is a request of {} tokens in it already; resume that one first",
          to.token_ids_.size());
  const std::int64_t blocks = blocks_bytes(manager, request), image = manager.image_bytes(request);
  require(blocks + image <= to.capacity_bytes(), ErrorCode::bad_argument,
          "request {} needs {} bytes of host memory; there are {}", request, blocks + image, to.capacity_bytes());
  const std::int64_t num_blocks = std::ssize(manager.blocks(request));
  std::vector<std::int64_t> lengths;
  for (int group = 0; group < manager.schema().num_groups; ++group) lengths.push_back(manager.length(request, group));
  std::vector<std::int32_t> token_ids = manager.token_ids(request);
  PrefixIdentity chain = manager.chain_of(request);
  const std::span<std::byte> memory = to.memory_.bytes();
  manager.export_blocks(request, memory.first(blocks));
  manager.export_image(request, memory.subspan(blocks, image));
  manager.release(request);

  to.layout_id_ = manager.schema().layout_id;
  to.lengths_ = std::move(lengths);
  to.token_ids_ = std::move(token_ids);
  to.chain_ = std::move(chain);
  to.num_blocks_ = num_blocks;
  to.block_bytes_ = manager.schema().block_image_bytes;
  to.image_bytes_ = image;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<RequestId> resume(KVCacheManager& manager, PreemptedRequest& from) try {
  const CacheCall call(manager);
  require(!from.empty(), ErrorCode::bad_argument, "there is no request in it; preempt one first");
  const std::span<const std::byte> memory = from.memory_.bytes();
  const std::size_t block_bytes = from.block_bytes_,  // 0 where no layer has entries
      num_blocks = from.num_blocks_;
  const ImageView image(from.layout_id_, from.lengths_, memory.subspan(num_blocks * block_bytes, from.image_bytes_));
  std::vector<std::span<const std::byte>> blocks;
  for (std::size_t i = 0; i < num_blocks; ++i) blocks.push_back(memory.subspan(i * block_bytes, block_bytes));
  const Expected<RequestId> request = manager.import_image(image, from.token_ids_, blocks, from.chain_);
  if (!request) return request;
  from.lengths_.clear();
  from.token_ids_.clear();
  return request;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

}  // namespace kv4
