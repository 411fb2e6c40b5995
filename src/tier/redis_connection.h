// One connection to a Redis server that never blocks: commands go out as they are, without a copy of their payload;
// replies are parsed by hiredis and come back in the order of the commands.
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

#include "tier/redis_slots.h"

namespace kv4::tier {

/// In the server's own framing: arguments with their lengths, the payload in the middle of the last one.
struct RedisCommand {
  std::string head;
  std::span<const std::byte> payload;  // until the command has gone out or the connection is dropped
  bool with_payload = false;           // a line end follows it
};

/// A command whose last argument is `prefix` and `payload` together.
RedisCommand redis_command(std::initializer_list<std::string_view> arguments);
RedisCommand redis_command(std::initializer_list<std::string_view> arguments, std::span<const std::byte> prefix,
                           std::span<const std::byte> payload);

struct FreeReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, FreeReply>;
inline std::string_view text_of(const redisReply& reply) {
  return reply.str == nullptr ? std::string_view() : std::string_view(reply.str, static_cast<std::size_t>(reply.len));
}

/// Null: there will be no reply.
using OnReply = std::function<void(const redisReply* reply)>;

class RedisConnection {
 public:
  /// Starts connecting. `max_reply_bytes`: a server that sends more at once is not believed.
  RedisConnection(const RedisAddress& address, std::int64_t max_reply_bytes);

  void send(RedisCommand command, OnReply on_reply);
  /// What poll() should look for.
  short events() const;
  int fd() const { return context_ ? context_->fd : -1; }
  /// Does what poll() said can be done; replies go to those who sent the commands. False: the connection is broken.
  bool proceed(short ready);
  /// No more replies: tells all who wait.
  void give_up();

  bool idle() const { return waiting_.empty(); }
  bool all_sent() const { return out_.empty(); }
  /// Bytes that went out and came in: stands still when the server does.
  std::int64_t progress() const { return progress_; }

 private:
  struct FreeContext {
    void operator()(redisContext* context) const { redisFree(context); }
  };

  bool write();
  bool read();

  std::unique_ptr<redisContext, FreeContext> context_;  // connects, and owns the socket and the parser of replies
  std::int64_t max_reply_bytes_;
  bool connected_ = false;
  std::deque<RedisCommand> out_;
  std::size_t out_done_ = 0;  // bytes of the front that have gone out
  std::deque<OnReply> waiting_;
  std::vector<char> in_;
  std::int64_t progress_ = 0;
};

}  // namespace kv4::tier
