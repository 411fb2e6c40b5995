// The CPU backend: index arithmetic over the step's tables, one row at a time through RowKernels, tokens distributed
// over threads.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/row_buffers.h"
#include "backend/cpu/row_kernels.h"
#include "backend/cpu/thread_pool.h"

namespace kv4::cpu {

class CpuBackend final : public Backend {
 public:
  CpuBackend(int threads, const RowKernels& kernels)
      : kernels_(kernels), pool_(threads), buffers_(threads), attend_buffers_(threads) {}

  bool on_host() const override { return true; }
  std::byte* allocate(std::int64_t bytes) override;
  void deallocate(std::byte* memory, std::int64_t bytes) override;
  std::byte* allocate_host(std::int64_t bytes) override { return allocate(bytes); }
  void deallocate_host(std::byte* memory, std::int64_t bytes) override { deallocate(memory, bytes); }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override;
  void fill(std::byte* memory, std::uint8_t value, std::int64_t bytes) override;
  void copy_pieces(std::span<const ops::CopyPiece> pieces) override;
  void reserve_staging(std::int64_t) override {}
  void read_pieces(std::span<const ops::CopyPiece> pieces, std::span<std::byte> host) override;
  void write_pieces(std::span<const ops::CopyPiece> pieces, std::span<const std::byte>) override {
    copy_pieces(pieces);
  }
  std::int64_t transfer_out(std::span<const ops::CopyPiece> pieces) override {
    copy_pieces(pieces);
    return 0;
  }
  std::int64_t transfer_in(std::span<const ops::CopyPiece> pieces) override { return transfer_out(pieces); }
  bool transferred(std::int64_t) override { return true; }

  void reserve_updates(std::int64_t) override {}
  void update_step(const ops::StepUpdate& update) override;
  void append(const ops::AppendParams& params) override;
  void flush(const ops::FlushParams& params) override;
  void save_boundaries(const ops::BoundaryParams& params) override;
  void gather_chosen(const ops::GatherParams& params) override;
  void gather_all(const ops::GatherParams& params) override;
  void gather_window(const ops::GatherParams& params) override;
  void index_scores(const ops::IndexParams& params) override;
  void select_topk(const ops::IndexParams& params) override;
  void index_topk(const ops::IndexParams& params) override;
  void attend(const ops::AttendParams& params) override;
  void write_slots(const ops::SlotRowsParams& params) override;
  void gather_slots(const ops::SlotRowsParams& params) override;
  void make_range_tables(const ops::RangeTablesParams& params) override;
  void place_scores(const ops::PlaceScoresParams& params) override;
  void save_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                  std::byte* image) override;
  void restore_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                     const std::byte* image) override;

  // Every call is complete when it returns.
  void set_stream(Stream) override {}
  bool capturing() override { return false; }
  std::int64_t mark() override { return ++marks_; }
  bool reached(std::int64_t) override { return true; }
  void synchronize() override {}

 private:
  /// Scores the tokens [first, first + count) that see at least `min_keys` keys.
  void score_tokens(const ops::IndexParams& params, std::int64_t first, std::int64_t count, std::int64_t min_keys,
                    const std::function<float*(std::int64_t)>& scores_of);
  void score_block(const ops::IndexParams& params, std::int64_t begin, std::int64_t end, std::int64_t index,
                   std::int64_t min_keys, const std::function<float*(std::int64_t)>& scores_of, int worker);
  void attend_heads(const ops::AttendParams& params, std::int64_t token, int first_head, int heads, int worker);
  void fit_buffers(int width, int num_sources = 0, int attend_heads = 0);
  RowBuffers& buffers(int worker) { return buffers_[worker]; }

  const RowKernels& kernels_;
  ThreadPool pool_;
  std::vector<RowBuffers> buffers_;            // [threads]
  std::vector<AttendBuffers> attend_buffers_;  // [threads]
  std::int64_t marks_ = 0;
};

/// As make_cpu_backend, with a chosen table.
std::shared_ptr<Backend> make_cpu_backend_on(int threads, const RowKernels& kernels);

}  // namespace kv4::cpu
