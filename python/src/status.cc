// StatusFolder: shows a running cache to other processes.
#include "kv4/status_folder.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <optional>
#include <vector>

#include "bindings.h"
#include "cache.h"
#include "keys.h"
#include "shared_tiers.h"

namespace kv4::python {
namespace {

/// Keeps its cache and its tiers alive (nb::keep_alive where it is made).
struct Status {
  Cache* cache;
  SharedTiers* tiers;  // or null
  std::optional<StatusFolder> folder;

  Status(Cache& cache_in, const std::filesystem::path& directory, double interval, SharedTiers* tiers_in,
         const std::vector<nb::bytes>& keys)
      : cache(&cache_in), tiers(tiers_in) {
    StatusOptions options;
    options.interval = std::chrono::duration_cast<std::chrono::milliseconds>(duration_of(interval, "interval"));
    options.tiers = tiers == nullptr ? nullptr : &*tiers->tiers;
    options.keys = keys_of(keys);
    cache->work([&](KVCacheManager& manager) { folder.emplace(manager, directory.string(), options); });
  }
  ~Status() { close(); }

  bool publish() {
    return cache->work_on(nb::none(), [&](KVCacheManager&) {
      if (!folder) throw Error(ErrorCode::bad_state, "the status folder is closed");
      const auto call = [&] { return folder->publish(); };
      return tiers == nullptr ? call() : tiers->turns.inside(call);
    });
  }
  void close() {
    cache->device->at_end([&] { folder.reset(); });
  }
};

}  // namespace

void bind_status(nb::module_& m) {
  nb::class_<Status>(
      m, "StatusFolder",
      "A running cache that can be looked at from outside, without a server: a folder where it says how it stands, "
      "for\n"
      "`kv4 serve-metrics DIR`, and where `kv4 inspect DIR --request ID` asks for one of its requests.\n\n"
      "    status = kv4.StatusFolder(cache, '/run/kv4/gpu0')\n"
      "    while True: ...; status.publish()    # after a step, or while there is nothing to do")
      .def(nb::init<Cache&, const std::filesystem::path&, double, SharedTiers*, const std::vector<nb::bytes>&>(),
           nb::arg("cache"), nb::arg("directory"), nb::arg("interval") = 1.0, nb::arg("tiers") = nb::none(),
           nb::arg("keys") = std::vector<nb::bytes>(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>(),
           nb::sig("def __init__(self, cache: KVCacheManager, directory: str | os.PathLike, interval: float = 1.0, "
                   "tiers: Tiers | None = None, keys: collections.abc.Sequence[bytes] = ()) -> None"),
           "directory: made where it is not there, for its owner alone; its parent is there. interval: seconds that "
           "publish()\n"
           "leaves between two. tiers: whose reports are published, too. keys: of 32 bytes, the first seals requests "
           "that are\n"
           "asked for, for `kv4 inspect --key-file`. Raises FileError; StateError where another process publishes "
           "there.")
      .def(
          "publish", &Status::publish,
          "Between steps, as often as you like. At most one request that is asked for is written each time, as it is\n"
          "now, and goes on unchanged. False: something could not be written, which is no reason to stop; the log says "
          "what.")
      .def("close", &Status::close, "Takes the status away: nobody is here any more. So does the end of the object.")
      .def(
          "__enter__", [](Status& self) -> Status& { return self; }, nb::rv_policy::reference)
      .def(
          "__exit__", [](Status& self, const nb::args&) { self.close(); }, nb::arg("details"));
}

}  // namespace kv4::python
