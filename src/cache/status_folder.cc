#include "kv4/status_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "cache/cache_call.h"
#include "cache/session_file.h"
#include "cache/status_file.h"
#include "kv4/version.h"
#include "tier/segment_file.h"

namespace kv4 {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kAnswersStay{60};  // by then the asker has taken it, or has gone

RequestStatus describe(const KVCacheManager& cache, RequestId request) {
  RequestStatus out{.request = request, .lengths = {}, .rewind_floor = cache.rewind_floor(request)};
  for (int group = 0; group < cache.schema().num_groups; ++group) out.lengths.push_back(cache.length(request, group));
  for (const BlockId block : cache.blocks(request)) {
    ++out.blocks;
    out.shared_blocks += cache.allocator().reference_count(block) > 1;
    out.kept_blocks += cache.allocator().is_published(block);
  }
  return out;
}

}  // namespace

BuildInfo build_info() {
#ifdef KV4_HAS_CUDA
  constexpr bool cuda = true;
#else
  constexpr bool cuda = false;
#endif
#ifdef __clang__
  return {KV4_VERSION, cuda, fmt::format("clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__)};
#else
  return {KV4_VERSION, cuda, fmt::format("gcc {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__)};
#endif
}

CacheStatus read_status(const KVCacheManager& cache, Tiers* tiers) try {
  const CacheCall call(cache);
  CacheStatus out{.build = build_info(), .cache = cache.statistics(), .requests = {}, .block_states = {}, .tiers = {}};
  for (const RequestId request : cache.requests()) out.requests.push_back(describe(cache, request));
  const BlockAllocator& blocks = cache.allocator();
  out.block_states.resize(blocks.num_blocks());
  for (BlockId block = 0; block < blocks.num_blocks(); ++block)
    out.block_states[block] = blocks.reference_count(block) > 0 ? 'h' : blocks.is_published(block) ? 'k' : 'f';
  if (tiers != nullptr) out.tiers = tiers->report();
  return out;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

struct StatusFolder::Impl {
  struct Answer {
    std::string path;
    Clock::time_point written;
  };

  KVCacheManager& cache;
  std::string directory;
  std::string status_path;  // made early: the destructor allocates nothing
  StatusOptions options;
  // A killed process leaves nothing in flight: the lock is free at once, or another process holds it.
  std::unique_ptr<tier::FileSystem> files =
      tier::make_posix_file_system({.direct = false, .lock_wait = std::chrono::milliseconds(0)});
  std::unique_ptr<tier::FileLock> lock;
  std::vector<Answer> answers;  // perhaps not taken yet
  Clock::time_point published{};
  bool fails = false;  // the last publish() failed

  Impl(KVCacheManager& cache_in, std::string directory_in, const StatusOptions& options_in)
      : cache(cache_in),
        directory(std::move(directory_in)),
        status_path(path_of(kStatusFileName)),
        options(options_in) {
    require(options.interval.count() >= 0 && options.interval.count() <= kMaxStatusIntervalMs, ErrorCode::bad_argument,
            "an interval of {} ms; it is 0 to {}", options.interval.count(), kMaxStatusIntervalMs);
    (void)session_guard({.keys = options.keys});  // throws now, not with the first answer
    check(files->make_directory(directory), "be made");
    tier::Opened<tier::FileLock> locked = files->lock(path_of(kStatusLockName));
    require(locked.status.code != tier::IoCode::in_use, ErrorCode::bad_state,
            "the status folder {} is in use: another cache publishes there; give this one a folder of its own",
            directory);
    check(locked.status, "be locked");
    lock = std::move(locked.handle);
    for (const std::string& name : names())
      if (is_of_question(name)) files->unlink(path_of(name));  // left by an earlier process
  }

  ~Impl() {
    if (!lock->owned()) return;  // in a forked child: the parent still publishes
    files->unlink(status_path);
    for (const Answer& answer : answers) files->unlink(answer.path);
  }

  std::string path_of(const std::string& name) const { return directory + "/" + name; }

  void check(const tier::IoStatus& status, const char* what) const {
    require(status.ok(), ErrorCode::bad_file, "the status folder {} cannot {}: {}", directory, what, to_string(status));
  }

  std::vector<std::string> names() const {
    tier::Listing listing = files->list(directory);
    check(listing.status, "be read");
    return std::move(listing.names);
  }

  /// The file appears complete or not at all; a status need not survive a crash of the machine.
  void replace(const std::string& name, const std::string& text, bool shared) const {
    const std::string path = path_of(name), unfinished = path + std::string(tier::kUnfinishedSuffix);
    (void)files->unlink(unfinished);  // left by a failed attempt
    tier::Opened<tier::File> opened = files->open(unfinished, tier::OpenMode::create);
    tier::IoStatus status = opened.status;
    if (status.ok()) status = tier::write_all(*opened.handle, 0, std::as_bytes(std::span(text)));
    if (status.ok() && shared) share(unfinished);
    if (status.ok()) status = files->rename(unfinished, path);
    check(status, "be written to");
  }

  /// Users who may read the folder may read the file, whatever the umask is: 0700 gives 0600, 0750 0640, 0755 0644. The
  /// file gets the folder's group if the process is in it. Otherwise only the owner may read the file, except in a
  /// folder that all may read: 0750 is meant for the folder's group, not for the process's own.
  void share(const std::string& path) const {
    struct stat folder {};
    const int file = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0) return;
    if (::stat(directory.c_str(), &folder) == 0) {
      const mode_t readers = folder.st_mode & 0044;
      if (::fchown(file, static_cast<uid_t>(-1), folder.st_gid) == 0 || readers == 0044)
        (void)!::fchmod(file, 0600 | readers);
    }
    ::close(file);
  }

  void write_status() const {
    const BootTime now = read_boot_time();
    replace(kStatusFileName,
            status_text({.model = cache.schema().config.name.substr(0, kMaxStatusNameBytes),
                         .process = getpid(),
                         .time_ms = files->now_ns() / 1'000'000,
                         .boot_id = now.boot_id,
                         .boot_ms = now.ms,
                         .interval_ms = options.interval.count(),
                         .status = read_status(cache, options.tiers)}),
            true);
  }

  /// Answers the first question; the others have their turn later.
  void answer_question() {
    for (const std::string& name : names())
      if (const std::optional<RequestQuestion> question = parse_question(name)) {
        check(files->unlink(path_of(name)), "lose a file");  // before the asker can see the answer
        return answer(*question);
      }
  }

  void answer(const RequestQuestion& question) {
    const std::string path = path_of(question.answer_name());
    // For inspection only: a salt of its own keeps it from being restored as somebody's session.
    const SessionIdentity identity{
        .weights_id = cache.schema().options.prefix.weights_id, .salt = "kv4 inspect", .keys = options.keys};
    answers.reserve(answers.size() + 1);
    try {
      Answer written{path, Clock::now()};
      SessionFile{*files, path}.save(cache, question.request, identity);
      answers.push_back(std::move(written));
    } catch (const Error& error) {
      std::string why = error.what();
      if (why.starts_with(path + ": ")) why.erase(0, path.size() + 2);  // the asker never sees that file
      Answer written{path_of(question.error_name()), Clock::now()};
      replace(question.error_name(), why, false);
      answers.push_back(std::move(written));
    }
  }

  void note_failure(const char* reason) {
    if (!std::exchange(fails, true))
      log(LogLevel::warning, "status.failed", "the status of a cache could not be published",
          {{"directory", directory}, {"reason", reason}});
  }

  void drop_answers() {
    std::erase_if(answers, [&](const Answer& answer) {
      if (Clock::now() - answer.written < kAnswersStay) return false;
      files->unlink(answer.path);
      return true;
    });
  }
};

StatusFolder::StatusFolder(KVCacheManager& cache, std::string directory, const StatusOptions& options) try
    : impl_(std::make_unique<Impl>(cache, std::move(directory), options)) {
} catch (const std::bad_alloc&) {
  fail_for_memory();
}
StatusFolder::~StatusFolder() = default;

bool StatusFolder::publish() {
  Impl& m = *impl_;
  const CacheCall call(m.cache);
  if (!m.lock->owned()) return false;
  if (const auto now = Clock::now(); m.published == Clock::time_point{} || now - m.published >= m.options.interval)
    m.published = now;
  else
    return true;
  try {
    m.write_status();
    m.answer_question();
    m.drop_answers();
    m.fails = false;
  } catch (const Error& error) {
    m.note_failure(error.what());
  } catch (const std::bad_alloc&) {
    m.note_failure("the machine refused memory");
  }
  return !m.fails;
}

}  // namespace kv4
