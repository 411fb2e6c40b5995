// TLS to Redis servers, by OpenSSL: the authorities that are believed, a certificate of our own, and what a
// connection's peer has to prove. At least TLS 1.2; whoever proves nothing is not talked to.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "tier/redis_failures.h"
#include "tier/remote_tier.h"

namespace kv4::tier {

struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};
using SslConnection = std::unique_ptr<SSL, FreeSsl>;

/// Any thread.
class RedisTls {
 public:
  /// Throws Error (bad_file) where a file cannot be used; bad_argument.
  explicit RedisTls(const RemoteOptions& options);

  /// A client of the socket `*fd`, which stays where it is; `host`: what the server's certificate has to be for.
  SslConnection connect(const std::string& host, int* fd) const;

 private:
  std::unique_ptr<SSL_CTX, FreeSsl> context_;
};

/// Why a call on the connection failed; takes OpenSSL's errors of this thread.
RedisFailure tls_failure(const SSL& ssl);

}  // namespace kv4::tier
