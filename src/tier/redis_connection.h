// One connection to a Redis server that never blocks. Without TLS, commands go out without a copy of their payload.
// Replies pass the gate, are parsed by hiredis and come back in the order of the commands.
#pragma once

#include <hiredis/hiredis.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tier/redis_reply_gate.h"
#include "tier/redis_socket.h"

namespace kv4::tier {

/// A command in RESP framing: arguments with their lengths, the payload within one of them.
struct RedisCommand {
  std::string head;
  std::span<const std::byte> payload;  // valid until the command has gone out or the connection is dropped
  std::string tail;                    // follows the payload: a line end, and further arguments
};

RedisCommand redis_command(std::initializer_list<std::string_view> arguments);
/// A command of `arguments`, then one argument of `prefix` and `payload` together, then `more`.
RedisCommand redis_command(std::initializer_list<std::string_view> arguments, std::span<const std::byte> prefix,
                           std::span<const std::byte> payload, std::span<const std::string_view> more = {});

struct FreeReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, FreeReply>;
inline std::string_view text_of(const redisReply& reply) {
  return reply.str == nullptr ? std::string_view() : std::string_view(reply.str, reply.len);
}

/// `reply` is null where there will be none.
using OnReply = std::function<void(const redisReply* reply)>;

class RedisConnection {
 public:
  /// Starts connecting. `tls`: null for a plain connection; it outlives this.
  RedisConnection(const RedisEndpoint& endpoint, const RedisTls* tls);

  /// Sends a command. A reply beyond `limits` breaks the connection.
  void send(RedisCommand command, const ReplyLimits& limits, OnReply on_reply);
  /// The events to poll() for.
  short events() const { return socket_.events(!out_.empty()); }
  int fd() const { return socket_.fd(); }
  /// True: there is work to do, even if poll() reports none.
  bool more() const { return socket_.more(); }
  /// Reads and writes as far as `ready`, the events of poll(), allows, and calls on_reply for replies. False: the
  /// connection is broken.
  bool proceed(short ready);
  /// Calls on_reply with null for every command without a reply.
  void give_up();
  /// Breaks the connection, because nothing came for too long.
  void time_out() { socket_.time_out(); }
  /// Why the connection is broken.
  const RedisFailure& failure() const { return failure_.reason != FailureReason::none ? failure_ : socket_.failure(); }

  bool idle() const { return waiting_.empty(); }
  /// True: no payload is needed any more.
  bool all_sent() const { return out_.empty(); }
  /// Counts bytes sent, bytes received and steps of connecting: does not grow while the server stalls.
  std::int64_t progress() const { return progress_; }
  /// The number of whole replies received.
  std::int64_t replies() const { return replies_; }

 private:
  struct FreeReader {
    void operator()(redisReader* reader) const { redisReaderFree(reader); }
  };
  struct Waiting {
    ReplyLimits limits;
    OnReply on_reply;
  };

  bool write();
  bool read();
  bool take(std::span<const char> bytes);
  bool fail(FailureReason reason, std::string detail);

  RedisSocket socket_;
  std::unique_ptr<redisReader, FreeReader> reader_;
  ReplyGate gate_;
  std::deque<RedisCommand> out_;
  std::size_t out_done_ = 0;  // bytes of out_'s front that have gone out
  std::deque<Waiting> waiting_;
  std::vector<char> in_;
  std::int64_t progress_ = 0, replies_ = 0;
  RedisFailure failure_;
};

}  // namespace kv4::tier
