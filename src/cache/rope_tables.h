// The library's own rotation angles, in the backend's memory.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backend/device_memory.h"
#include "kv4/model_config.h"
#include "schema/rope.h"

namespace kv4 {

class RopeTables {
 public:
  RopeTables(const RopeSpec& rope, int rope_dim, std::int64_t positions, const std::shared_ptr<Backend>& backend)
      : memory_(backend, 8 * rope_angle_count(rope_dim, positions)),
        view_(view_rope_angles(reinterpret_cast<const double*>(memory_.data()), rope_dim, positions)) {
    const std::vector<double> table = build_rope_angles(rope, rope_dim, positions);
    const std::span<const std::byte> host = std::as_bytes(std::span(table));
    const ops::CopyPiece all{reinterpret_cast<const std::uint8_t*>(host.data()),
                             reinterpret_cast<std::uint8_t*>(memory_.data()), memory_.bytes()};
    backend->reserve_staging(memory_.bytes());
    backend->write_pieces(std::span(&all, 1), host);
  }

  const RopeAngles& view() const { return view_; }
  std::int64_t memory_bytes() const { return memory_.bytes(); }

 private:
  DeviceMemory memory_;
  RopeAngles view_;
};

}  // namespace kv4
