// Requests that outlive their cache: session files and streams, hand-over to other workers, preemption.
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>

#include "bindings.h"
#include "cache.h"
#include "keys.h"
#include "kv4/error.h"
#include "kv4/preempted_request.h"
#include "kv4/session.h"
#include "progress.h"
#include "prompt.h"

namespace kv4::python {
namespace {

// The cache calls these callbacks without the GIL: each takes it for its own duration.

struct Sink : nb::object {
  NB_OBJECT_DEFAULT(Sink, nb::object, "collections.abc.Callable[[bytes], object]", PyCallable_Check)
};
struct Records : nb::object {
  NB_OBJECT_DEFAULT(Records, nb::object, "collections.abc.Iterable[kv4.typing.ArrayLike]", any_object)
};
struct Blocks : nb::object {
  NB_OBJECT_DEFAULT(Blocks, nb::object, "collections.abc.Callable[[bytes], kv4.typing.ArrayLike | None]", any_object)
};

class PythonSink : public RecordSink {
 public:
  explicit PythonSink(nb::handle call) : call_(call) {}
  void write(std::span<const std::byte> record) override {
    const nb::gil_scoped_acquire gil;
    call_(nb::bytes(record.data(), record.size()));
  }

 private:
  nb::handle call_;
};

class PythonSource : public RecordSource {
 public:
  explicit PythonSource(nb::handle records) : next_(nb::iter(records)) {}
  std::span<const std::byte> next() override {
    const nb::gil_scoped_acquire gil;
    if (next_ == nb::iterator::sentinel()) return {};
    held_.emplace(host_bytes(*next_, "a record"));
    ++next_;
    return held_->bytes;
  }

 private:
  nb::iterator next_;
  std::optional<HostBytes> held_;
};

class PythonBlocks : public BlockSource {
 public:
  explicit PythonBlocks(nb::object call) : call_(std::move(call)) {}
  bool get(const BlockKey& key, std::span<std::byte> out) override {
    const nb::gil_scoped_acquire gil;
    const nb::object block = call_(bytes_of(key));
    if (block.is_none()) return false;
    const HostBytes bytes = host_bytes(block, "a block");
    if (bytes.bytes.size() != out.size())
      throw Error(ErrorCode::bad_argument, "a block must be " + std::to_string(out.size()) + " bytes; it is " +
                                               std::to_string(bytes.bytes.size()));
    std::memcpy(out.data(), bytes.bytes.data(), out.size());
    return true;
  }

 private:
  nb::object call_;
};

std::optional<RequestId> restored(const Expected<RequestId>& request) {
  if (request) return *request;
  if (request.error() == Shortage::cancelled) return std::nullopt;  // `progress` returned False
  throw NoRoom(request.error(), "restore_session");
}

struct Receiver {
  Cache* cache;
  std::unique_ptr<PythonBlocks> blocks;
  SessionReceiver receiver;
};

struct Sender {
  Cache* cache;
  SessionSender sender;
};

void bind_identity(nb::module_& m) {
  nb::class_<SessionIdentity>(m, "SessionIdentity", "Who may restore a session. Layout and model come from the cache.")
      .def(
          "__init__",
          [](SessionIdentity* self, std::string weights_id, nb::object salt, std::uint64_t tenant,
             const std::vector<ArrayLike>& block_extra, const std::vector<nb::bytes>& keys, Protection protection,
             bool accept_unauthenticated) {
            SessionIdentity identity{std::move(weights_id), text_of(salt, "salt"), tenant, {}};
            identity.keys = keys_of(keys);
            identity.protection = protection;
            identity.accept_unauthenticated = accept_unauthenticated;
            for (const ArrayLike& extra : block_extra) {
              const HostBytes bytes = host_bytes(extra, "block_extra");
              identity.block_extra.emplace_back(bytes.bytes.begin(), bytes.bytes.end());
            }
            new (self) SessionIdentity(std::move(identity));
          },
          nb::arg("weights_id") = "", nb::arg("salt") = "", nb::arg("tenant") = 0,
          nb::arg("block_extra") = std::vector<ArrayLike>(), nb::arg("keys") = std::vector<nb::bytes>(),
          nb::arg("protection") = Protection::sealed, nb::arg("accept_unauthenticated") = false,
          nb::sig("def __init__(self, weights_id: str = '', salt: str | bytes = '', tenant: int = 0, block_extra: "
                  "collections.abc.Sequence[kv4.typing.ArrayLike] = (), keys: collections.abc.Sequence[bytes] = (), "
                  "protection: Protection = Protection.sealed, accept_unauthenticated: bool = False) -> None"),
          "weights_id   the caller's name for all it computes with\n"
          "salt         of the tenant: nothing is restored with another one; it proves nothing, keys do\n"
          "tenant       written into every record\n"
          "block_extra  by full block: what its key hashes beside tokens; to save only\n"
          "keys         bytes [32] each: the first protects what is saved, and what none of them made is refused\n"
          "protection   of what is saved with keys: sealed or authenticated\n"
          "accept_unauthenticated  sessions from before there were keys are restored, too")
      .def_rw("weights_id", &SessionIdentity::weights_id)
      .def_rw("tenant", &SessionIdentity::tenant);
}

void bind_streams(nb::module_& m) {
  m.def(
      "save_session",
      [](Cache& cache, RequestId request, const SessionIdentity& identity, const Sink& sink, const Progress& progress) {
        PythonSink records(sink);
        const SessionProgress tell = progress_of(progress);
        return cache.work_on(nb::none(), [&](KVCacheManager& manager) {
          return save_session(manager, request, identity, records, tell);
        });
      },
      nb::arg("manager"), nb::arg("request"), nb::arg("identity"), nb::arg("sink"), nb::arg("progress") = nb::none(),
      "Calls sink(record: bytes) for each record. progress(done_bytes, total_bytes) may return False to stop: then "
      "this\n"
      "returns False. The request goes on running.");
  m.def(
      "restore_session",
      [](Cache& cache, const SessionIdentity& identity, const Records& records, const Progress& progress) {
        PythonSource source(records);
        const SessionProgress tell = progress_of(progress);
        return restored(cache.work_on(
            nb::none(), [&](KVCacheManager& manager) { return restore_session(manager, identity, source, tell); }));
      },
      nb::arg("manager"), nb::arg("identity"), nb::arg("records"), nb::arg("progress") = nb::none(),
      "The request from its records, or None where `progress` stopped it. Raises FileError that names what differs, "
      "and\n"
      "ShortageError.");
  m.def(
      "save_session_file",
      [](Cache& cache, RequestId request, const SessionIdentity& identity, const std::filesystem::path& path,
         const Progress& progress) {
        const SessionProgress tell = progress_of(progress);
        return cache.work_on(nb::none(), [&](KVCacheManager& manager) {
          return save_session_file(manager, request, identity, path.string(), tell);
        });
      },
      nb::arg("manager"), nb::arg("request"), nb::arg("identity"), nb::arg("path"), nb::arg("progress") = nb::none(),
      "The same in a file, which appears complete and durable or not at all.");
  m.def(
      "restore_session_file",
      [](Cache& cache, const SessionIdentity& identity, const std::filesystem::path& path, const Progress& progress) {
        const SessionProgress tell = progress_of(progress);
        return restored(cache.work_on(nb::none(), [&](KVCacheManager& manager) {
          return restore_session_file(manager, identity, path.string(), tell);
        }));
      },
      nb::arg("manager"), nb::arg("identity"), nb::arg("path"), nb::arg("progress") = nb::none(),
      "The request saved in a file: it goes on with the same bytes as if it had never stopped.");
}

void bind_handover(nb::module_& m) {
  nb::class_<Sender>(m, "SessionSender", "Hands a request over to another worker; what that one has is not sent.")
      .def(
          "__init__",
          [](Sender* self, Cache& cache, RequestId request, const SessionIdentity& identity) {
            new (self) Sender{&cache, cache.work_on(nb::none(), [&](KVCacheManager& manager) {
                                return SessionSender(manager, request, identity);
                              })};
          },
          nb::arg("manager"), nb::arg("request"), nb::arg("identity"), nb::keep_alive<1, 2>())
      .def(
          "keys", [](const Sender& self) { return bytes_of(self.sender.keys()); }, "Of the full blocks, in order.")
      .def(
          "offer",
          [](const Sender& self, const Sink& sink) {
            PythonSink records(sink);
            self.cache->work_on(nb::none(), [&](KVCacheManager&) { self.sender.offer(records); });
          },
          nb::arg("sink"), "The record of the request itself.")
      .def(
          "send",
          [](Sender& self, const std::vector<nb::bytes>& wanted, const Sink& sink, const Progress& progress) {
            std::vector<BlockKey> keys;
            for (const nb::bytes& key : wanted) keys.push_back(block_key_of(key));
            PythonSink records(sink);
            const SessionProgress tell = progress_of(progress);
            return self.cache->work_on(nb::none(),
                                       [&](KVCacheManager&) { return self.sender.send(keys, records, tell); });
          },
          nb::arg("wanted"), nb::arg("sink"), nb::arg("progress") = nb::none(),
          "The blocks of these keys, in this order.");
  nb::class_<Receiver>(m, "SessionReceiver",
                       "Collects a session: records in any order, the same one as often as it comes.")
      .def(
          "__init__",
          [](Receiver* self, Cache& cache, const SessionIdentity& identity, const Blocks& blocks) {
            auto source = blocks.is_none() ? nullptr : std::make_unique<PythonBlocks>(blocks);
            PythonBlocks* raw = source.get();
            new (self) Receiver{&cache, std::move(source), SessionReceiver(*cache.manager, identity, raw)};
          },
          nb::arg("manager"), nb::arg("identity"), nb::arg("blocks") = nb::none(), nb::keep_alive<1, 2>(),
          "blocks(key): a block that is here already, uint8 [block_image_bytes], or None.")
      .def(
          "take",
          [](Receiver& self, const ArrayLike& record) {
            const HostBytes bytes = host_bytes(record, "record");
            self.cache->work_on(nb::none(), [&](KVCacheManager&) { self.receiver.take(bytes.bytes); });
          },
          nb::arg("record"))
      .def("has_offer", [](const Receiver& self) { return self.receiver.has_offer(); })
      .def(
          "wanted",
          [](const Receiver& self) {
            return bytes_of(self.cache->work([&](KVCacheManager&) { return self.receiver.wanted(); }));
          },
          "Blocks that are neither here nor came yet, in order; empty before the offer.")
      .def("done_bytes",
           [](const Receiver& self) {
             return self.cache->work([&](KVCacheManager&) { return self.receiver.done_bytes(); });
           })
      .def("total_bytes",
           [](const Receiver& self) {
             return self.cache->work([&](KVCacheManager&) { return self.receiver.total_bytes(); });
           })
      .def(
          "finish",
          [](Receiver& self) {
            return value_or_raise(
                self.cache->work_on(nb::none(), [&](KVCacheManager&) { return self.receiver.finish(); }), "finish");
          },
          "The request, once; raises FileError while something is missing. After a ShortageError call it again.");
}

void bind_preemption(nb::module_& m) {
  nb::class_<PreemptedRequest>(m, "PreemptedRequest", "Host memory with room for one request that was set aside.")
      .def(
          "__init__",
          [](PreemptedRequest* self, const std::shared_ptr<Device>& backend, std::int64_t capacity_bytes) {
            new (self) PreemptedRequest(backend->work([&] { return HostMemory(backend->backend(), capacity_bytes); }));
          },
          nb::arg("backend"), nb::arg("capacity_bytes"))
      .def("empty", &PreemptedRequest::empty)
      .def("capacity_bytes", &PreemptedRequest::capacity_bytes)
      .def("lengths", &PreemptedRequest::lengths)
      .def("token_ids", [](const PreemptedRequest& self) { return AnyArray(own_array(self.token_ids())); });
  m.def(
      "preempted_bytes",
      [](Cache& cache, RequestId request) {
        return cache.work([&](KVCacheManager& manager) { return preempted_bytes(manager, request); });
      },
      nb::arg("manager"), nb::arg("request"),
      "Host memory that preempt() needs for the request at its present length.");
  m.def(
      "preempt",
      [](Cache& cache, RequestId request, PreemptedRequest& to) {
        cache.work_on(nb::none(), [&](KVCacheManager& manager) { preempt(manager, request, to); });
      },
      nb::arg("manager"), nb::arg("request"), nb::arg("to"), "Copies the request out and releases it.");
  m.def(
      "resume",
      [](Cache& cache, PreemptedRequest& from) {
        return value_or_raise(cache.work_on(nb::none(), [&](KVCacheManager& manager) { return resume(manager, from); }),
                              "resume");
      },
      nb::arg("manager"), nb::arg("preempted"),
      "Back into this cache, or another one of the same layout; on a shortage or an error it keeps the request.");
}

}  // namespace

void bind_sessions(nb::module_& m) {
  bind_identity(m);
  bind_streams(m);
  bind_handover(m);
  bind_preemption(m);
}

}  // namespace kv4::python
