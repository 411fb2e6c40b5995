#include <cstring>

#include "backend/cpu/row_kernels.h"
#include "codec/codec.h"

namespace kv4::cpu {
namespace {

void convert(const ConvertArgs& a) {
  const float* f32 = static_cast<const float*>(a.from);
  const std::uint16_t* bf16 = static_cast<const std::uint16_t*>(a.from);
  for (std::int64_t i = 0; i < a.count; ++i) {
    if (a.to_type == DType::f32)
      static_cast<float*>(a.to)[i] =
          codec::canonical_nan(a.from_type == DType::f32 ? f32[i] : codec::bf16_value(bf16[i]));
    else
      static_cast<std::uint16_t*>(a.to)[i] =
          a.from_type == DType::f32 ? codec::bf16_bits(f32[i]) : codec::canonical_bf16(bf16[i]);
  }
}

void load_as_bf16(const void* from, DType type, int count, float* to) {
  const ops::RowType row_type = type == DType::bf16 ? ops::RowType::bf16 : ops::RowType::f32_as_bf16;
  for (int i = 0; i < count; ++i) to[i] = ops::load_element(from, row_type, i);
}

void fold(int width, const ops::SourceRow* rows, int count, bool fresh, float* acc) {
  ops::fold_rows(OneLane{}, width, rows, count, fresh, acc);
}

void mean(int width, const float* acc, float* row) { ops::mean_row(OneLane{}, width, acc, row); }

void pool(int width, const ops::SourceRow* rows, int count, float* acc, float* row) {
  ops::pool_rows(
      OneLane{}, width, count, [rows](int i) -> const ops::SourceRow& { return rows[i]; }, acc);
  mean(width, acc, row);
}

void angles(const RopeAngles& table, std::int64_t position, float* cos, float* sin) {
  for (int i = 0; i < table.pairs; ++i) rope_angle(table, position, i, &cos[i], &sin[i]);
}

void finish(const FinishArgs& a) {
  ops::norm_and_rotate_row(OneLane{}, a.width, a.norm_weight, a.eps, a.pairs, a.cos, a.sin, a.row, a.tmp);
}

void rotate(int pairs, const float* cos, const float* sin, float* channels) {
  ops::rotate_channels(OneLane{}, pairs, cos, sin, channels);
}

void project(const ProjectArgs& a) { ops::project_latent(OneLane{}, a.width, a.latent, a.weight, a.rows, a.out); }

void hadamard(int width, float* row) { ops::hadamard_row(OneLane{}, width, row); }

void encode(Format format, codec::RowShape shape, const float* x, std::uint8_t* payload, std::uint8_t* scale,
            float global) {
  codec::with_any_codec(format, [&](auto c) { c.encode(OneLane{}, shape, x, payload, scale, global); });
}

void encode_input(Format format, codec::RowShape shape, const void* x, DType type, std::uint8_t* payload,
                  std::uint8_t* scale, float global, float* tmp) {
  load_as_bf16(x, type, shape.width, tmp);
  encode(format, shape, tmp, payload, scale, global);
}

void decode(Format format, codec::RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale, float global,
            void* out, DType out_type, float* tmp) {
  if (out_type == DType::f32) {
    codec::with_any_codec(
        format, [&](auto c) { c.decode(OneLane{}, shape, payload, scale, global, static_cast<float*>(out)); });
    return;
  }
  codec::with_any_codec(format, [&](auto c) { c.decode(OneLane{}, shape, payload, scale, global, tmp); });
  convert({shape.width, tmp, DType::f32, out, DType::bf16});
}

// mxfp4: the encoded row, payload and scale; other formats: the row's values.
void prepare_query(Format format, codec::RowShape shape, const std::uint8_t* payload, const std::uint8_t* scale,
                   float global, std::uint8_t* out) {
  if (format == Format::mxfp4) {
    const std::size_t bytes = codec::Mxfp4::payload_bytes(shape);
    std::memcpy(out, payload, bytes);
    std::memcpy(out + bytes, scale, codec::Mxfp4::scale_bytes(shape));
  } else {
    decode(format, shape, payload, scale, global, out, DType::f32, nullptr);
  }
}

void score(const ScoreArgs& a) {
  const codec::RowShape shape = a.page.shape;
  const float global = page_scale(a.page, a.block);
  for (int i = 0; i < a.count; ++i) {
    const std::uint8_t* payload = a.page.payload.at(a.block, a.row + i);
    const std::uint8_t* scale = a.page.scale.at(a.block, a.row + i);
    const bool fp4 = a.page.format == Format::mxfp4;
    if (!fp4) decode(a.page.format, shape, payload, scale, global, a.tmp, DType::f32, nullptr);
    for (int t = 0; t < a.num_queries; ++t) {
      const ScoreQuery& query = a.queries[t];
      if (i >= query.count) continue;
      ops::ScoreSum sum;
      for (int h = 0; h < a.num_heads; ++h) {
        const std::uint8_t* q = query.heads + h * query_bytes(shape.width);
        sum.add(h, query.weights[h],
                fp4 ? ops::mxfp4_dot(shape.width, q, q + codec::Mxfp4::payload_bytes(shape), payload, scale)
                    : ops::row_dot(shape.width, reinterpret_cast<const float*>(q), a.tmp));
      }
      query.out[i] = sum.total();
    }
  }
}

void prepare_heads(const PrepareHeadsArgs& a) {
  for (int i = 0; i < a.num_heads * a.width; ++i) a.out[i] = a.q[i] * a.scale;
}

void attend(const AttendArgs& a) {
  const int stride = attend_stride(a.width);
  for (int r = 0; r < a.count; ++r)
    for (int h = 0; h < a.num_heads; ++h) {
      ops::Attention state{a.max[h], a.sum[h]};
      ops::attend_row(a.width, a.q + h * a.width, a.rows + r * stride, state, a.acc + h * stride);
      a.max[h] = state.max;
      a.sum[h] = state.sum;
    }
}

}  // namespace

const RowKernels& plain_row_kernels() {
  static constexpr RowKernels kTable{"scalar",      convert, load_as_bf16,  fold,   mean,     pool,
                                     angles,        finish,  rotate,        project, hadamard, encode,
                                     encode_input,  decode,  prepare_query, score,  prepare_heads, attend};
  return kTable;
}

}  // namespace kv4::cpu
