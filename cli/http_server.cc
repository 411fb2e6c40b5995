#include "http_server.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>

#include "base/check.h"

namespace kv4::cli {
namespace {

constexpr std::chrono::seconds kClientLimit{2};  // for all of a request, and for each part of an answer

/// As much of a request as says what is wanted; whoever sends nothing is left.
std::string read_request(int socket) {
  constexpr std::size_t kMost = 8192;
  const auto deadline = std::chrono::steady_clock::now() + kClientLimit;
  std::string text;
  char piece[1024];
  while (text.size() < kMost && text.find("\r\n\r\n") == std::string::npos) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd wait{socket, POLLIN, 0};
    if (left.count() <= 0 || poll(&wait, 1, static_cast<int>(left.count())) <= 0) break;
    const ssize_t got = recv(socket, piece, sizeof piece, 0);
    if (got <= 0) break;
    text.append(piece, static_cast<std::size_t>(got));
  }
  return text;
}

void answer(int socket, std::string_view status, std::string_view type, std::string_view body) {
  const timeval limit{.tv_sec = kClientLimit.count(), .tv_usec = 0};
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  const std::string text = fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}; charset=utf-8\r\nContent-Length: {}\r\nCache-Control: no-store\r\n"
      "Connection: close\r\n\r\n{}",
      status, type, body.size(), body);
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t sent = send(socket, text.data() + at, text.size() - at, MSG_NOSIGNAL);
    if (sent <= 0) return;
    at += static_cast<std::size_t>(sent);
  }
}

/// The path of "GET /path?query HTTP/1.1"; empty: something else.
std::string path_of(const std::string& request) {
  constexpr std::string_view kGet = "GET ";
  if (!request.starts_with(kGet)) return {};
  return request.substr(kGet.size(), request.find_first_of(" ?\r\n", kGet.size()) - kGet.size());
}

struct Address {
  std::string host = "127.0.0.1", port;
};

Address parse_address(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos) return {.port = text};
  std::string host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  return {host, text.substr(colon + 1)};
}

/// -1, with errno or a resolver's message in `why`.
int open_listener(const Address& address, std::string& why) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  if (const int failed = getaddrinfo(address.host.c_str(), address.port.c_str(), &hints, &found); failed != 0) {
    why = gai_strerror(failed);
    return -1;
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, &freeaddrinfo);
  const int listener = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (listener >= 0 && bind(listener, found->ai_addr, found->ai_addrlen) == 0 && listen(listener, 16) == 0)
    return listener;
  why = std::strerror(errno);
  if (listener >= 0) close(listener);
  return -1;
}

/// HOST:PORT as it is bound.
std::string name_of(int listener) {
  sockaddr_storage bound{};
  socklen_t bytes = sizeof bound;
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  auto* const any = reinterpret_cast<sockaddr*>(&bound);
  if (getsockname(listener, any, &bytes) == 0)
    getnameinfo(any, bytes, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  return bound.ss_family == AF_INET6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

}  // namespace

struct HttpServer::Server {
  struct Content {
    std::string type, body;
  };

  int listener = -1;
  std::mutex mutex;
  std::map<std::string, Content> contents;  // by path, under the mutex
  std::atomic<bool> ends = false;
  std::thread thread;

  Server(const std::string& wanted, const char* flag) {
    std::string why;
    listener = open_listener(parse_address(wanted), why);
    require(listener >= 0, ErrorCode::bad_argument, "{} {} cannot be served: {}", flag, wanted, why);
    thread = std::thread([this] { run(); });
  }
  ~Server() {
    ends = true;
    thread.join();
    close(listener);
  }

  void run() {
    while (!ends) {
      pollfd wait{listener, POLLIN, 0};
      if (poll(&wait, 1, 100) <= 0) continue;
      const int client = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (client < 0) continue;
      serve(client);
      close(client);
    }
  }

  void serve(int client) {
    const std::string path = path_of(read_request(client));
    Content content;
    std::string known;
    {
      const std::lock_guard lock(mutex);
      if (const auto found = contents.find(path); found != contents.end()) content = found->second;
      for (const auto& [each, unused] : contents) known += " " + each;
    }
    if (content.type.empty())
      answer(client, "404 Not Found", "text/plain", fmt::format("there is{}\n", known));
    else
      answer(client, "200 OK", content.type, content.body);
  }
};

HttpServer::HttpServer(const std::string& listen, const char* flag) : server_(std::make_unique<Server>(listen, flag)) {}
HttpServer::~HttpServer() = default;

std::string HttpServer::address() const { return fmt::format("http://{}/", name_of(server_->listener)); }

void HttpServer::set(const std::string& path, const std::string& type, std::string body) {
  const std::lock_guard lock(server_->mutex);
  server_->contents[path] = {type, std::move(body)};
}

}  // namespace kv4::cli
