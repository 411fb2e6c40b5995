// The sanitizer that a test runs under; under one, tests cannot measure memory, bound the address space or fork.
#pragma once

#if defined(__has_feature)  // clang
#define KV4_HAS_FEATURE(x) __has_feature(x)
#else
#define KV4_HAS_FEATURE(x) 0
#endif

#if defined(__SANITIZE_THREAD__) || KV4_HAS_FEATURE(thread_sanitizer)
#define KV4_TSAN 1
#else
#define KV4_TSAN 0
#endif
#if KV4_TSAN || defined(__SANITIZE_ADDRESS__) || KV4_HAS_FEATURE(address_sanitizer)
#define KV4_SANITIZED 1
#else
#define KV4_SANITIZED 0
#endif
