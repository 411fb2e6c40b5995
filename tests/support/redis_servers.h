// A Redis cluster of three masters on loopback, or a single server, for tests that start, stop and disturb it.
// Everything is in a folder of its own; the servers end with this process, however it ends.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tier/remote_tier.h"

struct redisContext;

namespace kv4::test {

/// Empty: redis-server can be started, and the build has a remote tier.
std::string why_no_redis();

class RedisServers {
 public:
  static constexpr int kNodes = 3;

  /// Each node has a third of the slots. Throws std::runtime_error where the servers do not start. `arguments`: further
  /// arguments of each server; it must still answer plain connections without a password on its port.
  enum class Mode : std::uint8_t { cluster, single };
  explicit RedisServers(Mode mode = Mode::cluster, std::vector<std::string> arguments = {});
  ~RedisServers();
  RedisServers(const RedisServers&) = delete;
  RedisServers& operator=(const RedisServers&) = delete;

  tier::RemoteOptions options() const;
  tier::RedisAddress address(int node) const;
  int node_of(const std::string& name) const;  // by the initial assignment of slots

  /// Runs a command and waits; returns the reply's text, or "(nil)".
  std::string command(int node, const std::vector<std::string>& arguments);
  void clear();  // deletes records and resets limits

  void kill(int node);
  void restart(int node);  // with no records
  void stall(int node);    // SIGSTOP
  void resume(int node);
  /// Moves all keys of the slot from one node to another; `between` runs during the move.
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

  bool start(Server& server);  // false: it ended because its port was taken, or did not answer in time
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

/// A port below those that connections get, so that no connection takes it while a server is down. Another test may
/// still take it before the server does; the caller then tries the next.
int free_port();

/// One cluster for all tests of a process that restore its state; every call clears it.
RedisServers& shared_redis();

}  // namespace kv4::test
