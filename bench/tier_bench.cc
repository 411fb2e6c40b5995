// Contexts of V4-Flash through the tiers, beside the disk's and the bus's own speed in the same run.
//
//   kv4_tier_bench DIR [cpu|cuda] [BLOCKS] [ROUNDS] [PART...]
//
// DIR: folder for its files, which it removes. BLOCKS of 128 tokens; 1024 is a context of 128K. PART: lookups, disk,
// host, steps (cuda only); all if none is given.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "backend/device_memory.h"
#include "base/check.h"
#include "kv4/host_memory.h"
#include "kv4/tiered_prefix.h"
#include "prefix/block_hash.h"
#include "tier/file_system.h"
#include "tier/record_format.h"
#include "tier/segment_file.h"
#include "tier/tiers_impl.h"

namespace kv4::bench {
namespace {

using namespace std::chrono_literals;

constexpr int kDepth = 32, kBlockTokens = 128;

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
tier::Deadline later() { return std::chrono::steady_clock::now() + 600s; }

double at_share(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

struct Bench {
  std::string directory;
  std::shared_ptr<Backend> backend;
  std::int64_t blocks = 1024;
  int rounds = 3;
  std::vector<std::int32_t> token_ids;

  CacheOptions options() const {
    CacheOptions o;
    o.max_requests = 10;
    o.max_context = (blocks + 16) * kBlockTokens;
    o.num_blocks = blocks + 256;
    o.max_step_tokens = 512;
    o.prefix.enabled = true;
    o.prefix.num_snapshots = 16;
    return o;
  }
  Prompt prompt() const { return {token_ids, 0, "", {}}; }
};

/// Puts records with random bytes into the tiers: the prompt's blocks and the snapshot at its end.
void fill(const Bench& bench, KVCacheManager& cache, Tiers& tiers) {
  std::vector<std::byte> payload(std::max(cache.snapshot_bytes(), cache.schema().block_image_bytes));
  std::mt19937_64 random(1);
  for (std::byte& b : payload) b = static_cast<std::byte>(random());
  tier::TierChain& chain = Tiers::Impl::of(tiers).chain;
  const auto put = [&](const BlockKey& key, std::int64_t bytes) {
    tier::RecordId id;
    std::memcpy(id.key.data(), key.data(), key.size());
    while (chain.put(id, std::span(payload).first(bytes), tier::Content::of_key) == 0) {
      (void)chain.poll();
      std::this_thread::sleep_for(1ms);
    }
    (void)chain.poll();
  };
  const std::vector<BlockKey> keys = cache.block_keys(bench.prompt());
  for (const BlockKey& key : keys) put(key, cache.schema().block_image_bytes);
  put(BlockHasher().snapshot(keys.back()), cache.snapshot_bytes());
  for (const tier::FlushStatus status : tiers.flush(later()))
    require(status != tier::FlushStatus::failed, ErrorCode::bad_file, "the tiers could not be filled");
}

/// Bytes per second of loading the whole prompt into an empty cache.
double load(const Bench& bench, Tiers& tiers) {
  KVCacheManager cache(model_preset("v4-flash"), bench.options(), bench.backend);
  TieredPrefix tiered(cache, tiers);
  cache.synchronize();
  const double start = now_s();
  const std::int64_t brought = tiered.load(bench.prompt(), later());
  cache.synchronize();
  const double seconds = now_s() - start;
  require(brought == bench.blocks && tiered.statistics().loaded_snapshots == 1, ErrorCode::bad_file,
          "{} of {} blocks came, {} snapshots", brought, bench.blocks, tiered.statistics().loaded_snapshots);
  return static_cast<double>(bench.blocks * cache.schema().block_image_bytes + cache.snapshot_bytes()) / seconds;
}

/// Bytes per second of plain reads of a record's size, spread over the store's files.
double read_plainly(const std::string& store, std::int64_t bytes_at_once, std::int64_t count) {
  const auto files = tier::make_posix_file_system();
  std::vector<tier::Opened<tier::File>> opened;
  std::vector<std::pair<tier::File*, std::int64_t>> places;
  for (const std::string& name : files->list(store).names) {
    if (!tier::parse_segment_name(name)) continue;
    opened.push_back(files->open(store + "/" + name, tier::OpenMode::read));
    tier::File& file = *opened.back().handle;
    for (std::int64_t at = 8192; at + bytes_at_once <= file.size() && std::ssize(places) < count; at += bytes_at_once)
      places.emplace_back(&file, at);
  }
  const auto queue = files->make_queue(kDepth, nullptr);
  tier::BlockBuffer memory;
  const std::span<std::byte> room = memory.get((kDepth + 1) * bytes_at_once);
  std::fill(room.begin(), room.end(), std::byte{0});  // touches the pages before the clock runs
  std::vector<tier::IoOp> ops(kDepth + 1);
  std::vector<std::size_t> free;
  for (std::size_t i = 0; i < ops.size(); ++i) free.push_back(i);
  std::size_t next = 0;
  const double start = now_s();
  tier::run_transfers(
      *queue,
      [&]() -> tier::IoOp* {
        if (next == places.size() || free.empty()) return nullptr;
        const std::size_t i = free.back();
        free.pop_back();
        const auto& [file, offset] = places[next++];
        std::byte* const to = room.data() + static_cast<std::int64_t>(i) * bytes_at_once;
        ops[i] = {file, tier::IoOp::Kind::read, offset, {{to, static_cast<std::size_t>(bytes_at_once)}}, {}, false};
        return &ops[i];
      },
      [&](tier::IoOp& op) { free.push_back(&op - ops.data()); });
  return static_cast<double>(std::ssize(places) * bytes_at_once) / (now_s() - start);
}

void bench_disk(const Bench& bench) {
  TiersOptions options;
  options.directory = bench.directory + "/store";
  KVCacheManager cache(model_preset("v4-flash"), bench.options(), bench.backend);
  const std::int64_t bytes = cache.schema().block_image_bytes;
  {
    Tiers tiers(cache.schema(), options);
    fill(bench, cache, tiers);
  }
  struct Speeds {
    std::vector<double> loads, plain, ratios;
  };
  std::map<int, Speeds> by_threads{{1, {}}, {2, {}}, {4, {}}};
  for (int i = 0; i < bench.rounds; ++i)
    for (auto& [threads, speeds] : by_threads) {
      speeds.plain.push_back(read_plainly(options.directory, tier::stored_bytes(bytes), bench.blocks));
      options.disk_threads = threads;
      Tiers tiers(cache.schema(), options);
      speeds.loads.push_back(load(bench, tiers));
      speeds.ratios.push_back(speeds.loads.back() / speeds.plain.back());
    }
  for (const auto& [threads, speeds] : by_threads)
    fmt::print("from disk, {} threads: {:.0f} MB/s, the disk itself {:.0f}, ratio {:.2f} ({:.2f} to {:.2f})\n", threads,
               at_share(speeds.loads, 0.5) * 1e-6, at_share(speeds.plain, 0.5) * 1e-6, at_share(speeds.ratios, 0.5),
               at_share(speeds.ratios, 0), at_share(speeds.ratios, 1));
}

/// Bytes per second of transfers from pinned memory, one block each.
double copy_plainly(const Bench& bench, std::int64_t bytes) {
  const HostMemory host(bench.backend, bench.blocks * bytes);
  std::fill(host.bytes().begin(), host.bytes().end(), std::byte{1});
  const DeviceMemory device(bench.backend, bench.blocks * bytes);
  bench.backend->synchronize();
  std::vector<ops::CopyPiece> pieces;
  for (std::int64_t i = 0; i < bench.blocks; ++i)
    pieces.push_back({reinterpret_cast<const std::uint8_t*>(host.bytes().data()) + i * bytes,
                      reinterpret_cast<std::uint8_t*>(device.data()) + i * bytes, bytes});
  const double start = now_s();
  const std::int64_t ticket = bench.backend->transfer_in(pieces);
  while (!bench.backend->transferred(ticket)) continue;
  return static_cast<double>(bench.blocks * bytes) / (now_s() - start);
}

void bench_host(const Bench& bench) {
  for (const int threads : {1, 4, 8, 15}) {
    TiersOptions options;
    options.host_threads = threads;
    options.backend = bench.backend;
    options.host_bytes = (bench.blocks + 16) * (std::int64_t{480} << 10);
    KVCacheManager cache(model_preset("v4-flash"), bench.options(), bench.backend);
    const std::int64_t bytes = cache.schema().block_image_bytes;
    Tiers tiers(cache.schema(), options);
    fill(bench, cache, tiers);
    std::vector<double> speeds, plain, ratios;
    for (int i = 0; i < bench.rounds; ++i) {
      plain.push_back(copy_plainly(bench, bytes));
      speeds.push_back(load(bench, tiers));
      ratios.push_back(speeds.back() / plain.back());
    }
    fmt::print("from host memory, {} threads: {:.1f} GB/s, a pinned copy {:.1f}, ratio {:.2f} ({:.2f} to {:.2f})\n",
               threads, at_share(speeds, 0.5) * 1e-9, at_share(plain, 0.5) * 1e-9, at_share(ratios, 0.5),
               at_share(ratios, 0), at_share(ratios, 1));
  }
}

/// Times of lookups and gets while a disk tier writes continuously.
void bench_lookups(const Bench& bench) {
  TiersOptions options;
  options.directory = bench.directory + "/lookups";
  KVCacheManager cache(model_preset("v4-flash"), bench.options(), bench.backend);
  const std::int64_t bytes = cache.schema().block_image_bytes;
  Tiers tiers(cache.schema(), options);
  const std::vector<BlockKey> keys = cache.block_keys(bench.prompt());
  const auto id_of = [](std::uint64_t number) {
    tier::RecordId id{1, {}};
    std::mt19937_64 random(number);
    for (std::byte& b : id.key) b = static_cast<std::byte>(random());
    return id;
  };
  const std::vector<std::byte> payload(bytes, std::byte{3});
  tier::TierChain& chain = Tiers::Impl::of(tiers).chain;
  chain.put(id_of(0), payload, tier::Content::of_key);
  (void)tiers.flush(later());
  std::vector<double> known_us, get_us;
  std::uint64_t next = 1;
  for (const double end = now_s() + 4; now_s() < end;) {
    for (int i = 0; i < 64 && chain.put(id_of(next), payload, tier::Content::of_key) > 0; ++i) ++next;
    (void)chain.poll();
    const tier::RecordId wanted[] = {id_of(0), id_of(1u << 30)};
    double start = now_s();
    tier::TierChain::Ticket known = chain.exists(wanted, later());
    (void)known.wait(later());
    known_us.push_back((now_s() - start) * 1e6);
    start = now_s();
    tier::TierChain::Ticket got = chain.get({{wanted[0], bytes, {}}}, tier::Content::of_key, later());
    (void)got.wait(later());
    get_us.push_back((now_s() - start) * 1e6);
  }
  fmt::print(
      "while {:.0f} MB/s are written: a lookup {:.1f} us (p99 {:.1f}), a get of a block {:.0f} us (p99 {:.0f})\n",
      static_cast<double>(next * static_cast<std::uint64_t>(bytes)) / 4e6, at_share(known_us, 0.5),
      at_share(known_us, 0.99), at_share(get_us, 0.5), at_share(get_us, 0.99));
}

/// Decode steps of eight requests, with and without blocks leaving the device at the same time.
void bench_steps(const Bench& bench) {
  constexpr int kRequests = 8;
  TiersOptions options;
  options.host_bytes = (bench.blocks + 16) * (std::int64_t{480} << 10);
  options.directory = bench.directory + "/steps";
  KVCacheManager cache(model_preset("v4-flash"), bench.options(), bench.backend);
  const DeviceMemory zeros(bench.backend, std::int64_t{512} * 1024 * 4);
  const auto tensor = [&](std::int64_t rows, std::int64_t width) {
    return ConstTensorView(reinterpret_cast<const float*>(zeros.data()), {rows, width});
  };
  const ConstTensorView norm(reinterpret_cast<const float*>(zeros.data()), {512}),
      index_norm(reinterpret_cast<const float*>(zeros.data()), {128});
  for (const LayerCacheSchema& layer : cache.schema().layers) {
    if (layer.spec.kind == LayerKind::csa)
      cache.bind_weights(layer.spec.layer, {tensor(4, 1024), norm, tensor(4, 256), index_norm});
    if (layer.spec.kind == LayerKind::hca) cache.bind_weights(layer.spec.layer, {tensor(128, 512), norm, {}, {}});
  }
  const auto step = [&](std::span<const StepItem> items, std::int64_t tokens) {
    const Step open = cache.prepare_forward(items).value();
    for (const LayerCacheSchema& layer : cache.schema().layers) {
      const ConstTensorView narrow = tensor(tokens, 512), wide = tensor(tokens, 1024), index = tensor(tokens, 256);
      LayerCacheHandle handle = cache.acquire(layer.spec.layer);
      switch (layer.spec.kind) {
        case LayerKind::swa: handle.append({narrow, {}, {}, {}, {}}); break;
        case LayerKind::csa: handle.append({narrow, wide, wide, index, index}); break;
        case LayerKind::hca: handle.append({narrow, narrow, narrow, {}, {}}); break;
        case LayerKind::shared: break;  // no cache of such a model runs
      }
    }
    cache.commit(open);
  };
  Tiers tiers(cache.schema(), options);
  TieredPrefix tiered(cache, tiers);
  std::vector<std::int32_t> ids = bench.token_ids;
  const auto fill_again = [&](std::int32_t number) {  // with blocks that no tier has
    ids[0] = -number;
    const RequestId request = cache.admit(Prompt{ids, 0, "", {}}).value().request;
    for (std::int64_t at = 0; at < bench.blocks * kBlockTokens; at += 512) {
      const StepItem item{request, 512, std::span(ids).subspan(at, 512)};
      step({&item, 1}, 512);
    }
    cache.release(request);
    cache.synchronize();
  };
  std::vector<RequestId> requests;
  for (int i = 0; i < kRequests; ++i) requests.push_back(cache.admit().value());
  const std::int32_t token = 5;
  const auto decode = [&](std::vector<double>& times) {
    std::vector<StepItem> items;
    for (const RequestId request : requests) items.push_back({request, 1, std::span(&token, 1)});
    const double start = now_s();
    step(items, kRequests);
    cache.synchronize();
    times.push_back((now_s() - start) * 1e6);
  };
  std::vector<double> warm, without, with, saves;
  for (int i = 0; i < 100; ++i) decode(warm);
  for (int round = 1; round <= 4; ++round) {
    fill_again(round);
    for (int i = 0; i < 400; ++i) decode(without);
    for (int i = 0; i < 400; ++i) {
      const double start = now_s();
      (void)tiered.save(2);
      saves.push_back((now_s() - start) * 1e6);
      decode(with);
    }
  }
  fmt::print(
      "a decode step of {}: {:.0f} us (p99 {:.0f}); with write-behind {:.0f} (p99 {:.0f}), p99 ratio {:.2f}; a "
      "save() between them {:.0f} us (p99 {:.0f}), {} blocks offered\n",
      kRequests, at_share(without, 0.5), at_share(without, 0.99), at_share(with, 0.5), at_share(with, 0.99),
      at_share(with, 0.99) / at_share(without, 0.99), at_share(saves, 0.5), at_share(saves, 0.99),
      tiered.statistics().offered_blocks);
}

}  // namespace
}  // namespace kv4::bench

int main(int argc, char** argv) {
  using namespace kv4;
  bench::Bench bench;
  const std::set<std::string_view> known{"lookups", "disk", "host", "steps"};
  if (argc < 2 ||
      !std::all_of(argv + std::min(argc, 5), argv + argc, [&](auto part) { return known.contains(part); })) {
    fmt::print("usage: kv4_tier_bench DIR [cpu|cuda] [BLOCKS] [ROUNDS] [lookups|disk|host|steps]...\n");
    return 2;
  }
  const bool cuda = argc > 2 && std::string(argv[2]) == "cuda";
  bench.directory = std::string(argv[1]) + "/kv4_tier_bench";
  if (argc > 3) bench.blocks = std::stoll(argv[3]);
  if (argc > 4) bench.rounds = std::stoi(argv[4]);
  bench.backend = cuda ? make_cuda_backend() : make_cpu_backend();
  for (std::int64_t i = 0; i <= bench.blocks * bench::kBlockTokens; ++i)
    bench.token_ids.push_back(static_cast<std::int32_t>(i * 7 % 1000));
  const std::vector<std::string_view> parts(argv + std::min(argc, 5), argv + argc);
  const auto wanted = [&](std::string_view part) {
    return parts.empty() || std::find(parts.begin(), parts.end(), part) != parts.end();
  };
  std::filesystem::create_directories(bench.directory);
  try {
    if (wanted("lookups")) bench::bench_lookups(bench);
    if (wanted("disk")) bench::bench_disk(bench);
    if (wanted("host")) bench::bench_host(bench);
    if (wanted("steps") && cuda) bench::bench_steps(bench);
  } catch (const std::exception& error) {
    fmt::print("{}\n", error.what());
    return 1;
  }
  std::filesystem::remove_all(bench.directory);
  return 0;
}
