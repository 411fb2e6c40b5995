// Any bytes as a safetensors file: tensors that can be read, or kv4::Error; nothing else.
#include "checks/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kv4/error.h"

namespace {

template <class Read>
void read(Read&& read_tensor) {
  try {
    (void)read_tensor();
  } catch (const kv4::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  try {
    const kv4::checks::SafeTensors file =
        kv4::checks::parse_safetensors(std::vector<std::byte>(bytes, bytes + size), "fuzz");
    for (const std::string& name : file.tensor_names()) {
      volatile unsigned sum = 0;  // keeps the reads
      for (const std::byte byte : file.tensor(name).bytes) sum = sum + static_cast<unsigned>(byte);
      const std::vector<std::int64_t> shape = file.tensor(name).shape;
      read([&] { return file.floats(name, shape); });
      read([&] { return file.ints(name, shape); });
      read([&] { return file.halves(name, shape); });
      read([&] { return file.octets(name, {-1, -1}); });
    }
    for (const auto& pair : file.metadata()) {
      read([&] { return file.metadata_int(pair.first, 0, 1 << 20); });
      read([&] { return file.metadata_double(pair.first); });
    }
  } catch (const kv4::Error&) {
  }
  return 0;
}
