#include "cache/prefix_cache.h"

#include <algorithm>
#include <atomic>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "schema/table_layout.h"

namespace kv4 {
namespace {

PrefixIndexOptions index_options(const CacheSchema& schema) {
  const PrefixOptions& prefix = schema.options.prefix;
  PrefixIndexOptions out{.capacity_blocks = schema.options.num_blocks,
                         .block_tokens = schema.block_tokens,
                         .eviction = prefix.eviction,
                         .snapshots = prefix.snapshots,
                         .max_events = prefix.max_events,
                         .tenant_shares = prefix.tenant_shares};
  // The state after a token depends on one window per layer before it.
  if (out.snapshots.replay_tokens == 0)
    out.snapshots.replay_tokens = std::int64_t{schema.config.window} * schema.config.num_layers;
  return out;
}

// The last window rows of layer L need its input there. That is the output of layer L - 1, whose queries reach
// window - 1 tokens further back.
bool replays_too_few(const CacheSchema& schema) {
  const ModelConfig& config = schema.config;
  const SnapshotPolicy policy = index_options(schema).snapshots;
  const std::int64_t exact = config.window + std::int64_t{config.window - 1} * (config.num_layers - 1);
  return config.shares_entries() && policy.kind == SnapshotPolicy::Kind::none && policy.replay_tokens < exact;
}

/// Different for every cache of the process.
std::uint64_t next_weights_generation() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

}  // namespace

PrefixCache::PrefixCache(const CacheSchema& schema, const std::shared_ptr<Backend>& backend)
    : index(index_options(schema)),
      replays_too_few_(replays_too_few(schema)),
      identity_(identify_chain(schema, schema.options.prefix.weights_id, {})),
      place_bytes_(snapshot_places(schema).bytes),
      memory_(backend, checked_mul(snapshot_places(schema).count, place_bytes_, "snapshots")),
      boundaries_(backend, 4 * (std::int64_t{schema.blocks_per_request} + 1)) {
  std::vector<std::int32_t> boundaries;
  for (std::int32_t i = 0; i <= schema.blocks_per_request; ++i) boundaries.push_back(i * schema.block_tokens);
  const std::span<const std::byte> host = std::as_bytes(std::span(boundaries));
  const ops::CopyPiece all{reinterpret_cast<const std::uint8_t*>(host.data()),
                           reinterpret_cast<std::uint8_t*>(boundaries_.data()), boundaries_.bytes()};
  backend->reserve_staging(boundaries_.bytes());
  backend->write_pieces(std::span(&all, 1), host);
  places_.resize(snapshot_places(schema).count);
  for (auto place = static_cast<SnapshotId>(places_.size()); place-- > 0;) free_places_.push_back(place);
  set_weights_id(schema.options.prefix.weights_id);
  keys_.reserve(schema.blocks_per_request);
}

std::optional<std::uint16_t> PrefixCache::weights_slot_of(std::string_view weights_id) const {
  for (std::size_t i = 0; i < weights_generations_.size(); ++i)
    if (weights_generations_[i] != 0 && weights_ids_[i] == weights_id) return static_cast<std::uint16_t>(i);
  return std::nullopt;
}

std::optional<std::uint16_t> PrefixCache::weights_slot_in(std::uint64_t weights_generation) const {
  const auto found = std::find(weights_generations_.begin(), weights_generations_.end(), weights_generation);
  if (weights_generation == 0 || found == weights_generations_.end()) return std::nullopt;
  return static_cast<std::uint16_t>(found - weights_generations_.begin());
}

void PrefixCache::set_weights_id(std::string_view id) {
  std::string name(id);
  constexpr std::size_t kMostWeights = 1024;
  std::optional<std::uint16_t> weights_slot = weights_slot_of(id);
  if (!weights_slot) {
    const std::size_t free =
        std::find(weights_generations_.begin(), weights_generations_.end(), 0u) - weights_generations_.begin();
    require(free < kMostWeights, ErrorCode::bad_state,
            "blocks of {} weights are kept; invalidate some of them before setting another id", kMostWeights);
    if (free == weights_ids_.size()) weights_ids_.emplace_back();
    weights_ids_[free] = id;
    if (free == weights_generations_.size()) weights_generations_.push_back(0);
    weights_generations_[free] = next_weights_generation();
    weights_slot = static_cast<std::uint16_t>(free);
  }
  weights_slot_ = *weights_slot;
  identity_.weights_id.swap(name);
}

void PrefixCache::end_weights_slot(std::uint16_t weights_slot) {
  weights_generations_[weights_slot] = weights_slot == weights_slot_ ? next_weights_generation() : 0;
}

BlockKey PrefixCache::root(std::string_view salt) {
  identity_.tenant_salt = salt;
  return hasher_.root(identity_);
}

BlockKey PrefixCache::block_key(const BlockKey& parent, std::span<const std::int32_t> token_ids,
                                std::string_view extra) {
  return hasher_.block(parent, token_ids, std::as_bytes(std::span(extra)));
}

BlockKey PrefixCache::block_key(const BlockKey& parent, const Prompt& prompt, std::size_t block) {
  const std::size_t block_tokens = index.block_tokens();
  return block_key(parent, prompt.token_ids.subspan(block * block_tokens, block_tokens),
                   block < prompt.extra.size() ? prompt.extra[block] : std::string_view());
}

std::span<const BlockKey> PrefixCache::keys_of(const BlockKey& root, const Prompt& prompt, bool kept,
                                               std::span<const BlockKey> known) {
  const std::size_t block_tokens = index.block_tokens();
  keys_.clear();
  for (std::size_t i = 0; (i + 1) * block_tokens <= prompt.token_ids.size(); ++i) {
    const BlockKey key = i < known.size() ? known[i] : block_key(i == 0 ? root : keys_.back(), prompt, i);
    if (kept && index.find(key) == kNoNode) break;
    keys_.push_back(key);
  }
  return keys_;
}

KeptChain PrefixCache::find_chain(const PrefixIdentity& chain, std::span<const std::int32_t> token_ids) {
  const std::vector<std::string_view> extra(chain.extra.begin(), chain.extra.end());
  const std::span<const BlockKey> keys = keys_of(chain.root, {token_ids, chain.tenant, {}, extra}, true);
  return {keys.empty() ? kNoNode : index.find(keys.back()), std::ssize(keys)};
}

PrefixStatistics PrefixCache::now() const {
  PrefixStatistics out = statistics;
  out.lost_events = index.lost_events();
  out.blocks = index.size();
  out.snapshots = static_cast<std::int64_t>(places_.size() - free_places_.size());
  return out;
}

std::uint8_t* PrefixCache::address(SnapshotId place) const {
  return reinterpret_cast<std::uint8_t*>(memory_.data() + place * place_bytes_);
}

SnapshotId PrefixCache::take_place() {
  if (free_places_.empty()) {
    // Runs once per block boundary at most, over few places, so no order among them is kept.
    const auto rank = [&](const SnapshotPlace& p) {
      const bool movable = p.id != kNoNode && p.staying == 0;
      return movable ? std::tuple(0, index.references(p.id) > 0, index.last_used(p.id))
                     : std::tuple(1, false, std::uint64_t{0});
    };
    const auto coldest =
        std::min_element(places_.begin(), places_.end(),
                         [&](const SnapshotPlace& a, const SnapshotPlace& b) { return rank(a) < rank(b); });
    if (coldest == places_.end() || coldest->id == kNoNode || coldest->staying > 0) return kNoSnapshot;
    give_place(index.detach_snapshot(coldest->id));
    ++statistics.dropped_snapshots;
  }
  const SnapshotId place = free_places_.back();
  free_places_.pop_back();
  at(place).taken = true;
  return place;
}

void PrefixCache::give_place(SnapshotId place) {
  if (place == kNoSnapshot) return;
  at(place) = {};
  free_places_.push_back(place);
}

void PrefixCache::attach(NodeId id, SnapshotId place) {
  index.attach_snapshot(id, place);
  at(place).id = id;
  ++statistics.saved_snapshots;
}

void PrefixCache::keep(NodeId id, bool inserted) {
  if (const SnapshotId place = index.snapshot(id); place != kNoSnapshot) keep_place(place, inserted);
}

void PrefixCache::keep_place(SnapshotId place, bool inserted) {
  if (!std::exchange(at(place).kept, true)) index.note_snapshot(at(place).id, inserted);
}

void PrefixCache::stay(NodeId id) {
  if (const SnapshotId place = index.snapshot(id); place != kNoSnapshot) ++at(place).staying;
}

void PrefixCache::leave(NodeId id, bool kept) {
  const SnapshotId place = index.snapshot(id);
  SnapshotPlace& p = at(place);
  if (kept) keep_place(place, false);
  if (--p.staying == 0 && !p.kept) give_place(index.detach_snapshot(id));
}

}  // namespace kv4
