// A group is the lanes that work on one row together: one lane on the CPU, a warp or a CTA on a GPU. Row code is written
// once, over a group: lanes stride over channels, `sync` separates phases that read what other lanes wrote, `max`
// combines a value over the lanes.
#pragma once

#include "kv4/host_device.h"

namespace kv4 {

struct OneLane {
  KV4_HD int lane() const { return 0; }
  KV4_HD int size() const { return 1; }
  KV4_HD void sync() const {}
  KV4_HD float max(float x) const { return x; }
};

}  // namespace kv4
