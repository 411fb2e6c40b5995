#include "device_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <span>
#include <utility>

#include "backend/backend.h"
#include "kv4/error.h"

namespace kv4::checks {
namespace {

constexpr std::int64_t kTransferBytes = std::int64_t{64} << 20;  // maximum of one transfer
constexpr std::int64_t kChunkBytes = std::int64_t{8} << 20;
constexpr std::int64_t kAlignment = 256;

std::int64_t tensor_bytes(const ConstTensorView& t) {
  std::int64_t count = 1;
  for (int d = 0; d < t.ndim; ++d) count *= t.shape[d];
  return count * static_cast<std::int64_t>(element_bytes(t.dtype));
}

// Cuts a transfer into parts that fit the backend's staging memory.
template <class Move>
void for_transfers(Backend& backend, std::int64_t bytes, Move move) {
  backend.reserve_staging(std::min(bytes, kTransferBytes));
  for (std::int64_t at = 0; at < bytes; at += kTransferBytes) move(at, std::min(kTransferBytes, bytes - at));
}

void write(Backend& backend, std::byte* to, const void* from, std::int64_t bytes) {
  for_transfers(backend, bytes, [&](std::int64_t at, std::int64_t count) {
    const std::byte* host = static_cast<const std::byte*>(from) + at;
    const ops::CopyPiece piece{reinterpret_cast<const std::uint8_t*>(host), reinterpret_cast<std::uint8_t*>(to + at),
                               count};
    backend.write_pieces(std::span(&piece, 1), std::span(host, count));
  });
}

void read(Backend& backend, void* to, const std::byte* from, std::int64_t bytes) {
  for_transfers(backend, bytes, [&](std::int64_t at, std::int64_t count) {
    std::byte* host = static_cast<std::byte*>(to) + at;
    const ops::CopyPiece piece{reinterpret_cast<const std::uint8_t*>(from + at), reinterpret_cast<std::uint8_t*>(host),
                               count};
    backend.read_pieces(std::span(&piece, 1), std::span(host, count));
  });
}

}  // namespace

std::shared_ptr<Backend> make_backend(const std::string& device, int threads) {
  if (device == "cpu") return make_cpu_backend(threads);
  int number = 0;
  const std::string prefix = "cuda:";
  bool known = device == "cuda";
  if (device.starts_with(prefix) && device.size() > prefix.size()) {
    const char* end = device.data() + device.size();
    const auto [stop, error] = std::from_chars(device.data() + prefix.size(), end, number);
    known = error == std::errc() && stop == end && number >= 0;
  }
  if (!known)
    throw Error(ErrorCode::bad_argument,
                fmt::format("--device '{}' is not known; it may be cpu, cuda or cuda:N, for example cuda:0", device));
  if (const std::string problem = why_no_cuda(number); !problem.empty())
    throw Error(ErrorCode::no_device, fmt::format("--device {} cannot be used: {}", device, problem));
  return make_cuda_backend(number);
}

std::byte* DeviceTensors::take(std::int64_t bytes) {
  const std::int64_t size = (std::max<std::int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  while (chunk_ < chunks_.size() && used_ + size > chunks_[chunk_].bytes()) {
    ++chunk_;
    used_ = 0;
  }
  if (chunk_ == chunks_.size()) chunks_.emplace_back(backend_, std::max(size, kChunkBytes));
  std::byte* memory = chunks_[chunk_].data() + used_;
  used_ += size;
  return memory;
}

// Copies `host` into the backend's memory and returns the address.
void* DeviceTensors::copy(const ConstTensorView& host) {
  const std::int64_t bytes = tensor_bytes(host);
  std::byte* memory = take(bytes);
  write(*backend_, memory, host.data, bytes);
  return memory;
}

ConstTensorView DeviceTensors::in(const ConstTensorView& host) {
  if (host.empty() || backend_->on_host()) return host;
  return host.over<const void>(copy(host));
}

LayerWeights DeviceTensors::in(const LayerWeights& host) {
  return {in(host.position_bias), in(host.norm_weight), in(host.index_position_bias), in(host.index_norm_weight),
          in(host.raw_norm_weight), in(host.index_key_weight)};
}

AppendInputs DeviceTensors::in(const AppendInputs& host) {
  return {in(host.raw_kv), in(host.kv), in(host.gate), in(host.index_kv), in(host.index_gate), host.raw_is_projection};
}

TensorView DeviceTensors::out(const TensorView& host) {
  if (host.empty() || backend_->on_host()) return host;
  return outputs_.emplace_back(Output{host.over(copy(host)), host}).device;
}

void DeviceTensors::read_back() {
  for (const Output& output : outputs_)
    read(*backend_, output.host.data, static_cast<const std::byte*>(output.device.data), tensor_bytes(output.host));
  outputs_.clear();
}

void DeviceTensors::clear() {
  outputs_.clear();
  chunk_ = 0;
  used_ = 0;
}

const std::byte* HostCopy::find(const void* memory, std::int64_t count) const {
  const auto wanted = reinterpret_cast<std::uintptr_t>(memory);
  for (const Part& part : parts_) {
    const auto begin = reinterpret_cast<std::uintptr_t>(part.memory);
    if (wanted >= begin && wanted + static_cast<std::uintptr_t>(count) <= begin + part.copy.size())
      return part.copy.data() + (wanted - begin);
  }
  return nullptr;
}

const std::byte* HostCopy::bytes(const void* memory, std::int64_t count) {
  const auto* from = static_cast<const std::byte*>(memory);
  if (memory == nullptr || backend_->on_host()) return from;
  if (const std::byte* known = find(memory, count)) return known;
  Part& part = parts_.emplace_back(Part{from, AlignedVector<std::byte>(count)});
  read(*backend_, part.copy.data(), from, count);
  return part.copy.data();
}

PlaneView HostCopy::plane(const PlaneView& plane) const {
  if (plane.data == nullptr || backend_->on_host()) return plane;
  const std::byte* found = find(plane.data, plane.row_bytes);
  if (found == nullptr) throw Error(ErrorCode::bad_state, "a view points outside the pools that were copied");
  PlaneView out = plane;
  out.data = const_cast<std::byte*>(found);
  return out;
}

}  // namespace kv4::checks
