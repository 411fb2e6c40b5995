#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "c_api/handles.h"
#include "kv4/cache_keys.h"
#include "kv4/log.h"

namespace kv4::c_api {

namespace {

thread_local std::string last_error;

}  // namespace

kv4_status fail_with(kv4_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

kv4_status status_of(const Error& error) {
  switch (error.code()) {
    case ErrorCode::bad_config: return KV4_BAD_CONFIG;
    case ErrorCode::bad_argument: return KV4_BAD_ARGUMENT;
    case ErrorCode::bad_state: return KV4_BAD_STATE;
    case ErrorCode::bad_file: return KV4_BAD_FILE;
    case ErrorCode::out_of_memory: return KV4_OUT_OF_MEMORY;
    case ErrorCode::no_device: return KV4_NO_DEVICE;
    case ErrorCode::device_failure: return KV4_DEVICE_FAILURE;
  }
  return KV4_INTERNAL_ERROR;
}

kv4_status status_of(Shortage shortage) {
  switch (shortage) {
    case Shortage::requests: return KV4_SHORT_OF_REQUESTS;
    case Shortage::blocks: return KV4_SHORT_OF_BLOCKS;
    case Shortage::slots: return KV4_SHORT_OF_SLOTS;
    case Shortage::cancelled:
    case Shortage::none: break;
  }
  return KV4_STOPPED;
}

std::size_t struct_bytes(const void* given, const char* what) {
  require(given != nullptr, ErrorCode::bad_argument, "{} is NULL", what);
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  require(is_struct_size(size), ErrorCode::bad_argument,
          "{}.size is {}, which no version has (a multiple of {} from {} to {}); set the struct up with its _init "
          "function",
          what, size, sizeof(size), 2 * sizeof(size), kMaxStructBytes);
  return size;
}

void check_unknown(const void* given, std::size_t known_bytes, const char* what) {
  const std::size_t size = struct_bytes(given, what);
  const auto* bytes = static_cast<const std::byte*>(given);
  for (std::size_t i = known_bytes; i < size; ++i)
    require(bytes[i] == std::byte{0}, ErrorCode::bad_argument,
            "{} has {} bytes and is set at byte {}, this library ({}) knows {} bytes of it: link a newer one", what,
            size, i, KV4_VERSION, known_bytes);
}

std::string_view c_text(const char* given, const char* what) {
  require(given != nullptr, ErrorCode::bad_argument, "{} is NULL", what);
  const std::size_t length = ::strnlen(given, kMaxTextBytes);
  require(length < kMaxTextBytes, ErrorCode::bad_argument, "{} does not end within {} bytes: '{}...'", what,
          kMaxTextBytes, std::string_view(given, 32));
  return {given, length};
}

std::vector<CacheKey> keys_of(const kv4_cache_key* keys, std::int64_t count, const char* what) {
  require(count <= std::int64_t{kMaxCacheKeys}, ErrorCode::bad_argument, "{}: {} keys; {} are the most", what, count,
          kMaxCacheKeys);
  std::vector<CacheKey> out;
  for (const kv4_cache_key& key : list(keys, count, what)) {
    static_assert(sizeof(key.bytes) == sizeof(CacheKey));
    std::memcpy(&out.emplace_back(), key.bytes, sizeof(key.bytes));
  }
  return out;
}

tier::Deadline deadline_of(std::int64_t timeout_ms) {
  require(timeout_ms >= 0 && timeout_ms <= kMaxTimeoutMs, ErrorCode::bad_argument, "timeout_ms is {}; 0 to {}",
          timeout_ms, kMaxTimeoutMs);
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
}

std::function<bool(std::int64_t, std::int64_t)> progress_of(kv4_progress progress, void* user) {
  if (progress == nullptr) return {};
  return [progress, user](std::int64_t done, std::int64_t total) { return progress(user, done, total) != 0; };
}

kv4_time_histogram histogram(const TimeHistogram& times) {
  static_assert(sizeof(kv4_time_histogram::counts) == sizeof(TimeHistogram::counts));
  kv4_time_histogram copy{{}, times.sum_seconds, times.sum_ns};
  std::copy(times.counts.begin(), times.counts.end(), copy.counts);
  return copy;
}

namespace {

DType dtype_of(const kv4_tensor& given, const char* what) {
  const auto is = [&](int code, int bits) { return given.dtype_code == code && given.dtype_bits == bits; };
  require(given.dtype_lanes == 1, ErrorCode::bad_argument, "{} has elements of {} lanes; 1 is taken", what,
          given.dtype_lanes);
  if (is(2, 32)) return DType::f32;
  if (is(4, 16)) return DType::bf16;
  if (is(0, 32)) return DType::i32;
  if (is(1, 8)) return DType::u8;
  fail(ErrorCode::bad_argument,
       "{} has elements of DLPack code {} with {} bits; f32 (2, 32), bf16 (4, 16), i32 (0, 32) and u8 (1, 8) are taken",
       what, given.dtype_code, given.dtype_bits);
}

void check_device(const kv4_backend& backend, const kv4_tensor& given, const char* what) {
  const bool on_host = given.device_type == kDeviceCpu || given.device_type == kDeviceCudaHost;
  const bool managed = given.device_type == kDeviceCudaManaged;
  const bool reachable = backend.device_type == kDeviceCpu
                             ? on_host || managed
                             : managed || (given.device_type == kDeviceCuda && given.device_id == backend.device_id);
  require(reachable, ErrorCode::bad_argument,
          "{} is on DLPack device {}:{}, the cache on {}:{} (1 CPU, 2 CUDA): move the tensor there", what,
          given.device_type, given.device_id, backend.device_type, backend.device_id);
}

}  // namespace

TensorView tensor(const kv4_cache& cache, const kv4_tensor* given, const char* what) {
  const kv4_tensor& in = require_set(given, what);
  check_device(cache.backend, in, what);
  require(in.ndim >= 0 && in.ndim <= TensorView::kMaxDims, ErrorCode::bad_argument, "{} has {} dimensions; 0 to {}",
          what, in.ndim, TensorView::kMaxDims);
  require(in.ndim == 0 || in.shape != nullptr, ErrorCode::bad_argument, "the shape of {} is NULL", what);
  TensorView out;
  out.dtype = dtype_of(in, what);
  require(in.data != nullptr, ErrorCode::bad_argument, "the data of {} is NULL; pass NULL for a tensor there is not",
          what);
  out.data = static_cast<std::byte*>(in.data) + in.byte_offset;
  out.ndim = in.ndim;
  std::int64_t dense = 1;
  for (int i = in.ndim - 1; i >= 0; --i) {
    out.shape[i] = in.shape[i];
    out.strides[i] = in.strides != nullptr ? in.strides[i] : dense;
    dense *= in.shape[i];
  }
  return out;
}

TensorView optional_tensor(const kv4_cache& cache, const kv4_tensor* given, const char* what) {
  return given == nullptr ? TensorView() : tensor(cache, given, what);
}

}  // namespace kv4::c_api

int32_t kv4_abi_version(void) { return KV4_ABI_VERSION; }

const char* kv4_version(void) { return KV4_VERSION; }

const char* kv4_last_error(void) { return kv4::c_api::last_error.c_str(); }

const char* kv4_status_name(kv4_status status) {
  switch (status) {
    case KV4_OK: return "KV4_OK";
    case KV4_SHORT_OF_REQUESTS: return "KV4_SHORT_OF_REQUESTS";
    case KV4_SHORT_OF_BLOCKS: return "KV4_SHORT_OF_BLOCKS";
    case KV4_SHORT_OF_SLOTS: return "KV4_SHORT_OF_SLOTS";
    case KV4_STOPPED: return "KV4_STOPPED";
    case KV4_BAD_CONFIG: return "KV4_BAD_CONFIG";
    case KV4_BAD_ARGUMENT: return "KV4_BAD_ARGUMENT";
    case KV4_BAD_STATE: return "KV4_BAD_STATE";
    case KV4_BAD_FILE: return "KV4_BAD_FILE";
    case KV4_OUT_OF_MEMORY: return "KV4_OUT_OF_MEMORY";
    case KV4_NO_DEVICE: return "KV4_NO_DEVICE";
    case KV4_DEVICE_FAILURE: return "KV4_DEVICE_FAILURE";
    case KV4_INTERNAL_ERROR: return "KV4_INTERNAL_ERROR";
  }
  return "unknown";
}

kv4_status kv4_read_key_file(const char* path, kv4_cache_key* keys, int64_t capacity, int64_t* count) {
  using namespace kv4::c_api;
  return guarded([&] {
    kv4::require(count != nullptr, kv4::ErrorCode::bad_argument, "count is NULL");
    const std::vector<kv4::CacheKey> read = kv4::read_key_file(std::string(c_text(path, "path")));
    std::vector<kv4_cache_key> out(read.size());
    for (std::size_t i = 0; i < read.size(); ++i) std::memcpy(out[i].bytes, read[i].data(), read[i].size());
    copy_list<kv4_cache_key>(out, keys, capacity, count);
  });
}

kv4_status kv4_set_log_sink(kv4_log_sink sink, void* user) {
  return kv4::c_api::guarded([&] {
    if (sink == nullptr) return kv4::set_log_sink({});
    kv4::set_log_sink([sink, user](const kv4::LogRecord& record) {
      const kv4_log_level level = record.level == kv4::LogLevel::info      ? KV4_LOG_LEVEL_INFO
                                  : record.level == kv4::LogLevel::warning ? KV4_LOG_LEVEL_WARNING
                                                                           : KV4_LOG_LEVEL_ERROR;
      std::vector<std::string> texts;  // views need not end with a zero
      for (const kv4::LogField& field : record.fields) {
        texts.emplace_back(field.name);
        texts.emplace_back(field.value);
      }
      std::vector<kv4_log_field> fields;
      for (std::size_t i = 0; i < texts.size(); i += 2) fields.push_back({texts[i].c_str(), texts[i + 1].c_str()});
      sink(user, level, std::string(record.event).c_str(), std::string(record.message).c_str(), fields.data(),
           std::ssize(fields));
    });
  });
}
