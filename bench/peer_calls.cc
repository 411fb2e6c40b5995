#include "peer_calls.h"

#include <algorithm>
#include <exception>
#include <string>

#include "backend/backend.h"
#include "kv4/backend.h"
#include "kv4/options.h"
#include "kv4/params.h"
#include "kv4/version.h"
#ifdef KV4_HAS_CUDA
#include "kv4/cuda.h"
#endif

namespace kv4::bench {
namespace {

constexpr int kRowWidth = 512, kRowTail = 64, kKeyWidth = 128, kWindow = 128;
constexpr std::int64_t kRowBytes = 576, kRowScaleBytes = 8, kKeyScaleBytes = 4;

thread_local std::string refusal;

template <class T>
T* at(std::int64_t address) {
  return reinterpret_cast<T*>(static_cast<std::intptr_t>(address));
}

std::int32_t small(std::int64_t value) { return static_cast<std::int32_t>(value); }

Backend& host() {
  static const std::shared_ptr<Backend> backend = make_cpu_backend();
  return *backend;
}

ops::RowPlanes rows_at(std::int64_t payload, std::int64_t scales, std::int64_t block_stride) {
  ops::RowPlanes planes;
  planes.format = Format::fp8_tile64;
  planes.shape = {kRowWidth, kRowTail};
  planes.payload = {at<std::uint8_t>(payload), block_stride, kRowBytes};
  planes.scale = {at<std::uint8_t>(scales), block_stride, kRowScaleBytes};
  return planes;
}

template <class Call>
ops::StepDesc step_of(const Call& c) {
  ops::StepDesc step;
  step.num_tokens = small(c.num_tokens);
  step.num_items = small(c.num_requests);
  step.block_tokens = small(c.ratio * c.page_rows);
  step.blocks_per_request = small(c.blocks_per_request);
  step.tokens = at<const ops::StepRecord>(c.records);
  step.block_table = at<const std::int32_t>(c.block_table);
  return step;
}

ops::AttendParams params_of(const kv4_peer_attend& c) {
  ops::AttendParams p;
  p.step = step_of(c);
  p.layer.window.ring = rows_at(c.ring, c.ring_scales, c.ring_stride);
  if (c.scratch != 0) p.layer.window.scratch = rows_at(c.scratch, c.scratch_scales, 0);
  p.layer.window.rows = p.layer.window_tokens = kWindow;
  if (c.pages != 0) {
    p.layer.num_kinds = 1;
    ops::KindDesc& kind = p.layer.kinds[0];
    kind.page = rows_at(c.pages, c.pages + c.page_rows * kRowBytes, c.page_stride);
    kind.ratio = small(c.ratio);
    kind.rows_per_block = small(c.page_rows);
  }
  p.num_heads = small(c.num_heads);
  p.softmax_scale = static_cast<float>(c.softmax_scale);
  p.q = {at<const void>(c.q), DType::bf16, c.num_heads * kRowWidth};
  p.sink = at<const float>(c.sink);
  if (c.chosen != 0) {
    p.chosen = {at<const void>(c.chosen), DType::i32, c.num_chosen};
    p.num_chosen = small(c.num_chosen);
  }
  p.out = {at<void>(c.out), DType::bf16};
  p.lse = at<float>(c.lse);
  p.workspace = at<std::uint8_t>(c.workspace);
  p.workspace_bytes = c.workspace_bytes;
  return p;
}

ops::IndexParams params_of(const kv4_peer_index& c) {
  const bool fp8 = c.format == 0;
  const std::int64_t payload = fp8 ? kKeyWidth : kKeyWidth / 2;
  ops::IndexParams p;
  p.step = step_of(c);
  p.layer.num_kinds = 2;
  ops::KindDesc& kind = p.layer.kinds[p.kind];
  kind.page.format = fp8 ? Format::fp8 : Format::mxfp4;
  kind.page.shape = {kKeyWidth, 0};
  kind.page.payload = {at<std::uint8_t>(c.pages), c.page_stride, payload};
  kind.page.scale = {at<std::uint8_t>(c.pages + c.page_rows * payload), c.page_stride, kKeyScaleBytes};
  kind.ratio = small(c.ratio);
  kind.rows_per_block = small(c.page_rows);
  p.num_heads = small(c.num_heads);
  p.q = {at<const void>(c.q), DType::u8, c.q_row_stride};
  p.q_scale = {at<const void>(c.q_scale), DType::u8, c.num_heads * kKeyScaleBytes};
  p.weights = {at<const void>(c.weights), DType::f32, c.num_heads};
  p.scores = at<float>(c.scores);
  p.score_stride = c.score_stride;
  p.mode = c.fast != 0 ? ScoreMode::fast : ScoreMode::exact;
  p.top = small(c.top);
  p.indices = at<std::int32_t>(c.indices);
  p.workspace = at<std::uint8_t>(c.workspace);
  p.workspace_bytes = c.workspace_bytes;
  return p;
}

/// `on_device` returns the launch's error; a build without CUDA has no `on_device` call.
template <class Call, class OnHost, class OnDevice>
int run(const Call& call, OnHost&& on_host, [[maybe_unused]] OnDevice&& on_device) {
  try {
    const auto params = params_of(call);
    if (call.on_host != 0) {
      on_host(params);
      return 0;
    }
#ifdef KV4_HAS_CUDA
    return static_cast<int>(on_device(params, reinterpret_cast<cudaStream_t>(at<void>(call.stream))));
#else
    refusal = "this library was built without CUDA";
    return -1;
#endif
  } catch (const std::exception& e) {
    refusal = e.what();
    return -1;
  }
}

#ifdef KV4_HAS_CUDA
constexpr auto on_device_attend = cuda::attend;
constexpr auto on_device_scores = cuda::index_scores;
constexpr auto on_device_topk = cuda::index_topk;
constexpr auto on_device_select = cuda::select_topk;
#else
constexpr int on_device_attend = 0, on_device_scores = 0, on_device_topk = 0, on_device_select = 0;
#endif

}  // namespace
}  // namespace kv4::bench

using namespace kv4::bench;

int kv4_peer_attend_call(const kv4_peer_attend* call) {
  return run(*call, [](const kv4::ops::AttendParams& p) { host().attend(p); }, on_device_attend);
}
int kv4_peer_index_scores(const kv4_peer_index* call) {
  return run(*call, [](const kv4::ops::IndexParams& p) { host().index_scores(p); }, on_device_scores);
}
int kv4_peer_index_topk(const kv4_peer_index* call) {
  return run(*call, [](const kv4::ops::IndexParams& p) { host().index_topk(p); }, on_device_topk);
}
int kv4_peer_select_topk(const kv4_peer_index* call) {
  return run(*call, [](const kv4::ops::IndexParams& p) { host().select_topk(p); }, on_device_select);
}
const char* kv4_peer_refusal() { return refusal.c_str(); }
std::int64_t kv4_peer_attend_struct_bytes() { return static_cast<std::int64_t>(sizeof(kv4_peer_attend)); }
std::int64_t kv4_peer_index_struct_bytes() { return static_cast<std::int64_t>(sizeof(kv4_peer_index)); }
std::int64_t kv4_peer_attend_workspace_bytes(std::int64_t tokens, std::int64_t requests, std::int64_t entries) {
  return kv4::ops::staged_attend_workspace_bytes(tokens, requests, kWindow, entries);
}
std::int64_t kv4_peer_index_workspace_bytes(std::int64_t max_keys, std::int64_t tokens) {
  const std::int64_t token = kv4::ops::index_token_bytes(max_keys, kv4::ops::kMaxIndexHeads, kKeyWidth);
  return token * std::min(tokens, kv4::ops::default_index_tile_tokens(token));
}
const char* kv4_peer_version() { return KV4_VERSION; }
int kv4_peer_has_cuda() {
#ifdef KV4_HAS_CUDA
  return 1;
#else
  return 0;
#endif
}
