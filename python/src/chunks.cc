// Stores of chunks, and tiers written in Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "kv4/chunk_store.h"
#include "kv4/error.h"
#include "shared_tiers.h"

namespace kv4::python {
namespace {

bool is_sequence(PyObject* object) { return PySequence_Check(object) != 0; }

struct Keys : nb::object {
  NB_OBJECT_DEFAULT(Keys, nb::object, "collections.abc.Sequence[bytes]", is_sequence)
};
struct Values : nb::object {
  NB_OBJECT_DEFAULT(Values, nb::object, "collections.abc.Sequence[kv4.typing.ArrayLike | list[kv4.typing.ArrayLike]]",
                    is_sequence)
};

/// A tier in Python. Its methods are called with the GIL, which a thread takes for the call alone.
class PythonTier final : public tier::Tier {
 public:
  explicit PythonTier(nb::object methods)
      : methods_(std::move(methods)), name_(nb::cast<std::string>(methods_.attr("name"))) {
    if (name_.empty() || name_.size() > kMaxNameBytes)
      throw Error(ErrorCode::bad_argument, "a tier's name has 1 to 64 characters; got " + std::to_string(name_.size()));
    for (const char* method : {"put", "get", "exists", "remove"})
      if (!nb::hasattr(methods_, method))
        throw Error(ErrorCode::bad_argument, "the tier '" + name_ + "' has no method " + method + "()");
  }
  ~PythonTier() override {
    if (nb::is_alive()) {
      const nb::gil_scoped_acquire gil;
      methods_.reset();
    } else {
      (void)methods_.release();
    }
  }

  const char* name() const override { return name_.c_str(); }
  void put(std::span<tier::PutRequest> requests, tier::Deadline deadline) override {
    call("put", deadline, [&] {
      nb::list records;
      for (const tier::PutRequest& request : requests)
        records.append(nb::make_tuple(key(request.id), nb::bytes(request.payload.data(), request.payload.size())));
      const nb::object answers = methods_.attr("put")(records);
      for (std::size_t i = 0; i < requests.size(); ++i)
        if (truth(answers, i, requests.size())) requests[i].status = tier::PutStatus::stored;
    });
  }
  void get(std::span<tier::GetRequest> requests, tier::Deadline deadline) override {
    call("get", deadline, [&] {
      const nb::object answers = methods_.attr("get")(keys(requests));
      for (std::size_t i = 0; i < requests.size(); ++i) {
        tier::GetRequest& request = requests[i];
        const nb::object answer = element(answers, i, requests.size());
        request.status = tier::GetStatus::missing;
        if (answer.is_none()) continue;
        const HostBytes value = host_bytes(answer, "a value that get() returns");
        request.bytes = std::ssize(value.bytes);
        request.status = tier::GetStatus::too_small;
        if (value.bytes.size() > request.to.size()) continue;
        std::copy(value.bytes.begin(), value.bytes.end(), request.to.begin());
        request.status = tier::GetStatus::found;
      }
    });
  }
  void exists(std::span<tier::ExistsRequest> requests, tier::Deadline deadline) override {
    call("exists", deadline, [&] {
      const nb::object answers = methods_.attr("exists")(keys(requests));
      for (std::size_t i = 0; i < requests.size(); ++i) {
        requests[i].bytes = truth(answers, i, requests.size()) ? 0 : -1;
        requests[i].answered = true;
      }
    });
  }
  void remove(std::span<tier::RemoveRequest> requests, tier::Deadline deadline) override {
    call("remove", deadline, [&] {
      const nb::object answers = methods_.attr("remove")(keys(requests));
      for (std::size_t i = 0; i < requests.size(); ++i) requests[i].answered = truth(answers, i, requests.size());
    });
  }
  tier::FlushStatus flush(tier::Deadline deadline) override {
    tier::FlushStatus status = tier::FlushStatus::kept;
    if (!has_flush()) return status;
    status = tier::FlushStatus::failed;
    call("flush", deadline, [&] {
      status =
          nb::cast<bool>(nb::bool_(methods_.attr("flush")())) ? tier::FlushStatus::durable : tier::FlushStatus::kept;
    });
    return status;
  }
  tier::TierStats stats() override {
    tier::TierStats stats;
    stats.records = stats.payload_bytes = stats.capacity_bytes = tier::TierStats::kUnknown;
    return stats;
  }

 private:
  static constexpr std::size_t kMaxNameBytes = 64;

  /// The name of a record for Python: tenant and id.
  static nb::bytes key(const tier::RecordId& id) {
    std::array<std::byte, 8 + sizeof(tier::Key)> bytes;
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::byte>(id.tenant >> (8 * i) & 0xff);
    std::copy(id.key.begin(), id.key.end(), bytes.begin() + 8);
    return nb::bytes(bytes.data(), bytes.size());
  }
  template <class Request>
  static nb::list keys(std::span<Request> requests) {
    nb::list all;
    for (const Request& request : requests) all.append(key(request.id));
    return all;
  }
  static nb::object element(const nb::object& answers, std::size_t i, std::size_t count) {
    if (nb::len(answers) != count)
      throw Error(ErrorCode::bad_argument, "a tier's method returned " + std::to_string(nb::len(answers)) +
                                               " answers to " + std::to_string(count) + " requests");
    return answers[i];
  }
  static bool truth(const nb::object& answers, std::size_t i, std::size_t count) {
    return nb::cast<bool>(nb::bool_(element(answers, i, count)));
  }
  bool has_flush() {
    bool there = false;
    call("flush", tier::Deadline::max(), [&] { there = nb::hasattr(methods_, "flush"); });
    return there;
  }

  /// An exception is a failure: requests without an answer have failed. It goes to sys.unraisablehook.
  template <class Body>
  void call(const char* method, tier::Deadline deadline, Body&& body) {
    if (!nb::is_alive() || std::chrono::steady_clock::now() >= deadline) return;
    const nb::gil_scoped_acquire gil;
    try {
      body();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable(methods_);
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, (name_ + "." + method + "(): " + error.what()).c_str());
      PyErr_WriteUnraisable(methods_.ptr());
    }
  }

  nb::object methods_;
  const std::string name_;
};

/// The library's store, and the arrays that its open batches and registered memory use.
class Store {
 public:
  Store(ChunkStoreOptions options, const nb::object& more) {
    for (const nb::handle tier : more) options.tiers.more.push_back(std::make_shared<PythonTier>(nb::borrow(tier)));
    const nb::gil_scoped_release no_gil;
    store_.emplace(options);
  }
  ~Store() {
    const nb::gil_scoped_release no_gil;
    store_.reset();
  }

  std::uint64_t put(const Keys& keys, const Values& values, std::uint64_t tenant, double timeout) {
    const KeyBytes names(keys);
    const std::size_t count = same_length(names, values);
    std::vector<HostBytes> held;
    std::vector<std::vector<std::span<const std::byte>>> pieces(count);
    std::vector<ChunkPut> chunks(count);
    for (std::size_t i = 0; i < count; ++i) {
      const nb::object value = values[i];
      for_pieces(value, [&](nb::handle piece) {
        held.push_back(host_bytes(piece, "values"));
        pieces[i].push_back(held.back().bytes);
      });
      chunks[i].key = names.keys[i];
      if (pieces[i].size() == 1)
        chunks[i].value = pieces[i].front();
      else
        chunks[i].pieces = pieces[i];
    }
    const ChunkCall call = call_of(tenant, timeout);
    const nb::gil_scoped_release no_gil;
    return store_->put(chunks, call);
  }
  std::uint64_t get(const Keys& keys, const Values& to, std::uint64_t tenant, double timeout) {
    const KeyBytes names(keys);
    const std::size_t count = same_length(names, to);
    std::vector<HostOutput> held;
    std::vector<std::vector<std::span<std::byte>>> pieces(count);
    std::vector<ChunkGet> chunks(count);
    for (std::size_t i = 0; i < count; ++i) {
      const nb::object memory = to[i];
      for_pieces(memory, [&](nb::handle piece) {
        held.push_back(host_output(piece, "to"));
        pieces[i].push_back(held.back().bytes);
      });
      chunks[i].key = names.keys[i];
      if (pieces[i].size() == 1)
        chunks[i].to = pieces[i].front();
      else
        chunks[i].pieces = pieces[i];
    }
    const ChunkCall call = call_of(tenant, timeout);
    std::uint64_t batch = 0;
    {
      const nb::gil_scoped_release no_gil;
      batch = store_->get(chunks, call);
    }
    if (!taken_early(batch)) held_.emplace(batch, std::move(held));
    return batch;
  }
  std::uint64_t exists(const Keys& keys, std::uint64_t tenant, double timeout) {
    const KeyBytes names(keys);
    const ChunkCall call = call_of(tenant, timeout);
    const nb::gil_scoped_release no_gil;
    return store_->exists(names.keys, call);
  }
  std::uint64_t remove(const Keys& keys, std::uint64_t tenant, double timeout) {
    const KeyBytes names(keys);
    const ChunkCall call = call_of(tenant, timeout);
    const nb::gil_scoped_release no_gil;
    return store_->remove(names.keys, call);
  }
  std::uint64_t flush(double timeout) {
    const ChunkCall call = call_of(0, timeout);
    const nb::gil_scoped_release no_gil;
    return store_->flush(call);
  }
  std::vector<std::optional<bool>> look_up(const Keys& keys, std::uint64_t tenant) {
    const KeyBytes names(keys);
    std::vector<ChunkPresence> known;
    {
      const nb::gil_scoped_release no_gil;
      known = store_->look_up(names.keys, tenant);
    }
    std::vector<std::optional<bool>> out(known.size());
    for (std::size_t i = 0; i < known.size(); ++i)
      if (known[i] != ChunkPresence::unknown) out[i] = known[i] == ChunkPresence::there;
    return out;
  }

  int event_fd() const { return store_->event_fd(); }
  std::vector<ChunkResults> drain() {
    std::vector<ChunkResults> all;
    {
      const nb::gil_scoped_release no_gil;
      all = store_->drain();
    }
    for (const ChunkResults& each : all) let_go(each);
    return all;
  }
  bool wait(double timeout) {
    const tier::Deadline until = deadline_of(timeout);
    const nb::gil_scoped_release no_gil;
    return store_->wait(until);
  }
  std::optional<ChunkResults> take(std::uint64_t batch, double timeout) {
    const tier::Deadline until = deadline_of(timeout);
    std::optional<ChunkResults> results;
    {
      const nb::gil_scoped_release no_gil;
      results = store_->take(batch, until);
    }
    if (results) let_go(*results);
    return results;
  }

  std::uint64_t add_memory(nb::handle memory) {
    // The last transfer may end in a thread of the store.
    const std::shared_ptr<HostOutput> held(new HostOutput(host_output(memory, "memory")), [](HostOutput* output) {
      if (!nb::is_alive()) return;
      const nb::gil_scoped_acquire gil;
      delete output;
    });
    const std::span<std::byte> bytes = held->bytes;
    const nb::gil_scoped_release no_gil;
    return store_->add_memory(bytes, held);
  }
  bool remove_memory(std::uint64_t memory) {
    const nb::gil_scoped_release no_gil;
    return store_->remove_memory(memory);
  }

  std::vector<tier::FlushStatus> close(double timeout) {
    const tier::Deadline until = deadline_of(timeout);
    const nb::gil_scoped_release no_gil;
    return store_->close(until);
  }
  ChunkStoreReport report() const {
    const nb::gil_scoped_release no_gil;
    return store_->report();
  }

 private:
  struct KeyBytes {
    explicit KeyBytes(const Keys& given) {
      const std::size_t count = nb::len(given);
      for (std::size_t i = 0; i < count; ++i) {
        const nb::object key = given[i];
        if (!nb::isinstance<nb::bytes>(key))
          throw Error(ErrorCode::bad_argument, "keys[" + std::to_string(i) + "] is no bytes object");
        held.push_back(nb::borrow<nb::bytes>(key));
        keys.push_back({static_cast<const std::byte*>(held.back().data()), held.back().size()});
      }
    }
    std::vector<nb::bytes> held;
    std::vector<ChunkKey> keys;
  };

  static std::size_t same_length(const KeyBytes& keys, const Values& values) {
    const std::size_t count = nb::len(values);
    if (count != keys.keys.size())
      throw Error(ErrorCode::bad_argument,
                  std::to_string(keys.keys.size()) + " keys and " + std::to_string(count) + " values");
    return count;
  }
  /// A list or tuple holds the pieces of one value.
  template <class Use>
  static void for_pieces(const nb::object& value, Use&& use) {
    if (!nb::isinstance<nb::list>(value) && !nb::isinstance<nb::tuple>(value)) return use(value);
    for (const nb::handle piece : value) use(piece);
  }
  static ChunkCall call_of(std::uint64_t tenant, double timeout) { return {tenant, duration_of(timeout, "timeout")}; }

  /// Another thread may take a batch before the call that began it has the GIL again.
  bool taken_early(std::uint64_t batch) { return early_.erase(batch) > 0; }
  void let_go(const ChunkResults& results) {
    if (results.action == ChunkAction::get && held_.erase(results.batch) == 0) early_.emplace(results.batch, true);
  }

  std::optional<ChunkStore> store_;
  // Under the GIL.
  std::map<std::uint64_t, std::vector<HostOutput>> held_;  // by batch
  std::map<std::uint64_t, bool> early_;
};

void bind_chunk_options(nb::module_& m) {
  nb::class_<ChunkStoreOptions> options(m, "ChunkStoreOptions", "The tiers of a store of chunks, and its limits.");
  def_keyword_init<ChunkStoreOptions>(options);
  options.def_rw("tiers", &ChunkStoreOptions::tiers, "TiersOptions")
      .def_prop_rw(
          "space", [](const ChunkStoreOptions& self) { return nb::bytes(self.space.data(), self.space.size()); },
          [](ChunkStoreOptions& self, const nb::bytes& space) {
            self.space.assign(static_cast<const char*>(space.data()), space.size());
          },
          "bytes, up to 256: what the values are (model, layout, version). Stores of other spaces share nothing.")
      .def_rw("host_page_bytes", &ChunkStoreOptions::host_page_bytes, "of host memory; a multiple of 512")
      .def_rw("max_chunks", &ChunkStoreOptions::max_chunks, "of batches that were begun and not yet taken")
      .def_rw("value_follows_key", &ChunkStoreOptions::value_follows_key,
              "True: the value follows from the key, so an older one is as good");
}

void bind_chunk_results(nb::module_& m) {
  nb::enum_<ChunkStatus>(m, "ChunkStatus", "What became of a chunk of a batch.")
      .value("ok", ChunkStatus::ok,
             "put: a tier has stored it; get: the value is in place; exists: it is there; remove: all tiers lost it")
      .value("missing", ChunkStatus::missing, "get, exists")
      .value("too_small", ChunkStatus::too_small, "get: the value has `bytes`, or more")
      .value("too_large", ChunkStatus::too_large, "put: no tier takes so long a value")
      .value("no_space", ChunkStatus::no_space, "put")
      .value("refused", ChunkStatus::refused, "nothing was done: too much is under way, or no tier takes work now")
      .value("failed", ChunkStatus::failed, "no answer, or not in time. A put may still be stored, whole");
  nb::enum_<ChunkAction>(m, "ChunkAction", "What a batch was.")
      .value("put", ChunkAction::put)
      .value("get", ChunkAction::get)
      .value("exists", ChunkAction::exists)
      .value("remove", ChunkAction::remove)
      .value("flush", ChunkAction::flush);
  nb::class_<ChunkResults>(m, "ChunkResults", "The end of a batch.")
      .def_ro("batch", &ChunkResults::batch)
      .def_ro("action", &ChunkResults::action)
      .def_ro("statuses", &ChunkResults::statuses, "list of ChunkStatus, in the order of the chunks")
      .def_ro("bytes", &ChunkResults::bytes, "of the values, for a get that is ok or too_small; else 0")
      .def_ro("flushed", &ChunkResults::flushed, "of a flush: a FlushStatus for each tier")
      .def("all_ok", &ChunkResults::all_ok, "... and of a flush: no tier failed.");
  nb::class_<ChunkStoreReport>(m, "ChunkStoreReport", "Counted since the store was made.")
      .def_ro("tiers", &ChunkStoreReport::tiers, "list of TierReport; bytes as stored")
      .def_ro("puts", &ChunkStoreReport::puts)
      .def_ro("gets", &ChunkStoreReport::gets)
      .def_ro("hits", &ChunkStoreReport::hits)
      .def_ro("exists", &ChunkStoreReport::exists)
      .def_ro("removes", &ChunkStoreReport::removes)
      .def_ro("flushes", &ChunkStoreReport::flushes)
      .def_ro("refused", &ChunkStoreReport::refused)
      .def_ro("failed", &ChunkStoreReport::failed)
      .def_ro("put_bytes", &ChunkStoreReport::put_bytes, "of values")
      .def_ro("hit_bytes", &ChunkStoreReport::hit_bytes, "of values")
      .def_ro("trimmed_bytes", &ChunkStoreReport::trimmed_bytes, "of put_bytes, not stored")
      .def_ro("damaged", &ChunkStoreReport::damaged, "values that a tier found and that were not what was put: misses")
      .def_ro("open_chunks", &ChunkStoreReport::open_chunks, "now: of batches that were begun and not yet taken")
      .def_ro("memory_in_use", &ChunkStoreReport::memory_in_use, "now: transfers that use registered memory");
}

}  // namespace

void bind_chunks(nb::module_& m) {
  bind_chunk_options(m);
  bind_chunk_results(m);
  nb::class_<Store>(
      m, "ChunkStore",
      "Opaque chunks in host memory, on disk, on servers and in tiers of your own, without a cache.\n\n"
      "    store = kv4.ChunkStore(kv4.ChunkStoreOptions(tiers=kv4.TiersOptions(directory='/var/cache/chunks')))\n"
      "    batch = store.put([key], [value])          # returns at once\n"
      "    assert store.take(batch).all_ok()\n\n"
      "Any thread may call; calls run without the GIL.")
      .def(nb::init<const ChunkStoreOptions&, const nb::object&>(), nb::arg("options"), nb::arg("more") = nb::tuple(),
           nb::sig("def __init__(self, options: ChunkStoreOptions, more: collections.abc.Sequence[object] = ()) -> "
                   "None"),
           "more: tiers in Python, below the others. Each has a `name` and the methods put(records), get(keys),\n"
           "exists(keys) and remove(keys), and perhaps flush(). A record is (key, value), both bytes; a value has a\n"
           "header and a digest, and is believed only if they are right. get() returns a list of bytes or None, the\n"
           "others one of truths; flush() returns whether everything is durable. They are called by threads of the\n"
           "store; an exception is a failure, and a call that does not return is left alone.")
      .def("put", &Store::put, nb::arg("keys"), nb::arg("values"), nb::arg("tenant") = 0,
           nb::arg("timeout") = kDefaultTimeout,
           "Begins a batch and returns its number. keys: bytes, 1 to 256 each. values: buffers, or lists of buffers\n"
           "that are gathered. They are copied, unless they lie in memory of add_memory(): then they must not change\n"
           "before the batch has ended. Ends after `timeout` seconds at the latest.")
      .def("get", &Store::get, nb::arg("keys"), nb::arg("to"), nb::arg("tenant") = 0,
           nb::arg("timeout") = kDefaultTimeout,
           "Begins a batch. to: writable buffers at least as long as the values, or lists of such; they are the\n"
           "store's until the batch has ended.")
      .def("exists", &Store::exists, nb::arg("keys"), nb::arg("tenant") = 0, nb::arg("timeout") = kDefaultTimeout,
           "Begins a batch that asks all tiers.")
      .def("remove", &Store::remove, nb::arg("keys"), nb::arg("tenant") = 0, nb::arg("timeout") = kDefaultTimeout,
           "Begins a batch.")
      .def("flush", &Store::flush, nb::arg("timeout") = kDefaultTimeout,
           "Begins a batch: it ends when everything before it is as safe as each tier makes it.")
      .def("look_up", &Store::look_up, nb::arg("keys"), nb::arg("tenant") = 0,
           "At once and from memory: for each key True, False, or None where only a server or a tier of your own can\n"
           "tell.")
      .def("event_fd", &Store::event_fd, "Readable while batches have ended that nobody has taken.")
      .def("fileno", &Store::event_fd, "event_fd(), for select and asyncio.")
      .def("drain", &Store::drain, "A list of ChunkResults: all batches that have ended and were not taken.")
      .def("wait", &Store::wait, nb::arg("timeout") = kDefaultTimeout,
           "Waits until a batch has ended that nobody has taken. False: none has.")
      .def("take", &Store::take, nb::arg("batch"), nb::arg("timeout") = kDefaultTimeout,
           "Waits for the end of one batch: its ChunkResults. None: it has not ended, or was taken already.")
      .def("add_memory", &Store::add_memory, nb::arg("memory"), nb::sig("def add_memory(self, memory: object) -> int"),
           "Registers a writable buffer: values in it are not copied. Returns its number.")
      .def("remove_memory", &Store::remove_memory, nb::arg("memory"),
           "False: batches with this memory have not ended, or there is none of that number.")
      .def("close", &Store::close, nb::arg("timeout") = kDefaultTimeout,
           "Ends the open batches and closes the tiers: a FlushStatus for each.")
      .def("report", &Store::report, "ChunkStoreReport.")
      .def(
          "__enter__", [](Store& self) -> Store& { return self; }, nb::rv_policy::reference)
      .def(
          "__exit__", [](Store& self, const nb::args&) { (void)self.close(kDefaultTimeout); }, nb::arg("details"));
}

}  // namespace kv4::python
