// The interface to the device: memory, and one call per operation with a plain params struct. The CPU backend runs
// calls at once; other backends queue them on their stream, so that each call sees the writes of the calls before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kv4/backend.h"
#include "kv4/params.h"
#include "schema/image_layout.h"

namespace kv4 {

/// V4.1's operations, of the backends that have them.
class SharedEntryOperations {
 public:
  virtual ~SharedEntryOperations() = default;
  /// Writes the window rows, pending rows and due entries of an owner; its due index keys where they are made here.
  virtual void append_owner(const ops::OwnerAppendParams& params) = 0;
  virtual void append_keys(const ops::KeyAppendParams& params) = 0;
  /// index_topk and select_topk of the layer that picks the candidates, which they write.
  virtual void index_topk_and_candidates(const ops::IndexParams& params, const ops::CandidateDesc& candidates) = 0;
  virtual void select_topk_and_candidates(const ops::IndexParams& params, const ops::CandidateDesc& candidates) = 0;
  /// The same operations of a later layer: other entries than the candidates do not take part, and score -infinity.
  virtual void index_scores_within(const ops::IndexParams& params, const ops::CandidateDesc& candidates) = 0;
  virtual void index_topk_within(const ops::IndexParams& params, const ops::CandidateDesc& candidates) = 0;
  virtual void select_topk_within(const ops::IndexParams& params, const ops::CandidateDesc& candidates) = 0;
  virtual void attend_draft(const ops::DraftParams& params) = 0;
};

class Backend {
 public:
  Backend() = default;
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  /// Whether the host can read and write the memory of allocate().
  virtual bool on_host() const = 0;
  /// Zeroed, aligned to 256; nullptr for 0 bytes. Throws Error(out_of_memory).
  virtual std::byte* allocate(std::int64_t bytes) = 0;
  virtual void deallocate(std::byte* memory, std::int64_t bytes) = 0;
  /// Host memory with the fastest transfers; nullptr for 0 bytes. Throws Error(out_of_memory).
  virtual std::byte* allocate_host(std::int64_t bytes) = 0;
  virtual void deallocate_host(std::byte* memory, std::int64_t bytes) = 0;
  virtual void copy(std::byte* to, const std::byte* from, std::int64_t bytes) = 0;
  virtual void fill(std::byte* memory, std::uint8_t value, std::int64_t bytes) = 0;

  /// Copies pieces from and to device memory, in one launch as far as possible.
  virtual void copy_pieces(std::span<const ops::CopyPiece> pieces) = 0;

  /// Reserves for the largest host array that read_pieces, write_pieces and images move; called when a pool is made.
  virtual void reserve_staging(std::int64_t bytes) = 0;
  /// Reads device pieces into a host array as one transfer: each `to` lies in host [bytes], ascending. Bytes that no
  /// piece covers are zero. Done when it returns.
  virtual void read_pieces(std::span<const ops::CopyPiece> pieces, std::span<std::byte> host) = 0;
  /// Writes a host array to device pieces: each `from` lies in host [bytes], which may be reused when it returns.
  virtual void write_pieces(std::span<const ops::CopyPiece> pieces, std::span<const std::byte> host) = 0;

  /// Each piece is one transfer from memory of allocate() to memory of allocate_host(), after the work queued so far
  /// and concurrent with later work, which must not change the piece before it is transferred(). Returns a ticket.
  virtual std::int64_t transfer_out(std::span<const ops::CopyPiece> pieces) = 0;
  /// Transfers from allocate_host() to allocate(), after the clearing of new memory and concurrent with all other work:
  /// no other queued work uses the pieces' targets.
  virtual std::int64_t transfer_in(std::span<const ops::CopyPiece> pieces) = 0;
  virtual bool transferred(std::int64_t ticket) = 0;

  /// The largest number of items of an update; called when a cache is made.
  virtual void reserve_updates(std::int64_t max_items) = 0;
  /// Items, ranges and block ids are on the host, and may be reused when it returns.
  virtual void update_step(const ops::StepUpdate& update) = 0;
  /// Writes window rows, pending rows, due entries and index keys of all tokens of the step.
  virtual void append(const ops::AppendParams& params) = 0;
  virtual void flush(const ops::FlushParams& params) = 0;
  /// Boundaries are on the host, and may be reused when it returns. Not allowed while calls are recorded.
  virtual void save_boundaries(const ops::BoundaryParams& params) = 0;
  virtual void gather_chosen(const ops::GatherParams& params) = 0;
  virtual void gather_all(const ops::GatherParams& params) = 0;
  virtual void gather_window(const ops::GatherParams& params) = 0;

  /// The workspace holds at least one token (ops::index_token_bytes).
  virtual void index_scores(const ops::IndexParams& params) = 0;
  virtual void select_topk(const ops::IndexParams& params) = 0;
  virtual void index_topk(const ops::IndexParams& params) = 0;
  virtual void attend(const ops::AttendParams& params) = 0;
  /// nullptr: this backend runs no caches of V4.1.
  virtual SharedEntryOperations* shared_entries() { return nullptr; }

  // Pools that the caller keeps: kv4/cuda.h says what each call does.
  virtual void write_slots(const ops::SlotRowsParams& params) = 0;
  virtual void gather_slots(const ops::SlotRowsParams& params) = 0;
  virtual void make_range_tables(const ops::RangeTablesParams& params) = 0;
  virtual void place_scores(const ops::PlaceScoresParams& params) = 0;

  /// Canonical image of one state slot. layers: one per owned layer. image: [layout.bytes] on the host.
  virtual void save_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                          std::byte* image) = 0;
  virtual void restore_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                             const std::byte* image) = 0;

  /// Later work is queued on this stream, after all work queued before.
  virtual void set_stream(Stream stream) = 0;
  /// Whether calls are being recorded (CUDA graph), to run later and possibly often.
  virtual bool capturing() = 0;
  /// Marks the point after all work queued so far; returns its ticket. Tickets increase.
  virtual std::int64_t mark() = 0;
  virtual bool reached(std::int64_t ticket) = 0;
  /// Waits for all queued work. Throws Error(device_failure) if any of it failed.
  virtual void synchronize() = 0;
};

}  // namespace kv4
