// The results of `kv4 golden`: one line per quantity.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kv4::checks {

struct GoldenCheck {
  std::string name;
  double error = 0;
  std::optional<double> bound;  // none: reported only
  bool ok = true;
};

/// The largest error seen; a NaN counts as infinite, so that it cannot hide.
class Worst {
 public:
  void see(double error) {
    if (!(error <= value_)) value_ = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
  }
  double value() const { return value_; }

 private:
  double value_ = 0;
};

class GoldenReport {
 public:
  /// `before_check` runs before each line. If it throws, the check that adds the line ends; earlier lines stay.
  explicit GoldenReport(std::function<void()> before_check = [] {}) : before_check_(std::move(before_check)) {}

  void check(std::string name, double error, double bound) {
    before_check_();
    Worst worst;
    worst.see(error);
    checks_.push_back({std::move(name), worst.value(), bound, worst.value() <= bound});
  }
  void note(std::string name, double error) {
    before_check_();
    checks_.push_back({std::move(name), error, std::nullopt, true});
  }

  const std::vector<GoldenCheck>& checks() const { return checks_; }
  int failed() const {
    int count = 0;
    for (const GoldenCheck& check : checks_) count += check.ok ? 0 : 1;
    return count;
  }

 private:
  std::function<void()> before_check_;
  std::vector<GoldenCheck> checks_;
};

}  // namespace kv4::checks
