// The disk store against the disk itself, in one run: the measurements of `kv4 store bench`.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace kv4::bench {

struct StoreBenchOptions {
  std::string directory;
  std::vector<std::int64_t> record_bytes = {450'944, 524'288};  // a block of V4-Flash; 512 KiB
  std::int64_t total_bytes = std::int64_t{2} << 30;             // per measurement
  int depth = 32;
  int batch = 256;                                   // records per call
  std::int64_t sync_bytes = std::int64_t{64} << 20;  // StoreOptions::sync_every_bytes
  int rounds = 3;
  std::int64_t index_records = 0;  // 0: no index measurement
  bool fio = false;
  bool encrypt = false;
  bool chunks = false;  // also a ChunkStore over such a disk, and its index, with keys of 36 bytes
  std::function<bool()> interrupted = [] { return false; };  // true: ends early with the results so far
};

/// All figures. `on_size` gets the figures of each record size as soon as they are measured. Removes everything that it
/// writes below `directory`, however it ends.
nlohmann::json bench_store(const StoreBenchOptions& options, const std::function<void(const nlohmann::json&)>& on_size);

}  // namespace kv4::bench
