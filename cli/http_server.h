// Pages, figures and metrics for a browser and for Prometheus: what was last set for a path is what it gets.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace kv4::cli {

/// Answers GET and HEAD in a thread of its own. A client that is slow, idle or gone keeps nobody waiting, the
/// destructor neither.
class HttpServer {
 public:
  /// HOST:PORT, or a port of 127.0.0.1; port 0: any that is free. Throws Error(bad_argument) that names `flag` where it
  /// cannot be served.
  HttpServer(const std::string& listen, const char* flag);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  std::string address() const;  // http://HOST:PORT/
  /// When anybody last asked for anything; the clock's beginning: nobody has.
  std::chrono::steady_clock::time_point last_asked() const;
  void set(const std::string& path, const std::string& type, const std::string& body);
  /// The same in several types: a client gets the one that its Accept header likes best, and else the first.
  struct Representation {
    std::string type, body;
  };
  void set(const std::string& path, const std::vector<Representation>& representations);

 private:
  struct Server;
  std::unique_ptr<Server> server_;
};

}  // namespace kv4::cli
