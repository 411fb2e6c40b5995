// Evicts the block with the least hit density: expected hits per time of stay.
//
// The policy counts the ages at which blocks are used again, evicted ones (the ghosts) included. It counts per class:
// by hits so far (none, one, more) and by place in the chain, from end to beginning. The end of a conversation's last
// turn comes back soon or never; a system prompt comes back again and again. For a class and an age, the density is the
// best ratio of expected hits to expected time over all plans "keep it until age t" (the Gittins index). Time is
// counted in uses of blocks.
#pragma once

#include <array>
#include <random>
#include <vector>

#include "prefix/eviction.h"
#include "prefix/ghost_list.h"

namespace kv4 {

class HitDensity final : public EvictionPolicy {
 public:
  static constexpr int kGhostsPerBlock = 4;
  static constexpr std::size_t kSamples = 32;  // candidates compared for a victim

  HitDensity(std::span<EvictionNode> nodes, std::int64_t capacity);

  void insert(NodeId id, std::uint64_t fingerprint) override;
  void touch(NodeId id) override;
  void hold(NodeId id) override;
  void release(NodeId id) override;
  NodeId victim() override;
  void evict(NodeId id, std::uint64_t fingerprint) override;
  bool leaves_only() const override { return true; }
  void expose(NodeId id) override;

 private:
  // Ages are in octaves of four steps, from 16 uses on.
  static constexpr int kShortest = 4, kStepsPerOctave = 4, kAges = (32 - kShortest) * kStepsPerOctave + 1;
  static constexpr int kHitClasses = 3, kEndClasses = 4, kClasses = kHitClasses * kEndClasses;
  static constexpr double kForget = 0.98;  // decay of the counts at every look at them

  struct Class {
    double uses = 0;
    std::array<double, kAges> reused{};  // blocks used again, by their age then
    std::array<double, kAges> density{};
  };
  struct Ghost {
    std::uint32_t used = 0;
    std::uint8_t hits = 0;
    std::uint8_t in_class = 0;
  };

  EvictionNode& node(NodeId id) { return nodes_[id]; }
  static std::size_t class_of(std::uint8_t hits, std::uint8_t behind);
  static std::size_t age_step(std::uint32_t age);
  static double age_begin(std::size_t step);
  void count_reuse(std::uint32_t used, std::size_t in_class);
  void use(NodeId id);
  double density(NodeId id);
  void look_at_counts();

  // A node's `queue` is its class. Its `prev` is its place in candidates_; kNoNode: not a candidate.
  std::span<EvictionNode> nodes_;
  std::vector<NodeId> candidates_;
  GhostList<Ghost> ghosts_;
  std::array<Class, kClasses> classes_;
  std::uint32_t now_ = 0;  // uses; an age is a difference, so it may wrap
  std::int64_t uses_per_look_, uses_since_look_ = 0;
  std::mt19937 random_{1};
};

}  // namespace kv4
