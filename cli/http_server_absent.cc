// The server where kv4 was built without libmicrohttpd.
#include "base/check.h"
#include "http_server.h"

namespace kv4::cli {

struct HttpServer::Server {};

HttpServer::HttpServer(const std::string&, const char* flag) {
  fail(ErrorCode::bad_argument,
       "{}: this kv4 has no HTTP server, since it was built without libmicrohttpd, as wheels are; build it from the "
       "tree, or write metrics to a file: kv4 serve-metrics --once, kv4 replay --metrics FILE",
       flag);
}
HttpServer::~HttpServer() = default;
std::string HttpServer::address() const { return ""; }
std::chrono::steady_clock::time_point HttpServer::last_asked() const { return {}; }
void HttpServer::set(const std::string&, const std::string&, const std::string&) {}
void HttpServer::set(const std::string&, const std::vector<Representation>&) {}

}  // namespace kv4::cli
