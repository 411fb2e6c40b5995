// LayerCacheHandle: the calls of an attention layer during a step.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <optional>
#include <string>
#include <variant>

#include "bindings.h"
#include "cache.h"
#include "kv4/error.h"
#include "views.h"

namespace kv4::python {
namespace {

/// One call of a handle: its arrays, its stream, its turn.
class LayerCall : public Arguments {
 public:
  LayerCall(const Layer& layer, nb::handle stream) : LayerCall(layer, layer.cache->device->choose_stream(stream)) {}

  /// `given`, or a new array like `like`; sets `view` to its view.
  AnyArray out_or_new(const nb::object& given, const char* name, nb::handle like, const Shape& shape, DType dtype,
                      TensorView& view) {
    AnyArray array = given.is_none() ? new_array(*layer_.cache->device, like, shape, dtype) : given;
    view = out(array, name);
    return array;
  }

  template <class Call>
  void run(Call&& call) const {
    layer_.cache->device->work_on(*layer_.cache->manager, stream_, call);
  }

 private:
  LayerCall(const Layer& layer, Stream stream)
      : Arguments(*layer.cache->device, stream), layer_(layer), stream_(stream) {}

  const Layer& layer_;
  Stream stream_;
};

/// Checks for a step before arrays are made; the call itself would check too late.
std::int64_t step_tokens(const Layer& layer) {
  if (layer.cache->items.empty())
    throw Error(ErrorCode::bad_state, "no step is open: the handle's step has ended; acquire a new one");
  return layer.cache->num_tokens;
}

std::int64_t default_topk(const Layer& layer, std::optional<std::int64_t> k) {
  constexpr std::int64_t kMost = 2048;
  const std::int64_t chosen = k.value_or(layer.cache->manager->schema().config.index_topk);
  if (chosen < 1 || chosen > kMost)
    throw Error(ErrorCode::bad_argument, "k must be from 1 to 2048; got " + std::to_string(chosen));
  return chosen;
}

using ScoreModeLike = std::variant<ScoreMode, std::string>;

ScoreMode score_mode(const ScoreModeLike& mode) {
  const ScoreMode* const value = std::get_if<ScoreMode>(&mode);
  return value != nullptr ? *value : parse_score_mode(std::get<std::string>(mode));
}

// The type of a head or row made from this array: bf16 if the array is bf16, else float32.
DType float_like(const ConstTensorView& view) { return view.dtype == DType::bf16 ? DType::bf16 : DType::f32; }

void def_writes(nb::class_<Layer>& layer) {
  layer.def(
      "append",
      [](const Layer& self, const ArrayLike& raw_kv, const ArrayLike& kv, const ArrayLike& gate,
         const ArrayLike& index_kv, const ArrayLike& index_gate, bool raw_is_projection, const StreamLike& stream) {
        LayerCall call(self, stream);
        const AppendInputs inputs{
            call.in(raw_kv, "raw_kv"),         call.in(kv, "kv"), call.in(gate, "gate"), call.in(index_kv, "index_kv"),
            call.in(index_gate, "index_gate"), raw_is_projection};
        LayerCacheHandle handle = self.handle;
        call.run([&] { handle.append(inputs); });
      },
      nb::arg("raw_kv"), nb::arg("kv") = nb::none(), nb::arg("gate") = nb::none(), nb::arg("index_kv") = nb::none(),
      nb::arg("index_gate") = nb::none(), nb::kw_only(), nb::arg("raw_is_projection") = false,
      nb::arg("stream") = nb::none(),
      "Window rows, pending rows and the entries and index keys that fall due, in one pass. float32 or bf16, one row\n"
      "per token of the step, padding included; channels dense, rows may be strided.\n\n"
      "raw_kv      [tokens, head_dim]: normed and rotated window rows\n"
      "kv, gate    CSA [tokens, 2 * head_dim], HCA [tokens, head_dim]\n"
      "index_kv, index_gate  CSA [tokens, 2 * index_dim]\n"
      "raw_is_projection  raw_kv comes straight from the projection: it is normed (raw_norm_weight) and rotated here");
  layer.def(
      "write_swa",
      [](const Layer& self, const ArrayLike& raw_kv, const StreamLike& stream) {
        LayerCall call(self, stream);
        const ConstTensorView rows = call.in(raw_kv, "raw_kv");
        LayerCacheHandle handle = self.handle;
        call.run([&] { handle.write_swa(rows); });
      },
      nb::arg("raw_kv"), nb::kw_only(), nb::arg("stream") = nb::none(),
      "Only the window rows: raw_kv [tokens, head_dim].");
  layer.def(
      "flush_compression",
      [](const Layer& self, const ArrayLike& entries, const ArrayLike& index_keys, const ArrayLike& valid,
         const StreamLike& stream) {
        LayerCall call(self, stream);
        const FlushInputs inputs{call.in(entries, "entries"), call.in(index_keys, "index_keys"),
                                 call.in(valid, "valid")};
        LayerCacheHandle handle = self.handle;
        call.run([&] { handle.flush_compression(inputs); });
      },
      nb::arg("entries"), nb::arg("index_keys") = nb::none(), nb::arg("valid") = nb::none(), nb::kw_only(),
      nb::arg("stream") = nb::none(),
      "Entries made elsewhere, after rotation; index keys before the Hadamard transform. Row i is written iff "
      "valid[i]\n"
      "!= 0 and token i closes an entry.\n\n"
      "entries [tokens, head_dim], index_keys CSA [tokens, index_dim], valid uint8 or bool [tokens] (None: all)");
}

void def_gathers(nb::class_<Layer>& layer) {
  layer.def(
      "gather_compressed_kv",
      [](const Layer& self, const ArrayLike& indices, const ArrayLike& out, const ArrayLike& valid,
         const StreamLike& stream) {
        LayerCall call(self, stream);
        const ConstTensorView chosen = call.in(indices, "indices");
        TensorView rows;
        const AnyArray array = call.out_or_new(
            out, "out", indices, {step_tokens(self), chosen.shape[1], self.handle.head_dim()}, DType::f32, rows);
        const TensorView flags = call.out(valid, "valid");
        LayerCacheHandle handle = self.handle;
        call.run([&] { handle.gather_compressed_kv(chosen, rows, flags); });
        return array_tuple(array, array);
      },
      nb::arg("indices"), nb::arg("out") = nb::none(), nb::arg("valid") = nb::none(), nb::kw_only(),
      nb::arg("stream") = nb::none(),
      "Chosen entries, decoded: (k, v), one array twice.\n\n"
      "indices int32 [tokens, k]: anything but a visible entry gives a zero row\n"
      "out     float32 or bf16 [tokens, k, head_dim]; None: a new float32 one\n"
      "valid   uint8 [tokens, k], written, or None");
  layer.def(
      "gather_all_compressed_kv",
      [](const Layer& self, const ArrayLike& out, const ArrayLike& lens, const StreamLike& stream) {
        step_tokens(self);
        LayerCall call(self, stream);
        TensorView rows, counts;
        const AnyArray array = call.out_or_new(
            out, "out", out, {self.num_items(), self.most_entries(), self.handle.head_dim()}, DType::f32, rows);
        const AnyArray lengths = call.out_or_new(lens, "lens", out, {self.num_items()}, DType::i32, counts);
        LayerCacheHandle handle = self.handle;
        call.run([&] { handle.gather_all_compressed_kv(rows, counts); });
        return array_tuple(array, array, lengths);
      },
      nb::arg("out") = nb::none(), nb::arg("lens") = nb::none(), nb::kw_only(), nb::arg("stream") = nb::none(),
      "All entries of each item after the step, decoded: (k, v, lens), k and v one array.\n\n"
      "out [items, n, head_dim], n at least the longest; lens int32 [items]");
  layer.def(
      "gather_all_index_keys",
      [](const Layer& self, const ArrayLike& out, const ArrayLike& lens, const StreamLike& stream) {
        step_tokens(self);
        LayerCall call(self, stream);
        TensorView rows, counts;
        const std::int64_t width = self.cache->manager->schema().config.index_dim;
        const AnyArray array =
            call.out_or_new(out, "out", out, {self.num_items(), self.most_entries(), width}, DType::f32, rows);
        const AnyArray lengths = call.out_or_new(lens, "lens", out, {self.num_items()}, DType::i32, counts);
        LayerCacheHandle handle = self.handle;
        call.run([&] { handle.gather_all_index_keys(rows, counts); });
        return array_tuple(array, lengths);
      },
      nb::arg("out") = nb::none(), nb::arg("lens") = nb::none(), nb::kw_only(), nb::arg("stream") = nb::none(),
      "All index keys of each item after the step, as stored (transformed if Hadamard is on): (keys, lens).\n\n"
      "out [items, n, index_dim]; lens int32 [items]");
  layer.def(
      "gather_swa_kv",
      [](const Layer& self, const ArrayLike& out, const ArrayLike& lens, const ArrayLike& first,
         const StreamLike& stream) {
        step_tokens(self);
        LayerCall call(self, stream);
        TensorView rows, counts, starts;
        const AnyArray array = call.out_or_new(
            out, "out", out, {self.num_items(), self.most_window_rows(), self.handle.head_dim()}, DType::f32, rows);
        const AnyArray lengths = call.out_or_new(lens, "lens", out, {self.num_items()}, DType::i32, counts);
        const AnyArray positions = call.out_or_new(first, "first", out, {self.num_items()}, DType::i32, starts);
        LayerCacheHandle handle = self.handle;
        call.run([&] { handle.gather_swa_kv(rows, counts, starts); });
        return array_tuple(array, array, lengths, positions);
      },
      nb::arg("out") = nb::none(), nb::arg("lens") = nb::none(), nb::arg("first") = nb::none(), nb::kw_only(),
      nb::arg("stream") = nb::none(),
      "Window rows that the step's queries see, decoded: (k, v, lens, first), k and v one array. Item i's are "
      "positions\n"
      "first[i] .. first[i] + lens[i] - 1; a query at t uses those in (t - window, t].\n\n"
      "out [items, n, head_dim], n at least min(length, window - 1) + count; lens, first int32 [items]");
}

void def_index(nb::class_<Layer>& layer) {
  layer.def(
      "index_scores",
      [](const Layer& self, const ArrayLike& q, const ArrayLike& weights, const ArrayLike& scores,
         const ArrayLike& q_scale, const ScoreModeLike& mode, const StreamLike& stream) {
        LayerCall call(self, stream);
        const IndexInputs inputs{call.in(q, "q"), call.in(q_scale, "q_scale"), call.in(weights, "weights")};
        TensorView view;
        AnyArray array =
            call.out_or_new(scores, "scores", q, {step_tokens(self), self.most_entries()}, DType::f32, view);
        LayerCacheHandle handle = self.handle;
        const ScoreMode chosen = score_mode(mode);
        call.run([&] { handle.index_scores(inputs, view, chosen); });
        return array;
      },
      nb::arg("q"), nb::arg("weights"), nb::arg("scores") = nb::none(), nb::kw_only(), nb::arg("q_scale") = nb::none(),
      nb::arg("mode") = "exact", nb::arg("stream") = nb::none(),
      "score[t, j] = sum over heads of weight * relu(q . key j); -inf where a token sees no entry j.\n\n"
      "q       float32 or bf16 [tokens, heads, index_dim], rotated; or uint8, encoded, with q_scale\n"
      "weights float32 [tokens, heads], every factor of the score in it; 1 to 64 heads\n"
      "scores  float32 [tokens, n], n at least the longest item's entries; None: a new one, returned\n"
      "mode    ScoreMode or its name: 'exact' bits, or 'fast' scores within the error bound of docs/formats.md");
  layer.def(
      "select_topk",
      [](const Layer& self, const ArrayLike& scores, const ArrayLike& indices, const ArrayLike& slots,
         std::optional<std::int64_t> k, const StreamLike& stream) {
        LayerCall call(self, stream);
        const ConstTensorView given = call.in(scores, "scores");
        TensorView view;
        AnyArray array =
            call.out_or_new(indices, "indices", scores, {step_tokens(self), default_topk(self, k)}, DType::i32, view);
        const TensorView places = call.out(slots, "slots");
        LayerCacheHandle handle = self.handle;
        call.run([&] { handle.select_topk(given, view, places); });
        return array;
      },
      nb::arg("scores"), nb::arg("indices") = nb::none(), nb::arg("slots") = nb::none(), nb::kw_only(),
      nb::arg("k") = nb::none(), nb::arg("stream") = nb::none(),
      "The k best entries that each token sees, of given scores float32 [tokens, n] (the sum of several ranks', say).\n"
      "Arrays as for index_topk.");
  layer.def(
      "index_topk",
      [](const Layer& self, const ArrayLike& q, const ArrayLike& weights, const ArrayLike& indices,
         const ArrayLike& slots, const ArrayLike& q_scale, std::optional<std::int64_t> k, const ScoreModeLike& mode,
         const StreamLike& stream) {
        LayerCall call(self, stream);
        const IndexInputs inputs{call.in(q, "q"), call.in(q_scale, "q_scale"), call.in(weights, "weights")};
        TensorView view;
        AnyArray array =
            call.out_or_new(indices, "indices", q, {step_tokens(self), default_topk(self, k)}, DType::i32, view);
        const TensorView places = call.out(slots, "slots");
        LayerCacheHandle handle = self.handle;
        const ScoreMode chosen = score_mode(mode);
        call.run([&] { handle.index_topk(inputs, view, places, chosen); });
        return array;
      },
      nb::arg("q"), nb::arg("weights"), nb::arg("indices") = nb::none(), nb::arg("slots") = nb::none(), nb::kw_only(),
      nb::arg("q_scale") = nb::none(), nb::arg("k") = nb::none(), nb::arg("mode") = "exact",
      nb::arg("stream") = nb::none(),
      "The k best entries by index scores, for each token: an exact set, in no order, -1 filled.\n\n"
      "q, weights  as for index_scores\n"
      "mode        the scores to select by, 'exact' or 'fast', as for index_scores\n"
      "indices     int32 [tokens, k], k from 1 to 2048; None: a new one with `k` (the model's index_topk), returned\n"
      "slots       int32 [tokens, k], written: block * rows_per_block + row of each; or None");
}

void def_reads(nb::class_<Layer>& layer) {
  layer.def(
      "attend",
      [](const Layer& self, const ArrayLike& q, const ArrayLike& out, const ArrayLike& lse, const ArrayLike& sink,
         const ArrayLike& topk, float softmax_scale, bool inverse_rope, const StreamLike& stream) {
        LayerCall call(self, stream);
        const AttendInputs inputs{call.in(q, "q"), call.in(sink, "sink"), call.in(topk, "topk"), softmax_scale,
                                  inverse_rope};
        TensorView view;
        AnyArray array = call.out_or_new(out, "out", q, {inputs.q.shape[0], inputs.q.shape[1], self.handle.head_dim()},
                                         float_like(inputs.q), view);
        const TensorView sums = call.out(lse, "lse");
        LayerCacheHandle handle = self.handle;
        call.run([&] { handle.attend(inputs, view, sums); });
        return array;
      },
      nb::arg("q"), nb::kw_only(), nb::arg("out") = nb::none(), nb::arg("lse") = nb::none(),
      nb::arg("sink") = nb::none(), nb::arg("topk") = nb::none(), nb::arg("softmax_scale") = 0.0f,
      nb::arg("inverse_rope") = false, nb::arg("stream") = nb::none(),
      "Attention of each token over its window rows and entries, once append of this layer has run.\n\n"
      "q     float32 or bf16 [tokens, heads, head_dim], normed and rotated, 1 to 128 heads\n"
      "out   float32 or bf16 [tokens, heads, head_dim]; None: a new one like q, returned\n"
      "lse   float32 [tokens, heads], written: log of the softmax's denominator, the sink included; or None\n"
      "sink  float32 [heads] or None\n"
      "topk  int32 [tokens, k] entries; None: all visible\n"
      "softmax_scale  0: head_dim ** -0.5\n"
      "inverse_rope      turn the output's last rope_dim channels back by the query's position");
  layer.def("read_swa_view", [](Layer& self) { return swa_arrays(*self.cache, self.handle.read_swa_view()); });
  layer.def("read_classical_view",
            [](Layer& self) { return classical_arrays(*self.cache, self.handle.read_classical_view()); });
  layer.def("read_indexer_view",
            [](Layer& self) { return indexer_arrays(*self.cache, self.handle.read_indexer_view()); });
}

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<Layer> layer(
      m, "LayerCacheHandle",
      "What an attention layer calls; valid for the step it was acquired in. Arrays are read and written in place, "
      "where\n"
      "the cache is (NumPy or torch CPU tensors; torch CUDA tensors). NumPy has no bfloat16: uint16 holds its bits.\n"
      "Padded tokens are ignored and their output rows are zero. `stream`: see make_cuda_backend.");
  layer.def("layer", [](const Layer& self) { return self.handle.layer(); })
      .def("num_query_heads", [](const Layer& self) { return self.handle.num_query_heads(); })
      .def("head_dim", [](const Layer& self) { return self.handle.head_dim(); })
      .def("schema", &Layer::schema, nb::rv_policy::reference_internal);
  def_writes(layer);
  def_gathers(layer);
  def_index(layer);
  def_reads(layer);
}

}  // namespace kv4::python
