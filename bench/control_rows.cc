// The cost of a whole V4-Flash decode step besides attention: launches, all appends in one graph, host time.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "checks/touched_bytes.h"
#include "gpu_cache.h"

namespace kv4::bench {
namespace {

constexpr int kUpdateLaunches = 2;  // of prepare_forward: one memcpy, one kernel; not captured, because the size varies

void add_launches(Bench& bench) {
  constexpr int kBatch = 64, kLength = 255;
  CacheOptions options;
  options.max_requests = options.spare_slots = kBatch;
  options.max_context = 2 * kLength;
  options.num_blocks = 3 * kBatch;
  options.max_step_tokens = kBatch * kLength;
  GpuCache cache(bench, model_preset("v4-flash"), options);
  cache.admit(kBatch);
  cache.extend(kLength);
  const Step step = cache.prepare(kBatch, 1);
  std::vector<AppendInputs> inputs;
  std::int64_t bytes = 0;
  for (const LayerCacheSchema& layer : cache.schema().layers) {
    inputs.push_back(cache.next_inputs(layer.spec.layer, kBatch));
    bytes += kBatch * checks::append_bytes(layer, kLength, 1);
  }
  const auto append_all = [&] {
    for (std::size_t i = 0; i < inputs.size(); ++i)
      cache.manager().acquire(cache.schema().layers[i].spec.layer).append(inputs[i]);
  };
  Row launches;
  launches.name = "launches of a V4-Flash decode step";
  launches.count = static_cast<double>(bench.timer.count_nodes(append_all) + kUpdateLaunches);
  launches.aim = {Aim::Kind::most_count, 45};
  launches.note = fmt::format("nodes of {} appends, and {} for the step's tables", inputs.size(), kUpdateLaunches);
  bench.add(launches);
  Row row;
  row.name = fmt::format("all {} appends of a step, b={}, all due", inputs.size(), kBatch);
  row.us = bench.timer.replay_us(append_all, [&] { cache.restore_marks(); });
  row.bytes = bytes;
  row.floor_us = std::max(bench.copy_us(bytes), bench.empty_us * static_cast<double>(inputs.size()));
  bench.add(row);
  cache.manager().abort(step);
}

void add_host(Bench& bench) {
  constexpr int kBatch = 256, kSteps = 256, kSpread = 128;
  CacheOptions options;
  options.max_requests = kBatch;
  options.max_context = 2048;
  options.num_blocks = kBatch * 16;
  options.max_step_tokens = 2 * kBatch;
  GpuCache cache(bench, model_preset("v4-flash"), options);
  cache.admit(kBatch);
  // Lengths are spread over a block, so that in every step some requests begin a block.
  const std::vector<std::int32_t> ids(kBatch, 7);
  KVCacheManager& manager = cache.manager();
  for (int i = 0; i < kBatch; ++i) {
    const auto request = cache.requests()[i];
    const StepItem item{request, 1 + i % kSpread, std::span(ids).first(1 + i % kSpread), -1};
    manager.commit(manager.prepare_forward(std::span(&item, 1)).value());
  }
  manager.synchronize();
  std::vector<StepItem> items;
  for (int i = 0; i < kBatch; ++i) items.push_back({cache.requests()[i], 1, std::span(ids).subspan(i, 1), -1});
  std::vector<double> times;
  for (int i = 0; i < kSteps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    manager.commit(manager.prepare_forward(items).value());
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  manager.synchronize();
  std::sort(times.begin(), times.end());
  Row row;
  row.name = fmt::format("prepare_forward + commit, {} requests, host", kBatch);
  row.us = times[times.size() / 2];
  row.aim = {Aim::Kind::most_us, 150};
  row.note = fmt::format("wall clock, no wait; 99 % below {:.0f} us", times[times.size() * 99 / 100]);
  bench.add(row);
}

}  // namespace

void add_control_rows(Bench& bench) {
  add_launches(bench);
  add_host(bench);
}

}  // namespace kv4::bench
