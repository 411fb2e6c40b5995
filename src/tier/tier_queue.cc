#include "tier/tier_queue.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/undo.h"
#include "tier/stale_ids.h"

namespace kv4::tier {
namespace {

constexpr int kMaxFlushes = 64;
constexpr std::int64_t kLeastPerReader = 8;  // requests per call, where so many wait

}  // namespace

struct TierQueue::ReadJob {
  struct Waiting {
    ReadRequest request;
    std::size_t result = 0;
  };
  ReadJob(bool only_exists_in, Deadline deadline_in, std::size_t requests)
      : only_exists(only_exists_in), deadline(deadline_in), results(requests) {
    waiting.reserve(requests);
    asked.reserve(requests);
    known.reserve(requests);
  }

  bool only_exists = false;
  Deadline deadline;
  std::vector<std::size_t> asked;    // requests that the queue cannot answer at once
  std::vector<ExistsRequest> known;  // the tier's answers to them from memory
  std::vector<Waiting> waiting;      // requests that a worker has to ask for
  std::size_t next = 0;              // the first of them that no worker has taken
  std::vector<ReadResult> results;
  std::size_t unanswered = 0;
  bool ended = false;  // the remaining answers are dropped
};

struct TierQueue::FlushJob {
  Deadline deadline;
  FlushStatus status = FlushStatus::failed;
  bool done = false;
};

// Everything that the workers touch. It outlives the queue where a worker is stuck.
struct TierQueue::Core {
  struct Write {
    RecordId id;
    std::uint64_t number = 0;
    bool remove = false;
    Content content = Content::changing;
    SharedBytes payload;
    std::shared_ptr<FlushJob> flush;  // set: a flush; the other fields are unused
    WriteDetails details = {};
  };
  /// The newest accepted write of an id that is not done.
  struct Pending {
    std::uint64_t number = 0;
    bool remove = false;
    SharedBytes payload;
    std::shared_ptr<const ChunkLabel> label;
    bool outdated = false;  // a later one was refused
  };
  struct WaitingRead {
    std::shared_ptr<ReadJob> job;
    std::size_t index = 0;  // in job->waiting
  };
  /// The state of one worker. The memory of its batch is reserved at the start: a worker allocates nothing.
  struct Lane {
    bool calling = false;  // in a call of the tier
    Deadline call_deadline{};
    bool exited = false;
    std::vector<Write> writes;  // this and the next two: for the writer
    std::vector<PutRequest> puts;
    std::vector<RemoveRequest> removes;
    std::vector<WaitingRead> places;  // this and the next three: for a reader
    std::vector<GetRequest> gets;
    std::vector<ExistsRequest> exists;
    std::vector<ReadResult> results;
  };

  Core(std::shared_ptr<Tier> tier_in, const TierQueueOptions& options_in, std::shared_ptr<Clock> clock_in)
      : name(tier_in->name()),
        tier(std::move(tier_in)),
        options(options_in),
        clock(std::move(clock_in)),
        write_pool(BytesPool::make(options.max_write_bytes)),
        read_pool(BytesPool::make(options.max_read_bytes)),
        read_batch(tier->read_batch() > 0 ? tier->read_batch() : options.batch_requests),
        lanes(1 + std::max(1, tier->read_threads())),
        breaker(options.breaker),
        stale(options.max_stale_ids) {
    const std::size_t most = options.batch_requests;
    lanes.front().writes.reserve(most);
    lanes.front().puts.reserve(most);
    lanes.front().removes.reserve(most);
    for (Lane& lane : std::span(lanes).subspan(1)) {
      lane.places.reserve(most);
      lane.gets.reserve(most);
      lane.exists.reserve(most);
      lane.results.reserve(most);
    }
  }

  const char* const name;
  std::shared_ptr<Tier> tier;  // for the workers; null when all have ended
  const TierQueueOptions options;
  const std::shared_ptr<Clock> clock;
  const std::shared_ptr<BytesPool> write_pool, read_pool;
  const std::int64_t read_batch;
  const pid_t owner = ::getpid();

  /// A forked child has no workers, and the mutex may be locked for ever there: no call may lock it.
  bool forked() const { return owner != ::getpid(); }

  std::mutex mutex;  // guards all below
  std::condition_variable answered, reads_there, writes_there;
  std::vector<Lane> lanes;  // the writer's first, then the readers'
  std::deque<std::shared_ptr<ReadJob>> reads;
  std::deque<Write> writes;
  std::unordered_map<RecordId, Pending, RecordIdHash> pending;
  std::vector<WriteResult> results;
  std::int64_t open_reads = 0;     // accepted, not answered
  std::int64_t waiting_reads = 0;  // of these, not taken by a reader
  std::int64_t open_writes = 0;    // accepted, not done
  std::int64_t open_write_bytes = 0;
  int open_flushes = 0;
  std::int64_t failed_writes = 0;  // since the last flush
  std::uint64_t next_number = 1;
  CircuitBreaker breaker;
  StaleIds stale;
  QueueStats counts;
  TierStats tier_stats;
  TierFailure tier_failure;  // the tier's last one, set when the tier ends
  bool stats_wanted = false, stopping = false;

  // Under the lock.
  bool accepts(Deadline now);
  bool answer_at_once(const ReadRequest& request, bool only_exists, ReadResult& result);
  bool accept(Write write) noexcept;
  /// After it, finish() of so many writes allocates nothing.
  void reserve_results(std::int64_t more);
  void refuse(const Write& write);
  bool has_room(std::int64_t write_bytes) const {
    return open_writes + static_cast<std::int64_t>(results.size()) < options.max_writes &&
           open_write_bytes + write_bytes <= options.max_write_bytes;
  }
  bool has_room(const ReadJob& job) const {
    return open_reads + static_cast<std::int64_t>(job.waiting.size()) < options.max_reads;
  }
  static bool exited(std::span<const Lane> some) {
    return std::all_of(some.begin(), some.end(), [](const Lane& lane) { return lane.exited; });
  }
  std::span<const Lane> readers() const { return std::span(lanes).subspan(1); }
  bool is_done(const ReadJob& job) {
    return job.unanswered == 0 || job.ended || exited(readers()) || clock->now() >= job.deadline;
  }
  /// Answers the requests that it can at once; the others are `waiting` then.
  void take_in(const std::shared_ptr<ReadJob>& in, std::vector<ReadRequest> requests);
  /// Passes the job that was taken in last to the readers.
  void submit(const std::shared_ptr<ReadJob>& job);
  void end(const std::shared_ptr<ReadJob>& job);
  void count(const ReadResult& result, bool only_exists);

  // For the workers.
  void read(Lane& lane);
  void write(Lane& lane);
  void leave(std::unique_lock<std::mutex>& lock, Lane& lane);
  void do_reads(std::unique_lock<std::mutex>& lock, Lane& lane);
  void do_writes(std::unique_lock<std::mutex>& lock, Lane& lane);
  void do_flush(std::unique_lock<std::mutex>& lock, Lane& lane);
  void refresh_stats(std::unique_lock<std::mutex>& lock);
  void take_reads(Lane& lane, Deadline& deadline);
  void take_writes(Lane& lane);
  void finish(const Write& write, PutStatus status);
  /// Unlocks, calls the tier, and reports to the breaker. `call()` returns whether the tier answered. A call that
  /// throws, for want of memory or against its promise, has failed. False: the tier was not called.
  template <class Call>
  bool call_tier(std::unique_lock<std::mutex>& lock, Lane& lane, Deadline deadline, Call&& call,
                 TimeHistogram* times = nullptr);
  void report_breaker(CircuitBreaker::State state, bool slow);
  void tell_answered() {
    answered.notify_all();
    if (options.on_answer) options.on_answer();
  }
};

// --- callers

/// Whether new work may reach the tier: no call is stuck, and the breaker allows one.
bool TierQueue::Core::accepts(Deadline now) {
  for (const Lane& lane : lanes) {
    if (!lane.calling || now - options.breaker.slow_after <= lane.call_deadline) continue;
    const bool was_open = breaker.state() == CircuitBreaker::State::open;
    breaker.open(now);
    if (!was_open) report_breaker(CircuitBreaker::State::open, true);
    return false;
  }
  return !stopping && breaker.allows(now);
}

bool TierQueue::Core::answer_at_once(const ReadRequest& request, bool only_exists, ReadResult& result) {
  const auto found = pending.find(request.id);
  if (found == pending.end()) {
    const bool unknown = stale.has(request.id);
    if (unknown) result.status = GetStatus::missing;
    return unknown;
  }
  const Pending& write = found->second;
  const bool gone = write.remove || write.outdated;
  result.status = gone ? GetStatus::missing : GetStatus::found;
  if (gone) return true;
  result.bytes = static_cast<std::int64_t>(write.payload.size);
  if (only_exists) return true;
  if (write.label) result.coding = write.label->coding;
  const std::int64_t room = request.to ? static_cast<std::int64_t>(request.to.size) : request.max_bytes;
  if (room < result.bytes) {
    result.status = GetStatus::too_small;
  } else if (request.to) {
    if (result.bytes > 0) std::memcpy(request.to.data.get(), write.payload.data.get(), write.payload.size);
    result.payload = {request.to.data, write.payload.size};
  } else {
    result.payload = write.payload;
  }
  return true;
}

/// A write without memory for it is refused.
bool TierQueue::Core::accept(Write write) noexcept {
  const auto bytes = static_cast<std::int64_t>(write.payload.size);
  if (!has_room(bytes) || !accepts(clock->now())) {
    refuse(write);
    return false;
  }
  write.number = next_number;
  try {
    reserve_results(open_writes + 1);
    writes.push_back(write);
    Undo take_back([&] { writes.pop_back(); });
    pending.insert_or_assign(write.id, Pending{write.number, write.remove, write.payload, write.details.label, false});
    take_back.keep();
  } catch (const std::bad_alloc&) {
    refuse(write);
    return false;
  }
  ++next_number;
  ++open_writes;
  open_write_bytes += bytes;
  ++(write.remove ? counts.removes : counts.puts);
  writes_there.notify_one();
  return true;
}

void TierQueue::Core::reserve_results(std::int64_t more) {
  const std::size_t most = results.size() + more;
  if (results.capacity() < most) results.reserve(2 * most);
}

void TierQueue::Core::refuse(const Write& write) {
  counts.refused_puts += write.remove ? 0 : 1;
  if (write.content == Content::of_key) return;
  stale.add(write.id);
  if (const auto found = pending.find(write.id); found != pending.end()) found->second.outdated = true;
}

void TierQueue::Core::count(const ReadResult& result, bool only_exists) {
  if (only_exists) return;
  switch (result.status) {
    case GetStatus::found:
      ++counts.hits;
      counts.hit_bytes += result.bytes;
      break;
    case GetStatus::failed: ++counts.failed_gets; break;
    case GetStatus::damaged: ++counts.damaged; [[fallthrough]];
    default: ++counts.misses;
  }
}

void TierQueue::Core::take_in(const std::shared_ptr<ReadJob>& in, std::vector<ReadRequest> requests) {
  const bool now = accepts(clock->now());
  reads.push_back(in);  // first, because nothing after it may need memory
  ReadJob& job = *in;
  std::vector<ExistsRequest>& known = job.known;
  std::vector<std::size_t>& asked = job.asked;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (answer_at_once(requests[i], job.only_exists, job.results[i]) || !now) {
      count(job.results[i], job.only_exists);
      continue;
    }
    asked.push_back(i);
    known.push_back({requests[i].id});
  }
  bool all_known = false;
  try {
    all_known = !asked.empty() && tier->look_up(known);
  } catch (...) {  // the workers ask
  }
  for (std::size_t i = 0; i < asked.size(); ++i) {
    ReadResult& result = job.results[asked[i]];
    const bool there = known[i].bytes >= 0;
    if (all_known && (job.only_exists || !there)) {
      result.status = there ? GetStatus::found : GetStatus::missing;
      result.bytes = there ? known[i].bytes : 0;
    } else if (has_room(job)) {
      job.waiting.push_back({std::move(requests[asked[i]]), asked[i]});
      continue;
    }
    count(result, job.only_exists);
  }
}

void TierQueue::Core::submit(const std::shared_ptr<ReadJob>& job) {
  job->unanswered = job->waiting.size();
  if (job->waiting.empty()) {
    reads.pop_back();
    return;
  }
  open_reads += static_cast<std::int64_t>(job->waiting.size());
  waiting_reads += static_cast<std::int64_t>(job->waiting.size());
  std::ssize(job->waiting) > kLeastPerReader ? reads_there.notify_all() : reads_there.notify_one();
}

void TierQueue::Core::end(const std::shared_ptr<ReadJob>& job) {
  job->ended = true;
  if (const auto found = std::find(reads.begin(), reads.end(), job); found != reads.end()) {
    const auto left = static_cast<std::int64_t>(job->waiting.size() - job->next);
    open_reads -= left;
    waiting_reads -= left;
    reads.erase(found);
  }
}

// --- the workers

void TierQueue::Core::read(Lane& lane) {
  std::unique_lock lock(mutex);
  while (!stopping) {
    if (reads.empty()) {
      reads_there.wait(lock);
      continue;
    }
    do_reads(lock, lane);
    tell_answered();
  }
  leave(lock, lane);
}

void TierQueue::Core::write(Lane& lane) {
  std::unique_lock lock(mutex);
  while (!stopping) {
    if (!writes.empty()) {
      if (writes.front().flush)
        do_flush(lock, lane);
      else
        do_writes(lock, lane);
    } else if (stats_wanted) {
      refresh_stats(lock);
    } else {
      writes_there.wait(lock);
      continue;
    }
    tell_answered();
  }
  leave(lock, lane);
}

void TierQueue::Core::leave(std::unique_lock<std::mutex>& lock, Lane& lane) {
  if (std::count_if(lanes.begin(), lanes.end(), [](const Lane& l) { return !l.exited; }) == 1) {
    // The last worker ends the tier, not the queue's destructor: closing a store can take as long as any call.
    try {
      tier_failure = tier->failure();
    } catch (...) {  // for want of memory: the last failure stays unknown
    }
    std::shared_ptr<Tier> last = std::move(tier);
    lock.unlock();
    last.reset();
    lock.lock();
  }
  lane.exited = true;
  answered.notify_all();
}

template <class Call>
bool TierQueue::Core::call_tier(std::unique_lock<std::mutex>& lock, Lane& lane, Deadline deadline, Call&& call,
                                TimeHistogram* times) {
  const Deadline start = clock->now();
  if (!breaker.begin(start)) return false;
  lane.calling = true;
  lane.call_deadline = deadline;
  lock.unlock();
  bool good = false;
  try {
    good = call();
  } catch (...) {
  }
  lock.lock();
  lane.calling = false;
  const Deadline end = clock->now();
  if (times != nullptr) times->add(end - start);
  const bool slow = end - start >= options.breaker.slow_after;
  const CircuitBreaker::State before = breaker.state();
  if (good && !slow)
    breaker.succeeded();
  else if (slow || end < deadline)
    breaker.failed(end);
  else
    breaker.withdrawn();  // the deadline passed before the call was slow: this says nothing about the tier
  const CircuitBreaker::State after = breaker.state();
  const bool probe_failed = before == CircuitBreaker::State::probing && after == CircuitBreaker::State::open;
  if (after != before && !probe_failed) {
    lock.unlock();
    report_breaker(after, slow);
    lock.lock();
  }
  return true;
}

void TierQueue::Core::report_breaker(CircuitBreaker::State state, bool slow) {
  speak([&] {
    if (state == CircuitBreaker::State::closed)
      log(LogLevel::info, "tier.closed", fmt::format("the tier '{}' answers again", name), {{"tier", name}});
    else
      log(LogLevel::warning, "tier.opened",
          fmt::format("the tier '{}' {}; it is left alone for a while", name, slow ? "is too slow" : "fails"),
          {{"tier", name}, {"reason", slow ? "slow" : "failed"}});
  });
}

void TierQueue::Core::take_reads(Lane& lane, Deadline& deadline) {
  std::vector<WaitingRead>& batch = lane.places;
  batch.clear();
  std::int64_t bytes = 0;
  const Deadline now = clock->now();
  const bool only_exists = reads.front()->only_exists;
  deadline = now;
  // Readers share the waiting requests.
  const std::int64_t share = std::max(kLeastPerReader, ceil_div(waiting_reads, std::ssize(readers()))),
                     most = std::min({options.batch_requests, read_batch, share});
  while (!reads.empty() && static_cast<std::int64_t>(batch.size()) < most && bytes < options.batch_bytes) {
    const std::shared_ptr<ReadJob> job = reads.front();
    if (job->deadline <= now) {
      end(job);
      continue;
    }
    if (job->only_exists != only_exists) break;
    deadline = std::max(deadline, job->deadline);
    bytes += static_cast<std::int64_t>(job->waiting[job->next].request.to.size);
    batch.push_back({job, job->next++});
    --waiting_reads;
    if (job->next == job->waiting.size()) reads.pop_front();
  }
}

void TierQueue::Core::do_reads(std::unique_lock<std::mutex>& lock, Lane& lane) {
  Deadline deadline;
  take_reads(lane, deadline);
  const std::vector<WaitingRead>& batch = lane.places;
  if (batch.empty()) return;
  std::vector<ReadResult>& results_of = lane.results;
  results_of.assign(batch.size(), {});
  const bool only_exists = batch.front().job->only_exists;
  if (only_exists) {
    std::vector<ExistsRequest>& requests = lane.exists;
    requests.clear();
    for (const WaitingRead& place : batch) requests.push_back({place.job->waiting[place.index].request.id});
    call_tier(lock, lane, deadline, [&] {
      tier->exists(requests, deadline);
      return std::any_of(requests.begin(), requests.end(), [](const ExistsRequest& r) { return r.answered; });
    });
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const ExistsRequest& request = requests[i];
      if (request.answered) results_of[i].status = request.bytes >= 0 ? GetStatus::found : GetStatus::missing;
      results_of[i].bytes = std::max<std::int64_t>(request.bytes, 0);
    }
  } else {
    std::vector<GetRequest>& requests = lane.gets;
    requests.clear();
    for (const WaitingRead& place : batch) {
      const ReadRequest& request = place.job->waiting[place.index].request;
      requests.push_back({.id = request.id, .to = request.to.span(), .view_allowed = request.view_allowed});
    }
    call_tier(
        lock, lane, deadline,
        [&] {
          Undo none_but_found([&] {
            for (GetRequest& request : requests)
              if (request.status != GetStatus::found) request.status = GetStatus::failed;
          });
          tier->get(requests, deadline);
          none_but_found.keep();
          return std::any_of(requests.begin(), requests.end(),
                             [](const GetRequest& r) { return r.status != GetStatus::failed; });
        },
        &counts.get_times);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const SharedBytes& to = batch[i].job->waiting[batch[i].index].request.to;
      // A tier may be the caller's: its lengths are checked before so many bytes are read.
      const bool fits = requests[i].bytes >= 0 && requests[i].bytes <= std::ssize(to.span());
      if (requests[i].status == GetStatus::found && !fits) requests[i] = {.id = requests[i].id, .to = {}};
      results_of[i].status = requests[i].status;
      results_of[i].bytes = requests[i].bytes;
      if (requests[i].status != GetStatus::found) continue;
      results_of[i].coding = requests[i].coding;
      results_of[i].payload = {requests[i].view ? std::move(requests[i].view) : to.data,
                               static_cast<std::size_t>(requests[i].bytes)};
    }
  }
  for (std::size_t i = 0; i < batch.size(); ++i) {
    ReadJob& job = *batch[i].job;
    --open_reads;
    if (job.ended) continue;
    count(results_of[i], only_exists);
    job.results[job.waiting[batch[i].index].result] = std::move(results_of[i]);
    --job.unanswered;
  }
  lane.places.clear();  // releases their jobs
  lane.gets.clear();
  results_of.clear();
}

/// Takes puts or removes of different ids, because a tier keeps no order within a batch.
void TierQueue::Core::take_writes(Lane& lane) {
  std::vector<Write>& batch = lane.writes;
  batch.clear();
  const auto has = [&](const RecordId& id) {
    return std::any_of(batch.begin(), batch.end(), [&](const Write& write) { return write.id == id; });
  };
  std::int64_t bytes = 0;
  while (!writes.empty() && static_cast<std::int64_t>(batch.size()) < options.batch_requests &&
         bytes < options.batch_bytes) {
    Write& write = writes.front();
    if (write.flush || (!batch.empty() && batch.front().remove != write.remove) || has(write.id)) break;
    bytes += static_cast<std::int64_t>(write.payload.size);
    batch.push_back(std::move(write));
    writes.pop_front();
  }
}

void TierQueue::Core::do_writes(std::unique_lock<std::mutex>& lock, Lane& lane) {
  take_writes(lane);
  const std::vector<Write>& batch = lane.writes;
  const Deadline deadline = clock->now() + options.write_limit;
  if (batch.front().remove) {
    std::vector<RemoveRequest>& requests = lane.removes;
    requests.clear();
    for (const Write& write : batch) requests.push_back({write.id});
    call_tier(lock, lane, deadline, [&] {
      tier->remove(requests, deadline);
      return std::any_of(requests.begin(), requests.end(), [](const RemoveRequest& r) { return r.answered; });
    });
    for (std::size_t i = 0; i < batch.size(); ++i)
      finish(batch[i], requests[i].answered ? PutStatus::stored : PutStatus::failed);
  } else {
    std::vector<PutRequest>& requests = lane.puts;
    requests.clear();
    for (const Write& write : batch)
      requests.push_back({write.id, write.payload.span(), PutStatus::failed, write.details.label.get()});
    call_tier(
        lock, lane, deadline,
        [&] {
          tier->put(requests, deadline);
          return std::any_of(requests.begin(), requests.end(),
                             [](const PutRequest& r) { return r.status != PutStatus::failed; });
        },
        &counts.put_times);
    for (std::size_t i = 0; i < batch.size(); ++i) finish(batch[i], requests[i].status);
  }
  lane.writes.clear();  // releases their payloads
}

void TierQueue::Core::finish(const Write& write, PutStatus status) {
  const bool done = status == PutStatus::stored;
  --open_writes;
  open_write_bytes -= static_cast<std::int64_t>(write.payload.size);
  results.push_back({write.id, write.remove, status, write.details.tag});
  if (!write.remove) ++(done ? counts.stored : counts.failed_puts);
  if (done) counts.stored_bytes += static_cast<std::int64_t>(write.payload.size);
  if (!done) ++failed_writes;
  const auto found = pending.find(write.id);
  if (found == pending.end() || found->second.number != write.number) return;  // a later write decides
  const bool sure = done && !found->second.outdated;
  pending.erase(found);
  if (sure)
    stale.settle(write.id);
  else if (write.content == Content::changing)
    stale.add(write.id);
}

void TierQueue::Core::do_flush(std::unique_lock<std::mutex>& lock, Lane& lane) {
  const std::shared_ptr<FlushJob> job = std::move(writes.front().flush);
  writes.pop_front();
  const Deadline deadline = job->deadline;
  FlushStatus status = FlushStatus::failed;
  TierStats fresh;
  bool called = false;
  if (clock->now() < deadline)
    called = call_tier(lock, lane, deadline, [&] {
      status = tier->flush(deadline);
      fresh = tier->stats();
      return status != FlushStatus::failed;
    });
  if (called) {
    tier_stats = fresh;
    if (std::exchange(failed_writes, 0) > 0) status = FlushStatus::failed;
  }
  --open_flushes;
  job->status = status;
  job->done = true;
}

void TierQueue::Core::refresh_stats(std::unique_lock<std::mutex>& lock) {
  stats_wanted = false;
  lock.unlock();
  TierStats fresh;
  bool known = true;
  try {
    fresh = tier->stats();
  } catch (...) {
    known = false;
  }
  lock.lock();
  if (known) tier_stats = fresh;
}

// --- the queue

TierQueue::TierQueue(std::shared_ptr<Tier> tier, const TierQueueOptions& options, std::shared_ptr<Clock> clock)
    : core_(std::make_shared<Core>(std::move(tier), options, std::move(clock))) {
  threads_->reserve(core_->lanes.size());
  Undo end_those([&] {
    {
      const std::lock_guard lock(core_->mutex);
      for (std::size_t i = threads_->size(); i < core_->lanes.size(); ++i) core_->lanes[i].exited = true;
    }
    end_threads(core_->clock->now() + core_->options.close_limit);
  });
  for (Core::Lane& lane : core_->lanes) {
    const bool writes = &lane == &core_->lanes.front();
    threads_->emplace_back([core = core_, &lane, writes] { writes ? core->write(lane) : core->read(lane); });
  }
  end_those.keep();
}

TierQueue::~TierQueue() { (void)close(core_->clock->now() + core_->options.close_limit); }

const char* TierQueue::name() const { return core_->name; }

bool TierQueue::put(const RecordId& id, std::span<const std::byte> payload, Content content) {
  SharedBytes copy = buffer(payload.size());
  if (!copy) {
    refuse(id, content);
    return false;
  }
  if (!payload.empty()) std::memcpy(copy.data.get(), payload.data(), payload.size());
  return put(id, std::move(copy), content);
}

bool TierQueue::has_room(std::int64_t bytes) {
  if (core_->forked()) return false;
  const std::lock_guard lock(core_->mutex);
  return core_->has_room(bytes) && core_->accepts(core_->clock->now());
}

SharedBytes TierQueue::buffer(std::size_t size) {
  return core_->forked() ? SharedBytes() : core_->write_pool->take(size);
}

void TierQueue::refuse(const RecordId& id, Content content) {
  if (core_->forked()) return;
  const std::lock_guard lock(core_->mutex);
  core_->refuse({id, 0, false, content, {}, {}, {}});
}

bool TierQueue::put(const RecordId& id, SharedBytes payload, Content content, const WriteDetails& details) {
  if (core_->forked()) return false;
  const std::lock_guard lock(core_->mutex);
  return core_->accept({id, 0, false, content, std::move(payload), {}, details});
}

bool TierQueue::remove(const RecordId& id, std::uint64_t tag) {
  if (core_->forked()) return false;
  const std::lock_guard lock(core_->mutex);
  return core_->accept({id, 0, true, Content::changing, {}, {}, {{}, tag}});
}

bool TierQueue::look_up(std::span<ExistsRequest> requests) {
  if (core_->forked()) return false;
  const std::lock_guard lock(core_->mutex);
  if (!core_->tier || !core_->accepts(core_->clock->now()) || !core_->tier->look_up(requests)) {
    for (ExistsRequest& request : requests) request = {request.id};
  }
  bool all = true;
  for (ExistsRequest& request : requests) {
    ReadResult written;
    if (core_->answer_at_once({.id = request.id, .to = {}}, true, written)) {
      request.answered = true;
      request.bytes = written.status == GetStatus::found ? written.bytes : -1;
    }
    all = all && request.answered;
  }
  return all;
}

TierQueue::ReadTicket TierQueue::get(std::vector<ReadRequest> requests, Deadline deadline) {
  auto job = std::make_shared<ReadJob>(false, deadline, requests.size());
  if (core_->forked()) return {core_, std::move(job)};
  const std::lock_guard lock(core_->mutex);
  core_->take_in(job, std::move(requests));
  core_->counts.gets += static_cast<std::int64_t>(job->results.size());
  // Allocates buffers only for records that may exist.
  std::erase_if(job->waiting, [&](ReadJob::Waiting& waiting) {
    ReadRequest& request = waiting.request;
    if (!request.to) request.to = core_->read_pool->take(request.max_bytes);
    if (!request.to) core_->count(job->results[waiting.result], false);
    return !request.to;
  });
  core_->submit(job);
  return {core_, std::move(job)};
}

TierQueue::ReadTicket TierQueue::exists(std::span<const RecordId> ids, Deadline deadline) {
  auto job = std::make_shared<ReadJob>(true, deadline, ids.size());
  if (core_->forked()) return {core_, std::move(job)};
  std::vector<ReadRequest> requests;
  for (const RecordId& id : ids) requests.push_back({id, 0, {}});
  const std::lock_guard lock(core_->mutex);
  core_->take_in(job, std::move(requests));
  core_->submit(job);
  return {core_, std::move(job)};
}

TierQueue::FlushTicket TierQueue::flush(Deadline deadline) {
  auto job = std::make_shared<FlushJob>();
  job->deadline = deadline;
  if (core_->forked()) return {core_, std::move(job)};
  const std::lock_guard lock(core_->mutex);
  if (core_->open_flushes < kMaxFlushes && core_->accepts(core_->clock->now())) {
    core_->writes.push_back({{}, 0, false, Content::changing, {}, job, {}});
    ++core_->open_flushes;
    core_->writes_there.notify_one();
  } else {
    job->done = true;
  }
  return {core_, std::move(job)};
}

std::vector<WriteResult> TierQueue::drain() {
  if (core_->forked()) return {};
  const std::lock_guard lock(core_->mutex);
  std::vector<WriteResult> next;
  next.reserve(core_->open_writes);  // as reserve_results()
  return std::exchange(core_->results, std::move(next));
}

QueueStats TierQueue::stats() {
  if (core_->forked()) return {};
  const std::lock_guard lock(core_->mutex);
  QueueStats stats = core_->counts;
  stats.times_opened = core_->breaker.times_opened();
  stats.breaker = core_->breaker.state();
  stats.waiting_reads = core_->open_reads;
  stats.waiting_writes = core_->open_writes;
  stats.waiting_write_bytes = core_->open_write_bytes;
  stats.stale_ids = static_cast<std::int64_t>(core_->stale.size());
  stats.tier = core_->tier_stats;
  stats.failure = core_->tier ? core_->tier->failure() : core_->tier_failure;
  core_->stats_wanted = true;
  core_->writes_there.notify_one();
  return stats;
}

FlushStatus TierQueue::close(Deadline deadline) noexcept {
  if (threads_ == nullptr || threads_->empty()) return FlushStatus::failed;
  if (core_->forked()) {
    (void)threads_.release();  // the threads are the parent's: this process can neither join nor detach them
    return FlushStatus::failed;
  }
  FlushStatus status = FlushStatus::failed;
  try {
    const FlushTicket last = flush(deadline);
    (void)last.wait(deadline);
    status = last.status();
  } catch (const std::bad_alloc&) {  // waiting work is given up
  }
  end_threads(deadline);
  return status;
}

void TierQueue::end_threads(Deadline deadline) noexcept {
  std::unique_lock lock(core_->mutex);
  core_->stopping = true;
  core_->reads_there.notify_all();
  core_->writes_there.notify_one();
  while (!Core::exited(core_->lanes) && core_->clock->now() < deadline)
    core_->clock->wait_until(core_->answered, lock, deadline);
  for (std::size_t i = 0; i < threads_->size(); ++i) {
    const bool stuck = !core_->lanes[i].exited;
    lock.unlock();
    stuck ? (*threads_)[i].detach() : (*threads_)[i].join();
    lock.lock();
  }
  threads_->clear();
}

// --- tickets

bool TierQueue::ReadTicket::done() const {
  if (!job_ || core_->forked()) return true;
  const std::lock_guard lock(core_->mutex);
  return core_->is_done(*job_);
}

bool TierQueue::ReadTicket::wait(Deadline until) const {
  if (!job_ || core_->forked()) return true;
  std::unique_lock lock(core_->mutex);
  while (!core_->is_done(*job_)) {
    if (core_->clock->now() >= until) return false;
    core_->clock->wait_until(core_->answered, lock, std::min(until, job_->deadline));
  }
  return true;
}

std::vector<ReadResult> TierQueue::ReadTicket::take() {
  if (!job_) return {};
  if (core_->forked()) return std::vector<ReadResult>(std::exchange(job_, nullptr)->results.size());
  const std::lock_guard lock(core_->mutex);
  core_->end(job_);
  core_->counts.failed_gets += job_->only_exists ? 0 : static_cast<std::int64_t>(job_->unanswered);
  std::vector<ReadResult> results = std::move(job_->results);
  job_.reset();
  return results;
}

TierQueue::ReadTicket::~ReadTicket() { cancel(); }

bool TierQueue::FlushTicket::done() const {
  if (core_->forked()) return true;
  const std::lock_guard lock(core_->mutex);
  return job_->done;
}

bool TierQueue::FlushTicket::wait(Deadline until) const {
  if (core_->forked()) return true;
  std::unique_lock lock(core_->mutex);
  while (!job_->done && core_->clock->now() < until) core_->clock->wait_until(core_->answered, lock, until);
  return job_->done;
}

FlushStatus TierQueue::FlushTicket::status() const {
  if (core_->forked()) return FlushStatus::failed;
  const std::lock_guard lock(core_->mutex);
  return job_->status;
}

}  // namespace kv4::tier
