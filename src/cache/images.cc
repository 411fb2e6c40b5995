#include "cache/images.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"

namespace kv4 {

Images::Images(CacheMemory& memory, PrefixCache* prefix, const Layers& layers, RequestTable& requests, Blocks& blocks,
               Snapshots& snapshots, PrefixChains& chains)
    : memory_(memory),
      prefix_(prefix),
      layers_(layers),
      requests_(requests),
      blocks_(blocks),
      snapshots_(snapshots),
      chains_(chains) {}

std::int64_t Images::image_bytes(RequestId request) const {
  return kv4::image_bytes(memory_.schema, requests_.lengths_of(request));
}

void Images::export_image(RequestId request, std::span<std::byte> out) const {
  const Sequence& s = requests_[requests_.row_of(request)];
  require(s.length() >= s.chain.replay_end || s.groups[0].window_begin == 0, ErrorCode::bad_state,
          "request {} replays its prompt up to position {}, and its windows are whole only there; it is at {}", request,
          s.chain.replay_end, s.length());
  std::vector<const float*> bias;
  for (const ops::LayerDesc& layer : layers_.all()) bias.push_back(layer.kinds[0].bias);
  memory_.state_pool.save(s.slot, requests_.lengths_of(request), bias, out);
}

// `ids`: the request's blocks.
void Images::export_blocks(RequestId request, std::span<const BlockId> ids, std::span<std::byte> out) const {
  const std::int64_t bytes = memory_.schema.block_image_bytes;
  require(std::ssize(out) == std::ssize(ids) * bytes, ErrorCode::bad_argument,
          "request {} has {} blocks of {} bytes; got room for {} bytes", request, ids.size(), bytes, out.size());
  std::int64_t left = requests_[requests_.row_of(request)].length();
  for (std::int64_t i = 0; i < std::ssize(ids); ++i) {
    const std::int64_t tokens = std::min<std::int64_t>(left, blocks_.tokens());
    memory_.kv_pool.save_block(ids[i], static_cast<int>(tokens), out.subspan(i * bytes, bytes));
    left -= tokens;
  }
}

Expected<RequestId> Images::import_image(const ImageView& image, std::span<const std::int32_t> token_ids,
                                         std::span<const std::span<const std::byte>> blocks,
                                         const PrefixIdentity& chain) {
  memory_.state_pool.check(image);
  const std::int64_t n = image.lengths[0], count = blocks_.count_of(n);
  require(std::ssize(token_ids) == n, ErrorCode::bad_argument, "the image has {} tokens, token_ids {}", n,
          token_ids.size());
  require(std::ssize(blocks) == count, ErrorCode::bad_argument, "{} tokens need {} block images; got {}", n, count,
          blocks.size());
  const std::optional<std::uint16_t> weights_slot =
      prefix_ != nullptr ? prefix_->weights_slot_in(chain.weights_generation) : std::nullopt;
  const KeptChain kept = weights_slot ? prefix_->find_chain(chain, token_ids) : KeptChain{};
  const std::int64_t block_bytes = memory_.schema.block_image_bytes;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t bytes = std::ssize(blocks[i]);
    require(bytes == block_bytes || (bytes == 0 && i < kept.blocks), ErrorCode::bad_argument,
            "block {} has {} bytes; it needs {}, as only the first {} are kept here", i, bytes, block_bytes,
            kept.blocks);
  }
  if (requests_.full()) return Shortage::requests;
  NewSlot slot(memory_.state_pool);
  if (!slot) return Shortage::slots;
  if (count - kept.blocks > blocks_.num_available(chain.tenant)) return Shortage::blocks;
  memory_.state_pool.restore(*slot, image);
  PrefixIdentity identity = chain;
  if (weights_slot) snapshots_.reserve(1);
  if (kept.tail != kNoNode) prefix_->index.pin(kept.tail);  // first, so that it is not evicted for the rest
  if (count - kept.blocks > blocks_.num_available(chain.tenant)) {
    if (kept.tail != kNoNode) prefix_->index.unpin(kept.tail);
    return Shortage::blocks;
  }

  const std::int32_t row = requests_.start(slot.keep());
  Sequence& s = requests_[row];
  for (std::size_t g = 0; g < image.lengths.size(); ++g) {
    const std::int64_t length = image.lengths[g];
    s.groups[g] = {length, length, length, 0};
  }
  s.chain.approximate = chain.approximate;
  s.chain.narrowed = chain.narrowed;
  if (weights_slot) chains_.begin(row, std::move(identity), *weights_slot);
  chains_.hold(row, kept);
  for (std::int64_t i = kept.blocks; i < count; ++i) {
    const BlockId block = blocks_.take(chain.tenant);
    memory_.kv_pool.load_block(block, blocks[i]);
    memory_.tables.set_block(row, i, block);
    const std::int64_t first = i * blocks_.tokens();
    std::copy_n(token_ids.data() + first, std::min<std::int64_t>(blocks_.tokens(), n - first),
                blocks_.token_ids(block).data());
  }
  if (!weights_slot) return s.id;
  chains_.publish(row);
  if (!s.chain.narrowed) snapshots_.save(row, s, n - 1);  // at a boundary its state is a snapshot
  snapshots_.send();
  return s.id;
}

}  // namespace kv4
