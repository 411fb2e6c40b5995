#include "kv4/kv_cache_manager.h"

#include <algorithm>
#include <utility>

#include "backend/nvtx_range.h"
#include "base/check.h"
#include "cache/cache_call.h"
#include "cache/manager_impl.h"

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
    fail(ErrorCode::bad_state,
         "there is no value: the call was cancelled by its progress function; nothing has changed");
  const char* why = shortage == Shortage::requests ? "all max_requests are running"
                    : shortage == Shortage::blocks ? "too few blocks are free"
                                                   : "no spare slot is free for a long step";
  fail(ErrorCode::bad_state,
       "there is no value: {} (shortage: {}); nothing has changed. Wait for a release, or preempt a request", why,
       to_string(shortage));
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

void KVCacheManager::bind_weights(int layer, const LayerWeights& weights) try {
  const OneThread::Call call(impl_->driver);
  impl_->layers.bind_weights(layer, weights, impl_->steps.is_open());
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::bind_rope_table(const ConstTensorView& cos, const ConstTensorView& sin) try {
  const OneThread::Call call(impl_->driver);
  impl_->layers.bind_rope_table(cos, sin, impl_->steps.is_open(), impl_->prefix.get(), num_requests());
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

// --- requests

Expected<RequestId> KVCacheManager::admit() {
  const TimedCall call(*this, &CallTimes::admit);
  const NvtxRange range("kv4 admit", !impl_->on_host());
  return counted(impl_->requests.admit(), impl_->admit_shortages);
}

Expected<Admission> KVCacheManager::admit(const Prompt& prompt) try {
  const TimedCall call(*this, &CallTimes::admit);
  const NvtxRange range("kv4 admit", !impl_->on_host());
  return counted(impl_->requests.admit(prompt), impl_->admit_shortages);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<RequestId> KVCacheManager::fork(RequestId request) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 fork", !impl_->on_host());
  return impl_->requests.fork(request);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::release(RequestId request) {
  const OneThread::Call call(impl_->driver);
  impl_->requests.release(request);
}

void KVCacheManager::rewind(RequestId request, std::int64_t length, int group) {
  const OneThread::Call call(impl_->driver);
  impl_->requests.rewind(request, length, group);
}

std::int64_t KVCacheManager::rewind_floor(RequestId request, int group) const {
  const OneThread::Call call(impl_->driver);
  return impl_->requests.rewind_floor(request, group);
}

std::int64_t KVCacheManager::length(RequestId request, int group) const {
  const OneThread::Call call(impl_->driver);
  return impl_->table.progress(impl_->table.row_of(request), group).length;
}

std::vector<BlockId> KVCacheManager::blocks(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  return impl_->requests.blocks(request);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<std::int32_t> KVCacheManager::token_ids(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  return impl_->requests.token_ids(request);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<std::int32_t> KVCacheManager::last_token_ids(RequestId request, int count) const try {
  const OneThread::Call call(impl_->driver);
  return impl_->requests.last_token_ids(request, count);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

int KVCacheManager::num_requests() const {
  const OneThread::Call call(impl_->driver);
  return impl_->table.num_running();
}

std::vector<RequestId> KVCacheManager::requests() const try {
  const OneThread::Call call(impl_->driver);
  return impl_->table.ids();
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

// --- steps

Expected<Step> KVCacheManager::prepare_forward(std::span<const StepItem> items, int group) {
  const TimedCall call(*this, &CallTimes::prepare_forward);
  const NvtxRange range("kv4 prepare_forward", !impl_->on_host());
  return counted(impl_->steps.prepare(items, group), impl_->prepare_forward_shortages);
}

LayerCacheHandle KVCacheManager::acquire(int layer) {
  const OneThread::Call call(impl_->driver);
  const CacheSchema& schema = impl_->memory.schema;
  const LayerCacheSchema& owned = schema.layer(layer);
  const Step& step = impl_->steps.open();
  require(impl_->steps.is_open(), ErrorCode::bad_state, "no step is open; call prepare_forward before acquire({})",
          layer);
  require(owned.spec.group == step.group, ErrorCode::bad_state,
          "layer {} belongs to group {}, the open step to group {}", layer, owned.spec.group, step.group);
  return {this, static_cast<int>(&owned - schema.layers.data()), step.id};
}

void KVCacheManager::commit(const Step& step) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 commit", !impl_->on_host());
  impl_->steps.commit(step);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::abort(const Step& step) {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 abort", !impl_->on_host());
  impl_->steps.abort(step);
}

bool KVCacheManager::finished(const Step& step) {
  const OneThread::Call call(impl_->driver);
  return impl_->steps.finished(step);
}

void KVCacheManager::set_stream(Stream stream) {
  const OneThread::Call call(impl_->driver);
  impl_->memory.backend->set_stream(stream);
}

void KVCacheManager::synchronize() {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 synchronize", !impl_->on_host());
  impl_->memory.backend->synchronize();
}

// --- images

std::int64_t KVCacheManager::image_bytes(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  return impl_->images.image_bytes(request);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::export_image(RequestId request, std::span<std::byte> out) const try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 export_image", !impl_->on_host());
  impl_->images.export_image(request, out);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

CanonicalImage KVCacheManager::export_image(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 export_image", !impl_->on_host());
  CanonicalImage image{impl_->memory.schema.layout_id, impl_->table.lengths_of(request), {}};
  image.bytes.resize(image_bytes(request));
  export_image(request, image.bytes);
  return image;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::export_blocks(RequestId request, std::span<std::byte> out) const {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 export_blocks", !impl_->on_host());
  impl_->images.export_blocks(request, blocks(request), out);
}

std::vector<std::byte> KVCacheManager::export_blocks(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 export_blocks", !impl_->on_host());
  std::vector<std::byte> out(blocks(request).size() * impl_->memory.schema.block_image_bytes);
  export_blocks(request, out);
  return out;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<RequestId> KVCacheManager::import_image(const ImageView& image, std::span<const std::int32_t> token_ids,
                                                 std::span<const std::byte> blocks) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 import_image", !impl_->on_host());
  const std::int64_t bytes = impl_->memory.schema.block_image_bytes;
  const std::int64_t count = impl_->blocks.count_of(std::ssize(token_ids));
  require(std::ssize(blocks) == count * bytes, ErrorCode::bad_argument,
          "{} tokens need {} block images of {} bytes; got {} bytes", token_ids.size(), count, bytes, blocks.size());
  std::vector<std::span<const std::byte>> each;
  for (std::int64_t i = 0; i < count; ++i) each.push_back(blocks.subspan(i * bytes, bytes));
  return import_image(image, token_ids, each, {});
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<RequestId> KVCacheManager::import_image(const ImageView& image, std::span<const std::int32_t> token_ids,
                                                 std::span<const std::span<const std::byte>> blocks,
                                                 const PrefixIdentity& chain) try {
  const OneThread::Call call(impl_->driver);
  const NvtxRange range("kv4 import_image", !impl_->on_host());
  return impl_->images.import_image(image, token_ids, blocks, chain);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

// --- prefixes

PrefixIdentity KVCacheManager::identify_prefix(const Prompt& prompt) try {
  const OneThread::Call call(impl_->driver);
  return impl_->chains.identify(prompt);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

PrefixIdentity KVCacheManager::chain_of(RequestId request) const try {
  const OneThread::Call call(impl_->driver);
  return impl_->chains.identity_of(impl_->table.row_of(request));
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::set_weights_id(std::string_view weights_id) try {
  const OneThread::Call call(impl_->driver);
  impl_->prefix_blocks.prefix().set_weights_id(weights_id);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

void KVCacheManager::invalidate(std::string_view weights_id) {
  const OneThread::Call call(impl_->driver);
  impl_->prefix_blocks.prefix();  // throws where there is none
  impl_->chains.invalidate(weights_id);
}

PrefixStatistics KVCacheManager::prefix_statistics() const {
  const OneThread::Call call(impl_->driver);
  if (!impl_->prefix) return {};
  return impl_->prefix->now();
}

std::size_t KVCacheManager::read_block_events(std::span<BlockEvent> out) {
  const OneThread::Call call(impl_->driver);
  return impl_->prefix ? impl_->prefix->index.read_events(out) : 0;
}

// --- accessors

const CacheSchema& KVCacheManager::schema() const { return impl_->memory.schema; }
const BlockAllocator& KVCacheManager::allocator() const { return impl_->blocks.allocator(); }
PagedKVPool& KVCacheManager::kv_pool() { return impl_->memory.kv_pool; }
StateCachePool& KVCacheManager::state_pool() { return impl_->memory.state_pool; }
std::int64_t KVCacheManager::memory_bytes() const { return impl_->memory_bytes(); }

CacheStatistics KVCacheManager::statistics() const try {
  const OneThread::Call call(impl_->driver);
  const Impl& m = *impl_;
  const CacheOptions& options = m.memory.schema.options;
  CacheStatistics out;
  out.requests = num_requests();
  out.max_requests = options.max_requests;
  out.blocks = allocator().num_blocks();
  out.free_blocks = allocator().num_free();
  out.held_blocks = allocator().num_held();
  out.evictable_blocks = allocator().num_evictable();
  out.slots = m.memory.state_pool.num_slots();
  out.free_slots = m.memory.state_pool.num_free();
  out.memory_bytes = memory_bytes();
  out.times = m.times;
  out.admit_shortages = m.admit_shortages;
  out.prepare_forward_shortages = m.prepare_forward_shortages;
  if (!m.prefix) return out;
  const std::vector<std::int64_t>& shares = options.prefix.tenant_shares;
  for (TenantId i = 0; i < std::ssize(shares); ++i) out.tenants.push_back({shares[i], m.prefix->index.tenant_size(i)});
  out.prefix = m.prefix->now();
  out.usable_tokens = m.prefix->usable_tokens;
  out.replayed_tokens = m.prefix->replayed_tokens;
  return out;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

}  // namespace kv4
