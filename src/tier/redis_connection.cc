#include "tier/redis_connection.h"

#include <fmt/format.h>
#include <poll.h>

#include <new>
#include <utility>

namespace kv4::tier {
namespace {

constexpr std::size_t kReadBytes = 256 << 10;
constexpr std::size_t kKeptBytes = 8 << 20;  // of the parser's buffer, between replies
constexpr std::size_t kPiecesAtOnce = 48;    // per write
constexpr std::string_view kLineEnd = "\r\n";

std::size_t bytes_of(const RedisCommand& command) {
  return command.head.size() + command.payload.size() + command.tail.size();
}

void append(std::string& to, std::string_view argument) {
  to += fmt::format("${}\r\n", argument.size());
  to.append(argument).append(kLineEnd);
}

}  // namespace

RedisCommand redis_command(std::initializer_list<std::string_view> arguments) {
  RedisCommand command;
  command.head = fmt::format("*{}\r\n", arguments.size());
  for (const std::string_view argument : arguments) append(command.head, argument);
  return command;
}

RedisCommand redis_command(std::initializer_list<std::string_view> arguments, std::span<const std::byte> prefix,
                           std::span<const std::byte> payload, std::span<const std::string_view> more) {
  RedisCommand command;
  command.head = fmt::format("*{}\r\n", arguments.size() + 1 + more.size());
  for (const std::string_view argument : arguments) append(command.head, argument);
  command.head += fmt::format("${}\r\n", prefix.size() + payload.size());
  command.head.append(reinterpret_cast<const char*>(prefix.data()), prefix.size());
  command.payload = payload;
  command.tail = kLineEnd;
  for (const std::string_view argument : more) append(command.tail, argument);
  return command;
}

RedisConnection::RedisConnection(const RedisEndpoint& endpoint, const RedisTls* tls)
    : socket_(endpoint, tls), reader_(redisReaderCreate()) {
  if (!reader_) throw std::bad_alloc();
  reader_->maxbuf = kKeptBytes;
}

void RedisConnection::send(RedisCommand command, const ReplyLimits& limits, OnReply on_reply) {
  out_.push_back(std::move(command));
  waiting_.push_back({limits, std::move(on_reply)});
}

void RedisConnection::give_up() {
  for (const Waiting& waiting : std::exchange(waiting_, {})) waiting.on_reply(nullptr);
}

bool RedisConnection::fail(FailureReason reason, std::string detail) {
  failure_ = {reason, std::move(detail)};
  return false;
}

bool RedisConnection::proceed(short ready) {
  if (socket_.failed()) return false;
  if (ready == 0 && !more()) return true;
  if (!socket_.established()) {
    if (!socket_.proceed(ready)) return false;
    ++progress_;
    if (!socket_.established()) return true;
    ready = POLLOUT | POLLIN;  // TLS may have read beyond the handshake
  }
  if ((ready & POLLOUT) && !write()) return false;
  if (((ready & (POLLIN | POLLHUP | POLLERR)) || more()) && !read()) return false;
  return true;
}

bool RedisConnection::write() {
  for (;;) {
    iovec pieces[kPiecesAtOnce];
    std::size_t count = 0, skip = out_done_;
    const auto add = [&](const void* data, std::size_t size) {
      if (skip >= size) {
        skip -= size;
        return;
      }
      pieces[count++] = {const_cast<char*>(static_cast<const char*>(data)) + skip, size - skip};
      skip = 0;
    };
    for (const RedisCommand& command : out_) {
      if (count + 3 > kPiecesAtOnce) break;
      add(command.head.data(), command.head.size());
      add(command.payload.data(), command.payload.size());
      add(command.tail.data(), command.tail.size());
    }
    if (count == 0 && socket_.all_gone()) return true;
    const std::size_t sent = socket_.write({pieces, count});
    if (sent == 0) return !socket_.failed();
    progress_ += static_cast<std::int64_t>(sent);
    out_done_ += sent;
    while (!out_.empty() && out_done_ >= bytes_of(out_.front())) {
      out_done_ -= bytes_of(out_.front());
      out_.pop_front();
    }
  }
}

bool RedisConnection::read() {
  in_.resize(kReadBytes);
  const std::size_t got = socket_.read(in_);
  progress_ += static_cast<std::int64_t>(got);
  // Replies before the end count: often they say why the server ends the connection.
  return take({in_.data(), got}) && !socket_.failed();
}

bool RedisConnection::take(std::span<const char> bytes) {
  while (!bytes.empty()) {
    if (waiting_.empty()) return fail(FailureReason::not_redis, "it sends what nobody asked for");
    std::size_t taken = 0;
    const ReplyGate::Verdict verdict = gate_.look(bytes, waiting_.front().limits, taken);
    if (verdict == ReplyGate::Verdict::refused) {
      failure_ = gate_.failure();
      return false;
    }
    if (redisReaderFeed(reader_.get(), bytes.data(), taken) != REDIS_OK)
      return fail(FailureReason::not_redis, reader_->errstr);
    bytes = bytes.subspan(taken);
    if (verdict == ReplyGate::Verdict::more) continue;
    void* object = nullptr;
    if (redisReaderGetReply(reader_.get(), &object) != REDIS_OK || object == nullptr)
      return fail(FailureReason::not_redis, printable(reader_->errstr));
    const Reply reply(static_cast<redisReply*>(object));
    const OnReply on_reply = std::move(waiting_.front().on_reply);
    waiting_.pop_front();
    ++replies_;
    on_reply(reply.get());
  }
  return true;
}

}  // namespace kv4::tier
