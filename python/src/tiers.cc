// Tiers and TieredPrefix: contexts below the device, in host memory, on a disk, on servers.
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "cache.h"
#include "keys.h"
#include "kv4/error.h"
#include "kv4/tiered_prefix.h"
#include "progress.h"
#include "prompt.h"
#include "shared_tiers.h"

namespace kv4::python {
namespace {

/// Keeps its cache and its tiers alive (nb::keep_alive where it is made).
struct Tiered {
  Cache* cache;
  SharedTiers* tiers;
  std::optional<TieredPrefix> prefix;

  template <class Call>
  auto work(Call&& call) {
    return cache->work_on(nb::none(), [&](KVCacheManager&) { return tiers->turns.inside(call); });
  }
  template <class Call>
  void at_end(Call&& call) {
    cache->device->at_end([&] { tiers->turns.at_end_inside(call); });
  }

  Tiered(Cache& cache_in, SharedTiers& tiers_in, const TieredOptions& options) : cache(&cache_in), tiers(&tiers_in) {
    if (!cache->manager->schema().options.prefix.enabled)
      throw Error(ErrorCode::bad_argument,
                  "the cache keeps nothing that tiers could take: set prefix.enabled in its options");
    work([&] { prefix.emplace(*cache->manager, *tiers->tiers, options); });
  }
  ~Tiered() {
    at_end([&] { prefix.reset(); });
  }
};

/// Keeps its Tiered alive.
struct Load {
  Tiered* tiered;
  std::optional<PrefixLoad> load;  // empty: cancelled
  std::int64_t brought_blocks = 0, wanted_blocks = 0;

  Load(Tiered& tiered_in, const PromptData& prompt, double timeout) : tiered(&tiered_in) {
    const PromptView view(prompt);
    tiered->work([&] {
      load.emplace(tiered->prefix->start_load(view.prompt(), deadline_of(timeout)));
      note();
    });
  }
  ~Load() { cancel(); }

  bool advance() {
    return tiered->work([&] {
      const bool done = !load || load->advance();
      note();
      return done;
    });
  }
  Admission admit() {
    if (!load) throw Error(ErrorCode::bad_state, "the load is cancelled: use TieredPrefix.admit(prompt)");
    return value_or_raise(tiered->work([&] {
      const Expected<Admission> admission = load->admit();
      note();
      return admission;
    }),
                          "admit");
  }
  void cancel() {
    tiered->at_end([&] { load.reset(); });
  }

 private:
  void note() {
    if (!load) return;
    brought_blocks = load->brought_blocks();
    wanted_blocks = load->wanted_blocks();
  }
};

template <auto kMember>
void def_file(nb::class_<TiersOptions>& options, const char* name, const char* help) {
  options.def_prop_rw(
      name, [](const TiersOptions& self) { return self.*kMember; },
      [](TiersOptions& self, const std::filesystem::path& path) { self.*kMember = path.string(); }, help);
}

void bind_tiers_options(nb::module_& m) {
  nb::class_<TiersOptions> options(m, "TiersOptions", "Which tiers there are, the fastest first, and how large.");
  def_keyword_init<TiersOptions>(options);
  options.def_rw("host_bytes", &TiersOptions::host_bytes, "0: no host memory")
      .def_rw("host_threads", &TiersOptions::host_threads, "that check its records")
      .def_prop_rw(
          "directory", [](const TiersOptions& self) { return self.directory; },
          [](TiersOptions& self, const std::filesystem::path& path) { self.directory = path.string(); },
          nb::for_setter(nb::sig("def directory(self, path: str | os.PathLike, /) -> None")),
          "Empty: no disk. One process at a time; made where it is not there.")
      .def_rw("disk_bytes", &TiersOptions::disk_bytes)
      .def_rw("segment_bytes", &TiersOptions::segment_bytes, "of the disk's files; a multiple of 4,096")
      .def_rw("disk_threads", &TiersOptions::disk_threads, "that read and check its records")
      .def_prop_rw(
          "disk_key",
          [](const TiersOptions& self) -> std::optional<nb::bytes> {
            if (!self.disk_key) return std::nullopt;
            return nb::bytes(self.disk_key->data(), self.disk_key->size());
          },
          [](TiersOptions& self, const std::optional<nb::bytes>& key) {
            self.disk_key.reset();
            if (key) self.disk_key = key_of(*key, "disk_key");
          },
          nb::for_setter(nb::arg("key").none()),
          "bytes [32], one more key of the disk's alone, after `keys`: that of a store which 0.1 sealed. Prefer "
          "`keys`.")
      .def_prop_rw(
          "keys", [](const TiersOptions& self) { return bytes_of(self.keys); },
          [](TiersOptions& self, const std::vector<nb::bytes>& keys) { self.keys = keys_of(keys); },
          nb::for_setter(nb::sig("def keys(self, keys: collections.abc.Sequence[bytes], /) -> None")),
          "list of bytes [32]: they protect every record outside host memory. The first writes, all read, and what "
          "none\n"
          "of them made is a miss. None: whoever can write there chooses what prompts find. See read_key_file().")
      .def_rw("protection", &TiersOptions::protection, "of what is written with keys: sealed or authenticated")
      .def_rw("accept_unauthenticated", &TiersOptions::accept_unauthenticated,
              "for the while of a change: records from before there were keys count")
      .def_rw("servers", &TiersOptions::servers,
              "list of 'redis://user:password@host:port', 'rediss://...' (TLS) or 'host:port', some of a Redis cluster "
              "or one server; assign a whole list to change it")
      .def_rw("user", &TiersOptions::user, "of all servers, where their URLs have none")
      .def_rw("password", &TiersOptions::password)
      .def_rw("allowed_servers", &TiersOptions::allowed_servers,
              "list of 'host', 'host:port' or '10.0.0.0/8': which other servers the cluster may name. With a password "
              "or TLS nothing is ever sent to servers that are neither here nor configured.")
      .def_prop_rw(
          "remote_ttl", [](const TiersOptions& self) { return std::chrono::duration<double>(self.remote_ttl).count(); },
          [](TiersOptions& self, double seconds) { self.remote_ttl = duration_of(seconds, "remote_ttl"); },
          "Seconds after which servers forget a record; 0: never.")
      .def_rw("max_write_bytes", &TiersOptions::max_write_bytes, "of each tier: that wait to be written")
      .def_rw("max_read_bytes", &TiersOptions::max_read_bytes)
      .def_prop_rw(
          "close_limit",
          [](const TiersOptions& self) { return std::chrono::duration<double>(self.close_limit).count(); },
          [](TiersOptions& self, double seconds) { self.close_limit = duration_of(seconds, "close_limit"); },
          "Seconds that Tiers take at most when they go away without close(): for what waits, and a flush.");
  def_file<&TiersOptions::tls_ca_file>(options, "tls_ca_file", "PEM, for rediss://; empty: the system's authorities");
  def_file<&TiersOptions::tls_certificate_file>(options, "tls_certificate_file", "PEM, for servers that ask for one");
  def_file<&TiersOptions::tls_key_file>(options, "tls_key_file", "of tls_certificate_file");
}

void bind_reports(nb::module_& m) {
  nb::enum_<tier::FlushStatus>(m, "FlushStatus", "What became of everything that was stored before.")
      .value("failed", tier::FlushStatus::failed, "not known")
      .value("kept", tier::FlushStatus::kept, "the tier has it, until the machine or server that keeps it goes away")
      .value("durable", tier::FlushStatus::durable, "... and it stays, whatever is killed or loses power");
  nb::class_<tier::TierStats>(m, "TierStats", "What a tier holds; -1: unknown.")
      .def_ro("records", &tier::TierStats::records)
      .def_ro("payload_bytes", &tier::TierStats::payload_bytes)
      .def_ro("capacity_bytes", &tier::TierStats::capacity_bytes)
      .def_ro("evicted_records", &tier::TierStats::evicted_records, "made room")
      .def_ro("set_aside_records", &tier::TierStats::set_aside_records, "damaged")
      .def_ro("unauthenticated_records", &tier::TierStats::unauthenticated_records,
              "not believed: no key of the cache's protects them")
      .def_ro("connects", &tier::TierStats::connects, "of a remote tier")
      .def_ro("redirects", &tier::TierStats::redirects, "of a remote tier");
  nb::class_<TierReport>(m, "TierReport", "Of one tier, since it was made.")
      .def_ro("name", &TierReport::name)
      .def_ro("protection", &TierReport::protection, "of what is written; host memory needs none")
      .def_ro("hits", &TierReport::hits)
      .def_ro("misses", &TierReport::misses)
      .def_ro("failed_gets", &TierReport::failed_gets)
      .def_ro("damaged", &TierReport::damaged)
      .def_ro("hit_bytes", &TierReport::hit_bytes)
      .def_ro("stored", &TierReport::stored)
      .def_ro("failed_puts", &TierReport::failed_puts)
      .def_ro("refused_puts", &TierReport::refused_puts)
      .def_ro("stored_bytes", &TierReport::stored_bytes)
      .def_ro("promoted", &TierReport::promoted, "found below and put here")
      .def_ro("waiting_bytes", &TierReport::waiting_bytes, "now: to be written")
      .def_ro("open", &TierReport::open, "now: its circuit breaker; everything misses")
      .def_ro("times_opened", &TierReport::times_opened, "the breaker")
      .def_ro("get_times", &TierReport::get_times, "TimeHistogram of the tier's calls, a batch of records each")
      .def_ro("put_times", &TierReport::put_times, "TimeHistogram")
      .def_ro("tier", &TierReport::tier, "TierStats, a little old")
      .def_ro("failure", &TierReport::failure,
              "now: why servers fail, a name that stays the same ('connection_refused', 'wrong_password', ...); empty: "
              "all work, as far as is known")
      .def_ro("failure_detail", &TierReport::failure_detail, "the same as a sentence, with the server")
      .def_ro("failures", &TierReport::failures, "dict: how many batches failed, by reason")
      .def("__repr__", [](const TierReport& self) {
        return "TierReport(name='" + self.name + "', hits=" + std::to_string(self.hits) +
               ", misses=" + std::to_string(self.misses) + ", stored=" + std::to_string(self.stored) +
               ", waiting_bytes=" + std::to_string(self.waiting_bytes) + ", open=" + (self.open ? "True" : "False") +
               ", failure='" + self.failure + "')";
      });
}

void bind_shared_tiers(nb::module_& m) {
  nb::class_<SharedTiers>(
      m, "Tiers",
      "Host memory, a disk and Redis servers below caches of one layout. What is stored goes to all of them behind "
      "the\n"
      "caller's back; what one finds is put into those above. Any of them may be slow, full, damaged or away: then "
      "there\n"
      "are fewer hits, and never other bytes. Several caches may share them, of several threads.\n\n"
      "`with kv4.Tiers(...) as tiers:` closes them at its end.")
      .def(
          nb::init<const CacheSchema&, TiersOptions, std::shared_ptr<Device>>(), nb::arg("schema"), nb::arg("options"),
          nb::arg("backend") = nb::none(),
          "schema: cache.schema(). backend: cache.backend(); for a GPU's, host memory is pinned, and blocks go to the\n"
          "device without a copy in between. Raises ArgumentError; StateError where another process has the\n"
          "directory, or kv4 was built without hiredis; FileError where the directory holds another layout or\n"
          "cannot be used. Servers that are not there are misses; report() says why.")
      .def("flush", &SharedTiers::flush, nb::arg("timeout") = kDefaultTimeout,
           "Waits until everything before is written, at most `timeout` seconds: a FlushStatus for each tier.")
      .def("close", &SharedTiers::close, nb::arg("timeout") = kDefaultTimeout,
           "flush(), and nothing is found or taken any more.")
      .def(
          "report", [](SharedTiers& self) { return self.turns.work([&] { return self.tiers->report(); }); },
          "A TierReport for each tier.")
      .def(
          "__enter__", [](SharedTiers& self) -> SharedTiers& { return self; }, nb::rv_policy::reference)
      .def(
          "__exit__", [](SharedTiers& self, const nb::args&) { self.close(kDefaultTimeout); }, nb::arg("details"));
}

void bind_tiered_prefix(nb::module_& m) {
  nb::class_<TieredOptions> options(m, "TieredOptions",
                                    "Memory for blocks on their way, and how often a put is tried.");
  def_keyword_init<TieredOptions>(options);
  options
      .def_rw("load_bytes", &TieredOptions::load_bytes,
              "host memory for blocks on their way in, pinned for a GPU, and as much of the device's")
      .def_rw("save_bytes", &TieredOptions::save_bytes,
              "host memory for blocks until all tiers have written them; an eighth as much of the device's")
      .def_rw("max_waiting", &TieredOptions::max_waiting, "records that wait to be offered")
      .def_rw("max_attempts", &TieredOptions::max_attempts, "to put a record into a tier that fails");
  nb::class_<TieredStatistics>(m, "TieredStatistics", "Counted since the TieredPrefix was made.")
      .def_ro("offered_blocks", &TieredStatistics::offered_blocks, "and taken by one tier at least")
      .def_ro("offered_snapshots", &TieredStatistics::offered_snapshots)
      .def_ro("offered_again", &TieredStatistics::offered_again, "to a tier that had refused one or failed")
      .def_ro("dropped", &TieredStatistics::dropped,
              "not in all tiers, and given up: evicted before, too many waiting, or failed too often")
      .def_ro("loaded_blocks", &TieredStatistics::loaded_blocks)
      .def_ro("loaded_snapshots", &TieredStatistics::loaded_snapshots)
      .def_ro("lost_events", &TieredStatistics::lost_events, "blocks that were stored faster than they were saved")
      .def_ro("waiting", &TieredStatistics::waiting, "now: to be offered, again or for the first time");

  nb::class_<Load>(m, "PrefixLoad",
                   "A prompt's blocks on their way to the device. Between steps call advance() until it says True; "
                   "then\n"
                   "admit(). Gone: cancelled.")
      .def("advance", &Load::advance,
           "Takes what has come and asks for more; waits for nothing. True: nothing is left to be done. Not during a "
           "step.")
      .def(
          "admit", &Load::admit,
          "KVCacheManager.admit() of the prompt, which is not hashed again: an Admission. Ends the load with what has\n"
          "come by now. Raises ShortageError; then it may be called again.")
      .def("cancel", &Load::cancel, "What has arrived stays; nothing more comes.")
      .def("brought_blocks", [](const Load& self) { return self.brought_blocks; })
      .def("wanted_blocks", [](const Load& self) { return self.wanted_blocks; });

  nb::class_<Tiered>(
      m, "TieredPrefix",
      "A prefix cache that goes on in tiers: what the cache keeps is offered to them, and what a prompt does not find\n"
      "on the device is looked for there. Nobody else may read the cache's block events.\n\n"
      "    tiers = kv4.Tiers(cache.schema(), kv4.TiersOptions(host_bytes=8 << 30, directory='/var/cache/kv4'))\n"
      "    tiered = kv4.TieredPrefix(cache, tiers)\n"
      "    admission = tiered.admit(prompt, timeout=1)            # ... steps, and between them tiered.save(16) ...\n"
      "    tiered.save_all(); tiers.close()                       # before the process ends")
      .def(nb::init<Cache&, SharedTiers&, const TieredOptions&>(), nb::arg("cache"), nb::arg("tiers"),
           nb::arg("options") = TieredOptions(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::sig("def __init__(self, cache: KVCacheManager, tiers: Tiers, options: TieredOptions = TieredOptions()) "
                   "-> None"),
           "cache: with prefix=kv4.PrefixOptions(enabled=True, ...).")
      .def(
          "save",
          [](Tiered& self, std::int64_t max_records) {
            return self.work([&] { return self.prefix->save(max_records); });
          },
          nb::arg("max_records"),
          "Offers what the cache has stored since, oldest first, and begins at most `max_records`; waits for nothing.\n"
          "Returns how many records are left to be offered or on their way off the device.")
      .def(
          "save_all",
          [](Tiered& self, double timeout, const Progress& progress) {
            const TieredProgress tell = progress_of(progress);
            return self.work([&] { return self.prefix->save_all(deadline_of(timeout), tell); });
          },
          nb::arg("timeout") = kDefaultTimeout, nb::arg("progress") = nb::none(),
          "save() until nothing is left. False: `timeout` seconds were over, or progress(done, total) said False.")
      .def(
          "admit",
          [](Tiered& self, const PromptData& prompt, double timeout, const Progress& progress) {
            const PromptView view(prompt);
            const TieredProgress tell = progress_of(progress);
            return value_or_raise(
                self.work([&] { return self.prefix->admit(view.prompt(), deadline_of(timeout), tell); }), "admit");
          },
          nb::arg("prompt"), nb::arg("timeout") = kDefaultTimeout, nb::arg("progress") = nb::none(),
          "A request that begins with what the device and the tiers have of the prompt: an Admission. Waits for tiers\n"
          "at most `timeout` seconds and begins with what is there by then, or when progress(done, total) says False.\n"
          "Raises ShortageError, at once where there is no room for a request.")
      .def(
          "start_load",
          [](Tiered& self, const PromptData& prompt, double timeout) { return new Load(self, prompt, timeout); },
          nb::arg("prompt"), nb::arg("timeout") = kDefaultTimeout, nb::keep_alive<0, 1>(),
          "The first part of admit() beside the steps: a PrefixLoad. It ends after `timeout` seconds with what is "
          "there\n"
          "by then.")
      .def(
          "load",
          [](Tiered& self, const PromptData& prompt, double timeout, const Progress& progress) {
            const PromptView view(prompt);
            const TieredProgress tell = progress_of(progress);
            return self.work([&] { return self.prefix->load(view.prompt(), deadline_of(timeout), tell); });
          },
          nb::arg("prompt"), nb::arg("timeout") = kDefaultTimeout, nb::arg("progress") = nb::none(),
          "The first part of admit() alone, for requests that begin otherwise, such as restored ones; returns the "
          "blocks\n"
          "brought. progress(done, total) may return False to cancel: what has arrived stays.")
      .def(
          "statistics", [](Tiered& self) { return self.work([&] { return self.prefix->statistics(); }); },
          "TieredStatistics.");
}

}  // namespace

void bind_tiers(nb::module_& m) {
  bind_tiers_options(m);
  bind_reports(m);
  bind_shared_tiers(m);
  bind_tiered_prefix(m);
}

}  // namespace kv4::python
