#include "cache/session_file.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/undo.h"
#include "cache/cache_call.h"

namespace kv4 {
namespace {

using tier::kBlockBytes;

std::string directory_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

/// The same error with the file's name before it.
template <class Call>
auto naming(const std::string& path, Call&& call) {
  try {
    return call();
  } catch (const Error& e) {
    fail(e.code(), "{}: {}", path, e.what());
  } catch (const std::bad_alloc&) {
    fail_for_memory();
  }
}

void check_io(const tier::IoStatus& status, const char* what) {
  require(status.ok(), ErrorCode::bad_file, "cannot {}: {}", what, to_string(status));
}

/// A file with a random name until it is complete and durable; removed otherwise.
class UnfinishedFile : public RecordSink {
 public:
  UnfinishedFile(tier::FileSystem& files, const std::string& path)
      : files_(files), path_(fmt::format("{}.{:016x}{}", path, files.random64(), tier::kUnfinishedSuffix)) {
    Undo remove([this] { files_.unlink(path_); });  // the file may exist when memory was refused
    tier::Opened<tier::File> opened = files.open(path_, tier::OpenMode::create);
    remove.keep();
    check_io(opened.status, "make a file there");
    file_ = std::move(opened.handle);
  }
  UnfinishedFile(const UnfinishedFile&) = delete;
  UnfinishedFile& operator=(const UnfinishedFile&) = delete;
  ~UnfinishedFile() override {
    if (file_ == nullptr) return;
    file_.reset();
    files_.unlink(path_);
  }

  void write(std::span<const std::byte> record) override {
    const std::span<std::byte> blocks = buffer_.get(tier::whole_blocks(std::ssize(record)));
    std::fill(std::copy(record.begin(), record.end(), blocks.begin()), blocks.end(), std::byte{0});
    check_io(write_all(*file_, offset_, blocks), "write the session");
    offset_ += static_cast<std::int64_t>(blocks.size());
  }

  void publish(const std::string& path) {
    const std::string directory = directory_of(path);  // before it has its name
    check_io(file_->fdatasync(), "make the session durable");
    check_io(files_.rename(path_, path), "give the session its name");
    file_.reset();
    check_io(files_.sync_directory(directory), "make the session's name durable");
  }

 private:
  tier::FileSystem& files_;
  std::string path_;
  std::unique_ptr<tier::File> file_;
  std::int64_t offset_ = 0;
  tier::BlockBuffer buffer_;
};

}  // namespace

SessionFileSource::SessionFileSource(tier::FileSystem& files, const std::string& path) {
  tier::Opened<tier::File> opened = files.open(path, tier::OpenMode::read);
  check_io(opened.status, "open the session");
  file_ = std::move(opened.handle);
  bytes_ = file_->size();
  require(bytes_ > 0, ErrorCode::bad_file, "it is empty, or no file");
}

void SessionFileSource::read(std::int64_t offset, std::span<std::byte> to) {
  check_io(read_all(*file_, offset, to), "read the session");
}

std::span<const std::byte> SessionFileSource::next() {
  if (offset_ == bytes_) return {};
  const std::int64_t left = bytes_ - offset_;
  require(left >= kBlockBytes, ErrorCode::bad_file, "truncated at byte {}: {} bytes are left", offset_, left);
  const std::span<std::byte> first = buffer_.get(kBlockBytes);
  read(offset_, first);
  const auto [refusal, header] = tier::parse_header(first);
  require(refusal == tier::RecordRefusal::none, ErrorCode::bad_file, "at byte {}: {}", offset_, to_string(refusal));
  require(header.length <= kMaxSessionRecordBytes, ErrorCode::bad_file,
          "at byte {} begins a record with a payload of {} bytes; one of a session has at most {}", offset_,
          header.length, kMaxSessionRecordBytes);
  const std::int64_t stored = tier::whole_blocks(header.header_bytes() + header.length);
  require(stored <= left, ErrorCode::bad_file, "truncated: at byte {} begins a record of {} bytes, and {} are left",
          offset_, stored, left);
  if (header.kind != tier::RecordKind::sealed) check_session_front(first.subspan(header.header_bytes()), header.length);
  const std::span<std::byte> blocks = buffer_.get(stored);
  read(offset_, blocks);
  const std::size_t used = header.header_bytes() + header.length;
  const auto rest = blocks.subspan(used);
  require(std::all_of(rest.begin(), rest.end(), [](std::byte b) { return b == std::byte{0}; }), ErrorCode::bad_file,
          "damaged: bytes that should be zero follow the record at byte {}", offset_);
  offset_ += stored;
  return blocks.first(used);
}

bool SessionFile::save(KVCacheManager& manager, RequestId request, const SessionIdentity& identity,
                       const SessionProgress& progress) const {
  return naming(path, [&] {
    UnfinishedFile file(files, path);
    if (!write_session(manager, request, identity, file, progress)) return false;
    file.publish(path);
    return true;
  });
}

Expected<RequestId> SessionFile::restore(KVCacheManager& manager, const SessionIdentity& identity,
                                         const SessionProgress& progress) const {
  return naming(path, [&] {
    SessionFileSource source(files, path);
    return read_session(manager, identity, source, progress);
  });
}

bool save_session_file(KVCacheManager& manager, RequestId request, const SessionIdentity& identity,
                       const std::string& path, const SessionProgress& progress) try {
  const TimedCall call(manager, &CallTimes::session_save);
  // Through the page cache: a session saved before a restart is often read right after it.
  const auto files = tier::make_posix_file_system({.direct = false});
  return SessionFile{*files, path}.save(manager, request, identity, progress);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<RequestId> restore_session_file(KVCacheManager& manager, const SessionIdentity& identity,
                                         const std::string& path, const SessionProgress& progress) try {
  const TimedCall call(manager, &CallTimes::session_restore);
  const auto files = tier::make_posix_file_system({.direct = false});
  return SessionFile{*files, path}.restore(manager, identity, progress);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

// --- survey
// ------------------------------------------------------------------------------------------------------------------

namespace {

constexpr std::int64_t kMaxSurveyProblems = 100;  // listed one by one

/// Goes through a file and notes its faults.
class Surveyor {
 public:
  Surveyor(SessionFileSource& source, const SessionIdentity& identity)
      : source_(source), guard_(session_guard(identity)) {}

  SessionSurvey run() {
    survey_.file_bytes = source_.file_bytes();
    take_own(source_.next());
    for (std::int64_t number = 1;; ++number) {
      std::span<const std::byte> record;
      if (!noted(number, [&] { record = source_.next(); })) break;  // the start of the next one is unknown
      if (record.empty()) break;
      noted(number, [&] { take_block(record); });
    }
    if (problems_ > kMaxSurveyProblems)
      survey_.problems.push_back(fmt::format("{} more records like these", problems_ - kMaxSurveyProblems));
    if (const std::int64_t missing = survey_.full_blocks - survey_.blocks_found; missing > 0)
      survey_.problems.push_back(fmt::format("{} of {} full blocks are missing", missing, survey_.full_blocks));
    return std::move(survey_);
  }

 private:
  template <class Call>
  bool noted(std::int64_t number, Call&& call) {
    try {
      call();
      return true;
    } catch (const Error& e) {
      if (++problems_ <= kMaxSurveyProblems) survey_.problems.push_back(fmt::format("record {}: {}", number, e.what()));
      return false;
    }
  }

  void take_own(std::span<const std::byte> record) {
    const SessionRecord opened = open_record(*guard_, record, memory_);
    const tier::RecordHeader& header = opened.header;
    const SessionParts parts = parse_session(opened.payload);
    survey_.protection = protection_of(header.kind);
    survey_.authentic = guard_->has_keys() && survey_.protection != Protection::none;
    survey_.layout_id = header.layout_id;
    survey_.tenant = header.id.tenant;
    survey_.block_tokens = parts.block_tokens;
    survey_.lengths = parts.lengths;
    survey_.weights_id = parts.weights_id;
    survey_.layout = parts.layout;
    survey_.full_blocks = parts.full_blocks();
    survey_.image_bytes = static_cast<std::int64_t>(parts.image.size());
    survey_.open_block_bytes = static_cast<std::int64_t>(parts.open_block.size());
    survey_.snapshot_bytes = static_cast<std::int64_t>(parts.snapshot.size());
    survey_.token_bytes = static_cast<std::int64_t>(parts.token_ids.size());
    for (const auto& extra : parts.block_extra) survey_.extra_bytes += static_cast<std::int64_t>(extra.size());

    BlockHasher hasher;
    const std::vector<std::int32_t> token_ids = token_ids_of(parts);
    noted(0, [&] {
      require(digest64(parts.layout) == header.layout_id, ErrorCode::bad_file, "its layout id is not that of its text");
      require(block_key(header.id.key) == session_key(hasher, parts, token_ids), ErrorCode::bad_file,
              "its key is not that of its tokens");
    });
    for (const BlockKey& key : chain_keys(hasher, parts, token_ids)) found_.emplace(key, false);
  }

  void take_block(std::span<const std::byte> record) {
    const tier::RecordHeader header = open_record(*guard_, record, memory_).header;
    require(header.id.tenant == survey_.tenant, ErrorCode::bad_file, "it is tenant {}'s", header.id.tenant);
    require(header.layout_id == survey_.layout_id, ErrorCode::bad_file, "it is of layout {:016x}", header.layout_id);
    const auto found = found_.find(block_key(header.id.key));
    require(found != found_.end(), ErrorCode::bad_file, "it is no block of this session");
    survey_.block_bytes += header.length;
    survey_.blocks_found += !std::exchange(found->second, true);
  }

  SessionFileSource& source_;
  const std::shared_ptr<const tier::RecordGuard> guard_;
  std::vector<std::byte> memory_;
  SessionSurvey survey_;
  std::map<BlockKey, bool> found_;  // by the key of a full block: whether it came
  std::int64_t problems_ = 0;       // of records, including those not listed
};

}  // namespace

SessionSurvey survey_session_file(tier::FileSystem& files, const std::string& path, const SessionIdentity& identity) {
  return naming(path, [&] {
    SessionFileSource source(files, path);
    return Surveyor(source, identity).run();
  });
}

}  // namespace kv4
