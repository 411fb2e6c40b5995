#include "keys.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "kv4/error.h"

namespace kv4::python {

CacheKey key_of(const nb::bytes& bytes, const char* what) {
  CacheKey key;
  if (bytes.size() != key.size())
    throw Error(ErrorCode::bad_argument, std::string(what) + " must be 32 bytes; got " + std::to_string(bytes.size()));
  std::copy_n(static_cast<const std::byte*>(bytes.data()), key.size(), key.begin());
  return key;
}

std::vector<CacheKey> keys_of(const std::vector<nb::bytes>& list) {
  std::vector<CacheKey> keys;
  for (const nb::bytes& bytes : list) keys.push_back(key_of(bytes, "each of keys"));
  return keys;
}

std::vector<nb::bytes> bytes_of(const std::vector<CacheKey>& keys) {
  std::vector<nb::bytes> list;
  for (const CacheKey& key : keys) list.push_back(nb::bytes(key.data(), key.size()));
  return list;
}

void bind_keys(nb::module_& m) {
  nb::enum_<Protection>(m, "Protection", "What a cache key does to a record outside host memory.")
      .value("none", Protection::none, "there is no key: a digest against accident only")
      .value("sealed", Protection::sealed, "AES-256-GCM: nobody without the key reads or writes it")
      .value("authenticated", Protection::authenticated, "GMAC: everybody reads it, nobody without the key writes it");
  m.def(
      "read_key_file", [](const std::filesystem::path& path) { return bytes_of(read_key_file(path.string())); },
      nb::arg("path"), nb::sig("def read_key_file(path: str | os.PathLike) -> list[bytes]"),
      "Lines of 64 hex digits, a key each: the first writes, all read. Raises FileError, for example where group or\n"
      "others can read the file.");
}

}  // namespace kv4::python
