// The shapes of index scoring on Hopper's tensor cores: channels, heads, KV tiles, and the CTAs that take them.
#pragma once

#include "ops/score_row.h"

namespace kv4::cuda {

// Queries have 128 channels and at most 64 heads; a key has 4 bytes of scales.
constexpr int kWidth = 128, kHeads = ops::kMaxIndexHeads, kQuad = 4, kKeyScaleBytes = 4;
constexpr int kWarpKeys = 32, kBlockKV = 4 * kWarpKeys;  // keys of a KV tile: of each warp, of the warpgroup
constexpr int kKeysPerQuad = 4;                          // keys of a KV tile that a quad of lanes scores

/// A CTA of kCount warpgroups. Each warpgroup takes KV tiles of its own, which lie kStep keys apart. An SM has room for
/// one CTA of four warpgroups or for two CTAs of two. Short rows are scored by CTAs of two warpgroups, one per SM: the
/// CTA of the next launch runs its prologue beside it.
template <int kCount>
struct Warpgroups {
  static constexpr int kWarpgroups = kCount, kWarps = 4 * kCount, kThreads = 128 * kCount, kStep = kCount * kBlockKV;
};
using FourWarpgroups = Warpgroups<4>;
using TwoWarpgroups = Warpgroups<2>;
constexpr int kScoreThreads = FourWarpgroups::kThreads, kScoreWarps = FourWarpgroups::kWarps;

}  // namespace kv4::cuda
