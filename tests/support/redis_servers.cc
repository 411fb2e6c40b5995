#include "support/redis_servers.h"

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <thread>

namespace kv4::test {
namespace {

using namespace std::chrono_literals;
using Time = std::chrono::steady_clock;

constexpr auto kJoinLimit = 30s, kStartLimit = 10s;
constexpr int kStarts = 6;

bool is_free(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  const bool bound = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  ::close(fd);
  return bound;
}

/// Null: no server answers there yet.
redisContext* connect(int port) {
  redisContext* context = redisConnectWithTimeout("127.0.0.1", port, {5, 0});
  if (context == nullptr || context->err != 0) {
    if (context != nullptr) redisFree(context);
    return nullptr;
  }
  redisSetTimeout(context, {5, 0});
  return context;
}

}  // namespace

int free_port() {
  constexpr int kFirst = 12'000, kPorts = 20'000;
  static std::mt19937 random{std::random_device{}()};
  for (int i = 0; i < kPorts; ++i)
    if (const int port = kFirst + static_cast<int>(random() % kPorts); is_free(port)) return port;
  throw std::runtime_error("no free port on loopback");
}

std::string why_no_redis() {
  if (const std::string why = tier::why_no_remote_tier(); !why.empty()) return why;
  const char* path = std::getenv("PATH");
  for (std::string_view rest = path == nullptr ? "" : path; !rest.empty();) {
    const std::string_view folder = rest.substr(0, rest.find(':'));
    if (::access((std::string(folder) + "/redis-server").c_str(), X_OK) == 0) return "";
    rest.remove_prefix(std::min(rest.size(), folder.size() + 1));
  }
  return "there is no redis-server in PATH (Debian: redis-server)";
}

RedisServers::RedisServers(Mode mode, std::vector<std::string> arguments)
    : mode_(mode), arguments_(std::move(arguments)), servers_(mode == Mode::cluster ? kNodes : 1) {
  std::string name = (std::filesystem::temp_directory_path() / "kv4_redis_XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder for redis servers");
  folder_ = name;
  for (Server& server : servers_) {
    int starts = 0;
    do {
      if (++starts > kStarts) throw std::runtime_error("redis-server does not start; see " + folder_.string());
      server.port = free_port();
      server.bus_port = free_port();
    } while (!start(server));
  }
  if (mode == Mode::cluster) join();
}

RedisServers::~RedisServers() {
  for (Server& server : servers_) kill(server);
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

bool RedisServers::start(Server& server) {
  launch(server);
  const std::string own = "process_id:" + std::to_string(server.pid) + "\r\n";
  for (const auto limit = Time::now() + kStartLimit; Time::now() < limit; std::this_thread::sleep_for(10ms)) {
    server.context = connect(server.port);
    if (server.context != nullptr && command(server, {"INFO", "server"}).find(own) != std::string::npos) return true;
    disconnect(server);  // no server yet, or another one
    if (::waitpid(server.pid, nullptr, WNOHANG) == server.pid) {
      server.pid = -1;
      return false;
    }
  }
  kill(server);
  return false;
}

void RedisServers::launch(Server& server) {
  const std::string folder = (folder_ / std::to_string(server.port)).string();
  std::filesystem::create_directories(folder);
  const std::string log_path = folder + "/log", port = std::to_string(server.port),
                    bus_port = std::to_string(server.bus_port);
  std::vector<const char*> arguments = {"redis-server", "--port",       port.c_str(), "--bind", "127.0.0.1",
                                        "--dir",        folder.c_str(), "--save",     "",       "--appendonly",
                                        "no",           "--daemonize",  "no"};
  if (mode_ == Mode::cluster)
    for (const char* argument : {"--cluster-enabled", "yes", "--cluster-port", bus_port.c_str(),
                                 "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"})
      arguments.push_back(argument);
  for (const std::string& argument : arguments_) arguments.push_back(argument.c_str());
  arguments.push_back(nullptr);
  const pid_t parent = ::getpid();
  server.pid = ::fork();
  if (server.pid < 0) throw std::runtime_error("redis-server cannot be started");
  if (server.pid > 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  const int log = ::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::dup2(log, STDOUT_FILENO);
  ::dup2(log, STDERR_FILENO);
  ::execvp("redis-server", const_cast<char* const*>(arguments.data()));
  ::_exit(1);
}

std::string RedisServers::command(int node, const std::vector<std::string>& arguments) {
  Server& server = servers_[static_cast<std::size_t>(node)];
  if (server.context != nullptr && server.context->err != 0) disconnect(server);
  if (server.context == nullptr) server.context = connect(server.port);
  if (server.context == nullptr) throw std::runtime_error("redis-server does not answer");
  return command(server, arguments);
}

std::string RedisServers::command(Server& server, const std::vector<std::string>& arguments) {
  std::vector<const char*> texts;
  std::vector<std::size_t> lengths;
  for (const std::string& argument : arguments) {
    texts.push_back(argument.data());
    lengths.push_back(argument.size());
  }
  auto* reply = static_cast<redisReply*>(
      redisCommandArgv(server.context, static_cast<int>(texts.size()), texts.data(), lengths.data()));
  if (reply == nullptr) throw std::runtime_error("redis " + arguments[0] + ": " + server.context->errstr);
  std::string text = "(nil)";
  if (reply->type == REDIS_REPLY_INTEGER) text = std::to_string(reply->integer);
  if (reply->str != nullptr) text.assign(reply->str, static_cast<std::size_t>(reply->len));
  if (reply->type == REDIS_REPLY_ARRAY) {
    text.clear();
    for (std::size_t i = 0; i < reply->elements; ++i)
      if (reply->element[i]->str != nullptr)
        text.append(reply->element[i]->str, static_cast<std::size_t>(reply->element[i]->len)).append("\n");
  }
  freeReplyObject(reply);
  return text;
}

void RedisServers::join() {
  for (int i = 0; i < kNodes; ++i) {
    const int first = tier::kRedisSlots * i / kNodes, last = tier::kRedisSlots * (i + 1) / kNodes - 1;
    command(i, {"CLUSTER", "ADDSLOTSRANGE", std::to_string(first), std::to_string(last)});
    command(i, {"CLUSTER", "SET-CONFIG-EPOCH", std::to_string(i + 1)});
  }
  for (int i = 1; i < kNodes; ++i)
    command(i,
            {"CLUSTER", "MEET", "127.0.0.1", std::to_string(servers_[0].port), std::to_string(servers_[0].bus_port)});
  wait_until_ok();
}

void RedisServers::wait_until_ok() {
  const auto limit = Time::now() + kJoinLimit;
  for (int i = 0; i < kNodes; ++i) {
    for (;;) {
      const std::string info = command(i, {"CLUSTER", "INFO"});
      if (info.find("cluster_state:ok") != std::string::npos &&
          info.find("cluster_slots_ok:16384") != std::string::npos &&
          info.find("cluster_known_nodes:3") != std::string::npos)
        break;
      if (Time::now() > limit) throw std::runtime_error("the redis cluster does not come up: " + info);
      std::this_thread::sleep_for(20ms);
    }
  }
}

tier::RedisAddress RedisServers::address(int node) const {
  return {"127.0.0.1", servers_[static_cast<std::size_t>(node)].port};
}

tier::RemoteOptions RedisServers::options() const {
  tier::RemoteOptions options;
  for (std::size_t i = 0; i < servers_.size(); ++i) options.servers.push_back(address(static_cast<int>(i)));
  options.layout_id = 11;
  options.max_payload_bytes = 8 << 20;
  return options;
}

int RedisServers::node_of(const std::string& name) const {
  const int slot = tier::redis_slot(name);
  int node = 0;
  while (slot >= tier::kRedisSlots * (node + 1) / kNodes) ++node;
  return node;
}

void RedisServers::clear() {
  for (int i = 0; i < static_cast<int>(servers_.size()); ++i) {
    command(i, {"FLUSHALL"});
    command(i, {"CONFIG", "SET", "maxmemory", "0"});
  }
}

void RedisServers::kill(int node) { kill(servers_[static_cast<std::size_t>(node)]); }

void RedisServers::kill(Server& server) {
  disconnect(server);
  if (server.pid <= 0) return;
  ::kill(server.pid, SIGKILL);
  ::waitpid(server.pid, nullptr, 0);
  server.pid = -1;
}

void RedisServers::disconnect(Server& server) {
  if (server.context != nullptr) redisFree(server.context);
  server.context = nullptr;
}

void RedisServers::restart(int node) {
  int starts = 0;
  while (!start(servers_[static_cast<std::size_t>(node)]))
    if (++starts == kStarts) throw std::runtime_error("redis-server does not start again; see " + folder_.string());
  wait_until_ok();
}

void RedisServers::stall(int node) { ::kill(servers_[static_cast<std::size_t>(node)].pid, SIGSTOP); }
void RedisServers::resume(int node) { ::kill(servers_[static_cast<std::size_t>(node)].pid, SIGCONT); }

std::string RedisServers::id_of(int node) { return command(node, {"CLUSTER", "MYID"}); }

void RedisServers::begin_move(int slot, int from, int to) {
  command(to, {"CLUSTER", "SETSLOT", std::to_string(slot), "IMPORTING", id_of(from)});
  command(from, {"CLUSTER", "SETSLOT", std::to_string(slot), "MIGRATING", id_of(to)});
}

void RedisServers::finish_move(int slot, int from, int to) {
  const std::string number = std::to_string(slot);
  for (;;) {
    const std::string keys = command(from, {"CLUSTER", "GETKEYSINSLOT", number, "1"});
    if (keys.empty()) break;
    command(from, {"MIGRATE", "127.0.0.1", std::to_string(servers_[static_cast<std::size_t>(to)].port),
                   keys.substr(0, keys.size() - 1), "0", "5000"});
  }
  command(to, {"CLUSTER", "SETSLOT", number, "NODE", id_of(to)});
  command(to, {"CLUSTER", "BUMPEPOCH"});  // this node's claim wins
  for (const int node : {from, 3 - to - from}) command(node, {"CLUSTER", "SETSLOT", number, "NODE", id_of(to)});
}

RedisServers& shared_redis() {
  static RedisServers servers;
  servers.clear();
  return servers;
}

}  // namespace kv4::test
