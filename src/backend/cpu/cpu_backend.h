// The CPU backend: index arithmetic over the step's tables, one row at a time through RowKernels, tokens distributed
// over threads.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/row_buffers.h"
#include "backend/cpu/row_kernels.h"
#include "backend/cpu/thread_pool.h"

namespace kv4::cpu {

class CpuBackend final : public Backend, public SharedEntryOperations {
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
  SharedEntryOperations* shared_entries() override { return this; }
  void append_owner(const ops::OwnerAppendParams& params) override;
  void append_keys(const ops::KeyAppendParams& params) override;
  void index_topk_and_candidates(const ops::IndexParams& params, const ops::CandidateDesc& candidates) override;
  void select_topk_and_candidates(const ops::IndexParams& params, const ops::CandidateDesc& candidates) override;
  void index_scores_within(const ops::IndexParams& params, const ops::CandidateDesc& candidates) override;
  void index_topk_within(const ops::IndexParams& params, const ops::CandidateDesc& candidates) override;
  void select_topk_within(const ops::IndexParams& params, const ops::CandidateDesc& candidates) override;
  void attend_draft(const ops::DraftParams& params) override;
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
  /// Some tokens of a step: those of [first, first + count) that see from min_keys to max_keys keys.
  struct TokenRange {
    std::int64_t first, count, min_keys;
    std::int64_t max_keys = std::numeric_limits<std::int64_t>::max();

    std::int64_t end() const { return first + count; }
    bool has(std::int64_t keys) const { return keys >= min_keys && keys <= max_keys; }
  };
  using ScoresOf = std::function<float*(std::int64_t)>;  // of a token
  void prepare_queries(const ops::IndexParams& params, const TokenRange& tokens);
  void score_tokens(const ops::IndexParams& params, const TokenRange& tokens, const ScoresOf& scores_of);
  void score_block(const ops::IndexParams& params, const TokenRange& tokens, std::int64_t index,
                   const ScoresOf& scores_of, int worker);
  /// Scores the entries of the tokens' candidates, one after the other, into the workspace.
  void score_candidates(const ops::IndexParams& params, const ops::CandidateDesc& candidates, const TokenRange& tokens);
  void quantise_draft_rows(const ops::DraftParams& params);
  /// The rows that a query meets beside its entries.
  enum class QueryRows : std::uint8_t { step, draft };
  void attend_rows(const ops::AttendParams& params, QueryRows window);
  void attend_heads(const ops::AttendParams& params, QueryRows window, std::int64_t token, int first_head, int heads,
                    int worker);
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
