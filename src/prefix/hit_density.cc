#include "prefix/hit_density.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kv4 {

HitDensity::HitDensity(std::span<EvictionNode> nodes, std::int64_t capacity)
    : nodes_(nodes), ghosts_(capacity * kGhostsPerBlock), uses_per_look_(std::max<std::int64_t>(1024, capacity / 8)) {
  candidates_.reserve(nodes.size());
}

std::size_t HitDensity::class_of(std::uint8_t hits, std::uint8_t behind) {
  const int end = behind == 0 ? 0 : behind < 4 ? 1 : behind < 32 ? 2 : 3;
  return std::min<int>(hits, kHitClasses - 1) * kEndClasses + end;
}

std::size_t HitDensity::age_step(std::uint32_t age) {
  if (age < 1u << kShortest) return 0;
  const int octave = static_cast<int>(std::bit_width(age)) - 1;
  const std::uint32_t quarter = age >> (octave - 2) & 3;
  return (octave - kShortest) * kStepsPerOctave + quarter + 1;
}

double HitDensity::age_begin(std::size_t step) {
  if (step == 0) return 0;
  const int octave = static_cast<int>(step - 1) / kStepsPerOctave + kShortest;
  return std::ldexp(static_cast<double>(4 + (step - 1) % kStepsPerOctave), octave - 2);
}

void HitDensity::count_reuse(std::uint32_t used, std::size_t in_class) {
  classes_[in_class].reused[age_step(now_ - used)] += 1;
}

// This use sets the block's class until the next one.
void HitDensity::use(NodeId id) {
  EvictionNode& n = node(id);
  n.used = ++now_;
  n.queue = static_cast<std::uint8_t>(class_of(n.frequency, n.behind));
  classes_[n.queue].uses += 1;
  if (++uses_since_look_ >= uses_per_look_) look_at_counts();
}

void HitDensity::insert(NodeId id, std::uint64_t fingerprint) {
  EvictionNode& n = node(id);
  n.prev = kNoNode;
  n.frequency = 0;
  if (const std::optional<Ghost> ghost = ghosts_.recall(fingerprint)) {
    count_reuse(ghost->used, ghost->in_class);
    n.frequency = static_cast<std::uint8_t>(std::min(ghost->hits + 1, kHitClasses - 1));
  }
  use(id);
  expose(id);
}

void HitDensity::touch(NodeId id) {
  EvictionNode& n = node(id);
  count_reuse(n.used, n.queue);
  n.frequency = static_cast<std::uint8_t>(std::min(n.frequency + 1, kHitClasses - 1));
  use(id);
}

void HitDensity::release(NodeId id) {
  touch(id);
  expose(id);
}

void HitDensity::expose(NodeId id) {
  if (node(id).prev != kNoNode) return;
  node(id).prev = static_cast<NodeId>(candidates_.size());
  candidates_.push_back(id);
}

void HitDensity::hold(NodeId id) {
  const NodeId place = node(id).prev;
  if (place == kNoNode) return;
  candidates_[place] = candidates_.back();
  node(candidates_.back()).prev = place;
  candidates_.pop_back();
  node(id).prev = kNoNode;
}

double HitDensity::density(NodeId id) {
  const EvictionNode& n = node(id);
  return classes_[n.queue].density[age_step(now_ - n.used)];
}

// The least dense of a sample; among equals, the least recently used.
NodeId HitDensity::victim() {
  const std::size_t all = candidates_.size();
  NodeId out = kNoNode;
  for (std::size_t i = 0; i < std::min(all, kSamples); ++i) {
    const NodeId id = candidates_[all <= kSamples ? i : random_() % all];
    if (out == kNoNode || density(id) < density(out) ||
        (density(id) == density(out) && now_ - node(id).used > now_ - node(out).used))
      out = id;
  }
  return out;
}

void HitDensity::evict(NodeId id, std::uint64_t fingerprint) {
  hold(id);
  const EvictionNode& n = node(id);
  ghosts_.remember(fingerprint, {n.used, n.frequency, n.queue});
}

void HitDensity::look_at_counts() {
  uses_since_look_ = 0;
  for (Class& c : classes_) {
    double left = c.uses;  // not used again before this age
    for (std::size_t age = 0; age < kAges; ++age) {
      double hits = 0, time = 0, best = 0, still = left;
      for (std::size_t until = age; until + 1 < kAges; ++until) {
        hits += c.reused[until];
        time += std::max(0.0, still - c.reused[until] / 2) * (age_begin(until + 1) - age_begin(until));
        still -= c.reused[until];
        if (time > 0) best = std::max(best, hits / time);
      }
      c.density[age] = best;
      left -= c.reused[age];
    }
    c.uses *= kForget;
    for (double& count : c.reused) count *= kForget;
  }
}

}  // namespace kv4
