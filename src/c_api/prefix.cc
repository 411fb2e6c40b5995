// The prefix cache: prompts, prefix blocks, events, statistics.
#include <algorithm>
#include <cstring>
#include <vector>

#include "c_api/handles.h"

namespace kv4::c_api {

namespace {

kv4_admission admission_defaults() {
  auto value = sized<kv4_admission>();
  value.request = KV4_NO_REQUEST;
  return value;
}

}  // namespace

GivenPrompt::GivenPrompt(const kv4_prompt* given) {
  const kv4_prompt in = read_struct(given, sized<kv4_prompt>(), "prompt");
  for (const kv4_bytes& one : list(in.extra, in.num_extra, "prompt.extra")) extra.push_back(text(one, "prompt.extra"));
  prompt = {list(in.token_ids, in.num_tokens, "prompt.token_ids"), in.tenant, text(in.salt, "prompt.salt"), extra};
}

void check_admission(kv4_admission* out) { read_struct(out, admission_defaults(), "out"); }

kv4_status give_admission(const Expected<Admission>& admitted, kv4_admission* out) {
  if (!admitted) return status_of(admitted.error());
  kv4_admission value = admission_defaults();
  value.request = admitted->request;
  value.usable_tokens = admitted->usable_tokens;
  value.resume_at = admitted->resume_at;
  write_struct(out, value, "out");
  return KV4_OK;
}

}  // namespace kv4::c_api

using namespace kv4::c_api;

namespace {

kv4::BlockKey key_of(const kv4_block_key* given) {
  kv4::BlockKey key;
  static_assert(sizeof(key) == sizeof(given->bytes));
  std::memcpy(key.data(), require_set(given, "key").bytes, sizeof(key));
  return key;
}

kv4_block_key key_of(const kv4::BlockKey& from) {
  kv4_block_key key;
  std::copy(from.begin(), from.end(), key.bytes);
  return key;
}

std::span<std::byte> image(void* out, size_t bytes) {
  kv4::require(out != nullptr || bytes == 0, kv4::ErrorCode::bad_argument, "out is NULL and should have {} bytes",
               bytes);
  return {static_cast<std::byte*>(out), bytes};
}

}  // namespace

void kv4_prompt_init(kv4_prompt* prompt, size_t size) { init_struct(prompt, size, sized<kv4_prompt>()); }

void kv4_admission_init(kv4_admission* admission, size_t size) { init_struct(admission, size, admission_defaults()); }

void kv4_block_event_init(kv4_block_event* event, size_t size) { init_struct(event, size, sized<kv4_block_event>()); }

void kv4_prefix_block_init(kv4_prefix_block* block, size_t size) {
  init_struct(block, size, sized<kv4_prefix_block>());
}

kv4_status kv4_cache_admit_prompt(kv4_cache* cache, const kv4_prompt* prompt, kv4_admission* out) {
  return guarded([&] {
    kv4::KVCacheManager& to = manager(cache);
    const GivenPrompt given(prompt);
    check_admission(out);
    return give_admission(to.admit(given.prompt), out);
  });
}

void kv4_prefix_statistics_init(kv4_prefix_statistics* statistics, size_t size) {
  init_struct(statistics, size, sized<kv4_prefix_statistics>());
}

kv4_status kv4_cache_get_prefix_statistics(const kv4_cache* cache, kv4_prefix_statistics* out) {
  return guarded([&] {
    const kv4::PrefixStatistics from = manager(cache).prefix_statistics();
    auto value = sized<kv4_prefix_statistics>();
    value.prompts = from.prompts;
    value.hits = from.hits;
    value.prompt_tokens = from.prompt_tokens;
    value.usable_tokens = from.usable_tokens;
    value.replayed_tokens = from.replayed_tokens;
    value.stored_blocks = from.stored_blocks;
    value.joined_blocks = from.joined_blocks;
    value.inserted_blocks = from.inserted_blocks;
    value.evicted_blocks = from.evicted_blocks;
    value.saved_snapshots = from.saved_snapshots;
    value.restored_snapshots = from.restored_snapshots;
    value.dropped_snapshots = from.dropped_snapshots;
    value.lost_events = from.lost_events;
    value.blocks = from.blocks;
    value.snapshots = from.snapshots;
    write_struct(out, value, "out");
  });
}

kv4_status kv4_cache_read_block_events(kv4_cache* cache, kv4_block_event* out, int64_t capacity, int64_t* count) {
  return guarded([&] {
    kv4::KVCacheManager& from = manager(cache);
    std::int64_t& number = require_set(count, "count");
    const StructArray<kv4_block_event> room(out, capacity, "out");
    for (std::size_t i = 0; i < std::min<std::size_t>(room.size(), 1); ++i)
      room.read(i, sized<kv4_block_event>());  // checked before events are read, because these are then gone
    const std::int64_t most = std::min(capacity, from.schema().options.prefix.max_events);
    std::vector<kv4::BlockEvent> events(static_cast<std::size_t>(most));
    const std::size_t read = from.read_block_events(events);
    for (std::size_t i = 0; i < read; ++i) {
      auto value = sized<kv4_block_event>();
      value.key = key_of(events[i].key);
      value.kind = events[i].kind == kv4::BlockEvent::Kind::stored    ? KV4_EVENT_KIND_STORED
                   : events[i].kind == kv4::BlockEvent::Kind::evicted ? KV4_EVENT_KIND_EVICTED
                                                                      : KV4_EVENT_KIND_SNAPSHOT;
      value.inserted = events[i].inserted;
      room.write(i, value);
    }
    number = static_cast<std::int64_t>(read);
  });
}

kv4_status kv4_cache_set_weights_id(kv4_cache* cache, const char* weights_id) {
  return guarded([&] { manager(cache).set_weights_id(c_text(weights_id, "weights_id")); });
}

kv4_status kv4_cache_invalidate(kv4_cache* cache, const char* weights_id) {
  return guarded([&] { manager(cache).invalidate(c_text(weights_id, "weights_id")); });
}

kv4_status kv4_cache_block_keys(kv4_cache* cache, const kv4_prompt* prompt, kv4_block_key* out, int64_t capacity,
                                int64_t* count) {
  return guarded([&] {
    kv4::KVCacheManager& of = manager(cache);
    const GivenPrompt given(prompt);
    std::vector<kv4_block_key> keys;
    for (const kv4::BlockKey& key : of.block_keys(given.prompt)) keys.push_back(key_of(key));
    copy_list<kv4_block_key>(keys, out, capacity, count);
  });
}

kv4_status kv4_cache_find_block(const kv4_cache* cache, const kv4_block_key* key, kv4_prefix_block* out,
                                int32_t* found) {
  return guarded([&] {
    const kv4::KVCacheManager& of = manager(cache);
    std::int32_t& is_there = require_set(found, "found");
    if (out != nullptr) struct_bytes(out, "out");
    const std::optional<kv4::PrefixBlock> kept = of.find_block(key_of(key));
    is_there = kept.has_value();
    if (!kept || out == nullptr) return;
    auto value = sized<kv4_prefix_block>();
    value.tokens = kept->tokens;
    value.tenant = kept->tenant;
    value.has_snapshot = kept->has_snapshot;
    write_struct(out, value, "out");
  });
}

kv4_status kv4_cache_snapshot_bytes(const kv4_cache* cache, int64_t* out) {
  return guarded([&] { require_set(out, "out") = manager(cache).snapshot_bytes(); });
}

kv4_status kv4_cache_read_block(const kv4_cache* cache, const kv4_block_key* key, void* out, size_t bytes,
                                int32_t* found) {
  return guarded([&] {
    std::int32_t& is_there = require_set(found, "found");
    is_there = manager(cache).read_block(key_of(key), image(out, bytes));
  });
}

kv4_status kv4_cache_read_snapshot(const kv4_cache* cache, const kv4_block_key* key, void* out, size_t bytes,
                                   int32_t* found) {
  return guarded([&] {
    std::int32_t& is_there = require_set(found, "found");
    is_there = manager(cache).read_snapshot(key_of(key), image(out, bytes));
  });
}

kv4_status kv4_cache_insert_blocks(kv4_cache* cache, const kv4_prompt* prompt, const kv4_bytes* blocks,
                                   int64_t num_blocks, int64_t* inserted) {
  return guarded([&] {
    kv4::KVCacheManager& to = manager(cache);
    std::int64_t& number = require_set(inserted, "inserted");
    const GivenPrompt given(prompt);
    std::vector<std::span<const std::byte>> images;
    for (const kv4_bytes& block : list(blocks, num_blocks, "blocks")) images.push_back(bytes(block, "blocks"));
    number = to.insert_blocks(given.prompt, images);
  });
}

kv4_status kv4_cache_insert_snapshot(kv4_cache* cache, const kv4_block_key* key, kv4_bytes snapshot,
                                     int32_t* inserted) {
  return guarded([&] {
    std::int32_t& is_there = require_set(inserted, "inserted");
    is_there = manager(cache).insert_snapshot(key_of(key), bytes(snapshot, "snapshot"));
  });
}
