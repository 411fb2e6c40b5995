// What the functions of kv4.h share: the objects behind its handles, the border that no exception crosses, and its
// structs and tensors as those of the C++ interface.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "kv4.h"
#include "kv4/kv_cache_manager.h"
#include "kv4/preempted_request.h"
#include "kv4/status_folder.h"
#include "kv4/version.h"

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

struct kv4_status_folder {
  kv4::StatusFolder folder;
};

namespace kv4::c_api {

constexpr std::int32_t kDeviceCpu = 1, kDeviceCuda = 2, kDeviceCudaHost = 3, kDeviceCudaManaged = 13;

/// Keeps the text for kv4_last_error.
kv4_status fail_with(kv4_status status, const char* message) noexcept;
kv4_status status_of(const Error& error);
kv4_status status_of(Shortage shortage);

/// Runs `body`, which returns a kv4_status or nothing, and turns what it throws into one.
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

/// `value` where there is one, else the shortage.
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

/// All zero, with our size.
template <class T>
T sized() {
  T value{};
  value.size = sizeof(T);
  return value;
}

/// A struct of the caller's in its present form. `known`: its defaults, with our size.
template <class T>
T read_struct(const T* given, T known, const char* what) {
  const std::size_t size = require_set(given, what).size;
  require(size >= sizeof(size), ErrorCode::bad_argument, "{}.size is {}; set the struct up with its _init function",
          what, size);
  const auto* bytes = reinterpret_cast<const std::byte*>(given);
  for (std::size_t i = sizeof(T); i < size; ++i)
    require(bytes[i] == std::byte{0}, ErrorCode::bad_argument,
            "{} has {} bytes and is set at byte {}, this library ({}) knows {} bytes of it: link a newer one", what,
            size, i, KV4_VERSION, sizeof(T));
  std::memcpy(&known, given, std::min(size, sizeof(T)));
  known.size = sizeof(T);
  return known;
}

/// The other way: as many bytes as the caller's struct has; what we do not know of it becomes zero.
template <class T>
void write_struct(T* out, const T& value, const char* what) {
  const std::size_t size = require_set(out, what).size;
  require(size >= sizeof(size), ErrorCode::bad_argument, "{}.size is {}; set the struct up with its _init function",
          what, size);
  auto* bytes = reinterpret_cast<std::byte*>(out);
  std::memcpy(bytes + sizeof(size), reinterpret_cast<const std::byte*>(&value) + sizeof(size),
              std::min(size, sizeof(T)) - sizeof(size));
  if (size > sizeof(T)) std::memset(bytes + sizeof(T), 0, size - sizeof(T));
}

/// A tensor that the cache may use; an optional one may be NULL and is empty then.
TensorView tensor(const kv4_cache& cache, const kv4_tensor* given, const char* what);
TensorView optional_tensor(const kv4_cache& cache, const kv4_tensor* given, const char* what);

template <class T>
std::span<const T> list(const T* data, std::int64_t count, const char* what) {
  require(count >= 0, ErrorCode::bad_argument, "{} of {} elements", what, count);
  require(data != nullptr || count == 0, ErrorCode::bad_argument, "{} is NULL and should have {} elements", what,
          count);
  return {data, static_cast<std::size_t>(count)};
}

inline std::string_view text(const kv4_bytes& bytes, const char* what) {
  const std::span<const char> chars =
      list(static_cast<const char*>(bytes.data), static_cast<std::int64_t>(bytes.length), what);
  return {chars.data(), chars.size()};
}

inline std::span<const std::byte> bytes(const kv4_bytes& given, const char* what) {
  return std::as_bytes(std::span(text(given, what)));
}

}  // namespace kv4::c_api
