#include "case_runner.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <exception>
#include <vector>

namespace kv4::bench {
namespace {

double median(std::vector<double>& values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Google Benchmark decides how often the operation runs. It calls with growing iteration counts; the data of the case
/// persists. Times are medians, because on a shared machine the mean mostly measures other processes.
class CaseRunner {
 public:
  CaseRunner(const Case& c, checks::CopyBaseline& copy, const std::function<bool()>& stop)
      : case_(c), copy_(copy), stop_(stop) {}

  void run(benchmark::State& state) {
    try {
      if (!operation_) warm_up();
      measure(state);
    } catch (const std::exception& e) {
      result_.error = e.what();
      state.SkipWithError(result_.error.c_str());
    }
  }
  CaseResult finish() {
    operation_ = nullptr;
    result_.name = case_.name;
    result_.item = case_.item;
    return result_;
  }

 private:
  /// The first touch of memory can cost a hundred times the operation, and a case rotates through its buffers, so all
  /// of them are touched first.
  void warm_up() {
    constexpr int kWarmUps = 40;
    operation_ = case_.make();
    for (int i = 0; i < kWarmUps && !stop_(); ++i) operation_();
  }

  void measure(benchmark::State& state) {
    std::vector<double> seconds, copies, plains, products;
    Sample sample;
    for (auto _ : state) {
      if (stop_()) {
        result_.interrupted = true;
        state.SkipWithError("interrupted");
        break;
      }
      sample = operation_();
      state.SetIterationTime(sample.seconds);
      seconds.push_back(sample.seconds);
      if (sample.plain_seconds > 0) plains.push_back(sample.plain_seconds);
      if (sample.sgemm_seconds > 0) products.push_back(sample.sgemm_seconds);
      if (sample.bytes > 0) copies.push_back(copy_.seconds(sample.bytes));
    }
    result_.bytes = sample.bytes;
    result_.items = static_cast<double>(sample.items);
    result_.seconds = median(seconds);
    result_.memcpy_seconds = median(copies);
    result_.plain_seconds = median(plains);
    result_.sgemm_seconds = median(products);
  }

  const Case& case_;
  checks::CopyBaseline& copy_;
  const std::function<bool()>& stop_;
  Operation operation_;
  CaseResult result_;
};

/// Silences Google Benchmark: the caller prints the results.
class QuietReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

}  // namespace

CaseResult measure_case(const Case& c, checks::CopyBaseline& copy, double min_time, const std::function<bool()>& stop) {
  CaseRunner runner(c, copy, stop);
  benchmark::ClearRegisteredBenchmarks();
  benchmark::RegisterBenchmark(c.name.c_str(), [&](benchmark::State& state) { runner.run(state); })
      ->UseManualTime()
      ->MinTime(min_time);
  QuietReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter, ".");
  benchmark::ClearRegisteredBenchmarks();
  return runner.finish();
}

}  // namespace kv4::bench
