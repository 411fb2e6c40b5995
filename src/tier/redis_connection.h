// One connection to a Redis server that never blocks: commands go out as they are, without TLS without a copy of their
// payload; replies pass the gate, are parsed by hiredis and come back in the order of the commands.
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

/// In the server's own framing: arguments with their lengths, the payload in the middle of one of them.
struct RedisCommand {
  std::string head;
  std::span<const std::byte> payload;  // until the command has gone out or the connection is dropped
  std::string tail;                    // behind the payload: a line end, and further arguments
};

RedisCommand redis_command(std::initializer_list<std::string_view> arguments);
/// `arguments`, one of `prefix` and `payload` together, and `more` behind it.
RedisCommand redis_command(std::initializer_list<std::string_view> arguments, std::span<const std::byte> prefix,
                           std::span<const std::byte> payload, std::span<const std::string_view> more = {});

struct FreeReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, FreeReply>;
inline std::string_view text_of(const redisReply& reply) {
  return reply.str == nullptr ? std::string_view() : std::string_view(reply.str, reply.len);
}

/// Null: there will be no reply.
using OnReply = std::function<void(const redisReply* reply)>;

class RedisConnection {
 public:
  /// Starts connecting. `tls`: null for a plain connection; it outlives this.
  RedisConnection(const RedisEndpoint& endpoint, const RedisTls* tls);

  /// A reply beyond `limits` breaks the connection.
  void send(RedisCommand command, const ReplyLimits& limits, OnReply on_reply);
  /// What poll() should look for.
  short events() const { return socket_.events(!out_.empty()); }
  int fd() const { return socket_.fd(); }
  /// There is something to do, whatever poll() says.
  bool more() const { return socket_.more(); }
  /// Does what poll() said can be done; replies go to those who sent the commands. False: the connection is broken.
  bool proceed(short ready);
  /// No more replies: tells all who wait.
  void give_up();
  /// Nothing came for too long: it is broken.
  void time_out() { socket_.time_out(); }
  /// Why it is broken.
  const RedisFailure& failure() const { return failure_.reason != FailureReason::none ? failure_ : socket_.failure(); }

  bool idle() const { return waiting_.empty(); }
  /// No payload is needed any more.
  bool all_sent() const { return out_.empty(); }
  /// Bytes that went out and came in, steps to a connection: stands still when the server does.
  std::int64_t progress() const { return progress_; }
  /// Whole ones that came.
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
  std::size_t out_done_ = 0;  // bytes of the front that have gone out
  std::deque<Waiting> waiting_;
  std::vector<char> in_;
  std::int64_t progress_ = 0, replies_ = 0;
  RedisFailure failure_;
};

}  // namespace kv4::tier
