#include "tier/tier_chain.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace kv4::tier {

struct TierChain::Lookup {
  bool only_exists = false;
  Content content = Content::changing;
  Deadline deadline;
  std::vector<ReadRequest> requests;
  std::vector<ReadResult> results;
  std::size_t noted = 0;           // requests that reading_ counts
  std::size_t tier = 0;            // the tier that is asked
  std::vector<std::size_t> asked;  // the requests that it is asked for
  std::optional<TierQueue::ReadTicket> ticket;
  bool ended = false;  // all requests are answered, no tier is left, or the caller gave up
};

TierChain::TierChain(std::vector<std::unique_ptr<TierQueue>> tiers, std::shared_ptr<Clock> clock)
    : tiers_(std::move(tiers)), promoted_(tiers_.size()), clock_(std::move(clock)) {
  require(!tiers_.empty() && tiers_.size() < 32, ErrorCode::bad_argument, "a chain of {} tiers; it can have 1 to 31",
          tiers_.size());
}

// --- writes

int TierChain::put(const RecordId& id, std::span<const std::byte> payload, Content content) {
  const SharedBytes copy = buffer(payload.size());  // all tiers share it
  if (copy && !payload.empty()) std::memcpy(copy.data.get(), payload.data(), payload.size());
  if (copy) return put(id, copy, content);
  note_write(id);
  for (const auto& tier : tiers_) tier->refuse(id, content);
  return 0;
}

int TierChain::put(const RecordId& id, const SharedBytes& payload, Content content) {
  return std::popcount(offer(id, payload, content, all()));
}

SharedBytes TierChain::buffer(std::size_t size) const {
  SharedBytes bytes;
  for (std::size_t i = 0; !bytes && i < tiers_.size(); ++i) bytes = tiers_[i]->buffer(size);
  return bytes;
}

std::uint32_t TierChain::offer(const RecordId& id, const SharedBytes& payload, Content content, std::uint32_t tiers,
                               const WriteDetails& details) {
  note_write(id);
  std::uint32_t taken = 0;
  for (std::size_t i = 0; i < tiers_.size(); ++i)
    if ((tiers >> i & 1) != 0 && tiers_[i]->put(id, payload, content, details)) taken |= std::uint32_t{1} << i;
  return taken;
}

std::uint32_t TierChain::with_room(std::int64_t bytes) const {
  std::uint32_t tiers = 0;
  for (std::size_t i = 0; i < tiers_.size(); ++i)
    if (tiers_[i]->has_room(bytes)) tiers |= std::uint32_t{1} << i;
  return tiers;
}

int TierChain::remove(const RecordId& id) { return std::popcount(withdraw(id, 0)); }

std::uint32_t TierChain::withdraw(const RecordId& id, std::uint64_t tag) {
  note_write(id);
  std::uint32_t taken = 0;
  for (std::size_t i = 0; i < tiers_.size(); ++i)
    if (tiers_[i]->remove(id, tag)) taken |= std::uint32_t{1} << i;
  return taken;
}

void TierChain::look_up(std::span<ExistsRequest> requests) const {
  if (tiers_.size() == 1) return (void)tiers_.front()->look_up(requests);
  std::vector<ExistsRequest> asked(requests.begin(), requests.end());
  for (ExistsRequest& request : requests) {
    request.bytes = -1;
    request.answered = true;  // so far no tier has it
  }
  for (const auto& tier : tiers_) {
    (void)tier->look_up(asked);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (requests[i].bytes >= 0) continue;
      const bool there = asked[i].answered && asked[i].bytes >= 0;
      if (there)
        requests[i] = {requests[i].id, asked[i].bytes, true};
      else
        requests[i].answered = requests[i].answered && asked[i].answered;
      asked[i] = {asked[i].id};
    }
  }
}

void TierChain::note_write(const RecordId& id) {
  if (const auto found = reading_.find(id); found != reading_.end()) found->second.written = true;
}

// --- lookups

TierChain::Ticket TierChain::get(std::vector<ReadRequest> requests, Content content, Deadline deadline) {
  auto lookup = std::make_shared<Lookup>();
  lookup->content = content;
  lookup->deadline = deadline;
  lookup->requests = std::move(requests);
  return start(std::move(lookup));
}

TierChain::Ticket TierChain::exists(std::span<const RecordId> ids, Deadline deadline) {
  auto lookup = std::make_shared<Lookup>();
  lookup->only_exists = true;
  lookup->deadline = deadline;
  for (const RecordId& id : ids) lookup->requests.push_back({id, 0, {}});
  return start(std::move(lookup));
}

TierChain::Ticket TierChain::start(std::shared_ptr<Lookup> lookup) {
  lookup->results.resize(lookup->requests.size());
  lookup->asked.reserve(lookup->requests.size());
  if (lookups_.size() >= sweep_at_) {
    std::erase_if(lookups_, [](const std::weak_ptr<Lookup>& l) { return l.expired() || l.lock()->ended; });
    sweep_at_ = std::max<std::size_t>(64, 2 * lookups_.size());
  }
  lookups_.push_back(lookup);
  Ticket ticket(*this, std::move(lookup));  // from here on its destructor ends the lookup
  Lookup& begun = *ticket.lookup_;
  for (; begun.noted < begun.requests.size(); ++begun.noted) ++reading_[begun.requests[begun.noted].id].count;
  ask(begun);
  advance(begun);
  return ticket;
}

/// Where memory is refused, this tier and those below it are misses.
void TierChain::ask(Lookup& lookup) try {
  lookup.asked.clear();
  for (std::size_t i = 0; i < lookup.requests.size(); ++i) {
    const GetStatus status = lookup.results[i].status;
    // Content::of_key has one length. A record of another length is not the cache's own, and hides nothing below.
    const bool answered =
        status == GetStatus::found || (status == GetStatus::too_small && lookup.content == Content::changing);
    if (!answered) lookup.asked.push_back(i);
  }
  if (lookup.asked.empty() || lookup.tier == tiers_.size() || clock_->now() >= lookup.deadline) return end(lookup);
  TierQueue& tier = *tiers_[lookup.tier];
  if (lookup.only_exists) {
    std::vector<RecordId> ids;
    for (const std::size_t i : lookup.asked) ids.push_back(lookup.requests[i].id);
    lookup.ticket.emplace(tier.exists(ids, lookup.deadline));
  } else {
    std::vector<ReadRequest> requests;
    for (const std::size_t i : lookup.asked) requests.push_back(lookup.requests[i]);
    lookup.ticket.emplace(tier.get(std::move(requests), lookup.deadline));
  }
} catch (const std::bad_alloc&) {
  end(lookup);
}

void TierChain::advance(Lookup& lookup) {
  while (!lookup.ended && lookup.ticket->done()) {
    take_answers(lookup);
    ++lookup.tier;
    ask(lookup);
  }
}

void TierChain::take_answers(Lookup& lookup) {
  std::vector<ReadResult> results = lookup.ticket->take();
  lookup.ticket.reset();
  for (std::size_t i = 0; i < results.size(); ++i) {
    const std::size_t request = lookup.asked[i];
    lookup.results[request] = std::move(results[i]);
    if (lookup.results[request].status == GetStatus::found && !lookup.only_exists) promote(lookup, request);
  }
}

/// Where memory is refused, the tiers above do not get the record.
void TierChain::promote(const Lookup& lookup, std::size_t request) try {
  const RecordId& id = lookup.requests[request].id;
  if (reading_.at(id).written || lookup.tier == 0) return;
  SharedBytes payload = lookup.results[request].payload;
  const ReadRequest& asked = lookup.requests[request];
  WriteDetails details;
  if (asked.label) {
    const ChunkCoding& coding = lookup.results[request].coding;
    details.label = std::make_shared<ChunkLabel>(make_label(asked.label->key_span(), coding));
  }
  if (asked.copy_promoted) {
    const SharedBytes copy = buffer(payload.size);
    if (!copy) return;
    if (payload.size > 0) std::memcpy(copy.data.get(), payload.data.get(), payload.size);
    payload = copy;
  }
  for (std::size_t tier = 0; tier < lookup.tier; ++tier)
    promoted_[tier] += tiers_[tier]->put(id, payload, lookup.content, details);
} catch (const std::bad_alloc&) {
}

void TierChain::end(Lookup& lookup) {
  if (std::exchange(lookup.ended, true)) return;
  lookup.ticket.reset();
  for (const ReadRequest& request : std::span(lookup.requests).first(lookup.noted))
    if (const auto found = reading_.find(request.id); --found->second.count == 0) reading_.erase(found);
}

bool TierChain::Ticket::done() const {
  if (lookup_) chain_->advance(*lookup_);
  return !lookup_ || lookup_->ended;
}

bool TierChain::Ticket::wait(Deadline until) const {
  while (!done()) {
    if (chain_->clock_->now() >= until) return false;
    (void)lookup_->ticket->wait(until);
  }
  return true;
}

std::vector<ReadResult> TierChain::Ticket::take() {
  if (!lookup_) return {};
  (void)done();
  chain_->end(*lookup_);
  return std::move(std::exchange(lookup_, nullptr)->results);
}

void TierChain::Ticket::cancel() {
  if (lookup_) chain_->end(*std::exchange(lookup_, nullptr));
}

TierChain::Ticket::~Ticket() { cancel(); }

// --- all tiers

std::vector<TierQueue::FlushTicket> TierChain::start_flush(Deadline deadline) {
  std::vector<TierQueue::FlushTicket> tickets;
  tickets.reserve(size());
  for (const auto& tier : tiers_) tickets.push_back(tier->flush(deadline));
  return tickets;
}

std::vector<FlushStatus> TierChain::flush(Deadline deadline) {
  std::vector<FlushStatus> statuses;
  statuses.reserve(size());
  const std::vector<TierQueue::FlushTicket> tickets = start_flush(deadline);
  for (const TierQueue::FlushTicket& ticket : tickets) {
    (void)ticket.wait(deadline);
    statuses.push_back(ticket.status());
  }
  return statuses;
}

std::vector<FlushStatus> TierChain::close(Deadline deadline) {
  std::vector<FlushStatus> statuses = flush(deadline);  // all at the same time; the closes then take no time
  for (const auto& tier : tiers_) (void)tier->close(deadline);
  return statuses;
}

std::vector<std::vector<WriteResult>> TierChain::poll() {
  for (const std::weak_ptr<Lookup>& weak : lookups_)
    if (const std::shared_ptr<Lookup> lookup = weak.lock()) advance(*lookup);
  std::erase_if(lookups_, [](const std::weak_ptr<Lookup>& l) { return l.expired() || l.lock()->ended; });
  return drain();
}

// A tier keeps its results where there is no memory for them.
std::vector<std::vector<WriteResult>> TierChain::drain() {
  std::vector<std::vector<WriteResult>> results(size());
  try {
    for (std::size_t i = 0; i < size(); ++i) results[i] = tiers_[i]->drain();
  } catch (const std::bad_alloc&) {
  }
  return results;
}

std::vector<ChainStats> TierChain::stats() {
  std::vector<ChainStats> stats;
  for (std::size_t i = 0; i < tiers_.size(); ++i)
    stats.push_back({tiers_[i]->name(), tiers_[i]->stats(), promoted_[i]});
  return stats;
}

}  // namespace kv4::tier
