// A Redis cluster of three masters on loopback, or a single server, started and stopped by the tests that use it, and
// what can be done to it. Everything is in a folder of its own; the servers end with this process, however that ends.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tier/remote_tier.h"

struct redisContext;

namespace kv4::test {

/// Empty: redis-server can be started, and there is a remote tier.
std::string why_no_redis();

class RedisServers {
 public:
  static constexpr int kNodes = 3;

  /// Each node has a third of the slots. Throws std::runtime_error where they do not start. `arguments`: more for each
  /// server; it still answers plain connections without a password on its port.
  enum class Mode : std::uint8_t { cluster, single };
  explicit RedisServers(Mode mode = Mode::cluster, std::vector<std::string> arguments = {});
  ~RedisServers();
  RedisServers(const RedisServers&) = delete;
  RedisServers& operator=(const RedisServers&) = delete;

  tier::RemoteOptions options() const;
  tier::RedisAddress address(int node) const;
  int node_of(const std::string& name) const;  // as slots were given out at the start

  /// Runs a command, blocking; the reply's text, or "(nil)".
  std::string command(int node, const std::vector<std::string>& arguments);
  void clear();  // no records, no limits

  void kill(int node);
  void restart(int node);  // empty
  void stall(int node);    // SIGSTOP
  void resume(int node);
  /// All of the slot's keys go from one node to another; `between` runs while it is under way.
  template <class Between>
  void move_slot(int slot, int from, int to, Between&& between) {
    begin_move(slot, from, to);
    between();
    finish_move(slot, from, to);
  }

 private:
  struct Server {
    int port = 0, bus_port = 0;
    pid_t pid = -1;
    redisContext* context = nullptr;
  };

  bool start(Server& server);  // false: it ended, as its port was taken, or did not answer in time
  void launch(Server& server);
  void kill(Server& server);
  void disconnect(Server& server);
  std::string command(Server& server, const std::vector<std::string>& arguments);
  void join();
  void wait_until_ok();
  void begin_move(int slot, int from, int to);
  void finish_move(int slot, int from, int to);
  std::string id_of(int node);

  Mode mode_;
  std::vector<std::string> arguments_;
  std::filesystem::path folder_;
  std::vector<Server> servers_;
};

/// Below the ports that connections get, so that none takes it while a server is down. Another test may still take it
/// before the server does: whoever starts one tries again with the next.
int free_port();

/// One cluster for all tests of a process that leave it as they found it; cleared on every call.
RedisServers& shared_redis();

}  // namespace kv4::test
