// Sessions in memory, and helpers for the tests of sessions.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "cache/session_format.h"
#include "kv4/error.h"
#include "kv4/session.h"
#include "support/harness.h"

namespace kv4::test {

/// Keeps written records and gives them back in the same order.
struct RecordList : RecordSink, RecordSource {
  std::vector<std::vector<std::byte>> list;
  std::size_t at = 0;

  void write(std::span<const std::byte> record) override { list.emplace_back(record.begin(), record.end()); }
  std::span<const std::byte> next() override {
    return at == list.size() ? std::span<const std::byte>{} : std::span<const std::byte>(list[at++]);
  }
};

inline SessionIdentity identity() { return {.weights_id = "weights-1", .salt = "salt", .tenant = 7}; }

inline RecordList save(KVCacheManager& cache, RequestId request, const SessionIdentity& who = identity()) {
  RecordList records;
  EXPECT_TRUE(save_session(cache, request, who, records));
  return records;
}

inline RequestId restore(KVCacheManager& cache, RecordList records, const SessionIdentity& who = identity()) {
  records.at = 0;
  return restore_session(cache, who, records).value();
}

/// Blocks of 128 tokens of a small model, two draft stages.
inline CacheOptions session_options(const FormatCase& format = format_cases()[0]) {
  CacheOptions o = options_for(format);
  o.draft_layers = 2;
  o.max_rewind_tokens = 3;
  o.num_blocks = 40;
  return o;
}

/// The same bytes in other places.
inline CacheOptions other_places(CacheOptions o) {
  o.arrangement = Arrangement::layer_major;
  o.page_alignment = 576;
  o.max_rewind_tokens = 7;
  o.hca_mode = HcaMode::raw;
  o.num_blocks = 33;
  return o;
}

/// Advances backbone and draft stages to their positions at `length`: stage 1 beside the backbone, stage 2 behind it.
inline void grow(Driver& driver, RequestId request, std::int64_t length) {
  const std::int64_t goals[] = {length, length, length * 2 / 3};
  for (int group = 0; group < driver.cache.schema().num_groups; ++group)
    for (std::int64_t left = goals[group] - driver.cache.length(request, group); left > 0;) {
      const std::int64_t chunk = std::min<std::int64_t>(left, driver.cache.schema().options.max_step_tokens);
      driver.run({{request, 11, static_cast<std::int32_t>(chunk)}}, group);
      left -= chunk;
    }
}

/// Digests need no key, so anyone who can write may forge them: gives the record digests that fit.
inline void encode_again(tier::RecordHeader header, std::vector<std::byte>& record) {
  const auto payload = std::span(record).subspan(static_cast<std::size_t>(header.header_bytes()));
  header.length = static_cast<std::int64_t>(payload.size());
  header.payload_digest = digest128(payload);
  tier::encode_header(header, record);
}

/// Header digests after a change of the payload.
inline void encode_again(std::vector<std::byte>& record) { encode_again(tier::parse_header(record).header, record); }

/// The call throws an Error of this code whose message holds `part`.
template <class F>
void expect_refused(ErrorCode code, const std::string& part, F&& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(std::string(to_string(e.code())), to_string(code)) << e.what();
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << "'" << part << "' is not in: " << e.what();
    return;
  }
  ADD_FAILURE() << "not refused; wanted: " << part;
}

/// State that a refused session must not change.
struct Occupancy {
  int requests;
  std::int32_t available, slots;
  bool operator==(const Occupancy&) const = default;
};
inline Occupancy occupancy(KVCacheManager& cache) {
  return {cache.num_requests(), cache.allocator().num_available(), cache.state_pool().num_free()};
}

}  // namespace kv4::test
