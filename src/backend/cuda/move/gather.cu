// The gathers decode stored rows into dense tensors. Rows that do not exist are zero. The three gathers differ in which
// stored row belongs to an output row (ChosenRows, AllRows, WindowRows); formats differ in how a row is read
// (rows/decode.cuh).
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "backend/cuda/append/source_rows.cuh"
#include "backend/cuda/append/window_begin.cuh"
#include "backend/cuda/move/gather_generic.cuh"
#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/runtime/aligned.h"
#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "kv4/cuda.h"

namespace kv4::cuda {
namespace {

using ops::GatherParams;
using ops::StepRecord;

/// n / by and n % by for n >= 0, fast where `by` is a power of two, as V4's divisors are.
struct QuotientAndRest {
  std::int32_t quotient, rest;
};
__device__ QuotientAndRest divide(std::int32_t n, std::int32_t by) {
  if ((by & (by - 1)) == 0) return {n >> (31 - __clz(by)), n & (by - 1)};
  return {n / by, n % by};
}

/// kSpeculative: before the grid dependency wait. Loads then bypass L1, and a half-written record may point at an entry
/// that does not exist.
template <bool kSpeculative>
__device__ RowPointers find_entry(const GatherParams& p, std::int32_t request, std::int32_t entry) {
  const ops::KindDesc& kind = p.layer.kinds[p.kind];
  const std::int64_t table = std::int64_t{request} * p.step.blocks_per_request;
  const QuotientAndRest at = divide(entry, kind.rows_per_block);
  if (kSpeculative && at.quotient >= p.step.blocks_per_request) return {};
  const std::int32_t* id = p.step.block_table + table + at.quotient;
  const std::int32_t block = kSpeculative ? __ldcg(id) : *id;
  if (block < 0) return {};
  return pointers_of(kind.page, block, at.rest);
}

struct ChosenRows {
  static std::int64_t count(const GatherParams& p) { return p.step.num_tokens; }
  KV4_HD static const ops::RowPlanes& rows(const GatherParams& p) { return p.layer.kinds[p.kind].page; }
  __device__ static const StepRecord* records(const GatherParams& p) { return p.step.tokens; }

  __device__ static RowPointers find(const GatherParams& p, const StepRecord& token, std::int64_t i, std::int64_t row) {
    const std::int32_t entry = static_cast<const std::int32_t*>(p.indices.data)[i * p.indices.row_stride + row];
    const std::int32_t visible = divide(token.position + 1, p.layer.kinds[p.kind].ratio).quotient;
    const bool there = !token.padded() & (entry >= 0) & (entry < visible);  // so that no load waits for another
    if (p.valid != nullptr) p.valid[i * p.rows_per_item + row] = there;
    return there ? find_entry<false>(p, token.row, entry) : RowPointers{};
  }

  __device__ static void write_lengths(const GatherParams&, const StepRecord&, std::int64_t) {}
};

struct AllRows {
  static std::int64_t count(const GatherParams& p) { return p.step.num_items; }
  KV4_HD static const ops::RowPlanes& rows(const GatherParams& p) { return p.layer.kinds[p.kind].page; }
  __device__ static const StepRecord* records(const GatherParams& p) { return p.step.items; }
  __device__ static std::int32_t entries(const GatherParams& p, const StepRecord& item) {
    return item.padded() ? 0 : divide(item.end(), p.layer.kinds[p.kind].ratio).quotient;
  }

  __device__ static RowPointers find_speculative(const GatherParams& p, const StepRecord& item, std::int64_t row) {
    return row < entries(p, item) ? find_entry<true>(p, item.row, static_cast<std::int32_t>(row)) : RowPointers{};
  }
  __device__ static RowPointers find(const GatherParams& p, const StepRecord& item, std::int64_t, std::int64_t row) {
    return row < entries(p, item) ? find_entry<false>(p, item.row, static_cast<std::int32_t>(row)) : RowPointers{};
  }

  __device__ static void write_lengths(const GatherParams& p, const StepRecord& item, std::int64_t i) {
    p.lens[i] = entries(p, item);
  }
};

struct WindowRows {
  static std::int64_t count(const GatherParams& p) { return p.step.num_items; }
  KV4_HD static const ops::RowPlanes& rows(const GatherParams& p) { return p.layer.window.ring; }
  __device__ static const StepRecord* records(const GatherParams& p) { return p.step.items; }
  __device__ static std::int32_t first(const GatherParams& p, const StepRecord& item) {
    return max(window_begin(p.step, item), item.length - (p.layer.window_tokens - 1));
  }
  __device__ static std::int32_t end(const StepRecord& item) { return item.padded() ? 0 : item.end(); }

  __device__ static RowPointers find_speculative(const GatherParams& p, const StepRecord& item, std::int64_t row) {
    return item.read_slot >= 0 && item.in_place() ? find(p, item, 0, row) : RowPointers{};
  }
  __device__ static RowPointers find(const GatherParams& p, const StepRecord& item, std::int64_t, std::int64_t row) {
    const ops::WindowDesc& w = p.layer.window;
    const std::int64_t at = first(p, item) + row;
    if (at >= end(item)) return {};
    const std::int32_t position = static_cast<std::int32_t>(at);
    if (position >= item.length && !item.in_place()) return pointers_of(w.scratch, 0, item.token_of(position));
    return pointers_of(w.ring, item.read_slot, position % w.rows);
  }

  __device__ static void write_lengths(const GatherParams& p, const StepRecord& item, std::int64_t i) {
    p.first[i] = first(p, item);
    p.lens[i] = end(item) - first(p, item);
  }
};

/// One lane finds a row, all lanes read it.
template <class Row>
__device__ RowPointers address_from_lane(const RowPointers& mine, int lane) {
  const auto broadcast = [lane](const std::uint8_t* at) {
    return reinterpret_cast<const std::uint8_t*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(at), lane));
  };
  RowPointers place;
  place.payload = broadcast(mine.payload);
  if constexpr (Row::kScaleAlign > 0) place.scale = broadcast(mine.scale);
  if constexpr (Row::kGlobal) place.global = broadcast(mine.global);
  return place;
}

/// The same for a CTA: each thread finds a row. Holds the pointers that the format has.
template <class Row, int kRows>
struct SharedAddresses {
  const std::uint8_t* payload[kRows];
  const std::uint8_t* scale[Row::kScaleAlign > 0 ? kRows : 1];
  const std::uint8_t* global[Row::kGlobal ? kRows : 1];

  __device__ void put(unsigned row, const RowPointers& place) {
    payload[row] = place.payload;
    if constexpr (Row::kScaleAlign > 0) scale[row] = place.scale;
    if constexpr (Row::kGlobal) global[row] = place.global;
  }
  __device__ RowPointers get(int row) const {
    RowPointers place;
    place.payload = payload[row];
    if constexpr (Row::kScaleAlign > 0) place.scale = scale[row];
    if constexpr (Row::kGlobal) place.global = global[row];
    return place;
  }
};

/// Prefetches a lane's part of a row, if the row exists, into L2.
template <class Row>
__device__ void prefetch_row(const RowPointers& place, std::int64_t payload_bytes, int in_row) {
  constexpr int kSector = 32;
  if (place.payload == nullptr) return;
  if (in_row * kSector < payload_bytes) prefetch_l2(place.payload + in_row * kSector);
  if (Row::kScaleAlign > 0 && in_row == Row::kLanes - 1) prefetch_l2(place.scale);
}

constexpr int kWarps = 8;
constexpr int kCtasPerSm = 8;  // all warps that an SM can hold

/// The rows that a warp copies: all its loads are in flight before the first is used.
template <class Row>
struct Batch {
  static constexpr int kRowsPerLoad = 32 / Row::kLanes;
  static constexpr int kLoads = Row::kWidth == 512 || Row::kGlobal ? 2 : 4;
  static constexpr int kRows = kLoads * kRowsPerLoad;
  static constexpr int kRowsPerCta = kWarps * kRows;
  static_assert(kRowsPerCta <= 32 * kWarps, "one thread finds one row");
};

/// Copies a warp's rows to `out`. first_row: the lane's first row of `item`; left: how many rows exist from it on;
/// address(i): of the i-th row from it on.
template <L2Priority kPriority, class Row, class Out, class Address>
__device__ void copy_rows(const GatherParams& p, std::int64_t item, std::int64_t first_row, int left, Out* out,
                          Address address) {
  using Rows = Batch<Row>;
  const int in_row = static_cast<int>(threadIdx.x % Row::kLanes);
  typename Row::Raw raw[Rows::kLoads];
#pragma unroll
  for (int i = 0; i < Rows::kLoads; ++i) {
    const RowPointers from = address(i * Rows::kRowsPerLoad);
    raw[i] = {};
    if (from.payload != nullptr) raw[i] = Row::template load_raw<kPriority>(from, in_row);
  }
  out += (item * p.rows_per_item + first_row) * Row::kWidth + kOctet * in_row;
#pragma unroll
  for (int i = 0; i < Rows::kLoads; ++i)
#pragma unroll
    for (int j = 0; j < Row::kOctets; ++j)
      store_octet(out + i * Rows::kRowsPerLoad * Row::kWidth + j * Row::kLanes * kOctet,
                  Row::template decode<Out>(raw[i], in_row, j), i * Rows::kRowsPerLoad < left);
}

// Bound by bytes: 584 read and 1,024 written per fp8_tile64 row in bf16, 68 and 256 per mxfp4 key. Three loads depend
// on each other (record, block, row), hence many warps with few rows each: some warps find rows while others read them.
// Each thread finds one row for the whole CTA, so the other threads do not execute those instructions.
// CTAs of the next kernel replace CTAs that end, and wait for the grid dependency. first_ctas: the CTAs that may have
// to wait. They prefetch into L2 the rows that the tables point at; the tables are nearly always this step's already.
// H200, 2026-11-16: 85 % of the copy speed for 32,768 consecutive entries, where a copy of as many bytes reaches 87 %.
template <class Find, class Row, class Out>
__global__ void __launch_bounds__(32 * kWarps, kCtasPerSm)
    gather_rows(const __grid_constant__ GatherParams p, unsigned tiles, unsigned first_ctas) {
  using Rows = Batch<Row>;
  launch_dependents();
  __shared__ SharedAddresses<Row, Rows::kRowsPerCta> addresses;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const std::int64_t outer = blockIdx.x / tiles;
  const unsigned tile = blockIdx.x % tiles;
  const std::int64_t first_row = std::int64_t{tile} * Rows::kRowsPerCta;
  const int num_rows = static_cast<int>(min(p.rows_per_item - first_row, std::int64_t{Rows::kRowsPerCta}));
  const int in_row = lane % Row::kLanes,
            warp_row = warp * Rows::kRows + lane / Row::kLanes;  // the lane's first row of the CTA
  const auto share_addresses = [&](auto find) {
    if (threadIdx.x < Rows::kRowsPerCta)
      addresses.put(threadIdx.x,
                    static_cast<int>(threadIdx.x) < num_rows ? find(first_row + threadIdx.x) : RowPointers{});
    __syncthreads();
  };

  if (blockIdx.x < first_ctas) {
    const StepRecord speculative = load_record_l2(Find::records(p) + outer);
    share_addresses([&](std::int64_t row) { return Find::find_speculative(p, speculative, row); });
#pragma unroll
    for (int i = 0; i < Rows::kLoads; ++i)
      prefetch_row<Row>(addresses.get(warp_row + i * Rows::kRowsPerLoad), Find::rows(p).payload.row_stride, in_row);
    __syncthreads();
  }
  grid_dependency_wait_after(static_cast<int>(tile));
  if (tile == 0 && threadIdx.x == 0) Find::write_lengths(p, load_record(Find::records(p) + outer), outer);
  share_addresses([&](std::int64_t row) { return Find::find(p, load_record(Find::records(p) + outer), outer, row); });

  copy_rows<L2Priority::normal, Row>(p, outer, first_row + warp_row, num_rows - warp_row, static_cast<Out*>(p.out.data),
                                     [&](int row) { return addresses.get(warp_row + row); });
}

// Chosen rows: the kernel before may be the one that chooses them, so none is known before the wait. Each warp finds
// its own rows: a warp that waits for the other rows of its CTA is slower (16.8 to 17.1 us). L2 evicts rows first, so
// that results stay there. H200, 2026-11-16, 512 entries of each of 64 tokens: 86 % of the copy speed into one tensor,
// 75 % into one tensor per layer.
template <class Row, class Out>
__global__ void __launch_bounds__(32 * kWarps, kCtasPerSm)
    gather_chosen_rows(const __grid_constant__ GatherParams p, unsigned tiles) {
  using Rows = Batch<Row>;
  launch_dependents();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const std::int64_t token = blockIdx.x / tiles;
  const std::int64_t first_row = std::int64_t{blockIdx.x % tiles} * Rows::kRowsPerCta + warp * Rows::kRows;
  const int num_rows = static_cast<int>(min(p.rows_per_item - first_row, std::int64_t{Rows::kRows}));
  const int lane_row = lane / Row::kLanes;  // the lane's first row of the warp
  grid_dependency_wait();
  if (num_rows <= 0) return;
  RowPointers mine;
  if (lane < num_rows) mine = ChosenRows::find(p, load_record(p.step.tokens + token), token, first_row + lane);

  copy_rows<L2Priority::evict_first, Row>(p, token, first_row + lane_row, num_rows - lane_row,
                                          static_cast<Out*>(p.out.data),
                                          [&](int row) { return address_from_lane<Row>(mine, lane_row + row); });
}

template <class Row>
bool can_read(const ops::RowPlanes& rows) {
  return rows.shape.width == Row::kWidth && (Row::kTail < 0 || rows.shape.tail == Row::kTail) &&
         is_aligned(rows.payload, 16) && (Row::kScaleAlign == 0 || is_aligned(rows.scale, Row::kScaleAlign)) &&
         (!Row::kGlobal || is_aligned(rows.global, Row::kScaleAlign));
}

template <class Find, class Row>
cudaError_t gather_with(const GatherParams& p, cudaStream_t stream) {
  bool tuned = can_read<Row>(Find::rows(p)) && reinterpret_cast<std::uintptr_t>(p.out.data) % 16 == 0;
  if constexpr (std::is_same_v<Find, WindowRows>) tuned = tuned && can_read<Row>(p.layer.window.scratch);
  if (!tuned) return gather_generic<Find>(p, Find::count(p), stream);
  const std::int64_t tiles =
      std::max<std::int64_t>((p.rows_per_item + Batch<Row>::kRowsPerCta - 1) / Batch<Row>::kRowsPerCta, 1);
  const auto launch_ctas = [&](auto kernel, auto... args) {
    return launch(kernel, static_cast<unsigned>(Find::count(p) * tiles), 32 * kWarps, stream, p,
                  static_cast<unsigned>(tiles), args...);
  };
  const bool bf16 = p.out.dtype == DType::bf16;
  if constexpr (std::is_same_v<Find, ChosenRows>) {
    return launch_ctas(bf16 ? gather_chosen_rows<Row, std::uint16_t> : gather_chosen_rows<Row, float>);
  } else {
    return launch_ctas(bf16 ? gather_rows<Find, Row, std::uint16_t> : gather_rows<Find, Row, float>,
                       static_cast<unsigned>(kCtasPerSm * num_sms()));
  }
}

template <class Find>
cudaError_t gather(const GatherParams& p, cudaStream_t stream) {
  if (Find::count(p) == 0) return cudaSuccess;
  const ops::RowPlanes& rows = Find::rows(p);
  if constexpr (!std::is_same_v<Find, WindowRows>) {  // keys have no window
    switch (rows.format) {
      case Format::mxfp4: return gather_with<Find, Fp4KeyReader<Format::mxfp4>>(p, stream);
      case Format::nvfp4: return gather_with<Find, Fp4KeyReader<Format::nvfp4>>(p, stream);
      case Format::fp8: return gather_with<Find, Fp8KeyReader>(p, stream);
      case Format::bf16:
        if (rows.shape.width == 128) return gather_with<Find, Bf16Reader<128>>(p, stream);
        break;
      default: break;
    }
  }
  switch (rows.format) {
    case Format::fp8_tile64: return gather_with<Find, Fp8RowReader<Format::fp8_tile64>>(p, stream);
    case Format::fp8_row: return gather_with<Find, Fp8RowReader<Format::fp8_row>>(p, stream);
    case Format::bf16: return gather_with<Find, Bf16Reader<512>>(p, stream);
    default: return gather_generic<Find>(p, Find::count(p), stream);
  }
}

}  // namespace

cudaError_t gather_chosen(const GatherParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch gather_chosen", true);
  return gather<ChosenRows>(params, stream);
}

cudaError_t gather_all(const GatherParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch gather_all", true);
  return gather<AllRows>(params, stream);
}

cudaError_t gather_window(const GatherParams& params, cudaStream_t stream) {
  const NvtxRange range("kv4 launch gather_window", true);
  return gather<WindowRows>(params, stream);
}

}  // namespace kv4::cuda
