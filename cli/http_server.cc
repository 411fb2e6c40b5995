// GNU libmicrohttpd carries the protocol. One thread polls all connections, so a slow client costs a socket and some
// KB. With cpp-httplib and civetweb it would occupy a worker that others wait for.
#include "http_server.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>

#include "accept_header.h"
#include "base/check.h"

namespace kv4::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kMaxConnections = 512;             // one more ends the oldest
constexpr unsigned kIdleSeconds = 5;                  // without a byte in either direction
constexpr std::chrono::seconds kConnectionLimit{15};  // for a request and its answer together
constexpr std::size_t kMaxRequestBytes = 16384;       // line and headers; larger ones are refused
constexpr int kBacklog = 128;

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
  const int listener = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (listener >= 0 && bind(listener, found->ai_addr, found->ai_addrlen) == 0 && listen(listener, kBacklog) == 0)
    return listener;
  why = std::strerror(errno);
  if (listener >= 0) close(listener);
  return -1;
}

/// The bound HOST:PORT.
std::string name_of(int listener) {
  sockaddr_storage bound{};
  socklen_t bytes = sizeof bound;
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  auto* const any = reinterpret_cast<sockaddr*>(&bound);
  if (getsockname(listener, any, &bytes) == 0)
    getnameinfo(any, bytes, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  return bound.ss_family == AF_INET6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

/// HOST of "HOST:PORT" or "[HOST]:PORT".
std::string host_of(std::string_view text) {
  if (text.starts_with('[')) return std::string(text.substr(1, text.find(']') - 1));
  return std::string(text.substr(0, text.rfind(':')));
}

bool is_address(const std::string& host) {
  in6_addr unused{};
  return inet_pton(AF_INET, host.c_str(), &unused) == 1 || inet_pton(AF_INET6, host.c_str(), &unused) == 1;
}

bool is_loopback(int listener) {
  sockaddr_storage bound{};
  socklen_t bytes = sizeof bound;
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &bytes) != 0) return false;
  if (bound.ss_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<sockaddr_in6&>(bound).sin6_addr);
  return ntohl(reinterpret_cast<sockaddr_in&>(bound).sin_addr.s_addr) >> 24 == 127;
}

/// The response lives until destroyed; connections that still send it share it.
struct ResponseDeleter {
  void operator()(MHD_Response* response) const { MHD_destroy_response(response); }
};
using Response = std::unique_ptr<MHD_Response, ResponseDeleter>;

/// Null: not enough memory.
Response make_response(const std::string& type, const std::string& body) {
  Response out(MHD_create_response_from_buffer(body.size(), const_cast<char*>(body.data()), MHD_RESPMEM_MUST_COPY));
  if (out == nullptr) return out;
  const std::pair<const char*, std::string> headers[] = {
      {"Content-Type", type + "; charset=utf-8"},
      {"Cache-Control", "no-store"},
      {"Connection", "close"},  // idle connections would only wait for their end
      {"X-Content-Type-Options", "nosniff"},
      {"X-Frame-Options", "DENY"},
      {"Content-Security-Policy",
       "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"}};
  for (const auto& [name, value] : headers) MHD_add_response_header(out.get(), name, value.c_str());
  return out;
}

}  // namespace

struct HttpServer::Server {
  struct Connection {
    int socket;
    Clock::time_point begun;
  };

  int listener = -1;
  bool loopback = false;
  std::string name;  // the requested host name
  std::mutex mutex;
  std::condition_variable wake;
  bool ends = false;  // the mutex guards it and all members below
  struct Offer {
    std::string type;
    Response response;
  };
  std::map<std::string, std::vector<Offer>> responses;  // by path; never empty
  std::list<Connection> connections;                    // oldest first
  Clock::time_point last_asked{};
  std::thread reaper;
  MHD_Daemon* daemon = nullptr;

  Server(const std::string& wanted, const char* flag) {
    const Address address = parse_address(wanted);
    std::string why;
    listener = open_listener(address, why);
    require(listener >= 0, ErrorCode::bad_argument, "{} {} cannot be served: {}", flag, wanted, why);
    loopback = is_loopback(listener);
    name = address.host;
    daemon =
        MHD_start_daemon(MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO, 0, nullptr, nullptr, &Server::answer, this,
                         MHD_OPTION_LISTEN_SOCKET, listener, MHD_OPTION_CONNECTION_LIMIT, kMaxConnections + 1,
                         MHD_OPTION_CONNECTION_TIMEOUT, kIdleSeconds, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                         kMaxRequestBytes, MHD_OPTION_NOTIFY_CONNECTION, &Server::notice, this, MHD_OPTION_END);
    if (daemon == nullptr) {
      close(listener);
      fail(ErrorCode::bad_argument, "{} {} cannot be served: no thread or memory for it", flag, wanted);
    }
    reaper = std::thread([this] { end_old_connections(); });
  }
  ~Server() {
    {
      const std::lock_guard lock(mutex);
      ends = true;
    }
    wake.notify_all();
    reaper.join();
    MHD_stop_daemon(daemon);  // closes all connections and the listener
  }

  /// The daemon's time limit restarts with every byte; this one does not.
  void end_old_connections() {
    std::unique_lock lock(mutex);
    while (!wake.wait_for(lock, std::chrono::milliseconds(500), [this] { return ends; }))
      for (const Connection& connection : connections)
        if (Clock::now() - connection.begun > kConnectionLimit) shutdown(connection.socket, SHUT_RDWR);
  }

  static void notice(void* self, MHD_Connection* connection, void** context, MHD_ConnectionNotificationCode code) {
    auto& server = *static_cast<Server*>(self);
    const std::lock_guard lock(server.mutex);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
      const int socket = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
      if (server.connections.size() >= kMaxConnections) shutdown(server.connections.front().socket, SHUT_RDWR);
      *context = &server.connections.emplace_back(Connection{socket, Clock::now()});
    } else {
      server.connections.remove_if([&](const Connection& each) { return &each == *context; });
    }
  }

  /// A page of another site could give its own name our address and read our pages (DNS rebinding). On loopback, only
  /// addresses, localhost and the requested host name are accepted.
  bool believes(MHD_Connection* connection) const {
    const char* host = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Host");
    if (!loopback || host == nullptr) return true;
    const std::string asked = host_of(host);
    return is_address(asked) || asked == "localhost" || asked == name;
  }

  static const Offer& best_offer(MHD_Connection* connection, const std::vector<Offer>& offers) {
    const char* accept = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Accept");
    const Offer* best = &offers.front();
    if (accept == nullptr) return *best;
    double most = preference(accept, best->type);
    for (const Offer& offer : offers)  // among equals, the last one that the client names wins
      if (const double wanted = preference(accept, offer.type); wanted > most || (wanted == most && wanted >= 1)) {
        best = &offer;
        most = wanted;
      }
    return *best;
  }

  MHD_Result refuse(MHD_Connection* connection, unsigned status, const std::string& text) const {
    const Response response = make_response("text/plain", text + "\n");
    if (response == nullptr) return MHD_NO;  // ends the connection
    if (status == MHD_HTTP_METHOD_NOT_ALLOWED) MHD_add_response_header(response.get(), "Allow", "GET, HEAD");
    return MHD_queue_response(connection, status, response.get());
  }

  static MHD_Result answer(void* self, MHD_Connection* connection, const char* path, const char* method, const char*,
                           const char*, std::size_t*, void**) {
    return static_cast<Server*>(self)->answer_request(connection, path, method);
  }

  MHD_Result answer_request(MHD_Connection* connection, const char* path, std::string_view method) {
    if (method != "GET" && method != "HEAD")
      return refuse(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD are answered here");
    if (!believes(connection))
      return refuse(connection, MHD_HTTP_MISDIRECTED_REQUEST,
                    "this host is not served here; ask by address or as localhost");
    const std::lock_guard lock(mutex);
    last_asked = Clock::now();
    if (const auto found = responses.find(path); found != responses.end())
      return MHD_queue_response(connection, MHD_HTTP_OK, best_offer(connection, found->second).response.get());
    std::string known = "there is";
    for (const auto& [each, unused] : responses) known += " " + each;
    return refuse(connection, MHD_HTTP_NOT_FOUND, known);
  }
};

HttpServer::HttpServer(const std::string& listen, const char* flag) : server_(std::make_unique<Server>(listen, flag)) {}
HttpServer::~HttpServer() = default;

std::string HttpServer::address() const { return fmt::format("http://{}/", name_of(server_->listener)); }

std::chrono::steady_clock::time_point HttpServer::last_asked() const {
  const std::lock_guard lock(server_->mutex);
  return server_->last_asked;
}

void HttpServer::set(const std::string& path, const std::string& type, const std::string& body) {
  set(path, {{type, body}});
}

void HttpServer::set(const std::string& path, const std::vector<Representation>& representations) {
  std::vector<Server::Offer> offers;
  for (const Representation& each : representations) {
    Response response = make_response(each.type, each.body);
    require(response != nullptr, ErrorCode::out_of_memory, "a page of {} bytes finds no memory", each.body.size());
    if (representations.size() > 1) MHD_add_response_header(response.get(), "Vary", "Accept");
    offers.push_back({each.type, std::move(response)});
  }
  const std::lock_guard lock(server_->mutex);
  server_->responses[path] = std::move(offers);
}

}  // namespace kv4::cli
