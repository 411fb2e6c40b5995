#include "tier/redis_failures.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"

namespace kv4::tier {
namespace {

constexpr std::size_t kMaxShown = 160;   // characters of a server's text
constexpr std::size_t kTellingBytes = 6;  // so many bytes of a password in a row give it away

struct ErrorCodeReason {
  std::string_view begin;
  FailureReason reason;
};
constexpr ErrorCodeReason kReasons[] = {
    {"NOAUTH", FailureReason::password_needed},
    {"WRONGPASS", FailureReason::wrong_password},
    {"ERR invalid password", FailureReason::wrong_password},          // before Redis 6
    {"ERR AUTH ", FailureReason::wrong_password},                     // the server has none
    {"ERR Client sent AUTH, but no", FailureReason::wrong_password},  // the same, before Redis 6
    {"NOPERM", FailureReason::not_permitted},
    {"DENIED", FailureReason::not_permitted},  // protected mode
    {"OOM", FailureReason::server_full},
};

/// Whether an operator has to act; other failures may pass.
bool needs_somebody(FailureReason reason) {
  switch (reason) {
    case FailureReason::connection_refused:
    case FailureReason::unreachable:
    case FailureReason::silent:
    case FailureReason::disconnected:
    case FailureReason::server_error: return false;
    default: return true;
  }
}

void tell_failed(const std::string& server, const RedisFailure& failure) {
  if (!log_wanted()) return;
  log(needs_somebody(failure.reason) ? LogLevel::error : LogLevel::warning, "remote.failed",
      fmt::format("the remote tier's server {}: {} ({}); its records miss", server, failure.detail,
                  to_string(failure.reason)),
      {{"server", server}, {"reason", to_string(failure.reason)}, {"detail", failure.detail}});
}

void tell_works(const std::string& server) {
  if (log_wanted())
    log(LogLevel::info, "remote.works", fmt::format("the remote tier's server {} works again", server),
        {{"server", server}});
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out(text.substr(0, kMaxShown));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return out;
}

namespace {

/// Whether the text shows a part of the password: servers repeat arguments, cut off anywhere.
bool tells(std::string_view text, std::string_view password) {
  const std::size_t bytes = std::min(password.size(), kTellingBytes);
  for (std::size_t at = 0; bytes > 0 && at + bytes <= password.size(); ++at)
    if (text.find(password.substr(at, bytes)) != std::string_view::npos) return true;
  return false;
}

}  // namespace

RedisFailure failure_of_error(std::string_view error, const std::string& password) {
  RedisFailure failure{FailureReason::server_error, {}};
  for (const ErrorCodeReason& each : kReasons)
    if (error.starts_with(each.begin)) failure.reason = each.reason;
  failure.detail = tells(error.substr(0, kMaxShown), password) ? "an error that repeats some of the password"
                                                               : "it says '" + printable(error) + "'";
  return failure;
}

void RedisFailures::failed(Side side, const std::string& server, const RedisFailure& failure) {
  {
    const std::lock_guard lock(mutex_);
    ++counts_[static_cast<std::size_t>(failure.reason)];
    Entries& entries = failing_[server];
    const bool known = std::any_of(entries.begin(), entries.end(),
                                   [&](const Entry& entry) { return entry.failure.reason == failure.reason; });
    entries[static_cast<std::size_t>(side)] = {failure, next_++};
    if (known) return;
  }
  tell_failed(server, failure);
}

void RedisFailures::worked(Side side, const std::string& server) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = failing_.find(server);
    if (found == failing_.end()) return;
    found->second[static_cast<std::size_t>(side)] = {};
    for (const Entry& entry : found->second)
      if (entry.failure.reason != FailureReason::none) return;
    failing_.erase(found);
  }
  tell_works(server);
}

TierFailure RedisFailures::now() const {
  const std::lock_guard lock(mutex_);
  TierFailure out;
  out.counts = counts_;
  std::uint64_t newest = 0;
  for (const auto& [server, entries] : failing_)
    for (const Entry& entry : entries) {
      if (entry.since <= newest) continue;
      newest = entry.since;
      out.reason = entry.failure.reason;
      out.detail = server + ": " + entry.failure.detail;
    }
  return out;
}

}  // namespace kv4::tier
