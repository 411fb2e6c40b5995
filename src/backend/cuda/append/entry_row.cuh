// The last step of an entry: from its pool to the page.
#pragma once

#include "backend/cuda/rows/encode.cuh"

namespace kv4::cuda {

/// Stores an entry into row `row` of `block`'s page. rotation: of the entry's first token.
template <class Lanes>
__device__ void store_entry(Lanes& lanes, const ops::AppendParams& p, const ops::KindDesc& kind,
                            const ops::Pool (&pool)[kPair], const Pair& weight, const Rotation& rotation, int row,
                            int block) {
  Pair x;
#pragma unroll
  for (int i = 0; i < kPair; ++i) x.v[i] = codec::quotient(pool[i].num, pool[i].den);
  x = rotate(rotation, norm_row(lanes, weight, p.layer.eps, round_bf16(x)));

  const auto store = [&](auto codec) {
    using Codec = decltype(codec);
    const PairBits bits = encode_row<Codec>(lanes, x, kind.global_scale);
    store_pair<Codec, Lanes>(bits, kind.page.payload.at(block, row), kind.page.scale.at(block, row), lanes.channel());
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
  if (row == 0 && lanes.leader() && kind.page.global.data != nullptr)
    store_word(kind.page.global.at(block, 0), kind.global_scale);
}

/// Entries of a prefill that the lanes that pooled them also finish: keys, which are too short for EntryBatch.
template <class Lanes>
class EachEntry {
 public:
  __device__ EachEntry(Lanes lanes, const ops::AppendParams& p, const ops::KindDesc& kind)
      : lanes_(lanes), p_(p), kind_(kind), weight_(load_weight(kind.norm_weight + lanes.channel())) {}

  __device__ void begin(int position, int block) {
    row_ = position % p_.step.block_tokens / kind_.ratio;
    block_ = block;
    rotation_ = load_rotation(p_.rope, position, lanes_.channel(), Lanes::kWidth);
  }
  __device__ void put(const ops::Pool (&pool)[kPair], int) {
    store_entry(lanes_, p_, kind_, pool, weight_, rotation_, row_, block_);
  }
  __device__ static void sync() {}
  __device__ bool full() const { return false; }
  __device__ void finish() const {}

 private:
  Lanes lanes_;
  const ops::AppendParams& p_;
  const ops::KindDesc& kind_;
  Pair weight_;
  int row_ = 0, block_ = 0;
  Rotation rotation_{};
};

}  // namespace kv4::cuda
