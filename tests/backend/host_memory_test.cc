// Host memory that transfers can reach: intact at every size, refused where the machine has too little.
#include "kv4/host_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "backend/device_memory.h"
#include "kv4/error.h"
#include "support/device.h"

namespace kv4 {
namespace {

std::uint8_t* bytes_at(std::byte* memory) { return reinterpret_cast<std::uint8_t*>(memory); }

// The largest sizes lie in huge pages on a GPU's host.
TEST(HostMemory, BytesGoToTheDeviceAndBack) {
  const std::shared_ptr<Backend> backend = test::test_backend();
  for (const std::int64_t size : {1ll, 4097ll, (8ll << 20) - 1, 8ll << 20, (10ll << 20) + 4099}) {
    const HostMemory sent(backend, size), back(backend, size);
    ASSERT_EQ(static_cast<std::int64_t>(sent.bytes().size()), size);
    std::minstd_rand random(static_cast<unsigned>(size));
    std::generate(sent.bytes().begin(), sent.bytes().end(), [&] { return static_cast<std::byte>(random() >> 8); });
    const DeviceMemory there(backend, size);
    const ops::CopyPiece in{bytes_at(sent.bytes().data()), bytes_at(there.data()), size},
        out{bytes_at(there.data()), bytes_at(back.bytes().data()), size};
    const std::int64_t first = backend->transfer_in({&in, 1});
    while (!backend->transferred(first)) continue;
    const std::int64_t second = backend->transfer_out({&out, 1});
    while (!backend->transferred(second)) continue;
    EXPECT_TRUE(std::ranges::equal(sent.bytes(), back.bytes())) << size;
  }
}

// New memory is cleared in stream order; transfers have a stream of their own.
TEST(HostMemory, ATransferIntoNewMemoryComesAfterItIsCleared) {
  constexpr std::int64_t kBusy = 64 << 20, kSize = 1 << 16;
  const std::shared_ptr<Backend> backend = test::test_backend();
  const DeviceMemory busy(backend, kBusy);
  const HostMemory sent(backend, kSize);
  std::fill(sent.bytes().begin(), sent.bytes().end(), std::byte{0xA5});
  for (int i = 0; i < (test::device() == test::Device::cuda ? 400 : 2); ++i) backend->fill(busy.data(), 1, kBusy);
  const DeviceMemory there(backend, kSize);
  const ops::CopyPiece in{bytes_at(sent.bytes().data()), bytes_at(there.data()), kSize};
  const std::int64_t ticket = backend->transfer_in({&in, 1});
  while (!backend->transferred(ticket)) continue;
  backend->synchronize();
  EXPECT_TRUE(std::ranges::equal(sent.bytes(), test::read_bytes(*backend, there.data(), kSize)));
}

TEST(HostMemory, TooMuchIsRefused) {
  try {
    const HostMemory memory(test::test_backend(), std::int64_t{1} << 50);
    FAIL() << "a petabyte was there";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_memory) << error.what();
  }
}

}  // namespace
}  // namespace kv4
