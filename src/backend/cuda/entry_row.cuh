// The end of an entry's way: from its pool to the page.
#pragma once

#include "backend/cuda/quad_codec.cuh"

namespace kv4::cuda {

/// `position` is the token that closes the entry, `block` the one that holds it. `turn`: at the entry's first token.
template <class Lanes>
__device__ void store_entry(Lanes& lanes, const ops::AppendParams& p, const ops::KindDesc& kind,
                            const ops::Pool (&pool)[kQuad], const Quad& weight, const Turn& turn, int position,
                            int block) {
  Quad x[1];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) x[0].v[i] = codec::quotient(pool[i].num, pool[i].den);
  x[0] = round_bf16(x[0]);
  const Quad weights[1] = {weight};
  norm_row(lanes, weights, p.layer.eps, x);
  rotate(turn, x[0]);
  if constexpr (Lanes::kWarps == 1) {
    if (kind.hadamard) hadamard_chunk(lanes.lane(), x[0]);
  }

  const int slot = position % p.step.block_tokens / kind.ratio;
  const auto store = [&](auto codec) {
    using Codec = decltype(codec);
    QuadBits bits[1];
    encode_row<Codec>(lanes, kind.page.shape, x, kind.global_scale, bits);
    store_quad<Codec>(bits[0], kind.page.shape, kind.page.payload.at(block, slot), kind.page.scale.at(block, slot),
                      lanes.channel(0));
  };
  if constexpr (Lanes::kWarps == 1) {
    with_key_quads(kind.page.format, store);
  } else {
    with_row_quads(kind.page.format, store);
  }
  if (slot == 0 && lanes.leader() && kind.page.global.data != nullptr)
    store_word(kind.page.global.at(block, 0), kind.global_scale);
}

}  // namespace kv4::cuda
