// kv4_gpu_bench: the time of each operation of the CUDA backend, beside the time that its bytes take at the copy speed
// measured in the same run. All operations except whole calls are timed inside CUDA graphs, on random data. L2 is swept
// before each replay, and each launch of a graph has its own data.
#include "gpu_bench.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checks/table.h"
#include "device_kernels.h"
#include "kv4/error.h"
#include "kv4/version.h"

namespace kv4::bench {
namespace {

constexpr std::int64_t kF32PoolBytes = std::int64_t{1} << 30, kBf16PoolBytes = std::int64_t{1} << 30;
constexpr int kRepeats = 9, kQuickRepeats = 5;

// Measures 1 GiB copies by a kernel and by cudaMemcpyAsync; the faster one counts.
double measure_copy(Bench& bench) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 30;
  constexpr int kCopies = 4;
  const DeviceMemory from(bench.backend, kBytes), to(bench.backend, kBytes);
  const cudaStream_t stream = bench.timer.stream();
  check(fill_normal_f32(reinterpret_cast<float*>(from.data()), kBytes / 4, 3, stream), "fill_normal");
  const auto rate = [&](auto&& copy) {
    const double us = bench.timer.replay_us([&] {
      for (int i = 0; i < kCopies; ++i) copy();
    });
    return 2.0 * kBytes * kCopies / us;
  };
  const double by_kernel = rate([&] { check(copy_plain(to.data(), from.data(), kBytes, stream), "copy_plain"); });
  const double by_memcpy = rate([&] {
    check(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  });
  Row row;
  row.name = "copy of 1 GiB";
  row.bytes = 2 * kBytes;
  row.us = static_cast<double>(row.bytes) / std::max(by_kernel, by_memcpy);
  row.note = fmt::format("kernel {:.2f} TB/s, cudaMemcpyAsync {:.2f} TB/s", by_kernel * 1e-6, by_memcpy * 1e-6);
  bench.add(row);
  return std::max(by_kernel, by_memcpy);
}

double measure_empty(Bench& bench) {
  constexpr int kLaunches = 1000;
  const double us = bench.timer.replay_us([&] {
    for (int i = 0; i < kLaunches; ++i) check(do_nothing(bench.timer.stream()), "an empty kernel");
  }) / kLaunches;
  Row row;
  row.name = "empty kernel in a graph";
  row.us = us;
  bench.add(row);
  return us;
}

int count_sms(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

std::string aim_text(const Aim& aim) {
  switch (aim.kind) {
    case Aim::Kind::none: return "";
    case Aim::Kind::most_us: return fmt::format("<= {:g} us", aim.value);
    case Aim::Kind::most_ratio: return fmt::format("<= {:g} x", aim.value);
    case Aim::Kind::least_share: return fmt::format(">= {:.0f} %", aim.value * 100);
    case Aim::Kind::most_count: return fmt::format("<= {:g}", aim.value);
  }
  return "";
}

std::string result_text(const Row& row) {
  if (!row.ok()) return "FAILED";
  return row.aim.kind == Aim::Kind::none ? "" : row.met() ? "met" : "missed";
}

std::string time_text(const Row& row) {
  if (row.aim.kind == Aim::Kind::most_count) return fmt::format("{:g} (count)", row.count);
  return fmt::format("{:.2f}", row.us);
}

void print_table(const Bench& bench, const std::string& title) {
  checks::Table table("lrrrrll", {title, "us", "MB", "floor us", "ratio", "aim", ""});
  for (const Row& row : bench.rows) {
    table.row({row.name, time_text(row),
               row.bytes > 0 ? fmt::format("{:.3g}", static_cast<double>(row.bytes) * 1e-6) : "",
               row.floor_us > 0 ? fmt::format("{:.2f}", row.floor_us) : "",
               row.floor_us > 0 ? fmt::format("{:.2f}", row.ratio()) : "", aim_text(row.aim), result_text(row)});
  }
  fmt::print("{}", table.str());
}

nlohmann::ordered_json to_json(const Bench& bench, const std::string& device, const std::string& commit) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Row& row : bench.rows) {
    nlohmann::ordered_json one = {{"name", row.name}, {"us", row.us}, {"bytes", row.bytes}};
    if (row.floor_us > 0) one["floor_us"] = row.floor_us, one["ratio"] = row.ratio();
    if (row.aim.kind == Aim::Kind::most_count) one["count"] = row.count;
    if (row.aim.kind != Aim::Kind::none) one["aim"] = aim_text(row.aim), one["met"] = row.met();
    if (!row.note.empty()) one["note"] = row.note;
    if (!row.ok()) one["failure"] = row.failure;
    rows.push_back(one);
  }
  return {{"version", KV4_VERSION},
          {"commit", commit},
          {"device", device},
          {"copy_bytes_per_s", bench.copy_bytes_per_us * 1e6},
          {"empty_kernel_us", bench.empty_us},
          {"quick", bench.quick},
          {"rows", rows}};
}

struct Group {
  const char* name;
  void (*add)(Bench&);
  const char* rows;  // describes the rows it adds
  bool if_named = false;  // true: runs only when named
};
constexpr Group kGroups[] = {
    {"parity", add_parity_row, "a small case on the GPU and on the CPU"},
    {"append", add_append_rows, "append of a decode: SWA, CSA, HCA"},
    {"prefill", add_prefill_rows, "append of 32,768 tokens"},
    {"gather", add_gather_rows, "gathers into dense tensors, a scan of index keys"},
    {"index", add_index_rows, "index scores and top-k of a decode and of drafts"},
    {"index_prefill", add_index_prefill_rows, "index scores and top-k of 256, 1,024 and 4,096 tokens of one request"},
    {"attend", add_attend_rows, "attention of a decode: 64 and 128 heads, and 8, 16, 32 of tensor parallelism"},
    {"attend_prefill", add_attend_prefill_rows, "attention of 1,024 and 4,096 tokens of one request"},
    {"snapshot", add_snapshot_rows, "images, forks, copies of blocks"},
    {"control", add_control_rows, "launches of a step, prepare_forward and commit"},
    {"decode_step", add_decode_step_rows, "all 43 layers of a decode step"},
    {"prefill_step", add_prefill_step_rows, "all 43 layers of a chunk of 4,096 tokens, and its parts"},
    {"attend_splits", add_attend_split_rows, "every way to split attention of few tokens", true},
    {"attend_prefill_splits", add_attend_prefill_split_rows, "every way to split attention of a prefill", true},
    {"attend_staged", add_attend_staged_rows, "attention of a prefill over staged rows, and the direct way", true}};

struct Flags {
  int device = 0;
  bool quick = false, json = false, list = false;
  std::string json_file;
  std::vector<std::string> only;
};

int run(const Flags& flags) {
  if (const std::string problem = why_no_cuda(flags.device); !problem.empty())
    throw Error(ErrorCode::no_device, problem);
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, flags.device), "cudaGetDeviceProperties");
  Bench bench(flags.device, flags.quick);
  bench.copy_bytes_per_us = measure_copy(bench);
  bench.empty_us = measure_empty(bench);
  for (const Group& group : kGroups) {
    const bool named = std::find(flags.only.begin(), flags.only.end(), group.name) != flags.only.end();
    if (!named && (group.if_named || !flags.only.empty())) continue;
    try {
      group.add(bench);
    } catch (const std::exception& e) {  // the results so far are still printed
      Row row;
      row.name = std::string("group ") + group.name;
      row.failure = e.what();
      bench.add(row);
      if (cudaGetLastError() != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) break;
    }
  }
  const char* commit = std::getenv("KV4_COMMIT");
  const nlohmann::ordered_json json = to_json(bench, properties.name, commit != nullptr ? commit : "");
  if (!flags.json_file.empty()) {
    std::ofstream file(flags.json_file);
    file << json.dump(2) << "\n";
    if (!file.good()) throw Error(ErrorCode::bad_file, "cannot write '" + flags.json_file + "'");
  }
  if (flags.json)
    fmt::print("{}\n", json.dump(2));
  else
    print_table(bench, fmt::format("{}, copy {:.2f} TB/s{}", properties.name, bench.copy_bytes_per_us * 1e-6,
                                   commit != nullptr ? fmt::format(", {}", commit) : ""));
  int failed = 0;
  for (const Row& row : bench.rows) {
    if (row.ok()) continue;
    ++failed;
    fmt::print(stderr, "failed: {}: {}\n", row.name, row.failure);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace

bool Row::met() const {
  if (!ok()) return false;
  switch (aim.kind) {
    case Aim::Kind::none: return true;
    case Aim::Kind::most_us: return us <= aim.value;
    case Aim::Kind::most_ratio: return ratio() <= aim.value;
    case Aim::Kind::least_share: return us * aim.value <= floor_us;
    case Aim::Kind::most_count: return count <= aim.value;
  }
  return true;
}

std::byte* InputPool::Rotation::take(std::int64_t bytes) {
  if (bytes > memory.bytes()) throw Error(ErrorCode::bad_argument, "the pool of inputs is too small for this case");
  if (next + bytes > memory.bytes()) next = 0;
  std::byte* out = memory.data() + next;
  next += (bytes + 255) / 256 * 256;
  return out;
}

InputPool::InputPool(std::shared_ptr<Backend> backend, cudaStream_t stream)
    : f32_{DeviceMemory(backend, kF32PoolBytes)}, bf16_{DeviceMemory(backend, kBf16PoolBytes)} {
  check(fill_normal_f32(reinterpret_cast<float*>(f32_.memory.data()), kF32PoolBytes / 4, 1, stream), "fill_normal");
  check(fill_normal_bf16(reinterpret_cast<std::uint16_t*>(bf16_.memory.data()), kBf16PoolBytes / 2, 2, stream),
        "fill_normal");
}

TensorView InputPool::f32(std::int64_t rows, std::int64_t columns) {
  return TensorView(f32_.take(rows * columns * 4), DType::f32, {rows, columns});
}

TensorView InputPool::f32(std::int64_t columns) { return TensorView(f32_.take(columns * 4), DType::f32, {columns}); }

TensorView InputPool::bf16(std::int64_t rows, std::int64_t columns) {
  return TensorView(bf16_.take(rows * columns * 2), DType::bf16, {rows, columns});
}

Bench::Bench(int device, bool quick_in)
    : quick(quick_in),
      num_sms(count_sms(device)),
      timer(device, quick_in ? kQuickRepeats : kRepeats),
      backend(make_cuda_backend(device, Stream{timer.stream()})),
      inputs(backend, timer.stream()) {}

void Bench::add(Row row) {
  fmt::print(stderr, "{:<52} {:>10}  {} {}{}\n", row.name, time_text(row),
             row.floor_us > 0 ? fmt::format("ratio {:.2f}", row.ratio()) : "", row.note,
             row.ok() ? "" : " FAILED: " + row.failure);
  rows.push_back(std::move(row));
}

double Bench::floor_us(std::int64_t bytes) const { return std::max(copy_us(bytes), empty_us); }

void Bench::add_launches(Row row, int count, const MakeLaunch& make, const std::function<void()>& before) {
  row.us = timer.replay_us(
               [&] {
                 for (int i = 0; i < count; ++i) make(i).queue();
               },
               before) /
           count;
  add(row);
  cell(row.name + kAfterOrdinary, [&] { add_after_ordinary(row, count, make, before); });
}

void Bench::add_after_ordinary(Row row, int count, const MakeLaunch& make, const std::function<void()>& before,
                               int launches_of_row) {
  const auto graph_us = [&](bool with_operation) {
    const auto record = [&] {
      for (int i = 0; i < count; ++i) {
        const Launch launch = make(i);
        queue_ordinary(launch);
        if (with_operation) launch.queue();
      }
    };
    return timer.replay_us(record, before) / count * launches_of_row;
  };
  const double both_us = graph_us(true), ordinary_us = graph_us(false);
  row.name += kAfterOrdinary;
  row.us = both_us - ordinary_us;
  row.aim = {};
  row.note = fmt::format("{:.2f} us with the ordinary kernel, {:.2f} us that one by itself", both_us, ordinary_us);
  add(row);
}

void Bench::queue_ordinary(const Launch& launch) {
  const void* from = launch.like != nullptr ? launch.like : inputs.bf16(1, launch.input_bytes / 2).data;
  check(copy_plain(launch.input, from, launch.input_bytes, timer.stream()), "an ordinary kernel");
}

void Bench::add_failure(const std::string& name, const std::string& what) {
  Row row;
  row.name = name;
  row.failure = what;
  add(row);
  cudaGetLastError();  // of the failed call
  check(cudaDeviceSynchronize(), "the device after a failed cell");
}

}  // namespace kv4::bench

int main(int argc, char** argv) {
  using namespace kv4::bench;
  CLI::App app{"kv4_gpu_bench: the CUDA backend's operations beside a copy of the same bytes.", "kv4_gpu_bench"};
  Flags flags;
  app.add_option("--device", flags.device, "GPU number")->capture_default_str();
  app.add_flag("--quick", flags.quick, "fewer batches, shorter contexts");
  std::vector<std::string> names;
  for (const Group& group : kGroups) names.emplace_back(group.name);
  app.add_option("--only", flags.only, fmt::format("groups: {}", fmt::join(names, ", ")))
      ->delimiter(',')
      ->check(CLI::IsMember(names));
  app.add_flag("--list", flags.list, "the groups in words, and nothing is measured; needs no GPU");
  app.add_flag("--json", flags.json, "JSON instead of the table");
  app.add_option("--json-file", flags.json_file, "JSON as well, into this file");
  app.footer(
      "Rows are printed to standard error as they are measured, the table at the end. Exit codes: 0 measured (aims "
      "missed or not), 1 a check failed,\n"
      "2 bad usage or no GPU. KV4_COMMIT of the environment is printed with the results.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  if (flags.list) {
    for (const Group& group : kGroups)
      fmt::print("{:<22} {}{}\n", group.name, group.rows, group.if_named ? " (only if it is named)" : "");
    return 0;
  }
  try {
    return run(flags);
  } catch (const kv4::Error& e) {
    fmt::print(stderr, "error: {}\n", e.what());
    return e.code() == kv4::ErrorCode::no_device ? 2 : 3;
  } catch (const std::exception& e) {
    fmt::print(stderr, "error: {}\n", e.what());
    return 3;
  }
}
