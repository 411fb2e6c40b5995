// Shared by the functions of kv4.h: the objects behind its handles, the boundary that no exception crosses, and the
// conversion of its structs and tensors to the C++ interface's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/one_thread.h"
#include "kv4.h"
#include "kv4/chunk_store.h"
#include "kv4/kv_cache_manager.h"
#include "kv4/preempted_request.h"
#include "kv4/status_folder.h"
#include "kv4/tiered_prefix.h"
#include "kv4/tiers.h"
#include "kv4/version.h"
#include "kv4_chunks.h"

struct kv4_model {
  kv4::ModelConfig config;
};

struct kv4_backend {
  std::shared_ptr<kv4::Backend> backend;
  std::int32_t device_type;  // DLPack's
  std::int32_t device_id;
};

struct kv4_cache {
  kv4_backend backend;
  kv4::KVCacheManager manager;
};

struct kv4_preempted {
  kv4::PreemptedRequest request;
};

struct kv4_tiers {
  kv4::OneThread driver;  // of the calls here, reports included
  kv4::Tiers tiers;
  std::vector<kv4::TierReport> reports;  // of the last kv4_tiers_get_reports, with their failures
  std::vector<std::vector<kv4_failure_count>> failures;
};

struct kv4_chunk_store {
  explicit kv4_chunk_store(const kv4::ChunkStoreOptions& options) : store(options) {}

  kv4::ChunkStore store;
  std::mutex mutex;                      // guards the next two
  std::vector<kv4::TierReport> reports;  // of the last kv4_chunk_store_get_tier_reports, with their failures
  std::vector<std::vector<kv4_failure_count>> failures;
};

struct kv4_chunk_results {
  kv4::ChunkResults results;
  std::vector<std::int32_t> statuses, flushed;
};

struct kv4_tiered_prefix {
  kv4::TieredPrefix prefix;
};

struct kv4_prefix_load {
  kv4::PrefixLoad load;
};

struct kv4_status_folder {
  kv4::StatusFolder folder;
};

namespace kv4::c_api {

constexpr std::size_t kMaxStructBytes = std::size_t{64} << 10;          // above the size of every struct's versions
constexpr std::size_t kMaxTextBytes = 4096;                             // of a path or name, with its zero
constexpr std::int64_t kMaxElements = std::int64_t{1} << 31;            // of an array; max_context is less
constexpr std::int64_t kMaxTimeoutMs = std::int64_t{100'000'000'000};   // three years
constexpr std::int64_t kMaxDurationMs = std::int64_t{400'000'000'000};  // twelve years: a record's time on a server
constexpr std::int32_t kDeviceCpu = 1, kDeviceCuda = 2, kDeviceCudaHost = 3, kDeviceCudaManaged = 13;

/// Keeps the message for kv4_last_error.
kv4_status fail_with(kv4_status status, const char* message) noexcept;
kv4_status status_of(const Error& error);
kv4_status status_of(Shortage shortage);

/// Runs `body`, which returns a kv4_status or nothing, and converts its exceptions to a kv4_status.
template <class Body>
kv4_status guarded(Body&& body) noexcept {
  try {
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      return KV4_OK;
    } else {
      return body();
    }
  } catch (const Error& error) {
    return fail_with(status_of(error), error.what());
  } catch (const std::bad_alloc&) {
    return fail_with(KV4_OUT_OF_MEMORY, "the machine refused memory");
  } catch (const std::exception& error) {
    return fail_with(KV4_INTERNAL_ERROR, error.what());
  } catch (...) {
    return fail_with(KV4_INTERNAL_ERROR, "something that is no std::exception was thrown");
  }
}

/// Gives `value` if there is one, else the shortage.
template <class T, class Out>
kv4_status give(const Expected<T>& value, Out* out) {
  if (!value) return status_of(value.error());
  *out = *value;
  return KV4_OK;
}

template <class T>
T& require_set(T* pointer, const char* what) {
  require(pointer != nullptr, ErrorCode::bad_argument, "{} is NULL", what);
  return *pointer;
}

/// The caller's name or path, ended by a zero within kMaxTextBytes.
std::string_view c_text(const char* given, const char* what);
/// The caller's keys; at most kMaxCacheKeys.
std::vector<CacheKey> keys_of(const kv4_cache_key* keys, std::int64_t count, const char* what);
/// The time so many milliseconds from now.
tier::Deadline deadline_of(std::int64_t timeout_ms);
/// The caller's progress function, for sessions and tiers alike.
std::function<bool(std::int64_t, std::int64_t)> progress_of(kv4_progress progress, void* user);

/// A struct of zeros, with our size.
template <class T>
T sized() {
  T value{};
  value.size = sizeof(T);
  return value;
}

/// The caller's array, which may be NULL if it is empty.
template <class T>
std::span<T> list(T* data, std::int64_t count, const char* what) {
  require(count >= 0 && count <= kMaxElements, ErrorCode::bad_argument, "{} of {} elements; 0 to {}", what, count,
          kMaxElements);
  require(data != nullptr || count == 0, ErrorCode::bad_argument, "{} is NULL and should have {} elements", what,
          count);
  return {data, static_cast<std::size_t>(count)};
}

/// An object that the caller frees. Not made if there is nowhere to put it.
template <class T, class Make>
void give_new(T** out, Make&& make) {
  T*& to = require_set(out, "out");
  to = make();
}

/// Fields are aligned to their size, at most 8: no version of a struct cuts one in two.
constexpr bool is_struct_size(std::size_t size) {
  return size >= 2 * sizeof(size) && size <= kMaxStructBytes && size % sizeof(size) == 0;
}
/// The caller's `size` at the head of a struct.
std::size_t struct_bytes(const void* given, const char* what);
/// Throws unless the fields that this library does not know are zero.
void check_unknown(const void* given, std::size_t known_bytes, const char* what);

/// Initialises a caller's struct of `size` bytes, which may differ from ours. If no version has that size, the struct's
/// own size becomes 0, and the call that uses it refuses it.
template <class T>
void init_struct(T* out, std::size_t size, const T& defaults) {
  if (out == nullptr || size < sizeof(size)) return;
  out->size = 0;
  if (!is_struct_size(size)) return;
  std::memset(static_cast<void*>(out), 0, size);
  std::memcpy(static_cast<void*>(out), &defaults, std::min(size, sizeof(T)));
  out->size = size;
}

/// A caller's struct, converted to the present version. `known`: its defaults, with our size.
template <class T>
T read_struct(const T* given, T known, const char* what) {
  const std::size_t size = struct_bytes(given, what);
  check_unknown(given, sizeof(T), what);
  std::memcpy(&known, given, std::min(size, sizeof(T)));
  known.size = sizeof(T);
  return known;
}

/// The other way: fills as many bytes as the caller's struct has; fields unknown to us become zero.
template <class T>
void write_struct(T* out, const T& value, const char* what) {
  const std::size_t size = struct_bytes(out, what);
  auto* bytes = reinterpret_cast<std::byte*>(out);
  std::memcpy(bytes + sizeof(size), reinterpret_cast<const std::byte*>(&value) + sizeof(size),
              std::min(size, sizeof(T)) - sizeof(size));
  if (size > sizeof(T)) std::memset(bytes + sizeof(T), 0, size - sizeof(T));
}

/// An array of the caller's structs, all of the first one's size. T is const if the array is only read.
template <class T>
class StructArray {
 public:
  StructArray(T* first, std::int64_t count, const char* what)
      : first_(first), count_(list<T>(first, count, what).size()), what_(what) {
    if (count_ > 0) stride_ = struct_bytes(first, what);
  }
  std::size_t size() const { return count_; }
  std::remove_const_t<T> read(std::size_t i, const std::remove_const_t<T>& known) const {
    T* const element = at(i);
    require(element->size == stride_, ErrorCode::bad_argument, "{}[{}].size is {}, that of the first {}", what_, i,
            element->size, stride_);
    return read_struct(element, known, what_);
  }
  void write(std::size_t i, const T& value) const {
    at(i)->size = stride_;
    write_struct(at(i), value, what_);
  }

 private:
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  T* at(std::size_t i) const { return reinterpret_cast<T*>(reinterpret_cast<Byte*>(first_) + i * stride_); }

  T* first_;
  std::size_t count_, stride_ = sizeof(T);
  const char* what_;
};

inline KVCacheManager& manager(kv4_cache* cache) { return require_set(cache, "cache").manager; }
inline const KVCacheManager& manager(const kv4_cache* cache) { return require_set(cache, "cache").manager; }

/// Copies a list of the library's into the caller's memory: out [capacity], and its length.
template <class T>
void copy_list(std::span<const T> values, T* out, std::int64_t capacity, std::int64_t* count) {
  require_set(count, "count") = std::ssize(values);
  require(capacity >= std::ssize(values), ErrorCode::bad_argument, "room for {} elements; there are {}", capacity,
          values.size());
  if (!values.empty()) std::copy(values.begin(), values.end(), &require_set(out, "out"));
}

/// The caller's prompt; it points into the caller's memory.
struct GivenPrompt {
  explicit GivenPrompt(const kv4_prompt* given);
  GivenPrompt(const GivenPrompt&) = delete;

  std::vector<std::string_view> extra;
  Prompt prompt;
};

/// Refuses a bad `out` before a request is admitted that the caller could not name.
void check_admission(kv4_admission* out);
/// Gives the admission, or the shortage.
kv4_status give_admission(const Expected<Admission>& admitted, kv4_admission* out);

kv4_time_histogram histogram(const TimeHistogram& times);
/// The caller's tiers, without a backend.
TiersOptions tiers_options_of(const kv4_tiers_options* given);
kv4_flush_status worst(const std::vector<tier::FlushStatus>& all);
/// `failures` outlives the report.
kv4_tier_report report_of(const TierReport& from, const std::vector<kv4_failure_count>& failures);

/// A tensor that the cache can read or write; an optional one may be NULL and is empty then.
TensorView tensor(const kv4_cache& cache, const kv4_tensor* given, const char* what);
TensorView optional_tensor(const kv4_cache& cache, const kv4_tensor* given, const char* what);

/// A text of the stated length; it need not end with a zero.
inline std::string_view text(const kv4_bytes& bytes, const char* what) {
  require(bytes.data != nullptr || bytes.length == 0, ErrorCode::bad_argument, "{} is NULL and should have {} bytes",
          what, bytes.length);
  return {static_cast<const char*>(bytes.data), bytes.length};
}

inline std::span<const std::byte> bytes(const kv4_bytes& given, const char* what) {
  return std::as_bytes(std::span(text(given, what)));
}

}  // namespace kv4::c_api
