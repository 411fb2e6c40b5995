// Facts of the current device that the selection of index and top-k kernels, and their grid sizes, depend on.
#pragma once

#include "backend/cuda/runtime/launch.cuh"

namespace kv4::cuda {

struct DeviceFacts {
  bool is_sm90;
  int num_sms;
};

inline DeviceFacts device_facts() { return {is_sm90(), num_sms()}; }

}  // namespace kv4::cuda
