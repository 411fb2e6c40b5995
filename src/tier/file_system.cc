// Whole transfers over any file, many at once or one after the other.
#include "tier/file_system.h"

#include <cstring>
#include <deque>
#include <utility>

namespace kv4::tier {
namespace {

/// Removes `bytes` from the front.
void advance(std::vector<IoPiece>& pieces, std::int64_t bytes) {
  std::size_t left = bytes;
  auto first = pieces.begin();
  while (first != pieces.end() && left >= first->bytes) left -= first++->bytes;
  pieces.erase(pieces.begin(), first);
  if (left == 0) return;
  pieces.front().data += left;
  pieces.front().bytes -= left;
}

/// Whether a transfer that wait() returned has more to do.
bool goes_on(IoOp& op) {
  if (op.kind == IoOp::Kind::sync) return false;
  if (!op.moved.status.ok()) return op.kind == IoOp::Kind::read && !std::exchange(op.tried, true);
  op.offset += op.moved.bytes;
  advance(op.pieces, op.moved.bytes);
  if (op.pieces.empty()) return false;
  if (op.moved.bytes == 0) op.moved.status = {IoCode::failed, 0};
  return op.moved.status.ok();
}

class PlainQueue : public IoQueue {
 public:
  explicit PlainQueue(int depth) : depth_(depth) {}
  int depth() const override { return depth_; }
  void submit(IoOp& op) override {
    move_plainly(op);
    done_.push_back(&op);
  }
  IoOp& wait() override {
    IoOp& op = *done_.front();
    done_.pop_front();
    return op;
  }

 private:
  int depth_;
  std::deque<IoOp*> done_;
};

}  // namespace

std::string to_string(const IoStatus& status) {
  if (status.code == IoCode::not_a_file) return "it is no regular file";
  return status.error != 0 ? std::strerror(status.error) : status.ok() ? "ok" : "input/output error";
}

void move_plainly(IoOp& op) {
  switch (op.kind) {
    case IoOp::Kind::read: op.moved = op.file->readv(op.offset, op.pieces); break;
    case IoOp::Kind::write: op.moved = op.file->writev(op.offset, op.pieces); break;
    case IoOp::Kind::sync: op.moved = {op.file->fdatasync(), 0}; break;
  }
}

std::unique_ptr<IoQueue> make_plain_queue(int depth) { return std::make_unique<PlainQueue>(depth); }

void run_transfers(IoQueue& queue, const std::function<IoOp*()>& next, const std::function<void(IoOp&)>& done) {
  int in_flight = 0;
  const auto submit = [&](IoOp& op) {
    queue.submit(op);
    ++in_flight;
  };
  const auto fill = [&] {
    while (in_flight < queue.depth()) {
      IoOp* op = next();
      if (op == nullptr) return;
      submit(*op);
    }
  };
  try {
    for (;;) {
      fill();
      if (in_flight == 0) return;
      IoOp& op = queue.wait();
      --in_flight;
      if (goes_on(op)) {
        submit(op);
        continue;
      }
      fill();
      done(op);
    }
  } catch (...) {  // the memory of the transfers is about to go
    for (; in_flight > 0; --in_flight) queue.wait();
    throw;
  }
}

IoStatus read_all(File& file, std::int64_t offset, std::span<std::byte> to) {
  IoOp op{&file, IoOp::Kind::read, offset, {{to.data(), to.size()}}, {}, false};
  do move_plainly(op);
  while (goes_on(op));
  return op.moved.status;
}

IoStatus write_all(File& file, std::int64_t offset, std::span<const std::byte> from) {
  IoOp op{&file, IoOp::Kind::write, offset, {{const_cast<std::byte*>(from.data()), from.size()}}, {}, false};
  do move_plainly(op);
  while (goes_on(op));
  return op.moved.status;
}

}  // namespace kv4::tier
