// Attention over dense bf16 rows of 512 channels, for many tokens of 64 heads: rows that a staging pass has decoded
// (stage_rows.cu), or the caller's own. One persistent CTA per SM takes one work tile (64 heads of a token) after
// another. Its warpgroups:
//
//   scores      S = Q K^T and the softmax. Three quarters of Q stay in registers: S reads only K from shared memory,
//               and there is room for a third KV tile.
//   values (2)  O += P V, half of the channels each.
//   producer    copies Q and the KV tiles, row by row, into a ring of three tiles.
//
// Q of a work tile passes through the ring as a tile of its own. Each tile is copied, multiplied and freed by quarters
// of its channels. PV of a tile waits until a quarter of S of the next one is done, so that there are multiplies left
// for the time of the softmax. Bound by the tensor cores: 2,048 clocks per tile, in 1,800 of which shared memory is
// read or written.
//
// On an H200 (2026-11-20; us of a chunk of 4,096 tokens with 64 heads, the staging pass included, beside the kernels
// that decode each row for each token):
//
//   640 rows of 32,768 entries     683   844
//   640 rows of 262,144 entries    858   906
//   all entries of 128K tokens     983  1263
//   all entries of 512K tokens    3442  4368
//   windows only                   218   190
//
// Without the copies of rows the first would take 610 and the fourth 3,176 us, the copies alone 419 and 2,496: the
// multiplies and the power that they take bound it, traffic does not. What gained nothing: 2-CTA pairs that share the
// blocks that both of their tokens see (4 to 25 % slower), PV that waits for all of S of the next tile (up to 9 %
// slower).
#include <algorithm>

#include "backend/cuda/attend/cta.cuh"
#include "backend/cuda/attend/epilogue.cuh"
#include "backend/cuda/attend/mainloop.cuh"
#include "backend/cuda/attend/mma.cuh"
#include "backend/cuda/attend/rows.cuh"
#include "backend/cuda/attend/staged.cuh"
#include "backend/cuda/ptx/async_copy.cuh"
#include "backend/cuda/ptx/matrix_copy.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {
namespace attend_wgmma::staged {

inline constexpr int kRing = 3, kQuarters = 4, kQuarterPanels = kPanels / kQuarters;
inline constexpr int kQuarterBytes = kQuarterPanels * kPanelBytes;
inline constexpr int kKept = 3;  // quarters of Q in registers; the last one stays in shared memory
inline constexpr int kWorks = 8, kHalfWorks = kWorks / 2;
inline constexpr int kScoreRegisters = 160, kValueRegisters = 160, kCopyRegisters = 32;
static_assert(kScoreRegisters + 2 * kValueRegisters + kCopyRegisters <= 65536 / kWarpgroupThreads);

/// The order in which a tile's quarters are copied, multiplied and freed: each warpgroup of values has two of them.
__device__ constexpr int quarter_at(int i) { return i == 1 ? 2 : i == 2 ? 1 : i; }

/// Rows of a tile that follow each other in a staged block: row i has the number `at` + i.
struct Rows {
  int begin = 0, end = 0, at = 0;

  __device__ bool has(int row) const { return row >= begin && row < end; }
  /// Not by reference, which would put both into local memory.
  __device__ static Rows choose(bool first, Rows a, Rows b) {
    return {first ? a.begin : b.begin, first ? a.end : b.end, first ? a.at : b.at};
  }
};
/// A tile of staged blocks: of two blocks where the window begins and ends in the middle of one.
struct BlockTile {
  Rows newer, older;
};

/// The rows of a token, as numbers of staged rows.
struct TokenRows {
  int first, end;  // positions of the window
  int window_at;   // number of position 0
  int entries_at;  // number of entry 0
  int entries;     // of a list, or all
  int visible;     // entries that the token may see

  __device__ int window_tiles() const { return tiles_of(end - first); }
  __device__ int tiles() const { return window_tiles() + tiles_of(entries); }

  /// A tile whose rows lie in blocks. A window's row of position x is in row x mod 64 of its tile, so that tokens one
  /// behind the other differ in one row.
  __device__ BlockTile block_tile(int tile) const {
    BlockTile of;
    const int windows = window_tiles(), last = (end - 1) / kTile;
    if (tile < windows) {
      const int block = last - (last + windows - tile) % windows, before = block - windows;
      of.newer = {max(first - block * kTile, 0), min(end - block * kTile, kTile), window_at + block * kTile};
      const int begin = first - before * kTile;
      if (begin < kTile) of.older = {max(begin, 0), kTile, window_at + before * kTile};
    } else {
      const int at = (tile - windows) * kTile;
      of.newer = {0, max(min(entries - at, kTile), 0), entries_at + at};
    }
    return of;
  }

  __device__ static int tiles_of(int rows) { return (rows + kTile - 1) / kTile; }
};

/// A work tile: 64 heads of a token.
struct alignas(16) Work {
  TokenRows rows;
  int token, first_head, position;  // position -1: padded
  int tiles;                        // at least one

  __device__ bool padded() const { return position < 0; }
};

struct Shared {
  std::uint8_t rows[kRing][kTileBytes];      // [8 panels, 64 rows]
  std::uint8_t last_queries[kQuarterBytes];  // [2 panels, 64 heads]
  std::uint8_t p_tile[2][kPanelBytes];
  float rescale[2][kTile];  // of O before a tile is added
  float factor[2][kTile];   // of O after the last tile
  Work works[kWorks];
  std::uint32_t present[kRing][kWarpgroupWarps];  // bit 8 * g + i of word w: row 16 * i + 4 * w + g exists
  std::uint64_t full[kRing][kQuarters], empty[kRing][kQuarters];
  std::uint64_t rows_known[kRing];  // `present`
  std::uint64_t p_full[2], p_empty[2];
  std::uint64_t last_full, last_empty;  // last_queries
  std::uint64_t works_known[2];         // halves of `works`
};
inline constexpr int kSharedBytes = sizeof(Shared) + 1024;  // so that Shared can begin at a multiple of 1,024
static_assert(kSharedBytes <= 227 * 1024);

/// A place in the ring, and the parity of its use.
struct RingPlace {
  int stage = 0, parity = 0;

  __device__ void advance() {
    if (++stage == kRing) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ inline const Work& work_at(const Shared& s, int work) {
  mbarrier_wait(shared_address(&s.works_known[work / kHalfWorks % 2]), work / kWorks & 1);
  return s.works[work % kWorks];
}
__device__ inline int num_works(const AttendParams& p, int head_tiles) {
  const int all = p.step.num_tokens * head_tiles, ctas = static_cast<int>(gridDim.x);
  return (all - static_cast<int>(blockIdx.x) + ctas - 1) / ctas;
}
/// All lanes of a warp agree, and the compiler knows it: loop counters and addresses of barriers live in uniform
/// registers.
__device__ inline int tiles_of(const Work& w) { return __reduce_max_sync(kAllLanes, w.tiles); }

/// Releases a quarter of a place in the ring.
__device__ inline void release(Shared& s, int stage, int quarter) {
  mbarrier_arrive(shared_address(&s.empty[stage][quarter]));
}

// --- producer

class Producer {
 public:
  __device__ Producer(const AttendParams& p, const StagedRows& from, Shared& s, int head_tiles)
      : p_(p), from_(from), s_(s), head_tiles_(head_tiles) {}

  __device__ void run() {
    const int count = num_works(p_, head_tiles_);
    for (int work = 0; work < count; ++work) {
      // A half is written when all consumers have left it: they are less than four work tiles behind.
      static_assert(kHalfWorks >= 4);
      if (thread() < kWarp && (work == 0 || work % kHalfWorks == kHalfWorks - 1))
        schedule(work == 0 ? 0 : (work / kHalfWorks + 1) * kHalfWorks, count);
      const Work& w = work_at(s_, work);
      const int tiles = tiles_of(w);
      if (is_gathered(w, 0)) find(w, 0);
      copy_queries(w);
      place_.advance();
      for (int tile = 0; tile < tiles; ++tile) {
        const bool gathered = is_gathered(w, tile);
        if (gathered) resolve(w);
        if (tile + 1 < tiles && is_gathered(w, tile + 1)) find(w, tile + 1);
        if (gathered)
          copy_tile();
        else
          copy_blocks(w, tile);
        place_.advance();
        if (tile == 0) copy_last_queries(w, work);
      }
    }
    wait_for_all_copies();
  }

 private:
  static constexpr int kRowsOfThread = 4, kThreadsPerRow = 8, kRowsAtOnce = kWarpgroupThreads / kThreadsPerRow;
  static_assert(kRowsOfThread * kRowsAtOnce == kTile);

  /// Computed anew each time: there are no registers to keep values in that depend on it.
  __device__ static int thread() { return reload_thread_index() % kWarpgroupThreads; }
  /// The first row of the thread; the others follow at distances of kRowsAtOnce.
  __device__ static int first_row() { return thread() / kThreadsPerRow; }

  /// Half of the known works, by the first warp's lanes.
  __device__ void schedule(int first, int count) const {
    const int work = first + thread();
    if (first >= count) return;
    if (thread() < kHalfWorks && work < count) s_.works[work % kWorks] = make_work(work);
    if (arrives_for_warp(thread())) mbarrier_arrive(shared_address(&s_.works_known[first / kHalfWorks % 2]));
  }

  __device__ Work make_work(int work) const {
    const int index = static_cast<int>(blockIdx.x) + work * static_cast<int>(gridDim.x);
    Work w{};
    w.token = index / head_tiles_;
    w.first_head = index % head_tiles_ * kTile;
    const ops::StepRecord at = rows_of(w.token, w.rows);
    w.position = at.padded() ? -1 : max(at.position, 0);
    w.tiles = max(w.rows.tiles(), 1);
    return w;
  }

  /// The rows of a token, and its record.
  __device__ ops::StepRecord rows_of(int token, TokenRows& of) const {
    const QueryRows rows(p_, token);
    if (rows.at.padded()) return rows.at;
    if (from_.item_of_token == nullptr) {
      of.entries = of.visible = p_.entry_slots.length(token);
      return rows.at;
    }
    const int item = from_.item_of_token[token];
    of.first = rows.first;
    of.end = rows.first + rows.window;
    of.window_at = from_.window_at(rows.at, item, p_.layer.window_tokens,
                                   first_window_row(rows.at, p_.layer.window_tokens, rows.begin));
    of.entries_at = from_.entries_at + item * from_.max_entries;
    of.visible =
        p_.layer.num_kinds > 0 ? min((rows.at.position + 1) / p_.layer.kinds[0].ratio, from_.max_entries) : 0;
    of.entries = p_.chosen.data == nullptr ? of.visible : rows.entries;
    return rows.at;
  }

  /// Whether the rows of a tile are copied one by one.
  __device__ bool is_gathered(const Work& w, int tile) const {
    return !from_.entries_in_blocks && tile >= w.rows.window_tiles();
  }

  /// Names of a tile's rows, from a list.
  __device__ void find(const Work& w, int tile) {
    const std::int32_t* list = from_.item_of_token != nullptr
                                   ? static_cast<const std::int32_t*>(p_.chosen.data) + w.token * p_.chosen.row_stride
                                   : p_.entry_slots.slots + w.token * p_.entry_slots.stride;
    const int first = (tile - w.rows.window_tiles()) * kTile + first_row();
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int at = first + i * kRowsAtOnce;
      next_[i] = -1;
      if (at < w.rows.entries) next_[i] = load4_ordered(list + at);
    }
  }

  /// Numbers of the rows found; -1: the row does not exist.
  __device__ void resolve(const Work& w) {
    const int limit = from_.item_of_token == nullptr ? p_.entry_slots.limit : w.rows.visible;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i)
      number_[i] = next_[i] >= 0 && next_[i] < limit ? w.rows.entries_at + next_[i] : -1;
  }

  // --- tiles of staged blocks

  /// What a lane copies: rows of the newer block (0), of the older one (1), or zeros where there is no row (2 to 4).
  __device__ static Rows part_of(BlockTile of, int lane) {
    if (lane < 2) return Rows::choose(lane == 0, of.newer, of.older);
    const bool has_older = of.older.begin < of.older.end;
    const int older_begin = has_older ? of.older.begin : of.newer.end;
    const int older_end = has_older ? of.older.end : of.newer.end;
    const int begin = lane == 2 ? 0 : lane == 3 ? of.newer.end : older_end;
    return {begin, lane == 2 ? of.newer.begin : lane == 3 ? older_begin : lane == 4 ? kTile : begin, 0};
  }

  __device__ void copy_blocks(const Work& w, int tile) {
    const int lane = thread() % kWarp;
    Rows part;
    if (thread() < kWarp) part = part_of(w.rows.block_tile(tile), lane);
    const bool is_zero = lane >= 2;
    const std::uint8_t* from = from_.rows;
    if (!is_zero) from += std::int64_t{part.at} * kStagedRowBytes + part.begin * kPanelRowBytes;
    const int bytes = max(part.end - part.begin, 0) * kPanelRowBytes;
    const std::uint32_t to = shared_address(s_.rows[place_.stage]) + part.begin * kPanelRowBytes;
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      const int quarter = quarter_at(i);
      wait_for_place(quarter);
      const std::uint32_t full = shared_address(&s_.full[place_.stage][quarter]);
      if (thread() == 0)
        mbarrier_arrive_expect_tx(full, kQuarterBytes);
      else
        mbarrier_arrive(full);
      if (thread() < kWarp && bytes > 0) {
#pragma unroll
        for (int j = 0; j < kQuarterPanels; ++j) {
          const int panel = quarter * kQuarterPanels + j;
          bulk_load(to + panel * kPanelBytes, is_zero ? from : from + panel * kPanelBytes, bytes, full);
        }
      }
      if (i > 0) continue;
      const BlockTile of = w.rows.block_tile(tile);
#pragma unroll
      for (int j = 0; j < kRowsOfThread; ++j) {
        const int row = first_row() + j * kRowsAtOnce;
        number_[j] = of.newer.has(row) || of.older.has(row) ? 0 : -1;
      }
      announce_present();
    }
  }

  /// Copies a quarter of the rows, or zeros where there is no row.
  __device__ void copy_quarter(std::uint32_t to, const std::uint8_t* rows, int quarter, std::uint64_t policy) const {
    const int thread = this->thread(), chunk = thread % kThreadsPerRow;
    to += panel_offset(thread / kThreadsPerRow, chunk);
    static_assert(kRowsAtOnce % 8 == 0, "all rows of a thread have the same swizzle");
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const std::uint8_t* from = rows + std::int64_t{max(number_[i], 0)} * kStagedRowBytes + chunk * 16 +
                                 quarter * kQuarterPanels * kPanelRowBytes;
#pragma unroll
      for (int panel = 0; panel < kQuarterPanels; ++panel)
        copy_async16_or_zero(to + panel * kPanelBytes + i * kRowsAtOnce * kPanelRowBytes,
                             from + panel * kPanelRowBytes, number_[i] >= 0 ? 16 : 0, policy);
    }
  }

  __device__ void wait_for_place(int quarter) const {
    mbarrier_wait(shared_address(&s_.empty[place_.stage][quarter]), place_.parity ^ 1);
  }

  __device__ const std::uint8_t* queries_of(const Work& w) {
    const int first = first_row();
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = first + i * kRowsAtOnce;
      number_[i] = w.first_head + row < p_.num_heads ? row : -1;
    }
    return static_cast<const std::uint8_t*>(p_.q.data) +
           (std::int64_t{w.token} * p_.q.row_stride + w.first_head * kWidth) * 2;
  }

  __device__ void copy_queries(const Work& w) {
    const std::uint8_t* q = queries_of(w);
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      const int quarter = quarter_at(i);
      wait_for_place(quarter);
      if (i < kKept)
        copy_quarter(shared_address(s_.rows[place_.stage]) + quarter * kQuarterBytes, q, quarter, evict_first_policy());
      arrive_when_copied(shared_address(&s_.full[place_.stage][quarter]));
    }
    announce_rows();
  }

  __device__ void copy_last_queries(const Work& w, int work) {
    const std::uint8_t* q = queries_of(w);
    mbarrier_wait(shared_address(&s_.last_empty), (work & 1) ^ 1);
    copy_quarter(shared_address(s_.last_queries), q, kQuarters - 1, evict_first_policy());
    arrive_when_copied(shared_address(&s_.last_full));
  }

  __device__ void copy_tile() {
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      const int quarter = quarter_at(i);
      wait_for_place(quarter);
      copy_quarter(shared_address(s_.rows[place_.stage]) + quarter * kQuarterBytes, from_.rows, quarter,
                   evict_last_policy());
      arrive_when_copied(shared_address(&s_.full[place_.stage][quarter]));
      if (i == 0) announce_present();
    }
  }
  __device__ void announce_present() const {
    std::uint32_t present = 0;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i)
      present |= (__ballot_sync(kAllLanes, number_[i] >= 0) & 0x01010101u) << i;
    if (thread() % kWarp == 0) s_.present[place_.stage][thread() / kWarp] = present;
    announce_rows();
  }
  __device__ void announce_rows() const {
    if (arrives_for_warp(thread() % kWarp)) mbarrier_arrive(shared_address(&s_.rows_known[place_.stage]));
  }

  const AttendParams& p_;
  const StagedRows& from_;
  Shared& s_;
  const int head_tiles_;
  RingPlace place_;
  int number_[kRowsOfThread], next_[kRowsOfThread];
};

// --- scores

/// S and the softmax of all work tiles. kLse: the caller wants the log-sum-exp, which needs the sum of P itself; the
/// outputs are divided by the sum of rounded P, with which they have half of the error.
template <bool kLse>
class Scores {
 public:
  __device__ Scores(const AttendParams& p, Shared& s) : p_(p), s_(s) {}

  __device__ void run(int head_tiles) {
    const int count = num_works(p_, head_tiles);
    for (int work = 0; work < count; ++work) {
      const Work& w = work_at(s_, work);
      const int tiles = tiles_of(w);
      load_queries();
      base_[0] = base_[1] = most_[0] = most_[1] = -INFINITY;
      sum_[0] = sum_[1] = exact_[0] = exact_[1] = 0.0f;
      for (int tile = 0; tile < tiles; ++tile, ++tile_) {
        if (tile == 0) mbarrier_wait(shared_address(&s_.last_full), work & 1);
        score();
        if (tile > 0) {
          wgmma_wait<kQuarters - 1>();  // PV of the tile before begins behind the first quarter
          announce(tile_ - 1);
        }
        wgmma_wait<0>();
        keep_behind_wait(z_);
        const bool last = tile + 1 == tiles;
        if (last && arrives_for_warp(threadIdx.x % kWarp)) mbarrier_arrive(shared_address(&s_.last_empty));
        softmax();
        if (last) finish(w);
        fence_async_proxy();
        if (last) announce(tile_);
        place_.advance();
      }
    }
  }

 private:
  static constexpr int kScores = kTile / 2, kQuarterWords = kQuarterPanels * kTile / 16 * 4;
  static constexpr float kSlack = 8.0f;  // P is below 2^8

  /// Computed anew each time: there are no registers to keep values in that depend on it.
  __device__ static int thread() { return reload_thread_index(); }
  __device__ static int head_of(int thread) { return thread / kWarp * 16 + thread % kWarp / 4; }

  __device__ void announce(int tile) const {
    if (arrives_for_warp(threadIdx.x % kWarp)) mbarrier_arrive(shared_address(&s_.p_full[tile % 2]));
  }

  __device__ void load_queries() {
    const int thread = this->thread(), lane = thread % kWarp, head = thread / kWarp * 16 + lane % 16;
    const std::uint32_t rows = shared_address(s_.rows[place_.stage]);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      mbarrier_wait(shared_address(&s_.full[place_.stage][quarter_at(i)]), place_.parity);
#pragma unroll
      for (int panel = 0; panel < kQuarterPanels; ++panel)
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k) {
          std::uint32_t words[4];
          load_matrices(words, rows + (quarter_at(i) * kQuarterPanels + panel) * kPanelBytes +
                                   panel_offset(head, 2 * k + lane / 16));
#pragma unroll
          for (int j = 0; j < 4; ++j) q_[i * kQuarterWords + (panel * (kTile / 16) + k) * 4 + j] = words[j];
        }
    }
    mbarrier_wait(shared_address(&s_.full[place_.stage][kQuarters - 1]), place_.parity);
    mbarrier_wait(shared_address(&s_.rows_known[place_.stage]), place_.parity);
    if (arrives_for_warp(threadIdx.x % kWarp)) {
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) release(s_, place_.stage, i);
    }
    place_.advance();
  }

  /// S = Q K^T, a group of multiplies for each quarter.
  __device__ void score() {
    const std::uint32_t rows = panel_place(shared_address(s_.rows[place_.stage]));
    const std::uint32_t last = panel_place(shared_address(s_.last_queries));
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      const int quarter = quarter_at(i);
      mbarrier_wait(shared_address(&s_.full[place_.stage][quarter]), place_.parity);
      fence_async_proxy();
      wgmma_fence();
#pragma unroll
      for (int panel = 0; panel < kQuarterPanels; ++panel)
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k) {
          const std::uint64_t b = panel_descriptor(rows, (quarter * kQuarterPanels + panel) * kPanelBytes + k * 32);
          if (i < kKept)
            wgmma<MmaType::bf16, 64, false>(z_, q_ + i * kQuarterWords + (panel * (kTile / 16) + k) * 4, b,
                                            i + panel + k > 0);
          else
            wgmma<MmaType::bf16, 64, false>(z_, panel_descriptor(last, panel * kPanelBytes + k * 32), b, true);
        }
      wgmma_commit();
    }
  }

  /// P of a tile, relative to a reference (`base_`) that follows the row maximum where that is far above it.
  __device__ void softmax() {
    const int thread = this->thread(), quad = thread % 4, buffer = tile_ % 2;
    const float scale = p_.softmax_scale * codec::kLog2e;
    mbarrier_wait(shared_address(&s_.rows_known[place_.stage]), place_.parity);
    const uint4 words = *reinterpret_cast<const uint4*>(s_.present[place_.stage]);
    if ((words.x & words.y & words.z & words.w) != 0x0F0F0F0Fu) {
      const int shift = quad % 2 * 16;
      const std::uint32_t even = (quad < 2 ? words.x : words.y) >> shift, odd = (quad < 2 ? words.z : words.w) >> shift;
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (((i / 4 % 2 == 0 ? even : odd) >> (i % 2 * 8 + i / 8) & 1) == 0) z_[i] = -INFINITY;
    }
    float row_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) row_max[i / 2 % 2] = fmaxf(row_max[i / 2 % 2], fmaxf(z_[i], z_[i + 1]));
    row_max[0] *= scale;
    row_max[1] *= scale;
    most_[0] = fmaxf(most_[0], row_max[0]);
    most_[1] = fmaxf(most_[1], row_max[1]);
    float rescale[2] = {1.0f, 1.0f};
    if (__any_sync(kAllLanes, row_max[0] > base_[0] + kSlack || row_max[1] > base_[1] + kSlack))
      raise_base(row_max, rescale);
    const float base[2] = {base_[0] == -INFINITY ? 0.0f : base_[0], base_[1] == -INFINITY ? 0.0f : base_[1]};
    mbarrier_wait(shared_address(&s_.p_empty[buffer]), (tile_ / 2 & 1) ^ 1);
    const int lane = thread % kWarp, head = thread / kWarp * 16 + lane % 16;
    const std::uint32_t to = shared_address(s_.p_tile[buffer]);
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int half = j / 2 % 2;
        const float x = exp2_approx(codec::fused(z_[i + j], scale, -base[half]));
        const float y = exp2_approx(codec::fused(z_[i + j + 1], scale, -base[half]));
        if constexpr (kLse) exact_[half] += x + y;
        const std::uint32_t pair = pairs[j / 2] = bf16_pair(x, y);
        sum_[half] += codec::bits_float(pair << 16) + codec::bits_float(pair & 0xFFFF0000u);
      }
      store_matrices(to + panel_offset(head, i / 4 + lane / 16), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    if (quad == 0) {
      s_.rescale[buffer][head_of(thread)] = rescale[0];
      s_.rescale[buffer][head_of(thread) + 8] = rescale[1];
    }
  }

  /// The lanes of a head agree on the new reference.
  __device__ void raise_base(float (&row_max)[2], float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[half] = fmaxf(larger_of_quad(row_max[half]), base_[half]);
      rescale[half] = exp2_approx(base_[half] - (row_max[half] == -INFINITY ? 0.0f : row_max[half]));
      base_[half] = row_max[half];
      sum_[half] *= rescale[half];
      exact_[half] *= rescale[half];
    }
  }

  __device__ static float larger_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
  }
  __device__ static float sum_of_quad(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
  }

  /// The factors of O, with the sink in the denominator.
  __device__ void finish(const Work& w) {
    const int thread = this->thread();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_quad(sum_[half]), most = larger_of_quad(most_[half]);
      const float exact = kLse ? sum_of_quad(exact_[half]) : 0.0f;
      const int head = head_of(thread) + 8 * half, of_all = w.first_head + head;
      if (thread % 4 != 0) continue;
      const bool there = of_all < p_.num_heads;
      const float sink = there && p_.sink != nullptr && !w.padded() ? p_.sink[of_all] * codec::kLog2e : -INFINITY;
      const float base = fmaxf(base_[half], sink), reference = base == -INFINITY ? 0.0f : base;
      const float share = exp2_approx(base_[half] - reference);
      const float of_sink = sink == INFINITY ? 1.0f : exp2_approx(sink - reference);
      const float total = fused(sum, share, of_sink);
      const bool only_sink = sink == INFINITY && !isnan(sum);
      s_.factor[tile_ % 2][head] = only_sink || total == 0.0f ? 0.0f : __fdividef(share, total);
      if (!there) continue;
      const std::int64_t at = std::int64_t{w.token} * p_.num_heads + of_all;
      if constexpr (kLse) {
        if (p_.lse_mode == ops::LseMode::rows)
          p_.lse[at] = sum == 0.0f ? INFINITY : (base_[half] + log2f(exact)) * kLn2;
        else
          p_.lse[at] = only_sink       ? INFINITY
                       : total == 0.0f ? -INFINITY
                                       : (reference + log2f(fused(exact, share, of_sink))) * kLn2;
      }
      if (p_.max_logits != nullptr) p_.max_logits[at] = most * kLn2;
    }
  }

  __device__ static float fused(float a, float b, float c) { return codec::fused(a, b, c); }

  const AttendParams& p_;
  Shared& s_;
  RingPlace place_;
  int tile_ = 0;  // of all work tiles
  std::uint32_t q_[kKept * kQuarterWords];
  float z_[kScores];
  float base_[2], sum_[2], exact_[2], most_[2];  // sum_: of rounded P; most_: the largest logit of the thread's columns
};

// --- values

/// PV of half of the channels, and their output.
template <int kHalf>
__device__ void run_values(const AttendParams& p, Shared& s, int head_tiles) {
  const int count = num_works(p, head_tiles);
  RingPlace place;
  int tile = 0;
  for (int work = 0; work < count; ++work) {
    const int tiles = tiles_of(work_at(s, work));
    place.advance();  // the queries
    float o[kWidth / 4];
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) o[i] = 0.0f;
    float factor[2];
    for (int left = tiles; left > 0; --left, ++tile) {
      const int buffer = tile % 2;
      mbarrier_wait(shared_address(&s.p_full[buffer]), tile / 2 & 1);
      const float upper = s.rescale[buffer][head_of_thread()], lower = s.rescale[buffer][head_of_thread() + 8];
      if (__any_sync(kAllLanes, upper != 1.0f || lower != 1.0f)) scale_heads(o, upper, lower);
      if (left == 1) {
        factor[0] = s.factor[buffer][head_of_thread()];
        factor[1] = s.factor[buffer][head_of_thread() + 8];
      }
      const std::uint32_t p_tile = panel_place(shared_address(s.p_tile[buffer]));
      const std::uint32_t rows =
          panel_place(shared_address(s.rows[place.stage]) + kHalf * 2 * kQuarterBytes, kPanelBytes);
      fence_async_proxy();
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k)
        wgmma<MmaType::bf16, 128, true>(o, panel_descriptor(p_tile, k * 32),
                                        panel_descriptor(rows, k * 16 * kPanelRowBytes), true);
      wgmma_commit();
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k)
        wgmma<MmaType::bf16, 128, true, 64>(o, panel_descriptor(p_tile, k * 32),
                                            panel_descriptor(rows, k * 16 * kPanelRowBytes + kQuarterBytes), true);
      wgmma_commit();
      wgmma_wait<1>();
      if (arrives_for_warp(threadIdx.x % kWarp)) release(s, place.stage, 2 * kHalf);
      wgmma_wait<0>();
      if (arrives_for_warp(threadIdx.x % kWarp)) {
        release(s, place.stage, 2 * kHalf + 1);
        mbarrier_arrive(shared_address(&s.p_empty[buffer]));
      }
      place.advance();
    }
    keep_behind_wait(o);
    scale_heads(o, factor[0], factor[1]);
    const Work& w = work_at(s, work);
    WorkTile tile_of_job{};
    tile_of_job.token = w.token;
    tile_of_job.first_head = w.first_head;
    tile_of_job.rows.at.row = w.padded() ? -1 : 0;
    tile_of_job.rows.at.position = w.position;
    const Job job(tile_of_job, 0);
    if constexpr (kHalf == 1) inverse_rope_last(p, job, o);
    store_output(p, job, o, kHalf * (kWidth / 2));
  }
}

// --- kernel

template <bool kLse>
__global__ void __launch_bounds__(kThreads, 1)
    attend_staged(const __grid_constant__ AttendParams p, const __grid_constant__ StagedRows from, int head_tiles) {
#if __CUDA_ARCH__ == 900
  extern __shared__ std::uint8_t base[];
  Shared& s = *reinterpret_cast<Shared*>(base + (1024 - shared_address(base) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRing; ++i) {
      for (int quarter = 0; quarter < kQuarters; ++quarter) {
        mbarrier_init(shared_address(&s.full[i][quarter]), Arrivals::of_each(kWarpgroupThreads));
        mbarrier_init(shared_address(&s.empty[i][quarter]), Arrivals::of_warps(kWarpgroupWarps));
      }
      mbarrier_init(shared_address(&s.rows_known[i]), Arrivals::of_warps(kWarpgroupWarps));
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(shared_address(&s.p_full[i]), Arrivals::of_warps(kWarpgroupWarps));
      mbarrier_init(shared_address(&s.p_empty[i]), Arrivals::of_warps(2 * kWarpgroupWarps));
      mbarrier_init(shared_address(&s.works_known[i]), Arrivals::of_warps(1));
    }
    mbarrier_init(shared_address(&s.last_full), Arrivals::of_each(kWarpgroupThreads));
    mbarrier_init(shared_address(&s.last_empty), Arrivals::of_warps(kWarpgroupWarps));
    fence_mbarrier_init();
  }
  launch_dependents();
  touch(p);
  cta_sync();
  grid_dependency_wait();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  if (warpgroup == 0) {
    more_registers<kScoreRegisters>();
    Scores<kLse>(p, s).run(head_tiles);
  } else if (warpgroup == 1) {
    more_registers<kValueRegisters>();
    run_values<0>(p, s, head_tiles);
  } else if (warpgroup == 2) {
    more_registers<kValueRegisters>();
    run_values<1>(p, s, head_tiles);
  } else {
    fewer_registers<kCopyRegisters>();
    Producer(p, from, s, head_tiles).run();
  }
#endif
}

cudaError_t launch_over(const AttendParams& p, const StagedRows& from, cudaStream_t stream) {
  const int head_tiles = head_tiles_of(p);
  const std::int64_t works = std::int64_t{p.step.num_tokens} * head_tiles;
  const std::int64_t ctas = std::min<std::int64_t>(works, std::max(num_sms(), 1));
  return launch<kSharedBytes>(p.lse == nullptr ? attend_staged<false> : attend_staged<true>,
                              static_cast<unsigned>(ctas), kThreads, stream, p, from, head_tiles);
}

}  // namespace attend_wgmma::staged

cudaError_t launch_staged(const ops::AttendParams& p, const AttendSplit&, cudaStream_t stream) {
  const StagedRows rows = staged_rows(p);
  if (const cudaError_t error = launch_stage_rows(p, rows, stream); error != cudaSuccess) return error;
  return attend_wgmma::staged::launch_over(p, rows, stream);
}

cudaError_t launch_bf16_rows(const ops::AttendParams& p, const AttendSplit&, cudaStream_t stream) {
  StagedRows rows;
  rows.rows = p.layer.kinds[0].page.payload.data;
  return attend_wgmma::staged::launch_over(p, rows, stream);
}

}  // namespace kv4::cuda
