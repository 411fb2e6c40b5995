// Vector version of ops/attend_row.h: QK of all heads and a tile of rows, one step of the online softmax, then PV.
// Included once per instruction set.
#if defined(KV4_SIMD_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KV4_SIMD_ATTEND_INL_H_
#undef KV4_SIMD_ATTEND_INL_H_
#else
#define KV4_SIMD_ATTEND_INL_H_
#endif

#include <algorithm>

#include "backend/cpu/row_kernels.h"
#include "backend/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kv4::cpu::HWY_NAMESPACE {

// Dot products of kHeads heads with kRows rows: out [kHeads, kAttendRows]
template <int kHeads, int kRows>
HWY_INLINE void dot_tile(std::size_t width, const float* q, const float* rows, float* out) {
  const DF d;
  VF sums[kHeads][kRows];
  for (int h = 0; h < kHeads; ++h)
    for (int r = 0; r < kRows; ++r) sums[h][r] = hn::Zero(d);
  for (std::size_t c = 0; c < width; c += hn::Lanes(d)) {
    VF row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = hn::LoadU(d, rows + static_cast<std::size_t>(r) * width + c);
    for (int h = 0; h < kHeads; ++h) {
      const VF x = hn::LoadU(d, q + static_cast<std::size_t>(h) * width + c);
      for (int r = 0; r < kRows; ++r) sums[h][r] = hn::MulAdd(x, row[r], sums[h][r]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int r = 0; r < kRows; ++r) out[h * kAttendRows + r] = hn::GetLane(hn::SumOfLanes(d, sums[h][r]));
}

// acc = acc * rescale + p . rows for kHeads heads. p [kHeads, kAttendRows]
template <int kHeads>
HWY_INLINE void add_tile(std::size_t width, const float* rows, int count, const float* p, const float* rescale,
                         float* acc) {
  const DF d;
  constexpr std::size_t kVectors = 2;
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t c = 0; c < width; c += kVectors * lanes) {
    VF sums[kHeads][kVectors];
    for (int h = 0; h < kHeads; ++h)
      for (std::size_t v = 0; v < kVectors; ++v)
        sums[h][v] = hn::Mul(hn::LoadU(d, acc + static_cast<std::size_t>(h) * width + c + v * lanes), set(rescale[h]));
    for (int r = 0; r < count; ++r) {
      const float* row = rows + static_cast<std::size_t>(r) * width + c;
      for (std::size_t v = 0; v < kVectors; ++v) {
        const VF x = hn::LoadU(d, row + v * lanes);
        for (int h = 0; h < kHeads; ++h) sums[h][v] = hn::MulAdd(set(p[h * kAttendRows + r]), x, sums[h][v]);
      }
    }
    for (int h = 0; h < kHeads; ++h)
      for (std::size_t v = 0; v < kVectors; ++v)
        hn::StoreU(sums[h][v], d, acc + static_cast<std::size_t>(h) * width + c + v * lanes);
  }
}

// Converts logits z [kAttendRows] to P, in place. Returns the rescale factor of the accumulators.
HWY_INLINE float softmax_step(float* z, int count, ops::Attention& state) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  float max = state.max;
  for (int r = 0; r < count; ++r) max = z[r] > max ? z[r] : max;
  std::fill(z + count, z + kAttendRows, ops::kLowestGate);
  for (std::size_t r = 0; r < kAttendRows; r += lanes)
    hn::StoreU(exp_nonpositive(hn::Sub(hn::LoadU(d, z + r), set(max))), d, z + r);
  const float rescale = codec::exp_nonpositive(state.max - max);
  float sum = state.sum * rescale;
  for (int r = 0; r < count; ++r) sum += z[r];
  state = {max, sum};
  return rescale;
}

template <int kHeads>
HWY_INLINE void attend_heads(const AttendArgs& a, int head) {
  const std::size_t width = static_cast<std::size_t>(a.width);
  const float* q = a.q + static_cast<std::size_t>(head) * width;
  float* z = a.tmp + head * kAttendRows;
  int r = 0;
  for (; r + 2 <= a.count; r += 2) dot_tile<kHeads, 2>(width, q, a.rows + static_cast<std::size_t>(r) * width, z + r);
  if (r < a.count) dot_tile<kHeads, 1>(width, q, a.rows + static_cast<std::size_t>(r) * width, z + r);
  float rescale[kHeads];
  for (int h = 0; h < kHeads; ++h) rescale[h] = softmax_step(z + h * kAttendRows, a.count, a.state[head + h]);
  add_tile<kHeads>(width, a.rows, a.count, z, rescale, a.acc + static_cast<std::size_t>(head) * width);
}

inline void attend(const AttendArgs& a) {
  if (static_cast<std::size_t>(a.width) % (2 * hn::Lanes(DF())) != 0) return plain_row_kernels().attend(a);
  constexpr int kMany = 4;
  int head = 0;
  for (; head + kMany <= a.num_heads; head += kMany) attend_heads<kMany>(a, head);
  for (; head < a.num_heads; ++head) attend_heads<1>(a, head);
}

}  // namespace kv4::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
