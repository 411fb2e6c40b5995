#include "store_cases.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <utility>

#include "base/check.h"
#include "checks/sizes.h"
#include "kv4/chunk_store.h"
#include "tier/disk_store.h"
#include "tier/index_checkpoint.h"
#include "tier/record_guard.h"

namespace kv4::bench {
namespace {

using nlohmann::json;
using namespace tier;
using checks::human_bytes;

/// Leaves a measurement; the results so far count.
struct Interrupted {};

void stop_if_interrupted(const StoreBenchOptions& options) {
  if (options.interrupted()) throw Interrupted{};
}

/// Pauses, because a disk may be busy with deleted files for a while.
void let_disk_rest(const StoreBenchOptions& options) {
  constexpr std::chrono::milliseconds kRest{1000}, kNap{50};
  for (std::chrono::milliseconds slept{0}; slept < kRest && !options.interrupted(); slept += kNap)
    std::this_thread::sleep_for(kNap);
}

struct Speed {
  double bytes_per_s = 0, cpu_s_per_gb = 0;
};

double cpu_s() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double wall_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Speed timed(std::int64_t bytes, const std::function<void()>& work) {
  const double cpu = cpu_s(), wall = wall_s();
  work();
  return {static_cast<double>(bytes) / (wall_s() - wall), (cpu_s() - cpu) / (static_cast<double>(bytes) * 1e-9)};
}

RecordId id_of(std::int64_t number) {
  std::mt19937_64 random(static_cast<std::uint64_t>(number));
  RecordId id;
  for (std::size_t i = 0; i < id.key.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(id.key.data() + i, &word, 8);
  }
  return id;
}

/// The keys of a batch of chunks: 36 bytes, as vLLM's are.
class ChunkKeys {
 public:
  explicit ChunkKeys(std::span<const std::int64_t> numbers) : bytes_(numbers.size()) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const RecordId id = id_of(numbers[i]);
      std::copy(id.key.begin(), id.key.end(), bytes_[i].begin());
      keys_.emplace_back(bytes_[i]);
    }
  }
  std::span<const ChunkKey> keys() const { return keys_; }

 private:
  std::vector<std::array<std::byte, 36>> bytes_;
  std::vector<ChunkKey> keys_;
};

constexpr Deadline kNever = Deadline::max();

std::unique_ptr<ChunkStore> open_chunks(const std::filesystem::path& folder) {
  ChunkStoreOptions options;
  options.tiers.directory = folder.string();
  options.tiers.disk_bytes = INT64_MAX;
  options.tiers.max_write_bytes = options.tiers.max_read_bytes = std::int64_t{1} << 30;
  return std::make_unique<ChunkStore>(options);
}

/// Takes the batch; throws unless all of it is ok.
void finish(ChunkStore& store, std::uint64_t batch, const char* what) {
  const std::optional<ChunkResults> results = store.take(batch, kNever);
  require(results && results->all_ok(), ErrorCode::bad_file, "{} failed", what);
}

std::int64_t bytes_below(const std::filesystem::path& folder) {
  std::int64_t bytes = 0;
  std::error_code error;
  for (auto at = std::filesystem::recursive_directory_iterator(folder, error);
       !error && at != std::filesystem::recursive_directory_iterator(); at.increment(error))
    if (struct stat info{}; ::lstat(at->path().c_str(), &info) == 0) bytes += info.st_blocks * 512;
  return bytes;
}

/// Removes its directory however the work ends. After a kill, the next run removes it.
class BenchFolder {
 public:
  explicit BenchFolder(const StoreBenchOptions& options)
      : path_(std::filesystem::path(options.directory) / "kv4_store_bench"), lock_(-1) {
    std::error_code error;
    std::filesystem::create_directories(options.directory, error);
    const bool made = !error && std::filesystem::create_directory(path_, error);
    require(!error, ErrorCode::bad_file, "{} cannot be made: {}", path_.string(), error.message());
    lock_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    require(lock_ >= 0, ErrorCode::bad_file, "{} is no directory; remove it, or choose another one for the bench",
            path_.string());
    if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      ::close(lock_);
      require(false, ErrorCode::bad_state, "another 'kv4 store bench' works in {}; wait for it, or choose another one",
              path_.string());
    }
    if (made) return;
    fmt::print(stderr, "an earlier bench was killed and left {} in {}; they are removed\n",
               human_bytes(static_cast<double>(bytes_below(path_))), path_.string());
    empty();
  }
  ~BenchFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
    if (error)
      fmt::print(stderr, "{} could not be removed ({}); {} are left there\n", path_.string(), error.message(),
                 human_bytes(static_cast<double>(bytes_below(path_))));
    ::close(lock_);
  }
  BenchFolder(const BenchFolder&) = delete;
  BenchFolder& operator=(const BenchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void empty() {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) std::filesystem::remove_all(entry.path());
  }

 private:
  std::filesystem::path path_;
  int lock_;
};

/// The output of `command`, which ends when the bench is interrupted.
std::string output_of(const std::vector<std::string>& command, const StoreBenchOptions& options) {
  int ends[2];
  require(::pipe2(ends, O_CLOEXEC) == 0, ErrorCode::bad_file, "no pipe: {}", std::strerror(errno));
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, words[0], &actions, nullptr, words.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  std::string out;
  char chunk[4096];
  bool told = false;
  while (error == 0) {
    pollfd waits{ends[0], POLLIN, 0};
    if (options.interrupted() && !std::exchange(told, true)) ::kill(pid, SIGTERM);
    if (::poll(&waits, 1, 100) <= 0) continue;
    const ssize_t count = ::read(ends[0], chunk, sizeof(chunk));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    out.append(chunk, count);
  }
  ::close(ends[0]);
  int status = -1;
  while (error == 0 && ::waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
  stop_if_interrupted(options);
  require(status == 0, ErrorCode::bad_file, "{} failed; is it installed?", command[0]);
  return out;
}

/// All measurements of one record size.
class RecordSizeBench {
 public:
  RecordSizeBench(const StoreBenchOptions& options, BenchFolder& folder, std::int64_t record_bytes)
      : options_(options),
        bench_folder_(folder),
        record_bytes_(record_bytes),
        block_bytes_(whole_blocks(record_bytes)),
        records_(std::max<std::int64_t>(options.total_bytes / record_bytes, 1)),
        bytes_(records_ * record_bytes),
        folder_(folder.path()),
        files_(make_posix_file_system()) {
    stores_.push_back({"store", Protection::none, nullptr});
    if (options.encrypt) {
      stores_.push_back({"sealed", Protection::sealed, nullptr});
      stores_.push_back({"authenticated", Protection::authenticated, nullptr});
    }
    batch_ = std::min<std::int64_t>(options.batch, records_);
    memory_ = payloads_.get(batch_ * block_bytes_);
    std::mt19937_64 random(1);
    for (std::size_t i = 0; i + 8 <= memory_.size(); i += 8) {
      const std::uint64_t word = random();
      std::memcpy(memory_.data() + i, &word, 8);
    }
    for (std::int64_t i = 0; i < records_; ++i) order_.push_back(i);
    std::shuffle(order_.begin(), order_.end(), random);
  }

  /// One round of every measurement, so that all see the same disk. Their order changes from round to round. An
  /// interrupted round leaves its results so far in `speeds`.
  void round(int number, std::map<std::string, Speed>& speeds) {
    const auto run = [&](bool writes) {
      std::vector<std::pair<std::string, std::function<Speed()>>> works;
      const IoOp::Kind kind = writes ? IoOp::Kind::write : IoOp::Kind::read;
      if (options_.fio)
        works.emplace_back(writes ? "fio write" : "fio read", [&] { return fio(writes ? "write" : "randread"); });
      works.emplace_back(writes ? "raw write" : "raw read", [&] { return timed(bytes_, [&] { raw(kind); }); });
      for (Store& store : stores_)
        works.emplace_back(fmt::format("{} {}", store.name, writes ? "put" : "get"),
                           [&] { return timed(bytes_, [&] { writes ? put(store) : get(store); }); });
      if (options_.chunks)
        for (const bool registered : {false, true})
          works.emplace_back(fmt::format("{} {}", registered ? "registered chunks" : "chunks", writes ? "put" : "get"),
                             [&, registered] {
                               return timed(bytes_, [&] { writes ? put_chunks(registered) : get_chunks(registered); });
                             });
      works.emplace_back(writes ? "file per record write" : "file per record read",
                         [&] { return timed(bytes_, [&] { one_file_each(kind, *files_, "files"); }); });
      works.emplace_back(writes ? "cached file per record write" : "cached file per record read", [&] {
        if (!writes) forget_pages("cached files");
        return timed(bytes_, [&] { one_file_each(kind, *cached_files_, "cached files"); });
      });
      std::rotate(works.begin(), works.begin() + number % std::ssize(works), works.end());
      for (const auto& [name, work] : works) {
        stop_if_interrupted(options_);
        speeds[name] = work();
      }
    };
    run(true);
    run(false);
    for (Store& store : stores_) store.store.reset();
    for (auto& store : chunks_) store.reset();
    bench_folder_.empty();
    sync_folder();
    let_disk_rest(options_);
  }

 private:
  struct Store {
    const char* name;
    Protection protection;
    std::unique_ptr<DiskStore> store;
  };

  std::span<std::byte> payload(std::int64_t i) { return memory_.subspan(i % batch_ * block_bytes_, record_bytes_); }

  /// Whole blocks at their places in one file; written in order, read in random order.
  void raw(IoOp::Kind kind) {
    const bool writes = kind == IoOp::Kind::write;
    Opened<File> opened = files_->open((folder_ / "raw").string(), writes ? OpenMode::create : OpenMode::read);
    require(opened.status.ok(), ErrorCode::bad_file, "{}: {}", folder_.string(), to_string(opened.status));
    if (writes) (void)opened.handle->fallocate(records_ * block_bytes_);
    const auto queue = files_->make_queue(options_.depth, nullptr);
    std::vector<IoOp> ops(options_.depth + 1);
    std::vector<IoOp*> free;
    for (IoOp& op : ops) free.push_back(&op);
    std::int64_t next = 0;
    run_transfers(
        *queue,
        [&]() -> IoOp* {
          stop_if_interrupted(options_);
          if (next == records_ || free.empty()) return nullptr;
          IoOp* op = free.back();
          free.pop_back();
          const std::int64_t place = writes ? next : order_[next];
          *op = {opened.handle.get(),
                 kind,
                 place * block_bytes_,
                 {{payload(next).data(), static_cast<std::size_t>(block_bytes_)}},
                 {},
                 false};
          ++next;
          return op;
        },
        [&](IoOp& op) {
          require(op.moved.status.ok(), ErrorCode::bad_file, "raw transfer: {}", to_string(op.moved.status));
          free.push_back(&op);
        });
    if (writes) (void)opened.handle->fdatasync();
  }

  void put(Store& of) {
    StoreOptions options;
    options.directory = (folder_ / of.name).string();
    options.capacity_bytes = INT64_MAX;
    options.queue_depth = options_.depth;
    options.sync_every_bytes = options_.sync_bytes;
    if (of.protection != Protection::none)
      options.guard = std::make_shared<RecordGuard>(GuardOptions{"disk", {CacheKey{}}, of.protection, false});
    of.store = DiskStore::open(*files_, options);
    for (std::int64_t i = 0; i < records_; i += batch_) {
      stop_if_interrupted(options_);
      std::vector<PutRequest> requests;
      for (std::int64_t j = i; j < std::min(i + batch_, records_); ++j) requests.push_back({id_of(j), payload(j)});
      of.store->put(requests);
      for (const PutRequest& request : requests)
        require(request.status == PutStatus::stored, ErrorCode::bad_file, "put failed");
    }
    require(of.store->flush(), ErrorCode::bad_file, "flush failed");
  }

  void get(Store& of) {
    for (std::int64_t i = 0; i < records_; i += batch_) {
      stop_if_interrupted(options_);
      std::vector<GetRequest> requests;
      for (std::int64_t j = i; j < std::min(i + batch_, records_); ++j)
        requests.push_back({id_of(order_[j]), payload(j)});
      of.store->get(requests);
      for (const GetRequest& request : requests)
        require(request.status == GetStatus::found, ErrorCode::bad_file, "get missed");
    }
  }

  /// The numbers of the records of a batch that begins at `from`.
  std::vector<std::int64_t> batch_from(std::int64_t from, bool in_order) const {
    std::vector<std::int64_t> numbers;
    for (std::int64_t j = from; j < std::min(from + batch_, records_); ++j) numbers.push_back(in_order ? j : order_[j]);
    return numbers;
  }

  /// With a batch under way while the next one is made.
  void put_chunks(bool registered) {
    std::unique_ptr<ChunkStore>& store = chunks_[registered ? 1 : 0];
    store = open_chunks(folder_ / (registered ? "registered chunks" : "chunks"));
    if (registered) (void)store->add_memory(memory_);
    std::uint64_t before = 0;
    for (std::int64_t i = 0; i < records_; i += batch_) {
      stop_if_interrupted(options_);
      const std::vector<std::int64_t> numbers = batch_from(i, true);
      const ChunkKeys keys(numbers);
      std::vector<ChunkPut> chunks;
      for (std::size_t j = 0; j < numbers.size(); ++j)
        chunks.push_back({.key = keys.keys()[j], .value = payload(numbers[j])});
      const std::uint64_t batch = store->put(chunks);
      if (before != 0) finish(*store, before, "put");
      before = batch;
    }
    finish(*store, before, "put");
    finish(*store, store->flush(), "flush");
  }

  void get_chunks(bool registered) {
    ChunkStore& store = *chunks_[registered ? 1 : 0];
    for (std::int64_t i = 0; i < records_; i += batch_) {
      stop_if_interrupted(options_);
      const std::vector<std::int64_t> numbers = batch_from(i, false);
      const ChunkKeys keys(numbers);
      std::vector<ChunkGet> chunks;
      for (std::size_t j = 0; j < numbers.size(); ++j)
        chunks.push_back({.key = keys.keys()[j], .to = payload(i + static_cast<std::int64_t>(j))});
      finish(store, store.get(chunks), "get");
    }
  }

  /// One file per record, written one after the other and durable at the end, as in many caches.
  void one_file_each(IoOp::Kind kind, FileSystem& files, const char* name) {
    const std::filesystem::path folder = folder_ / name;
    std::filesystem::create_directory(folder);
    for (std::int64_t i = 0; i < records_; ++i) {
      stop_if_interrupted(options_);
      const std::int64_t number = kind == IoOp::Kind::write ? i : order_[i];
      const std::string path = (folder / std::to_string(number)).string();
      Opened<File> opened = files.open(path, kind == IoOp::Kind::write ? OpenMode::create : OpenMode::read);
      const std::span<std::byte> bytes(payload(i).data(), block_bytes_);
      IoStatus status = opened.status;
      if (status.ok())
        status = kind == IoOp::Kind::write ? write_all(*opened.handle, 0, bytes) : read_all(*opened.handle, 0, bytes);
      require(status.ok(), ErrorCode::bad_file, "{}: {}", path, to_string(status));
    }
    if (kind == IoOp::Kind::write) sync_folder();
  }

  /// Drops cached pages, so that reads come from the disk.
  void forget_pages(const char* name) {
    for (const auto& file : std::filesystem::directory_iterator(folder_ / name)) {
      const int fd = ::open(file.path().c_str(), O_RDONLY);
      ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
      ::close(fd);
    }
  }

  void sync_folder() {
    const int fd = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY);
    ::syncfs(fd);
    ::close(fd);
  }

  Speed fio(const std::string& kind) {
    const std::string out = output_of(
        {"fio", "--name=kv4", fmt::format("--filename={}", (folder_ / "fio").string()), fmt::format("--rw={}", kind),
         fmt::format("--bs={}", block_bytes_), fmt::format("--size={}", records_ * block_bytes_), "--ioengine=io_uring",
         fmt::format("--iodepth={}", options_.depth), "--direct=1", "--end_fsync=1", "--norandommap=0",
         "--output-format=json"},
        options_);
    const json job = json::parse(out)["jobs"][0];
    const json& side = job[kind == "write" ? "write" : "read"];
    const double bytes_per_s = side["bw_bytes"].get<double>();
    const double cpu = job["usr_cpu"].get<double>() + job["sys_cpu"].get<double>();  // percent
    return {bytes_per_s, cpu / 100 / (bytes_per_s * 1e-9)};
  }

  const StoreBenchOptions& options_;
  BenchFolder& bench_folder_;
  std::int64_t record_bytes_, block_bytes_, records_, bytes_, batch_ = 0;
  std::filesystem::path folder_;
  std::unique_ptr<FileSystem> files_, cached_files_ = make_posix_file_system({.direct = false});
  std::vector<Store> stores_;
  std::array<std::unique_ptr<ChunkStore>, 2> chunks_;  // copied, registered
  BlockBuffer payloads_;
  std::span<std::byte> memory_;
  std::vector<std::int64_t> order_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Comparison {
  const char *what, *with;
};
constexpr Comparison kComparisons[] = {{"store put", "raw write"},
                                       {"store put", "fio write"},
                                       {"store put", "file per record write"},
                                       {"store put", "cached file per record write"},
                                       {"store get", "raw read"},
                                       {"store get", "fio read"},
                                       {"store get", "file per record read"},
                                       {"store get", "cached file per record read"},
                                       {"sealed put", "store put"},
                                       {"sealed get", "store get"},
                                       {"authenticated put", "store put"},
                                       {"authenticated get", "store get"},
                                       {"chunks put", "store put"},
                                       {"chunks get", "store get"},
                                       {"registered chunks put", "store put"},
                                       {"registered chunks get", "store get"}};

json measure(const StoreBenchOptions& options, BenchFolder& folder, std::int64_t record_bytes) {
  RecordSizeBench bench(options, folder, record_bytes);
  std::map<std::string, std::vector<double>> speeds, cpu, ratios;
  for (int i = 0; i < options.rounds && !options.interrupted(); ++i) {
    std::map<std::string, Speed> round;
    try {
      bench.round(i, round);
    } catch (const Interrupted&) {  // the results so far are shown
    }
    for (const auto& [name, speed] : round) {
      speeds[name].push_back(speed.bytes_per_s);
      cpu[name].push_back(speed.cpu_s_per_gb);
    }
    for (const Comparison& c : kComparisons)
      if (round.count(c.what) != 0 && round.count(c.with) != 0)
        ratios[fmt::format("{} / {}", c.what, c.with)].push_back(round.at(c.what).bytes_per_s /
                                                                 round.at(c.with).bytes_per_s);
  }
  json out = {{"record_bytes", record_bytes}, {"speeds", json::object()}, {"ratios", json::object()}};
  for (const auto& [name, values] : speeds)
    out["speeds"][name] = {{"mb_per_s", median(values) * 1e-6}, {"cpu_s_per_gb", median(cpu[name])}};
  for (const auto& [name, values] : ratios)
    out["ratios"][name] = {{"median", median(values)},
                           {"lowest", *std::min_element(values.begin(), values.end())},
                           {"highest", *std::max_element(values.begin(), values.end())}};
  return out;
}

/// Times a store of many empty records: opening it, with and without its checkpoint, and looking up records.
json measure_index(const StoreBenchOptions& bench, BenchFolder& bench_folder) {
  const std::filesystem::path folder = bench_folder.path() / "index";
  const auto files = make_posix_file_system();
  StoreOptions options;
  options.directory = folder.string();
  options.capacity_bytes = INT64_MAX;
  options.queue_depth = bench.depth;
  constexpr std::int64_t kBatch = 4096;
  {
    const auto store = DiskStore::open(*files, options);
    for (std::int64_t i = 0; i < bench.index_records; i += kBatch) {
      stop_if_interrupted(bench);
      std::vector<PutRequest> requests;
      for (std::int64_t j = i; j < std::min(i + kBatch, bench.index_records); ++j) requests.push_back({id_of(j), {}});
      store->put(requests);
    }
    require(store->close(), ErrorCode::bad_file, "the store could not be closed");
  }
  std::vector<ExistsRequest> requests;
  std::mt19937_64 random(2);
  for (int i = 0; i < 100'000; ++i)
    requests.push_back({id_of(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bench.index_records)))});
  double with_s = 0, without_s = 0, lookup_ns = 0;
  {
    const double start = wall_s();
    const auto store = DiskStore::open(*files, options);
    with_s = wall_s() - start;
    const double looked = wall_s();
    store->exists(requests);
    lookup_ns = (wall_s() - looked) / static_cast<double>(requests.size()) * 1e9;
    for (const ExistsRequest& request : requests)
      require(request.bytes == 0, ErrorCode::bad_file, "a record is missing");
  }
  (void)files->unlink((folder / kCheckpointName).string());
  {
    const double start = wall_s();
    const auto store = DiskStore::open(*files, options);
    without_s = wall_s() - start;
    require(store->stats().records == bench.index_records, ErrorCode::bad_file, "records are missing");
  }
  bench_folder.empty();
  return {{"records", bench.index_records},
          {"open_s", with_s},
          {"open_without_checkpoint_s", without_s},
          {"lookup_ns", lookup_ns}};
}

/// The same for a store of chunks of 4 KiB, with keys of 36 bytes.
json measure_chunk_index(const StoreBenchOptions& bench, BenchFolder& bench_folder) {
  const std::filesystem::path folder = bench_folder.path() / "chunk index";
  constexpr std::int64_t kBatch = 4096;
  std::vector<std::byte> value(4096);
  std::mt19937_64 random(3);
  for (std::byte& b : value) b = static_cast<std::byte>(random() & 0xff);
  {
    const auto store = open_chunks(folder);
    for (std::int64_t i = 0; i < bench.index_records; i += kBatch) {
      stop_if_interrupted(bench);
      std::vector<std::int64_t> numbers;
      for (std::int64_t j = i; j < std::min(i + kBatch, bench.index_records); ++j) numbers.push_back(j);
      const ChunkKeys keys(numbers);
      std::vector<ChunkPut> chunks;
      for (const ChunkKey key : keys.keys()) chunks.push_back({.key = key, .value = value});
      finish(*store, store->put(chunks), "put");
    }
    require(store->close(kNever).front() == FlushStatus::durable, ErrorCode::bad_file, "the store could not be closed");
  }
  std::vector<std::int64_t> numbers(100'000);
  for (std::int64_t& number : numbers)
    number = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bench.index_records));
  const ChunkKeys keys(numbers);
  double with_s = 0, without_s = 0, batch_ns = 0, single_ns = 0;
  {
    const double start = wall_s();
    const auto store = open_chunks(folder);
    with_s = wall_s() - start;
    const auto count_there = [](const std::vector<ChunkPresence>& known) {
      return std::count(known.begin(), known.end(), ChunkPresence::there);
    };
    const double batched = wall_s();
    std::int64_t there = count_there(store->look_up(keys.keys()));
    batch_ns = (wall_s() - batched) / static_cast<double>(numbers.size()) * 1e9;
    const double one_by_one = wall_s();
    for (const ChunkKey& key : keys.keys()) there += count_there(store->look_up({&key, 1}));
    single_ns = (wall_s() - one_by_one) / static_cast<double>(numbers.size()) * 1e9;
    require(there == 2 * std::ssize(numbers), ErrorCode::bad_file, "a chunk is missing");
  }
  const auto files = make_posix_file_system();
  (void)files->unlink((folder / kCheckpointName).string());
  {
    const double start = wall_s();
    const auto store = open_chunks(folder);
    without_s = wall_s() - start;
    require(store->look_up(keys.keys().first(1)).front() == ChunkPresence::there, ErrorCode::bad_file,
            "chunks are missing");
  }
  bench_folder.empty();
  return {{"chunks", bench.index_records},
          {"open_s", with_s},
          {"open_without_checkpoint_s", without_s},
          {"lookup_ns", batch_ns},
          {"single_lookup_ns", single_ns}};
}

}  // namespace

json bench_store(const StoreBenchOptions& options, const std::function<void(const json&)>& on_size) {
  BenchFolder folder(options);
  json out = {
      {"depth", options.depth}, {"rounds", options.rounds}, {"encrypted", options.encrypt}, {"sizes", json::array()}};
  for (const std::int64_t record_bytes : options.record_bytes) {
    if (options.interrupted()) break;
    const json size = measure(options, folder, record_bytes);
    if (size["speeds"].empty()) continue;
    out["sizes"].push_back(size);
    on_size(size);
  }
  if (options.index_records > 0 && !options.interrupted()) {
    try {
      out["index"] = measure_index(options, folder);
      if (options.chunks) out["chunk_index"] = measure_chunk_index(options, folder);
    } catch (const Interrupted&) {  // an incomplete store gives no result
    }
  }
  out["interrupted"] = options.interrupted();
  return out;
}

}  // namespace kv4::bench
