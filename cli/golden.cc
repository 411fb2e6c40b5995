// `kv4 golden DIR`: recorded vectors through the real library.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "checks/device_tensors.h"
#include "checks/golden_checks.h"
#include "checks/golden_v41_recording.h"
#include "checks/table.h"
#include "commands.h"
#include "device_flag.h"
#include "interrupts.h"
#include "kv4/error.h"

namespace kv4::cli {

using namespace checks;

namespace {

struct GoldenFlags {
  std::string directory;
  std::string device = "cpu";
  bool json = false;
};

// Files of V4.1 have other names: codecs41*, and layers whose metadata has the model's schedule. False: there are none.
bool run_v41(const std::filesystem::path& root, const std::shared_ptr<Backend>& backend, GoldenReport& report) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(root))
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  const bool is_v4 = std::filesystem::exists(root / "codecs.safetensors");
  if (is_v4 || paths.empty()) return false;
  bool found = false;
  std::vector<SafeTensors> layers;
  for (const std::filesystem::path& path : paths) {
    SafeTensors file = load_safetensors(path.string());
    if (path.filename().string().starts_with("codecs41")) {
      check_codecs_v41(file, backend, report);
      found = true;
    } else if (is_layer_of_v41(file)) {
      layers.push_back(std::move(file));
    }
  }
  if (!layers.empty()) check_model_v41(layers, backend, report);
  return found || !layers.empty();
}

void run_golden(const std::string& directory, const std::string& device, GoldenReport& report) {
  const std::shared_ptr<Backend> backend = make_backend(device);
  if (!std::filesystem::is_directory(directory)) {
    throw Error(ErrorCode::bad_file,
                directory + ": not a directory; give the one that holds hf_swa.safetensors and its companions");
  }
  const std::filesystem::path root(directory);
  if (run_v41(root, backend, report)) return;
  check_codecs(load_safetensors((root / "codecs.safetensors").string()), backend, report);
  for (const auto& [name, kind] :
       {std::pair("swa", LayerKind::swa), std::pair("csa", LayerKind::csa), std::pair("hca", LayerKind::hca)}) {
    check_layer(load_safetensors((root / fmt::format("hf_{}.safetensors", name)).string()), kind, name, backend,
                report);
  }
}

void print_json(const GoldenReport& report) {
  nlohmann::ordered_json checks = nlohmann::ordered_json::array();
  for (const GoldenCheck& check : report.checks()) {
    nlohmann::ordered_json one = {{"name", check.name}, {"error", check.error}, {"bound", nullptr}, {"ok", check.ok}};
    if (!std::isfinite(check.error)) one["error"] = nullptr;  // JSON has no number for it
    if (check.bound) one["bound"] = *check.bound;
    checks.push_back(one);
  }
  const nlohmann::ordered_json out = {
      {"ok", report.failed() == 0 && !interrupted()}, {"interrupted", interrupted()}, {"checks", checks}};
  fmt::print("{}\n", out.dump(2));
}

void print_table(const GoldenReport& report) {
  Table table("lrrl", {"quantity", "largest error", "bound", "result"});
  for (const GoldenCheck& check : report.checks()) {
    table.row({check.name, fmt::format("{:.3g}", check.error),
               check.bound ? fmt::format("{:g}", *check.bound) : "reported", check.ok ? "ok" : "FAIL"});
  }
  fmt::print("{}", table.str());
  const int failed = report.failed();
  if (failed == 0 && interrupted()) {
    fmt::print("\n{} checks ok, then interrupted\n", report.checks().size());
  } else if (failed == 0) {
    fmt::print("\n{} checks, all ok\n", report.checks().size());
  } else {
    fmt::print("\n{} of {} checks failed\n", failed, report.checks().size());
  }
}

}  // namespace
}  // namespace kv4::cli

void add_golden(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<kv4::cli::GoldenFlags>();
  CLI::App* command =
      app.add_subcommand("golden", "Replay recorded vectors through the library and compare every quantity.");
  command
      ->add_option("DIR", flags->directory,
                   "Holds codecs, hf_swa, hf_csa and hf_hca, each .safetensors; or files of V4.1")
      ->required();
  kv4::cli::add_device_flag(*command, flags->device);
  command->add_flag("--json", flags->json,
                    "Print {\"ok\", \"interrupted\", \"checks\": [{\"name\", \"error\", \"bound\", \"ok\"}]}");
  command->footer(
      "Codec and view checks count what differs (bound 0). Entries are measured in bf16 ulps of their largest channel, "
      "or as a share\n"
      "of what their format may lose; scores, attention and pending rows relative to the largest. Exit code 1: a check "
      "failed.\n"
      "\n"
      "Examples:\n"
      "  kv4 golden tests/reference/vectors\n"
      "  kv4 golden tests/reference/vectors --device cuda");
  command->callback([flags, &exit_code] {
    kv4::cli::catch_interrupts();
    kv4::checks::GoldenReport report(kv4::cli::stop_if_interrupted);
    try {
      kv4::cli::run_golden(flags->directory, flags->device, report);
    } catch (const kv4::cli::Interrupted&) {  // the checks done so far are shown
    }
    if (flags->json) {
      kv4::cli::print_json(report);
    } else {
      kv4::cli::print_table(report);
    }
    if (report.failed() != 0) exit_code = 1;
    if (kv4::cli::interrupted()) exit_code = kv4::cli::interrupted_exit_code();
  });
}
