// Marks the symbols that the shared library exports; all others are hidden.
#pragma once

#if defined(KV4_STATIC)
#define KV4_API
#elif defined(_WIN32)
#define KV4_API __declspec(dllexport)
#else
#define KV4_API __attribute__((visibility("default")))
#endif
