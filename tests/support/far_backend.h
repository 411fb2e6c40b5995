// The CPU backend in memory that the host cannot touch: pages are readable only while an operation runs, and every
// address given to an operation must lie in them. Replaces a GPU on machines without one.
#pragma once

#include <sys/mman.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace kv4::test {

class FarBackend final : public Backend, public SharedEntryOperations {
 public:
  explicit FarBackend(std::shared_ptr<Backend> near) : near_(std::move(near)) {}

  bool on_host() const override { return false; }
  std::byte* allocate(std::int64_t bytes) override {
    std::byte* memory = near_->allocate(bytes);
    if (memory != nullptr) {
      pages_[memory] = bytes;
      protect(memory, bytes, PROT_NONE);
    }
    return memory;
  }
  void deallocate(std::byte* memory, std::int64_t bytes) override {
    pages_.erase(memory);
    near_->deallocate(memory, bytes);
  }
  std::byte* allocate_host(std::int64_t bytes) override { return near_->allocate_host(bytes); }
  void deallocate_host(std::byte* memory, std::int64_t bytes) override { near_->deallocate_host(memory, bytes); }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    const Open open(*this, {to, from});
    near_->copy(to, from, bytes);
  }
  void fill(std::byte* memory, std::uint8_t value, std::int64_t bytes) override {
    const Open open(*this, {memory});
    near_->fill(memory, value, bytes);
  }
  void copy_pieces(std::span<const ops::CopyPiece> pieces) override {
    const Open open(*this, {});
    for (const ops::CopyPiece& p : pieces) check({p.from, p.to, p.instead, p.when});
    near_->copy_pieces(pieces);
  }

  void reserve_staging(std::int64_t bytes) override { staging_bytes_ = std::max(staging_bytes_, bytes); }
  void read_pieces(std::span<const ops::CopyPiece> pieces, std::span<std::byte> host) override {
    check_staging(static_cast<std::int64_t>(host.size()));
    const Open open(*this, {});
    for (const ops::CopyPiece& p : pieces) check({p.from, p.instead, p.when});
    near_->read_pieces(pieces, host);
  }
  void write_pieces(std::span<const ops::CopyPiece> pieces, std::span<const std::byte> host) override {
    check_staging(static_cast<std::int64_t>(host.size()));
    const Open open(*this, {});
    for (const ops::CopyPiece& p : pieces) check({p.to});
    near_->write_pieces(pieces, host);
  }
  std::int64_t transfer_out(std::span<const ops::CopyPiece> pieces) override {
    const Open open(*this, {});
    for (const ops::CopyPiece& p : pieces) check({p.from});
    return near_->transfer_out(pieces);
  }
  std::int64_t transfer_in(std::span<const ops::CopyPiece> pieces) override {
    const Open open(*this, {});
    for (const ops::CopyPiece& p : pieces) check({p.to});
    return near_->transfer_in(pieces);
  }
  /// Every third poll reports completion, so that callers meet unfinished transfers.
  bool transferred(std::int64_t) override { return ++polls_ % 3 == 0; }

  void reserve_updates(std::int64_t max_items) override { max_items_ = std::max(max_items_, max_items); }
  void update_step(const ops::StepUpdate& update) override {
    if (update.num_items > max_items_ || update.num_values > ops::kMaxUpdateValues)
      throw std::logic_error("a step update is larger than was reserved");
    const Open open(*this, {update.tables.items, update.tables.block_table});
    near_->update_step(update);
  }
  void append(const ops::AppendParams& p) override {
    const Open open(*this, {p.window_rows.data, p.kv[0].data, p.kv[1].data, p.gate[0].data, p.gate[1].data,
                            p.front_end.norm_weight, p.front_end.rope.cos, p.front_end.rope.sin, p.rope.cos, p.rope.sin,
                            p.rope.angles.low, p.rope.angles.high, p.step.tokens, p.step.block_table});
    check_layer(p.layer);
    near_->append(p);
  }
  void flush(const ops::FlushParams& p) override {
    const Open open(*this, {p.rows[0].data, p.rows[1].data, p.valid});
    check_layer(p.layer);
    near_->flush(p);
  }
  void save_boundaries(const ops::BoundaryParams& p) override {
    const Open open(*this, {p.kv[0].data, p.kv[1].data, p.gate[0].data, p.gate[1].data});
    for (std::int32_t i = 0; i < p.count; ++i) check({p.boundaries[i].image});
    near_->save_boundaries(p);
  }
  void gather_chosen(const ops::GatherParams& p) override {
    const Open open(*this, {p.indices.data, p.out.data, p.valid});
    near_->gather_chosen(p);
  }
  void gather_all(const ops::GatherParams& p) override {
    const Open open(*this, {p.out.data, p.lens});
    near_->gather_all(p);
  }
  void gather_window(const ops::GatherParams& p) override {
    const Open open(*this, {p.out.data, p.lens, p.first});
    near_->gather_window(p);
  }
  void index_scores(const ops::IndexParams& p) override {
    const Open open(*this, {p.q.data, p.q_scale.data, p.weights.data, p.scores, p.workspace});
    near_->index_scores(p);
  }
  void select_topk(const ops::IndexParams& p) override {
    const Open open(*this, {p.scores, p.indices, p.slots, p.workspace});
    near_->select_topk(p);
  }
  void index_topk(const ops::IndexParams& p) override {
    const Open open(*this, {p.q.data, p.q_scale.data, p.weights.data, p.indices, p.slots, p.workspace});
    near_->index_topk(p);
  }
  void attend(const ops::AttendParams& p) override {
    const Open open(*this, {p.q.data, p.sink, p.chosen.data, p.out.data, p.lse, p.inverse_rope.cos, p.inverse_rope.sin,
                            p.inverse_rope.angles.low, p.inverse_rope.angles.high});
    near_->attend(p);
  }
  void write_slots(const ops::SlotRowsParams& p) override {
    const Open open(*this, {p.rows.payload.data, p.rows.scale.data, p.slots, p.in.data});
    near_->write_slots(p);
  }
  void gather_slots(const ops::SlotRowsParams& p) override {
    const Open open(*this, {p.rows.payload.data, p.rows.scale.data, p.slots, p.out.data, p.valid});
    near_->gather_slots(p);
  }
  void make_range_tables(const ops::RangeTablesParams& p) override {
    const Open open(*this, {p.tokens, p.block_table, p.page_ids, p.ones, p.ranges.lens, p.ranges.begins, p.ranges.ends});
    near_->make_range_tables(p);
  }
  void place_scores(const ops::PlaceScoresParams& p) override {
    const Open open(*this, {p.scores, p.logits.data, p.ranges.lens, p.ranges.begins, p.ranges.ends});
    near_->place_scores(p);
  }
  SharedEntryOperations* shared_entries() override { return near_->shared_entries() == nullptr ? nullptr : this; }
  void append_owner(const ops::OwnerAppendParams& p) override {
    const ops::AppendParams& rows = p.rows;
    const Open open(*this, {rows.window_rows.data, rows.kv[0].data, rows.gate[0].data, rows.front_end.norm_weight,
                            rows.front_end.rope.cos, rows.front_end.rope.sin, rows.rope.cos, rows.rope.sin,
                            rows.rope.angles.low, rows.rope.angles.high, rows.step.tokens, p.key_weight, p.latents});
    check_layer(rows.layer);
    near_->shared_entries()->append_owner(p);
  }
  void append_keys(const ops::KeyAppendParams& p) override {
    const Open open(*this, {p.keys.data, p.rope.cos, p.rope.sin, p.rope.angles.low, p.rope.angles.high});
    check_layer(p.layer);
    near_->shared_entries()->append_keys(p);
  }
  void index_topk_and_candidates(const ops::IndexParams& p, const ops::CandidateDesc& c) override {
    const Open open(*this, used_by(p, c));
    near_->shared_entries()->index_topk_and_candidates(p, c);
  }
  void select_topk_and_candidates(const ops::IndexParams& p, const ops::CandidateDesc& c) override {
    const Open open(*this, used_by(p, c));
    near_->shared_entries()->select_topk_and_candidates(p, c);
  }
  void index_scores_within(const ops::IndexParams& p, const ops::CandidateDesc& c) override {
    const Open open(*this, used_by(p, c));
    near_->shared_entries()->index_scores_within(p, c);
  }
  void index_topk_within(const ops::IndexParams& p, const ops::CandidateDesc& c) override {
    const Open open(*this, used_by(p, c));
    near_->shared_entries()->index_topk_within(p, c);
  }
  void select_topk_within(const ops::IndexParams& p, const ops::CandidateDesc& c) override {
    const Open open(*this, used_by(p, c));
    near_->shared_entries()->select_topk_within(p, c);
  }
  void attend_draft(const ops::DraftParams& p) override {
    const Open open(*this, {p.rows.data, p.front_end.norm_weight, p.attend.q.data, p.attend.sink, p.attend.out.data,
                            p.attend.lse, p.attend.inverse_rope.angles.low, p.attend.inverse_rope.angles.high});
    near_->shared_entries()->attend_draft(p);
  }
  void save_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                  std::byte* image) override {
    check_staging(layout.bytes);
    const Open open(*this, {});
    for (const ops::LayerDesc& layer : layers) check_layer(layer);
    near_->save_image(layers, layout, slot, image);
  }
  void restore_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                     const std::byte* image) override {
    check_staging(layout.bytes);
    const Open open(*this, {});
    near_->restore_image(layers, layout, slot, image);
  }

  void set_stream(Stream stream) override { near_->set_stream(stream); }
  bool capturing() override { return false; }
  std::int64_t mark() override { return near_->mark(); }
  bool reached(std::int64_t ticket) override { return near_->reached(ticket); }
  void synchronize() override { near_->synchronize(); }

 private:
  static std::vector<const void*> used_by(const ops::IndexParams& p, const ops::CandidateDesc& c) {
    return {p.q.data, p.q_scale.data, p.weights.data, p.scores, p.indices, p.slots, p.workspace, c.blocks, c.counts};
  }
  static void protect(std::byte* memory, std::int64_t bytes, int how) {
    if (mprotect(memory, static_cast<std::size_t>(bytes), how) != 0) throw std::runtime_error("mprotect failed");
  }

  // All pages are accessible while one lives.
  class Open {
   public:
    Open(FarBackend& far, std::initializer_list<const void*> used) : Open(far, std::vector<const void*>(used)) {}
    Open(FarBackend& far, const std::vector<const void*>& used) : far_(far) {
      far_.check(used);
      for (const auto& [memory, bytes] : far_.pages_) protect(memory, bytes, PROT_READ | PROT_WRITE);
    }
    ~Open() {
      for (const auto& [memory, bytes] : far_.pages_) protect(memory, bytes, PROT_NONE);
    }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

   private:
    FarBackend& far_;
  };

  void check(const std::vector<const void*>& used) const {
    for (const void* p : used) {
      if (p == nullptr) continue;
      const std::byte* at = static_cast<const std::byte*>(p);
      auto next = pages_.upper_bound(const_cast<std::byte*>(at));
      if (next == pages_.begin() || at >= std::prev(next)->first + std::prev(next)->second)
        throw std::logic_error("an operation was given an address outside the device's memory");
    }
  }
  void check_layer(const ops::LayerDesc& layer) const {
    for (int k = 0; k < layer.num_kinds; ++k) check({layer.kinds[k].bias, layer.kinds[k].norm_weight});
  }
  void check_staging(std::int64_t bytes) const {
    if (bytes > staging_bytes_) throw std::logic_error("a transfer is larger than the staging that was reserved");
  }

  std::shared_ptr<Backend> near_;
  std::map<std::byte*, std::int64_t> pages_;
  std::int64_t staging_bytes_ = 0, max_items_ = 0, polls_ = 0;
};

}  // namespace kv4::test
