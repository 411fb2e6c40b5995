// The library's own rotation angles, in the backend's memory.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "kv4/model_config.h"
#include "schema/rope.h"

namespace kv4 {

class RopeTables {
 public:
  RopeTables(const RopeSpec& rope, int rope_dim, std::int64_t positions, std::shared_ptr<Backend> backend)
      : backend_(std::move(backend)) {
    const std::vector<double> table = build_rope_angles(rope, rope_dim, positions);
    bytes_ = static_cast<std::int64_t>(table.size() * sizeof(double));
    backend_->reserve_staging(bytes_);
    memory_ = backend_->allocate(bytes_);
    const std::span<const std::byte> host = std::as_bytes(std::span(table));
    const ops::CopyPiece all{reinterpret_cast<const std::uint8_t*>(host.data()),
                             reinterpret_cast<std::uint8_t*>(memory_), bytes_};
    backend_->write_pieces(std::span(&all, 1), host);
    view_ = view_rope_angles(reinterpret_cast<const double*>(memory_), rope_dim, positions);
  }
  ~RopeTables() { backend_->deallocate(memory_, bytes_); }
  RopeTables(const RopeTables&) = delete;
  RopeTables& operator=(const RopeTables&) = delete;

  const RopeAngles& view() const { return view_; }
  std::int64_t memory_bytes() const { return bytes_; }

 private:
  std::shared_ptr<Backend> backend_;
  std::int64_t bytes_ = 0;
  std::byte* memory_ = nullptr;
  RopeAngles view_;
};

}  // namespace kv4
