#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "cache_flags.h"
#include "checks/sizes.h"
#include "checks/table.h"
#include "commands.h"
#include "heat_map.h"
#include "key_flags.h"
#include "option_values.h"
#include "page.h"
#include "printable.h"
#include "progress.h"
#include "checks/session_rows.h"
#include "status_reader.h"

namespace kv4::cli {

using namespace checks;

namespace {

using nlohmann::json;

constexpr int kMapColumns = 200;  // of the picture of all layers
constexpr int kMapRows = 512;     // limit of the picture of one layer
constexpr int kLayersAll = -1;

struct InspectFlags {
  std::string path, part = "entries", svg, png;
  KeyFlags keys;
  std::optional<RequestId> request;
  int layer = kLayersAll;
  bool json = false;
};

/// Counts over the rows of one part of one layer.
struct Totals {
  std::int64_t rows = 0, numbers = 0, zeros = 0, not_finite = 0;
  double squares = 0;
  float largest = 0;

  void add(std::span<const float> values) {
    ++rows;
    numbers += static_cast<std::int64_t>(values.size());
    for (const float v : values) {
      if (!std::isfinite(v)) {
        ++not_finite;
        continue;
      }
      zeros += v == 0.0f;
      squares += static_cast<double>(v) * v;
      largest = std::max(largest, std::abs(v));
    }
  }
  double rms() const {
    return numbers > not_finite ? std::sqrt(squares / static_cast<double>(numbers - not_finite)) : 0;
  }
};

double rms_of(std::span<const float> values) {
  Totals totals;
  totals.add(values);
  return totals.rms();
}

/// All figures and pictures of the report, filled row by row.
class Inspection {
 public:
  explicit Inspection(const InspectFlags& flags) : flags_(flags) {}

  void take(const DecodedRow& row) {
    totals_[{row.layer->layer, row.part}].add(row.values);
    const bool draws = !flags_.svg.empty() || !flags_.png.empty();
    if (!draws || kRowPartNames[static_cast<int>(row.part)] != flags_.part) return;
    if (flags_.layer == kLayersAll)
      of_layer_[row.layer->layer].push_back({row.position, row.tokens, static_cast<float>(rms_of(row.values))});
    else if (flags_.layer == row.layer->layer)
      keep(row);
  }

  /// Root mean squares, layer by position; or the magnitudes of one layer's rows.
  HeatMap map(const SessionContents& contents) const {
    return flags_.layer == kLayersAll ? map_of_layers(contents) : map_of_rows(contents);
  }

  const auto& totals() const { return totals_; }

 private:
  /// Keeps every row at first, then every second, fourth, ...: as many as the picture has lines for.
  void keep(const DecodedRow& row) {
    if (row.index % step_ != 0) return;
    rows_[row.index].assign(row.values.begin(), row.values.end());
    if (rows_.size() <= kMapRows) return;
    step_ *= 2;
    std::erase_if(rows_, [&](const auto& kept) { return kept.first % step_ != 0; });
  }

  HeatMap map_of_layers(const SessionContents& contents) const {
    require(!of_layer_.empty(), ErrorCode::bad_argument, "no layer has {} in this session: there is nothing to draw",
            flags_.part);
    HeatMap map{.title = fmt::format("{} of every layer: root mean square by position", flags_.part),
                .x_label = "position",
                .value_label = "rms",
                .row_title = "layer",
                .columns = kMapColumns,
                .values = {},
                .row_labels = {},
                .block_tokens = contents.schema.block_tokens,
                .row_begins = {}};
    std::int64_t first = std::numeric_limits<std::int64_t>::max(), last = 0;
    for (const auto& [layer, points] : of_layer_)
      for (const Point& p : points)
        first = std::min(first, p.position), last = std::max(last, p.position + p.tokens - 1);
    map.x_first = first;
    map.x_last = last;
    for (const auto& [layer, points] : of_layer_) {
      std::vector<double> sum(kMapColumns);
      std::vector<int> count(kMapColumns);
      std::vector<std::size_t> end(kMapColumns);  // first column after those that its entries cover
      const std::int64_t positions = last - first + 1;
      for (const Point& p : points) {
        const std::size_t column = (p.position - first) * kMapColumns / positions;
        sum[column] += p.rms;
        ++count[column];
        end[column] = ceil_div((p.position + p.tokens - first) * kMapColumns, positions);
      }
      float shown = NAN;
      std::size_t until = 0;
      for (std::size_t i = 0; i < sum.size(); ++i) {
        if (count[i] > 0) shown = static_cast<float>(sum[i] / count[i]), until = end[i];
        map.values.push_back(i < until ? shown : NAN);
      }
      map.row_labels.push_back(fmt::format("{} {}", layer, to_string(contents.schema.layer(layer).spec.kind)));
    }
    return map;
  }

  HeatMap map_of_rows(const SessionContents& contents) const {
    contents.schema.layer(flags_.layer);  // throws if there is no such layer
    require(!rows_.empty(), ErrorCode::bad_argument, "layer {} has no {} in this session", flags_.layer, flags_.part);
    HeatMap map{.title = fmt::format("layer {}, {}: log2 of magnitudes", flags_.layer, flags_.part),
                .x_label = "channel",
                .value_label = "log2 |x|",
                .row_title = "row",
                .columns = 0,
                .values = {},
                .row_labels = {},
                .row_begins = {}};
    for (const auto& [index, values] : rows_) map.columns = std::max(map.columns, static_cast<int>(values.size()));
    map.x_last = map.columns - 1;
    for (const auto& [index, values] : rows_) {
      for (const float v : values) map.values.push_back(v == 0 ? NAN : std::log2(std::abs(v)));
      map.values.resize(map.columns * (map.row_labels.size() + 1), NAN);  // a shorter row
      map.row_labels.push_back(fmt::format("{}", index));
    }
    return wrapped(std::move(map));
  }

  struct Point {
    std::int64_t position, tokens;
    float rms;
  };

  const InspectFlags& flags_;
  std::map<std::pair<int, RowPart>, Totals> totals_;
  std::map<int, std::vector<Point>> of_layer_;
  std::map<std::int64_t, std::vector<float>> rows_;  // of the chosen layer, by index
  std::int64_t step_ = 1;
};

/// The source of the report: a session's file, or a running request.
struct Subject {
  std::string path, title;
  std::optional<RequestStatus> running = {};  // as last published
  bool saved = true;                          // false: written for this report only, so its protection means nothing
};

void print_json(const SessionContents& contents, const Inspection& inspection, const Subject& subject) {
  json rows = json::array();
  for (const auto& [place, t] : inspection.totals()) {
    const LayerCacheSchema& layer = contents.schema.layer(place.first);
    rows.push_back({{"layer", layer.spec.layer},
                    {"kind", to_string(layer.spec.kind)},
                    {"part", kRowPartNames[static_cast<int>(place.second)]},
                    {"rows", t.rows},
                    {"rms", t.rms()},
                    {"largest", t.largest},
                    {"zeros", t.zeros},
                    {"not_finite", t.not_finite}});
  }
  json out = {{"tokens", contents.lengths[0]},
              {"lengths", contents.lengths},
              {"weights_id", contents.weights_id},
              {"missing_blocks", contents.missing_blocks},
              {"rows", describe_rows(contents.schema.options)},
              {"keys", to_string(contents.schema.options.index_format)},
              {"parts", rows}};
  if (subject.saved) {
    out["protection"] = to_string(contents.protection);
    out["authentic"] = contents.authentic;
  }
  if (const auto& r = subject.running)
    out["running"] = {{"request", r->request},
                      {"rewind_floor", r->rewind_floor},
                      {"blocks", r->blocks},
                      {"shared_blocks", r->shared_blocks},
                      {"kept_blocks", r->kept_blocks}};
  fmt::print("{}\n", out.dump(2, ' ', true, json::error_handler_t::replace));
}

void print_text(const SessionContents& contents, const Inspection& inspection, const Subject& subject) {
  fmt::print("{}: {} tokens, rows {}, keys {}, weights '{}'\n", subject.title, group_digits(contents.lengths[0]),
             describe_rows(contents.schema.options), to_string(contents.schema.options.index_format),
             printable(contents.weights_id));
  if (subject.saved) fmt::print("{}\n", describe(contents.protection, contents.authentic));
  if (const auto& r = subject.running)
    fmt::print("{} blocks, of them {} shared with other requests and {} kept for later ones; can be rewound to {}\n",
               group_digits(r->blocks), group_digits(r->shared_blocks), group_digits(r->kept_blocks),
               group_digits(r->rewind_floor));
  fmt::print("\n");
  Table table("rllrrrrr", {"layer", "kind", "part", "rows", "rms", "largest", "zeros", "not finite"});
  for (const auto& [place, t] : inspection.totals()) {
    const LayerCacheSchema& layer = contents.schema.layer(place.first);
    table.row({fmt::format("{}", layer.spec.layer), to_string(layer.spec.kind),
               kRowPartNames[static_cast<int>(place.second)], group_digits(t.rows), fmt::format("{:.4g}", t.rms()),
               fmt::format("{:.4g}", t.largest),
               fmt::format("{:.1f} %", 100.0 * static_cast<double>(t.zeros) / static_cast<double>(t.numbers)),
               group_digits(t.not_finite)});
  }
  fmt::print("{}", table.str());
  if (contents.missing_blocks > 0) fmt::print("\n{} full blocks are missing.\n", contents.missing_blocks);
}

SessionContents read_rows(const Subject& subject, const KeyFlags& keys, Inspection& inspection) try {
  std::optional<Progress> progress;
  std::int64_t shown = 0;
  SessionIdentity identity = keys.of_session();
  // Only the owner may write into a status folder, so its sessions are accepted with or without keys.
  identity.accept_unauthenticated |= !subject.saved;
  return read_session_rows(
      subject.path, identity, [&](const DecodedRow& row) { inspection.take(row); },
      [&](std::int64_t done, std::int64_t total) {
        if (!progress) progress.emplace("reading", total);
        progress->advance(done - std::exchange(shown, done));
      });
} catch (const Error& e) {
  const std::string_view what = e.what();
  fail(e.code(), "{}{}{}{}", what.starts_with(subject.path) ? "" : subject.title + ": ", what, what_it_is(subject.path),
       what_it_needs(subject.path, !keys.path().empty()));
}

int inspect_rows(const InspectFlags& flags, const Subject& subject) {
  Inspection inspection(flags);
  const SessionContents contents = read_rows(subject, flags.keys, inspection);
  if (!flags.png.empty()) write_file(flags.png, png_of(inspection.map(contents), flags.layer == kLayersAll ? 4 : 2));
  if (!flags.svg.empty()) write_file(flags.svg, svg_of(inspection.map(contents)));
  if (flags.json)
    print_json(contents, inspection, subject);
  else
    print_text(contents, inspection, subject);
  return contents.missing_blocks > 0 ? 1 : 0;
}

/// Lists the requests of a running cache.
int list_requests(const InspectFlags& flags) {
  const PublishedStatus published = read_published_status(flags.path);
  if (flags.json) {
    fmt::print("{}\n", json::parse(status_text(published)).dump(2, ' ', true));
    return 0;
  }
  const CacheStatistics& cache = published.status.cache;
  fmt::print("{}: {} of process {}, {} of {} requests run, {} blocks held, {} kept, {} free\n\n", flags.path,
             printable(published.model), published.process, group_digits(cache.requests),
             group_digits(cache.max_requests), group_digits(cache.held_blocks), group_digits(cache.evictable_blocks),
             group_digits(cache.free_blocks));
  Table table("rrrrrr", {"request", "tokens", "rewinds to", "blocks", "shared", "kept"});
  for (const RequestStatus& r : published.status.requests)
    table.row({fmt::format("{}", r.request), fmt::format("{}", fmt::join(r.lengths, " + ")),
               group_digits(r.rewind_floor), group_digits(r.blocks), group_digits(r.shared_blocks),
               group_digits(r.kept_blocks)});
  fmt::print("{}", table.str());
  for (const TierReport& tier : published.status.tiers)
    if (tier.name != "host")
      fmt::print("\ntier {}: {}\n", printable(tier.name),
                 tier.protection == Protection::none ? kNoKeyText : to_string(tier.protection));
  return 0;
}

int inspect(const InspectFlags& flags) {
  const bool running = std::filesystem::is_directory(flags.path);
  require(running || !flags.request, ErrorCode::bad_argument,
          "--request is one of a running cache; {} is no status folder", flags.path);
  if (!running) return inspect_rows(flags, {.path = flags.path, .title = flags.path});
  if (!flags.request) return list_requests(flags);
  read_published_status(flags.path);  // throws where no cache would answer
  const AskedRequest asked(flags.path, *flags.request);
  Subject subject{
      .path = asked.path(), .title = fmt::format("{}, request {}", flags.path, *flags.request), .saved = false};
  for (const RequestStatus& r : read_published_status(flags.path).status.requests)
    if (r.request == *flags.request) subject.running = r;
  return inspect_rows(flags, subject);
}

}  // namespace
}  // namespace kv4::cli

void add_inspect(CLI::App& app, int& exit_code) {
  using namespace kv4::cli;
  CLI::App* command =
      app.add_subcommand("inspect", "What a saved session or a running request holds, decoded: figures or a heat map");
  auto flags = std::make_shared<InspectFlags>();
  command
      ->add_option("FILE|DIR", flags->path,
                   "a file of save_session_file, or the status folder of a running cache (kv4::StatusFolder)")
      ->required();
  command
      ->add_option("--request", flags->request,
                   "of a running cache: this one, which goes on meanwhile; without it the requests are listed")
      ->type_name("ID");
  take_one_of(*command
                   ->add_option("--part", flags->part,
                                "of the picture: window, entries, keys, pending or pending-keys (rows that wait)")
                   ->capture_default_str(),
              {std::begin(kRowPartNames), std::end(kRowPartNames)});
  command
      ->add_option("--layer", flags->layer,
                   "of the picture: one layer's rows, channel by channel; without it every layer, by position")
      ->check(CLI::NonNegativeNumber);
  command
      ->add_option("--svg", flags->svg, "draw a heat map into this file; in a browser it has values under the pointer")
      ->type_name("FILE");
  command->add_option("--png", flags->png, "the same as PNG, without labels")->type_name("FILE");
  add_session_flags(*command, flags->keys);
  command->add_flag("--json", flags->json, "figures as JSON");
  command->footer(
      "Examples:\n"
      "  kv4 inspect chat.kv4s                                       rows, magnitudes, zeros, NaN by layer\n"
      "  kv4 inspect chat.kv4s --svg chat.svg                        entries of every layer along the context\n"
      "  kv4 inspect chat.kv4s --layer 2 --part keys --svg keys.svg  the index keys of a layer\n"
      "  kv4 inspect /run/kv4/gpu0                                   requests of a running cache\n"
      "  kv4 inspect /run/kv4/gpu0 --request 17 --svg now.svg        one of them, as it is now\n"
      "\n"
      "Exit codes: 0 fine, 1 blocks are missing, 2 it cannot be read or is damaged ('kv4 session inspect' says "
      "where).");
  command->callback([flags, &exit_code] { exit_code = inspect(*flags); });
}
