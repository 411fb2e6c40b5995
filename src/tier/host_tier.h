// Records in host memory: a tier that is sized at the start, never grows, and drops the least recently used records.
//
// Memory is cut into pages. A record (header and payload) is a chain of pages, so that any mix of lengths fits without
// gaps between records. A record that fits a page can be given out without a copy (GetRequest::view); such a view keeps
// the page and the tier alive. The lock is held to find and to link records, not while bytes are copied and checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "kv4/host_memory.h"
#include "kv4/tier.h"
#include "tier/clock.h"
#include "tier/requests.h"

namespace kv4::tier {

struct HostTierOptions {
  std::uint64_t layout_id = 0;
  std::int64_t capacity_bytes = std::int64_t{1} << 30;  // a multiple of page_bytes
  std::int64_t page_bytes = 16 << 10;                   // at least a record's header
  int threads = 1;                                      // in get() at a time
  std::shared_ptr<Backend> backend = {};                // memory suits its transfers (pinned for a GPU); null: ordinary
};

/// Gives views where a shared_ptr owns the tier, else copies.
class HostTier final : public Tier, public std::enable_shared_from_this<HostTier> {
 public:
  /// Throws Error: bad_argument, out_of_memory.
  HostTier(const HostTierOptions& options, std::shared_ptr<Clock> clock);

  const char* name() const override { return "host"; }
  int read_threads() const override { return options_.threads; }
  int read_batch() const override { return 2; }
  void put(std::span<PutRequest> requests, Deadline deadline) override;
  void get(std::span<GetRequest> requests, Deadline deadline) override;
  void exists(std::span<ExistsRequest> requests, Deadline deadline) override;
  bool look_up(std::span<ExistsRequest> requests) const override;
  void remove(std::span<RemoveRequest> requests, Deadline deadline) override;
  FlushStatus flush(Deadline) override { return FlushStatus::kept; }
  TierStats stats() override;

  std::int64_t used_bytes() const;  // in whole pages
  /// The pages of a stored record, in the order of its bytes: for tests that damage it while no other call runs.
  std::vector<std::span<std::byte>> pages_of(const RecordId& id);

 private:
  static constexpr std::uint32_t kNoPage = 0xffffffff;
  struct Record {
    RecordId id;
    std::int64_t length = 0;
    std::uint32_t first_page = kNoPage;
    int readers = 0;  // views included; its pages stay while there are any
  };
  using Records = std::list<Record>;

  PutStatus put_one(const PutRequest& request);
  GetStatus get_one(GetRequest& request);
  /// `coding`: out, where it is sound.
  bool is_sound(const Record& record, std::span<const std::byte> header, std::span<const std::byte> payload,
                ChunkCoding& coding) const;
  void end_reading(Records::iterator record, bool sound);
  std::int64_t pages_for(std::int64_t length) const;
  std::byte* page(std::uint32_t index) const { return memory_.bytes().data() + index * options_.page_bytes; }
  // Under the lock.
  bool make_room(std::int64_t pages);
  std::uint32_t take_pages(std::int64_t count);
  void give_pages(const Record& record);
  void drop(Records::iterator record);
  // Without the lock.
  void write(std::uint32_t page_index, std::int64_t offset, std::span<const std::byte> from);
  void read(std::uint32_t page_index, std::int64_t offset, std::span<std::byte> to) const;
  /// Calls `piece(bytes, done)` for `count` bytes of a chain from `offset` on.
  template <class Piece>
  void for_pieces(std::uint32_t page_index, std::int64_t offset, std::int64_t count, Piece&& piece) const;

  // Invariants:
  //   1. Every page is in exactly one chain: a record's, that of a put under way, or the free chain. next_page_ links
  //      them. Chains change only under the lock; a record's chain does not change.
  //   2. index_ and records_ have the same records; the front of records_ was used last. unlinked_ has the records that
  //      were dropped while they were read.
  HostTierOptions options_;
  std::shared_ptr<Clock> clock_;
  HostMemory memory_;                     // [num_pages, page_bytes]
  std::vector<std::uint32_t> next_page_;  // [num_pages]
  mutable std::mutex mutex_;              // guards all below, and changes of next_page_
  std::uint32_t free_page_ = kNoPage;
  std::int64_t free_pages_ = 0;
  Records records_, unlinked_;
  std::unordered_map<RecordId, Records::iterator, RecordIdHash> index_;
  std::uint64_t next_sequence_ = 1;
  TierStats counts_;
};

}  // namespace kv4::tier
