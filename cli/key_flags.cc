#include "key_flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "base/check.h"

namespace kv4::cli {

std::string describe(Protection protection, bool authentic) {
  if (protection == Protection::none) return fmt::format("There is {}.", kNoKeyText);
  return fmt::format("It is {}{}.", to_string(protection),
                     authentic ? " by one of the given keys" : "; whether by one of yours shows with --key-file");
}

std::string KeyFlags::path() const {
  if (!file.empty()) return file;
  const char* named = std::getenv("KV4_KEY_FILE");
  return named != nullptr ? named : "";
}

std::vector<CacheKey> KeyFlags::read() const {
  const std::string from = path();
  return from.empty() ? std::vector<CacheKey>() : read_key_file(from);
}

SessionIdentity KeyFlags::of_session() const {
  require(!accept_unauthenticated || !path().empty(), ErrorCode::bad_argument,
          "--accept-unauthenticated is for sessions that are read with keys; give --key-file");
  return {.keys = read(), .accept_unauthenticated = accept_unauthenticated};
}

void add_flags(CLI::App& app, KeyFlags& flags) {
  app.add_option("--key-file", flags.file,
                 "cache keys, a line of 64 hex digits each: the first writes, all read; default: KV4_KEY_FILE, or none")
      ->type_name("FILE");
}

void add_session_flags(CLI::App& app, KeyFlags& flags) {
  add_flags(app, flags);
  app.add_flag("--accept-unauthenticated", flags.accept_unauthenticated,
               "with keys: sessions that none protects are read, too");
}

}  // namespace kv4::cli
