// A context that survives a restart: saved at any length, restored in another cache and continued there.
//
//   keep_context [FILE [KEYS]]      FILE is left behind for 'kv4 session inspect'; KEYS: a file of cache keys
#include <cstdio>
#include <string>
#include <vector>

#include "kv4/session.h"

namespace {

// One layer of each kind at V4's real sizes; a counter replaces the layers' projections.
struct Engine {
  std::vector<float> bias = std::vector<float>(128 * 1024, 0.0f), norm = std::vector<float>(512, 1.0f);
  kv4::KVCacheManager cache;

  explicit Engine(const kv4::CacheOptions& options) : cache(model(), options) {
    cache.bind_weights(1,
                       {{bias.data(), {4, 1024}}, {norm.data(), {512}}, {bias.data(), {4, 256}}, {norm.data(), {128}}});
    cache.bind_weights(2, {{bias.data(), {128, 512}}, {norm.data(), {512}}, {}, {}});
  }

  static kv4::ModelConfig model() {
    kv4::ModelConfig model = kv4::model_preset("v4-flash");
    model.kinds = {kv4::LayerKind::swa, kv4::LayerKind::csa, kv4::LayerKind::hca};
    model.num_layers = 3;
    return model;
  }

  void forward(kv4::RequestId request, int count) {
    std::vector<std::int32_t> token_ids;
    std::vector<float> row(static_cast<std::size_t>(count) * 1024);
    for (int i = 0; i < count; ++i) token_ids.push_back(static_cast<std::int32_t>(cache.length(request)) + i);
    for (std::size_t i = 0; i < row.size(); ++i)
      row[i] = static_cast<float>((i + static_cast<std::size_t>(token_ids[i / 1024])) % 97) / 97.0f;
    const kv4::StepItem item{request, count, token_ids};
    const kv4::Step step = cache.prepare_forward({&item, 1}).value();
    const kv4::TensorView wide(row.data(), {count, 1024}), narrow(row.data(), {count, 512}),
        index(row.data(), {count, 256});
    cache.acquire(0).append({narrow, {}, {}, {}, {}});
    cache.acquire(1).append({narrow, wide, wide, index, index});
    cache.acquire(2).append({narrow, narrow, narrow, {}, {}});
    cache.commit(step);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : "keep_context.kv4s";
  // The salt keeps tenants apart. Only a key seals a session and authenticates its writer.
  kv4::SessionIdentity identity{.weights_id = "example weights 1", .salt = "tenant 17"};
  if (argc > 2) identity.keys = kv4::read_key_file(argv[2]);
  kv4::CacheOptions options;
  options.max_requests = 2;
  options.max_context = 4096;

  Engine before(options);
  const kv4::RequestId request = before.cache.admit().value();
  before.forward(request, 500);
  before.forward(request, 301);
  kv4::save_session_file(before.cache, request, identity, path);

  // Another process, another machine, a GPU: any cache of the same model and formats.
  options.arrangement = kv4::Arrangement::layer_major;
  Engine after(options);
  const kv4::Expected<kv4::RequestId> restored = kv4::restore_session_file(after.cache, identity, path);
  if (!restored) {
    std::printf("no room: not enough %s\n", kv4::to_string(restored.error()));
    return 1;
  }

  for (int i = 0; i < 20; ++i) {
    before.forward(request, 1);
    after.forward(*restored, 1);
  }
  const bool same = before.cache.export_image(request) == after.cache.export_image(*restored) &&
                    before.cache.export_blocks(request) == after.cache.export_blocks(*restored);
  std::printf("%s: saved at 801 tokens, continued to %lld: the bytes are %s\n", path.c_str(),
              static_cast<long long>(after.cache.length(*restored)), same ? "the same" : "DIFFERENT");
  if (argc < 2) std::remove(path.c_str());
  return same ? 0 : 1;
}
