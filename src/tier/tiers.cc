#include "kv4/tiers.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "tier/record_format.h"
#include "tier/tier_stack.h"
#include "tier/tiers_impl.h"

namespace kv4 {
namespace {

constexpr std::int64_t kPageAlignment = 4096, kLeastPageBytes = 16 << 10;

/// A page holds a block's record, so that the block can be given out without a copy.
std::int64_t host_page_bytes(const CacheSchema& schema) {
  const std::int64_t record_bytes = tier::kRecordHeaderBytes + schema.block_image_bytes;
  return std::max(kLeastPageBytes, ceil_div(record_bytes, kPageAlignment) * kPageAlignment);
}

}  // namespace

Tiers::Tiers(const CacheSchema& schema, const TiersOptions& options) try {
  const auto clock = std::make_shared<tier::SteadyClock>();
  tier::TierStack stack =
      tier::make_stack(options, {.layout_id = schema.layout_id, .host_page_bytes = host_page_bytes(schema)}, clock);
  impl_ = std::make_unique<Impl>(std::move(stack.queues), clock);
  impl_->backend = options.backend;
  impl_->protections = std::move(stack.protections);
} catch (const std::bad_alloc&) {
  fail_for_memory();
} catch (const std::system_error& e) {  // of a thread
  fail(ErrorCode::out_of_memory, "the system refused a thread of a tier: {}", e.what());
}

Tiers::Tiers(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tiers::~Tiers() = default;
Tiers::Tiers(Tiers&&) noexcept = default;

std::vector<tier::FlushStatus> Tiers::flush(tier::Deadline deadline) try {
  const OneThread::Call call(impl_->chain.driver());
  return impl_->chain.flush(deadline);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<tier::FlushStatus> Tiers::close(tier::Deadline deadline) try {
  const OneThread::Call call(impl_->chain.driver());
  return impl_->chain.close(deadline);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::vector<TierReport> Tiers::report() try {
  const OneThread::Call call(impl_->chain.driver());
  std::vector<TierReport> reports;
  for (const tier::ChainStats& each : impl_->chain.stats())
    reports.push_back(tier::report_of(each, impl_->protections[reports.size()]));
  return reports;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

}  // namespace kv4
