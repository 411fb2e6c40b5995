// A small case of all three layer kinds, chunks and decodes, on the GPU and on the CPU.
#include <fmt/format.h>

#include <algorithm>

#include "checks/inputs.h"
#include "gpu_bench.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::bench {
namespace {

struct Exported {
  std::vector<CanonicalImage> images;
  std::vector<std::vector<std::byte>> blocks;
};

Exported play(const ModelConfig& config, const std::shared_ptr<Backend>& backend) {
  const checks::InputGenerator generator(3);
  CacheOptions options;
  options.max_requests = options.spare_slots = 2;
  options.max_context = 512;
  options.max_step_tokens = 256;
  checks::DeviceTensors bound(backend), tensors(backend);
  KVCacheManager manager(config, options, backend);
  const checks::SeededWeights weights(manager.schema(), generator);
  weights.bind(manager, bound);
  const RequestId requests[] = {manager.admit().value(), manager.admit().value()};
  std::int64_t lengths[] = {0, 0};
  struct Chunk {
    int counts[2];
  };
  for (const Chunk& chunk : {Chunk{{150, 100}}, Chunk{{1, 27}}, Chunk{{103, 1}}, Chunk{{1, 1}}, Chunk{{1, 1}},
                             Chunk{{1, 1}}, Chunk{{1, 1}}}) {
    std::vector<checks::TokenRef> tokens;
    std::vector<std::int32_t> ids(256, 7);
    std::vector<StepItem> items;
    for (std::size_t r = 0; r < 2; ++r) {
      for (int t = 0; t < chunk.counts[r]; ++t) tokens.push_back({r, lengths[r] + t});
      items.push_back({requests[r], chunk.counts[r], std::span(ids).first(chunk.counts[r]), -1});
      lengths[r] += chunk.counts[r];
    }
    const Step step = manager.prepare_forward(items).value();
    for (const LayerCacheSchema& layer : manager.schema().layers) {
      checks::LayerInputs inputs(layer, step.num_tokens);
      inputs.fill(generator, layer.spec.layer, tokens);
      manager.acquire(layer.spec.layer).append(tensors.in(inputs.view(step.num_tokens)));
    }
    manager.commit(step);
    tensors.clear();
  }
  Exported out;
  for (const RequestId request : requests) {
    out.images.push_back(manager.export_image(request));
    out.blocks.push_back(manager.export_blocks(request));
  }
  return out;
}

std::int64_t differing(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  std::int64_t count = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += a[i] != b[i] ? 1 : 0;
  return count;
}

}  // namespace

void add_parity_row(Bench& bench) {
  ModelConfig config = model_preset("v4-flash");
  config.kinds = {LayerKind::swa, LayerKind::csa, LayerKind::hca};
  config.num_layers = 3;
  config.draft_hint = 0;
  const Exported gpu = play(config, bench.backend), cpu = play(config, make_cpu_backend());
  std::int64_t count = 0, compared = 0;
  for (std::size_t r = 0; r < cpu.images.size(); ++r) {
    count += differing(gpu.images[r].bytes, cpu.images[r].bytes) + differing(gpu.blocks[r], cpu.blocks[r]);
    compared += static_cast<std::int64_t>(cpu.images[r].bytes.size() + cpu.blocks[r].size());
  }
  Row row;
  row.name = "bytes that differ from the CPU's";
  row.count = static_cast<double>(count);
  row.aim = {Aim::Kind::most_count, 0};
  row.note = fmt::format("of {}: 3 layers, 2 requests, image and blocks", compared);
  if (count != 0) row.failure = fmt::format("{} of {} bytes differ from the CPU backend's", count, compared);
  bench.add(row);
}

}  // namespace kv4::bench
