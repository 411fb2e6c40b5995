// Who drives an object that one thread at a time may use.
#pragma once

#include <atomic>
#include <thread>

namespace kv4 {

class OneThread {
 public:
  /// One call, or one inside such a call: callbacks and calls that are made of others stay in the thread's own. Throws
  /// Error(bad_state) while another thread is inside. Costs one atomic exchange where it is the outermost, a load else.
  class Call {
   public:
    explicit Call(OneThread& driver)
        : driver_(driver.thread_.load(std::memory_order_relaxed) == self() ? nullptr : &driver) {
      std::thread::id nobody;
      if (driver_ != nullptr && !driver.thread_.compare_exchange_strong(nobody, self(), std::memory_order_acquire))
        [[unlikely]]
        refuse();
    }
    ~Call() {
      if (driver_ != nullptr) driver_->thread_.store({}, std::memory_order_release);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    static std::thread::id self() { return std::this_thread::get_id(); }
    [[noreturn]] static void refuse();

    OneThread* driver_;  // null: an outer call gives it back
  };

 private:
  std::atomic<std::thread::id> thread_{};  // no thread: nobody is inside
};

}  // namespace kv4
