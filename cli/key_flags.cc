#include "key_flags.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

namespace kv4::cli {

std::string KeyFlags::path() const {
  if (!file.empty()) return file;
  const char* named = std::getenv("KV4_KEY_FILE");
  return named != nullptr ? named : "";
}

std::vector<CacheKey> KeyFlags::read() const {
  const std::string from = path();
  return from.empty() ? std::vector<CacheKey>() : read_key_file(from);
}

void add_flags(CLI::App& app, KeyFlags& flags) {
  app.add_option("--key-file", flags.file,
                 "cache keys, a line of 64 hex digits each: the first writes, all read; default: KV4_KEY_FILE, or none")
      ->type_name("FILE");
}

}  // namespace kv4::cli
