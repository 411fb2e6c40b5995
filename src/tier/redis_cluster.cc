#include "tier/redis_cluster.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <utility>

#include "base/undo.h"

namespace kv4::tier {
namespace {

constexpr int kMaxRedirects = 5;         // per command
constexpr std::size_t kMaxNodes = 1000;  // a cluster has no more masters
constexpr Duration kSlotsAskedEvery = std::chrono::milliseconds(100);
constexpr Duration kRefusalKept = std::chrono::seconds(10);  // so long a refusal counts: not every run meets it
// Enough for every slot on its own with three servers. The tree of 2^18 elements takes 30 MB.
constexpr ReplyLimits kSlotsLimits = {.depth = 4, .elements = 1 << 18, .bulk_bytes = 1 << 10, .total_bytes = 16 << 20};
constexpr ReplyLimits kHelloLimits = {.bulk_bytes = kMaxLineBytes, .total_bytes = 2 * kMaxLineBytes};
constexpr std::int64_t kRecordSlack = 4 << 10;  // bytes of a record beside its payload and header

Deadline clock_now() { return std::chrono::steady_clock::now(); }

/// A connection as its server names it. After a restart of the server the number alone may name another client.
struct ClientName {
  std::string id, address;
  bool empty() const { return id.empty(); }
};

/// Parses the reply to CLIENT INFO: "id=7 addr=127.0.0.1:41234 laddr=..."
ClientName parse_client(std::string_view info) {
  const auto field = [&](std::string_view name) {
    const std::size_t at = info.starts_with(name) ? 0 : info.find(' ' + std::string(name));
    if (at == std::string_view::npos) return std::string();
    const std::size_t begin = info.find('=', at) + 1;
    return std::string(info.substr(begin, info.find_first_of(" \r\n", begin) - begin));
  };
  return {field("id="), field("addr=")};
}

}  // namespace

struct RedisCluster::Node {
  struct Unsent {
    RedisCommand command;
    ReplyLimits limits;
    OnReply on_reply;
  };
  RedisEndpoint endpoint;
  std::string shown;  // its name and port
  std::unique_ptr<RedisConnection> connection;
  Hello hello = Hello::waiting;
  std::vector<Unsent> queue;  // commands that wait for the hello
  ClientName client;          // the connection's name at the server; empty: not known yet
  ClientName dropped;         // that of the previous connection, if it may have commands under way
  Duration pause{};           // before this connection; 0: none was needed
  Deadline retry_at{};
  std::int64_t progress = 0;  // the connection's progress() at the last look
  Deadline progress_at{};     // since when it owes an answer and makes no progress
  std::int64_t replies = 0;   // the connection's replies() at the last look
  Deadline replied_at{};      // since when it owes a whole answer
  // In the current run.
  RedisFailure failure;
  bool worked = false;

  void fail(const RedisFailure& why) {
    if (failure.reason == FailureReason::none) failure = why;
  }
};

RedisCluster::RedisCluster(const RemoteOptions& options, const Shared& shared, RedisFailures::Side side)
    : options_(options), shared_(shared), side_(side) {
  value_limits_.bulk_bytes = options.max_payload_bytes + kRecordHeaderBytes + kRecordSlack;
  value_limits_.total_bytes = value_limits_.bulk_bytes + kMaxLineBytes;
  for (const RedisEndpoint& server : shared.admission->servers()) node_at(server);
}

RedisCluster::~RedisCluster() = default;

// --- runs

void RedisCluster::run(std::span<const RedisOperation> operations, Deadline deadline) {
  // Where memory is refused: the payloads of this run go away, so none of it may be sent any more. A connection may be
  // half-way through its hello.
  Undo drop_all([this] {
    ++run_;
    operations_ = {};
    for (const auto& node : nodes_) {
      node->queue.clear();
      if (node->hello == Hello::done) std::swap(node->dropped, node->client);
      node->hello = Hello::waiting;
      node->connection.reset();
    }
  });
  if (!find_slots(deadline)) {
    settle(false);
    return drop_all.keep();
  }
  begin_run(operations.size());
  operations_ = operations;
  redirects_of_.assign(operations.size(), 0);
  for (std::size_t i = 0; i < operations.size(); ++i) dispatch(i, slots_[operations[i].slot], false);
  exchange(deadline);
  end_run(true);
  drop_all.keep();
}

void RedisCluster::begin_run(std::size_t answers) {
  ++run_;
  unanswered_ = answers;
}

/// Sends and receives until every operation is answered or given up, or until the deadline.
void RedisCluster::exchange(Deadline deadline) {
  std::vector<pollfd> polled;
  std::vector<Node*> asked;
  while (unanswered_ > 0) {
    const Deadline now = clock_now();
    if (now >= deadline) return note_slow(now);
    Deadline wake = deadline;
    polled.clear();
    asked.clear();
    for (const auto& node : nodes_) {
      if (!node->connection || node->connection->idle()) continue;
      wake = node->connection->more() ? now : std::min(wake, node->progress_at + options_.silence_limit);
      polled.push_back({node->connection->fd(), node->connection->events(), 0});
      asked.push_back(node.get());
    }
    if (polled.empty()) return;
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(wake - now).count();
    (void)::poll(polled.data(), polled.size(), static_cast<int>(std::clamp<std::int64_t>(wait, 0, 60'000)));
    for (std::size_t i = 0; i < polled.size(); ++i) proceed(*asked[i], polled[i].revents);
  }
}

void RedisCluster::proceed(Node& node, short ready) {
  bool alive = node.connection->proceed(ready) && node.hello != Hello::refused;
  // The time after a read: nobody reads between runs, and an answer may have waited since the last one.
  const Deadline now = clock_now();
  if (std::exchange(node.replies, node.connection->replies()) != node.connection->replies()) node.replied_at = now;
  if (std::exchange(node.progress, node.connection->progress()) != node.connection->progress()) {
    node.progress_at = now;
  } else if (alive && !node.connection->idle() && now - node.progress_at >= options_.silence_limit) {
    node.connection->time_out();
    alive = false;
  }
  if (!alive) drop(node);
}

/// Called at the deadline of a run: a server that sends only a few bytes now and then counts as silent.
void RedisCluster::note_slow(Deadline now) {
  for (const auto& node : nodes_)
    if (node->connection && !node->connection->idle() && now - node->replied_at >= options_.silence_limit)
      node->fail({FailureReason::silent, "it is too slow: it owes a whole answer since long before the deadline"});
}

/// Ends a run: its payloads may go away afterwards.
void RedisCluster::end_run(bool of_operations) {
  ++run_;
  for (const auto& node : nodes_) {
    node->queue.clear();
    if (node->connection && node->hello == Hello::done && !node->connection->all_sent()) drop(*node);
  }
  operations_ = {};
  settle(of_operations);
}

/// A server counts as working after a whole run without a failure: a full one may take every second record.
void RedisCluster::settle(bool of_operations) {
  for (const auto& node : nodes_) {
    if (node->failure.reason != FailureReason::none)
      shared_.failures->failed(side_, node->shown, node->failure);
    else if (node->worked && of_operations)
      shared_.failures->worked(side_, node->shown);
    node->failure = {};
    node->worked = false;
  }
  constexpr const char* kCluster = "of the cluster";
  const Deadline now = clock_now();
  if (!refused_.empty()) {
    shared_.failures->failed(side_, kCluster, {FailureReason::not_admitted, std::exchange(refused_, {})});
    refused_until_ = now + kRefusalKept;
  } else if (of_operations && !slots_refused_ && now >= refused_until_) {
    shared_.failures->worked(side_, kCluster);
  }
}

void RedisCluster::dispatch(std::size_t operation, Node* node, bool asking) {
  if (node == nullptr || !connect(*node)) {
    --unanswered_;
    slots_stale_ = true;
    return;
  }
  if (asking) send(*node, redis_command({"ASKING"}), value_limits_, [](const redisReply*) {});
  const auto on_reply = [this, node, operation, run = run_](const redisReply* reply) {
    if (run == run_) on_answer(*node, operation, reply);
  };
  send(*node, operations_[operation].command(), value_limits_, on_reply);
}

void RedisCluster::on_answer(Node& node, std::size_t operation, const redisReply* reply) {
  if (reply == nullptr) return dispatch(operation, nullptr, false);
  if (reply->type == REDIS_REPLY_ERROR) {
    const RedisRedirect redirect = parse_redirect(text_of(*reply), node.endpoint.name);
    if (redirect.kind != RedisRedirect::Kind::none) {
      ++redirects_;
      Node* to = admit(redirect.to, node);
      if (redirect.kind == RedisRedirect::Kind::moved) {
        slots_[redirect.slot] = to;
        slots_stale_ = true;
      }
      if (++redirects_of_[operation] > kMaxRedirects) to = nullptr;
      return dispatch(operation, to, redirect.kind == RedisRedirect::Kind::ask);
    }
    if (text_of(*reply).starts_with("CLUSTERDOWN")) slots_stale_ = true;
    // A value of another type under a record's name is damage of that record, not a failure of the server.
    if (!text_of(*reply).starts_with("WRONGTYPE")) node.fail(failure_of_error(text_of(*reply), options_.password));
  }
  --unanswered_;
  if (operations_[operation].done(*reply) || reply->type == REDIS_REPLY_ERROR)
    node.worked = true;
  else
    node.fail({FailureReason::not_redis, "its answers are not those to the commands"});
}

// --- connections

RedisCluster::Node* RedisCluster::node_at(const RedisEndpoint& endpoint) {
  for (const auto& node : nodes_)
    if (node->endpoint.name == endpoint.name) return node.get();
  if (nodes_.size() >= kMaxNodes) return nullptr;
  auto node = std::make_unique<Node>();
  node->endpoint = endpoint;
  node->shown = to_text(endpoint.name);
  nodes_.push_back(std::move(node));
  return nodes_.back().get();
}

RedisCluster::Node* RedisCluster::admit(const RedisAddress& named, const Node& by) {
  const std::optional<RedisEndpoint> endpoint = shared_.admission->find(named);
  Node* const node = endpoint ? node_at(*endpoint) : nullptr;
  if (node == nullptr && refused_.empty())
    refused_ = fmt::format("{} names {}, {}; nothing is sent there", by.shown, printable(to_text(named)),
                           endpoint ? fmt::format("one server more than the {} that are kept", kMaxNodes)
                                    : "which is neither configured nor allowed");
  return node;
}

/// False: there is no connection, and none is tried now.
bool RedisCluster::connect(Node& node) {
  if (node.connection) return true;
  const Deadline now = clock_now();
  if (now < node.retry_at) return false;
  ++connects_;
  node.connection = std::make_unique<RedisConnection>(node.endpoint, shared_.tls.get());
  node.progress = node.replies = 0;
  node.progress_at = node.replied_at = now;
  if (node.connection->failure().reason != FailureReason::none) {
    drop(node);
    return false;
  }
  say_hello(node);
  return true;
}

void RedisCluster::say_hello(Node& node) {
  node.hello = Hello::waiting;
  node.client = {};
  const bool named = !options_.user.empty();
  if (!options_.password.empty())
    node.connection->send(
        named ? redis_command({"AUTH", options_.user, options_.password}) : redis_command({"AUTH", options_.password}),
        kHelloLimits, [this, &node](const redisReply* reply) { on_auth(node, reply); });
  node.connection->send(redis_command({"CLIENT", "INFO"}), kHelloLimits,
                        [this, &node](const redisReply* reply) { on_hello(node, reply); });
}

void RedisCluster::refuse_hello(Node& node, const redisReply& reply) {
  node.hello = Hello::refused;
  node.fail(reply.type == REDIS_REPLY_ERROR
                ? failure_of_error(text_of(reply), options_.password)
                : RedisFailure{FailureReason::not_redis, "its answers are not those to AUTH and CLIENT"});
}

/// The reply to AUTH is a status.
void RedisCluster::on_auth(Node& node, const redisReply* reply) {
  if (reply != nullptr && reply->type != REDIS_REPLY_STATUS) refuse_hello(node, *reply);
}

/// The reply to CLIENT INFO is a string, that to CLIENT KILL a number.
void RedisCluster::on_hello(Node& node, const redisReply* reply) {
  if (reply == nullptr || node.hello != Hello::waiting) return;
  if (node.client.empty()) {
    if (reply->type == REDIS_REPLY_STRING) node.client = parse_client(text_of(*reply));
    if (node.client.empty()) return refuse_hello(node, *reply);
    if (!node.dropped.empty())
      return node.connection->send(
          redis_command({"CLIENT", "KILL", "ID", node.dropped.id, "ADDR", node.dropped.address}), kHelloLimits,
          [this, &node](const redisReply* killed) { on_hello(node, killed); });
  } else if (reply->type != REDIS_REPLY_INTEGER) {
    return refuse_hello(node, *reply);
  }
  node.dropped = {};
  node.hello = Hello::done;
  node.pause = Duration(0);
  for (Node::Unsent& unsent : std::exchange(node.queue, {}))
    send(node, std::move(unsent.command), unsent.limits, std::move(unsent.on_reply));
}

void RedisCluster::send(Node& node, RedisCommand command, const ReplyLimits& limits, OnReply on_reply) {
  if (node.hello != Hello::done) {
    node.queue.push_back({std::move(command), limits, std::move(on_reply)});
    return;
  }
  if (node.connection->idle()) node.progress_at = node.replied_at = clock_now();
  node.connection->send(std::move(command), limits, std::move(on_reply));
}

void RedisCluster::drop(Node& node) {
  if (node.hello == Hello::done && !node.connection->idle()) node.dropped = node.client;
  node.hello = Hello::waiting;
  node.pause = node.pause == Duration(0) ? options_.first_pause : std::min(node.pause * 2, options_.longest_pause);
  node.retry_at = clock_now() + node.pause;
  const std::unique_ptr<RedisConnection> connection = std::move(node.connection);
  node.fail(connection->failure());
  connection->give_up();
  for (const Node::Unsent& unsent : std::exchange(node.queue, {})) unsent.on_reply(nullptr);
}

// --- slots

/// True: there is a map of the slots, perhaps an old one.
bool RedisCluster::find_slots(Deadline deadline) {
  const Deadline start = clock_now();
  if (start >= deadline) return false;
  if (slots_known_ && (!slots_stale_ || start < slots_asked_ + kSlotsAskedEvery)) return true;
  slots_asked_ = start;
  for (const bool only_ready : {true, false}) {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      Node& node = *nodes_[i];
      const bool ready = node.connection && node.hello == Hello::done && node.connection->idle();
      if (ready != only_ready || !connect(node)) continue;
      const Deadline now = clock_now();
      if (now >= deadline) return slots_known_;
      bool answered = false;
      begin_run(1);
      const auto on_reply = [&, run = run_](const redisReply* reply) {
        if (run != run_) return;
        --unanswered_;
        slots_stale_ = true;
        if (reply != nullptr) on_slots(node, *reply);
        answered = reply != nullptr && !slots_stale_;
      };
      send(node, redis_command({"CLUSTER", "SLOTS"}), kSlotsLimits, on_reply);
      // Each server gets half of the remaining time, so that the next one has a chance, but no more than it takes to
      // see that it is silent.
      exchange(now + std::min<Duration>(2 * options_.silence_limit, (deadline - now) / 2));
      const bool found = answered;
      end_run(false);
      if (found) return true;
    }
  }
  return slots_known_;
}

void RedisCluster::on_slots(Node& node, const redisReply& reply) {
  std::array<Node*, kRedisSlots> slots{};
  const auto is_nonsense = [&] { node.fail({FailureReason::not_redis, "its list of slots makes no sense"}); };
  bool refused = false;
  if (reply.type == REDIS_REPLY_ERROR) {
    if (text_of(reply).find("cluster support disabled") == std::string_view::npos)
      return node.fail(failure_of_error(text_of(reply), options_.password));
    slots.fill(&node);
  } else {
    if (reply.type != REDIS_REPLY_ARRAY) return is_nonsense();
    if (reply.elements == 0) return node.fail({FailureReason::server_error, "its cluster serves no slots"});
    for (std::size_t i = 0; i < reply.elements; ++i) {
      const redisReply& range = *reply.element[i];  // first, last, master, replicas
      if (range.type != REDIS_REPLY_ARRAY || range.elements < 3) return is_nonsense();
      const redisReply &first = *range.element[0], &last = *range.element[1], &master = *range.element[2];
      if (first.type != REDIS_REPLY_INTEGER || last.type != REDIS_REPLY_INTEGER || first.integer < 0 ||
          first.integer > last.integer || last.integer >= kRedisSlots)
        return is_nonsense();
      if (master.type != REDIS_REPLY_ARRAY || master.elements < 2 || master.element[1]->type != REDIS_REPLY_INTEGER ||
          master.element[1]->integer < 0 || master.element[1]->integer > 65535)
        return is_nonsense();
      RedisAddress address{std::string(text_of(*master.element[0])), static_cast<int>(master.element[1]->integer)};
      if (address.host.empty()) address.host = node.endpoint.name.host;
      Node* const to = admit(address, node);
      refused = refused || to == nullptr;
      std::fill(slots.begin() + first.integer, slots.begin() + last.integer + 1, to);
    }
  }
  slots_ = slots;
  slots_refused_ = refused;
  slots_known_ = true;
  slots_stale_ = false;
}

}  // namespace kv4::tier
