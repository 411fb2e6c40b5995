// A named range around a call, for profilers (Nsight Systems). It needs only NVTX 3 headers of the CUDA toolkit.
// Without an attached tool a range costs one comparison; NVTX looks for a tool in the environment at the first range.
// Builds without the headers have no ranges.
#pragma once

#if __has_include(<nvtx3/nvToolsExt.h>)
#define KV4_HAS_NVTX 1
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#include <nvtx3/nvToolsExt.h>
#pragma GCC diagnostic pop
#else
#define KV4_HAS_NVTX 0
#endif

namespace kv4 {

/// In the domain "kv4". Names begin with "kv4 " and are string literals, so that they outlive the ranges. `on`: false
/// makes no range; calls of the CPU backend have none. The thread that begins a range ends it, the latest first.
class NvtxRange {
 public:
#if KV4_HAS_NVTX
  NvtxRange(const char* name, bool on) : on_(on) {
    if (!on_) return;
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    nvtxDomainRangePushEx(domain(), &attributes);
  }
  ~NvtxRange() {
    if (on_) nvtxDomainRangePop(domain());
  }

 private:
  static nvtxDomainHandle_t domain() {
    static const nvtxDomainHandle_t kv4 = nvtxDomainCreateA("kv4");
    return kv4;
  }
  bool on_;
#else
  NvtxRange(const char*, bool) {}
  ~NvtxRange() {}  // not defaulted, so that a range is not an unused variable
#endif

 public:
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace kv4
