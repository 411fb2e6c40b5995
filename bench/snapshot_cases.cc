// Images, blocks and forks of the whole model. Requests and blocks rotate, so that they come from memory.
#include <fmt/format.h>

#include "case_cache.h"
#include "checks/copy_baseline.h"
#include "checks/sizes.h"

namespace kv4::bench {
namespace {

constexpr int kRequests = 16;

CacheOptions model_options(int requests, std::int64_t context, Format rows) {
  CacheOptions options;
  options.row_format = rows;
  options.max_requests = requests;
  options.max_context = context;
  options.max_step_tokens = 128;
  return options;
}

std::shared_ptr<BenchCache> planted(const BenchSettings& settings, std::int64_t length, Format rows) {
  auto cache = std::make_shared<BenchCache>(settings, model_options(2 * kRequests + 1, length, rows));
  for (int i = 0; i < kRequests; ++i) cache->plant(length);
  return cache;
}

/// Keeps the last few results, so that the next one goes to memory that has left the caches.
template <class T>
struct Ring {
  std::vector<T> items = std::vector<T>(kRequests);
  std::size_t next = 0;
  T& turn() { return items[next++ % kRequests]; }
};

Operation make_export_image(const BenchSettings& settings, std::int64_t length, Format rows) {
  return [cache = planted(settings, length, rows), kept = Ring<CanonicalImage>()]() mutable -> Sample {
    const RequestId request = cache->requests()[kept.next % kRequests];
    const checks::Stopwatch watch;
    CanonicalImage image = cache->manager().export_image(request);
    const double seconds = watch.seconds();
    kept.turn() = std::move(image);
    return {seconds, 2 * static_cast<std::int64_t>(kept.items[0].bytes.size())};
  };
}

Operation make_export_blocks(const BenchSettings& settings, std::int64_t length, Format rows) {
  return [cache = planted(settings, length, rows), kept = Ring<std::vector<std::byte>>()]() mutable -> Sample {
    const RequestId request = cache->requests()[kept.next % kRequests];
    const checks::Stopwatch watch;
    std::vector<std::byte> blocks = cache->manager().export_blocks(request);
    const double seconds = watch.seconds();
    kept.turn() = std::move(blocks);
    return {seconds, 2 * static_cast<std::int64_t>(kept.items[0].size())};
  };
}

/// Imports a request and releases the oldest copy.
Operation make_import(const BenchSettings& settings, std::int64_t length, Format rows) {
  struct State {
    std::shared_ptr<BenchCache> cache;
    CanonicalImage image;
    std::vector<std::byte> blocks;
    std::vector<std::int32_t> token_ids;
    std::vector<RequestId> copies = {};
  };
  auto cache = planted(settings, length, rows);
  auto state = std::make_shared<State>(State{cache, cache->manager().export_image(cache->requests()[0]),
                                             cache->manager().export_blocks(cache->requests()[0]),
                                             std::vector<std::int32_t>(length, 7)});
  state->copies = cache->requests();
  return [state, next = std::size_t{0}]() mutable -> Sample {
    KVCacheManager& manager = state->cache->manager();
    RequestId& turn = state->copies[next++ % state->copies.size()];
    manager.release(turn);
    const checks::Stopwatch watch;
    turn = manager.import_image(state->image, state->token_ids, state->blocks).value();
    return {watch.seconds(), 2 * static_cast<std::int64_t>(state->image.bytes.size() + state->blocks.size())};
  };
}

/// Shares full blocks; copies the state slot and the open block.
Operation make_fork(const BenchSettings& settings, std::int64_t length, Format rows) {
  return
      [cache = planted(settings, length, rows), length, kept = Ring<std::optional<RequestId>>()]() mutable -> Sample {
        KVCacheManager& manager = cache->manager();
        const RequestId request = cache->requests()[kept.next % kRequests];
        std::optional<RequestId>& copy = kept.turn();
        if (copy) manager.release(*copy);
        const checks::Stopwatch watch;
        copy = manager.fork(request).value();
        const double seconds = watch.seconds();
        const CacheSchema& schema = manager.schema();
        return {seconds, 2 * (schema.slot_bytes + (length % schema.block_tokens == 0 ? 0 : schema.block_bytes))};
      };
}

enum class BlockWork { copy, save, load };

Operation make_block(const BenchSettings& settings, BlockWork work, CacheOptions options) {
  constexpr int kBlocks = 512, kImages = 128, kStride = 37;
  options.num_blocks = kBlocks;
  const auto schema = std::make_shared<CacheSchema>(build_schema(settings.config, options));
  const auto pool = std::make_shared<PagedKVPool>(*schema, make_cpu_backend(settings.threads));
  auto images =
      std::make_shared<std::vector<std::vector<std::byte>>>(kImages, std::vector<std::byte>(schema->block_image_bytes));
  for (BlockId block = 0; block < kBlocks; ++block) pool->load_block(block, (*images)[0]);
  return [schema, pool, images, work, next = 0]() mutable -> Sample {
    const BlockId from = (next * kStride) % kBlocks, to = (next * kStride + kBlocks / 2) % kBlocks;
    std::vector<std::byte>& image = (*images)[next++ % kImages];
    const checks::Stopwatch watch;
    if (work == BlockWork::copy) pool->copy_block(from, to);
    if (work == BlockWork::save) pool->save_block(from, schema->block_tokens, image);
    if (work == BlockWork::load) pool->load_block(to, image);
    return {watch.seconds(), 2 * (work == BlockWork::copy ? schema->block_bytes : schema->block_image_bytes)};
  };
}

}  // namespace

void add_snapshot_cases(std::vector<Case>& cases, const BenchSettings& settings) {
  const auto add = [&](const std::string& name, auto make, std::int64_t length, Format rows) {
    cases.push_back({name, "request", [=] { return make(settings, length, rows); }});
  };
  for (const Format rows : {Format::fp8_tile64, Format::fp8_row, Format::bf16}) {
    const char* suffix = to_string(rows);
    add(fmt::format("snapshot/export_image/{}", suffix), make_export_image, 512, rows);
    add(fmt::format("snapshot/import_image/{}", suffix), make_import, 512, rows);
    add(fmt::format("snapshot/fork/{}", suffix), make_fork, 512, rows);
  }
  const Format rows = Format::fp8_tile64;
  add("snapshot/export_image_open_block", make_export_image, 512 + 37, rows);
  add("snapshot/fork_open_block", make_fork, 512 + 37, rows);
  add("snapshot/export_blocks", make_export_blocks, 2048, rows);
  struct Variant {
    const char* name;
    BlockWork work;
  };
  for (const Arrangement arrangement : {Arrangement::block_major, Arrangement::layer_major}) {
    CacheOptions options;
    options.arrangement = arrangement;
    for (const Variant& v :
         {Variant{"copy", BlockWork::copy}, Variant{"save", BlockWork::save}, Variant{"load", BlockWork::load}}) {
      cases.push_back({fmt::format("block/{}/{}", v.name, to_string(arrangement)), "block",
                       [=] { return make_block(settings, v.work, options); }});
    }
  }
}

}  // namespace kv4::bench
