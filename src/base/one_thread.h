// Lets one thread at a time use an object.
#pragma once

#include <atomic>
#include <thread>

namespace kv4 {

class OneThread {
 public:
  /// As Call, but false while another thread is inside. For destructors, which throw nothing.
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
    OneThread* driver_ = nullptr;  // null: an outer call releases it
    bool inside_ = true;
  };

  /// One call, or a call nested in one (callbacks, calls made of others). Throws Error(bad_state) while another thread
  /// is inside. Costs one atomic exchange for an outermost call, a load for a nested one.
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
  std::atomic<std::thread::id> thread_{};  // empty: no thread is inside
};

}  // namespace kv4
