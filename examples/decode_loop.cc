// A request's life in the cache: prefill in chunks, decode with drafts, reject some, fork, release.
// A counter replaces the attention layer's projections; an engine passes its own tensors.
#include <cstdio>
#include <vector>

#include "kv4/kv_cache_manager.h"

int main() {
  // One layer of each kind at V4's real sizes; kv4::model_preset("v4-flash") has all 43.
  kv4::ModelConfig model = kv4::model_preset("v4-flash");
  model.kinds = {kv4::LayerKind::swa, kv4::LayerKind::csa, kv4::LayerKind::hca};
  model.num_layers = 3;

  kv4::CacheOptions options;
  options.max_requests = 4;
  options.max_context = 4096;
  options.max_rewind_tokens = 4;  // how many draft tokens may be rejected
  kv4::KVCacheManager cache(model, options);

  // Compressor constants of a layer: bound once, read at every append.
  const std::vector<float> bias(128 * 1024, 0.0f), norm(512, 1.0f);
  cache.bind_weights(1,
                     {{bias.data(), {4, 1024}}, {norm.data(), {512}}, {bias.data(), {4, 256}}, {norm.data(), {128}}});
  cache.bind_weights(2, {{bias.data(), {128, 512}}, {norm.data(), {512}}, {}, {}});

  // The next `count` tokens of a request through all layers.
  const auto forward = [&](kv4::RequestId request, int count) {
    const std::vector<int> token_ids(static_cast<std::size_t>(count), 42);
    const kv4::StepItem item{request, count, token_ids};
    const kv4::Expected<kv4::Step> step = cache.prepare_forward({&item, 1});
    if (!step) return false;  // no room: nothing has changed; wait, or preempt somebody
    std::vector<float> row(static_cast<std::size_t>(count) * 1024);
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(i % 97) / 97.0f;
    const kv4::TensorView wide(row.data(), {count, 1024}), narrow(row.data(), {count, 512}),
        index(row.data(), {count, 256});
    cache.acquire(0).append({narrow, {}, {}, {}, {}});
    cache.acquire(1).append({narrow, wide, wide, index, index});
    cache.acquire(2).append({narrow, narrow, narrow, {}, {}});
    // Results of the layers: the best entries by 2 index heads, and attention of 2 query heads.
    std::vector<float> q(static_cast<std::size_t>(count) * 1024, 0.1f), out(q.size());
    std::vector<std::int32_t> best(static_cast<std::size_t>(count) * 16);
    const kv4::TensorView topk(best.data(), {count, 16}), queries(q.data(), {count, 2, 512}),
        result(out.data(), {count, 2, 512});
    cache.acquire(0).attend({.q = queries}, result);
    cache.acquire(1).index_topk({{q.data(), {count, 2, 128}}, {}, {q.data(), {count, 2}}}, topk);
    cache.acquire(1).attend({.q = queries, .topk = topk}, result);
    cache.acquire(2).attend({.q = queries}, result);
    cache.commit(*step);
    return true;
  };

  const kv4::RequestId request = cache.admit().value();
  for (int chunk : {500, 300, 1}) forward(request, chunk);
  forward(request, 4);         // a decoded token and three drafts
  cache.rewind(request, 803);  // two drafts were wrong; their rows are removed
  const kv4::RequestId branch = cache.fork(request).value();
  forward(branch, 1);

  const kv4::CanonicalImage image = cache.export_image(request);
  std::printf("request: %lld tokens, %zu blocks, state image %zu bytes; branch: %lld tokens\n",
              static_cast<long long>(cache.length(request)), cache.blocks(request).size(), image.bytes.size(),
              static_cast<long long>(cache.length(branch)));
  std::printf("blocks held %d of %d (full blocks are shared), %.1f MB in all\n", cache.allocator().num_held(),
              cache.allocator().num_blocks(), static_cast<double>(cache.memory_bytes()) / 1e6);
  cache.release(branch);
  cache.release(request);
  return cache.allocator().num_held() == 0 ? 0 : 1;
}
