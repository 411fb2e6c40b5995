// A warp.
#pragma once

namespace kv4::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

}  // namespace kv4::cuda
