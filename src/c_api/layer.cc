// The calls of a layer inside a step.
#include "c_api/handles.h"

using namespace kv4::c_api;

namespace {

/// A handle and the views of a call's tensors.
struct LayerCall {
  kv4_cache& cache;
  kv4::LayerCacheHandle handle;

  LayerCall(kv4_cache* given, std::int32_t layer)
      : cache(require_set(given, "cache")), handle(cache.manager.acquire(layer)) {}
  kv4::TensorView view(const kv4_tensor* given, const char* what) const { return tensor(cache, given, what); }
  kv4::TensorView optional(const kv4_tensor* given, const char* what) const {
    return optional_tensor(cache, given, what);
  }
};

kv4_index_inputs index_inputs_defaults() {
  auto value = sized<kv4_index_inputs>();
  value.score_mode = kv4::to_string(kv4::ScoreMode::exact);
  return value;
}

kv4::ScoreMode score_mode(const kv4_index_inputs& in) {
  return kv4::parse_score_mode(c_text(in.score_mode, "inputs.score_mode"));
}

kv4::IndexInputs index_inputs(const LayerCall& call, const kv4_index_inputs& in) {
  return {call.view(in.q, "q"), call.optional(in.q_scale, "q_scale"), call.view(in.weights, "weights")};
}

kv4_plane plane(const kv4::PlaneView& from) {
  return {reinterpret_cast<std::uint8_t*>(from.data), from.block_stride, from.row_stride, from.row_bytes};
}

}  // namespace

void kv4_append_inputs_init(kv4_append_inputs* inputs, size_t size) {
  init_struct(inputs, size, sized<kv4_append_inputs>());
}

void kv4_flush_inputs_init(kv4_flush_inputs* inputs, size_t size) {
  init_struct(inputs, size, sized<kv4_flush_inputs>());
}

void kv4_index_inputs_init(kv4_index_inputs* inputs, size_t size) {
  init_struct(inputs, size, index_inputs_defaults());
}

void kv4_attend_inputs_init(kv4_attend_inputs* inputs, size_t size) {
  init_struct(inputs, size, sized<kv4_attend_inputs>());
}

void kv4_swa_view_init(kv4_swa_view* view, size_t size) { init_struct(view, size, sized<kv4_swa_view>()); }

void kv4_rows_view_init(kv4_rows_view* view, size_t size) { init_struct(view, size, sized<kv4_rows_view>()); }

kv4_status kv4_cache_append(kv4_cache* cache, int32_t layer, const kv4_append_inputs* inputs) {
  return guarded([&] {
    LayerCall call(cache, layer);
    const kv4_append_inputs in = read_struct(inputs, sized<kv4_append_inputs>(), "inputs");
    call.handle.append({call.view(in.raw_kv, "raw_kv"), call.optional(in.kv, "kv"), call.optional(in.gate, "gate"),
                        call.optional(in.index_kv, "index_kv"), call.optional(in.index_gate, "index_gate"),
                        in.raw_is_projection != 0});
  });
}

kv4_status kv4_cache_write_swa(kv4_cache* cache, int32_t layer, const kv4_tensor* raw_kv) {
  return guarded([&] {
    LayerCall call(cache, layer);
    call.handle.write_swa(call.view(raw_kv, "raw_kv"));
  });
}

kv4_status kv4_cache_flush_compression(kv4_cache* cache, int32_t layer, const kv4_flush_inputs* inputs) {
  return guarded([&] {
    LayerCall call(cache, layer);
    const kv4_flush_inputs in = read_struct(inputs, sized<kv4_flush_inputs>(), "inputs");
    call.handle.flush_compression({call.view(in.entries, "entries"), call.optional(in.index_keys, "index_keys"),
                                   call.optional(in.valid, "valid")});
  });
}

kv4_status kv4_cache_index_scores(kv4_cache* cache, int32_t layer, const kv4_index_inputs* inputs,
                                  const kv4_tensor* scores) {
  return guarded([&] {
    const kv4_index_inputs in = read_struct(inputs, index_inputs_defaults(), "inputs");
    const kv4::ScoreMode mode = score_mode(in);
    LayerCall call(cache, layer);
    call.handle.index_scores(index_inputs(call, in), call.view(scores, "scores"), mode);
  });
}

kv4_status kv4_cache_select_topk(kv4_cache* cache, int32_t layer, const kv4_tensor* scores, const kv4_tensor* indices,
                                 const kv4_tensor* slots) {
  return guarded([&] {
    LayerCall call(cache, layer);
    call.handle.select_topk(call.view(scores, "scores"), call.view(indices, "indices"), call.optional(slots, "slots"));
  });
}

kv4_status kv4_cache_index_topk(kv4_cache* cache, int32_t layer, const kv4_index_inputs* inputs,
                                const kv4_tensor* indices, const kv4_tensor* slots) {
  return guarded([&] {
    const kv4_index_inputs in = read_struct(inputs, index_inputs_defaults(), "inputs");
    const kv4::ScoreMode mode = score_mode(in);
    LayerCall call(cache, layer);
    call.handle.index_topk(index_inputs(call, in), call.view(indices, "indices"), call.optional(slots, "slots"), mode);
  });
}

kv4_status kv4_cache_attend(kv4_cache* cache, int32_t layer, const kv4_attend_inputs* inputs, const kv4_tensor* out,
                            const kv4_tensor* lse) {
  return guarded([&] {
    LayerCall call(cache, layer);
    const kv4_attend_inputs in = read_struct(inputs, sized<kv4_attend_inputs>(), "inputs");
    call.handle.attend({call.view(in.q, "q"), call.optional(in.sink, "sink"), call.optional(in.topk, "topk"),
                        in.softmax_scale, in.inverse_rope != 0},
                       call.view(out, "out"), call.optional(lse, "lse"));
  });
}

kv4_status kv4_cache_gather_compressed_kv(kv4_cache* cache, int32_t layer, const kv4_tensor* indices,
                                          const kv4_tensor* out, const kv4_tensor* valid) {
  return guarded([&] {
    LayerCall call(cache, layer);
    call.handle.gather_compressed_kv(call.view(indices, "indices"), call.view(out, "out"),
                                     call.optional(valid, "valid"));
  });
}

kv4_status kv4_cache_gather_all_compressed_kv(kv4_cache* cache, int32_t layer, const kv4_tensor* out,
                                              const kv4_tensor* lens) {
  return guarded([&] {
    LayerCall call(cache, layer);
    call.handle.gather_all_compressed_kv(call.view(out, "out"), call.view(lens, "lens"));
  });
}

kv4_status kv4_cache_gather_all_index_keys(kv4_cache* cache, int32_t layer, const kv4_tensor* out,
                                           const kv4_tensor* lens) {
  return guarded([&] {
    LayerCall call(cache, layer);
    call.handle.gather_all_index_keys(call.view(out, "out"), call.view(lens, "lens"));
  });
}

kv4_status kv4_cache_gather_swa_kv(kv4_cache* cache, int32_t layer, const kv4_tensor* out, const kv4_tensor* lens,
                                   const kv4_tensor* first) {
  return guarded([&] {
    LayerCall call(cache, layer);
    call.handle.gather_swa_kv(call.view(out, "out"), call.view(lens, "lens"), call.view(first, "first"));
  });
}

kv4_status kv4_cache_read_swa_view(kv4_cache* cache, int32_t layer, kv4_swa_view* out) {
  return guarded([&] {
    LayerCall call(cache, layer);
    const kv4::SWAView from = call.handle.read_swa_view();
    auto value = sized<kv4_swa_view>();
    value.payload = plane(from.payload);
    value.rope = plane(from.rope);
    value.scale = plane(from.scale);
    value.num_items = from.num_items;
    value.rows = from.rows;
    value.slots = from.slots;
    value.positions = from.positions;
    value.head = from.head;
    write_struct(out, value, "out");
  });
}

namespace {

template <class View>
kv4_rows_view rows_view(const View& from) {
  auto value = sized<kv4_rows_view>();
  value.num_items = from.num_items;
  value.rows_per_block = from.rows_per_block;
  value.blocks_per_request = from.blocks_per_request;
  value.block_table = from.block_table;
  value.request_rows = from.request_rows;
  value.lens = from.lens;
  return value;
}

}  // namespace

kv4_status kv4_cache_read_classical_view(kv4_cache* cache, int32_t layer, kv4_rows_view* out) {
  return guarded([&] {
    LayerCall call(cache, layer);
    const kv4::ClassicalView from = call.handle.read_classical_view();
    kv4_rows_view value = rows_view(from);
    value.payload = plane(from.payload);
    value.rope = plane(from.rope);
    value.scale = plane(from.scale);
    write_struct(out, value, "out");
  });
}

kv4_status kv4_cache_read_indexer_view(kv4_cache* cache, int32_t layer, kv4_rows_view* out) {
  return guarded([&] {
    LayerCall call(cache, layer);
    const kv4::IndexerView from = call.handle.read_indexer_view();
    kv4_rows_view value = rows_view(from);
    value.payload = plane(from.keys);
    value.scale = plane(from.scales);
    value.global_scale = plane(from.global_scale);
    write_struct(out, value, "out");
  });
}
