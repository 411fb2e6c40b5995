// TLS to Redis servers, by OpenSSL: the trusted authorities, the client's certificate, and the checks of a server's
// certificate. At least TLS 1.2; a server that proves no identity gets no commands.
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

/// For any thread.
class RedisTls {
 public:
  /// Throws Error (bad_file) where a file cannot be used; bad_argument.
  explicit RedisTls(const RemoteOptions& options);

  /// A TLS client over the socket `*fd`; the int stays at its address. `host`: the name that the server's certificate
  /// has to have.
  SslConnection connect(const std::string& host, int* fd) const;

 private:
  std::unique_ptr<SSL_CTX, FreeSsl> context_;
};

/// Why a call on the connection failed; consumes OpenSSL's errors of this thread.
RedisFailure tls_failure(const SSL& ssl);

}  // namespace kv4::tier
