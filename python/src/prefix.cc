// The prefix cache: prompts, prefix blocks, events, statistics, and the manager's calls about them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.h"
#include "cache.h"
#include "kv4/error.h"
#include "prompt.h"

namespace kv4::python {

std::string text_of(nb::handle text, const char* name) {
  if (nb::isinstance<nb::bytes>(text)) {
    const nb::bytes bytes = nb::borrow<nb::bytes>(text);
    return {bytes.c_str(), bytes.size()};
  }
  if (nb::isinstance<nb::str>(text)) return nb::cast<std::string>(text);
  throw Error(ErrorCode::bad_argument, std::string(name) + " must be str or bytes; got " +
                                           nb::cast<std::string>(nb::str(text.type().attr("__name__"))));
}

BlockKey block_key_of(const nb::bytes& bytes) {
  BlockKey key;
  if (bytes.size() != key.size())
    throw Error(ErrorCode::bad_argument, "a block key is 32 bytes; got " + std::to_string(bytes.size()));
  std::copy_n(reinterpret_cast<const std::uint8_t*>(bytes.c_str()), key.size(), key.begin());
  return key;
}

nb::bytes bytes_of(const BlockKey& key) { return nb::bytes(key.data(), key.size()); }

nb::typed<nb::list, nb::bytes> bytes_of(const std::vector<BlockKey>& keys) {
  nb::list out;
  for (const BlockKey& key : keys) out.append(bytes_of(key));
  return nb::borrow<nb::typed<nb::list, nb::bytes>>(out);
}

void bind_prefix(nb::module_& m) {
  nb::class_<PromptData>(m, "Prompt", "A request's beginning, as far as it is known.")
      .def(
          "__init__",
          [](PromptData* self, const TokenIds& token_ids, TenantId tenant, nb::object salt, nb::list extra) {
            PromptData data{token_ids_of(token_ids), tenant, text_of(salt, "salt"), {}};
            for (nb::handle text : extra) data.extra.push_back(text_of(text, "extra"));
            new (self) PromptData(std::move(data));
          },
          nb::arg("token_ids"), nb::arg("tenant") = 0, nb::arg("salt") = "", nb::arg("extra") = nb::list(),
          nb::sig("def __init__(self, token_ids: collections.abc.Sequence[int] | kv4.typing.ArrayLike, tenant: int = "
                  "0, salt: "
                  "str | bytes = '', extra: list[str | bytes] = []) -> None"),
          "token_ids  ints, or an int32 or int64 array [n]\n"
          "tenant     whose share its blocks count for\n"
          "salt       prompts with different salts never share\n"
          "extra      whatever else the bytes of a block depend on, one per block from the first on")
      .def_prop_ro(
          "token_ids", [](const PromptData& self) { return AnyArray(own_array(self.token_ids)); }, "int32 [n]")
      .def_ro("tenant", &PromptData::tenant);
  nb::class_<Admission>(m, "Admission", "A request that begins with what was there of its prompt.")
      .def_ro("request", &Admission::request)
      .def_ro("usable_tokens", &Admission::usable_tokens, "tokens of the prompt whose entries are there: whole blocks")
      .def_ro("resume_at", &Admission::resume_at,
              "the request's length, and the first token to compute; from here to usable_tokens they are replayed")
      .def("__repr__", [](const Admission& self) {
        return "Admission(request=" + std::to_string(self.request) +
               ", usable_tokens=" + std::to_string(self.usable_tokens) +
               ", resume_at=" + std::to_string(self.resume_at) + ")";
      });
  nb::class_<PrefixBlock>(m, "PrefixBlock", "A block that prompts find by its key.")
      .def_ro("tenant", &PrefixBlock::tenant)
      .def_ro("tokens", &PrefixBlock::tokens, "from the start of its chain to its end")
      .def_ro("has_snapshot", &PrefixBlock::has_snapshot);

  nb::class_<BlockEvent> event(m, "BlockEvent", "A block was stored or evicted, or a snapshot at its end is kept.");
  nb::enum_<BlockEvent::Kind>(event, "Kind")
      .value("stored", BlockEvent::Kind::stored)
      .value("evicted", BlockEvent::Kind::evicted)
      .value("snapshot", BlockEvent::Kind::snapshot);
  event.def_ro("kind", &BlockEvent::kind)
      .def_prop_ro(
          "key", [](const BlockEvent& self) { return bytes_of(self.key); }, "bytes [32]")
      .def_ro("inserted", &BlockEvent::inserted, "it came from elsewhere: insert_blocks, insert_snapshot");

  nb::class_<PrefixStatistics>(m, "PrefixStatistics", "Counted since the cache was made.")
      .def_ro("prompts", &PrefixStatistics::prompts)
      .def_ro("hits", &PrefixStatistics::hits, "prompts of which at least one block was there")
      .def_ro("prompt_tokens", &PrefixStatistics::prompt_tokens)
      .def_ro("usable_tokens", &PrefixStatistics::usable_tokens, "of them: entries are there")
      .def_ro("replayed_tokens", &PrefixStatistics::replayed_tokens, "of these: had to be computed again")
      .def_ro("stored_blocks", &PrefixStatistics::stored_blocks)
      .def_ro("joined_blocks", &PrefixStatistics::joined_blocks, "computed twice at the same time")
      .def_ro("inserted_blocks", &PrefixStatistics::inserted_blocks, "computed elsewhere")
      .def_ro("evicted_blocks", &PrefixStatistics::evicted_blocks)
      .def_ro("saved_snapshots", &PrefixStatistics::saved_snapshots)
      .def_ro("restored_snapshots", &PrefixStatistics::restored_snapshots)
      .def_ro("dropped_snapshots", &PrefixStatistics::dropped_snapshots, "to make room for others")
      .def_ro("lost_events", &PrefixStatistics::lost_events)
      .def_ro("blocks", &PrefixStatistics::blocks, "kept now, those of running requests included")
      .def_ro("snapshots", &PrefixStatistics::snapshots, "kept now");
}

void def_prefix(nb::class_<Cache>& cache) {
  cache.def(
      "set_weights_id",
      [](Cache& self, const std::string& id) {
        self.work([&](KVCacheManager& manager) { manager.set_weights_id(id); });
      },
      nb::arg("weights_id"), "Prompts find and leave blocks of these weights from now on.");
  cache.def(
      "invalidate",
      [](Cache& self, const std::string& id) { self.work([&](KVCacheManager& manager) { manager.invalidate(id); }); },
      nb::arg("weights_id"), "Forgets all that was computed with these weights.");
  cache.def("prefix_statistics",
            [](Cache& self) { return self.work([](KVCacheManager& manager) { return manager.prefix_statistics(); }); });
  cache.def(
      "read_block_events",
      [](Cache& self, std::size_t max_events) {
        return self.work([&](KVCacheManager& manager) {
          std::vector<BlockEvent> events(max_events);
          events.resize(manager.read_block_events(events));
          return events;
        });
      },
      nb::arg("max_events") = 4096, "The oldest events, in order; they are gone then.");
  cache.def(
      "block_keys",
      [](Cache& self, const PromptData& prompt) {
        const PromptView view(prompt);
        return bytes_of(self.work([&](KVCacheManager& manager) { return manager.block_keys(view.prompt()); }));
      },
      nb::arg("prompt"), "Keys of all full blocks of a prompt, first block first.");
  cache.def(
      "find_block",
      [](Cache& self, const nb::bytes& key) {
        const BlockKey wanted = block_key_of(key);
        return self.work([&](KVCacheManager& manager) { return manager.find_block(wanted); });
      },
      nb::arg("key"), "The PrefixBlock of a key, or None.");
  cache.def(
      "read_block",
      [](Cache& self, const nb::bytes& key, const ArrayLike& out) {
        const BlockKey wanted = block_key_of(key);
        const HostOutput target = host_output(out, self.manager->schema().block_image_bytes, "out");
        return self.work_on(nb::none(),
                            [&](KVCacheManager& manager) { return manager.read_block(wanted, target.bytes); });
      },
      nb::arg("key"), nb::arg("out"), "A prefix block into out, uint8 [block_image_bytes]. False: it is not there.");
  cache.def(
      "read_snapshot",
      [](Cache& self, const nb::bytes& key, const ArrayLike& out) {
        const BlockKey wanted = block_key_of(key);
        const HostOutput target = host_output(out, self.manager->snapshot_bytes(), "out");
        return self.work_on(nb::none(),
                            [&](KVCacheManager& manager) { return manager.read_snapshot(wanted, target.bytes); });
      },
      nb::arg("key"), nb::arg("out"), "The snapshot at a block's end into out, uint8 [snapshot_bytes()].");
  cache.def("snapshot_bytes", [](Cache& self) { return self.manager->snapshot_bytes(); });
  cache.def(
      "insert_blocks",
      [](Cache& self, const PromptData& prompt, const std::vector<ArrayLike>& blocks) {
        const PromptView view(prompt);
        std::vector<HostBytes> held;
        std::vector<std::span<const std::byte>> images;
        for (const ArrayLike& block : blocks) held.push_back(host_bytes(block, "blocks"));
        for (const HostBytes& block : held) images.push_back(block.bytes);
        return self.work_on(nb::none(),
                            [&](KVCacheManager& manager) { return manager.insert_blocks(view.prompt(), images); });
      },
      nb::arg("prompt"), nb::arg("blocks"),
      "Blocks of the prompt that follow those kept, uint8 [block_image_bytes] each; returns how many there was room "
      "for.");
  cache.def(
      "insert_snapshot",
      [](Cache& self, const nb::bytes& key, const ArrayLike& bytes) {
        const BlockKey wanted = block_key_of(key);
        const HostBytes source = host_bytes(bytes, "bytes");
        return self.work_on(nb::none(),
                            [&](KVCacheManager& manager) { return manager.insert_snapshot(wanted, source.bytes); });
      },
      nb::arg("key"), nb::arg("bytes"), "At the end of a prefix block. False: the block is not there, or no place is.");
}

}  // namespace kv4::python
