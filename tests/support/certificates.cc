#include "support/certificates.h"

#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <memory>
#include <stdexcept>

namespace kv4::test {
namespace {

constexpr long kDay = 24 * 3600;

void check(bool ok) {
  if (!ok) throw std::runtime_error("no certificate could be made");
}

void add_extension(X509* certificate, X509* authority, int kind, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, authority, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str());
  check(extension != nullptr && X509_add_ext(certificate, extension, -1) == 1);
  X509_EXTENSION_free(extension);
}

X509* make(EVP_PKEY* key, const std::string& name, int days) {
  static long serial = 1;
  X509* certificate = X509_new();
  check(certificate != nullptr);
  X509_set_version(certificate, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial++);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -2 * kDay);
  X509_gmtime_adj(X509_getm_notAfter(certificate), (days - 1) * kDay);
  X509_set_pubkey(certificate, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  return certificate;
}

template <class Write>
void write_file(const std::string& path, Write&& write) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  check(file != nullptr && write(file) == 1);
  std::fclose(file);
}

}  // namespace

Certificates::Certificates() {
  std::string name = (std::filesystem::temp_directory_path() / "kv4_certificates_XXXXXX").string();
  check(::mkdtemp(name.data()) != nullptr);
  folder_ = name;
  key_ = EVP_EC_gen("P-256");
  certificate_ = make(key_, "kv4 test authority", 30);
  X509_set_issuer_name(certificate_, X509_get_subject_name(certificate_));
  add_extension(certificate_, certificate_, NID_basic_constraints, "critical,CA:TRUE");
  check(X509_sign(certificate_, key_, EVP_sha256()) > 0);
  write_file(authority(), [&](std::FILE* file) { return PEM_write_X509(file, certificate_); });
}

Certificates::~Certificates() {
  X509_free(certificate_);
  EVP_PKEY_free(key_);
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

Certificates::Files Certificates::issue(const std::string& label, const std::string& names, int days) {
  const Files files{path(label + ".pem"), path(label + ".key")};
  EVP_PKEY* key = EVP_EC_gen("P-256");
  check(key != nullptr);
  X509* certificate = make(key, label, days);
  X509_set_issuer_name(certificate, X509_get_subject_name(certificate_));
  add_extension(certificate, certificate_, NID_subject_alt_name, names);
  check(X509_sign(certificate, key_, EVP_sha256()) > 0);
  write_file(files.certificate, [&](std::FILE* file) { return PEM_write_X509(file, certificate); });
  write_file(files.key, [&](std::FILE* file) {
    return PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
  });
  X509_free(certificate);
  EVP_PKEY_free(key);
  return files;
}

}  // namespace kv4::test
