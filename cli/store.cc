#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "checks/sizes.h"
#include "checks/table.h"
#include "commands.h"
#include "key_flags.h"
#include "kv4/error.h"
#include "store_bench.h"
#include "tier/disk_store.h"
#include "tier/store_survey.h"

namespace kv4::cli {

using namespace checks;

namespace {

using nlohmann::json;
using tier::SegmentSurvey;
using tier::StoreSurvey;

struct StoreFlags {
  std::string directory;
  KeyFlags keys;
  bool json = false;
};

/// In hex: a chunk's own key, else the record's.
std::string key_text(const tier::DamagedRecord& record) {
  std::string out;
  for (const std::byte b : record.label ? record.label->key_span() : std::span<const std::byte>(record.id.key))
    out += fmt::format("{:02x}", std::to_integer<unsigned>(b));
  return out;
}

/// A foreign name in printable form, for a terminal and for JSON.
std::string printable(const std::string& name) {
  std::string out;
  for (const char c : name) out += c >= ' ' && c <= '~' ? c : '?';
  return out;
}

std::string layout_name(std::uint64_t id) { return fmt::format("{:016x}", id); }

json describe(const SegmentSurvey& segment) {
  if (!segment.problem.empty()) return {{"name", segment.name}, {"problem", segment.problem}};
  json out = {{"name", segment.name},
              {"layout_id", layout_name(segment.header.layout_id)},
              {"bytes", segment.header.bytes},
              {"used_bytes", segment.used_bytes},
              {"records", segment.records},
              {"payload_bytes", segment.payload_bytes},
              {"chunks", segment.chunks},
              {"trimmed_chunks", segment.trimmed_chunks},
              {"trimmed_bytes", segment.trimmed_bytes},
              {"dead_records", segment.dead_records},
              {"unreadable", json::array()},
              {"damaged", json::array()}};
  for (const tier::Gap& gap : segment.gaps)
    out["unreadable"].push_back({{"offset", gap.offset}, {"bytes", gap.bytes}, {"reason", to_string(gap.reason)}});
  for (const tier::DamagedRecord& record : segment.damaged)
    out["damaged"].push_back({{"offset", record.offset},
                              {"bytes", record.bytes},
                              {"tenant", record.id.tenant},
                              {"key", key_text(record)},
                              {"reason", to_string(record.reason)}});
  return out;
}

std::int64_t unprotected(const StoreSurvey& survey) {
  return survey.records(&SegmentSurvey::records) - survey.records(&SegmentSurvey::sealed_records) -
         survey.records(&SegmentSurvey::authenticated_records);
}

std::shared_ptr<const tier::RecordGuard> guard_of(const StoreFlags& flags) {
  return std::make_shared<tier::RecordGuard>(tier::GuardOptions{"disk", flags.keys.read(), Protection::sealed, false});
}

json describe(const StoreSurvey& survey) {
  json out = {{"ok", survey.sound()},
              {"keys", survey.keys},
              {"tenants", survey.tenants},
              {"sealed_records", survey.records(&SegmentSurvey::sealed_records)},
              {"authenticated_records", survey.records(&SegmentSurvey::authenticated_records)},
              {"unprotected_records", unprotected(survey)},
              {"superseded_records", survey.superseded_records},
              {"unfinished_segments", survey.unfinished_segments},
              {"damaged_segments", survey.damaged_segments()},
              {"unreadable_segments", survey.unreadable_segments()},
              {"set_aside_files", survey.set_aside_files},
              {"set_aside", json::array()},
              {"damaged_records", survey.damaged_records()},
              {"unreadable_ranges", survey.gaps()},
              {"segments", json::array()}};
  for (const SegmentSurvey& segment : survey.segments) out["segments"].push_back(describe(segment));
  for (const tier::SetAsideFile& file : survey.set_aside)
    out["set_aside"].push_back({{"name", printable(file.name)}, {"reason", file.reason}});
  return out;
}

void print(const StoreSurvey& survey, const std::string& directory) {
  fmt::print("{}: {} keys of {} tenants in {} segments, {} older records\n\n", directory, group_digits(survey.keys),
             group_digits(survey.tenants), survey.segments.size(), group_digits(survey.superseded_records));
  Table table("lrrrrrr", {"segment", "records", "payload", "dead", "used", "of", "layout"});
  for (const SegmentSurvey& s : survey.segments) {
    if (s.problem.empty())
      table.row({s.name, group_digits(s.records), human_bytes(static_cast<double>(s.payload_bytes)),
                 group_digits(s.dead_records), human_bytes(static_cast<double>(s.used_bytes)),
                 human_bytes(static_cast<double>(s.header.bytes)), layout_name(s.header.layout_id)});
    else
      table.row({s.name, "?"});
  }
  fmt::print("{}\n", table.str());
  const std::int64_t sealed = survey.records(&SegmentSurvey::sealed_records),
                     authenticated = survey.records(&SegmentSurvey::authenticated_records), plain = unprotected(survey);
  if (const std::int64_t chunks = survey.records(&SegmentSurvey::chunks); chunks > 0)
    fmt::print("{} of the records are chunks, {} of them trimmed, which saves {}\n", group_digits(chunks),
               group_digits(survey.records(&SegmentSurvey::trimmed_chunks)),
               human_bytes(static_cast<double>(survey.records(&SegmentSurvey::trimmed_bytes))));
  fmt::print("{} records are sealed, {} authenticated, {} neither{}\n\n", group_digits(sealed),
             group_digits(authenticated), group_digits(plain),
             plain > 0 ? fmt::format(": {}", kNoKeyText) : std::string());
}

void print_losses(const StoreSurvey& survey) {
  for (const tier::SetAsideFile& file : survey.set_aside)
    fmt::print("set aside: {}: {}\n", printable(file.name), file.reason);
  if (const std::int64_t more = survey.set_aside_files - std::ssize(survey.set_aside); more > 0)
    fmt::print("set aside: {} more files\n", group_digits(more));
  for (const SegmentSurvey& s : survey.segments) {
    if (s.refusal == tier::SegmentRefusal::unreadable)
      fmt::print("left alone: {}: {}; its records miss until that works\n", s.name, s.problem);
    else if (s.refusal == tier::SegmentRefusal::not_a_file)
      fmt::print("set aside: {}: {}\n", s.name, s.problem);
    else if (!s.problem.empty())
      fmt::print("lost: {}, all of it: {}\n", s.name, s.problem);
    for (const tier::Gap& gap : s.gaps)
      fmt::print("lost: {} at {}: {} bytes that are no record ({})\n", s.name, gap.offset, group_digits(gap.bytes),
                 to_string(gap.reason));
    for (const tier::DamagedRecord& record : s.damaged)
      fmt::print("lost: {} at {}: {} bytes of tenant {}, key {} ({})\n", s.name, record.offset,
                 group_digits(record.bytes), record.id.tenant, key_text(record), to_string(record.reason));
  }
}

/// Exit code: 1 where the checked part is damaged, else 0.
int look(const StoreFlags& flags, bool read_payloads) {
  const auto files = tier::make_posix_file_system();
  const StoreSurvey survey = tier::survey_store(*files, flags.directory, read_payloads, *guard_of(flags));
  if (flags.json) {
    fmt::print("{}\n", describe(survey).dump(2));
  } else {
    print(survey, flags.directory);
    print_losses(survey);
    if (survey.sound())
      fmt::print("{}\n",
                 read_payloads ? "Every record is sound." : "Headers are sound; 'kv4 store verify' reads payloads.");
  }
  return survey.sound() ? 0 : 1;
}

/// The layout and sizes of most of the store's segments.
tier::StoreOptions options_of(const StoreSurvey& survey, const std::string& directory) {
  tier::StoreOptions options;
  options.directory = directory;
  std::map<std::pair<std::uint64_t, std::int64_t>, int> segments;
  int most = 0;
  for (const SegmentSurvey& segment : survey.segments) {
    if (!segment.problem.empty()) continue;
    const int count = ++segments[{segment.header.layout_id, segment.header.bytes}];
    if (count < most) continue;
    most = count;
    options.layout_id = segment.header.layout_id;
    options.segment_bytes = segment.header.bytes;
  }
  options.capacity_bytes = INT64_MAX;  // reclaiming drops no sound record
  return options;
}

int collect(const StoreFlags& flags) {
  const auto files = tier::make_posix_file_system();
  const StoreSurvey before = tier::survey_store(*files, flags.directory, true);
  tier::StoreOptions options = options_of(before, flags.directory);
  options.guard = guard_of(flags);
  const auto store = tier::DiskStore::open(*files, options);
  const tier::CollectResult result = store->collect();
  const std::int64_t unopened = store->stats().unopened_segments;
  const bool durable = store->close() && result.durable;
  if (flags.json) {
    json out = describe(before);
    out["ok"] = durable && unopened == 0;
    out["unopened_segments"] = unopened;
    out["freed_bytes"] = result.freed_bytes;
    fmt::print("{}\n", out.dump(2));
  } else {
    print_losses(before);
    fmt::print("{} records kept, {} of segments given back{}\n", group_digits(before.keys - result.damaged_records),
               human_bytes(static_cast<double>(result.freed_bytes)),
               durable ? "" : "; the disk failed on the way, try again");
    if (unopened > 0)
      fmt::print("{} segments could not be opened and are as they were; their records are not among those kept\n",
                 group_digits(unopened));
  }
  return durable && unopened == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kv4::cli

void add_store(CLI::App& app, int& exit_code) {
  using namespace kv4::cli;
  CLI::App* command = app.add_subcommand("store", "What is in a disk store, whether it is sound, and reclaim");
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* what, auto work) {
    CLI::App* action = command->add_subcommand(name, what);
    auto flags = std::make_shared<StoreFlags>();
    action->add_option("DIR", flags->directory, "the store's directory")->required();
    add_flags(*action, flags->keys);
    action->add_flag("--json", flags->json, "figures as JSON");
    action->footer(fmt::format("Example:\n  kv4 store {} /var/cache/kv4 --json", name));
    action->callback([flags, work, &exit_code] { exit_code = work(*flags); });
  };
  add("inspect", "Segments, records and tenants, from headers alone; changes nothing",
      [](const StoreFlags& flags) { return look(flags, false); });
  add("verify", "Read every record and name what was lost; changes nothing",
      [](const StoreFlags& flags) { return look(flags, true); });
  add("gc", "Drop damaged and dead records and give their room back", collect);
  CLI::App* bench = command->add_subcommand("bench", "The store's speed beside the disk's own, in one run");
  auto flags = std::make_shared<StoreBenchFlags>();
  bench->add_option("DIR", flags->options.directory, "where to write; what it makes there it removes")->required();
  bench->add_option("--record-bytes", flags->options.record_bytes, "payloads, one measurement each")
      ->check(CLI::Range(1, 1 << 28));
  bench->add_option("--total-bytes", flags->options.total_bytes, "written and read per measurement")
      ->check(CLI::PositiveNumber);
  bench->add_option("--depth", flags->options.depth, "transfers in flight")->check(CLI::Range(1, 4096));
  bench->add_option("--batch", flags->options.batch, "records per put and get")->check(CLI::Range(1, 1 << 20));
  bench->add_option("--sync-bytes", flags->options.sync_bytes, "fdatasync after as many")->check(CLI::PositiveNumber);
  bench->add_option("--rounds", flags->options.rounds, "of everything; medians are shown")->check(CLI::Range(1, 1000));
  bench->add_option("--index", flags->options.index_records, "also open a store of that many records, and look them up")
      ->check(CLI::NonNegativeNumber);
  bench->add_flag("--fio", flags->options.fio, "also run fio, which has to be installed");
  bench->add_flag("--encrypt", flags->options.encrypt,
                  "also a sealed and an authenticated store, beside the one without keys");
  bench->add_flag("--chunks", flags->options.chunks,
                  "also a store of chunks (kv4/chunk_store.h), with copied and with registered memory; with --index, "
                  "one of so many chunks of 4 KiB");
  bench->add_flag("--json", flags->json, "figures as JSON");
  bench->footer(
      "Example:\n  kv4 store bench /var/cache --depth 32 --index 1000000\n\n"
      "Ctrl-C ends it early with what was measured so far and exit code 130.");
  bench->callback([flags, &exit_code] { exit_code = bench_store(*flags); });
  command->footer(
      "Examples:\n"
      "  kv4 store inspect /var/cache/kv4         what is in it\n"
      "  kv4 store verify /var/cache/kv4 --json   is every record sound\n"
      "  kv4 store gc /var/cache/kv4              give back what dead and damaged records take\n"
      "  kv4 store bench /var/cache               how fast puts and gets are there\n"
      "\n"
      "All take --json. Exit codes: 0 sound (gc: done), 1 something is damaged or set aside (gc: the disk failed, or "
      "a\n"
      "segment could not be opened: gc leaves it alone), 2 there is no store, another process has it, or it has "
      "another\n"
      "format version. A damaged store is no error: what is left is read. Files that no store has made are set aside.");
}
