#include "support/simulated_disk.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace kv4::test {

using tier::IoBytes;
using tier::IoCode;
using tier::IoStatus;

namespace {

constexpr IoStatus kFailed{IoCode::failed, EIO};

void store(std::vector<std::byte>& file, std::int64_t offset, const std::byte* from, std::int64_t count) {
  const auto end = static_cast<std::size_t>(offset + count);
  if (file.size() < end) file.resize(end);
  std::copy(from, from + count, file.begin() + offset);
}

}  // namespace

class SimulatedFile : public tier::File {
 public:
  SimulatedFile(SimulatedDisk& disk, std::string path, std::shared_ptr<SimulatedDisk::Inode> inode)
      : disk_(disk), path_(std::move(path)), inode_(std::move(inode)), power_(disk.power_) {}

  IoBytes readv(std::int64_t offset, std::span<const tier::IoPiece> to) override {
    const std::lock_guard lock(disk_.mutex_);
    if (!refused().ok()) return {refused(), 0};
    if (const int error = disk_.refused_[path_].read; error != 0) return {{IoCode::failed, error}, 0};
    std::vector<std::byte> bytes(total(to));
    const IoBytes read = pread(offset, bytes);
    auto at = bytes.begin();
    for (const tier::IoPiece& piece : to) {
      std::copy(at, at + static_cast<std::ptrdiff_t>(piece.bytes), piece.data);
      at += static_cast<std::ptrdiff_t>(piece.bytes);
    }
    return read;
  }

  IoBytes writev(std::int64_t offset, std::span<const tier::IoPiece> from) override {
    const std::lock_guard lock(disk_.mutex_);
    if (!refused().ok()) return {refused(), 0};
    std::vector<std::byte> bytes;
    bytes.reserve(total(from));
    for (const tier::IoPiece& piece : from) bytes.insert(bytes.end(), piece.data, piece.data + piece.bytes);
    return pwrite(offset, bytes);
  }

  IoStatus fdatasync() override {
    const std::lock_guard lock(disk_.mutex_);
    if (!refused().ok()) return refused();
    if (fails()) {
      if (!alive()) return kFailed;
      disk_.keep_some(*inode_, disk_.below(101));
      inode_->unsynced.clear();
      if (disk_.below(2) == 0) inode_->seen = inode_->on_disk;  // the clean pages were dropped
      return kFailed;
    }
    disk_.keep_some(*inode_, 100);
    inode_->on_disk.resize(inode_->seen.size());
    inode_->unsynced.clear();
    return {};
  }

  IoStatus fallocate(std::int64_t bytes) override {
    const std::lock_guard lock(disk_.mutex_);
    if (fails()) return kFailed;
    if (disk_.reserves_) {
      if (disk_.used_bytes() + bytes - inode_->used_bytes > disk_.capacity_) return {IoCode::no_space, ENOSPC};
      inode_->used_bytes = std::max(inode_->used_bytes, bytes);
    }
    if (size() < bytes) inode_->seen.resize(static_cast<std::size_t>(bytes));
    return {};
  }

  IoStatus punch(std::int64_t offset, std::int64_t bytes) override {
    const std::lock_guard lock(disk_.mutex_);
    if (fails()) return kFailed;
    disk_.write(*inode_, offset, std::vector<std::byte>(static_cast<std::size_t>(bytes)));
    return {};
  }

  std::int64_t size() override {
    const std::lock_guard lock(disk_.mutex_);
    return static_cast<std::int64_t>(inode_->seen.size());
  }

  bool cached() override { return true; }

  IoStatus rename_new(const std::string& path) override {
    const std::lock_guard lock(disk_.mutex_);
    if (disk_.has(path)) return {IoCode::exists, EEXIST};
    const IoStatus status = disk_.rename(path_, path);
    if (status.ok()) path_ = path;
    return status;
  }

 private:
  static std::size_t total(std::span<const tier::IoPiece> pieces) {
    std::size_t bytes = 0;
    for (const tier::IoPiece& piece : pieces) bytes += piece.bytes;
    return bytes;
  }

  IoBytes pread(std::int64_t offset, std::span<std::byte> to) {
    if (fails()) return {kFailed, 0};
    const std::int64_t size = static_cast<std::int64_t>(inode_->seen.size());
    auto count = std::clamp<std::int64_t>(size - offset, 0, static_cast<std::int64_t>(to.size()));
    if (disk_.short_transfers_ && count > 512 && disk_.below(4) == 0)
      count = 512 * (1 + static_cast<std::int64_t>(disk_.below(static_cast<std::uint64_t>(count) / 512)));
    std::copy(inode_->seen.begin() + std::min(offset, size), inode_->seen.begin() + std::min(offset, size) + count,
              to.begin());
    if (disk_.flips_on_the_way_ && count > 0 && --disk_.reads_until_flip_ == 0) {
      to[disk_.below(static_cast<std::uint64_t>(count))] ^= std::byte{1} << disk_.below(8);
      disk_.reads_until_flip_ = 12 + static_cast<std::int64_t>(disk_.below(40));
    }
    return {{}, count};
  }

  IoBytes pwrite(std::int64_t offset, std::span<const std::byte> from) {
    const bool failed = fails();
    auto count = static_cast<std::int64_t>(from.size());
    if (!alive()) return {kFailed, 0};
    if (failed) count = static_cast<std::int64_t>(disk_.below(from.size() / 512 + 1)) * 512;
    if (!failed && disk_.short_transfers_ && count > 512 && disk_.below(4) == 0)
      count = 512 * (1 + static_cast<std::int64_t>(disk_.below(from.size() / 512)));
    const std::int64_t growth = std::max<std::int64_t>(0, offset + count - inode_->used_bytes);
    if (!failed && growth > 0 && disk_.used_bytes() + growth > disk_.capacity_) return {{IoCode::no_space, ENOSPC}, 0};
    inode_->used_bytes += growth;
    disk_.write(*inode_, offset, std::vector<std::byte>(from.begin(), from.begin() + count));
    return {failed ? kFailed : IoStatus{}, failed ? 0 : count};
  }

  IoStatus refused() {
    const int error = disk_.refused_[path_].open_again;
    return error != 0 ? IoStatus{IoCode::unopened, error} : IoStatus{};
  }
  bool alive() const { return power_ == disk_.power_; }
  bool fails() { return disk_.next_call_fails() || !alive(); }

  SimulatedDisk& disk_;
  std::string path_;
  std::shared_ptr<SimulatedDisk::Inode> inode_;
  std::shared_ptr<int> power_;
};

/// Completes transfers in any order; each takes effect at its completion.
class SimulatedQueue : public tier::IoQueue {
 public:
  SimulatedQueue(SimulatedDisk& disk, int depth) : disk_(disk), depth_(depth) {}
  int depth() const override { return depth_; }
  void submit(tier::IoOp& op) override { in_flight_.push_back(&op); }
  tier::IoOp& wait() override {
    const std::lock_guard lock(disk_.mutex_);
    std::swap(in_flight_[disk_.below(in_flight_.size())], in_flight_.back());
    tier::IoOp& op = *in_flight_.back();
    in_flight_.pop_back();
    tier::move_plainly(op);
    return op;
  }

 private:
  SimulatedDisk& disk_;
  int depth_;
  std::vector<tier::IoOp*> in_flight_;
};

class SimulatedLock : public tier::FileLock {
 public:
  explicit SimulatedLock(std::shared_ptr<int> held) : held_(std::move(held)) {}

 private:
  std::shared_ptr<int> held_;
};

bool SimulatedDisk::next_call_fails() {
  if (calls_ == die_at_) fail_all_ = true;
  return calls_++ == fail_at_ || fail_all_;
}

void SimulatedDisk::write(Inode& inode, std::int64_t offset, std::vector<std::byte> bytes) {
  store(inode.seen, offset, bytes.data(), static_cast<std::int64_t>(bytes.size()));
  inode.unsynced.push_back({offset, std::move(bytes)});
}

void SimulatedDisk::keep_some(Inode& inode, std::uint64_t percent) {
  const std::int64_t sector = below(2) == 0 ? 512 : 4096;
  for (const Write& write : inode.unsynced) {
    const auto count = static_cast<std::int64_t>(write.bytes.size());
    if (percent == 100) {
      store(inode.on_disk, write.offset, write.bytes.data(), count);
      continue;
    }
    for (std::int64_t at = 0; at < count;) {  // sectors of the disk, whatever the write's offset
      const std::int64_t end = std::min(count, ((write.offset + at) / sector + 1) * sector - write.offset);
      if (below(100) < percent) store(inode.on_disk, write.offset + at, write.bytes.data() + at, end - at);
      at = end;
    }
  }
}

void SimulatedDisk::crash() {
  static constexpr std::uint64_t kKept[] = {0, 50, 90, 100, 100};
  std::vector<std::shared_ptr<Inode>> inodes;
  for (const Names* names : {&names_, &names_on_disk_})
    for (const auto& [path, inode] : *names)
      if (std::find(inodes.begin(), inodes.end(), inode) == inodes.end()) inodes.push_back(inode);
  for (const auto& inode : inodes) {
    keep_some(*inode, kKept[below(5)]);
    if (below(2) == 0 && inode->on_disk.size() < inode->seen.size()) inode->on_disk.resize(inode->seen.size());
    inode->seen = inode->on_disk;
    inode->unsynced.clear();
    inode->used_bytes = static_cast<std::int64_t>(inode->seen.size());
  }
  const std::uint64_t kept = kKept[below(5)];
  for (const NameChange& change : unsynced_names_)
    if (below(100) < kept) apply(change, names_on_disk_);
  unsynced_names_.clear();
  names_ = names_on_disk_;
  power_ = std::make_shared<int>(0);
  locked_.reset();
  fail_at_ = die_at_ = -1;
  fail_all_ = false;
}

void SimulatedDisk::damage(int bits) {
  for (int i = 0; i < bits && !names_.empty(); ++i) {
    auto file = names_.begin();
    std::advance(file, static_cast<std::ptrdiff_t>(below(names_.size())));
    const std::size_t size = file->second->on_disk.size();
    if (size != 0) damage(file->first, static_cast<std::int64_t>(below(size)), std::byte{1} << below(8));
  }
}

void SimulatedDisk::damage(const std::string& path, std::int64_t offset, std::byte mask) {
  Inode& inode = *names_.at(path);
  inode.seen.at(static_cast<std::size_t>(offset)) ^= mask;
  if (static_cast<std::size_t>(offset) < inode.on_disk.size()) inode.on_disk[static_cast<std::size_t>(offset)] ^= mask;
}

void SimulatedDisk::replace(const std::string& path, std::vector<std::byte> bytes) {
  auto inode = std::make_shared<Inode>();
  inode->seen = inode->on_disk = std::move(bytes);
  inode->used_bytes = static_cast<std::int64_t>(inode->seen.size());
  names_[path] = names_on_disk_[path] = inode;
}

void SimulatedDisk::apply(const NameChange& change, Names& names) {
  if (!change.removed.empty()) names.erase(change.removed);
  if (!change.added.empty()) names[change.added] = change.inode;
}

void SimulatedDisk::change(NameChange change) {
  apply(change, names_);
  unsynced_names_.push_back(std::move(change));
}

std::int64_t SimulatedDisk::used_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [path, inode] : names_) bytes += inode->used_bytes;
  return bytes;
}

IoStatus SimulatedDisk::make_directory(const std::string&) { return next_call_fails() ? kFailed : IoStatus{}; }

IoStatus SimulatedDisk::look_at(const std::string& path) {
  const std::lock_guard guard(mutex_);
  return has(path) ? IoStatus{} : IoStatus{IoCode::not_found, ENOENT};
}

tier::Listing SimulatedDisk::list(const std::string& directory, const tier::NameFilter& wanted) {
  const std::lock_guard guard(mutex_);
  if (next_call_fails()) return {kFailed, {}};
  tier::Listing listing;
  for (const auto& [path, inode] : names_) {
    if (!path.starts_with(directory + "/")) continue;
    const std::string name = path.substr(directory.size() + 1);
    if (!wanted || wanted(name)) listing.names.push_back(name);
  }
  return listing;
}

IoStatus SimulatedDisk::sync_directory(const std::string&) {
  const std::lock_guard guard(mutex_);
  if (next_call_fails()) return kFailed;
  names_on_disk_ = names_;
  unsynced_names_.clear();
  return {};
}

tier::Opened<tier::File> SimulatedDisk::open(const std::string& path, tier::OpenMode mode) {
  const std::lock_guard guard(mutex_);
  if (next_call_fails()) return {kFailed, nullptr};
  if (const int error = refused_[path].open; error != 0) return {{IoCode::failed, error}, nullptr};
  const auto found = names_.find(path);
  if ((mode == tier::OpenMode::create) == (found != names_.end()))
    return {{found == names_.end() ? IoCode::not_found : IoCode::exists, found == names_.end() ? ENOENT : EEXIST},
            nullptr};
  if (mode == tier::OpenMode::create) change({"", path, std::make_shared<Inode>()});
  return {{}, std::make_unique<SimulatedFile>(*this, path, names_.at(path))};
}

std::unique_ptr<tier::IoQueue> SimulatedDisk::make_queue(int depth, tier::FileLock*) {
  return std::make_unique<SimulatedQueue>(*this, depth);
}

IoStatus SimulatedDisk::rename(const std::string& from, const std::string& to) {
  const std::lock_guard guard(mutex_);
  if (next_call_fails()) return kFailed;
  if (!has(from)) return {IoCode::not_found, ENOENT};
  change({from, to, names_.at(from)});
  return {};
}

IoStatus SimulatedDisk::unlink(const std::string& path) {
  const std::lock_guard guard(mutex_);
  if (next_call_fails()) return kFailed;
  if (!has(path)) return {IoCode::not_found, ENOENT};
  change({path, "", nullptr});
  return {};
}

tier::Opened<tier::FileLock> SimulatedDisk::lock(const std::string&) {
  const std::lock_guard guard(mutex_);
  if (next_call_fails()) return {kFailed, nullptr};
  if (!locked_.expired()) return {{IoCode::in_use, EWOULDBLOCK}, nullptr};
  auto held = std::make_shared<int>(0);
  locked_ = held;
  return {{}, std::make_unique<SimulatedLock>(std::move(held))};
}

}  // namespace kv4::test
