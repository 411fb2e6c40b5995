// A disk that caches unsynced data and has the faults of real disks. One seed decides all chance: the same seed and the
// same calls give the same disk.
//
//   crash()        keeps a random subset of the sectors written since the last sync, at 512 bytes or 4 KiB: writes are
//                  torn and reordered. Unsynced names come or go. Handles and locks die.
//   a queue        transfers are done in any order, some of them in part
//   a failed sync  some sectors reach the disk, the rest is forgotten: the next sync reports success all the same
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "tier/file_system.h"

namespace kv4::test {

class SimulatedDisk : public tier::FileSystem {
 public:
  explicit SimulatedDisk(std::uint64_t seed) : random_(seed) {}

  // Faults.
  void crash();
  /// The call `calls` from now fails (0: the next one); a failing write may store some bytes.
  void fail_call_in(std::int64_t calls) { fail_at_ = calls_ + calls; }
  /// The call `calls` from now and all later ones fail: a crash in the middle of the current operation.
  void die_in(std::int64_t calls) { die_at_ = calls_ + calls; }
  void fail_all(bool on) {
    fail_all_ = on;
    die_at_ = -1;
  }
  void set_capacity(std::int64_t bytes) { capacity_ = bytes; }  // of all files together
  void set_short_transfers(bool on) { short_transfers_ = on; }
  /// Some reads return a flipped bit that the disk does not have: never two reads in a row.
  void set_flips_on_the_way(bool on) { flips_on_the_way_ = on; }
  /// Flips bits on the disk.
  void damage(int bits);
  void damage(const std::string& path, std::int64_t offset, std::byte mask);
  std::int64_t calls() const { return calls_; }
  bool has(const std::string& path) const { return names_.count(path) != 0; }
  std::vector<std::byte> contents(const std::string& path) const { return names_.at(path)->seen; }
  void replace(const std::string& path, std::vector<std::byte> bytes);
  /// Opening that file fails with this errno from now on; 0: it works.
  void refuse_open(const std::string& path, int error) { refused_[path].open = error; }
  /// Reads of the file fail, and every operation on it fails as on a closed file.
  void refuse_read(const std::string& path, int error) { refused_[path].read = error; }
  void refuse_open_again(const std::string& path, int error) { refused_[path].open_again = error; }
  /// `on` false: fallocate() makes a file longer without taking room; only writes take room.
  void set_reserves(bool on) { reserves_ = on; }
  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }

  // FileSystem
  tier::IoStatus make_directory(const std::string& path) override;
  using tier::FileSystem::list;
  tier::Listing list(const std::string& directory, const tier::NameFilter& wanted) override;
  tier::IoStatus look_at(const std::string& path) override;
  tier::IoStatus sync_directory(const std::string& directory) override;
  tier::Opened<tier::File> open(const std::string& path, tier::OpenMode mode) override;
  std::unique_ptr<tier::IoQueue> make_queue(int depth, tier::FileLock* lock) override;
  tier::IoStatus rename(const std::string& from, const std::string& to) override;
  tier::IoStatus unlink(const std::string& path) override;
  tier::Opened<tier::FileLock> lock(const std::string& path) override;
  std::int64_t now_ns() override { return ++clock_ns_; }
  std::uint64_t random64() override { return random_(); }

 private:
  friend class SimulatedFile;
  friend class SimulatedLock;
  friend class SimulatedQueue;

  struct Write {
    std::int64_t offset;
    std::vector<std::byte> bytes;
  };
  struct Inode {
    std::int64_t used_bytes = 0;     // disk room that it uses
    std::vector<std::byte> seen;     // bytes that reads return
    std::vector<std::byte> on_disk;  // bytes after a crash
    std::vector<Write> unsynced;
  };
  using Names = std::map<std::string, std::shared_ptr<Inode>>;
  struct NameChange {
    std::string removed, added;  // empty: none
    std::shared_ptr<Inode> inode;
  };

  bool next_call_fails();
  void write(Inode& inode, std::int64_t offset, std::vector<std::byte> bytes);
  /// Keeps each unsynced sector with this probability, in percent.
  void keep_some(Inode& inode, std::uint64_t percent);
  void change(NameChange change);
  static void apply(const NameChange& change, Names& names);
  std::int64_t used_bytes() const;

  std::recursive_mutex mutex_;  // guards files, queues and names: a store reads and writes in two threads
  std::mt19937_64 random_;
  Names names_, names_on_disk_;
  std::vector<NameChange> unsynced_names_;
  std::shared_ptr<int> power_ = std::make_shared<int>(0);  // handles from before a crash hold another one
  std::weak_ptr<int> locked_;
  struct Refusals {
    int open = 0, read = 0, open_again = 0;
  };
  std::map<std::string, Refusals> refused_;
  std::int64_t calls_ = 0, fail_at_ = -1, die_at_ = -1, capacity_ = std::int64_t{1} << 40, clock_ns_ = 0;
  std::int64_t reads_until_flip_ = 5;
  bool fail_all_ = false, short_transfers_ = false, flips_on_the_way_ = false, reserves_ = true;
};

}  // namespace kv4::test
