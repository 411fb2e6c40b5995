// The remote tier beside a bare hiredis loop in one run: the same values, batches and servers, in turn.
//
//   kv4_remote_bench [ROUNDS] [BATCH] [BYTES]    starts three servers on loopback and ends them
//
// The bare loop knows every key's server, appends a batch's commands to that connection and reads the replies; it
// checks no bytes and follows no redirect.
#include <fmt/format.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/redis_servers.h"
#include "tier/remote_tier.h"

namespace {

using namespace kv4;
using Clock = std::chrono::steady_clock;

struct Value {
  tier::RecordId id;
  std::string name;
  int node = 0;
  std::vector<std::byte> bytes;
};

class BareLoop {
 public:
  explicit BareLoop(const test::RedisServers& servers) {
    for (int i = 0; i < test::RedisServers::kNodes; ++i) {
      contexts_.push_back(redisConnect("127.0.0.1", servers.address(i).port));
      const int on = 1;
      if (contexts_.back()->err != 0 ||
          ::setsockopt(contexts_.back()->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0)
        throw std::runtime_error("no connection for the bare loop");
    }
  }
  ~BareLoop() {
    for (redisContext* context : contexts_) redisFree(context);
  }
  void put(const std::vector<Value>& values) {
    run(values, [](redisContext* context, const Value& value) {
      const char* texts[] = {"SET", value.name.data(), reinterpret_cast<const char*>(value.bytes.data())};
      const std::size_t lengths[] = {3, value.name.size(), value.bytes.size()};
      redisAppendCommandArgv(context, 3, texts, lengths);
    });
  }
  /// Copies into a buffer, as the tier does.
  void get(const std::vector<Value>& values, std::vector<std::vector<std::byte>>& to) {
    std::size_t at = 0;
    run(
        values,
        [](redisContext* context, const Value& value) {
          const char* texts[] = {"GET", value.name.data()};
          const std::size_t lengths[] = {3, value.name.size()};
          redisAppendCommandArgv(context, 2, texts, lengths);
        },
        [&](const redisReply& reply) {
          if (std::cmp_not_equal(reply.len, to[at].size())) throw std::runtime_error("a value is missing");
          std::memcpy(to[at++].data(), reply.str, reply.len);
        });
  }

 private:
  template <class Append>
  void run(const std::vector<Value>& values, Append&& append) {
    run(values, append, [](const redisReply&) {});
  }
  template <class Append, class Take>
  void run(const std::vector<Value>& values, Append&& append, Take&& take) {
    for (std::size_t node = 0; node < contexts_.size(); ++node) {
      int sent = 0;
      for (const Value& value : values) {
        if (value.node != static_cast<int>(node)) continue;
        append(contexts_[node], value);
        ++sent;
      }
      for (; sent > 0; --sent) {
        void* object = nullptr;
        if (redisGetReply(contexts_[node], &object) != REDIS_OK) throw std::runtime_error(contexts_[node]->errstr);
        const auto* reply = static_cast<redisReply*>(object);
        if (reply->type == REDIS_REPLY_ERROR) throw std::runtime_error(reply->str);
        take(*reply);
        freeReplyObject(object);
      }
    }
  }
  std::vector<redisContext*> contexts_;
};

template <class Call>
double seconds(Call&& call) {
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void require_all(bool good) {
  if (!good) throw std::runtime_error("the tier did not answer");
}

int bench(int rounds, int batch, std::int64_t bytes) {
  if (const std::string why = test::why_no_redis(); !why.empty()) throw std::runtime_error(why);
  test::RedisServers servers;
  tier::RemoteOptions options = servers.options();
  options.max_payload_bytes = bytes;
  const std::unique_ptr<tier::Tier> remote = tier::make_remote_tier(options);
  BareLoop bare(servers);

  std::mt19937_64 random(1);
  std::vector<Value> values(batch);
  for (Value& value : values) {
    for (std::byte& b : value.id.key) b = static_cast<std::byte>(random() & 0xff);
    value.name = tier::redis_name(options.layout_id, value.id);
    value.node = servers.node_of(value.name);
    value.bytes.resize(bytes);
    for (std::byte& b : value.bytes) b = static_cast<std::byte>(random() & 0xff);
  }
  std::vector<std::vector<std::byte>> buffers(values.size(), std::vector<std::byte>(bytes));
  const auto soon = [] { return Clock::now() + std::chrono::seconds(30); };

  std::vector<double> bare_put, bare_get, tier_put, tier_get;
  for (int round = -2; round < rounds; ++round) {
    const double a = seconds([&] { bare.put(values); });
    const double b = seconds([&] { bare.get(values, buffers); });
    const double c = seconds([&] {
      std::vector<tier::PutRequest> requests;
      for (const Value& value : values) requests.push_back({value.id, value.bytes});
      remote->put(requests, soon());
      for (const tier::PutRequest& request : requests) require_all(request.status == tier::PutStatus::stored);
    });
    const double d = seconds([&] {
      std::vector<tier::GetRequest> requests;
      for (std::size_t i = 0; i < values.size(); ++i) requests.push_back({values[i].id, buffers[i]});
      remote->get(requests, soon());
      for (const tier::GetRequest& request : requests) require_all(request.status == tier::GetStatus::found);
    });
    if (round < 0) continue;
    bare_put.push_back(a);
    bare_get.push_back(b);
    tier_put.push_back(c);
    tier_get.push_back(d);
  }
  const double total = static_cast<double>(bytes) * batch * 1e-6;
  const auto line = [&](const char* what, const std::vector<double>& ours, const std::vector<double>& theirs) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(theirs[i] / ours[i]);
    fmt::print(
        "{}  remote tier {:7.0f} MB/s  bare hiredis {:7.0f} MB/s  ratio {:.2f} (of the medians), {:.2f} (median of "
        "{})\n",
        what, total / median(ours), total / median(theirs), median(theirs) / median(ours), median(ratios),
        ratios.size());
  };
  fmt::print("{} values of {} bytes in a batch, three servers on loopback\n", batch, bytes);
  line("put", tier_put, bare_put);
  line("get", tier_get, bare_get);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto argument = [&](int i, std::int64_t otherwise) {
      return argc > i ? std::strtoll(argv[i], nullptr, 10) : otherwise;
    };
    return bench(static_cast<int>(argument(1, 30)), static_cast<int>(argument(2, 16)), argument(3, 450944));
  } catch (const std::exception& e) {
    fmt::print(stderr, "kv4_remote_bench: {}\n", e.what());
    return 1;
  }
}
