#include "tier/redis_connection.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace kv4::tier {
namespace {

constexpr std::size_t kReadBytes = 256 << 10;
constexpr int kPiecesAtOnce = 48;  // of one sendmsg
constexpr std::string_view kLineEnd = "\r\n";

std::size_t bytes_of(const RedisCommand& command) {
  return command.head.size() + command.payload.size() + (command.with_payload ? kLineEnd.size() : 0);
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

RedisCommand redis_command(std::initializer_list<std::string_view> arguments) {
  RedisCommand command;
  command.head = fmt::format("*{}\r\n", arguments.size());
  for (const std::string_view argument : arguments)
    command.head += fmt::format("${}\r\n{}\r\n", argument.size(), argument);
  return command;
}

RedisCommand redis_command(std::initializer_list<std::string_view> arguments, std::span<const std::byte> prefix,
                           std::span<const std::byte> payload) {
  RedisCommand command;
  command.head = fmt::format("*{}\r\n", arguments.size() + 1);
  for (const std::string_view argument : arguments)
    command.head += fmt::format("${}\r\n{}\r\n", argument.size(), argument);
  command.head += fmt::format("${}\r\n", prefix.size() + payload.size());
  command.head.append(reinterpret_cast<const char*>(prefix.data()), prefix.size());
  command.payload = payload;
  command.with_payload = true;
  return command;
}

RedisConnection::RedisConnection(const RedisAddress& address, std::int64_t max_reply_bytes)
    : context_(redisConnectNonBlock(address.host.c_str(), address.port)), max_reply_bytes_(max_reply_bytes) {
  if (context_ && context_->err) context_.reset();
  if (context_) context_->reader->maxbuf = 0;  // keeps its buffer between replies
}

void RedisConnection::send(RedisCommand command, OnReply on_reply) {
  out_.push_back(std::move(command));
  waiting_.push_back(std::move(on_reply));
}

void RedisConnection::give_up() {
  for (const OnReply& on_reply : std::exchange(waiting_, {})) on_reply(nullptr);
}

short RedisConnection::events() const {
  return static_cast<short>(!connected_ ? POLLOUT : POLLIN | (out_.empty() ? 0 : POLLOUT));
}

bool RedisConnection::proceed(short ready) {
  if (!context_) return false;
  if (ready == 0) return true;
  if (!connected_) {
    int failure = 0;
    socklen_t length = sizeof(failure);
    if (::getsockopt(fd(), SOL_SOCKET, SO_ERROR, &failure, &length) != 0 || failure != 0) return false;
    connected_ = true;
    ++progress_;
  }
  if ((ready & POLLOUT) && !out_.empty() && !write()) return false;
  if ((ready & (POLLIN | POLLHUP | POLLERR)) && !read()) return false;
  return true;
}

bool RedisConnection::write() {
  while (!out_.empty()) {
    iovec pieces[kPiecesAtOnce];
    int count = 0;
    std::size_t skip = out_done_;
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
      if (command.with_payload) add(kLineEnd.data(), kLineEnd.size());
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = static_cast<std::size_t>(count);
    const ssize_t sent = ::sendmsg(fd(), &message, MSG_NOSIGNAL);
    if (sent < 0) return would_block(errno);
    progress_ += sent;
    out_done_ += static_cast<std::size_t>(sent);
    while (!out_.empty() && out_done_ >= bytes_of(out_.front())) {
      out_done_ -= bytes_of(out_.front());
      out_.pop_front();
    }
  }
  return true;
}

bool RedisConnection::read() {
  in_.resize(kReadBytes);
  const ssize_t got = ::recv(fd(), in_.data(), in_.size(), 0);
  if (got < 0) return would_block(errno);
  if (got == 0) return false;
  progress_ += got;
  redisReader* reader = context_->reader;
  if (redisReaderFeed(reader, in_.data(), static_cast<std::size_t>(got)) != REDIS_OK) return false;
  for (;;) {
    void* object = nullptr;
    if (redisReaderGetReply(reader, &object) != REDIS_OK) return false;
    if (object == nullptr) break;
    const Reply reply(static_cast<redisReply*>(object));
    if (waiting_.empty()) return false;  // nobody asked for it
    const OnReply on_reply = std::move(waiting_.front());
    waiting_.pop_front();
    on_reply(reply.get());
  }
  return static_cast<std::int64_t>(reader->len) <= max_reply_bytes_;
}

}  // namespace kv4::tier
