#include "backend/cuda/runtime/cuda_backend.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "backend/cuda/runtime/check.h"
#include "backend/cuda/runtime/pinned_memory.h"
#include "backend/image_pieces.h"
#include "base/check.h"
#include "kv4/cuda.h"

namespace kv4 {
namespace {

constexpr int kOldestMajor = 8;

}  // namespace

std::string why_no_cuda(int device) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  cudaGetLastError();
  if (status != cudaSuccess || count == 0)
    return fmt::format("no GPU is available: {}", status != cudaSuccess ? cudaGetErrorString(status) : "0 devices");
  if (device < 0 || device >= count) return fmt::format("GPU {} does not exist; GPUs are 0 to {}", device, count - 1);
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major < kOldestMajor)
    return fmt::format("GPU {} has compute capability {}.{}; kv4 needs {}.0 or newer", device, major, minor,
                       kOldestMajor);
  return {};
}

std::shared_ptr<Backend> make_cuda_backend(int device, Stream stream) {
  const std::string problem = why_no_cuda(device);
  require(problem.empty(), ErrorCode::no_device, "{}", problem);
  return std::make_shared<cuda::CudaBackend>(device, static_cast<cudaStream_t>(stream.handle));
}

namespace cuda {
namespace {

constexpr std::size_t kPieceListBytes = std::size_t{64} << 10;
constexpr std::int64_t kPieceBytes = std::int64_t{16} << 10;  // copied by a CTA at a time

std::size_t size(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// Writes arrays one after another into an upload buffer.
class BufferWriter {
 public:
  explicit BufferWriter(UploadRing::Buffer& buffer) : buffer_(buffer) {}

  /// Copies `count` elements in; returns their address on the device.
  template <class T>
  T* add(const T* from, std::int64_t count) {
    const std::size_t bytes = size(count) * sizeof(T);
    if (bytes > 0) std::memcpy(buffer_.host + used_, from, bytes);
    T* const on_device = reinterpret_cast<T*>(buffer_.device + used_);
    used_ = (used_ + bytes + 15) / 16 * 16;
    return on_device;
  }
  std::size_t used() const { return used_; }

 private:
  UploadRing::Buffer& buffer_;
  std::size_t used_ = 0;
};

}  // namespace

/// Calls a kernel's launcher as a Call.
template <class Params>
void CudaBackend::queue(cudaError_t (*launch)(const Params&, cudaStream_t), const Params& params, const char* what) {
  const Call call(calls_);
  check(launch(params, call.stream()), what);
}

CudaBackend::CudaBackend(int device, cudaStream_t stream) : calls_(device, stream, context_lost) {
  const Call call(calls_);
  uploads_.reserve(kPieceListBytes);
  const auto make_event = [](cudaEvent_t& event) {
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  };
  for (cudaEvent_t& event : marks_) make_event(event);
  for (cudaEvent_t& event : transfers_) make_event(event);
  make_event(queued_);
  check(cudaStreamCreateWithFlags(&call.transfers(), cudaStreamNonBlocking), "cudaStreamCreate");
}

CudaBackend::~CudaBackend() {
  try {
    const LastCall call(calls_);
    cudaStreamSynchronize(call.stream());
    cudaStreamSynchronize(call.transfers());
    for (cudaEvent_t event : marks_) cudaEventDestroy(event);
    for (cudaEvent_t event : transfers_) cudaEventDestroy(event);
    cudaEventDestroy(queued_);
    cudaStreamDestroy(call.transfers());
    cudaFree(staging_);
  } catch (const Error&) {  // a lost device frees its memory by itself
  }
}

// --- memory
// ---------------------------------------------------------------------------------------------------------------

std::byte* CudaBackend::allocate(std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  const Call call(calls_);
  std::byte* memory = static_cast<std::byte*>(device_malloc(bytes));
  cudaError_t status = cudaMemsetAsync(memory, 0, size(bytes), call.stream());
  // The next call may be a transfer into it, on the other stream.
  if (status == cudaSuccess) status = cudaEventRecord(queued_, call.stream());
  if (status == cudaSuccess) status = cudaStreamWaitEvent(call.transfers(), queued_, 0);
  if (status != cudaSuccess) cudaFree(memory);
  check(status, "clearing new memory");
  return memory;
}

void CudaBackend::deallocate(std::byte* memory, std::int64_t) {
  if (memory == nullptr) return;
  try {
    const LastCall call(calls_);
    cudaFree(memory);       // waits for the kernels that use the memory
  } catch (const Error&) {  // a lost device frees its memory by itself
  }
}

std::byte* CudaBackend::allocate_host(std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  const Call call(calls_);
  return static_cast<std::byte*>(allocate_pinned(bytes));
}

void CudaBackend::deallocate_host(std::byte* memory, std::int64_t bytes) {
  try {
    const LastCall call(calls_);
    cudaStreamSynchronize(call.transfers());
    free_pinned(memory, bytes);
  } catch (const Error&) {  // the process is ending
  }
}

void CudaBackend::copy(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const Call call(calls_);
  check(cudaMemcpyAsync(to, from, size(bytes), cudaMemcpyDeviceToDevice, call.stream()), "a copy on the GPU");
}

void CudaBackend::fill(std::byte* memory, std::uint8_t value, std::int64_t bytes) {
  const Call call(calls_);
  check(cudaMemsetAsync(memory, value, size(bytes), call.stream()), "a fill on the GPU");
}

void CudaBackend::copy_pieces(std::span<const ops::CopyPiece> pieces) {
  const Call call(calls_);
  if (pieces.size() <= kMostFewPieces) return check(copy_few_pieces(pieces, call.stream()), "copy_few_pieces");
  const std::vector<ops::CopyPiece> cut = cut_pieces(pieces, kPieceBytes);
  const std::size_t per_upload = uploads_.capacity() / sizeof(ops::CopyPiece);
  for (std::size_t first = 0; first < cut.size(); first += per_upload) {
    const std::span<const ops::CopyPiece> part =
        std::span(cut).subspan(first, std::min(per_upload, cut.size() - first));
    UploadRing::Buffer& buffer = uploads_.next();
    BufferWriter writer(buffer);
    const ops::CopyPiece* on_device = writer.add(part.data(), static_cast<std::int64_t>(part.size()));
    uploads_.send(buffer, writer.used(), call.stream());
    check(cuda::copy_pieces(on_device, static_cast<std::int32_t>(part.size()), kPieceBytes, call.stream()),
          "copy_pieces");
    uploads_.finish(buffer, call.stream());
  }
}

void CudaBackend::reserve_staging(std::int64_t bytes) {
  if (bytes <= staging_bytes_) return;
  const Call call(calls_);
  std::byte* larger = static_cast<std::byte*>(device_malloc(bytes));
  cudaFree(staging_);
  staging_ = larger;
  staging_bytes_ = bytes;
}

void CudaBackend::to_host(const Call& call, std::byte* host, std::int64_t bytes) {
  check(cudaMemcpyAsync(host, staging_, size(bytes), cudaMemcpyDeviceToHost, call.stream()), "a transfer from the GPU");
  check(cudaStreamSynchronize(call.stream()), "waiting for a transfer from the GPU");
}

void CudaBackend::from_host(const Call& call, const std::byte* host, std::int64_t bytes) {
  check(cudaMemcpyAsync(staging_, host, size(bytes), cudaMemcpyHostToDevice, call.stream()), "a transfer to the GPU");
}

void CudaBackend::read_pieces(std::span<const ops::CopyPiece> pieces, std::span<std::byte> host) {
  const Call call(calls_);
  const std::int64_t bytes = static_cast<std::int64_t>(host.size());
  if (bytes == 0) return;
  fill(staging_, 0, bytes);
  std::vector<ops::CopyPiece> staged(pieces.begin(), pieces.end());
  for (ops::CopyPiece& piece : staged) piece.to = staging() + (piece.to - reinterpret_cast<std::uint8_t*>(host.data()));
  copy_pieces(staged);
  to_host(call, host.data(), bytes);
}

void CudaBackend::write_pieces(std::span<const ops::CopyPiece> pieces, std::span<const std::byte> host) {
  if (host.empty()) return;
  const Call call(calls_);
  from_host(call, host.data(), static_cast<std::int64_t>(host.size()));
  std::vector<ops::CopyPiece> staged(pieces.begin(), pieces.end());
  for (ops::CopyPiece& piece : staged)
    piece.from = staging() + (piece.from - reinterpret_cast<const std::uint8_t*>(host.data()));
  copy_pieces(staged);
  check(cudaStreamSynchronize(call.stream()), "waiting for a transfer to the GPU");
}

std::int64_t CudaBackend::transfer_out(std::span<const ops::CopyPiece> pieces) {
  const Call call(calls_);
  check(cudaEventRecord(queued_, call.stream()), "cudaEventRecord");
  check(cudaStreamWaitEvent(call.transfers(), queued_, 0), "cudaStreamWaitEvent");
  return transfer(call, pieces, cudaMemcpyDeviceToHost);
}

std::int64_t CudaBackend::transfer_in(std::span<const ops::CopyPiece> pieces) {
  const Call call(calls_);
  return transfer(call, pieces, cudaMemcpyHostToDevice);
}

std::int64_t CudaBackend::transfer(const Call& call, std::span<const ops::CopyPiece> pieces, cudaMemcpyKind kind) {
  for (const ops::CopyPiece& piece : pieces)
    check(cudaMemcpyAsync(piece.to, piece.from, size(piece.bytes), kind, call.transfers()), "a transfer");
  ++last_transfer_;
  check(cudaEventRecord(transfers_[last_transfer_ % kMarks], call.transfers()), "cudaEventRecord");
  return last_transfer_;
}

bool CudaBackend::transferred(std::int64_t ticket) {
  const Call call(calls_);
  const cudaError_t status = cudaEventQuery(transfers_[ticket % kMarks]);
  if (status == cudaErrorNotReady) return false;
  check(status, "a transfer started earlier");
  return true;
}

// --- steps
// ---------------------------------------------------------------------------------------------------------------

void CudaBackend::reserve_updates(std::int64_t max_items) {
  const Call call(calls_);
  const std::int64_t bytes =
      max_items * static_cast<std::int64_t>(sizeof(ops::StepRecord) + sizeof(ops::BlockRange) + 4) +
      4 * ops::kMaxUpdateValues + 64;
  uploads_.reserve(std::max(kPieceListBytes, size(bytes)));
}

void CudaBackend::update_step(const ops::StepUpdate& update) {
  const Call call(calls_);
  UploadRing::Buffer& buffer = uploads_.next();
  BufferWriter writer(buffer);
  ops::StepUpdate on_device = update;
  on_device.items = writer.add(update.items, update.num_items);
  if (update.window_begins != nullptr) on_device.window_begins = writer.add(update.window_begins, update.num_items);
  on_device.ranges = writer.add(update.ranges, update.num_ranges);
  on_device.block_ids = writer.add(update.block_ids, update.num_values);
  uploads_.send(buffer, writer.used(), call.stream());
  check(cuda::update_step(on_device, call.stream()), "update_step");
  uploads_.finish(buffer, call.stream());
}

void CudaBackend::append(const ops::AppendParams& params) { queue(cuda::append, params, "append"); }
void CudaBackend::flush(const ops::FlushParams& params) { queue(cuda::flush, params, "flush_compression"); }
void CudaBackend::save_boundaries(const ops::BoundaryParams& params) {
  queue(cuda::save_boundaries, params, "save_boundaries");
}
void CudaBackend::gather_chosen(const ops::GatherParams& params) {
  queue(cuda::gather_chosen, params, "gather_compressed_kv");
}
void CudaBackend::gather_all(const ops::GatherParams& params) { queue(cuda::gather_all, params, "gather_all"); }
void CudaBackend::gather_window(const ops::GatherParams& params) {
  queue(cuda::gather_window, params, "gather_swa_kv");
}
void CudaBackend::index_scores(const ops::IndexParams& params) { queue(cuda::index_scores, params, "index_scores"); }
void CudaBackend::select_topk(const ops::IndexParams& params) { queue(cuda::select_topk, params, "select_topk"); }
void CudaBackend::index_topk(const ops::IndexParams& params) { queue(cuda::index_topk, params, "index_topk"); }
void CudaBackend::attend(const ops::AttendParams& params) { queue(cuda::attend, params, "attend"); }

void CudaBackend::write_slots(const ops::SlotRowsParams& params) { queue(cuda::write_slots, params, "write_slots"); }
void CudaBackend::gather_slots(const ops::SlotRowsParams& params) { queue(cuda::gather_slots, params, "gather_slots"); }
void CudaBackend::make_range_tables(const ops::RangeTablesParams& params) {
  queue(cuda::make_range_tables, params, "make_range_tables");
}
void CudaBackend::place_scores(const ops::PlaceScoresParams& params) {
  queue(cuda::place_scores, params, "place_scores");
}

// --- images
// ---------------------------------------------------------------------------------------------------------------

void CudaBackend::save_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                             std::byte* image) {
  if (layout.bytes == 0) return;
  const Call call(calls_);
  copy_pieces(pieces_to_image(layers, layout, slot, staging()));
  std::vector<ops::OpenSpan> spans;
  for (const PendingPart& part : layout.pending) {
    const ops::KindDesc& kind = layers[part.layer].kinds[part.kind];
    if (kind.overlap || part.open_count == 0) continue;
    spans.push_back(
        {kind, slot, static_cast<std::int32_t>(part.length), reinterpret_cast<float*>(staging() + part.open_at)});
  }
  const std::size_t per_upload = uploads_.capacity() / sizeof(ops::OpenSpan);
  for (std::size_t first = 0; first < spans.size(); first += per_upload) {
    const std::size_t count = std::min(per_upload, spans.size() - first);
    UploadRing::Buffer& upload = uploads_.next();
    BufferWriter writer(upload);
    const ops::OpenSpan* on_device = writer.add(spans.data() + first, static_cast<std::int64_t>(count));
    uploads_.send(upload, writer.used(), call.stream());
    check(cuda::fold_open(on_device, static_cast<std::int32_t>(count), call.stream()), "fold_open");
    uploads_.finish(upload, call.stream());
  }
  to_host(call, image, layout.bytes);
}

void CudaBackend::restore_image(std::span<const ops::LayerDesc> layers, const ImageLayout& layout, std::int32_t slot,
                                const std::byte* image) {
  const Call call(calls_);
  if (layout.bytes > 0) from_host(call, image, layout.bytes);
  copy_pieces(pieces_from_image(layers, layout, slot, staging()));

  std::vector<std::int32_t> fold_watermarks;
  std::vector<std::int32_t*> places;
  for (const PendingPart& part : layout.pending) {
    const ops::KindDesc& kind = layers[part.layer].kinds[part.kind];
    if (kind.overlap) continue;
    fold_watermarks.push_back(static_cast<std::int32_t>(part.length));
    places.push_back(kind.pending.fold_watermarks + slot * kind.pending.fold_watermark_stride);
  }
  if (!fold_watermarks.empty()) {
    UploadRing::Buffer& upload = uploads_.next();
    BufferWriter writer(upload);
    const std::int32_t* values = writer.add(fold_watermarks.data(), static_cast<std::int64_t>(fold_watermarks.size()));
    std::vector<ops::CopyPiece> pieces;
    for (std::size_t i = 0; i < places.size(); ++i)
      pieces.push_back(
          {reinterpret_cast<const std::uint8_t*>(values + i), reinterpret_cast<std::uint8_t*>(places[i]), 4});
    const ops::CopyPiece* on_device = writer.add(pieces.data(), static_cast<std::int64_t>(pieces.size()));
    uploads_.send(upload, writer.used(), call.stream());
    check(cuda::copy_pieces(on_device, static_cast<std::int32_t>(pieces.size()), 4, call.stream()), "copy_pieces");
    uploads_.finish(upload, call.stream());
  }
  check(cudaStreamSynchronize(call.stream()), "waiting for a transfer to the GPU");
}

// --- order
// ---------------------------------------------------------------------------------------------------------------

bool CudaBackend::capturing() {
  const Call call(calls_);
  return is_capturing(call.stream());
}

// A stream that is being captured cannot wait for work outside the capture; the caller that replays the graph orders
// it.
void CudaBackend::set_stream(Stream stream) {
  const Call call(calls_);
  const cudaStream_t next = static_cast<cudaStream_t>(stream.handle);
  if (next == call.stream()) return;
  if (!is_capturing(call.stream()) && !is_capturing(next)) {
    const std::int64_t ticket = mark();
    check(cudaStreamWaitEvent(next, marks_[ticket % kMarks], 0), "cudaStreamWaitEvent");
  }
  call.stream() = next;
}

std::int64_t CudaBackend::mark() {
  const Call call(calls_);
  ++last_mark_;
  check(cudaEventRecord(marks_[last_mark_ % kMarks], call.stream()), "cudaEventRecord");
  return last_mark_;
}

// An event that has been recorded again stands for a later ticket: no ticket is reached too early.
bool CudaBackend::reached(std::int64_t ticket) {
  if (ticket <= last_reached_) return true;
  const Call call(calls_);
  const cudaError_t status = cudaEventQuery(marks_[ticket % kMarks]);
  if (status == cudaErrorNotReady) return false;
  check(status, "work queued earlier");
  last_reached_ = ticket;
  return true;
}

void CudaBackend::synchronize() {
  const Call call(calls_);
  check(cudaStreamSynchronize(call.stream()), "work queued earlier");
}

}  // namespace cuda
}  // namespace kv4
