// Features that only a GPU has: graphs, streams, its own memory. The bytes are compared with a cache on the CPU that
// ran the same steps one by one.
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "kv4/error.h"
#include "parity/twin_caches.h"

#define KV4_NEEDS_GPU() \
  if (!kv4::why_no_cuda().empty()) GTEST_SKIP() << kv4::why_no_cuda()

namespace kv4::test {
namespace {

void ok(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

struct OwnStream {
  cudaStream_t stream = nullptr;
  OwnStream() { ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~OwnStream() { cudaStreamDestroy(stream); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  Stream handle() const { return {stream}; }
};

// Device memory at one address for the object's lifetime.
class FixedTensor {
 public:
  explicit FixedTensor(const ConstTensorView& like)
      : view_(like.over<void>(nullptr)), bytes_(static_cast<std::size_t>(extent_bytes(like))) {
    ok(cudaMalloc(&view_.data, bytes_));
    ok(cudaMemset(view_.data, 0xA5, bytes_));
    ok(cudaDeviceSynchronize());  // streams of the tests do not wait for the default stream
  }
  ~FixedTensor() { cudaFree(view_.data); }
  FixedTensor(const FixedTensor&) = delete;
  FixedTensor& operator=(const FixedTensor&) = delete;

  const TensorView& view() const { return view_; }
  void fill(const void* host, cudaStream_t stream) {
    ok(cudaMemcpyAsync(view_.data, host, bytes_, cudaMemcpyHostToDevice, stream));
  }
  std::vector<std::byte> read(cudaStream_t stream) const {
    std::vector<std::byte> out(bytes_);
    ok(cudaMemcpyAsync(out.data(), view_.data, bytes_, cudaMemcpyDeviceToHost, stream));
    ok(cudaStreamSynchronize(stream));
    return out;
  }

 private:
  TensorView view_;
  std::size_t bytes_;
};

// The inputs of all layers at fixed addresses, for steps of one size.
class FixedInputs {
 public:
  void fill(const std::vector<LayerInputs>& inputs, cudaStream_t stream) {
    const bool first = views_.empty();
    std::size_t at = 0;
    for (const LayerInputs& in : inputs) {
      if (first) views_.push_back(in.views);
      ConstTensorView AppendInputs::*const parts[] = {&AppendInputs::raw_kv, &AppendInputs::kv, &AppendInputs::gate,
                                                      &AppendInputs::index_kv, &AppendInputs::index_gate};
      for (ConstTensorView AppendInputs::*part : parts) {
        const ConstTensorView& host = in.views.*part;
        if (host.empty()) continue;
        if (first) {
          tensors_.push_back(std::make_unique<FixedTensor>(host));
          views_.back().*part = tensors_.back()->view();
        }
        tensors_[at++]->fill(host.data, stream);
      }
    }
  }
  const AppendInputs& operator[](std::size_t layer) const { return views_[layer]; }

 private:
  std::vector<std::unique_ptr<FixedTensor>> tensors_;
  std::vector<AppendInputs> views_;
};

std::vector<LayerInputs> inputs_of(TwinCaches& t, const Step& step) {
  std::vector<LayerInputs> out;
  for (const LayerCacheSchema* layer : t.layers(step)) out.push_back(t.cpu.inputs_of(step, *layer));
  return out;
}

// A step of all layers, appended without a host wait.
void run_queued(TwinCaches& t, FixedInputs& fixed, cudaStream_t stream, const std::vector<Work>& work) {
  const Step step = t.prepare(work).value();
  std::vector<LayerInputs> inputs = inputs_of(t, step);
  const std::vector<const LayerCacheSchema*> layers = t.layers(step);
  t.cpu.append_inputs(layers, inputs);
  fixed.fill(inputs, stream);
  for (std::size_t i = 0; i < layers.size(); ++i) t.gpu.cache.acquire(layers[i]->spec.layer).append(fixed[i]);
  t.commit(step);
}

// --- graphs

// A graph of all layers' appends in a step of one shape, and of two gathers in each compressing layer.
class StepGraph {
 public:
  StepGraph() = default;
  ~StepGraph() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
  }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  FixedInputs inputs;

  bool captured() const { return exec_ != nullptr; }

  // Captures in an open step of the shape; the inputs have been filled once.
  void capture(TwinCaches& t, const Step& step, cudaStream_t stream) {
    const std::vector<const LayerCacheSchema*> layers = t.layers(step);
    const std::int64_t items = step.num_items, window = t.cpu.cache.schema().config.window + 4;
    for (const LayerCacheSchema* layer : layers) {
      const std::int64_t width = layer->window.row.width;
      void* any = this;  // only the shapes matter
      outputs_.push_back(std::make_unique<FixedTensor>(TensorView(any, DType::bf16, {items, window, width})));
      outputs_.push_back(std::make_unique<FixedTensor>(TensorView(any, DType::i32, {items})));
      outputs_.push_back(std::make_unique<FixedTensor>(TensorView(any, DType::i32, {items})));
    }
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (std::size_t i = 0; i < layers.size(); ++i) {
      LayerCacheHandle handle = t.gpu.cache.acquire(layers[i]->spec.layer);
      handle.append(inputs[i]);
      handle.gather_swa_kv(outputs_[3 * i]->view(), outputs_[3 * i + 1]->view(), outputs_[3 * i + 2]->view());
    }
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(stream, &graph));
    ASSERT_NE(graph, nullptr);
    ok(cudaGraphInstantiate(&exec_, graph, 0));
    ok(cudaGraphDestroy(graph));
  }

  void replay(cudaStream_t stream) { ok(cudaGraphLaunch(exec_, stream)); }

  // Compares the output of the replayed gathers with the CPU's in the same open step.
  void check_gathers(TwinCaches& t, const Step& step, cudaStream_t stream, const std::string& what) {
    const std::vector<const LayerCacheSchema*> layers = t.layers(step);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      std::vector<std::vector<std::byte>> want;
      std::vector<TensorView> views;
      for (std::size_t k = 0; k < 3; ++k) {
        TensorView view = outputs_[3 * i + k]->view();
        want.emplace_back(static_cast<std::size_t>(extent_bytes(view)), std::byte{0xA5});
        view.data = want.back().data();
        views.push_back(view);
      }
      t.cpu.cache.acquire(layers[i]->spec.layer).gather_swa_kv(views[0], views[1], views[2]);
      for (std::size_t k = 0; k < 3; ++k)
        expect_same(outputs_[3 * i + k]->read(stream), want[k],
                    what + ": layer " + std::to_string(i) + " window, output " + std::to_string(k));
    }
  }

 private:
  std::vector<std::unique_ptr<FixedTensor>> outputs_;
  cudaGraphExec_t exec_ = nullptr;
};

// A padded batch of 8 places. Requests join with an eager prefill, decode by replays of one graph, take drafts of
// several tokens by replays of another graph, and leave.
class PaddedBatch {
 public:
  static constexpr int kPlaces = 8;

  PaddedBatch(const Model& model, const CacheOptions& options, const InputStyle& style, std::uint64_t seed)
      : twins_(model, options, style, make_cuda_backend(0, stream_.handle())), random_(seed) {}

  void step(int number, std::int32_t longest) {
    const int at = static_cast<int>(random_.below(kPlaces));
    if (places_[at] == kNoRequest && random_.below(3) == 0) join(at, longest);
    if (places_[at] != kNoRequest && random_.below(25) == 0) leave(at);
    if (random_.below(4) == 0)
      drafts(number);
    else
      decode(number);
  }

  void check(const std::string& what) {
    for (RequestId r : places_)
      if (r != kNoRequest) twins_.check(r, what);
    twins_.check_blocks(what);
  }

  // Replays a decode and aborts it, then rewinds the requests as far as allowed.
  void aborted_decode() {
    const Step step = replay(decode_, decode_work(), -1);
    twins_.abort(step);
    for (RequestId r : places_)
      if (r != kNoRequest) twins_.rewind(r, twins_.cpu.cache.rewind_floor(r));
  }

 private:
  void join(int at, std::int32_t longest) {
    places_[at] = twins_.admit();
    streams_[at] = random_.next();
    twins_.run({{places_[at], streams_[at], static_cast<std::int32_t>(random_.between(1, longest))}});
  }
  void leave(int at) {
    twins_.check(places_[at], "as it leaves");
    twins_.release(places_[at]);
    places_[at] = kNoRequest;
  }
  bool full(int at) const { return twins_.length(places_[at]) + 4 > twins_.cpu.cache.schema().options.max_context; }

  std::vector<Work> decode_work() {
    std::vector<Work> work;
    for (int i = 0; i < kPlaces; ++i) {
      const bool waits = places_[i] == kNoRequest || full(i) || random_.below(20) == 0;
      work.push_back(waits ? Work{} : Work{places_[i], streams_[i], 1});
    }
    return work;
  }
  void decode(int number) { twins_.commit(replay(decode_, decode_work(), number)); }

  // 4 tokens per place: 1 to 3 of the request, then padding.
  void drafts(int number) {
    std::vector<Work> work;
    for (int i = 0; i < kPlaces; ++i) {
      const std::int32_t count = static_cast<std::int32_t>(random_.between(1, 3));
      work.push_back(places_[i] == kNoRequest || full(i) ? Work{kNoRequest, 0, count}
                                                         : Work{places_[i], streams_[i], count});
      work.push_back({kNoRequest, 0, 4 - count});
    }
    twins_.commit(replay(drafts_, work, number));
    for (const Work& w : work)
      if (w.request != kNoRequest) twins_.rewind(w.request, twins_.length(w.request) - random_.below(w.count));
  }

  Step replay(StepGraph& graph, const std::vector<Work>& work, int number) {
    const Step step = twins_.prepare(work).value();
    std::vector<LayerInputs> inputs = inputs_of(twins_, step);
    twins_.cpu.append_inputs(twins_.layers(step), inputs);
    graph.inputs.fill(inputs, stream_.stream);
    if (!graph.captured()) {
      twins_.gpu.append_inputs(twins_.layers(step), inputs);  // kernels are loaded before they are captured
      graph.capture(twins_, step, stream_.stream);
    }
    graph.replay(stream_.stream);
    if (number % 40 == 0) graph.check_gathers(twins_, step, stream_.stream, "step " + std::to_string(number));
    return step;
  }

  OwnStream stream_;
  TwinCaches twins_;
  Random random_;
  StepGraph decode_, drafts_;
  RequestId places_[kPlaces] = {kNoRequest, kNoRequest, kNoRequest, kNoRequest,
                                kNoRequest, kNoRequest, kNoRequest, kNoRequest};
  std::uint64_t streams_[kPlaces] = {};
};

CacheOptions graph_options(const FormatCase& f, std::int64_t context) {
  CacheOptions o = options_for(f);
  o.max_requests = PaddedBatch::kPlaces;
  o.spare_slots = 2;
  o.max_context = context;
  o.max_rewind_tokens = 3;
  return o;
}

TEST(Graph, ReplaysOfAPaddedBatchAtRealWidths) {
  KV4_NEEDS_GPU();
  const Model model(real_config());
  for (const FormatCase& f : {format_cases()[0], format_cases()[5]}) {
    SCOPED_TRACE(f.name());
    InputStyle style;
    style.type = style.raw_type = style.index_type = f.pending;
    PaddedBatch batch(model, graph_options(f, 900), style, 51);
    for (int i = 0; i < 400; ++i) {
      batch.step(i, 300);
      if (i % 50 == 49) batch.check("after step " + std::to_string(i));
      if (HasFailure()) return;
    }
  }
}

TEST(Graph, ReplaysOfAPaddedBatchAtTinyWidths) {
  KV4_NEEDS_GPU();
  const Model model(tiny_config());
  for (const FormatCase& f : format_cases()) {
    SCOPED_TRACE(f.name());
    CacheOptions o = graph_options(f, 200);
    o.block_tokens = 16;
    o.hca_mode = f.hadamard ? HcaMode::online : HcaMode::raw;
    PaddedBatch batch(model, o, {.projection = f.hadamard}, 52);
    for (int i = 0; i < 400; ++i) {
      batch.step(i, 60);
      if (i % 50 == 49) batch.check("after step " + std::to_string(i));
      if (HasFailure()) return;
    }
  }
}

// The manager does not see a replay's writes, so a rewind must not rely on rows that an aborted replay overwrote.
TEST(Graph, AbortedReplaysLeaveNoTrace) {
  KV4_NEEDS_GPU();
  const Model model(tiny_config());
  CacheOptions o = graph_options(format_cases()[0], 200);
  o.block_tokens = 16;
  PaddedBatch batch(model, o, {}, 53);
  for (int i = 0; i < 150; ++i) {
    batch.step(i, 60);
    if (i % 5 != 4) continue;
    batch.aborted_decode();
    batch.check("after the abort in step " + std::to_string(i));
    if (HasFailure()) return;
  }
}

// --- streams

// Delays a stream, so that work that does not wait for it runs too early.
void delay(cudaStream_t stream) {
  ok(cudaLaunchHostFunc(
      stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }, nullptr));
}

TEST(Streams, SeveralCachesInterleaved) {
  KV4_NEEDS_GPU();
  const Model model(tiny_config());
  struct One {
    OwnStream stream;
    TwinCaches twins;
    FixedInputs inputs;
    RequestId a, b;
    One(const Model& m, const FormatCase& f)
        : twins(m, options_for(f), {}, make_cuda_backend(0, stream.handle())), a(twins.admit()), b(twins.admit()) {}
  };
  std::vector<std::unique_ptr<One>> all;
  for (const FormatCase& f : format_cases()) all.push_back(std::make_unique<One>(model, f));
  for (int step = 0; step < 40; ++step)
    for (std::size_t i = 0; i < all.size(); ++i) {
      One& one = *all[i];
      if ((static_cast<std::size_t>(step) + i) % 7 == 0) delay(one.stream.stream);
      run_queued(one.twins, one.inputs, one.stream.stream, {{one.a, i, 2}, {}, {one.b, i + 10, 3}});
    }
  for (const auto& one : all) {
    one->twins.check(one->a, "first");
    one->twins.check(one->b, "second");
  }
}

TEST(Streams, SwitchingKeepsTheOrder) {
  KV4_NEEDS_GPU();
  const Model model(tiny_config());
  OwnStream first, second;
  const cudaStream_t streams[] = {first.stream, second.stream, nullptr};
  TwinCaches t(model, options_for(format_cases()[0]), {}, make_cuda_backend(0, first.handle()));
  FixedInputs inputs;
  Random random(61);
  const RequestId a = t.admit(), b = t.admit();
  for (int step = 0; step < 60; ++step) {
    const cudaStream_t stream = streams[random.below(3)];
    t.gpu.cache.set_stream({stream});
    if (step % 4 == 0) delay(stream);
    run_queued(t, inputs, stream, {{a, 1, 3}, {kNoRequest, 0, 2}, {b, 2, 1}});
    if (step % 20 == 19) t.check(a, "step " + std::to_string(step));
  }
  t.gpu.cache.set_stream({});
  t.check(a, "at the end");
  t.check(b, "at the end");
}

TEST(Streams, TwoBackendsOnOneGpu) {
  KV4_NEEDS_GPU();
  const Model model(tiny_config());
  TwinCaches x(model, options_for(format_cases()[0]), {}, make_cuda_backend()),
      y(model, options_for(format_cases()[1]), {}, make_cuda_backend());
  const RequestId a = x.admit(), b = y.admit();
  for (int i = 0; i < 20; ++i) {
    x.run({{a, 1, 1 + i % 5}});
    y.run({{b, 2, 1 + i % 7}});
  }
  x.check(a, "first");
  y.check(b, "second");
}

TEST(Streams, SeveralCachesShareABackend) {
  KV4_NEEDS_GPU();
  const Model tiny(tiny_config()), real(real_config());
  const std::shared_ptr<Backend> backend = make_cuda_backend();
  TwinCaches x(tiny, options_for(format_cases()[0]), {}, backend);
  const RequestId a = x.admit();
  x.run({{a, 1, 30}});
  TwinCaches y(real, options_for(format_cases()[1]), {}, backend);  // the backend's staging and tables grow
  const RequestId b = y.admit();
  for (int i = 0; i < 20; ++i) {
    x.run({{a, 1, 1 + i % 5}});
    y.run({{b, 2, 1 + i % 70}});
    if (i % 5 == 0) x.check(a, "first");
  }
  x.check(a, "first");
  y.check(b, "second");
}

TEST(Streams, CachesOnThreads) {
  KV4_NEEDS_GPU();
  const Model model(tiny_config());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 4; ++i)
    threads.emplace_back([&model, i] {
      OwnStream stream;
      TwinCaches t(model, options_for(format_cases()[i]), {}, make_cuda_backend(0, stream.handle()));
      const RequestId a = t.admit();
      for (int step = 0; step < 40; ++step) t.run({{a, i, 1 + step % 6}});
      t.check(a, "thread " + std::to_string(i));
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Streams, FinishedTellsWhenAStepIsDone) {
  KV4_NEEDS_GPU();
  const Model model(tiny_config());
  OwnStream stream;
  TwinCaches t(model, options_for(format_cases()[0]), {}, make_cuda_backend(0, stream.handle()));
  const RequestId a = t.admit();
  FixedInputs inputs;
  run_queued(t, inputs, stream.stream, {{a, 1, 3}});
  KVCacheManager& cache = t.gpu.cache;
  cache.synchronize();

  struct Gate {  // opens at the end in any case
    std::atomic<bool> open = false;
    ~Gate() { open = true; }
  } gate;
  const auto wait = [](void* flag) {
    while (!static_cast<Gate*>(flag)->open) std::this_thread::yield();
  };
  const Step step = t.prepare({{a, 1, 3}}).value();
  std::vector<LayerInputs> in = inputs_of(t, step);
  const std::vector<const LayerCacheSchema*> layers = t.layers(step);
  t.cpu.append_inputs(layers, in);
  inputs.fill(in, stream.stream);
  ok(cudaLaunchHostFunc(stream.stream, wait, &gate));
  for (std::size_t i = 0; i < layers.size(); ++i) cache.acquire(layers[i]->spec.layer).append(inputs[i]);
  t.commit(step);
  EXPECT_EQ(cache.length(a), 6) << "lengths advance at once";
  EXPECT_FALSE(cache.finished(step)) << "its stream waits";
  gate.open = true;
  cache.synchronize();
  EXPECT_TRUE(cache.finished(step));
  t.check(a, "after it");

  for (int i = 0; i < 200; ++i) t.run({{a, 1, 1}});  // more than the number of tickets kept
  cache.synchronize();
  EXPECT_TRUE(cache.finished(step)) << "an old step";
  Step never = step;
  never.id += 1'000'000;
  try {
    cache.finished(never);
    ADD_FAILURE() << "no Error was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(to_string(e.code()), std::string(to_string(ErrorCode::bad_state)));
  }
}

// --- memory

std::size_t free_memory() {
  std::size_t available = 0, total = 0;
  ok(cudaDeviceSynchronize());
  ok(cudaMemGetInfo(&available, &total));
  return available;
}

void use_a_small_cache(const std::string& what) {
  const Model model(tiny_config());
  TwinCaches t(model, options_for(format_cases()[0]), {}, make_cuda_backend());
  const RequestId a = t.admit();
  t.run({{a, 1, 40}});
  t.run({{a, 1, 1}});
  t.check(a, what);
}

constexpr std::size_t kSlack = std::size_t{8} << 20;  // kept by the driver itself

TEST(GpuMemory, RefusedMemoryIsAnErrorAndNothingIsKept) {
  KV4_NEEDS_GPU();
  use_a_small_cache("before");
  const std::size_t before = free_memory();
  const auto refused = [&](const char* what, const ModelConfig& config, auto change) {
    SCOPED_TRACE(what);
    CacheOptions o = options_for(format_cases()[0]);
    o.num_blocks = 64;
    change(o);
    try {
      KVCacheManager cache(config, o, make_cuda_backend());
      ADD_FAILURE() << "no Error was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(to_string(e.code()), std::string(to_string(ErrorCode::out_of_memory))) << e.what();
    }
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "no error is left behind";
    EXPECT_GE(free_memory() + kSlack, before);
    use_a_small_cache("afterwards");
  };
  refused("blocks", real_config(), [](CacheOptions& o) { o.block_tokens = 12'800, o.num_blocks = 2'000'000; });
  refused("slots", real_config(), [](CacheOptions& o) { o.max_requests = 60'000, o.max_rewind_tokens = 2'000; });
  const ModelConfig windows = base_config(512, 64, 128, 128, 4, 128, std::vector<LayerKind>(60, LayerKind::swa));
  refused("step workspace", windows, [](CacheOptions& o) { o.max_step_tokens = 1 << 24; });
}

TEST(GpuMemory, CachesFreeTheirMemory) {
  KV4_NEEDS_GPU();
  use_a_small_cache("before");
  const std::size_t before = free_memory();
  for (int i = 0; i < 30; ++i) use_a_small_cache("cache " + std::to_string(i));
  EXPECT_GE(free_memory() + kSlack, before);
}

TEST(GpuMemory, IsZeroedAndAligned) {
  KV4_NEEDS_GPU();
  const std::shared_ptr<Backend> backend = make_cuda_backend();
  EXPECT_FALSE(backend->on_host());
  EXPECT_EQ(backend->allocate(0), nullptr);
  backend->deallocate(nullptr, 0);
  for (std::int64_t bytes : {1, 255, 4096, 1'000'003}) {
    for (int again = 0; again < 3; ++again) {  // reused memory is not clean
      std::byte* memory = backend->allocate(bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 256, 0u);
      const std::vector<std::byte> got = read_bytes(*backend, memory, bytes);
      EXPECT_TRUE(std::all_of(got.begin(), got.end(), [](std::byte b) { return b == std::byte{0}; })) << bytes;
      backend->fill(memory, 0xEE, bytes);
      backend->deallocate(memory, bytes);
    }
  }
}

}  // namespace
}  // namespace kv4::test
