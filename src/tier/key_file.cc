#include <fcntl.h>
#include <openssl/crypto.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "kv4/cache_keys.h"
#include "tier/posix_file.h"

namespace kv4 {
namespace {

constexpr std::size_t kHexDigits = 2 * sizeof(CacheKey);
constexpr std::size_t kMaxKeyFileBytes = 2 * kMaxCacheKeys * (kHexDigits + 2);  // allows as many empty lines as keys

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

CacheKey parse_key(std::string_view line, const std::string& path, int number) {
  CacheKey key{};
  bool good = line.size() == kHexDigits;
  for (std::size_t i = 0; good && i < key.size(); ++i) {
    const int high = digit(line[2 * i]), low = digit(line[2 * i + 1]);
    good = high >= 0 && low >= 0;
    key[i] = static_cast<std::byte>((high & 15) << 4 | (low & 15));
  }
  require(good, ErrorCode::bad_file, "line {} of the key file {} is no key; a key has {} hex digits", number, path,
          kHexDigits);
  return key;
}

/// The file's text; its destructor wipes it.
struct SecretText {
  std::string text;
  ~SecretText() { OPENSSL_cleanse(text.data(), text.size()); }
};

void read_private(const std::string& path, SecretText& out) {
  // Opening a pipe must not block the caller.
  const tier::Descriptor file(
      tier::uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); }));
  require(file.valid(), ErrorCode::bad_file, "the key file {} cannot be opened: {}", path, std::strerror(errno));
  struct stat about {};
  require(::fstat(file.get(), &about) == 0 && S_ISREG(about.st_mode), ErrorCode::bad_file,
          "the key file {} is no regular file", path);
  require((about.st_mode & (S_IRWXG | S_IRWXO)) == 0, ErrorCode::bad_file,
          "the key file {} has mode {:04o}: group or others can use it; chmod 600 it, and take new keys if somebody "
          "may have read these",
          path, about.st_mode & 07777);
  out.text.resize(kMaxKeyFileBytes + 1);
  std::size_t bytes = 0;
  while (bytes < out.text.size()) {
    const auto got =
        tier::uninterrupted([&] { return ::read(file.get(), out.text.data() + bytes, out.text.size() - bytes); });
    require(got >= 0, ErrorCode::bad_file, "the key file {} cannot be read: {}", path, std::strerror(errno));
    if (got == 0) break;
    bytes += got;
  }
  require(bytes <= kMaxKeyFileBytes, ErrorCode::bad_file,
          "the key file {} has more than {} bytes; {} keys are the most", path, kMaxKeyFileBytes, kMaxCacheKeys);
  out.text.resize(bytes);
}

}  // namespace

std::vector<CacheKey> read_key_file(const std::string& path) {
  SecretText secret;
  read_private(path, secret);
  std::vector<CacheKey> keys;
  std::string_view left = secret.text;
  for (int number = 1; !left.empty(); ++number) {
    const std::size_t end = std::min(left.find('\n'), left.size());
    std::string_view line = left.substr(0, end);
    left.remove_prefix(std::min(end + 1, left.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    keys.push_back(parse_key(line, path, number));
    require(keys.size() <= kMaxCacheKeys, ErrorCode::bad_file, "the key file {} has more than {} keys", path,
            kMaxCacheKeys);
  }
  require(!keys.empty(), ErrorCode::bad_file, "the key file {} has no key; make one with: openssl rand -hex 32", path);
  return keys;
}

}  // namespace kv4
