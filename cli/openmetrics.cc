#include "openmetrics.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <string_view>

namespace kv4::cli {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? std::string("\\n") : std::string(1, c);
  }
  return out;
}

/// Bounds in the format's notation: 128.0, 0.0025, 1e-06.
std::string bound_text(double bound) {
  if (std::isinf(bound)) return "+Inf";
  const std::string text = fmt::format("{}", bound);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

/// Whole numbers are written as integers: a float's text would lose digits for a reader that shows it.
std::string value_text(double value) {
  constexpr double exact = 9007199254740992;  // 2^53
  return value == std::trunc(value) && std::abs(value) <= exact ? fmt::format("{}", static_cast<std::int64_t>(value))
                                                                : fmt::format("{}", value);
}

const char* type_name(MetricType type) {
  return type == MetricType::Counter ? "counter" : type == MetricType::Histogram ? "histogram" : "gauge";
}

class Writer {
 public:
  void add(const MetricFamily& family) {
    constexpr std::string_view total = "_total";
    std::string name = family.name;
    if (family.type == MetricType::Counter && name.ends_with(total)) name.resize(name.size() - total.size());
    fmt::format_to(out_, "# TYPE {} {}\n", name, type_name(family.type));
    for (const std::string_view unit : {"seconds", "bytes"})
      if (name.ends_with("_" + std::string(unit))) fmt::format_to(out_, "# UNIT {} {}\n", name, unit);
    fmt::format_to(out_, "# HELP {} {}\n", name, escaped(family.help));
    for (const ClientMetric& metric : family.metric) {
      if (family.type == MetricType::Histogram)
        add_histogram(name, metric);
      else if (family.type == MetricType::Counter)
        sample(name + "_total", metric.label, value_text(metric.counter.value));
      else
        sample(name, metric.label, value_text(metric.gauge.value));
    }
  }
  std::string take() { return std::move(text_) + "# EOF\n"; }

 private:
  void add_histogram(const std::string& name, const ClientMetric& metric) {
    for (const ClientMetric::Bucket& bucket : metric.histogram.bucket) {
      Labels labels = metric.label;
      labels.push_back({"le", bound_text(bucket.upper_bound)});
      sample(name + "_bucket", labels, std::to_string(bucket.cumulative_count));
    }
    sample(name + "_count", metric.label, std::to_string(metric.histogram.sample_count));
    sample(name + "_sum", metric.label, value_text(metric.histogram.sample_sum));
  }
  void sample(const std::string& name, const Labels& labels, const std::string& value) {
    text_ += name;
    for (std::size_t i = 0; i < labels.size(); ++i)
      fmt::format_to(out_, "{}{}=\"{}\"", i == 0 ? '{' : ',', labels[i].name, escaped(labels[i].value));
    fmt::format_to(out_, "{} {}\n", labels.empty() ? "" : "}", value);
  }

  std::string text_;
  std::back_insert_iterator<std::string> out_ = std::back_inserter(text_);
};

}  // namespace

std::string openmetrics_text(const std::vector<MetricFamily>& families) {
  Writer writer;
  for (const MetricFamily& family : families) writer.add(family);
  return writer.take();
}

}  // namespace kv4::cli
