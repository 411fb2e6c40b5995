// Entries of a prefill between pool and page. The warps of a CTA pool entries one after the other, each warp its own
// channels; then each warp finishes one entry. One warp finishes an entry with a fifth of the instructions that a pair
// of channels per lane needs, and one barrier serves as many entries as there are warps.
#pragma once

#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/rows/octet_row.cuh"

namespace kv4::cuda {

template <int kWarps>
class EntryBatch {
 public:
  struct Shared {
    alignas(16) std::uint32_t means[kWarps][kRowWidth / kPair];  // bf16 pairs
    NormWeights weights;
    int2 addresses[kWarps];  // block and row
  };

  /// Called by all threads of the CTA.
  __device__ EntryBatch(Shared& shared, const ops::AppendParams& p, const ops::KindDesc& kind)
      : shared_(shared), p_(p), kind_(kind) {
    shared_.weights.fill(kind.norm_weight, static_cast<int>(threadIdx.x), kWarps * kWarp);
  }

  /// The next entry, whose first token is at `position`, goes into `block`'s page. Requests its angles, before rows
  /// that are needed later.
  __device__ void begin(int position, int block) {
    const int thread = reload_thread_index();
    if (count_ != thread / kWarp) return;
    if (thread % kWarp == 0)
      shared_.addresses[count_] = make_int2(block, position % p_.step.block_tokens / kind_.ratio);
    rotation_ = rotation_of(p_.rope, load_lane_angle(p_.rope, position, thread % kWarp));
  }

  /// Keeps the warps together.
  __device__ static void sync() { __syncthreads(); }

  /// Two channels of that entry.
  __device__ void put(const ops::Pool (&pool)[kPair], int channel) {
    shared_.means[count_++][channel / kPair] =
        bf16_pair(codec::quotient(pool[0].num, pool[0].den), codec::quotient(pool[1].num, pool[1].den));
  }
  __device__ bool full() const { return count_ == kWarps; }

  /// Finishes the entries that were put.
  __device__ void finish() {
    __syncthreads();
    if (reload_thread_index() / kWarp < count_) finish_entry();
    count_ = 0;
  }

 private:
  __device__ void finish_entry() const {
    const int thread = reload_thread_index(), warp = thread / kWarp, lane = thread % kWarp;
    OctetBits row[kOctets];
#pragma unroll
    for (int j = 0; j < kOctets; ++j)
      row[j] = reinterpret_cast<const OctetBits&>(shared_.means[warp][octet_channel(lane, j) / kPair]);
    norm_and_rotate(p_.layer.eps, p_.rope, LaneWeights{shared_.weights.all, lane}, rotation_, lane, row);
    const ops::RowPlanes& page = kind_.page;
    const int block = shared_.addresses[warp].x, page_row = shared_.addresses[warp].y;
    const auto store = [&](auto format) {
      store_octets(format, lane, encode_octets(format, lane, row), page.payload.at(block, page_row),
                   page.scale.at(block, page_row));
    };
    if (page.format == Format::fp8_tile64)
      store(std::integral_constant<Format, Format::fp8_tile64>{});
    else
      store(page.format);
    if (page_row == 0 && lane == 0 && page.global.data != nullptr)
      store_word(page.global.at(block, 0), kind_.global_scale);
  }

  Shared& shared_;
  const ops::AppendParams& p_;
  const ops::KindDesc& kind_;
  int count_ = 0;        // entries put
  Rotation rotation_{};  // of the warp's entry
};

}  // namespace kv4::cuda
