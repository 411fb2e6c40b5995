// The files of a status folder (docs/formats.md, "Status folder"): names, and the status as text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kv4/status_folder.h"

namespace kv4 {

inline constexpr const char* kStatusFileName = "status.json";
inline constexpr const char* kStatusLockName = "lock";

// A status may come from anybody: these bound the size that a reader accepts. Writers keep to them.
inline constexpr std::int64_t kMaxStatusBytes = 16 << 20;  // some KB, and a byte per block
inline constexpr std::int64_t kMaxStatusValues = 1 << 20;  // numbers, texts, lists, objects
inline constexpr int kMaxStatusDepth = 16;
inline constexpr std::int64_t kMaxStatusNumber = std::int64_t{1} << 53;  // either sign
inline constexpr std::size_t kMaxStatusNameBytes = 256;                  // of a model or a tier
inline constexpr std::size_t kMaxStatusTiers = 16, kMaxStatusTenants = 256, kMaxStatusRequests = 1 << 16;
inline constexpr std::size_t kMaxStatusReasons = 64;  // why a tier failed: each is a series of a metric
inline constexpr std::int64_t kMaxStatusIntervalMs = 3'600'000;

/// CLOCK_BOOTTIME, which nobody can set, and the id of the boot that it counts from. All processes of a machine have
/// the same, in containers too, except those with a time namespace of their own.
struct BootTime {
  std::string boot_id = {};  // empty: the system has none
  std::int64_t ms = 0;
};
BootTime read_boot_time();

enum class Freshness { fresh, stale, unknown };

/// The contents of status.json.
struct PublishedStatus {
  std::string model;
  std::int64_t process = 0;
  std::int64_t time_ms = 0;  // since 1970, for people: a wall clock can be set
  std::string boot_id = {};       // and boot_ms: a BootTime
  std::int64_t boot_ms = 0;
  std::int64_t interval_ms = 0;
  CacheStatus status;

  /// A cache whose last status is older no longer publishes.
  std::int64_t stale_after_ms() const { return 5000 + 5 * interval_ms; }
  /// Unknown: of another boot or machine, or from a later time than now. Then only a change of the file shows a live
  /// cache.
  Freshness freshness(const BootTime& now) const;
};

/// Throws Error(bad_state) if the text exceeds the readers' limits.
std::string status_text(const PublishedStatus& published);
/// Throws Error(bad_file).
PublishedStatus parse_published_status(std::string_view text);

/// Asks for a request to inspect: the asker makes the first file, with a number of its own. The cache's process removes
/// it and writes one of the others.
struct RequestQuestion {
  RequestId request = kNoRequest;
  std::uint64_t number = 0;

  std::string question_name() const;  // inspect-REQUEST-NUMBER.wanted
  std::string answer_name() const;    // .kv4s: a session
  std::string error_name() const;     // .error: a sentence
};
/// nullopt: not the name of a question.
std::optional<RequestQuestion> parse_question(std::string_view name);
/// Whether the name is that of a question or an answer, perhaps unfinished. Other names with the same beginning are
/// not.
bool is_of_question(std::string_view name);

}  // namespace kv4
