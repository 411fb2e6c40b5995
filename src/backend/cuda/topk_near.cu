// The best k of the defined scores of fp8 keys, from near ones (index_fp8.cu). Exact, whatever the keys.
//
// Near scores differ from the defined ones by at most a margin m. Let T be the k-th best near score. The k-th best
// defined score is at least T - m, so keys below T - 2m are out; fewer than k keys have a near score above T, so a key
// above T + 2m is in. Those between, a few dozen as a rule, are scored again as defined.
//
// The margin: with S_c = |q_c| * 448 * (the largest scale of the token's keys) >= |q_c k_c|, in units u = 2^-24,
//   the defined dot     channel c's product is in 128 - c sums, each rounded: S_c (128 - c)
//   the matrix unit's   a step adds 16 products to the sum so far, in up to four parts: 20 numbers cut off at u/2 of
//                       the largest (two bits more than fp32 has: IndexKernel's fp8_near_cutoff sees to it), four
//                       results at 2u: S_c * 18 * (steps from the one that takes c on)
//   all the rest        scales that are no powers of two, weights, the sum over heads: less than 48 roundings
// added up over channels and heads times their weights. Denormals: less than kTiny. Where a scale, weight or sum is
// beyond what these bounds hold for, or more keys than kFew are near T, the row is scored again as far as need be.
//
// Selection as in topk.cu. Scoring again: 64 keys at a time, decoded into shared memory; a thread makes the dots of one
// head and four keys, four threads per key add up the chains. Bound by latency, and by 64 clocks per key.
#include <cstdint>

#include "backend/cuda/index_near.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/row_decode.cuh"
#include "backend/cuda/topk_select.cuh"

namespace kv4::cuda {
namespace {

constexpr int kWidth = 128, kHeads = ops::kMaxIndexHeads, kOctets = kWidth / kOctet;
constexpr int kThreads = 1024;
using Row = RowSelection<kThreads>;
constexpr int kEach = 4, kBatch = kThreads / kHeads * kEach;  // keys scored again at a time
static_assert(kThreads == kHeads * kOctets && kThreads == kBatch * kOctets && kThreads >= kBatch * ops::kChains);
constexpr float kMostCode = 448.0f, kTiny = 0x1p-80f;
constexpr int kOtherRoundings = 48;
constexpr int kStepParts = 4;
constexpr float kStepRoundings = 0.5f * (kStepChannels + kStepParts) + 2.0f * kStepParts;

struct NearShared {
  Row row;
  float4 q[2 * kOctets][kHeads];
  float weights[kHeads];
  float k[kBatch][kWidth];
  float dots[kBatch][kHeads + 1];
  float sums[Row::kWarps];
  // Near T, and their defined scores.
  int listed;
  std::int32_t entries[kFew];
  std::uint32_t keys[kFew];
};

/// A token's keys.
struct TokenKeys {
  const IndexTile& tile;
  const std::int32_t* table;  // of its request
};

/// Queries and weights into shared memory. Returns the margin per unit of the largest scale, to be added up over the
/// block; infinite where bounds do not hold.
__device__ float load_queries(NearShared& s, const IndexTile& tile, int token) {
  const int head = static_cast<int>(threadIdx.x) % kHeads, octet = static_cast<int>(threadIdx.x) / kHeads;
  if (head >= tile.p.num_heads) {
    s.q[2 * octet][head] = s.q[2 * octet + 1][head] = {};
    if (octet == 0) s.weights[head] = 0.0f;
    return 0.0f;
  }
  const QueryRows from = query_rows<codec::Fp8Key>(tile, token);
  const uint2 codes = *reinterpret_cast<const uint2*>(from.payload + head * from.payload_stride + kOctet * octet);
  const float scale = *reinterpret_cast<const float*>(from.scale + head * from.scale_stride);
  const float weight =
      static_cast<const float*>(tile.p.weights.data)[(tile.first + token) * tile.p.weights.row_stride + head];
  float q[kOctet], sum = 0.0f;
  scaled_e4m3(codes, scale, q);
  s.q[2 * octet][head] = {q[0], q[1], q[2], q[3]};
  s.q[2 * octet + 1][head] = {q[4], q[5], q[6], q[7]};
  if (octet == 0) s.weights[head] = weight;
  const std::uint32_t bits = codec::float_bits(scale);
  if (bits < kLeastScale || bits > kMostScale) return __builtin_huge_valf();
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const int channel = kOctet * octet + i;
    const int steps = kMatrixSteps - matrix_step(channel);
    const float roundings = static_cast<float>(kWidth - channel + kOtherRoundings) + kStepRoundings * steps;
    sum += fabsf(q[i]) * roundings;
  }
  return sum * fabsf(weight) * (kMostCode * 0x1p-24f * 1.001f);  // 1.001: these sums are rounded, too
}

/// Of the first `count` keys.
__device__ void make_dots(NearShared& s, int count) {
  const int head = static_cast<int>(threadIdx.x) % kHeads, first = static_cast<int>(threadIdx.x) / kHeads * kEach;
  if (first >= count) return;
  float dot[kEach] = {};
#pragma unroll 4
  for (int octet = 0; octet < kOctets; ++octet) {
    const float4 q_low = s.q[2 * octet][head], q_high = s.q[2 * octet + 1][head];
    const float q[kOctet] = {q_low.x, q_low.y, q_low.z, q_low.w, q_high.x, q_high.y, q_high.z, q_high.w};
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float4* from = reinterpret_cast<const float4*>(&s.k[first + j][kOctet * octet]);
      const float4 low = from[0], high = from[1];
      const float k[kOctet] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kOctet; ++i) dot[j] = codec::fused(q[i], k[i], dot[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) s.dots[first + j][head] = dot[j];
}

/// Calls put(i, score) for the defined scores of `count` keys, of which the i-th is entry_of(i): at most kBatch.
template <class EntryOf, class Put>
__device__ void score_again(NearShared& s, const TokenKeys& keys, int count, EntryOf&& entry_of, Put&& put) {
  {
    const int i = static_cast<int>(threadIdx.x) / kOctets, octet = static_cast<int>(threadIdx.x) % kOctets;
    const ops::KindDesc& kind = keys.tile.kind();
    float x[kOctet] = {};
    if (i < count) {
      const int entry = entry_of(i), in_block = entry % kind.rows_per_block;
      const std::int32_t block = keys.table[entry / kind.rows_per_block];
      if (block >= 0) {
        const std::uint8_t* payload = kind.page.payload.at(block, in_block) + kOctet * octet;
        const float scale = *reinterpret_cast<const float*>(kind.page.scale.at(block, in_block));
        scaled_e4m3(*reinterpret_cast<const uint2*>(payload), scale, x);
      }
    }
    float4* to = reinterpret_cast<float4*>(&s.k[i][kOctet * octet]);
    to[0] = {x[0], x[1], x[2], x[3]};
    to[1] = {x[4], x[5], x[6], x[7]};
  }
  __syncthreads();
  make_dots(s, count);
  __syncthreads();
  const int key = static_cast<int>(threadIdx.x) / ops::kChains, chain = static_cast<int>(threadIdx.x) % ops::kChains;
  if (key >= (count + 7) / 8 * 8) return;  // whole warps
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < ops::kChainHeads; ++i) {  // heads that are not there add zero
    const int h = chain * ops::kChainHeads + i;
    sum = codec::fused(s.weights[h], ops::relu(s.dots[key][h]), sum);
  }
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  if (chain == 0 && key < count) put(key, codec::canonical_nan(sum));
}

/// Near scores from low to high are in doubt: above they are in, below out.
struct Doubt {
  float low = kNoScore, high = -kNoScore;

  __device__ Doubt() {}
  /// cut: of near scores. Where it is no number there is no limit.
  __device__ Doubt(const Cut& cut, float margin)
      : low(fmaxf(score_of(cut.range.low) - 2.0f * margin, kNoScore)),
        high(fminf(score_of(cut.range.high) + 2.0f * margin, -kNoScore)) {}
};

/// Goes over the whole row: in doubt, the defined score takes the near one's place.
__device__ __noinline__ void select_slowly(NearShared& s, const TokenKeys& keys, float* row, int count, Doubt doubt,
                                           const Choice& choice) {
  for (int first = 0; first < count; first += kBatch) {
    const int batch = min(kBatch, count - first), i = static_cast<int>(threadIdx.x);
    const float near = i < batch ? row[first + i] : 0.0f;
    const bool in_doubt = i < batch && !(near < doubt.low) && !(near > doubt.high);
    if (__syncthreads_or(in_doubt))
      score_again(
          s, keys, batch, [&](int at) { return first + at; },
          [&](int at, float score) { s.keys[at] = __float_as_uint(score); });
    __syncthreads();
    if (i < batch) row[first + i] = in_doubt ? __uint_as_float(s.keys[i]) : near > doubt.high ? -kNoScore : kNoScore;
  }
  if (threadIdx.x == 0) s.row.selection.few = 0;
  select_from_row(s.row.selection, row, count, Bounds(), choice);
}

/// What is in, and the best of what is in doubt. False: too much is.
template <class Source>
__device__ bool write_best(NearShared& s, Scan<Selection<kThreads>>& scan, const Source& source, const Doubt& doubt,
                           const TokenKeys& keys, const Choice& choice) {
  int mine = 0, certain;
  source.for_each([&](float near, std::int32_t entry) {
    mine += near > doubt.high;
    if (near > doubt.high || !(near >= doubt.low)) return;  // absent ones are NaN
    const int at = atomicAdd(&s.listed, 1);
    if (at < kFew) s.entries[at] = entry;
  });
  int place = scan.before(mine, certain);
  const int listed = s.listed, top = choice.tile.p.top;
  if (listed > kFew) return false;
  std::int32_t(&chosen)[ops::kMaxTopk] = s.row.selection.chosen;
  source.for_each([&](float near, std::int32_t entry) {
    if (near > doubt.high) chosen[place++] = entry;
  });
  for (int first = 0; first < listed; first += kBatch) {
    __syncthreads();
    score_again(
        s, keys, min(kBatch, listed - first), [&](int i) { return s.entries[first + i]; },
        [&](int i, float score) { s.keys[first + i] = ops::score_order(score); });
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int i = static_cast<int>(threadIdx.x / 32); i < listed; i += Row::kWarps) {
    const std::uint32_t key = s.keys[i];
    const std::int32_t entry = s.entries[i];
    int better = 0;
    for (int j = lane; j < listed; j += 32) better += s.keys[j] > key || (s.keys[j] == key && s.entries[j] < entry);
    better = __reduce_add_sync(kAll, better);
    if (lane == 0 && certain + better < top) chosen[certain + better] = entry;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < top; i += kThreads) choice.put(i, chosen[i]);
  return true;
}

__global__ void __launch_bounds__(kThreads, 1) select_near_row(const __grid_constant__ IndexTile tile) {
  extern __shared__ __align__(16) unsigned char bytes[];
  NearShared& s = *reinterpret_cast<NearShared*>(bytes);
  Selection<kThreads>& selection = s.row.selection;
  selection.clear();
  touch(tile);
  if (threadIdx.x == 0) s.listed = 0;
  const int token = static_cast<int>(blockIdx.x);
  // The scorer let this start after its own wait: queries are there.
  const TokenRow seen(tile, token);
  const int count = seen.count, top = tile.p.top;
  float per_scale = count > top ? load_queries(s, tile, token) : 0.0f;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) per_scale += __shfl_xor_sync(kAll, per_scale, step);
  if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = per_scale;
  wait_for_previous();
  let_next_start();
  const Choice choice{tile, token, seen.request};
  if (count <= top) return take_whole(choice, count);

  float* const row = tile.row(token);
  const bool whole = count <= kRowNumbers;
  const int group = group_size(count), numbers = whole ? count : groups_of(count);
  const TokenKeys keys{tile, tile.p.step.block_table + std::int64_t{seen.request} * tile.p.step.blocks_per_request};
  float held[Row::kHeld];
  load_numbers(whole ? row : tile.maxima(token), numbers, held);
  const std::uint32_t largest = *tile.largest_scale(token);
  const HeldSource<Row> source{held, numbers};
  const Bounds all = find_bounds(s.row, source);
  static_assert(Row::kWarps == 32);
  per_scale = s.sums[threadIdx.x % 32];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) per_scale += __shfl_xor_sync(kAll, per_scale, step);
  const float margin = per_scale * codec::bits_float(largest) + kTiny;
  if (largest > kMostScale || !(per_scale < 0x1p100f) || !(margin < 0x1p60f))
    return select_slowly(s, keys, row, count, Doubt(), choice);

  Scan scan(selection);
  Doubt doubt;
  bool found = false, written = false;
  const auto select = [&](const auto& from, const Bounds& bounds) {
    doubt = Doubt(find_cut(selection, scan, from, bounds, top), margin);
    found = true;
    written = write_best(s, scan, from, doubt, keys, choice);
  };
  if (whole)
    select(source, all);
  else if (numbers > top)
    select_by_groups(s.row, scan, source, all, {row, count, group, top, 2.0f * margin}, select);
  if (written) return;
  __syncthreads();
  if (!found) doubt = Doubt(find_cut(selection, scan, RowSource<kThreads>{row, count}, Bounds(), top), margin);
  select_slowly(s, keys, row, count, doubt, choice);
}

}  // namespace

cudaError_t select_near(const IndexTile& tile, cudaStream_t stream) {
  const cudaError_t status = cudaFuncSetAttribute(select_near_row, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(sizeof(NearShared)));
  if (status != cudaSuccess) return status;
  return launch<sizeof(NearShared)>(select_near_row, static_cast<unsigned>(tile.count), kThreads, stream, tile);
}

}  // namespace kv4::cuda
