// Transfers in flight together, through io_uring.
//
// Neither buffers nor segments are registered. A record is a vector of pieces, some in the caller's memory; on most
// kernels fixed buffers do not take vectors. Pinning buffers ahead would count against RLIMIT_MEMLOCK, often 8 MiB.
#include <liburing.h>

#include <deque>
#include <vector>

#include "tier/posix_file.h"

namespace kv4::tier {
namespace {

class IoUringQueue : public IoQueue {
 public:
  IoUringQueue(int depth, FileLock* lock) : depth_(depth) {
    if (io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0) != 0) return;
    there_ = true;
    // The transfers of a killed process outlive it. The ring lives until the last of them has ended, and keeps the
    // files registered with it open. These are the lock's, so nobody gets the lock before.
    std::vector<int> shared;
    if (lock != nullptr)
      for (const Descriptor& fd : static_cast<const PosixLock&>(*lock).fds())
        if (fd.valid()) shared.push_back(fd.get());
    usable_ =
        shared.empty() || io_uring_register_files(&ring_, shared.data(), static_cast<unsigned>(shared.size())) == 0;
  }
  ~IoUringQueue() override {
    if (!there_) return;
    if (owner_ == ::getpid())
      io_uring_queue_exit(&ring_);
    else  // a forked child has the ring's descriptor, but not its memory
      ::close(ring_.ring_fd);
  }
  IoUringQueue(const IoUringQueue&) = delete;
  IoUringQueue& operator=(const IoUringQueue&) = delete;

  bool usable() const { return usable_; }
  int depth() const override { return depth_; }

  void submit(IoOp& op) override {
    PosixFile& file = static_cast<PosixFile&>(*op.file);
    OpenFiles::Shared descriptor = file.use().second;
    if (!descriptor) return move_now(op);
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) return move_now(op);
    const int fd = descriptor->get();
    op.held = std::move(descriptor);
    if (op.kind == IoOp::Kind::write) file.count_write();
    if (op.kind == IoOp::Kind::sync) file.begin_sync();
    const auto count = static_cast<unsigned>(op.pieces.size());
    const auto offset = static_cast<std::uint64_t>(op.offset);
    switch (op.kind) {
      case IoOp::Kind::read: io_uring_prep_readv(entry, fd, as_iovec(op.pieces), count, offset); break;
      case IoOp::Kind::write: io_uring_prep_writev(entry, fd, as_iovec(op.pieces), count, offset); break;
      case IoOp::Kind::sync: io_uring_prep_fsync(entry, fd, IORING_FSYNC_DATASYNC); break;
    }
    io_uring_sqe_set_data(entry, &op);
    int submitted = io_uring_submit(&ring_);
    while (submitted == -EINTR) submitted = io_uring_submit(&ring_);
    if (submitted >= 0) return;
    // The kernel has not taken the entry; as a no-op it does nothing when the kernel takes it later.
    io_uring_prep_nop(entry);
    io_uring_sqe_set_data(entry, nullptr);
    move_now(op);
  }

  IoOp& wait() override {
    if (!done_.empty()) {
      IoOp& op = *done_.front();
      done_.pop_front();
      return op;
    }
    for (;;) {
      io_uring_cqe* completion = nullptr;
      if (io_uring_wait_cqe(&ring_, &completion) != 0) continue;  // interrupted
      auto* op = static_cast<IoOp*>(io_uring_cqe_get_data(completion));
      const int result = completion->res;
      io_uring_cqe_seen(&ring_, completion);
      if (op == nullptr) continue;
      PosixFile& file = static_cast<PosixFile&>(*op->file);
      if (op->kind == IoOp::Kind::write) file.count_write();
      if (op->kind == IoOp::Kind::sync) file.end_sync();
      op->held.reset();
      // Refused, not failed: the plain calls handle it. A sync is never repeated.
      const bool refused = result == -EINVAL || result == -EAGAIN || result == -EINTR || result == -EOPNOTSUPP;
      if (refused && op->kind != IoOp::Kind::sync)
        move_plainly(*op);
      else
        op->moved = {status_of(result < 0 ? -result : 0), result < 0 ? 0 : result};
      return *op;
    }
  }

 private:
  void move_now(IoOp& op) {
    op.held.reset();
    move_plainly(op);
    done_.push_back(&op);
  }

  int depth_;
  const pid_t owner_ = ::getpid();
  io_uring ring_{};
  bool there_ = false, usable_ = false;
  std::deque<IoOp*> done_;  // without the ring
};

}  // namespace

std::unique_ptr<IoQueue> make_io_uring_queue(int depth, FileLock* lock) {
  auto queue = std::make_unique<IoUringQueue>(depth, lock);
  if (!queue->usable()) return nullptr;
  return queue;
}

}  // namespace kv4::tier
