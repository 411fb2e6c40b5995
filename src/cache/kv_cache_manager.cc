#include "kv4/kv_cache_manager.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "backend/image_pieces.h"
#include "backend/nvtx_range.h"
#include "base/check.h"
#include "cache/cache_call.h"
#include "cache/manager_impl.h"
#include "ops/layer_desc.h"

namespace kv4 {

const char* to_string(Shortage shortage) {
  switch (shortage) {
    case Shortage::none: return "none";
    case Shortage::requests: return "requests";
    case Shortage::blocks: return "blocks";
    case Shortage::slots: return "slots";
    case Shortage::cancelled: return "cancelled";
  }
  return "unknown";
}

void throw_shortage(Shortage shortage) {
  if (shortage == Shortage::cancelled)
    fail(ErrorCode::bad_state, "there is no value: the call was cancelled by its progress function; nothing has changed");
  const char* why = shortage == Shortage::requests ? "all max_requests are running"
                    : shortage == Shortage::blocks ? "too few blocks are free"
                                                   : "no spare slot is free for a long step";
  fail(ErrorCode::bad_state,
       "there is no value: {} (shortage: {}); nothing has changed. Wait for a release, or preempt a request", why,
       to_string(shortage));
}

// --- construction
// ------------------------------------------------------------------------------------------------------------

KVCacheManager::Impl::Impl(const ModelConfig& config, const CacheOptions& options, std::shared_ptr<Backend> backend_in)
    : schema(build_schema(config, options)),
      backend(std::move(backend_in)),
      allocator(static_cast<std::int32_t>(schema.options.num_blocks)),
      kv_pool(schema, backend),
      state_pool(schema, backend),
      tables(schema, backend),
      index_workspace(backend, index_workspace_bytes(schema)),
      attend_workspace(backend, attend_workspace_bytes(schema)) {
  const std::size_t requests = static_cast<std::size_t>(schema.options.max_requests);
  token_ids = std::make_unique_for_overwrite<std::int32_t[]>(static_cast<std::size_t>(schema.options.num_blocks) *
                                                             static_cast<std::size_t>(schema.block_tokens));
  sequences.resize(requests);
  for (Sequence& s : sequences) s.groups.resize(static_cast<std::size_t>(schema.num_groups));
  generations.resize(requests);
  seen_in_step.resize(requests);
  free_rows.reserve(requests);
  for (std::int32_t r = schema.options.max_requests - 1; r >= 0; --r) free_rows.push_back(r);
  open.items.reserve(static_cast<std::size_t>(tables.max_items()));
  open.window_begins.reserve(static_cast<std::size_t>(tables.max_items()));
  open.parts.reserve(requests);
  open.boundaries.reserve(static_cast<std::size_t>(schema.options.max_step_tokens / schema.block_tokens) + requests);
  boundaries.reserve(open.boundaries.capacity());
  // No step changes more table entries: the blocks its tokens fill, and for each request the one it begins in and the
  // one it ends in.
  open.changes.reserve(static_cast<std::size_t>(schema.options.max_step_tokens / schema.block_tokens) + 2 * requests);

  bool compresses = false, slides = false;
  for (std::size_t i = 0; i < schema.layers.size(); ++i) {
    const int index = static_cast<int>(i);
    layers.push_back(ops::describe_layer(schema, index,
                                         {kv_pool.base(), state_pool.base(), state_pool.fold_watermarks(),
                                          state_pool.undo_rows(), state_pool.undo_positions(), tables.scratch()}));
    (layers.back().num_kinds > 0 ? compresses : slides) = true;
  }
  raw_norm_weights.resize(layers.size());
  open.saved_layers.resize(layers.size());
  snapshot_parts = snapshot_at = snapshot_layout(schema, schema.block_tokens);
  if (schema.options.prefix.enabled) {
    prefix.emplace(schema, backend);
    pieces_per_snapshot = most_pieces_to_image(layers, snapshot_parts);
    // Kernels write entries everywhere: those of a replay, which are there already, into a block that nobody reads. On
    // the host they are left out.
    if (!backend->on_host()) tables.set_dummy_block(allocator.allocate().value());
  }
  swa_rope.rope_dim = compress_rope.rope_dim = config.rope_dim;
  if (slides) {
    swa_angles.emplace(config.rope_main, config.rope_dim, schema.options.max_context, backend);
    swa_rope.angles = swa_angles->view();
  }
  if (compresses) {
    compress_angles.emplace(config.rope_compress, config.rope_dim, schema.options.max_context, backend);
    compress_rope.angles = compress_angles->view();
  }
}

KVCacheManager::KVCacheManager(const ModelConfig& config, const CacheOptions& options,
                               std::shared_ptr<Backend> backend) {
  require(backend != nullptr, ErrorCode::bad_argument, "the backend is null; pass make_cpu_backend()");
  try {
    impl_ = std::make_unique<Impl>(config, options, std::move(backend));
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::out_of_memory,
         "the system refused the memory for the tables of {} blocks and {} requests; ask for fewer", options.num_blocks,
         options.max_requests);
  }
}

KVCacheManager::~KVCacheManager() = default;

namespace {

const float* checked_constant(const TensorView& t, std::initializer_list<std::int64_t> shape, const std::string& name) {
  const TensorView want(static_cast<float*>(nullptr), shape);
  bool same = t.data != nullptr && t.dtype == DType::f32 && t.ndim == want.ndim;
  for (int d = 0; same && d < t.ndim; ++d) same = t.shape[d] == want.shape[d] && t.strides[d] == want.strides[d];
  std::string dims;
  for (std::int64_t d : shape) dims += (dims.empty() ? "" : ", ") + std::to_string(d);
  require(same, ErrorCode::bad_argument, "{} must be a dense f32 tensor [{}]", name, dims);
  return static_cast<const float*>(t.data);
}

}  // namespace

void KVCacheManager::bind_weights(int layer, const LayerWeights& weights) try {
  const OneThread::Call call(impl_->driver);
  const LayerCacheSchema& schema = impl_->schema.layer(layer);
  require(!schema.pages.empty() || !weights.raw_norm_weight.empty(), ErrorCode::bad_argument,
          "layer {} is {}: it has no compressor and takes only raw_norm_weight", layer, to_string(schema.spec.kind));
  require(!impl_->step_open, ErrorCode::bad_state, "weights cannot change during a step; commit or abort it first");
  const TensorView* bias[] = {&weights.position_bias, &weights.index_position_bias};
  const TensorView* norm[] = {&weights.norm_weight, &weights.index_norm_weight};
  const char* bias_name[] = {"position_bias", "index_position_bias"};
  const char* norm_name[] = {"norm_weight", "index_norm_weight"};
  const std::string where = fmt::format("layer {}: ", layer);
  const float* found[2][2] = {};
  for (std::size_t k = 0; k < schema.pages.size(); ++k) {
    found[k][0] =
        checked_constant(*bias[k], {schema.pages[k].kind.ratio, schema.pending[k].columns}, where + bias_name[k]);
    found[k][1] = checked_constant(*norm[k], {schema.pages[k].kind.width}, where + norm_name[k]);
  }
  const std::size_t index = static_cast<std::size_t>(&schema - impl_->schema.layers.data());
  const float* raw = nullptr;
  if (!weights.raw_norm_weight.empty())
    raw = checked_constant(weights.raw_norm_weight, {impl_->schema.config.head_dim}, where + "raw_norm_weight");
  impl_->raw_norm_weights[index] = raw;
  ops::LayerDesc& desc = impl_->layers[index];
  for (std::size_t k = 0; k < schema.pages.size(); ++k) {
    desc.kinds[k].bias = found[k][0];
    desc.kinds[k].norm_weight = found[k][1];
  }
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::bind_rope_table(const TensorView& cos, const TensorView& sin) try {
  const OneThread::Call call(impl_->driver);
  const int pairs = impl_->compress_rope.rope_dim / 2;
  const std::int64_t positions = impl_->schema.options.max_context;
  require(!impl_->step_open, ErrorCode::bad_state,
          "the rope table cannot change during a step; commit or abort it first");
  require(cos.ndim == 2 && sin.ndim == 2 && cos.shape[0] >= positions && sin.shape[0] == cos.shape[0],
          ErrorCode::bad_argument,
          "the rope table must be two tensors [positions, {}] with at least max_context = {} positions", pairs,
          positions);
  const float* c = checked_constant(cos, {cos.shape[0], pairs}, "the rope table's cos");
  const float* s = checked_constant(sin, {sin.shape[0], pairs}, "the rope table's sin");
  if (impl_->prefix) {
    require(num_requests() == 0, ErrorCode::bad_state,
            "{} requests run; keys of blocks name the rope table: bind it before the first", num_requests());
    impl_->prefix->set_rope_digest(impl_->digest_table(cos) + impl_->digest_table(sin));
  }
  impl_->compress_rope.cos = c;
  impl_->compress_rope.sin = s;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

// --- requests
// ----------------------------------------------------------------------------------------------------------------

std::int64_t KVCacheManager::Impl::num_blocks_of(std::int64_t length) const {
  return ceil_div(length, schema.block_tokens);
}

std::int32_t KVCacheManager::Impl::row_of(RequestId request) const {
  const std::int32_t row = request < 0 ? -1 : request % schema.options.max_requests;
  require(row >= 0 && sequences[static_cast<std::size_t>(row)].id == request, ErrorCode::bad_argument,
          "request {} does not run: it was never admitted, or is released already", request);
  return row;
}

std::int32_t KVCacheManager::Impl::idle_row_of(RequestId request, const char* what) const {
  const std::int32_t row = row_of(request);
  require(!sequences[static_cast<std::size_t>(row)].in_step, ErrorCode::bad_state,
          "request {} is in step {}; commit or abort it before {}", request, open.step.id, what);
  return row;
}

GroupProgress& KVCacheManager::Impl::progress(std::int32_t row, int group) {
  require(group >= 0 && group < schema.num_groups, ErrorCode::bad_argument,
          "group is {}; this cache has 0 (backbone) to {} (draft stages)", group, schema.num_groups - 1);
  return sequences[static_cast<std::size_t>(row)].groups[static_cast<std::size_t>(group)];
}

RequestId KVCacheManager::Impl::start_row(std::int32_t slot) {
  const std::int32_t row = free_rows.back();
  free_rows.pop_back();
  const std::int32_t requests = schema.options.max_requests;
  std::int32_t& generation = generations[static_cast<std::size_t>(row)];
  Sequence& s = sequences[static_cast<std::size_t>(row)];
  s.id = generation * requests + row;
  generation = generation + 1 < std::numeric_limits<std::int32_t>::max() / requests ? generation + 1 : 0;
  s.slot = slot;
  s.in_step = false;
  std::fill(s.groups.begin(), s.groups.end(), GroupProgress{});
  s.chain = {};
  return s.id;
}

void KVCacheManager::Impl::copy_block(BlockId from, BlockId to) {
  kv_pool.copy_block(from, to);
  std::copy_n(&token_ids[std::int64_t{from} * block_tokens()], block_tokens(),
              &token_ids[std::int64_t{to} * block_tokens()]);
}

std::int64_t KVCacheManager::Impl::num_held(std::int32_t row) const {
  const Sequence& s = sequences[static_cast<std::size_t>(row)];
  return std::max(num_blocks_of(s.length()), s.chain.replay_end / block_tokens());
}

// Last first, so that the allocator is as it was before they were taken.
void KVCacheManager::Impl::drop_blocks(std::int32_t row, std::int64_t keep) {
  for (std::int64_t i = num_held(row) - 1; i >= keep; --i) {
    allocator.release(tables.block(row, i));
    tables.set_block(row, i, -1);
  }
}

Expected<RequestId> KVCacheManager::admit() {
  const TimedCall call(*this, &CallTimes::admit);
  const NvtxRange range("kv4 admit", !impl_->backend->on_host());
  if (impl_->free_rows.empty()) return counted(Shortage::requests, impl_->admit_shortages);
  Impl::NewSlot slot(impl_->state_pool);
  if (!slot.slot) return counted(Shortage::slots, impl_->admit_shortages);
  impl_->state_pool.reset_slot(*slot.slot);
  return impl_->start_row(slot.keep());
}

void KVCacheManager::release(RequestId request) {
  const OneThread::Call call(impl_->driver);
  const std::int32_t row = impl_->idle_row_of(request, "releasing it");
  Sequence& s = impl_->sequences[static_cast<std::size_t>(row)];
  impl_->end_chain(row);
  impl_->drop_blocks(row, 0);
  impl_->state_pool.release_slot(s.slot);
  s.id = kNoRequest;
  s.slot = -1;
  impl_->free_rows.push_back(row);
}

void KVCacheManager::rewind(RequestId request, std::int64_t length, int group) {
  const OneThread::Call call(impl_->driver);
  const std::int32_t row = impl_->idle_row_of(request, "rewinding it");
  GroupProgress& g = impl_->progress(row, group);
  const std::int64_t floor = rewind_floor(request, group);
  require(length >= floor && length <= g.length, ErrorCode::bad_argument,
          "request {} of length {} cannot be rewound to {}; allowed are {} to {} (max_rewind_tokens = {})", request,
          g.length, length, floor, g.length, impl_->schema.options.max_rewind_tokens);
  if (group == 0 && impl_->sequences[static_cast<std::size_t>(row)].chain.replay_end == 0) {
    impl_->cut_chain(row, impl_->num_blocks_of(length));
    impl_->drop_blocks(row, impl_->num_blocks_of(length));
  }
  g.length = length;
}

std::int64_t KVCacheManager::rewind_floor(RequestId request, int group) const {
  const OneThread::Call call(impl_->driver);
  const GroupProgress& g = impl_->progress(impl_->row_of(request), group);
  return std::min(g.length, std::max({g.highest - impl_->schema.options.max_rewind_tokens, g.floor, std::int64_t{0}}));
}

Expected<RequestId> KVCacheManager::fork(RequestId request) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 fork", !impl_->backend->on_host());
  const std::int32_t row = impl_->idle_row_of(request, "forking it");
  const Sequence& parent = impl_->sequences[static_cast<std::size_t>(row)];
  const std::int64_t held = impl_->num_held(row);
  const bool has_open = held * impl_->block_tokens() > std::max(parent.length(), parent.chain.replay_end);
  const std::int64_t shared = held - has_open;
  if (impl_->free_rows.empty()) return Shortage::requests;
  if (has_open && impl_->num_available(parent.chain.tenant) < 1) return Shortage::blocks;
  PrefixChain chain = parent.chain;
  Impl::NewSlot slot(impl_->state_pool);
  if (!slot.slot) return Shortage::slots;
  impl_->state_pool.copy_slot(parent.slot, *slot.slot);

  const RequestId child_id = impl_->start_row(slot.keep());
  const std::int32_t child_row = impl_->row_of(child_id);
  Sequence& child = impl_->sequences[static_cast<std::size_t>(child_row)];
  std::copy(parent.groups.begin(), parent.groups.end(), child.groups.begin());
  for (std::int64_t i = 0; i < shared; ++i) {
    const BlockId block = impl_->tables.block(row, i);
    impl_->allocator.retain(block);
    impl_->tables.set_block(child_row, i, block);
  }
  impl_->fork_chain(std::move(chain), child, shared);
  if (has_open) {
    const BlockId block = impl_->take_block(parent.chain.tenant);
    impl_->copy_block(impl_->tables.block(row, shared), block);
    impl_->tables.set_block(child_row, shared, block);
  }
  return child_id;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

// --- steps
// -------------------------------------------------------------------------------------------------------------------

void KVCacheManager::Impl::check_items(std::span<const StepItem> items, int group) {
  require(!step_open, ErrorCode::bad_state, "step {} is still open; commit or abort it before preparing another",
          open.step.id);
  require(group >= 0 && group < schema.num_groups, ErrorCode::bad_argument,
          "group is {}; this cache has 0 (backbone) to {} (draft stages)", group, schema.num_groups - 1);
  const std::int64_t max_items = tables.max_items();
  require(!items.empty() && static_cast<std::int64_t>(items.size()) <= max_items, ErrorCode::bad_argument,
          "a step has 1 to {} items (2 x max_requests); got {}", max_items, items.size());
  const std::int64_t step_id = ++last_step_id;
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const StepItem& item = items[i];
    require(item.count >= 1, ErrorCode::bad_argument, "item {} has count {}; it must be at least 1", i, item.count);
    tokens += item.count;
    require(tokens <= schema.options.max_step_tokens, ErrorCode::bad_argument,
            "the step has {} tokens or more; max_step_tokens is {}", tokens, schema.options.max_step_tokens);
    if (item.request == kNoRequest) continue;
    const std::int32_t row = row_of(item.request);
    std::int64_t& seen = seen_in_step[static_cast<std::size_t>(row)];
    require(seen != step_id, ErrorCode::bad_argument, "request {} is in the step twice; join its tokens into one item",
            item.request);
    seen = step_id;
    const std::int64_t length = progress(row, group).length;
    require(item.position == -1 || item.position == length, ErrorCode::bad_argument,
            "item {} starts at position {}, but request {} has {} tokens; positions must continue without a gap", i,
            item.position, item.request, length);
    require(length + item.count <= schema.options.max_context, ErrorCode::bad_argument,
            "request {} would have {} tokens; max_context is {}", item.request, length + item.count,
            schema.options.max_context);
    require(item.token_ids.size() == static_cast<std::size_t>(item.count) || (group != 0 && item.token_ids.empty()),
            ErrorCode::bad_argument, "item {} has {} token ids for {} tokens", i, item.token_ids.size(), item.count);
    if (group == 0) check_replay(item, row);
  }
}

std::int64_t KVCacheManager::Impl::blocks_needed(const StepItem& item) const {
  if (item.request == kNoRequest) return 0;
  const std::int32_t row = item.request % schema.options.max_requests;
  const Sequence& s = sequences[static_cast<std::size_t>(row)];
  const bool copies = s.length() % block_tokens() != 0 && s.chain.replay_end == 0 &&
                      allocator.is_immutable(tables.block(row, s.length() / block_tokens()));
  return std::max<std::int64_t>(0, num_blocks_of(s.length() + item.count) - num_held(row)) + copies;
}

Shortage KVCacheManager::Impl::find_shortage(std::span<const StepItem> items, int group) const {
  std::int64_t blocks = 0, slots = 0;
  for (const StepItem& item : items) {
    slots += item.request != kNoRequest && is_long(item.count);
    if (group == 0) blocks += blocks_needed(item);
  }
  // Whatever is evicted for one tenant costs another at most one block that it could have evicted.
  if (blocks > allocator.num_free())
    for (const StepItem& item : items)
      if (blocks_needed(item) > 0 && blocks > num_available(tenant_of(item.request))) return Shortage::blocks;
  if (slots > state_pool.num_free()) return Shortage::slots;
  return Shortage::none;
}

void KVCacheManager::Impl::reserve(std::span<const StepItem> items, int group) {
  std::int32_t first_token = 0;
  for (const StepItem& item : items) {
    ops::StepRecord& record = open.items.emplace_back();
    open.window_begins.push_back(0);
    record.count = item.count;
    record.first_token = first_token;
    first_token += item.count;
    if (item.request == kNoRequest) continue;
    StepPart part{item.request % schema.options.max_requests, item.count, -1};
    Sequence& s = sequences[static_cast<std::size_t>(part.row)];
    s.in_step = true;
    if (is_long(item.count)) {
      part.spare = state_pool.acquire_slot().value();
      state_pool.copy_slot(s.slot, part.spare);
    }
    open.parts.push_back(part);
    record.row = part.row;
    const GroupProgress& g = s.groups[static_cast<std::size_t>(group)];
    record.length = record.position = static_cast<std::int32_t>(g.length);
    open.window_begins.back() = static_cast<std::int32_t>(g.window_begin);
    record.read_slot = s.slot;
    record.write_slot = part.spare >= 0 ? part.spare : s.slot;
    if (group != 0) continue;
    if (s.chain.replay_end > 0) record.block = static_cast<std::int32_t>(s.chain.replay_end);
    const std::int64_t first = std::max(s.length(), s.chain.replay_end);  // token whose entries are written
    const std::int64_t have = num_held(part.row), end = num_blocks_of(s.length() + item.count);
    for (std::int64_t i = first / block_tokens(); i < end; ++i) {
      const BlockId old_block = i < have ? tables.block(part.row, i) : -1;
      if (old_block >= 0 && !allocator.is_immutable(old_block)) continue;
      const BlockId new_block = take_block(s.chain.tenant);
      if (old_block >= 0) copy_block(old_block, new_block);
      tables.set_block(part.row, i, new_block);
      open.changes.push_back({part.row, i, old_block, new_block});
    }
    for (std::int64_t position = first; position < s.length() + item.count; ++position) {
      const BlockId block = tables.block(part.row, position / block_tokens());
      token_ids[std::int64_t{block} * block_tokens() + position % block_tokens()] =
          item.token_ids[static_cast<std::size_t>(position - s.length())];
    }
    reserve_boundaries(open.items.size() - 1, part);
  }
}

Expected<Step> KVCacheManager::prepare_forward(std::span<const StepItem> items, int group) {
  const TimedCall call(*this, &CallTimes::prepare_forward);
  const NvtxRange range("kv4 prepare_forward", !impl_->backend->on_host());
  Impl& m = *impl_;
  m.check_items(items, group);
  if (const Shortage shortage = m.find_shortage(items, group); shortage != Shortage::none)
    return counted(shortage, m.prepare_forward_shortages);
  std::int32_t tokens = 0;
  for (const StepItem& item : items) tokens += item.count;
  m.open.step = {m.last_step_id, tokens, static_cast<std::int32_t>(items.size()), group};
  m.open.items.clear();
  m.open.window_begins.clear();
  m.open.parts.clear();
  m.open.changes.clear();
  m.open.boundaries.clear();
  std::fill(m.open.saved_layers.begin(), m.open.saved_layers.end(), false);
  m.reserve(items, group);
  m.tables.update(m.open.items, m.open.window_begins, tokens);
  m.step_open = true;
  m.step_written = false;
  return m.open.step;
}

LayerCacheHandle KVCacheManager::acquire(int layer) {
  const OneThread::Call call(impl_->driver);
  const LayerCacheSchema& schema = impl_->schema.layer(layer);
  require(impl_->step_open, ErrorCode::bad_state, "no step is open; call prepare_forward before acquire({})", layer);
  require(schema.spec.group == impl_->open.step.group, ErrorCode::bad_state,
          "layer {} belongs to group {}, the open step to group {}", layer, schema.spec.group, impl_->open.step.group);
  return {this, static_cast<int>(&schema - impl_->schema.layers.data()), impl_->open.step.id};
}

void KVCacheManager::Impl::check_open(const Step& step, const char* what) const {
  require(step_open, ErrorCode::bad_state, "no step is open; there is nothing to {}", what);
  require(step.id == open.step.id, ErrorCode::bad_state, "step {} is not open, step {} is; {} that one", step.id,
          open.step.id, what);
}

void KVCacheManager::Impl::close_step() {
  for (const StepPart& part : open.parts) sequences[static_cast<std::size_t>(part.row)].in_step = false;
  step_open = false;
}

void KVCacheManager::commit(const Step& step) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 commit", !impl_->backend->on_host());
  Impl& m = *impl_;
  m.check_open(step, "commit");
  if (m.prefix && m.open.step.group == 0) {
    std::int64_t boundaries = 0;
    for (const StepPart& part : m.open.parts) {
      const std::int64_t length = m.sequences[static_cast<std::size_t>(part.row)].length();
      boundaries += (length + part.count) / m.block_tokens() - length / m.block_tokens();
    }
    m.reserve_snapshots(boundaries);
  }
  const std::int64_t ticket = m.backend->mark();  // first: it may throw
  if (!m.open.boundaries.empty() && !m.boundaries_saved()) m.give_boundaries();
  for (const BlockChange& change : m.open.changes) {
    if (change.old_block < 0) continue;
    m.cut_chain(change.row, change.index);
    m.allocator.release(change.old_block);
  }
  for (const StepPart& part : m.open.parts) {
    Sequence& s = m.sequences[static_cast<std::size_t>(part.row)];
    GroupProgress& g = s.groups[static_cast<std::size_t>(m.open.step.group)];
    g.length += part.count;
    g.highest = std::max(g.highest, g.length);
    if (part.spare >= 0) {
      m.state_pool.release_slot(s.slot);
      s.slot = part.spare;
    }
    if (s.length() >= s.chain.replay_end) {
      // Without a snapshot the windows of the last layer are whole from here on, and no row earlier.
      if (s.groups[0].window_begin > 0) s.groups[0].floor = std::max(s.groups[0].floor, s.chain.replay_end);
      s.chain.replay_end = 0;
    }
    if (m.open.step.group == 0 && s.chain.publishes) {
      m.publish(part.row);
      m.save_snapshots(part.row, g.length - part.count);
    }
  }
  m.give_boundaries();
  m.send_snapshots();
  m.commits[m.num_commits++ % m.commits.size()] = {m.open.step.id, ticket};
  m.close_step();
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

// Of a step so old that its ticket is gone, the oldest ticket kept tells: it is a later one.
bool KVCacheManager::finished(const Step& step) {
  const OneThread::Call call(impl_->driver);
  const Impl& m = *impl_;
  const std::size_t kept = std::min(m.num_commits, m.commits.size());
  for (std::size_t i = m.num_commits - kept; i < m.num_commits; ++i) {
    const Impl::Commit& c = m.commits[i % m.commits.size()];
    if (c.step_id >= step.id) return m.backend->reached(c.ticket);
  }
  fail(ErrorCode::bad_state, "step {} was not committed", step.id);
}

void KVCacheManager::set_stream(Stream stream) {
  const OneThread::Call call(impl_->driver);
  impl_->backend->set_stream(stream);
}

void KVCacheManager::synchronize() {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 synchronize", !impl_->backend->on_host());
  impl_->backend->synchronize();
}

void KVCacheManager::abort(const Step& step) {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 abort", !impl_->backend->on_host());
  Impl& m = *impl_;
  m.check_open(step, "abort");
  for (auto change = m.open.changes.rbegin(); change != m.open.changes.rend(); ++change) {
    m.tables.set_block(change->row, change->index, change->old_block);
    m.allocator.release(change->new_block);
  }
  for (auto part = m.open.parts.rbegin(); part != m.open.parts.rend(); ++part) {
    if (part->spare >= 0) {
      m.state_pool.release_slot(part->spare);
      continue;
    }
    // What was written in place has overwritten the oldest rows of the rings.
    GroupProgress& g =
        m.sequences[static_cast<std::size_t>(part->row)].groups[static_cast<std::size_t>(m.open.step.group)];
    if (m.step_written || m.captured) g.highest = std::max(g.highest, g.length + part->count);
  }
  m.give_boundaries();
  m.close_step();
}

// --- images and accessors
// ----------------------------------------------------------------------------------------------------

std::int64_t KVCacheManager::length(RequestId request, int group) const {
  const OneThread::Call call(impl_->driver);
  return impl_->progress(impl_->row_of(request), group).length;
}

std::vector<BlockId> KVCacheManager::blocks(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  const std::int32_t row = impl_->row_of(request);
  const BlockId* first = impl_->tables.row(row);
  return {first, first + impl_->num_blocks_of(impl_->sequences[static_cast<std::size_t>(row)].length())};
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<std::int32_t> KVCacheManager::token_ids(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  std::vector<std::int32_t> out;
  const int block_tokens = impl_->block_tokens();
  const std::int64_t n = length(request);
  for (BlockId block : blocks(request)) {
    const std::int32_t* ids = &impl_->token_ids[std::int64_t{block} * block_tokens];
    out.insert(out.end(), ids, ids + std::min<std::int64_t>(block_tokens, n - static_cast<std::int64_t>(out.size())));
  }
  return out;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<std::int64_t> KVCacheManager::Impl::lengths_of(RequestId request) const {
  std::vector<std::int64_t> out;
  for (const GroupProgress& g : sequences[static_cast<std::size_t>(row_of(request))].groups) out.push_back(g.length);
  return out;
}

std::int64_t KVCacheManager::image_bytes(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  return kv4::image_bytes(impl_->schema, impl_->lengths_of(request));
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::export_image(RequestId request, std::span<std::byte> out) const try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 export_image", !impl_->backend->on_host());
  const Sequence& s = impl_->sequences[static_cast<std::size_t>(impl_->row_of(request))];
  require(s.length() >= s.chain.replay_end || s.groups[0].window_begin == 0, ErrorCode::bad_state,
          "request {} replays its prompt up to position {}, and its windows are whole only there; it is at {}", request,
          s.chain.replay_end, s.length());
  std::vector<const float*> bias;
  for (const ops::LayerDesc& layer : impl_->layers) bias.push_back(layer.kinds[0].bias);
  impl_->state_pool.save(s.slot, impl_->lengths_of(request), bias, out);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

CanonicalImage KVCacheManager::export_image(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 export_image", !impl_->backend->on_host());
  CanonicalImage image{impl_->schema.layout_id, impl_->lengths_of(request),
                       std::vector<std::byte>(static_cast<std::size_t>(image_bytes(request)))};
  export_image(request, image.bytes);
  return image;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::export_blocks(RequestId request, std::span<std::byte> out) const {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 export_blocks", !impl_->backend->on_host());
  const std::vector<BlockId> ids = blocks(request);
  const std::size_t bytes = static_cast<std::size_t>(impl_->schema.block_image_bytes);
  require(out.size() == ids.size() * bytes, ErrorCode::bad_argument,
          "request {} has {} blocks of {} bytes; got room for {} bytes", request, ids.size(), bytes, out.size());
  std::int64_t left = length(request);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t tokens = std::min<std::int64_t>(left, impl_->block_tokens());
    impl_->kv_pool.save_block(ids[i], static_cast<int>(tokens), out.subspan(i * bytes, bytes));
    left -= tokens;
  }
}

std::vector<std::byte> KVCacheManager::export_blocks(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 export_blocks", !impl_->backend->on_host());
  std::vector<std::byte> out(blocks(request).size() * static_cast<std::size_t>(impl_->schema.block_image_bytes));
  export_blocks(request, out);
  return out;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<RequestId> KVCacheManager::import_image(const ImageView& image, std::span<const std::int32_t> token_ids,
                                                 std::span<const std::byte> blocks) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 import_image", !impl_->backend->on_host());
  const std::size_t bytes = static_cast<std::size_t>(impl_->schema.block_image_bytes);
  const std::size_t count = static_cast<std::size_t>(impl_->num_blocks_of(static_cast<std::int64_t>(token_ids.size())));
  require(blocks.size() == count * bytes, ErrorCode::bad_argument,
          "{} tokens need {} block images of {} bytes; got {} bytes", token_ids.size(), count, bytes, blocks.size());
  std::vector<std::span<const std::byte>> each;
  for (std::size_t i = 0; i < count; ++i) each.push_back(blocks.subspan(i * bytes, bytes));
  return import_image(image, token_ids, each, {});
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<RequestId> KVCacheManager::import_image(const ImageView& image, std::span<const std::int32_t> token_ids,
                                                 std::span<const std::span<const std::byte>> blocks,
                                                 const PrefixIdentity& chain) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 import_image", !impl_->backend->on_host());
  Impl& m = *impl_;
  m.state_pool.check(image);
  const std::int64_t n = image.lengths[0], count = m.num_blocks_of(n);
  require(token_ids.size() == static_cast<std::size_t>(n), ErrorCode::bad_argument,
          "the image has {} tokens, token_ids {}", n, token_ids.size());
  require(static_cast<std::int64_t>(blocks.size()) == count, ErrorCode::bad_argument,
          "{} tokens need {} block images; got {}", n, count, blocks.size());
  const std::optional<std::uint16_t> weights_slot =
      m.prefix ? m.prefix->weights_slot_in(chain.weights_generation) : std::nullopt;
  const KeptChain kept = weights_slot ? m.prefix->find_chain(chain, token_ids) : KeptChain{};
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t bytes = std::ssize(blocks[static_cast<std::size_t>(i)]);
    require(bytes == m.schema.block_image_bytes || (bytes == 0 && i < kept.blocks), ErrorCode::bad_argument,
            "block {} has {} bytes; it needs {}, as only the first {} are kept here", i, bytes,
            m.schema.block_image_bytes, kept.blocks);
  }
  if (m.free_rows.empty()) return Shortage::requests;
  Impl::NewSlot slot(m.state_pool);
  if (!slot.slot) return Shortage::slots;
  if (count - kept.blocks > m.num_available(chain.tenant)) return Shortage::blocks;
  m.state_pool.restore(*slot.slot, image);
  PrefixIdentity name = chain;
  if (weights_slot) m.reserve_snapshots(1);
  if (kept.tail != kNoSlot) m.prefix->index.pin(kept.tail);  // first: it is not what makes room for the rest
  if (count - kept.blocks > m.num_available(chain.tenant)) {
    if (kept.tail != kNoSlot) m.prefix->index.unpin(kept.tail);
    return Shortage::blocks;
  }

  const RequestId id = m.start_row(slot.keep());
  const std::int32_t row = m.row_of(id);
  for (std::size_t g = 0; g < image.lengths.size(); ++g) {
    const std::int64_t length = image.lengths[g];
    m.sequences[static_cast<std::size_t>(row)].groups[g] = {length, length, length, 0};
  }
  if (weights_slot) m.begin_chain(row, std::move(name), *weights_slot);
  m.hold_chain(row, kept);
  for (std::int64_t i = kept.blocks; i < count; ++i) {
    const BlockId block = m.take_block(chain.tenant);
    m.kv_pool.load_block(block, blocks[static_cast<std::size_t>(i)]);
    m.tables.set_block(row, i, block);
    const std::int64_t first = i * m.block_tokens();
    std::copy_n(token_ids.data() + first, std::min<std::int64_t>(m.block_tokens(), n - first),
                &m.token_ids[std::int64_t{block} * m.block_tokens()]);
  }
  if (!weights_slot) return id;
  m.publish(row);
  m.save_snapshots(row, n - 1);  // where it ends at a boundary, its state is one
  m.send_snapshots();
  return id;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

const CacheSchema& KVCacheManager::schema() const { return impl_->schema; }
const BlockAllocator& KVCacheManager::allocator() const { return impl_->allocator; }
PagedKVPool& KVCacheManager::kv_pool() { return impl_->kv_pool; }
StateCachePool& KVCacheManager::state_pool() { return impl_->state_pool; }
int KVCacheManager::num_requests() const {
  const OneThread::Call call(impl_->driver);
  return impl_->schema.options.max_requests - static_cast<int>(impl_->free_rows.size());
}

std::vector<RequestId> KVCacheManager::requests() const try {
  const OneThread::Call call(impl_->driver);
  std::vector<RequestId> out;
  for (const Sequence& s : impl_->sequences)
    if (s.id != kNoRequest) out.push_back(s.id);
  return out;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::int64_t KVCacheManager::memory_bytes() const {
  const Impl& m = *impl_;
  return m.kv_pool.memory_bytes() + m.state_pool.memory_bytes() + m.tables.memory_bytes() + m.index_workspace.bytes() +
         m.attend_workspace.bytes() + m.allocator.memory_bytes() + (m.prefix ? m.prefix->memory_bytes() : 0) +
         m.schema.options.num_blocks * m.block_tokens() * 4 + (m.swa_angles ? m.swa_angles->memory_bytes() : 0) +
         (m.compress_angles ? m.compress_angles->memory_bytes() : 0);
}

}  // namespace kv4
