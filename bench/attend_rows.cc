// Attention over fp8_tile64 rows: direct calls on pools built here, at the shapes of V4-Flash and V4-Pro and with the
// heads that tensor parallelism leaves. Cells are decodes of one token per request, and prefill chunks of one request.
// The launches of a graph take pages, queries and outputs from their pools in turn, so that L2 has none of them. A
// graph has many launches, because a replay has an overhead of about 10 us.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/attend/staged.cuh"
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
constexpr int kSplitTokens = 1024;           // of the prefill that is timed with every split
constexpr std::int64_t kPoolBytes = std::int64_t{2} << 30, kOutputBytes = std::int64_t{1} << 30;
constexpr int kFewestLaunches = 2, kMostLaunches = 24, kMostTokens = 8192;
constexpr int kScratchRows = 4096;     // window rows of a chunk's own tokens
constexpr int kMostEntries = 1 << 18;  // of a chunk's request
constexpr double kGraphUs = 1000;

struct Shape {
  const char* name;
  int heads;
  int entries;    // rows besides the window
  int page_rows;  // rows per block
  int page_bytes;
  bool chosen;
  int context_entries;  // the chosen entries are drawn from these
};

constexpr int kEntryRows = 32, kEntryPage = 18688;  // of a block of a CSA layer
constexpr Shape chosen_shape(const char* name, int heads, int entries, int pool) {
  return {name, heads, entries, kEntryRows, kEntryPage, true, pool};
}
constexpr Shape whole_shape(const char* name, int heads, int entries) {
  return {name, heads, entries, 1, 640, false, entries};
}

constexpr int kBatches[4] = {1, 16, 64, 128};
constexpr Shape kShapes[] = {
    whole_shape("Flash SWA 128", 64, 0),           chosen_shape("Flash CSA 640", 64, 512, 8192),
    whole_shape("Flash HCA 1152", 64, 1024),       whole_shape("Flash HCA 8320", 64, 8192),
    chosen_shape("Pro CSA 1152", 128, 1024, 8192), whole_shape("Pro HCA 8320", 128, 8192),
};
/// Heads per GPU where 2, 4 or 8 GPUs share V4-Flash's 64.
constexpr Shape kParallelShapes[] = {
    whole_shape("8 heads SWA 128", 8, 0),           whole_shape("16 heads SWA 128", 16, 0),
    whole_shape("32 heads SWA 128", 32, 0),         chosen_shape("8 heads CSA 640", 8, 512, 8192),
    chosen_shape("16 heads CSA 640", 16, 512, 8192), chosen_shape("32 heads CSA 640", 32, 512, 8192),
    whole_shape("8 heads HCA 1152", 8, 1024),       whole_shape("16 heads HCA 1152", 16, 1024),
    whole_shape("32 heads HCA 1152", 32, 1024),
};

/// A chunk of `tokens`, the last tokens of its request's context.
struct Prefill {
  Shape shape;
  int tokens;
  std::string where;  // pool or context
};

std::vector<Prefill> prefill_cells(bool quick) {
  std::vector<Prefill> cells;
  const auto pool = [&](const char* name, int heads, int entries, int tokens, int thousands) {
    const std::string where = fmt::format("pool of {}K", thousands);
    cells.push_back({chosen_shape(name, heads, entries, thousands * 1024), tokens, where});
  };
  cells.push_back({whole_shape("Flash SWA 128", 64, 0), 1024, "windows"});
  cells.push_back({whole_shape("Flash SWA 128", 64, 0), 4096, "windows"});
  for (const int tokens : {1024, 4096})
    for (const int thousands : {8, 32, 128, 256})
      if (tokens == 4096 || thousands <= 32) pool("Flash CSA 640", 64, 512, tokens, thousands);
  for (const int thousands : {32, 128, 512})
    cells.push_back({whole_shape("Flash HCA", 64, thousands * 8), 4096, fmt::format("context of {}K", thousands)});
  for (const int tokens : {1024, 4096})
    for (const int thousands : {8, 32}) pool("Pro CSA 1152", 128, 1024, tokens, thousands);
  cells.push_back({whole_shape("Pro HCA", 128, 1024), 4096, "context of 128K"});
  pool("8 heads CSA 640", 8, 512, 4096, 32);
  pool("16 heads CSA 640", 16, 512, 4096, 32);
  pool("32 heads CSA 640", 32, 512, 4096, 32);
  if (quick) std::erase_if(cells, [](const Prefill& c) { return c.tokens > 1024; });
  return cells;
}

/// Pools full of rows, and the other buffers of a launch.
class Pools {
 public:
  explicit Pools(Bench& bench)
      : bench_(bench),
        windows_(bench.backend, kPoolBytes / 4),
        pages_(bench.backend, kPoolBytes),
        scratch_(bench.backend, kScratchRows * (kRowBytes + kScaleBytes)),
        outputs_(bench.backend, kOutputBytes),
        workspace_(bench.backend, ops::staged_attend_workspace_bytes(kScratchRows, 1, kWindow, kMostEntries)) {
    fill(windows_, kWindow * (kRowBytes + kScaleBytes), kWindow);
    fill(scratch_, scratch_.bytes(), kScratchRows);
    check(cudaMemsetAsync(workspace_.data(), 0, workspace_.bytes(), bench.timer.stream()), "cudaMemsetAsync");
  }

  /// Pages in the shape's layout: rows, then scales.
  void arrange(const Shape& shape) {
    if (shape.page_bytes != page_bytes_) fill(pages_, shape.page_bytes, shape.page_rows);
    page_bytes_ = shape.page_bytes;
  }

  std::uint8_t* scratch() const { return reinterpret_cast<std::uint8_t*>(scratch_.data()); }
  std::uint8_t* windows() const { return reinterpret_cast<std::uint8_t*>(windows_.data()); }
  std::uint8_t* pages() const { return reinterpret_cast<std::uint8_t*>(pages_.data()); }
  const DeviceMemory& workspace() const { return workspace_; }
  std::uint16_t* output(std::int64_t values) {
    if (values * 2 > kOutputBytes) throw std::runtime_error("the benchmark's outputs are too small for this case");
    if (next_ + values * 2 > kOutputBytes) next_ = 0;
    std::byte* out = outputs_.data() + next_;
    next_ += values * 2;
    return reinterpret_cast<std::uint16_t*>(out);
  }

 private:
  // Encodes one stretch of pages and copies it until the memory is full.
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
  DeviceMemory windows_, pages_, scratch_, outputs_, workspace_;
  std::int64_t next_ = 0;
  int page_bytes_ = 0;  // as the pages are arranged
};

template <class T>
DeviceMemory to_device(Bench& bench, const std::vector<T>& values) {
  const std::int64_t bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
  DeviceMemory memory(bench.backend, std::max<std::int64_t>(bytes, 1));
  check(cudaMemcpy(memory.data(), values.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  return memory;
}

/// The launches of one cell, with adjacent tables. Many tokens of one request are a chunk at the end of its context;
/// their own window rows lie in the scratch, as in a step of the cache. Where entries are chosen, all entries of a
/// shape are visible; elsewhere a token sees the entries before it.
class Cell {
 public:
  Cell(Bench& bench, Pools& pools, const Shape& shape, int requests, int tokens)
      : bench_(bench),
        pools_(pools),
        shape_(shape),
        requests_(requests),
        batch_(tokens),
        length_(first_length()),
        launches_(count_launches()) {
    if (is_chunk() && tokens > kScratchRows) throw std::runtime_error("a chunk is longer than the scratch");
    std::mt19937 random(11);
    const std::int32_t pool_blocks = static_cast<std::int32_t>(kPoolBytes / shape.page_bytes);
    std::vector<std::int32_t> blocks(pool_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random);
    std::vector<std::int32_t> table, chosen, all(shape.context_entries);
    std::iota(all.begin(), all.end(), 0);
    std::vector<ops::StepRecord> records;
    std::size_t next = 0;
    for (int launch = 0; launch < launches_; ++launch) {
      for (int i = 0; i < requests_ * blocks_per_request(); ++i) table.push_back(blocks[next++ % blocks.size()]);
      for (int i = 0; i < batch_; ++i) {
        ops::StepRecord r;
        r.row = i % requests_;
        r.length = length_;
        r.count = batch_ / requests_;
        r.first_token = i - i / requests_;
        r.position = r.length + i / requests_;
        r.read_slot = r.write_slot = static_cast<std::int32_t>((launch * requests_ + r.row) % window_slots());
        if (is_chunk()) r.write_slot = static_cast<std::int32_t>((r.read_slot + 1) % window_slots());
        records.push_back(r);
        if (!shape.chosen) continue;
        for (int k = 0; k < shape.entries; ++k)  // the first part of a shuffle is a random set of different entries
          std::swap(all[k], all[std::uniform_int_distribution<int>(k, shape.context_entries - 1)(random)]);
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
    if (is_chunk()) w.scratch = planes(pools_.scratch(), kScratchRows * (kRowBytes + kScaleBytes), kScratchRows);
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
               }) /
           launches_;
  }
  /// For Bench::add_launches: the kernel before writes q.
  Launch attend(int launch) {
    const ops::AttendParams p = params(launch);
    const std::int64_t q_bytes = 2 * std::int64_t{batch_} * shape_.heads * kWidth;
    return {const_cast<void*>(p.q.data), q_bytes,
            [p, this] { check(cuda::attend(p, bench_.timer.stream()), "attend"); }};
  }

  /// Bytes of a decode: rows, q and outputs.
  std::int64_t bytes() const {
    return rows() * (kRowBytes + kScaleBytes) + batch_ * 4 * std::int64_t{shape_.heads} * kWidth;
  }
  double flop() const { return 4.0 * static_cast<double>(rows()) * shape_.heads * kWidth; }

 private:
  bool is_chunk() const { return batch_ > requests_; }
  /// The requests' length before the step.
  int first_length() const {
    const int context = std::max(shape_.context_entries * ratio(), kWindow);
    return is_chunk() && !shape_.chosen && shape_.entries > 0 ? context - batch_ / requests_ : context + 1;
  }
  /// Total number of rows that the queries see.
  std::int64_t rows() const {
    if (shape_.chosen || !is_chunk()) return batch_ * std::int64_t{kWindow + shape_.entries};
    std::int64_t sum = 0;
    for (int i = 0; i < batch_; ++i)
      sum += kWindow + (shape_.entries > 0 ? (length_ + i / requests_ + 1) / ratio() : 0);
    return sum;
  }
  int ratio() const { return shape_.page_rows == 1 ? 128 : 4; }
  int blocks_per_request() const {
    return shape_.context_entries / shape_.page_rows;
  }
  // Enough launches for a millisecond at the floor: with fewer the overhead of a replay would show, with more the GPU
  // would slow down to its sustained power.
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
  int requests_, batch_, length_, launches_;
  std::unique_ptr<DeviceMemory> records_, table_, chosen_, sink_;
};

}  // namespace

namespace {

void add_decodes(Bench& bench, Pools& pools, const Shape& shape) {
  pools.arrange(shape);
  for (const int batch : kBatches) {
    Row row;
    row.name = fmt::format("attend {} rows, b = {}", shape.name, batch);
    bench.cell(row.name, [&] {
      Cell cell(bench, pools, shape, batch, batch);
      row.bytes = cell.bytes();
      row.floor_us = std::max(bench.copy_us(row.bytes), cell.flop() / kFlopPerUs);
      bench.add_launches(row, cell.launches(), [&](int launch) { return cell.attend(launch); });
    });
  }
}

}  // namespace

void add_attend_rows(Bench& bench) {
  Pools pools(bench);
  for (const Shape& shape : kShapes) add_decodes(bench, pools, shape);
  for (const Shape& shape : kParallelShapes)
    if (!bench.quick) add_decodes(bench, pools, shape);
}

void add_attend_prefill_rows(Bench& bench) {
  Pools pools(bench);
  for (const Prefill& c : prefill_cells(bench.quick)) {
    Row row;
    row.name = fmt::format("attend {} rows, prefill of {}, {}", c.shape.name, c.tokens, c.where);
    bench.cell(row.name, [&] {
      pools.arrange(c.shape);
      Cell cell(bench, pools, c.shape, 1, c.tokens);
      row.us = cell.time([](const ops::AttendParams& p, cudaStream_t stream) { return cuda::attend(p, stream); });
      row.floor_us = cell.flop() / kFlopPerUs;
      row.note = fmt::format("{:.0f} TFLOP/s", cell.flop() / row.us * 1e-6);
      bench.add(row);
    });
  }
}

namespace {

/// The splits of the decode kernels.
std::vector<cuda::AttendSplit> decode_splits(const Shape& shape, int batch, int num_sms) {
  std::vector<cuda::AttendSplit> splits;
  for (const bool cta_pair : {false, true}) {
    const int heads = shape.heads / 64, pair_size = cta_pair ? 2 : 1;
    if (heads % pair_size != 0) continue;
    const int tiles = (kWindow + shape.entries + 63) / 64, work_tiles = batch * heads;
    int last = 0;
    for (int own = 1; own <= 64; own = own < 8 ? own + 1 : own * 3 / 2) {  // tiles of a KV split
      const int kv_splits = (tiles + own - 1) / own;
      if (kv_splits != last && kv_splits > 1 && kv_splits * work_tiles <= num_sms)
        splits.push_back({AttendKernel::split_kv_in_memory, last = kv_splits, 1, cta_pair});
    }
    for (const int channels : {1, 2, 4})
      for (const int rows : {1, 2, 3, 4, 5, 6, 8, 10, 12, 16})
        if (rows * channels * pair_size <= cuda::kMaxCluster && (channels == 1 || !cta_pair) && rows <= tiles &&
            rows * channels * work_tiles <= num_sms)
          splits.push_back({AttendKernel::split_kv, rows, channels, cta_pair});
  }
  splits.push_back({AttendKernel::unsplit});
  for (const int channels : {1, 2})
    if (shape.entries == 0 && channels * batch <= num_sms)
      splits.push_back({AttendKernel::single_pass_window, 1, channels});
  return splits;
}

/// The splits of the prefill kernels.
std::vector<cuda::AttendSplit> prefill_splits(const Shape& shape) {
  std::vector<cuda::AttendSplit> splits = {{AttendKernel::split_kv}, {AttendKernel::persistent}};
  if (shape.heads > 64) splits.push_back({.kernel = AttendKernel::split_kv, .cta_pair = true});
  if (shape.entries == 0) splits.push_back({AttendKernel::persistent_window});
  if (!shape.chosen) splits.push_back({AttendKernel::token_pair});
  splits.push_back({AttendKernel::staged});
  return splits;
}

}  // namespace

void add_attend_prefill_split_rows(Bench& bench) {
  Pools pools(bench);
  for (const Shape& shape : kShapes) {
    pools.arrange(shape);
    Cell cell(bench, pools, shape, 1, kSplitTokens);
    for (const cuda::AttendSplit& split : prefill_splits(shape)) {
      Row row;
      row.name = fmt::format("{}, prefill of {}: {}", shape.name, kSplitTokens, describe(split));
      row.us = cell.time(
          [&](const ops::AttendParams& p, cudaStream_t stream) { return cuda::attend_split(p, split, stream); });
      bench.add(row);
    }
  }
}

void add_attend_staged_rows(Bench& bench) {
  Pools pools(bench);
  for (const Prefill& c : prefill_cells(bench.quick)) {
    const std::string cell_name = fmt::format("attend {} rows, prefill of {}, {}", c.shape.name, c.tokens, c.where);
    bench.cell(cell_name, [&] {
      pools.arrange(c.shape);
      Cell cell(bench, pools, c.shape, 1, c.tokens);
      const auto add = [&](const std::string& way, auto attend) {
        Row row;
        row.name = fmt::format("{}: {}", cell_name, way);
        row.us = cell.time(attend);
        row.floor_us = cell.flop() / kFlopPerUs;
        row.note = fmt::format("{:.0f} TFLOP/s", cell.flop() / row.us * 1e-6);
        bench.add(row);
      };
      add("direct", [](ops::AttendParams p, cudaStream_t stream) {
        p.workspace_bytes = ops::attend_workspace_bytes();  // too small for staged rows
        return cuda::attend(p, stream);
      });
      add("staged", [](const ops::AttendParams& p, cudaStream_t stream) {
        return cuda::attend_split(p, {.kernel = AttendKernel::staged}, stream);
      });
      add("staging alone", [](const ops::AttendParams& p, cudaStream_t stream) {
        return cuda::launch_stage_rows(p, cuda::staged_rows(p), stream);
      });
    });
  }
}

void add_attend_split_rows(Bench& bench) {
  Pools pools(bench);
  for (const Shape& shape : kShapes) {
    pools.arrange(shape);
    for (const int batch : kBatches) {
      if (batch > 16 && shape.entries > 0) continue;
      Cell cell(bench, pools, shape, batch, batch);
      std::vector<cuda::AttendSplit> splits = decode_splits(shape, batch, bench.num_sms);
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
