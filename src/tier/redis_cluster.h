// The servers of a Redis cluster (or one without cluster mode): who serves a slot, connections that come and go, and
// batches of commands that run on all of them at the same time until a deadline.
//
// Order: commands to a server take effect in the order of their run(), those included that had no answer in time.
// Either they are still ahead of the next ones in the same connection; or that connection was dropped, and then the
// next one has it killed at the server before it is used, because a stalled server might find the old commands last.
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
  std::function<RedisCommand()> command;  // asked again for every redirect
  /// Not called where there is no answer. False: no such command has this one; of an error that says nothing.
  std::function<bool(const redisReply& reply)> done;
};

class RedisCluster {
 public:
  /// `tls`: null for plain connections. `failures` gets what goes wrong, as of `side`.
  struct Shared {
    std::shared_ptr<const RedisAdmission> admission;
    std::shared_ptr<const RedisTls> tls;
    std::shared_ptr<RedisFailures> failures;
  };
  RedisCluster(const RemoteOptions& options, const Shared& shared, RedisFailures::Side side);
  ~RedisCluster();

  void run(std::span<const RedisOperation> operations, Deadline deadline);

  std::int64_t connects() const { return connects_; }  // this and the next: any thread
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
  /// Null: nothing is ever sent there.
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
  std::array<Node*, kRedisSlots> slots_{};  // null: nobody serves it
  bool slots_known_ = false, slots_stale_ = true;
  Deadline slots_asked_{};
  bool slots_refused_ = false;  // the map names servers that are not admitted
  Deadline refused_until_{};

  // Of the run that goes on.
  std::span<const RedisOperation> operations_;
  std::vector<int> redirects_of_;  // an operation
  std::size_t unanswered_ = 0;
  std::uint64_t run_ = 0;  // replies to earlier ones go nowhere
  std::string refused_;    // of servers that were named and are not admitted: one of them, and who named it

  std::atomic<std::int64_t> connects_{0}, redirects_{0};
};

}  // namespace kv4::tier
