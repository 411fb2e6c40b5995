// `kv4 serve-metrics DIR...`: the published status of running caches, for Prometheus and people.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "checks/sizes.h"
#include "commands.h"
#include "interrupts.h"
#include "live_page.h"
#include "metrics.h"
#include "output.h"
#include "page.h"
#include "plot.h"
#include "printable.h"
#include "status_reader.h"

namespace kv4::cli {

using namespace checks;

namespace {

constexpr int kPeriodMs = 1000;
constexpr std::size_t kMostRates = 3600;

struct ServeFlags {
  std::vector<std::string> folders;
  std::string listen = "127.0.0.1:9464";
  bool once = false, json = false;
};

/// A folder and its last status.
struct Watched {
  std::string name, directory;
  StatusReader reader{{}};
  std::optional<PublishedStatus> now;
  PageHead head{.headline = {}, .rate_title = "Share of prompts' tokens that were found", .rates = {}};

  /// `waits`: if only a change tells whether the status is new, waits for one.
  void look(bool waits) {
    try {
      now = waits ? read_published_status(directory) : reader.read();
    } catch (const std::exception& e) {  // any kind: a bad file of one cache does not end the service for others
      now.reset();
      head.headline = e.what();
      return;
    }
    const CacheStatistics& cache = now->status.cache;
    const double share = cache.prefix.prompt_tokens == 0 ? 0
                                                         : static_cast<double>(cache.prefix.usable_tokens) /
                                                               static_cast<double>(cache.prefix.prompt_tokens);
    head.rates.push_back(share);
    if (head.rates.size() > kMostRates) head.rates.erase(head.rates.begin());
    head.headline =
        fmt::format("{} of process {}: {} of {} requests run, {:.1f} % of prompts' tokens were found", now->model,
                    now->process, group_digits(cache.requests), group_digits(cache.max_requests), 100 * share);
  }
  const CacheStatus* status() const { return now ? &now->status : nullptr; }
};

/// The last part of a path, in a form that an address can contain.
std::string name_of(const std::string& directory) {
  std::filesystem::path path(directory);
  if (!path.has_filename()) path = path.parent_path();
  std::string out = path.filename().string();
  if (out.empty() || out.starts_with('.')) out = std::filesystem::absolute(path).lexically_normal().filename().string();
  std::replace_if(
      out.begin(), out.end(), [](unsigned char c) { return !std::isalnum(c) && c != '_' && c != '.'; }, '-');
  return out;
}

std::vector<Watched> watch_folders(const std::vector<std::string>& folders) {
  std::vector<Watched> out;
  for (const std::string& folder : folders) {
    const std::string name = name_of(folder);
    for (const Watched& other : out)
      require(other.name != name, ErrorCode::bad_argument,
              "{} and {} would both be called '{}'; give one of them another name, for example by a link",
              other.directory, folder, name);
    Watched& added = out.emplace_back();
    added.name = name;
    added.directory = folder;
    added.reader = StatusReader(folder);
  }
  return out;
}

MetricsText metrics_of(const std::vector<Watched>& caches) {
  std::vector<WatchedCache> named;
  for (const Watched& cache : caches) named.push_back({cache.name, cache.status()});
  return metrics_text(named);
}

/// A list of links for more than one cache.
std::string index_page(const std::vector<Watched>& caches) {
  std::string out = open_page("kv4, live") + "<h1>kv4, live</h1><ul>";
  for (const Watched& cache : caches)
    out += fmt::format("<li><a href=\"{0}/\">{0}</a>: {1}</li>", cache.name, escape_html(cache.head.headline));
  return out + "</ul><p><a href=\"metrics\">metrics</a></p>" + close_page();
}

void refresh(std::vector<Watched>& caches, HttpServer& server) {
  for (Watched& cache : caches) {
    if (interrupted()) return;
    cache.look(false);
    serve_page(server, caches.size() == 1 ? "/" : "/" + cache.name + "/", cache.status(), cache.head);
  }
  if (caches.size() > 1) server.set("/", "text/html", index_page(caches));
  serve_metrics(server, metrics_of(caches));
}

nlohmann::ordered_json describe(const std::vector<Watched>& caches) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const Watched& cache : caches) {
    nlohmann::ordered_json one = {{"name", cache.name}, {"directory", cache.directory}, {"up", cache.now.has_value()}};
    if (cache.now) one["published"] = nlohmann::json::parse(status_text(*cache.now));
    out.push_back(one);
  }
  return out;
}

int show_once(std::vector<Watched>& caches, bool json) {
  for (Watched& cache : caches) cache.look(true);
  fmt::print("{}", json ? describe(caches).dump(2, ' ', true) + "\n" : metrics_of(caches).prometheus);
  return std::all_of(caches.begin(), caches.end(), [](const Watched& cache) { return cache.now.has_value(); }) ? 0 : 1;
}

int serve(const ServeFlags& flags) {
  std::vector<Watched> caches = watch_folders(flags.folders);
  if (flags.once) return show_once(caches, flags.json);
  catch_interrupts();
  HttpServer server(flags.listen, "--listen");
  refresh(caches, server);
  if (flags.json) {
    fmt::print("{}\n",
               nlohmann::ordered_json{{"address", server.address()}, {"caches", describe(caches)}}.dump(-1, ' ', true));
  } else {
    fmt::print("serving {} and {}metrics\n", server.address(), server.address());
    for (const Watched& cache : caches) fmt::print("{}: {}\n", cache.name, printable(cache.head.headline));
  }
  flush_output();
  for (sleep_ms(kPeriodMs); !interrupted(); sleep_ms(kPeriodMs)) refresh(caches, server);
  return 0;
}

}  // namespace
}  // namespace kv4::cli

void add_serve_metrics(CLI::App& app, int& exit_code) {
  using namespace kv4::cli;
  CLI::App* command =
      app.add_subcommand("serve-metrics", "Metrics of running caches for Prometheus, and a live page of each");
  auto flags = std::make_shared<ServeFlags>();
  command
      ->add_option("DIR", flags->folders, "status folders of running caches (kv4::StatusFolder, kv4_status_folder_new)")
      ->required();
  command->add_option("--listen", flags->listen, "where to serve; a port alone is one of 127.0.0.1, 0 any that is free")
      ->capture_default_str()
      ->type_name("HOST:PORT");
  command->add_flag("--once", flags->once, "print the metrics and end, for example for a textfile collector");
  command->add_flag("--json", flags->json, "the address and all figures as JSON, once");
  command->footer(
      "Serves /metrics for Prometheus and a page at /, or a page for each cache at /NAME/; NAME is the folder's last\n"
      "part and the label 'cache'. A cache that does not publish has kv4_up 0 and nothing else. Ends at SIGINT or\n"
      "SIGTERM. What a folder says can be read by whoever can reach the address: there is no password. On loopback a\n"
      "request must name an address, localhost or the HOST of --listen, against pages that rebind their name.\n"
      "\n"
      "Examples:\n"
      "  kv4 serve-metrics /run/kv4/gpu0                          metrics and a page on 127.0.0.1:9464\n"
      "  kv4 serve-metrics /run/kv4/gpu* --listen 0.0.0.0:9464    eight caches, for a Prometheus elsewhere\n"
      "  kv4 serve-metrics /run/kv4/gpu0 --once                   print them\n"
      "  kv4 replay --generate --data real --status /tmp/replay   a cache to try it with\n"
      "\n"
      "Exit codes: 0 fine, 1 with --once: a cache does not publish, 2 bad usage, or it cannot be served there.");
  command->callback([flags, &exit_code] { exit_code = serve(*flags); });
}
