#include "cache/step_tables.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace kv4 {

StepTables::StepTables(const CacheSchema& schema, std::shared_ptr<Backend> backend)
    : backend_(std::move(backend)),
      layout_(table_layout(schema)),
      tables_(backend_, 4 * layout_.total),
      scratch_(backend_, scratch_layout(schema).bytes),
      has_replays_(schema.options.prefix.enabled) {
  const std::size_t requests = schema.options.max_requests;
  blocks_.resize(requests * schema.blocks_per_request, -1);
  changed_.resize(requests);
  changed_rows_.reserve(requests);
  ranges_.reserve(requests);
  values_.reserve(ops::kMaxUpdateValues);

  backend_->reserve_updates(layout_.max_items);
  std::int32_t* base = reinterpret_cast<std::int32_t*>(tables_.data());
  desc_.items = reinterpret_cast<ops::StepRecord*>(base + layout_.items);
  desc_.tokens = reinterpret_cast<ops::StepRecord*>(base + layout_.tokens);
  desc_.item_rows = base + layout_.item_rows;
  desc_.item_slots = base + layout_.item_slots;
  desc_.csa_lens = base + layout_.csa_lens;
  desc_.hca_lens = base + layout_.hca_lens;
  desc_.ring_heads = base + layout_.ring_heads;
  desc_.ring_positions = base + layout_.ring_positions;
  desc_.window_begins = base + layout_.window_begins;
  desc_.block_table = base + layout_.block_table;
  if (layout_.narrowed_count > 0) {
    const std::int64_t max_tokens = schema.options.max_step_tokens;
    narrowed_.resize(layout_.narrowed_count);
    decoder_items_ = reinterpret_cast<const ops::StepRecord*>(base + layout_.narrowed);
    decoder_tokens_ = decoder_items_ + layout_.max_items;
    query_tokens_ = decoder_tokens_ + max_tokens;
    decoder_begins_ = reinterpret_cast<const std::int32_t*>(query_tokens_ + max_tokens);
    backend_->reserve_staging(4 * layout_.narrowed_count);
  }
  desc_.blocks_per_request = static_cast<std::int32_t>(schema.blocks_per_request);
  desc_.block_tokens = schema.block_tokens;
  desc_.ring_rows = schema.config.window + schema.options.max_rewind_tokens;
  const bool shares = schema.config.shares_entries();  // the two ratios of V4.1
  desc_.csa_ratio = shares ? 2 : schema.config.csa_ratio;
  desc_.hca_ratio = shares ? 1 : schema.config.hca_ratio;
  backend_->fill(tables_.data() + 4 * layout_.block_table, 0xFF, 4 * (layout_.total - layout_.block_table));  // -1
}

std::int64_t StepTables::memory_bytes() const {
  return tables_.bytes() + scratch_.bytes() + static_cast<std::int64_t>(blocks_.size() * sizeof(BlockId));
}

void StepTables::set_block(std::int32_t row, std::int64_t index, BlockId block) {
  blocks_[at(row, index)] = block;
  Changed& c = changed_[row];
  const std::int32_t i = static_cast<std::int32_t>(index);
  if (c.begin == c.end) {
    changed_rows_.push_back(row);
    c = {i, i + 1};
  } else {
    c = {std::min(c.begin, i), std::max(c.end, i + 1)};
  }
}

void StepTables::send(std::span<const ops::StepRecord> items, std::span<const std::int32_t> window_begins,
                      std::int32_t num_tokens) {
  ops::StepUpdate update;
  update.tables = desc_;
  update.num_items = static_cast<std::int32_t>(items.size());
  update.num_tokens = num_tokens;
  update.num_ranges = static_cast<std::int32_t>(ranges_.size());
  update.num_values = static_cast<std::int32_t>(values_.size());
  update.items = items.data();
  update.window_begins = window_begins.data();
  update.ranges = ranges_.data();
  update.block_ids = values_.data();
  backend_->update_step(update);
  ranges_.clear();
  values_.clear();
}

void StepTables::update(std::span<const ops::StepRecord> items, std::span<const std::int32_t> window_begins,
                        std::int32_t num_tokens) {
  for (const std::int32_t row : changed_rows_) {
    Changed& c = changed_[row];
    while (c.begin < c.end) {
      const std::int32_t room = ops::kMaxUpdateValues - static_cast<std::int32_t>(values_.size());
      const std::int32_t count = std::min(c.end - c.begin, room);
      if (count == 0) {  // too many for one transfer: a long context was forked, imported or released
        send({}, {}, 0);
        continue;
      }
      ranges_.push_back({row, c.begin, count, static_cast<std::int32_t>(values_.size())});
      const BlockId* first = &blocks_[at(row, c.begin)];
      values_.insert(values_.end(), first, first + count);
      c.begin += count;
    }
    c = {};
  }
  changed_rows_.clear();
  send(items, window_begins, num_tokens);
}

// The decoder makes no entries, so its records need no block.
void StepTables::update_narrowed(const Narrowed& step) {
  const auto host_of = [&](const auto* device) {  // the same place in the host's copy
    return narrowed_.data() + (reinterpret_cast<const std::int32_t*>(device) -
                               reinterpret_cast<const std::int32_t*>(decoder_items_));
  };
  const auto put = [&](const ops::StepRecord* to, std::int64_t index, const ops::StepRecord& record) {
    std::memcpy(host_of(to) + index * static_cast<std::int64_t>(sizeof(record) / 4), &record, sizeof(record));
  };
  for (std::int64_t i = 0; i < std::ssize(step.items); ++i) {
    const ops::StepRecord &item = step.items[i], &narrow = step.decoder_items[i];
    put(decoder_items_, i, narrow);
    if (!narrow.padded()) host_of(decoder_begins_)[narrow.row] = step.decoder_begins[i];
    for (std::int32_t token = narrow.first_token; token < narrow.first_token + narrow.count; ++token) {
      ops::StepRecord record = narrow, query = item;
      record.position = query.position = narrow.length + token - narrow.first_token;
      record.block = query.block = -1;
      put(decoder_tokens_, token, record);
      put(query_tokens_, token, query);
    }
  }
  const ops::CopyPiece all{reinterpret_cast<const std::uint8_t*>(narrowed_.data()),
                           const_cast<std::uint8_t*>(reinterpret_cast<const std::uint8_t*>(decoder_items_)),
                           4 * layout_.narrowed_count};
  backend_->write_pieces(std::span(&all, 1), std::as_bytes(std::span(narrowed_)));
}

ops::StepDesc StepTables::describe_decoder(const Step& step) const {
  ops::StepDesc out = describe(step);
  out.num_tokens = step.num_decoder_tokens;
  out.items = decoder_items_;
  out.tokens = decoder_tokens_;
  out.window_begins = decoder_begins_;
  return out;
}

ops::StepDesc StepTables::describe_queries(const Step& step) const {
  ops::StepDesc out = describe(step);
  out.num_tokens = step.num_decoder_tokens;
  out.tokens = query_tokens_;
  return out;
}

ops::StepDesc StepTables::describe(const Step& step) const {
  ops::StepDesc out;
  out.num_tokens = step.num_tokens;
  out.num_items = step.num_items;
  out.block_tokens = desc_.block_tokens;
  out.blocks_per_request = desc_.blocks_per_request;
  out.tokens = desc_.tokens;
  out.items = desc_.items;
  out.block_table = desc_.block_table;
  out.window_begins = has_replays_ ? desc_.window_begins : nullptr;
  return out;
}

}  // namespace kv4
