// The end of an entry's way: from its pool to the page.
#pragma once

#include "backend/cuda/row_encode.cuh"

namespace kv4::cuda {

/// Into row `slot` of `block`'s page. `turn`: at the entry's first token.
template <class Lanes>
__device__ void store_entry(Lanes& lanes, const ops::AppendParams& p, const ops::KindDesc& kind,
                            const ops::Pool (&pool)[kPair], const Pair& weight, const Turn& turn, int slot, int block) {
  Pair x;
#pragma unroll
  for (int i = 0; i < kPair; ++i) x.v[i] = codec::quotient(pool[i].num, pool[i].den);
  x = rotate(turn, norm_row(lanes, weight, p.layer.eps, round_bf16(x)));

  const auto store = [&](auto codec) {
    using Codec = decltype(codec);
    const PairBits bits = encode_row<Codec>(lanes, x, kind.global_scale);
    store_pair<Codec, Lanes>(bits, kind.page.payload.at(block, slot), kind.page.scale.at(block, slot), lanes.channel());
  };
  if constexpr (Lanes::kWidth == kKeyWidth) {
    if (kind.hadamard) {
      lanes.hadamard(x);
      x = round_bf16(x);
    }
    with_key_pairs(kind.page.format, store);
  } else {
    with_row_pairs(kind.page.format, store);
  }
  if (slot == 0 && lanes.leader() && kind.page.global.data != nullptr)
    store_word(kind.page.global.at(block, 0), kind.global_scale);
}

}  // namespace kv4::cuda
