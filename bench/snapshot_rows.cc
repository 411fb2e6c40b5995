// Images and blocks of all of V4-Flash: packing on the device alone, and whole calls timed by the host.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "backend/backend.h"
#include "backend/image_pieces.h"
#include "device_kernels.h"
#include "gpu_cache.h"
#include "kv4/cuda.h"
#include "kv4/host_memory.h"
#include "ops/layer_desc.h"

namespace kv4::bench {
namespace {

constexpr double kShare = 0.9;
constexpr std::int64_t kLength = 512;
constexpr std::size_t kUploadBytes = std::size_t{64} << 10;   // kPieceListBytes of runtime/cuda_backend.cc
constexpr std::int64_t kPieceBytes = std::int64_t{16} << 10;  // likewise

double since_us(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<ops::LayerDesc> describe_all(GpuCache& cache) {
  const StateCachePool& pool = cache.manager().state_pool();
  std::vector<ops::LayerDesc> out;
  for (std::size_t i = 0; i < cache.schema().layers.size(); ++i)
    out.push_back(ops::describe_layer(
        cache.schema(), static_cast<int>(i),
        {nullptr, pool.base(), pool.fold_watermarks(), pool.undo_rows(), pool.undo_positions(), nullptr}));
  return out;
}

/// A list of pieces as the backend launches it: a short list on the host; a long one in cut pieces on the device.
struct PieceList {
  std::vector<ops::CopyPiece> few;
  const ops::CopyPiece* many = nullptr;
  std::int32_t count = 0;
  std::int64_t bytes = 0;
};

PieceList upload(checks::DeviceTensors& tensors, std::vector<ops::CopyPiece> pieces) {
  PieceList out;
  for (const ops::CopyPiece& piece : pieces) out.bytes += piece.bytes;
  if (pieces.size() <= cuda::kMostFewPieces) {
    out.few = std::move(pieces);
    return out;
  }
  pieces = cut_pieces(pieces, kPieceBytes);
  out.count = static_cast<std::int32_t>(pieces.size());
  const auto bytes = static_cast<std::int64_t>(pieces.size() * sizeof(ops::CopyPiece));
  out.many = static_cast<const ops::CopyPiece*>(tensors.in(TensorView(pieces.data(), DType::u8, {bytes})).data);
  return out;
}

// Runs lists one after another in a graph; returns microseconds per list.
double copy_lists_us(Bench& bench, const std::vector<PieceList>& lists) {
  return bench.timer.replay_us([&] {
    for (const PieceList& list : lists)
      check(list.many == nullptr ? cuda::copy_few_pieces(list.few, bench.timer.stream())
                                 : cuda::copy_pieces(list.many, list.count, kPieceBytes, bench.timer.stream()),
            "a list of pieces");
  }) / static_cast<double>(lists.size());
}

// The same number of plain copies of `bytes` each, from one half of a buffer to the other.
double plain_us(Bench& bench, std::int64_t bytes, int count) {
  const std::int64_t stride = (bytes + 255) / 256 * 256;
  const DeviceMemory memory(bench.backend, 2 * stride * count);
  check(fill_normal_f32(reinterpret_cast<float*>(memory.data()), stride * count / 4, 7, bench.timer.stream()),
        "fill_normal");
  return bench.timer.replay_us([&] {
    for (int i = 0; i < count; ++i)
      bench.backend->copy(memory.data() + (count + i) * stride, memory.data() + i * stride, bytes);
  }) / count;
}

void add_copies(Bench& bench, const std::string& name, double us, std::int64_t touched, double same_size_us) {
  Row row;
  row.name = name;
  row.us = us;
  row.bytes = touched;
  row.floor_us = same_size_us > 0 ? same_size_us : bench.copy_us(touched);
  row.aim = {Aim::Kind::least_share, kShare};
  row.note = same_size_us > 0 ? fmt::format("floor: a plain copy of that size; {:.0f} % of copy speed",
                                            100 * bench.copy_us(touched) / us)
                              : "";
  bench.add(row);
}

void add_images(Bench& bench, GpuCache& cache) {
  const int count = static_cast<int>(cache.requests().size());
  const std::vector<ops::LayerDesc> layers = describe_all(cache);
  const std::vector<std::int64_t> lengths{kLength};
  const ImageLayout layout = image_layout(cache.schema(), lengths);
  const DeviceMemory images(bench.backend, layout.bytes * count);
  checks::DeviceTensors lists(bench.backend);
  std::vector<PieceList> out, in;
  std::size_t pieces_out = 0, pieces_in = 0;
  for (std::int32_t slot = 0; slot < count; ++slot) {
    auto* const image = reinterpret_cast<std::uint8_t*>(images.data()) + slot * layout.bytes;
    const std::vector<ops::CopyPiece> to = pieces_to_image(layers, layout, slot, image),
                                      from = pieces_from_image(layers, layout, slot, image);
    pieces_out = to.size(), pieces_in = from.size();
    out.push_back(upload(lists, to));
    in.push_back(upload(lists, from));
  }
  const double same_size_us = plain_us(bench, layout.bytes, count);
  add_copies(bench, fmt::format("pack an image, {} pieces cut into {}", pieces_out, out[0].count),
             copy_lists_us(bench, out), 2 * out[0].bytes, same_size_us);
  add_copies(bench, fmt::format("unpack an image, {} pieces cut into {}", pieces_in, in[0].count),
             copy_lists_us(bench, in), 2 * in[0].bytes, same_size_us);
}

void add_calls(Bench& bench, GpuCache& cache) {
  KVCacheManager& manager = cache.manager();
  CanonicalImage image;
  std::vector<double> exports, block_exports, imports, forks, pinned_exports, pinned_block_exports, pinned_imports;
  std::vector<std::byte> blocks;
  std::optional<HostMemory> pinned;
  const std::vector<std::int32_t> token_ids(kLength, 7);
  for (std::size_t i = 0; i < std::min<std::size_t>(12, cache.requests().size()); ++i) {
    const RequestId request = cache.requests()[i];
    manager.synchronize();
    auto start = std::chrono::steady_clock::now();
    image = manager.export_image(request);
    exports.push_back(since_us(start));
    start = std::chrono::steady_clock::now();
    blocks = manager.export_blocks(request);
    block_exports.push_back(since_us(start));
    start = std::chrono::steady_clock::now();
    const RequestId copy = manager.import_image(image, token_ids, blocks).value();
    manager.synchronize();
    imports.push_back(since_us(start));
    start = std::chrono::steady_clock::now();
    const RequestId child = manager.fork(copy).value();
    manager.synchronize();
    forks.push_back(since_us(start));
    manager.release(child);
    manager.release(copy);
    if (!pinned) pinned.emplace(bench.backend, static_cast<std::int64_t>(image.bytes.size() + blocks.size()));
    const std::span<std::byte> pinned_image = pinned->bytes().first(image.bytes.size()),
                               pinned_blocks = pinned->bytes().subspan(image.bytes.size());
    start = std::chrono::steady_clock::now();
    manager.export_image(request, pinned_image);
    pinned_exports.push_back(since_us(start));
    start = std::chrono::steady_clock::now();
    manager.export_blocks(request, pinned_blocks);
    pinned_block_exports.push_back(since_us(start));
    const ImageView view(image.layout_id, image.lengths, pinned_image);
    start = std::chrono::steady_clock::now();
    const RequestId again = manager.import_image(view, token_ids, pinned_blocks).value();
    manager.synchronize();
    pinned_imports.push_back(since_us(start));
    manager.release(again);
  }
  const auto image_bytes = static_cast<std::int64_t>(image.bytes.size()),
             block_bytes = static_cast<std::int64_t>(blocks.size());
  const auto call = [&](const char* name, const std::vector<double>& times, std::int64_t bytes, const char* note) {
    Row row;
    row.name = name;
    row.us = median(times);
    row.bytes = bytes;
    row.note = fmt::format("{}; {:.1f} GB/s", note, static_cast<double>(bytes) / row.us * 1e-3);
    bench.add(row);
  };
  call("export_image, whole call", exports, image_bytes, "to pageable host memory");
  call("export_blocks, whole call", block_exports, block_bytes, "4 blocks, to pageable host memory");
  call("import_image, whole call", imports, image_bytes + block_bytes, "from pageable host memory");
  call("export_image into HostMemory", pinned_exports, image_bytes, "pinned");
  call("export_blocks into HostMemory", pinned_block_exports, block_bytes, "4 blocks, pinned");
  call("import_image from HostMemory", pinned_imports, image_bytes + block_bytes, "pinned");
  call("fork, until it is done", forks, 2 * cache.schema().slot_bytes, "on the device");
}

void add_blocks(Bench& bench, Arrangement arrangement) {
  const int count = bench.quick ? 32 : 128;
  CacheOptions options;
  options.arrangement = arrangement;
  options.num_blocks = 2 * count;
  const CacheSchema schema = build_schema(model_preset("v4-flash"), options);
  PagedKVPool pool(schema, bench.backend);
  check(fill_normal_f32(reinterpret_cast<float*>(pool.base()), pool.memory_bytes() / 4, 5, bench.timer.stream()),
        "fill_normal");
  checks::DeviceTensors lists(bench.backend);
  std::vector<PieceList> each;
  std::vector<ops::CopyPiece> all;
  for (BlockId block = 0; block < count; ++block) {
    std::vector<ops::CopyPiece> pieces;
    for (const LayerCacheSchema& layer : schema.layers)
      for (const PageSchema& page : layer.pages) {
        auto* const base = reinterpret_cast<std::uint8_t*>(pool.base()) + page.offset;
        pieces.push_back(
            {base + block * page.block_stride, base + (count + block) * page.block_stride, page.page_bytes});
      }
    if (arrangement == Arrangement::block_major) {
      auto* const base = reinterpret_cast<std::uint8_t*>(pool.base());
      pieces = {{base + block * schema.block_bytes, base + (count + block) * schema.block_bytes, schema.block_bytes}};
    }
    each.push_back(upload(lists, pieces));
    all.insert(all.end(), pieces.begin(), pieces.end());
  }
  const double same_size_us = plain_us(bench, schema.block_bytes, count);
  const char* name = arrangement == Arrangement::block_major ? "block-major" : "layer-major";
  add_copies(bench, fmt::format("copy a block, {}, one launch each", name), copy_lists_us(bench, each),
             2 * schema.block_bytes, same_size_us);
  // Each launch takes a list that fits the backend's upload buffer; several lists, so that L2 does not hold them.
  const std::size_t most = std::min(all.size() / 2, kUploadBytes / sizeof(ops::CopyPiece));
  std::vector<PieceList> parts;
  for (std::size_t first = 0; first + most <= all.size(); first += most)
    parts.push_back(upload(lists, {all.begin() + static_cast<std::ptrdiff_t>(first),
                                   all.begin() + static_cast<std::ptrdiff_t>(first + most)}));
  add_copies(bench, fmt::format("copy {} pieces of blocks, {}, one launch", most, name), copy_lists_us(bench, parts),
             2 * parts[0].bytes, plain_us(bench, parts[0].bytes, static_cast<int>(parts.size())));
  Row row;
  row.name = fmt::format("PagedKVPool::copy_block, {}, queued", name);
  row.us = bench.timer.queue_us([&] {
    for (BlockId block = 0; block < count; ++block) pool.copy_block(block, count + block);
  }) / count;
  row.bytes = 2 * schema.block_bytes;
  row.floor_us = same_size_us;
  row.note = "calls without a graph: the host's part counts";
  bench.add(row);
}

}  // namespace

void add_snapshot_rows(Bench& bench) {
  {
    const int requests = bench.quick ? 16 : 48;
    CacheOptions options;
    options.max_requests = requests + 2;
    options.spare_slots = requests;
    options.max_context = kLength;
    options.max_step_tokens = requests * static_cast<int>(kLength);
    GpuCache cache(bench, model_preset("v4-flash"), options);
    cache.admit(requests);
    cache.extend(kLength);
    add_images(bench, cache);
    add_calls(bench, cache);
  }
  for (const Arrangement arrangement : {Arrangement::block_major, Arrangement::layer_major})
    add_blocks(bench, arrangement);
}

}  // namespace kv4::bench
