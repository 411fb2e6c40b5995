// A failing kernel destroys the process's GPU context. These tests check the errors that a caller then gets, each in a
// process of its own.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>

#include "kv4/error.h"
#include "kv4/host_memory.h"
#include "support/harness.h"

namespace kv4::test {
namespace {

constexpr unsigned kMaxSeconds = 60;  // no call may hang

int failures = 0;

void expect(bool what, const std::string& message) {
  if (what) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", message.c_str());
}

/// The call must throw Error(device_failure) whose message contains all these words.
template <class Call>
void expect_failure(const char* name, std::initializer_list<const char*> words, Call&& call) {
  try {
    call();
    expect(false, std::string(name) + " did not throw");
  } catch (const Error& e) {
    const std::string message = e.what();
    expect(e.code() == ErrorCode::device_failure, std::string(name) + ": another code: " + message);
    for (const char* word : words)
      expect(message.find(word) != std::string::npos, std::string(name) + ": no '" + word + "' in: " + message);
  }
}

/// Queues a gather that writes to an unmapped address.
void gather_into_nowhere(KVCacheManager& cache, const Step& step) {
  const ModelConfig& config = cache.schema().config;
  char* const nowhere = reinterpret_cast<char*>(std::uintptr_t{4096});
  const std::int64_t items = step.num_items;
  cache.acquire(0).gather_swa_kv(TensorView(nowhere, DType::bf16, {items, config.window, config.head_dim}),
                                 TensorView(nowhere, DType::i32, {items}), TensorView(nowhere, DType::i32, {items}));
}

/// A step's read of its CSA layer, with inputs and outputs at unmapped addresses.
struct Read {
  const char* name;
  void (*queue)(LayerCacheHandle& layer, std::int64_t tokens);
};

constexpr int kCsaLayer = 1;  // of real_config
constexpr std::int64_t kHeads = 4, kHeadDim = 512, kIndexDim = 128, kEntries = 64, kTop = 4;

TensorView nowhere(DType type, std::initializer_list<std::int64_t> shape) {
  return TensorView(reinterpret_cast<char*>(std::uintptr_t{1} << 20), type, shape);
}
IndexInputs index_inputs(std::int64_t tokens) {
  return {nowhere(DType::bf16, {tokens, kHeads, kIndexDim}), {}, nowhere(DType::f32, {tokens, kHeads})};
}

constexpr Read kReads[] = {
    {"index_scores",
     [](LayerCacheHandle& layer, std::int64_t tokens) {
       layer.index_scores(index_inputs(tokens), nowhere(DType::f32, {tokens, kEntries}));
     }},
    {"select_topk",
     [](LayerCacheHandle& layer, std::int64_t tokens) {
       layer.select_topk(nowhere(DType::f32, {tokens, kEntries}), nowhere(DType::i32, {tokens, kTop}));
     }},
    {"index_topk",
     [](LayerCacheHandle& layer, std::int64_t tokens) {
       layer.index_topk(index_inputs(tokens), nowhere(DType::i32, {tokens, kTop}));
     }},
    {"attend",
     [](LayerCacheHandle& layer, std::int64_t tokens) {
       const TensorView heads = nowhere(DType::bf16, {tokens, kHeads, kHeadDim});
       layer.attend({.q = heads}, heads);
     }},
};

void queue(const Read& read, KVCacheManager& cache, const Step& step) {
  LayerCacheHandle layer = cache.acquire(kCsaLayer);
  read.queue(layer, step.num_tokens);
}

/// Repeats the call until it throws, for at most half a minute.
template <class Call>
void repeat(Call&& call) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (std::chrono::steady_clock::now() < end) call();
}

// `find_out` is the first call that notices the failure.
template <class FindOut>
void lose_the_gpu(FindOut&& find_out) {
  alarm(kMaxSeconds);
  {
    const Model model(real_config());
    const std::shared_ptr<Backend> backend = make_cuda_backend();
    Driver d(model, options_for(format_cases()[0]), backend);
    KVCacheManager& cache = d.cache;
    const RequestId a = cache.admit().value();
    const Step first = d.prepare({{a, 1, 40}}, 0).value();
    d.append(first);
    cache.commit(first);
    const std::vector<std::byte> blocks = cache.export_blocks(a);
    const CanonicalImage image = cache.export_image(a);

    const Step step = d.prepare({{a, 1, 1}}, 0).value();
    gather_into_nowhere(cache, step);
    expect_failure("the first call that notices it", {"queued before", "illegal memory access", "context is lost"},
                   [&] { find_out(cache, step); });

    const std::vector<std::int32_t> ids = cache.token_ids(a);
    const auto lost = [](const char* name, auto&& call) { expect_failure(name, {"context of GPU 0 is lost"}, call); };
    lost("append", [&] { d.append(step); });
    lost("a gather", [&] { gather_into_nowhere(cache, step); });
    for (const Read& read : kReads) lost(read.name, [&] { queue(read, cache, step); });
    lost("commit", [&] { cache.commit(step); });
    cache.abort(step);
    lost("finished", [&] { cache.finished(first); });
    lost("synchronize", [&] { cache.synchronize(); });
    lost("set_stream", [&] { cache.set_stream({&failures}); });
    lost("admit", [&] { (void)cache.admit(); });
    lost("fork", [&] { (void)cache.fork(a); });
    lost("export_image", [&] { cache.export_image(a); });
    lost("export_blocks", [&] { cache.export_blocks(a); });
    lost("import_image", [&] { (void)cache.import_image(image, {ids.data(), 40}, blocks); });
    lost("prepare_forward", [&] { (void)d.prepare({{a, 1, 1}}, 0); });
    lost("pinned memory", [&] { HostMemory(backend, 4096); });
    expect(cache.length(a) == 40, "lengths are the host's, and stay");
    expect_failure("another backend", {"context is lost"}, [] { make_cuda_backend(); });
  }  // nothing throws or hangs on the way out
  std::exit(failures == 0 ? 0 : 1);
}

class LostDeviceDeathTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_cuda(); !why.empty()) GTEST_SKIP() << why;
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, not a fork of this one
  }
};

TEST_F(LostDeviceDeathTest, ShowsWhenAskedToWait) {
  EXPECT_EXIT(lose_the_gpu([](KVCacheManager& cache, const Step&) { cache.synchronize(); }), testing::ExitedWithCode(0),
              "");
}

TEST_F(LostDeviceDeathTest, ShowsAtTheNextCallsOfAStep) {
  EXPECT_EXIT(
      lose_the_gpu([](KVCacheManager& cache, const Step& step) { repeat([&] { gather_into_nowhere(cache, step); }); }),
      testing::ExitedWithCode(0), "");
}

TEST_F(LostDeviceDeathTest, ShowsInWhatAStepReads) {
  for (const Read& read : kReads) {
    SCOPED_TRACE(read.name);
    EXPECT_EXIT(
        lose_the_gpu([&](KVCacheManager& cache, const Step& step) { repeat([&] { queue(read, cache, step); }); }),
        testing::ExitedWithCode(0), "");
  }
}

TEST_F(LostDeviceDeathTest, ShowsInAnExport) {
  EXPECT_EXIT(lose_the_gpu([](KVCacheManager& cache, const Step&) { cache.export_image(0); }),
              testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace kv4::test
