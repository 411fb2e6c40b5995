// Every public call of a cache and of sessions with refused memory: Error(out_of_memory), and the cache is unchanged.
// The repeated call gives the same bytes as in a twin without refusals.
#include <stdlib.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "base/digest.h"
#include "cache/session_records.h"
#include "cache/small_cache.h"
#include "cache/status_file.h"
#include "kv4.h"
#include "kv4/preempted_request.h"
#include "support/refused_memory.h"

namespace kv4::test {
namespace {

/// A folder of its own, removed at the end.
struct Folder {
  std::string path;
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "kv4_no_memory_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

CacheOptions cache_options() {
  CacheOptions o = small::options();
  o.arrangement = Arrangement::layer_major;
  o.num_blocks = 16;
  o.prefix.enabled = true;
  o.prefix.weights_id = "weights";
  o.prefix.num_snapshots = 3;
  o.prefix.snapshots = {.kind = SnapshotPolicy::Kind::full};
  return o;
}

/// Blocks that the receiver has already.
struct BlocksByKey : BlockSource {
  std::map<BlockKey, std::vector<std::byte>> blocks;
  bool get(const BlockKey& key, std::span<std::byte> out) override {
    const auto found = blocks.find(key);
    if (found == blocks.end()) return false;
    std::copy(found->second.begin(), found->second.end(), out.begin());
    return true;
  }
};

/// A cache, and results that later calls of a script use.
struct World {
  small::SmallCache small{cache_options(), small::config(), true, make_cpu_backend(2)};
  KVCacheManager& cache = small.cache;
  std::map<std::string, RequestId> requests;
  std::optional<Step> step;
  std::vector<small::Inputs> inputs;
  Folder folder;

  std::vector<std::int32_t> ids;
  std::string extra_text = std::string(100, 'x');
  std::vector<std::string_view> extra{extra_text};
  std::vector<BlockKey> keys;
  CanonicalImage image;
  std::vector<std::byte> blocks;
  PrefixIdentity chain;
  std::vector<std::byte> block, snapshot;
  PreemptedRequest preempted{HostMemory(small.backend, 1 << 20)};
  RecordList records;
  BlocksByKey source;
  std::optional<SessionSender> sender;
  std::optional<SessionReceiver> receiver;
  std::optional<StatusFolder> status;
  std::string session_path = folder.path + "/of the request.session";
  SessionIdentity identity{.weights_id = "weights", .salt = "a salt that is longer than a short string"};
  std::vector<std::int32_t> lens = std::vector<std::int32_t>(64), first = lens, chosen = lens;
  RopeTable rope =
      build_rope_table(small::config().rope_compress, small::config().rope_dim, 0, cache_options().max_context);
  std::vector<float> out = std::vector<float>(4096), q = std::vector<float>(1024, 0.5f), scores = out;

  Prompt prompt() const { return {ids, 0, identity.salt, extra}; }

  Expected<Step> prepare(const std::string& name, std::uint64_t stream, std::int32_t count) {
    const RequestId request = requests.at(name);
    const std::vector<std::int32_t> tokens = small::token_ids(stream, cache.length(request), count);
    const StepItem item{request, count, tokens, -1};
    return cache.prepare_forward({&item, 1});
  }
  /// A whole step of a request.
  void run(const std::string& name, std::uint64_t stream, std::int32_t count) {
    small.run({{requests.at(name), stream, count}});
  }

  std::string state() {
    CacheStatus now = read_status(cache);
    now.cache.times = {};  // they differ in every run
    std::string out_text = status_text({.model = "small", .status = std::move(now)});
    for (const RequestId request : cache.requests()) {
      const small::RequestState state = small::request_state(cache, request);
      out_text += testing::PrintToString(state.floors) + testing::PrintToString(state.ids);
      out_text += std::to_string(digest64(std::span<const std::byte>(state.image.bytes))) + " " +
                  std::to_string(digest64(std::span<const std::byte>(state.block_bytes)));
    }
    return out_text;
  }
};

struct Line {
  std::string name;
  std::function<void(World&)> set_up;  // memory is not refused
  std::function<void(World&)> call;
};

/// Runs each line in a world whose allocations are refused one after the other, and in one without refusals.
void run_script(const std::vector<Line>& script) {
  World tested, twin;
  int refusals = 0;
  for (const Line& line : script) {
    SCOPED_TRACE(line.name);
    if (line.set_up) line.set_up(tested), line.set_up(twin);
    const std::string before = tested.state();
    refusals += refuse_each(
        line.name, [&] { line.call(tested); }, [&] { EXPECT_EQ(tested.state(), before); });
    line.call(twin);
    ASSERT_EQ(tested.state(), twin.state());
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(refusals, 0);
}

void expect_no_leak(const std::function<void()>& body) {
  body();  // one-time allocations stay
  const std::int64_t before = live_allocations();
  body();
  EXPECT_EQ(live_allocations(), before);
}

Line admit_prompt(std::string name, std::uint64_t stream, std::int32_t tokens) {
  return {"admit " + name,
          [=](World& w) {
            w.ids = small::token_ids(stream, 0, tokens);
            w.requests[name] = kNoRequest;
          },
          [=](World& w) { w.requests.at(name) = w.cache.admit(w.prompt()).value().request; }};
}

Line prepare(std::string name, std::uint64_t stream, std::int32_t count) {
  return {"prepare " + name,
          [=](World& w) { w.ids = small::token_ids(stream, w.cache.length(w.requests.at(name)), count); },
          [=](World& w) {
            const StepItem item{w.requests.at(name), count, w.ids, -1};
            w.step = w.cache.prepare_forward({&item, 1}).value();
          }};
}

/// Inputs of the open step, by layer; token positions from `start` on.
void make_inputs(World& w, std::uint64_t stream, std::int64_t start) {
  w.inputs.clear();
  for (const LayerCacheSchema& layer : w.cache.schema().layers) {
    small::Inputs in;
    in.width[small::kRaw] = w.cache.schema().config.head_dim;
    for (std::size_t k = 0; k < layer.pending.size(); ++k)
      in.width[small::kKv + 2 * k] = in.width[small::kGate + 2 * k] = layer.pending[k].columns;
    in.tokens = w.step->num_tokens;
    for (std::int64_t t = 0; t < in.tokens; ++t)
      for (int which = 0; which < 5; ++which)
        for (std::int64_t c = 0; c < in.width[which]; ++c)
          in.rows[which].push_back(
              small::input_value(stream, layer.spec.layer, start + t, static_cast<small::Input>(which), c));
    w.inputs.push_back(std::move(in));
  }
}

Line append(std::string name, std::uint64_t stream) {
  return {"append " + name, [=](World& w) { make_inputs(w, stream, w.cache.length(w.requests.at(name))); },
          [](World& w) {
            for (const LayerCacheSchema& layer : w.cache.schema().layers)
              w.cache.acquire(layer.spec.layer).append(w.inputs[static_cast<std::size_t>(layer.spec.layer)].views());
          }};
}

Line commit() {
  return {"commit", {}, [](World& w) { w.cache.commit(*w.step); }};
}

void add_step(std::vector<Line>& script, const std::string& name, std::uint64_t stream, std::int32_t count) {
  script.push_back(prepare(name, stream, count));
  script.push_back(append(name, stream));
  script.push_back(commit());
}

void add_request(std::vector<Line>& script, const std::string& name, std::uint64_t stream, std::int32_t tokens) {
  script.push_back(admit_prompt(name, stream, tokens));
  add_step(script, name, stream, std::min(tokens, 40));
  if (tokens > 40) add_step(script, name, stream, tokens - 40);
}

Line release(std::string name) {
  return {"release " + name, {}, [=](World& w) { w.cache.release(w.requests.at(name)); }};
}

TEST(NoMemory, RequestsAndSteps) {
  expect_no_leak([] {
    std::vector<Line> script;
    script.push_back({"bind_weights", {}, [](World& w) {
                        w.cache.bind_weights(1, w.small.weights[1]->views);
                        w.cache.bind_weights(2, w.small.weights[2]->views);
                      }});
    script.push_back({"bind_rope_table", {}, [](World& w) {
                        const std::int64_t positions = w.cache.schema().options.max_context,
                                           pairs = std::ssize(w.rope.cos) / positions;
                        w.cache.bind_rope_table(TensorView(w.rope.cos.data(), {positions, pairs}),
                                                TensorView(w.rope.sin.data(), {positions, pairs}));
                      }});
    add_request(script, "a", 1, 70);
    script.push_back({"finished", {}, [](World& w) { EXPECT_TRUE(w.cache.finished(*w.step)); }});
    script.push_back({"set_stream", {}, [](World& w) { w.cache.set_stream({}); }});
    script.push_back({"synchronize", {}, [](World& w) { w.cache.synchronize(); }});
    add_request(script, "b", 2, 40);
    script.push_back(release("b"));
    add_request(script, "c", 3, 33);
    script.push_back({"fork", [](World& w) { w.requests["d"] = kNoRequest; },
                      [](World& w) { w.requests.at("d") = w.cache.fork(w.requests.at("a")).value(); }});
    add_step(script, "d", 4, 2);  // it diverges from its parent
    script.push_back({"rewind", {}, [](World& w) { w.cache.rewind(w.requests.at("d"), 71); }});
    add_step(script, "d", 5, 20);  // copies the open block; evicts published blocks
    script.push_back(prepare("c", 3, 9));
    script.push_back({"abort", {}, [](World& w) { w.cache.abort(*w.step); }});
    script.push_back(release("c"));
    script.push_back(release("d"));
    add_request(script, "e", 2, 60);  // finds a part of the blocks of "b", or makes room
    script.push_back({"admit without a prompt", [](World& w) { w.requests["f"] = kNoRequest; },
                      [](World& w) { w.requests.at("f") = w.cache.admit().value(); }});
    add_step(script, "f", 6, 17);
    script.push_back({"set_weights_id", {}, [](World& w) {
                        w.cache.set_weights_id("other weights, whose name is longer than a short string");
                      }});
    script.push_back({"invalidate", {}, [](World& w) { w.cache.invalidate("weights"); }});
    script.push_back(release("e"));
    add_request(script, "g", 7, 50);
    run_script(script);
  });
}

TEST(NoMemory, WhatACacheTells) {
  expect_no_leak([] {
    std::vector<Line> script;
    add_request(script, "a", 1, 70);
    const auto request = [](World& w) { return w.requests.at("a"); };
    script.push_back({"token_ids", {}, [=](World& w) { (void)w.cache.token_ids(request(w)); }});
    script.push_back({"blocks", {}, [=](World& w) { (void)w.cache.blocks(request(w)); }});
    script.push_back({"requests", {}, [=](World& w) { (void)w.cache.requests(); }});
    script.push_back({"statistics", {}, [=](World& w) { (void)w.cache.statistics(); }});
    script.push_back({"prefix_statistics", {}, [=](World& w) { (void)w.cache.prefix_statistics(); }});
    script.push_back({"lengths", {}, [=](World& w) {
                        EXPECT_EQ(w.cache.length(request(w)), 70);
                        EXPECT_LE(w.cache.rewind_floor(request(w)), 70);
                        EXPECT_EQ(w.cache.num_requests(), 1);
                      }});
    script.push_back({"read_block_events", {}, [=](World& w) {
                        BlockEvent events[16];
                        EXPECT_GT(w.cache.read_block_events(events), 0u);
                      }});
    script.push_back({"image_bytes", {}, [=](World& w) { (void)w.cache.image_bytes(request(w)); }});
    script.push_back({"export_image", {}, [=](World& w) { w.image = w.cache.export_image(request(w)); }});
    script.push_back({"export_blocks", {}, [=](World& w) { w.blocks = w.cache.export_blocks(request(w)); }});
    script.push_back({"export_image into", {}, [=](World& w) { w.cache.export_image(request(w), w.image.bytes); }});
    script.push_back({"export_blocks into", {}, [=](World& w) { w.cache.export_blocks(request(w), w.blocks); }});
    script.push_back({"chain_of", {}, [=](World& w) { w.chain = w.cache.chain_of(request(w)); }});
    script.push_back({"identify_prefix", {}, [=](World& w) { (void)w.cache.identify_prefix(w.prompt()); }});
    script.push_back({"block_keys", [](World& w) { w.ids = small::token_ids(1, 0, 70); },
                      [=](World& w) { w.keys = w.cache.block_keys(w.prompt()); }});
    script.push_back({"find_block", {}, [=](World& w) { EXPECT_TRUE(w.cache.find_block(w.keys.at(0))); }});
    script.push_back({"read_block",
                      [](World& w) {
                        w.block.resize(static_cast<std::size_t>(w.cache.schema().block_image_bytes));
                        w.snapshot.resize(static_cast<std::size_t>(w.cache.snapshot_bytes()));
                      },
                      [=](World& w) { EXPECT_TRUE(w.cache.read_block(w.keys.at(0), w.block)); }});
    script.push_back({"read_snapshot", {}, [=](World& w) { (void)w.cache.read_snapshot(w.keys.at(3), w.snapshot); }});
    script.push_back({"read_status", {}, [=](World& w) { (void)read_status(w.cache); }});
    script.push_back({"preempted_bytes", {}, [=](World& w) { (void)preempted_bytes(w.cache, request(w)); }});
    run_script(script);
  });
}

TEST(NoMemory, WhatComesFromElsewhere) {
  expect_no_leak([] {
    std::vector<Line> script;
    add_request(script, "a", 1, 64);
    script.push_back({"export", {}, [](World& w) {
                        w.image = w.cache.export_image(w.requests.at("a"));
                        w.blocks = w.cache.export_blocks(w.requests.at("a"));
                        w.chain = w.cache.chain_of(w.requests.at("a"));
                      }});
    script.push_back({"preempt", {}, [](World& w) { preempt(w.cache, w.requests.at("a"), w.preempted); }});
    add_request(script, "b", 2, 95);
    script.push_back({"import", [](World& w) { w.ids = small::token_ids(1, 0, 64); },
                      [](World& w) {
                        w.requests.at("a") = w.cache.import_image(w.image, w.ids, w.blocks).value();
                      }});
    script.push_back(release("a"));
    script.push_back({"import where it is kept", {}, [](World& w) {
                        const std::size_t bytes = w.blocks.size() / 4;
                        std::vector<std::span<const std::byte>> blocks = [&] {
                          const FreeMemory free;  // the caller's own
                          return std::vector<std::span<const std::byte>>(4);
                        }();
                        for (std::size_t i = 0; i < 4; ++i) blocks[i] = std::span(w.blocks).subspan(i * bytes, bytes);
                        w.requests.at("a") = w.cache.import_image(w.image, w.ids, blocks, w.chain).value();
                      }});
    script.push_back(release("a"));
    script.push_back({"resume", {}, [](World& w) { w.requests.at("a") = resume(w.cache, w.preempted).value(); }});
    add_step(script, "a", 1, 20);
    script.push_back(release("b"));
    script.push_back({"insert_blocks",
                      [](World& w) {
                        w.ids = small::token_ids(9, 0, 40);
                        w.block.assign(static_cast<std::size_t>(w.cache.schema().block_image_bytes), std::byte{7});
                        w.snapshot.assign(static_cast<std::size_t>(w.cache.snapshot_bytes()), std::byte{9});
                      },
                      [](World& w) {
                        const std::span<const std::byte> two[] = {w.block, w.block};
                        EXPECT_EQ(w.cache.insert_blocks(w.prompt(), two), 2);
                      }});
    script.push_back({"insert_snapshot", [](World& w) { w.keys = w.cache.block_keys(w.prompt()); },
                      [](World& w) { EXPECT_TRUE(w.cache.insert_snapshot(w.keys.at(1), w.snapshot)); }});
    add_request(script, "c", 9, 40);
    run_script(script);
  });
}

TEST(NoMemory, Operations) {
  expect_no_leak([] {
    std::vector<Line> script;
    add_request(script, "a", 1, 64);
    script.push_back(prepare("a", 1, 3));
    script.push_back({"write_swa", [](World& w) { make_inputs(w, 1, 64); },
                      [](World& w) { w.cache.acquire(0).write_swa(w.inputs[0].view(small::kRaw)); }});
    script.push_back(append("a", 1));
    script.push_back({"flush_compression", {}, [](World& w) {
                        const TensorView entries(w.q.data(), {3, 80});
                        w.cache.acquire(2).flush_compression({.entries = entries, .index_keys = {}, .valid = {}});
                      }});
    script.push_back({"gather_compressed_kv", {}, [](World& w) {
                        w.cache.acquire(1).gather_compressed_kv({w.chosen.data(), {3, 4}}, {w.out.data(), {3, 4, 80}});
                      }});
    script.push_back({"gather_all_compressed_kv", {}, [](World& w) {
                        w.cache.acquire(1).gather_all_compressed_kv({w.out.data(), {1, 24, 80}}, {w.lens.data(), {1}});
                      }});
    script.push_back({"gather_all_index_keys", {}, [](World& w) {
                        w.cache.acquire(1).gather_all_index_keys({w.out.data(), {1, 24, 32}}, {w.lens.data(), {1}});
                      }});
    script.push_back({"gather_swa_kv", {}, [](World& w) {
                        w.cache.acquire(0).gather_swa_kv({w.out.data(), {1, 16, 80}}, {w.lens.data(), {1}},
                                                         {w.first.data(), {1}});
                      }});
    const auto index = [](World& w) {
      return IndexInputs{{w.q.data(), {3, 2, 32}}, {}, {w.q.data(), {3, 2}}};
    };
    script.push_back({"index_scores", {}, [=](World& w) {
                        w.cache.acquire(1).index_scores(index(w), {w.scores.data(), {3, 24}});
                      }});
    script.push_back({"select_topk", {}, [=](World& w) {
                        w.cache.acquire(1).select_topk({w.scores.data(), {3, 24}}, {w.chosen.data(), {3, 4}});
                      }});
    script.push_back({"index_topk", {}, [=](World& w) {
                        w.cache.acquire(1).index_topk(index(w), {w.chosen.data(), {3, 4}});
                      }});
    script.push_back({"attend", {}, [](World& w) {
                        AttendInputs in{};
                        in.q = {w.q.data(), {3, 3, 80}};
                        in.topk = {w.chosen.data(), {3, 4}};
                        w.cache.acquire(1).attend(in, {w.out.data(), {3, 3, 80}});
                      }});
    script.push_back({"views", {}, [](World& w) {
                        (void)w.cache.acquire(1).read_swa_view();
                        (void)w.cache.acquire(1).read_classical_view();
                        (void)w.cache.acquire(1).read_indexer_view();
                      }});
    script.push_back(commit());
    run_script(script);
  });
}

class NoMemorySessions : public testing::TestWithParam<std::optional<Protection>> {};

TEST_P(NoMemorySessions, EveryCall) {
  expect_no_leak([] {
    std::vector<Line> script;
    add_request(script, "a", 1, 70);
    script.push_back({"take keys",
                      [](World& w) {
                        if (!GetParam()) return;
                        w.identity.keys = {CacheKey{}};
                        w.identity.protection = *GetParam();
                      },
                      [](World&) {}});
    script.push_back({"save_session", [](World& w) { w.requests["b"] = kNoRequest; },
                      [](World& w) {
                        w.records.list.clear();
                        EXPECT_TRUE(save_session(w.cache, w.requests.at("a"), w.identity, w.records));
                      }});
    script.push_back({"restore_session", {}, [](World& w) {
                        w.records.at = 0;
                        w.requests.at("b") = restore_session(w.cache, w.identity, w.records).value();
                      }});
    add_step(script, "b", 2, 3);
    script.push_back(release("b"));
    script.push_back({"save_session_file", {}, [](World& w) {
                        EXPECT_TRUE(save_session_file(w.cache, w.requests.at("a"), w.identity, w.session_path));
                      }});
    script.push_back({"restore_session_file", {}, [](World& w) {
                        w.requests.at("b") = restore_session_file(w.cache, w.identity, w.session_path).value();
                      }});
    script.push_back(release("b"));
    script.push_back({"forget it", {}, [](World& w) { w.cache.invalidate("weights"); }});
    script.push_back({"SessionSender", {}, [](World& w) {
                        w.sender.emplace(w.cache, w.requests.at("a"), w.identity);
                      }});
    script.push_back({"its keys", {}, [](World& w) { EXPECT_FALSE(w.sender->keys().empty()); }});
    script.push_back({"offer", {}, [](World& w) {
                        w.records.list.clear();
                        w.sender->offer(w.records);
                      }});
    script.push_back({"SessionReceiver", {}, [](World& w) {
                        SessionIdentity identity = [&] {
                          const FreeMemory free;  // the caller's own copy
                          return w.identity;
                        }();
                        w.receiver.emplace(w.cache, std::move(identity));
                      }});
    script.push_back({"take the offer", {}, [](World& w) { w.receiver->take(w.records.list.at(0)); }});
    script.push_back({"of the offer", {}, [](World& w) {
                        EXPECT_TRUE(w.receiver->has_offer());
                        EXPECT_EQ(w.receiver->prompt().token_ids.size(), 70u);
                        EXPECT_LT(w.receiver->done_bytes(), w.receiver->total_bytes());
                      }});
    script.push_back({"wanted", {}, [](World& w) { w.keys = w.receiver->wanted(); }});
    script.push_back({"send", {}, [](World& w) {
                        w.records.list.clear();
                        EXPECT_TRUE(w.sender->send(w.keys, w.records));
                      }});
    script.push_back({"take blocks", {}, [](World& w) {
                        for (const auto& record : w.records.list) w.receiver->take(record);
                      }});
    script.push_back({"finish", {}, [](World& w) { w.requests.at("b") = w.receiver->finish().value(); }});
    add_step(script, "b", 1, 12);
    script.push_back(release("b"));
    script.push_back({"forget it again", {}, [](World& w) { w.cache.invalidate("weights"); }});
    script.push_back({"what a source has",
                      [](World& w) {
                        w.block = w.cache.export_blocks(w.requests.at("a"));
                        const auto bytes = static_cast<std::ptrdiff_t>(w.cache.schema().block_image_bytes);
                        for (std::size_t i = 0; i < w.keys.size(); ++i) {
                          const auto at = w.block.begin() + static_cast<std::ptrdiff_t>(i) * bytes;
                          w.source.blocks[w.keys[i]].assign(at, at + bytes);
                        }
                        w.records.list.clear();
                        w.sender->offer(w.records);
                        w.receiver.emplace(w.cache, w.identity, &w.source);
                      },
                      [](World& w) { w.receiver->take(w.records.list.at(0)); }});
    script.push_back({"finish with it", {}, [](World& w) {
                        w.requests.at("b") = w.receiver->finish().value();
                      }});
    run_script(script);
  });
}

INSTANTIATE_TEST_SUITE_P(Protections, NoMemorySessions,
                         testing::Values(std::nullopt, Protection::sealed, Protection::authenticated),
                         [](const auto& protection) {
                           return std::string(protection.param ? to_string(*protection.param) : "none");
                         });

// A failed save leaves no file behind.
TEST(NoMemory, NoFileOfAFailedSaveStays) {
  World world;
  world.requests["a"] = world.small.request(1, 40);
  const std::string path = world.folder.path + "/a session of some request";
  for (std::int64_t n = 1;; n = next_allocation(n)) {
    const Refusal refusal = call_without(n, Refused::one, Threads::own, [&] {
      save_session_file(world.cache, world.requests.at("a"), world.identity, path);
    });
    if (!refusal.threw) break;
    ASSERT_TRUE(std::filesystem::is_empty(world.folder.path)) << "allocation " << n;
  }
}

TEST(NoMemory, Construction) {
  expect_no_leak([] {
    const ModelConfig config = small::config();
    const CacheOptions options = cache_options();
    std::shared_ptr<Backend> backend;
    EXPECT_GT(refuse_each("make_cpu_backend", [&] { backend = make_cpu_backend(4); }, [] {}), 3);
    EXPECT_GT(refuse_each("KVCacheManager", [&] { KVCacheManager(config, options, backend); }, [] {}), 30);
  });
}

TEST(NoMemory, StatusFolder) {
  expect_no_leak([] {
    World world;
    world.requests["a"] = world.small.request(1, 40);
    const std::string before = world.state();
    refuse_each(
        "StatusFolder",
        [&] {
          std::string path = [&] {
            const FreeMemory free;  // the caller's own copy
            return world.folder.path + "/status";
          }();
          world.status.emplace(world.cache, std::move(path), StatusOptions{.interval = std::chrono::milliseconds(0)});
        },
        [&] { EXPECT_EQ(world.state(), before); });
    bool published = false;  // publish() returns false and continues
    for (std::int64_t n = 1; !published && !testing::Test::HasFailure(); n = next_allocation(n))
      EXPECT_FALSE(
          call_without(n, Refused::all_later, Threads::own, [&] { published = world.status->publish(); }).threw);
    EXPECT_EQ(world.state(), before);
    call_without(1, Refused::all_later, Threads::own, [&] { world.status.reset(); });
    EXPECT_FALSE(std::filesystem::exists(world.folder.path + "/status/status.json"));
  });
}

// The C interface returns a status and never throws.
TEST(NoMemory, CInterface) {
  kv4_model* model = nullptr;
  kv4_status status = KV4_OK;
  for (std::int64_t n = 1; n < 10000; ++n) {
    call_without(n, Refused::all_later, Threads::own, [&] { status = kv4_model_preset("v4-flash", &model); });
    if (status == KV4_OK) break;
    ASSERT_EQ(status, KV4_OUT_OF_MEMORY) << n << ": " << kv4_last_error();
  }
  ASSERT_EQ(status, KV4_OK);
  kv4_cache_options options;
  kv4_cache_options_init(&options, sizeof(options));
  options.max_requests = 2;
  options.max_context = 1024;
  options.num_blocks = 8;
  options.max_step_tokens = 16;
  const std::int32_t layers[] = {2, 3};
  options.layers = layers;
  options.num_layers = 2;
  kv4_cache* cache = nullptr;
  for (std::int64_t n = 1; n < 1'000'000; n = next_allocation(n)) {
    call_without(n, Refused::all_later, Threads::own,
                 [&] { status = kv4_cache_new(model, &options, nullptr, &cache); });
    if (status == KV4_OK) break;
    ASSERT_EQ(status, KV4_OUT_OF_MEMORY) << n << ": " << kv4_last_error();
  }
  ASSERT_EQ(status, KV4_OK) << kv4_last_error();
  kv4_cache_free(cache);
  kv4_model_free(model);
}

}  // namespace
}  // namespace kv4::test
