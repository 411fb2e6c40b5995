// The servers of a Redis cluster, or one server without cluster mode: the map from slots to servers, their connections,
// and batches of commands that run on all servers at the same time until a deadline.
//
// Order: commands to a server take effect in the order of their run(), even those without an answer in time. Either
// they are ahead of later ones in the same connection. Or that connection was dropped; then the next connection has it
// killed at the server (CLIENT KILL) before any use, because a stalled server might read the old commands last.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "tier/clock.h"
#include "tier/redis_connection.h"
#include "tier/remote_tier.h"

namespace kv4::tier {

/// One command to the server of a slot.
struct RedisOperation {
  int slot = 0;
  std::function<RedisCommand()> command;  // called again for every redirect
  /// Called with the reply, if there is one. False: such a command has no such reply; the result counts only where the
  /// reply is no error.
  std::function<bool(const redisReply& reply)> done;
};

class RedisCluster {
 public:
  /// `tls`: null for plain connections. Failures go to `failures`, under `side`.
  struct Shared {
    std::shared_ptr<const RedisAdmission> admission;
    std::shared_ptr<const RedisTls> tls;
    std::shared_ptr<RedisFailures> failures;
  };
  RedisCluster(const RemoteOptions& options, const Shared& shared, RedisFailures::Side side);
  ~RedisCluster();

  void run(std::span<const RedisOperation> operations, Deadline deadline);

  std::int64_t connects() const { return connects_; }  // this and the next: from any thread
  std::int64_t redirects() const { return redirects_; }

 private:
  struct Node;
  enum class Hello : std::uint8_t { waiting, done, refused };

  void begin_run(std::size_t answers);
  void exchange(Deadline deadline);
  void proceed(Node& node, short ready);
  void note_slow(Deadline now);
  void end_run(bool of_operations);
  void dispatch(std::size_t operation, Node* node, bool asking);
  void on_answer(Node& node, std::size_t operation, const redisReply* reply);

  Node* node_at(const RedisEndpoint& endpoint);
  /// Null: the server is not admitted, and nothing is sent there.
  Node* admit(const RedisAddress& named, const Node& by);
  bool connect(Node& node);
  void say_hello(Node& node);
  void on_auth(Node& node, const redisReply* reply);
  void on_hello(Node& node, const redisReply* reply);
  void refuse_hello(Node& node, const redisReply& reply);
  void send(Node& node, RedisCommand command, const ReplyLimits& limits, OnReply on_reply);
  void drop(Node& node);
  void settle(bool of_operations);

  bool find_slots(Deadline deadline);
  void on_slots(Node& node, const redisReply& reply);

  RemoteOptions options_;
  Shared shared_;
  RedisFailures::Side side_;
  ReplyLimits value_limits_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::array<Node*, kRedisSlots> slots_{};  // null: no server has the slot
  bool slots_known_ = false, slots_stale_ = true;
  Deadline slots_asked_{};
  bool slots_refused_ = false;  // the map names servers that are not admitted
  Deadline refused_until_{};

  // The current run.
  std::span<const RedisOperation> operations_;
  std::vector<int> redirects_of_;  // by operation
  std::size_t unanswered_ = 0;
  std::uint64_t run_ = 0;  // replies to earlier runs are dropped
  std::string refused_;    // a named server that is not admitted, and the server that named it

  std::atomic<std::int64_t> connects_{0}, redirects_{0};
};

}  // namespace kv4::tier
