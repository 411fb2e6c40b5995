// A safetensors file in memory, by tensor name. Foreign input: every rule of the format is checked before a byte is
// used.
//
//   offset  size  meaning
//   0       8     header length n, little-endian
//   8       n     JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end)}; "__metadata__" -> texts
//   8 + n   ...   data, little-endian; the tensors cover it without holes or overlaps
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace kv4::checks {

enum class StoredType : std::uint8_t {
  boolean,
  u8,
  i8,
  f8_e4m3,
  f8_e5m2,
  u16,
  i16,
  f16,
  bf16,
  u32,
  i32,
  f32,
  u64,
  i64,
  f64
};

const char* to_string(StoredType type);
std::size_t element_bytes(StoredType type);

/// Never owns: `bytes` is valid as long as its SafeTensors, and may lie at any address (copy before casting).
struct StoredTensor {
  StoredType type = StoredType::u8;
  std::vector<std::int64_t> shape;
  std::int64_t elements = 0;
  std::span<const std::byte> bytes;  // [elements * element_bytes(type)]
};

/// Owns the bytes. Anything missing, of another type or of another shape throws Error(bad_file).
class SafeTensors {
 public:
  const std::string& name() const { return name_; }
  bool contains(const std::string& tensor) const { return records_.count(tensor) != 0; }
  std::vector<std::string> tensor_names() const;
  StoredTensor tensor(const std::string& tensor) const;

  /// `shape`: -1 allows any size.
  std::vector<float> floats(const std::string& tensor, const std::vector<std::int64_t>& shape) const;  // f32 or bf16
  std::vector<std::int32_t> ints(const std::string& tensor, const std::vector<std::int64_t>& shape) const;
  std::vector<std::uint16_t> halves(const std::string& tensor,
                                    const std::vector<std::int64_t>& shape) const;  // bits of i16, u16, bf16
  std::vector<std::uint8_t> octets(const std::string& tensor, const std::vector<std::int64_t>& shape) const;

  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& metadata(const std::string& key) const;
  std::int64_t metadata_int(const std::string& key, std::int64_t low, std::int64_t high) const;
  double metadata_double(const std::string& key) const;  // finite and positive

 private:
  friend SafeTensors parse_safetensors(std::vector<std::byte> bytes, std::string name);
  // 1. begin <= end <= bytes_.size(), both absolute. 2. end - begin = elements * element_bytes(type). 3. no two records
  // overlap.
  struct Record {
    StoredType type = StoredType::u8;
    std::vector<std::int64_t> shape;
    std::int64_t elements = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  StoredTensor checked(const std::string& tensor, const std::vector<StoredType>& types,
                       const std::vector<std::int64_t>& shape) const;

  std::string name_;
  std::vector<std::byte> bytes_;
  std::map<std::string, Record> records_;
  std::map<std::string, std::string> metadata_;
};

/// `name` is what errors call the file.
SafeTensors parse_safetensors(std::vector<std::byte> bytes, std::string name);
SafeTensors load_safetensors(const std::string& path);

}  // namespace kv4::checks
