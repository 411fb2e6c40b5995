// The only way in which a backend calls its GPU. A kernel that fails destroys the GPU's context and all memory in it. A
// call that fails checks whether that has happened; every later call is refused.
#pragma once

#include <exception>

#include "base/check.h"

namespace kv4::cuda {

/// A GPU and its streams. Only a Call reaches the streams, so that nothing can be queued without one. Guard: makes a
/// GPU current for its lifetime. Not thread-safe.
template <class Guard, class Stream>
class DeviceCalls {
 public:
  /// context_lost: whether the current GPU's context is lost.
  DeviceCalls(int device, Stream stream, bool (*context_lost)())
      : device_(device), stream_(stream), context_lost_(context_lost) {}

  int device() const { return device_; }
  bool lost() const { return lost_; }

  /// Makes the GPU current for its lifetime. Throws Error(device_failure) if the GPU was lost. If an exception ends the
  /// Call, it checks whether the GPU is lost now.
  class Call {
   public:
    explicit Call(DeviceCalls& calls) : calls_(calls.not_lost()), guard_(calls.device_) {}
    ~Call() {
      if (std::uncaught_exceptions() > exceptions_) calls_.lost_ = calls_.lost_ || calls_.context_lost_();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    Stream& stream() const { return calls_.stream_; }
    Stream& transfers() const { return calls_.transfers_; }

   private:
    DeviceCalls& calls_;
    Guard guard_;
    int exceptions_ = std::uncaught_exceptions();
  };

  /// For freeing resources that a lost GPU may have destroyed: never refused, checks nothing.
  class LastCall {
   public:
    explicit LastCall(DeviceCalls& calls) : calls_(calls), guard_(calls.device_) {}

    Stream stream() const { return calls_.stream_; }
    Stream transfers() const { return calls_.transfers_; }

   private:
    DeviceCalls& calls_;
    Guard guard_;
  };

 private:
  DeviceCalls& not_lost() {
    require(
        !lost_, ErrorCode::device_failure,
        "the context of GPU {} is lost, and all memory on it, since a kernel failed (an earlier error said so): end "
        "the process, or reset the device and make a new cache",
        device_);
    return *this;
  }

  const int device_;
  Stream stream_;
  Stream transfers_{};  // for copies between host and GPU memory
  bool (*const context_lost_)();
  bool lost_ = false;
};

}  // namespace kv4::cuda
