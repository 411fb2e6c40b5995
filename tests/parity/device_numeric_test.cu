// Compares the device's conversion instructions with the plain code, over every input.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "backend/cuda/rows/decode.cuh"
#include "backend/cuda/rows/encode.cuh"
#include "kv4/backend.h"

namespace {

using namespace kv4;

constexpr std::uint64_t kAll = std::uint64_t{1} << 32;

__global__ void compare_e4m3(unsigned long long* wrong) {
  unsigned long long mine = 0;
  const std::uint64_t threads = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < kAll / 4; i += threads) {
    cuda::Quad x;
    std::uint32_t want = 0;
    for (int c = 0; c < 4; ++c) {
      x.v[c] = codec::bits_float(static_cast<std::uint32_t>(4 * i + c));
      want |= static_cast<std::uint32_t>(codec::e4m3_bits(x.v[c])) << (8 * c);
    }
    mine += cuda::e4m3_quad(x, 1.0f) != want;
  }
  atomicAdd(wrong, mine);
}

// Host and device compile one source; this compares the two compilers' results.
__global__ void run_scalars(std::uint32_t first, int count, std::uint32_t* out) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const float x = codec::bits_float(first + static_cast<std::uint32_t>(i) * 65537u);
  const float y = codec::canonical_nan(codec::exp_nonpositive(-codec::magnitude(x)));
  out[3 * i] = codec::float_bits(y);
  out[3 * i + 1] = codec::bf16_bits(x) | static_cast<std::uint32_t>(codec::e4m3_bits(x)) << 16 |
                   static_cast<std::uint32_t>(codec::e2m1_bits(x)) << 24;
  out[3 * i + 2] = codec::float_bits(
      codec::canonical_nan(codec::quotient(1.0f, codec::square_root(codec::quotient(codec::magnitude(x), 512.0f)))));
}

template <class Out>
__device__ std::uint32_t stored(float x) {
  return sizeof(Out) == 2 ? codec::bf16_bits(x) : codec::float_bits(codec::canonical_nan(x));
}

template <class Out>
__device__ std::uint32_t channel(const cuda::Octet<Out>& octet, int i) {
  return sizeof(Out) == 2 ? (octet.words[i / 2] >> (16 * (i % 2))) & 0xFFFFu : octet.words[i];
}

/// A CTA's scale: every UE8M0, then some others.
__device__ float cta_scale() {
  constexpr float kOthers[] = {0.37f, -3.0f, 1e38f, 3e-39f, 0.0f};
  if (blockIdx.x < 256) return codec::ue8m0_value(static_cast<std::uint8_t>(blockIdx.x));
  const unsigned other = blockIdx.x - 256;
  return other < 5 ? kOthers[other] : codec::bits_float(codec::kNanBits);
}

// Thread t has the e4m3 codes from 8t on, and eight e2m1 codes.
template <class Out>
__global__ void compare_unpacked(unsigned long long* wrong) {
  const int t = static_cast<int>(threadIdx.x);
  const float scale = cta_scale();
  uint2 bytes{};
  std::uint32_t nibbles = 0;
  for (int i = 0; i < 8; ++i) {
    (i < 4 ? bytes.x : bytes.y) |= static_cast<std::uint32_t>(8 * t + i) << (8 * (i % 4));
    nibbles |= static_cast<std::uint32_t>((t + i * (t / 16 + 1)) % 16) << (4 * i);
  }
  const cuda::Octet<Out> e4m3 = cuda::unpack_e4m3<Out>(bytes, scale),
                         e2m1 = cuda::unpack_e2m1<Out, false>(nibbles, scale);
  const cuda::Octet<Out> by_power = cuda::unpack_e2m1<Out, true>(nibbles, scale);
  unsigned long long mine = 0;
  for (int i = 0; i < 8; ++i) {
    const float code = codec::e2m1_value(static_cast<std::uint8_t>((nibbles >> (4 * i)) & 15u));
    mine += channel(e4m3, i) != stored<Out>(codec::e4m3_value(static_cast<std::uint8_t>(8 * t + i)) * scale);
    mine += channel(e2m1, i) != stored<Out>(code * scale);
    mine += blockIdx.x < 256 && channel(by_power, i) != stored<Out>(code * scale);
  }
  if (mine != 0) atomicAdd(wrong, mine);
}

class DeviceNumeric : public testing::Test {
 protected:
  void SetUp() override {
    const std::string why = why_no_cuda();
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

TEST_F(DeviceNumeric, E4m3OfEveryFloat) {
  unsigned long long* wrong = nullptr;
  ASSERT_EQ(cudaMalloc(&wrong, 8), cudaSuccess);
  ASSERT_EQ(cudaMemset(wrong, 0, 8), cudaSuccess);
  compare_e4m3<<<132 * 8, 256>>>(wrong);
  unsigned long long count = 1;
  ASSERT_EQ(cudaMemcpy(&count, wrong, 8, cudaMemcpyDeviceToHost), cudaSuccess);
  cudaFree(wrong);
  EXPECT_EQ(count, 0u);
}

TEST_F(DeviceNumeric, EveryCodeAtEveryScale) {
  unsigned long long* wrong = nullptr;
  ASSERT_EQ(cudaMalloc(&wrong, 16), cudaSuccess);
  ASSERT_EQ(cudaMemset(wrong, 0, 16), cudaSuccess);
  compare_unpacked<std::uint16_t><<<262, 32>>>(wrong);
  compare_unpacked<float><<<262, 32>>>(wrong + 1);
  unsigned long long count[2] = {1, 1};
  ASSERT_EQ(cudaMemcpy(count, wrong, 16, cudaMemcpyDeviceToHost), cudaSuccess);
  cudaFree(wrong);
  EXPECT_EQ(count[0], 0u) << "to bf16";
  EXPECT_EQ(count[1], 0u) << "to fp32";
}

TEST_F(DeviceNumeric, ScalarsAsOnTheHost) {
  constexpr int kCount = 65536;
  std::uint32_t* there = nullptr;
  ASSERT_EQ(cudaMalloc(&there, 12 * kCount), cudaSuccess);
  std::vector<std::uint32_t> got(3 * kCount);
  for (std::uint32_t first : {0u, 1u, 77u, 0x3F800000u, 12345678u}) {
    run_scalars<<<kCount / 256, 256>>>(first, kCount, there);
    ASSERT_EQ(cudaMemcpy(got.data(), there, 12 * kCount, cudaMemcpyDeviceToHost), cudaSuccess);
    for (int i = 0; i < kCount; ++i) {
      const float x = codec::bits_float(first + static_cast<std::uint32_t>(i) * 65537u);
      const std::size_t at = 3 * static_cast<std::size_t>(i);
      ASSERT_EQ(got[at], codec::float_bits(codec::canonical_nan(codec::exp_nonpositive(-codec::magnitude(x))))) << x;
      ASSERT_EQ(got[at + 1], codec::bf16_bits(x) | static_cast<std::uint32_t>(codec::e4m3_bits(x)) << 16 |
                                 static_cast<std::uint32_t>(codec::e2m1_bits(x)) << 24)
          << x;
      ASSERT_EQ(got[at + 2], codec::float_bits(codec::canonical_nan(codec::quotient(
                                 1.0f, codec::square_root(codec::quotient(codec::magnitude(x), 512.0f))))))
          << x;
    }
  }
  cudaFree(there);
}

}  // namespace
