// The CUDA backend: memory of one GPU, and the kernels of kv4/cuda.h queued on one stream.
#pragma once

#include <cuda_runtime_api.h>

#include <array>

#include "backend/backend.h"
#include "backend/cuda/runtime/check.h"
#include "backend/cuda/runtime/device_calls.h"
#include "backend/cuda/runtime/upload_ring.h"

namespace kv4::cuda {

// Invariants:
// 1. Everything but transfers is queued on one stream, in the order of the calls; set_stream makes the new stream wait
//    for the old one. Transfers have a stream of their own and never make the other stream wait.
// 2. No call of a step (update_step, append, flush, gathers) waits or allocates, except that update_step waits if the
//    host is four updates ahead of the device.
// 3. staging_ is used by one call at a time, and the calls that use it are ordered by the stream.
// 4. Every call is a Call (device_calls.h): once a kernel has failed, the call that notices reports it, and every later
//    call throws; no call waits for that. Only calls that free resources are a LastCall.
class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, cudaStream_t stream);
  ~CudaBackend() override;

  bool on_host() const override { return false; }
  std::byte* allocate(std::int64_t bytes) override;
  void deallocate(std::byte* memory, std::int64_t bytes) override;
  std::byte* allocate_host(std::int64_t bytes) override;  // pinned
  void deallocate_host(std::byte* memory, std::int64_t bytes) override;
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override;
  void fill(std::byte* memory, std::uint8_t value, std::int64_t bytes) override;
  void copy_pieces(std::span<const ops::CopyPiece> pieces) override;
  void reserve_staging(std::int64_t bytes) override;
  void read_pieces(std::span<const ops::CopyPiece> pieces, std::span<std::byte> host) override;
  void write_pieces(std::span<const ops::CopyPiece> pieces, std::span<const std::byte> host) override;
  std::int64_t transfer_out(std::span<const ops::CopyPiece> pieces) override;
  std::int64_t transfer_in(std::span<const ops::CopyPiece> pieces) override;
  bool transferred(std::int64_t ticket) override;

  void reserve_updates(std::int64_t max_items) override;
  void update_step(const ops::StepUpdate& update) override;
  void append(const ops::AppendParams& params) override;
  void flush(const ops::FlushParams& params) override;
  void save_boundaries(const ops::BoundaryParams& params) override;
  void gather_chosen(const ops::GatherParams& params) override;
  void gather_all(const ops::GatherParams& params) override;
  void gather_window(const ops::GatherParams& params) override;
  void index_scores(const ops::IndexParams& params) override;
  void select_topk(const ops::IndexParams& params) override;
  void index_topk(const ops::IndexParams& params) override;
  void attend(const ops::AttendParams& params) override;
  void write_slots(const ops::SlotRowsParams& params) override;
  void gather_slots(const ops::SlotRowsParams& params) override;
  void make_range_tables(const ops::RangeTablesParams& params) override;
  void place_scores(const ops::PlaceScoresParams& params) override;
  void save_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                  std::byte* image) override;
  void restore_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                     const std::byte* image) override;

  void set_stream(Stream stream) override;
  bool capturing() override;
  std::int64_t mark() override;
  bool reached(std::int64_t ticket) override;
  void synchronize() override;

 private:
  static constexpr std::size_t kMarks = 64;
  using Calls = DeviceCalls<DeviceGuard, cudaStream_t>;
  using Call = Calls::Call;
  using LastCall = Calls::LastCall;

  template <class Params>
  void queue(cudaError_t (*launch)(const Params&, cudaStream_t), const Params& params, const char* what);
  void to_host(const Call& call, std::byte* host, std::int64_t bytes);          // from staging; done when it returns
  void from_host(const Call& call, const std::byte* host, std::int64_t bytes);  // to staging
  std::int64_t transfer(const Call& call, std::span<const ops::CopyPiece> pieces, cudaMemcpyKind kind);
  std::uint8_t* staging() const { return reinterpret_cast<std::uint8_t*>(staging_); }

  Calls calls_;
  UploadRing uploads_;
  std::byte* staging_ = nullptr;
  std::int64_t staging_bytes_ = 0;
  std::array<cudaEvent_t, kMarks> marks_{};      // of tickets (ticket mod kMarks)
  cudaEvent_t queued_ = nullptr;                 // outgoing transfers wait for it
  std::array<cudaEvent_t, kMarks> transfers_{};  // as marks_, on the transfer stream
  std::int64_t last_transfer_ = 0;
  std::int64_t last_mark_ = 0;
  std::int64_t last_reached_ = 0;
};

}  // namespace kv4::cuda
