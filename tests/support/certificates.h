// A certificate authority for tests and its certificates, in PEM files of a folder that it removes at the end.
#pragma once

#include <filesystem>
#include <string>

struct evp_pkey_st;
struct x509_st;

namespace kv4::test {

class Certificates {
 public:
  Certificates();
  ~Certificates();
  Certificates(const Certificates&) = delete;
  Certificates& operator=(const Certificates&) = delete;

  struct Files {
    std::string certificate, key;
  };
  std::string authority() const { return path("authority.pem"); }
  /// `names`: in OpenSSL's notation, "DNS:localhost,IP:127.0.0.1". `days`: period of validity, from yesterday on.
  Files issue(const std::string& label, const std::string& names, int days = 30);

 private:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::filesystem::path folder_;
  evp_pkey_st* key_ = nullptr;
  x509_st* certificate_ = nullptr;
};

}  // namespace kv4::test
