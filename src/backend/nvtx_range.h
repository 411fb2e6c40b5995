// A named range around a call, for profilers (Nsight Systems): NVTX 3, headers of the CUDA toolkit only. Where no tool
// is attached a range costs a comparison; NVTX itself looks for a tool, in the environment, at the first one. Builds
// without the headers have no ranges.
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

/// In the domain "kv4". Names begin with "kv4 " and outlive the process's ranges: literals. `on`: whether there is one
/// at all; calls of the CPU backend have none. The thread that makes it ends it, the latest first.
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
  ~NvtxRange() {}  // written out: a range is no unused variable
#endif

 public:
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace kv4
