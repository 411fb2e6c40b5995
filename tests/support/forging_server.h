// A server on loopback that reads commands as a Redis server does and sends any answer that a test wants.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace kv4::test {

class ForgingServer {
 public:
  using Arguments = std::vector<std::string>;
  /// The bytes of the answer. Each connection has a thread; calls are serialised.
  using Answer = std::function<std::string(const Arguments& command)>;

  explicit ForgingServer(Answer answer) : answer_(std::move(answer)) {
    socket_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    if (::bind(socket_, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(socket_, 64) != 0)
      throw std::runtime_error("no server on loopback");
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { accept_all(); });
  }
  ~ForgingServer() {
    stopping_ = true;
    ::shutdown(socket_, SHUT_RDWR);
    thread_.join();
    {
      const std::lock_guard lock(mutex_);
      for (const int client : clients_) ::shutdown(client, SHUT_RDWR);
    }
    for (std::thread& each : threads_) each.join();
    for (const int client : clients_) ::close(client);
    ::close(socket_);
  }
  ForgingServer(const ForgingServer&) = delete;
  ForgingServer& operator=(const ForgingServer&) = delete;

  /// Sends the first `bytes` of an answer at once and the rest byte by byte.
  void trickle_from(std::size_t bytes, std::chrono::milliseconds pause) {
    trickle_pause_ = pause;
    trickle_from_ = bytes;
  }

  int port() const { return port_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  int connections() const { return connections_; }
  /// All received bytes in order.
  std::string received() {
    const std::lock_guard lock(mutex_);
    return received_;
  }

  /// The first replies of a server without cluster mode; "": another command.
  static std::string hello(const Arguments& command) {
    if (command[0] == "AUTH") return "+OK\r\n";
    if (command[0] == "CLIENT") return command[1] == "INFO" ? "$24\r\nid=7 addr=127.0.0.1:4123\r\n" : ":1\r\n";
    if (command[0] == "CLUSTER") return "-ERR This instance has cluster support disabled\r\n";
    return "";
  }

 private:
  void accept_all() {
    for (int client; (client = ::accept(socket_, nullptr, nullptr)) >= 0;) {
      ++connections_;
      const std::lock_guard lock(mutex_);
      clients_.push_back(client);
      threads_.emplace_back([this, client] { serve(client); });
    }
  }
  void serve(int client) {
    std::string in;
    char bytes[65536];
    for (ssize_t got; (got = ::recv(client, bytes, sizeof(bytes), 0)) > 0;) {
      std::string out;
      {
        const std::lock_guard lock(mutex_);
        received_.append(bytes, static_cast<std::size_t>(got));
        in.append(bytes, static_cast<std::size_t>(got));
        for (Arguments command; !(command = take_command(in)).empty();) out += answer_(command);
      }
      for (std::size_t at = 0; at < out.size() && !stopping_;) {
        const bool trickles = at >= trickle_from_;
        if (trickles) std::this_thread::sleep_for(trickle_pause_.load());
        const std::size_t size = trickles ? 1 : std::min(out.size(), trickle_from_.load()) - at;
        const ssize_t sent = ::send(client, out.data() + at, size, MSG_NOSIGNAL);
        if (sent <= 0) return;
        at += static_cast<std::size_t>(sent);
      }
    }
    ::shutdown(client, SHUT_RDWR);
  }
  /// Empty: the command is still incomplete.
  static Arguments take_command(std::string& in) {
    std::size_t at = 0;
    const auto number = [&](char type, std::size_t& out) {
      const std::size_t end = in.find("\r\n", at);
      if (end == std::string::npos || in[at] != type) return false;
      out = std::strtoul(in.c_str() + at + 1, nullptr, 10);
      at = end + 2;
      return true;
    };
    std::size_t count = 0, size = 0;
    if (in.empty() || !number('*', count)) return {};
    Arguments out;
    for (std::size_t i = 0; i < count; ++i) {
      if (at >= in.size() || !number('$', size) || in.size() < at + size + 2) return {};
      out.push_back(in.substr(at, size));
      at += size + 2;
    }
    in.erase(0, at);
    return out;
  }

  Answer answer_;
  int socket_ = -1, port_ = 0;
  std::atomic<bool> stopping_ = false;
  std::atomic<int> connections_ = 0;
  std::atomic<std::size_t> trickle_from_ = SIZE_MAX;
  std::atomic<std::chrono::milliseconds> trickle_pause_{};
  std::mutex mutex_;
  std::vector<int> clients_;
  std::string received_;
  std::vector<std::thread> threads_;
  std::thread thread_;
};

}  // namespace kv4::test
