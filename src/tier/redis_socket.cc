#include "tier/redis_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace kv4::tier {
namespace {

constexpr std::size_t kTlsRecordBytes = 16 << 10;

bool try_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

std::string text_of(int error) {
  char text[128];
  return ::strerror_r(error, text, sizeof(text));
}

/// Returns errno, or 0 while the connection is being made.
int start_connecting(const std::string& address, int port, int& fd) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return EADDRNOTAVAIL;
  fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  int error = fd < 0 ? errno : 0;
  const int on = 1;
  if (fd >= 0) (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  if (fd >= 0 && ::connect(fd, found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS) error = errno;
  ::freeaddrinfo(found);
  return error;
}

}  // namespace

RedisSocket::RedisSocket(const RedisEndpoint& endpoint, const RedisTls* tls) : endpoint_(endpoint), tls_(tls) {
  connect_next();
}

RedisSocket::~RedisSocket() {
  if (fd_ >= 0) ::close(fd_);
}

void RedisSocket::connect_next() {
  int error = EADDRNOTAVAIL;
  while (next_address_ < endpoint_.addresses.size()) {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    error = start_connecting(endpoint_.addresses[next_address_++], endpoint_.name.port, fd_);
    if (error == 0) return;
  }
  fail_system(error);
}

short RedisSocket::events(bool writing) const {
  if (state_ == State::connecting) return POLLOUT;
  if (state_ == State::handshaking) return wants_write_ ? POLLOUT : POLLIN;
  return static_cast<short>(POLLIN | (writing || wants_write_ || !sealed_.empty() ? POLLOUT : 0));
}

bool RedisSocket::proceed(short ready) {
  if (state_ == State::connecting && !failed() && ready != 0) {
    int error = 0;
    socklen_t length = sizeof(error);
    if (::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    if (error != 0) {
      if (next_address_ == endpoint_.addresses.size())
        fail_system(error);
      else
        connect_next();
      return !failed();
    }
    state_ = tls_ == nullptr ? State::established : State::handshaking;
    if (tls_ != nullptr) ssl_ = tls_->connect(endpoint_.certified, &fd_);
  }
  if (state_ == State::handshaking && !failed() && ready != 0) shake_hands();
  return !failed();
}

void RedisSocket::shake_hands() {
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  wants_write_ = false;
  if (result == 1)
    state_ = State::established;
  else
    fail_tls(result);
}

std::size_t RedisSocket::write(std::span<const iovec> pieces) {
  if (tls_ == nullptr) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces.data());
    message.msg_iovlen = pieces.size();
    const ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (sent < 0 && !try_later(errno)) fail_system(errno);
    return sent < 0 ? 0 : sent;
  }
  if (!sealed_.empty()) write_sealed();
  if (!sealed_.empty() || failed()) return 0;
  for (const iovec& piece : pieces) {
    const char* data = static_cast<const char*>(piece.iov_base);
    sealed_.insert(sealed_.end(), data, data + std::min(piece.iov_len, kTlsRecordBytes - sealed_.size()));
    if (sealed_.size() == kTlsRecordBytes) break;
  }
  const std::size_t taken = sealed_.size();
  write_sealed();
  return taken;
}

std::size_t RedisSocket::write_sealed() {
  wants_write_ = false;
  ERR_clear_error();
  const int sent = SSL_write(ssl_.get(), sealed_.data(), static_cast<int>(sealed_.size()));
  if (sent <= 0) {
    fail_tls(sent);
    return 0;
  }
  sealed_.erase(sealed_.begin(), sealed_.begin() + sent);
  return sent;
}

std::size_t RedisSocket::read(std::span<char> to) {
  more_ = false;
  if (tls_ != nullptr) return read_sealed(to);
  const ssize_t got = ::recv(fd_, to.data(), to.size(), 0);
  if (got < 0 && !try_later(errno)) fail_system(errno);
  if (got == 0) fail(FailureReason::disconnected, "it closed the connection");
  return got < 0 ? 0 : got;
}

std::size_t RedisSocket::read_sealed(std::span<char> to) {
  std::size_t size = 0;
  while (size < to.size()) {
    ERR_clear_error();
    const int got = SSL_read(ssl_.get(), to.data() + size, static_cast<int>(to.size() - size));
    if (got <= 0) {
      fail_tls(got);
      return size;
    }
    size += got;
    heard_ = true;
  }
  more_ = true;
  return size;
}

void RedisSocket::fail(FailureReason reason, std::string detail) {
  if (!failed()) failure_ = {reason, std::move(detail)};
}

void RedisSocket::fail_system(int error) {
  if (state_ != State::connecting) return fail(FailureReason::disconnected, text_of(error));
  fail(error == ECONNREFUSED ? FailureReason::connection_refused : FailureReason::unreachable, text_of(error));
}

/// Handles a TLS call that gave no bytes, perhaps only for now.
void RedisSocket::fail_tls(int result) {
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ: return;
    case SSL_ERROR_WANT_WRITE: wants_write_ = true; return;
    case SSL_ERROR_ZERO_RETURN:
    case SSL_ERROR_SYSCALL:
      if (heard_) return fail(FailureReason::disconnected, "it closed the connection");
      // TLS 1.3: a server checks the client's certificate after the client has finished, and its alert may be lost.
      if (established())
        return fail(FailureReason::tls_refused,
                    "it closed the connection after the TLS handshake; does it ask for a certificate of ours?");
      break;
    default: break;
  }
  const RedisFailure failure = tls_failure(*ssl_);
  fail(failure.reason, failure.detail);
}

void RedisSocket::time_out() {
  switch (state_) {
    case State::connecting: return fail(FailureReason::unreachable, "no answer to the attempt to connect");
    case State::handshaking:
      return fail(FailureReason::tls_refused, "no answer to the TLS handshake; is this its TLS port?");
    case State::established: return fail(FailureReason::silent, "it owes an answer and sends nothing");
  }
}

}  // namespace kv4::tier
