// Any bytes as a session: refused with an Error and without a change of the cache, or a session that encodes to the
// same bytes. The first byte selects the entry point:
//   even  the rest is a file, as it is
//   odd   the rest is the payload of a session's own record, sealed with digests and a key that fit
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cache/session_file.h"
#include "kv4/error.h"
#include "checks/session_rows.h"

namespace {

using namespace kv4;

/// A file that is only read.
class BytesFile : public tier::File {
 public:
  explicit BytesFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  tier::IoBytes readv(std::int64_t offset, std::span<const tier::IoPiece> to) override {
    auto at = std::min(static_cast<std::size_t>(offset), bytes_.size());
    std::int64_t moved = 0;
    for (const tier::IoPiece& piece : to) {
      const auto count = std::min(piece.bytes, bytes_.size() - at);
      if (count > 0) std::memcpy(piece.data, bytes_.data() + at, count);
      at += count;
      moved += static_cast<std::int64_t>(count);
    }
    return {{}, moved};
  }
  tier::IoBytes writev(std::int64_t, std::span<const tier::IoPiece>) override { std::abort(); }
  tier::IoStatus fdatasync() override { std::abort(); }
  tier::IoStatus fallocate(std::int64_t) override { std::abort(); }
  tier::IoStatus punch(std::int64_t, std::int64_t) override { std::abort(); }
  std::int64_t size() override { return static_cast<std::int64_t>(bytes_.size()); }
  tier::IoStatus rename_new(const std::string&) override { std::abort(); }
  bool cached() override { return false; }

 private:
  std::span<const std::byte> bytes_;
};

class OneFile : public tier::FileSystem {
 public:
  explicit OneFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  tier::IoStatus make_directory(const std::string&) override { std::abort(); }
  tier::Listing list(const std::string&, const tier::NameFilter&) override { std::abort(); }
  tier::IoStatus look_at(const std::string&) override { std::abort(); }
  tier::IoStatus sync_directory(const std::string&) override { std::abort(); }
  tier::Opened<tier::File> open(const std::string&, tier::OpenMode mode) override {
    if (mode != tier::OpenMode::read) std::abort();
    return {{}, std::make_unique<BytesFile>(bytes_)};
  }
  std::unique_ptr<tier::IoQueue> make_queue(int, tier::FileLock*) override { std::abort(); }
  tier::IoStatus rename(const std::string&, const std::string&) override { std::abort(); }
  tier::IoStatus unlink(const std::string&) override { std::abort(); }
  tier::Opened<tier::FileLock> lock(const std::string&) override { std::abort(); }
  std::int64_t now_ns() override { std::abort(); }
  std::uint64_t random64() override { std::abort(); }

 private:
  std::span<const std::byte> bytes_;
};

/// Windows and blocks of eight tokens, rows of 16 bf16: its sessions have a few hundred bytes.
KVCacheManager& cache() {
  static const std::unique_ptr<KVCacheManager> made = [] {
    ModelConfig config;
    config.num_layers = 2;
    config.num_query_heads = 1;
    config.index_heads = 1;
    config.index_dim = 16;
    config.index_topk = 1;
    config.kinds = {LayerKind::swa, LayerKind::hca};
    config.hca_ratio = 8;
    config.head_dim = 16;
    config.rope_dim = 8;
    config.window = 8;
    CacheOptions options;
    options.row_format = Format::bf16;
    options.max_requests = 1;
    options.block_tokens = 8;
    options.max_context = 64;
    return std::make_unique<KVCacheManager>(config, options);
  }();
  return *made;
}

const SessionIdentity kIdentity{.weights_id = "w", .salt = "s"};

void expect_empty_again(const Expected<RequestId>& request) {
  if (request) cache().release(*request);
  if (cache().num_requests() != 0 || cache().allocator().num_held() != 0) std::abort();
}

void as_file(std::span<const std::byte> bytes) {
  OneFile files(bytes);
  try {
    survey_session_file(files, "session");
  } catch (const Error&) {
  }
  try {
    SessionFileSource source(files, "session");
    checks::read_session_rows(source, {}, [](const checks::DecodedRow& row) {
      double sum = 0;  // reads every number
      for (const float value : row.values) sum += value;
      volatile double seen = sum;
      (void)seen;
    });
  } catch (const Error&) {
  }
  try {
    expect_empty_again(SessionFile{files, "session"}.restore(cache(), kIdentity));
  } catch (const Error&) {
    expect_empty_again(Shortage::none);
  }
}

void as_payload(std::span<const std::byte> bytes) {
  std::vector<std::byte> record(tier::kRecordHeaderBytes);
  record.insert(record.end(), bytes.begin(), bytes.end());
  tier::RecordHeader header;
  header.layout_id = cache().schema().layout_id;
  try {
    const SessionParts parts = parse_session(bytes);
    const std::vector<std::byte> again = encode_session(parts);
    if (again.size() != bytes.size() || std::memcmp(again.data(), bytes.data(), bytes.size()) != 0) std::abort();
    BlockHasher hasher;
    header.id.key = record_key(session_key(hasher, parts, token_ids_of(parts)));
  } catch (const Error&) {
  }
  finish_record(tier::RecordGuard(), header, record);
  try {
    SessionReceiver receiver(cache(), kIdentity);
    receiver.take(record);
    expect_empty_again(receiver.finish());
  } catch (const Error&) {
    expect_empty_again(Shortage::none);
  }
  record.resize(static_cast<std::size_t>(tier::whole_blocks(static_cast<std::int64_t>(record.size()))));
  as_file(record);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> rest(reinterpret_cast<const std::byte*>(data + 1), size - 1);
  if (data[0] % 2 == 0)
    as_file(rest);
  else
    as_payload(rest);
  return 0;
}
