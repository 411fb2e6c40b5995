#include "cache/request_table.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace kv4 {

RequestTable::RequestTable(const CacheSchema& schema)
    : schema_(schema), sequences_(schema.options.max_requests), generations_(schema.options.max_requests) {
  for (Sequence& s : sequences_) s.groups.resize(schema.num_groups);
  free_rows_.reserve(max_requests());
  for (std::int32_t r = max_requests() - 1; r >= 0; --r) free_rows_.push_back(r);
}

std::int32_t RequestTable::row_of(RequestId request) const {
  const std::int32_t row = request < 0 ? -1 : known_row_of(request);
  require(row >= 0 && sequences_[row].id == request, ErrorCode::bad_argument,
          "request {} does not run: it was never admitted, or is released already", request);
  return row;
}

std::int32_t RequestTable::idle_row_of(RequestId request, const char* what) const {
  const std::int32_t row = row_of(request);
  require(sequences_[row].step_id == 0, ErrorCode::bad_state, "request {} is in step {}; commit or abort it before {}",
          request, sequences_[row].step_id, what);
  return row;
}

const GroupProgress& RequestTable::progress(std::int32_t row, int group) const {
  require(group >= 0 && group < schema_.num_groups, ErrorCode::bad_argument,
          "group is {}; this cache has 0 (backbone) to {} (draft stages)", group, schema_.num_groups - 1);
  return sequences_[row].groups[group];
}

GroupProgress& RequestTable::progress(std::int32_t row, int group) {
  return const_cast<GroupProgress&>(std::as_const(*this).progress(row, group));
}

std::vector<std::int64_t> RequestTable::lengths_of(RequestId request) const {
  std::vector<std::int64_t> out;
  for (const GroupProgress& g : sequences_[row_of(request)].groups) out.push_back(g.length);
  return out;
}

std::vector<RequestId> RequestTable::ids() const {
  std::vector<RequestId> out;
  for (const Sequence& s : sequences_)
    if (s.id != kNoRequest) out.push_back(s.id);
  return out;
}

std::int32_t RequestTable::start(std::int32_t slot) {
  const std::int32_t row = free_rows_.back();
  free_rows_.pop_back();
  std::int32_t& generation = generations_[row];
  Sequence& s = sequences_[row];
  s.id = generation * max_requests() + row;
  generation = generation + 1 < std::numeric_limits<std::int32_t>::max() / max_requests() ? generation + 1 : 0;
  s.slot = slot;
  s.step_id = 0;
  std::fill(s.groups.begin(), s.groups.end(), GroupProgress{});
  s.chain = {};
  return row;
}

void RequestTable::end(std::int32_t row) {
  sequences_[row].id = kNoRequest;
  sequences_[row].slot = -1;
  free_rows_.push_back(row);
}

}  // namespace kv4
