#include "tier/redis_tls.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "tier/redis_admission.h"

namespace kv4::tier {
namespace {

constexpr std::size_t kReadAheadBytes = 64 << 10;  // per system call

// OpenSSL's own socket BIO would raise SIGPIPE in the caller's program.

int fd_of(BIO* bio) { return *static_cast<const int*>(BIO_get_data(bio)); }

bool try_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

int write_socket(BIO* bio, const char* data, int size) {
  BIO_clear_retry_flags(bio);
  const ssize_t sent = ::send(fd_of(bio), data, size, MSG_NOSIGNAL);
  if (sent < 0 && try_later(errno)) BIO_set_retry_write(bio);
  return static_cast<int>(sent);
}

int read_socket(BIO* bio, char* data, int size) {
  BIO_clear_retry_flags(bio);
  const ssize_t got = ::recv(fd_of(bio), data, size, 0);
  if (got < 0 && try_later(errno)) BIO_set_retry_read(bio);
  return static_cast<int>(got);
}

long control_socket(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH; }

const BIO_METHOD* socket_method() {
  static const BIO_METHOD* const method = [] {
    BIO_METHOD* out = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kv4 socket");
    if (out == nullptr) throw std::bad_alloc();
    BIO_meth_set_write(out, write_socket);
    BIO_meth_set_read(out, read_socket);
    BIO_meth_set_ctrl(out, control_socket);
    return out;
  }();
  return method;
}

std::string newest_error() {
  const unsigned long error = ERR_peek_last_error();
  const char* text = error == 0 ? nullptr : ERR_reason_error_string(error);
  ERR_clear_error();
  return text == nullptr ? "no reason is known" : text;
}

void require_file(bool ok, const char* what, const std::string& path) {
  if (!ok) fail(ErrorCode::bad_file, "{} '{}' cannot be used: {}", what, path, newest_error());
}

}  // namespace

RedisTls::RedisTls(const RemoteOptions& options) : context_(SSL_CTX_new(TLS_client_method())) {
  if (!context_) throw std::bad_alloc();
  SSL_CTX* context = context_.get();
  ERR_clear_error();
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  // A reply has its own length, so an end without TLS's close_notify cannot cut it off unnoticed.
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_read_ahead(context, 1);
  SSL_CTX_set_default_read_buffer_len(context, kReadAheadBytes);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  const RemoteTlsFiles& files = options.tls_files;
  if (files.ca.empty())
    require_file(SSL_CTX_set_default_verify_paths(context) == 1, "the authorities of the system",
                 X509_get_default_cert_dir());
  else
    require_file(SSL_CTX_load_verify_file(context, files.ca.c_str()) == 1, "tls_ca_file", files.ca);
  require(files.certificate.empty() == files.key.empty(), ErrorCode::bad_argument,
          "tls_certificate_file and tls_key_file belong together; give both or neither");
  if (files.certificate.empty()) return;
  require_file(SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) == 1, "tls_certificate_file",
               files.certificate);
  require_file(SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), SSL_FILETYPE_PEM) == 1, "tls_key_file",
               files.key);
  require_file(SSL_CTX_check_private_key(context) == 1, "tls_key_file", files.key);
}

SslConnection RedisTls::connect(const std::string& host, int* fd) const {
  SslConnection ssl(SSL_new(context_.get()));
  BIO* bio = ssl ? BIO_new(socket_method()) : nullptr;
  if (bio == nullptr) throw std::bad_alloc();
  BIO_set_data(bio, fd);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl.get(), bio, bio);
  SSL_set_hostflags(ssl.get(), X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
  // TLS does not treat addresses as names: certificates have them in a field of their own, and SNI excludes them.
  const bool checked = parse_ip(host) ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl.get()), host.c_str()) == 1
                                      : SSL_set1_host(ssl.get(), host.c_str()) == 1 &&
                                            SSL_set_tlsext_host_name(ssl.get(), host.c_str()) == 1;
  if (!checked) throw std::bad_alloc();
  SSL_set_connect_state(ssl.get());
  return ssl;
}

RedisFailure tls_failure(const SSL& ssl) {
  const long verified = SSL_get_verify_result(&ssl);
  const unsigned long error = ERR_peek_last_error();
  const int reason = ERR_GET_LIB(error) == ERR_LIB_SSL ? ERR_GET_REASON(error) : 0;
  const std::string text = newest_error();
  if (verified != X509_V_OK)
    return {FailureReason::certificate_refused,
            std::string("its certificate is refused: ") + X509_verify_cert_error_string(verified)};
  if (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST || reason == SSL_R_PACKET_LENGTH_TOO_LONG)
    return {FailureReason::tls_refused, "it speaks no TLS; is this its TLS port?"};
  return {FailureReason::tls_refused, error == 0 ? "it ended the TLS handshake" : "TLS failed: " + text};
}

}  // namespace kv4::tier
