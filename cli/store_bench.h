// `kv4 store bench`: the disk store against the disk itself, in one run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kv4::cli {

struct StoreBenchFlags {
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
  bool json = false;
};

int bench_store(const StoreBenchFlags& flags);

}  // namespace kv4::cli
