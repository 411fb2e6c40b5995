// A socket to a Redis server that never blocks, plain or with TLS. It connects to the addresses of an endpoint in turn.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <vector>

#include "tier/redis_admission.h"
#include "tier/redis_failures.h"
#include "tier/redis_tls.h"

namespace kv4::tier {

class RedisSocket {
 public:
  /// Starts connecting. `tls`: null for a plain connection; it outlives this.
  RedisSocket(const RedisEndpoint& endpoint, const RedisTls* tls);
  ~RedisSocket();
  RedisSocket(const RedisSocket&) = delete;
  RedisSocket& operator=(const RedisSocket&) = delete;

  /// -1: no address is left, see failure().
  int fd() const { return fd_; }
  bool established() const { return state_ == State::established; }
  /// The events to poll() for; `writing`: there are bytes for write().
  short events(bool writing) const;
  /// Goes on connecting after poll() returned `ready`; needed before the first read() and write(). False: failed.
  bool proceed(short ready);
  /// Returns the bytes taken; 0: none now, or it failed. See all_gone().
  std::size_t write(std::span<const iovec> pieces);
  bool all_gone() const { return sealed_.empty(); }
  /// Returns the bytes read; 0: none now, or it failed.
  std::size_t read(std::span<char> to);
  /// True: the last read() filled its buffer, and there are more bytes that poll() does not know of.
  bool more() const { return more_; }

  bool failed() const { return failure_.reason != FailureReason::none; }
  const RedisFailure& failure() const { return failure_; }
  /// Fails the socket, because nothing came for too long.
  void time_out();

 private:
  enum class State : std::uint8_t { connecting, handshaking, established };

  void connect_next();
  void shake_hands();
  std::size_t write_sealed();
  std::size_t read_sealed(std::span<char> to);
  void fail(FailureReason reason, std::string detail);
  void fail_system(int error);
  void fail_tls(int result);

  RedisEndpoint endpoint_;
  const RedisTls* tls_;
  std::size_t next_address_ = 0;
  int fd_ = -1;
  State state_ = State::connecting;
  SslConnection ssl_;         // with TLS, from handshaking on
  bool wants_write_ = false;  // TLS waits until it can write
  bool more_ = false;
  bool heard_ = false;        // with TLS: bytes came after the handshake
  std::vector<char> sealed_;  // with TLS: bytes taken and not yet sent; unchanged until they are
  RedisFailure failure_;
};

}  // namespace kv4::tier
