// Serves pages, figures and metrics to browsers and Prometheus: each path gives the content that was last set for it.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace kv4::cli {

/// Answers GET and HEAD in its own thread. A client that is slow, idle or gone delays neither other clients nor the
/// destructor.
class HttpServer {
 public:
  /// HOST:PORT, or a port of 127.0.0.1; port 0: any free port. Throws Error(bad_argument) that names `flag` where the
  /// address cannot be served.
  HttpServer(const std::string& listen, const char* flag);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  std::string address() const;  // http://HOST:PORT/
  /// The time of the last request; the clock's epoch: no request yet.
  std::chrono::steady_clock::time_point last_asked() const;
  void set(const std::string& path, const std::string& type, const std::string& body);
  /// The same content in several types: a client gets the type that its Accept header prefers, or else the first.
  struct Representation {
    std::string type, body;
  };
  void set(const std::string& path, const std::vector<Representation>& representations);

 private:
  struct Server;
  std::unique_ptr<Server> server_;
};

}  // namespace kv4::cli
