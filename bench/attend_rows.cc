// Attention over fp8_tile64 rows: direct calls on pools built here, at the shapes of V4-Flash and V4-Pro; decodes of as
// many requests as there are tokens, and a prefill chunk of one request. The launches of a graph take pages, queries
// and outputs from their pools in turn, so that L2 has none of them; the benchmark sweeps L2 before each replay. A
// graph has many launches, because a replay has an overhead of about 10 us.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/attend/kernels.h"
#include "base/group.h"
#include "codec/codec.h"
#include "gpu_bench.h"
#include "kv4/cuda.h"

namespace kv4::bench {
namespace {

using cuda::AttendKernel;

constexpr int kWidth = 512, kWindow = 128;
constexpr RowShape kShape{kWidth, 64};
constexpr std::int64_t kRowBytes = 576, kScaleBytes = 8;
constexpr double kFlopPerUs = 790e6;         // bf16 products, measured on an H200, 2026-11-16
constexpr double kBytesPerUs = 4.3e6;        // only for the number of launches
constexpr double kPrefillFlopPerUs = 500e6;  // aim
constexpr int kPrefillTokens = 1024;
constexpr std::int64_t kPoolBytes = std::int64_t{2} << 30, kSweepBytes = std::int64_t{256} << 20;
constexpr int kFewestLaunches = 3, kMostLaunches = 24, kMostTokens = 8192;
constexpr double kGraphUs = 1000;

struct Shape {
  const char* name;
  int heads;
  int entries;    // rows besides the window
  int page_rows;  // of a block
  int page_bytes;
  bool chosen;
  int context_entries;  // the chosen entries are drawn from these
};

constexpr int kBatches[4] = {1, 16, 64, 128};
constexpr Shape kShapes[] = {
    {"Flash SWA 128", 64, 0, 1, 640, false, 0},
    {"Flash CSA 640", 64, 512, 32, 18688, true, 8192},
    {"Flash HCA 1152", 64, 1024, 1, 640, false, 1024},
    {"Flash HCA 8320", 64, 8192, 1, 640, false, 8192},
    {"Pro CSA 1152", 128, 1024, 32, 18688, true, 8192},
    {"Pro HCA 8320", 128, 8192, 1, 640, false, 8192},
};

/// Pools full of rows, and the other buffers.
class Pools {
 public:
  explicit Pools(Bench& bench)
      : bench_(bench),
        windows_(bench.backend, kPoolBytes / 4),
        pages_(bench.backend, kPoolBytes),
        sweep_(bench.backend, kSweepBytes),
        outputs_(bench.backend, kSweepBytes),
        workspace_(bench.backend, ops::attend_workspace_bytes()) {
    fill(windows_, kWindow * (kRowBytes + kScaleBytes), kWindow);
  }

  /// Pages in the shape's layout: rows, then scales.
  void arrange(const Shape& shape) { fill(pages_, shape.page_bytes, shape.page_rows); }

  void sweep() const { check(cudaMemsetAsync(sweep_.data(), 1, kSweepBytes, bench_.timer.stream()), "memset"); }
  std::uint8_t* windows() const { return reinterpret_cast<std::uint8_t*>(windows_.data()); }
  std::uint8_t* pages() const { return reinterpret_cast<std::uint8_t*>(pages_.data()); }
  const DeviceMemory& workspace() const { return workspace_; }
  std::uint16_t* output(std::int64_t values) {
    if (next_ + values * 2 > kSweepBytes) next_ = 0;
    std::byte* out = outputs_.data() + next_;
    next_ += values * 2;
    return reinterpret_cast<std::uint16_t*>(out);
  }

 private:
  // One stretch of encoded pages, copied until the memory is full.
  void fill(const DeviceMemory& memory, std::int64_t page_bytes, int rows) {
    const std::int64_t pages = (std::int64_t{4} << 20) / page_bytes;
    std::vector<std::uint8_t> run(pages * page_bytes, 0);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> x(kWidth);
    for (std::int64_t page = 0; page < pages; ++page)
      for (int row = 0; row < rows; ++row) {
        for (float& v : x) v = normal(random);
        std::uint8_t* at = run.data() + page * page_bytes;
        codec::Fp8Tile64::encode(OneLane{}, kShape, x.data(), at + row * kRowBytes,
                                 at + rows * kRowBytes + row * kScaleBytes, 1.0f);
      }
    const std::int64_t bytes = static_cast<std::int64_t>(run.size());
    for (std::int64_t at = 0; at < memory.bytes(); at += bytes)
      check(cudaMemcpyAsync(memory.data() + at, run.data(), std::min(bytes, memory.bytes() - at),
                            cudaMemcpyHostToDevice, bench_.timer.stream()),
            "cudaMemcpyAsync");
    check(cudaStreamSynchronize(bench_.timer.stream()), "filling pools");
  }

  Bench& bench_;
  DeviceMemory windows_, pages_, sweep_, outputs_, workspace_;
  std::int64_t next_ = 0;
};

template <class T>
DeviceMemory to_device(Bench& bench, const std::vector<T>& values) {
  const std::int64_t bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
  DeviceMemory memory(bench.backend, std::max<std::int64_t>(bytes, 1));
  check(cudaMemcpy(memory.data(), values.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  return memory;
}

/// The launches of one cell, with adjacent tables.
class Cell {
 public:
  Cell(Bench& bench, Pools& pools, const Shape& shape, int requests, int tokens)
      : bench_(bench), pools_(pools), shape_(shape), requests_(requests), batch_(tokens), launches_(count_launches()) {
    std::mt19937 random(11);
    const std::int32_t pool_blocks = static_cast<std::int32_t>(kPoolBytes / shape.page_bytes);
    std::vector<std::int32_t> blocks(pool_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random);
    std::vector<std::int32_t> table, chosen;
    std::vector<ops::StepRecord> records;
    std::size_t next = 0;
    for (int launch = 0; launch < launches_; ++launch) {
      for (int i = 0; i < requests_ * blocks_per_request(); ++i) table.push_back(blocks[next++ % blocks.size()]);
      for (int i = 0; i < batch_; ++i) {
        ops::StepRecord r;
        r.row = i % requests_;
        r.length = std::max(shape.context_entries * ratio(), kWindow) + 1;
        r.count = batch_ / requests_;
        r.first_token = i - i / requests_;
        r.position = r.length + i / requests_;
        r.read_slot = r.write_slot = static_cast<std::int32_t>((launch * requests_ + r.row) % window_slots());
        records.push_back(r);
        if (!shape.chosen) continue;
        std::vector<std::int32_t> all(shape.context_entries);
        std::iota(all.begin(), all.end(), 0);
        std::shuffle(all.begin(), all.end(), random);
        chosen.insert(chosen.end(), all.begin(), all.begin() + shape.entries);
      }
    }
    records_ = std::make_unique<DeviceMemory>(to_device(bench, records));
    table_ = std::make_unique<DeviceMemory>(to_device(bench, table));
    chosen_ = std::make_unique<DeviceMemory>(to_device(bench, chosen));
    sink_ = std::make_unique<DeviceMemory>(to_device(bench, std::vector<float>(128, 0.5f)));
  }

  int launches() const { return launches_; }

  ops::AttendParams params(int launch) {
    ops::AttendParams p;
    ops::WindowDesc& w = p.layer.window;
    w.rows = p.layer.window_tokens = kWindow;
    w.ring = planes(pools_.windows(), kWindow * (kRowBytes + kScaleBytes), kWindow);
    if (shape_.entries > 0) {
      p.layer.num_kinds = 1;
      p.layer.kinds[0].page = planes(pools_.pages(), shape_.page_bytes, shape_.page_rows);
      p.layer.kinds[0].ratio = ratio();
      p.layer.kinds[0].rows_per_block = shape_.page_rows;
    }
    p.step.num_tokens = batch_;
    p.step.num_items = requests_;
    p.step.blocks_per_request = blocks_per_request();
    p.step.tokens = reinterpret_cast<const ops::StepRecord*>(records_->data()) + launch * batch_;
    p.step.block_table =
        reinterpret_cast<const std::int32_t*>(table_->data()) + std::int64_t{launch} * requests_ * blocks_per_request();
    p.num_heads = shape_.heads;
    p.softmax_scale = 0.0441942f;
    p.q = {bench_.inputs.bf16(batch_, shape_.heads * kWidth).data, DType::bf16, shape_.heads * kWidth};
    p.sink = reinterpret_cast<const float*>(sink_->data());
    if (shape_.chosen) {
      p.num_chosen = shape_.entries;
      p.chosen = {
          reinterpret_cast<const std::int32_t*>(chosen_->data()) + std::int64_t{launch} * batch_ * shape_.entries,
          DType::i32, shape_.entries};
    }
    p.out = {pools_.output(std::int64_t{batch_} * shape_.heads * kWidth), DType::bf16};
    p.workspace = reinterpret_cast<std::uint8_t*>(pools_.workspace().data());
    p.workspace_bytes = pools_.workspace().bytes();
    return p;
  }

  /// Microseconds per launch.
  template <class Attend>
  double time(Attend attend) {
    return bench_.timer.replay_us(
               [&] {
                 for (int launch = 0; launch < launches_; ++launch)
                   check(attend(params(launch), bench_.timer.stream()), "attend");
               },
               [&] { pools_.sweep(); }) /
           launches_;
  }

  std::int64_t bytes() const {
    return batch_ * ((kWindow + shape_.entries) * (kRowBytes + kScaleBytes) + 4 * std::int64_t{shape_.heads} * kWidth);
  }
  double flop() const { return 4.0 * batch_ * (kWindow + shape_.entries) * shape_.heads * kWidth; }

 private:
  int ratio() const { return shape_.page_rows == 1 ? 128 : 4; }
  int blocks_per_request() const {
    const int later_entries = shape_.chosen ? 0 : (batch_ / requests_ + 1) / ratio();
    return (shape_.context_entries + later_entries) / shape_.page_rows;
  }
  // As many launches as take a millisecond at the floor: with fewer, the overhead of a replay would show; with more,
  // the GPU would slow down to its sustained power.
  int count_launches() const {
    const double floor_us = std::max(static_cast<double>(bytes()) / kBytesPerUs, flop() / kFlopPerUs);
    return std::clamp(static_cast<int>(kGraphUs / floor_us), kFewestLaunches,
                      std::min(kMostLaunches, kMostTokens / batch_));
  }
  static std::int64_t window_slots() { return kPoolBytes / 4 / (kWindow * (kRowBytes + kScaleBytes)); }
  static ops::RowPlanes planes(std::uint8_t* data, std::int64_t page_bytes, std::int64_t rows) {
    ops::RowPlanes p;
    p.format = Format::fp8_tile64;
    p.shape = kShape;
    p.payload = {data, page_bytes, kRowBytes};
    p.scale = {data + rows * kRowBytes, page_bytes, kScaleBytes};
    return p;
  }

  Bench& bench_;
  Pools& pools_;
  const Shape& shape_;
  int requests_, batch_, launches_;
  std::unique_ptr<DeviceMemory> records_, table_, chosen_, sink_;
};

}  // namespace

void add_attend_rows(Bench& bench) {
  Pools pools(bench);
  for (const Shape& shape : kShapes) {
    pools.arrange(shape);
    for (int i = 0; i < 4; ++i) {
      Cell cell(bench, pools, shape, kBatches[i], kBatches[i]);
      Row row;
      row.name = fmt::format("attend {} rows, b = {}", shape.name, kBatches[i]);
      row.us = cell.time([](const ops::AttendParams& p, cudaStream_t stream) { return cuda::attend(p, stream); });
      row.bytes = cell.bytes();
      row.floor_us = std::max(bench.copy_us(row.bytes), cell.flop() / kFlopPerUs);
      row.note = fmt::format("{:.0f} TFLOP/s", cell.flop() / row.us * 1e-6);
      bench.add(row);
    }
  }
}

void add_attend_prefill_rows(Bench& bench) {
  Pools pools(bench);
  for (const Shape& shape : kShapes) {
    pools.arrange(shape);
    Cell cell(bench, pools, shape, 1, kPrefillTokens);
    Row row;
    row.name = fmt::format("attend {} rows, prefill of {}", shape.name, kPrefillTokens);
    row.us = cell.time([](const ops::AttendParams& p, cudaStream_t stream) { return cuda::attend(p, stream); });
    row.floor_us = cell.flop() / kFlopPerUs;
    row.aim = {Aim::Kind::most_us, cell.flop() / kPrefillFlopPerUs};
    row.note = fmt::format("{:.0f} TFLOP/s", cell.flop() / row.us * 1e-6);
    bench.add(row);
  }
}

namespace {

/// Of the kernels for decodes.
std::vector<cuda::AttendSplit> decode_splits(const Shape& shape, int batch) {
  std::vector<cuda::AttendSplit> splits;
  constexpr int kCtas = 132;  // CTAs that an H200 runs at once
  for (const bool cta_pair : {false, true}) {
    const int heads = shape.heads / 64, pair_size = cta_pair ? 2 : 1;
    if (heads % pair_size != 0) continue;
    const int tiles = (kWindow + shape.entries + 63) / 64, work_tiles = batch * heads;
    int last = 0;
    for (int own = 1; own <= 64; own = own < 8 ? own + 1 : own * 3 / 2) {  // tiles of a KV split
      const int kv_splits = (tiles + own - 1) / own;
      if (kv_splits != last && kv_splits > 1 && kv_splits * work_tiles <= kCtas)
        splits.push_back({AttendKernel::split_kv_in_memory, last = kv_splits, 1, cta_pair});
    }
    for (const int channels : {1, 2, 4})
      for (const int rows : {1, 2, 3, 4, 5, 6, 8, 10, 12, 16})
        if (rows * channels * pair_size <= cuda::kMaxCluster && (channels == 1 || !cta_pair) && rows <= tiles &&
            rows * channels * work_tiles <= kCtas)
          splits.push_back({AttendKernel::split_kv, rows, channels, cta_pair});
  }
  splits.push_back({AttendKernel::unsplit});
  for (const int channels : {1, 2})
    if (shape.entries == 0 && channels * batch <= kCtas)
      splits.push_back({AttendKernel::single_pass_window, 1, channels});
  return splits;
}

/// Of the kernels for a prefill.
std::vector<cuda::AttendSplit> prefill_splits(const Shape& shape) {
  std::vector<cuda::AttendSplit> splits = {{AttendKernel::split_kv}, {AttendKernel::persistent}};
  if (shape.heads > 64) splits.push_back({.kernel = AttendKernel::split_kv, .cta_pair = true});
  if (shape.entries == 0) splits.push_back({AttendKernel::persistent_window});
  if (!shape.chosen) splits.push_back({AttendKernel::token_pair});
  return splits;
}

}  // namespace

void add_attend_prefill_split_rows(Bench& bench) {
  Pools pools(bench);
  for (const Shape& shape : kShapes) {
    pools.arrange(shape);
    Cell cell(bench, pools, shape, 1, kPrefillTokens);
    for (const cuda::AttendSplit& split : prefill_splits(shape)) {
      Row row;
      row.name = fmt::format("{}, prefill of {}: {}", shape.name, kPrefillTokens, describe(split));
      row.us = cell.time(
          [&](const ops::AttendParams& p, cudaStream_t stream) { return cuda::attend_split(p, split, stream); });
      bench.add(row);
    }
  }
}

void add_attend_split_rows(Bench& bench) {
  Pools pools(bench);
  for (const Shape& shape : kShapes) {
    pools.arrange(shape);
    for (const int batch : kBatches) {
      if (batch > 16 && shape.entries > 0) continue;
      Cell cell(bench, pools, shape, batch, batch);
      std::vector<cuda::AttendSplit> splits = decode_splits(shape, batch);
      for (const cuda::AttendVariant& v :
           cuda::attend_kernels()[static_cast<std::size_t>(AttendKernel::small_batch)].variants)
        for (const int kv_splits : {1, 2, 4, 8, cuda::kNineSplits, 16}) {
          const int ctas = batch * shape.heads / v.heads * kv_splits, rows = (kWindow + shape.entries) / kv_splits;
          if (ctas > 1100 || ctas < 32 || rows > std::min<std::int64_t>(v.max_split_rows, 1100)) continue;
          if (v.stages > 1 || kv_splits != cuda::kNineSplits)
            splits.push_back({AttendKernel::small_batch, kv_splits, 1, false, v.heads, v.stages});
        }
      for (const cuda::AttendSplit& split : splits) {
        Row row;
        row.name = fmt::format("{}, b = {}: {}", shape.name, batch, describe(split));
        row.us = cell.time(
            [&](const ops::AttendParams& p, cudaStream_t stream) { return cuda::attend_split(p, split, stream); });
        bench.add(row);
      }
    }
  }
}

}  // namespace kv4::bench
