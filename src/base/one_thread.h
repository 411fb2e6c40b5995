// The thread that drives an object which one thread at a time may use.
#pragma once

#include <atomic>
#include <thread>

namespace kv4 {

class OneThread {
 public:
  /// One call, or one inside such a call, as Call; false: another thread is inside. For destructors, which throw
  /// nothing.
  class Try {
   public:
    explicit Try(OneThread& driver) noexcept {
      const std::thread::id self = std::this_thread::get_id();
      if (driver.thread_.load(std::memory_order_relaxed) == self) return;
      std::thread::id nobody;
      inside_ = driver.thread_.compare_exchange_strong(nobody, self, std::memory_order_acquire);
      if (inside_) driver_ = &driver;
    }
    ~Try() {
      if (driver_ != nullptr) driver_->thread_.store({}, std::memory_order_release);
    }
    Try(const Try&) = delete;
    Try& operator=(const Try&) = delete;

    explicit operator bool() const { return inside_; }

   private:
    OneThread* driver_ = nullptr;  // null: an outer call gives it back
    bool inside_ = true;
  };

  /// One call, or one inside such a call: callbacks and calls that are made of others stay in the thread's own. Throws
  /// Error(bad_state) while another thread is inside. Costs one atomic exchange where it is the outermost, a load else.
  class Call {
   public:
    explicit Call(OneThread& driver) : try_(driver) {
      if (!try_) [[unlikely]]
        refuse();
    }

   private:
    [[noreturn]] static void refuse();

    const Try try_;
  };

 private:
  std::atomic<std::thread::id> thread_{};  // no thread: nobody is inside
};

}  // namespace kv4
