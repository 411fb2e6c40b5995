#include "tier/redis_reply_gate.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

namespace kv4::tier {
namespace {

constexpr std::string_view kLineEnd = "\r\n", kTypes = "+-:$*";
constexpr char kTlsAlert = 0x15, kTlsHandshake = 0x16;

bool parse_number(std::string_view text, std::int64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

ReplyGate::Verdict ReplyGate::refuse(FailureReason reason, std::string detail) {
  failure_ = {reason, std::move(detail)};
  return Verdict::refused;
}

ReplyGate::Verdict ReplyGate::look(std::span<const char> bytes, const ReplyLimits& limits, std::size_t& taken) {
  taken = 0;
  while (taken < bytes.size()) {
    const std::span<const char> rest = bytes.subspan(taken);
    Verdict verdict = Verdict::more;
    if (bulk_left_ > 0) {
      const std::int64_t size = std::min<std::int64_t>(bulk_left_, static_cast<std::int64_t>(rest.size()));
      for (std::int64_t i = std::max<std::int64_t>(0, bulk_left_ - 2); i < size; ++i)
        if (rest[i] != kLineEnd[i - bulk_left_ + 2])
          return refuse(FailureReason::not_redis, "a string without a line end");
      bulk_left_ -= size;
      taken += size;
      if (bulk_left_ == 0) verdict = end_element();
    } else {
      const void* end = std::memchr(rest.data(), '\n', rest.size());
      const std::size_t size = end == nullptr ? rest.size() : (static_cast<const char*>(end) - rest.data()) + 1;
      if (static_cast<std::int64_t>(line_.size() + size) > kMaxLineBytes)
        return refuse(FailureReason::reply_too_large, fmt::format("a line of more than {} bytes", kMaxLineBytes));
      line_.append(rest.data(), size);
      taken += size;
      if (kTypes.find(line_[0]) == std::string_view::npos) {
        const bool tls = line_[0] == kTlsAlert || line_[0] == kTlsHandshake;
        return refuse(FailureReason::not_redis,
                      tls ? "it speaks TLS; write rediss:// for it"
                          : fmt::format("a reply that begins with '{}'", printable(line_.substr(0, 16))));
      }
      if (line_.ends_with(kLineEnd)) verdict = take_line(limits);
    }
    if (verdict != Verdict::more) return verdict;
  }
  return Verdict::more;
}

ReplyGate::Verdict ReplyGate::take_line(const ReplyLimits& limits) {
  const std::string line = std::exchange(line_, {});
  total_bytes_ += static_cast<std::int64_t>(line.size());
  if (total_bytes_ > limits.total_bytes)
    return refuse(FailureReason::reply_too_large, fmt::format("more than {} bytes", limits.total_bytes));
  if (line[0] == '+' || line[0] == '-') return end_element();
  std::int64_t number = 0;
  if (!parse_number(std::string_view(line).substr(1, line.size() - 3), number) || (line[0] != ':' && number < -1))
    return refuse(FailureReason::not_redis, fmt::format("'{}' where a number belongs", printable(line)));
  if (line[0] == ':' || number == -1) return end_element();
  return line[0] == '$' ? take_bulk(number, limits) : take_array(number, limits);
}

ReplyGate::Verdict ReplyGate::take_bulk(std::int64_t bytes, const ReplyLimits& limits) {
  if (bytes > limits.bulk_bytes)
    return refuse(FailureReason::reply_too_large,
                  fmt::format("a string of {} bytes; {} at most", bytes, limits.bulk_bytes));
  bulk_left_ = bytes + 2;
  total_bytes_ += bulk_left_;
  if (total_bytes_ > limits.total_bytes)
    return refuse(FailureReason::reply_too_large, fmt::format("more than {} bytes", limits.total_bytes));
  return Verdict::more;
}

ReplyGate::Verdict ReplyGate::take_array(std::int64_t elements, const ReplyLimits& limits) {
  if (std::ssize(open_) >= limits.depth)
    return refuse(FailureReason::reply_too_large,
                  fmt::format("arrays {} deep; {} at most", open_.size() + 1, limits.depth));
  if (elements > limits.elements - elements_)
    return refuse(FailureReason::reply_too_large,
                  fmt::format("an array of {} elements; {} in all at most", elements, limits.elements));
  elements_ += elements;
  if (elements == 0) return end_element();
  open_.push_back(elements);
  return Verdict::more;
}

ReplyGate::Verdict ReplyGate::end_element() {
  while (!open_.empty() && --open_.back() == 0) open_.pop_back();
  if (!open_.empty()) return Verdict::more;
  elements_ = total_bytes_ = 0;
  return Verdict::complete;
}

}  // namespace kv4::tier
