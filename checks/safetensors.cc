#include "safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/input_file.h"
#include "kv4/error.h"

namespace kv4::checks {
namespace {

static_assert(std::endian::native == std::endian::little, "the file's data is copied as it is");

using nlohmann::json;

constexpr std::uint64_t kLengthBytes = 8;
// Recorded vectors have some MB and two dozen tensors. A header takes up to 20 times its bytes as JSON.
constexpr std::int64_t kMaxFileBytes = 1 << 27;
constexpr std::uint64_t kMaxHeaderBytes = 1 << 20;
constexpr std::uint64_t kMaxElements = std::uint64_t{1} << 32;
constexpr std::size_t kMaxDims = 8;

struct TypeRow {
  StoredType type;
  const char* name;
  std::size_t bytes;
};

constexpr std::array kTypes = {
    TypeRow{StoredType::boolean, "BOOL", 1},    TypeRow{StoredType::u8, "U8", 1},
    TypeRow{StoredType::i8, "I8", 1},           TypeRow{StoredType::f8_e4m3, "F8_E4M3", 1},
    TypeRow{StoredType::f8_e5m2, "F8_E5M2", 1}, TypeRow{StoredType::u16, "U16", 2},
    TypeRow{StoredType::i16, "I16", 2},         TypeRow{StoredType::f16, "F16", 2},
    TypeRow{StoredType::bf16, "BF16", 2},       TypeRow{StoredType::u32, "U32", 4},
    TypeRow{StoredType::i32, "I32", 4},         TypeRow{StoredType::f32, "F32", 4},
    TypeRow{StoredType::u64, "U64", 8},         TypeRow{StoredType::i64, "I64", 8},
    TypeRow{StoredType::f64, "F64", 8},
};

const TypeRow& type_row(StoredType type) { return kTypes[static_cast<std::size_t>(type)]; }

template <class... Args>
[[noreturn]] void fail(const std::string& file, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(ErrorCode::bad_file, file + ": " + fmt::format(text, std::forward<Args>(args)...));
}

// Formats a value for an error. Nested values are not printed: printing recurses, and a file may nest without limit.
std::string shown(const json& value) { return value.is_structured() ? value.type_name() : value.dump(-1, ' ', true); }

StoredType parse_type(const std::string& file, const std::string& tensor, const json& value) {
  const std::string seen = value.is_string() ? value.get<std::string>() : shown(value);
  std::vector<const char*> names;
  for (const TypeRow& row : kTypes) {
    if (seen == row.name) return row.type;
    names.push_back(row.name);
  }
  fail(file, "tensor '{}' has dtype {}, known are {}; convert it to one of them", tensor, seen, fmt::join(names, ", "));
}

std::vector<std::int64_t> parse_shape(const std::string& file, const std::string& tensor, const json& value) {
  if (!value.is_array() || value.size() > kMaxDims) {
    fail(file, "tensor '{}' needs a shape of at most {} sizes; write the file again", tensor, kMaxDims);
  }
  std::vector<std::int64_t> shape;
  for (const json& size : value) {
    if (!size.is_number_unsigned() || size.get<std::uint64_t>() > kMaxElements) {
      fail(file, "tensor '{}' has size {} in its shape, allowed are integers from 0 to {}; write the file again",
           tensor, shown(size), kMaxElements);
    }
    shape.push_back(size.get<std::int64_t>());
  }
  return shape;
}

std::int64_t count_elements(const std::string& file, const std::string& tensor,
                            const std::vector<std::int64_t>& shape) {
  std::uint64_t elements = 1;
  for (std::int64_t size : shape) {
    const auto factor = static_cast<std::uint64_t>(size);
    if (factor != 0 && elements > kMaxElements / factor) {
      fail(file, "tensor '{}' has shape {}, more than {} elements; split the file", tensor, shape, kMaxElements);
    }
    elements *= factor;
  }
  return static_cast<std::int64_t>(elements);
}

std::pair<std::uint64_t, std::uint64_t> parse_offsets(const std::string& file, const std::string& tensor,
                                                      const json& value, std::uint64_t data_bytes) {
  if (!value.is_array() || value.size() != 2 || !value[0].is_number_unsigned() || !value[1].is_number_unsigned()) {
    fail(file, "tensor '{}' needs data_offsets [begin, end]; write the file again", tensor);
  }
  const auto begin = value[0].get<std::uint64_t>();
  const auto end = value[1].get<std::uint64_t>();
  if (begin > end || end > data_bytes) {
    fail(file, "tensor '{}' lies at [{}, {}) of {} data bytes; the file is truncated or damaged, fetch it again",
         tensor, begin, end, data_bytes);
  }
  return {begin, end};
}

std::map<std::string, std::string> parse_metadata(const std::string& file, const json& value) {
  std::map<std::string, std::string> metadata;
  if (!value.is_object()) fail(file, "__metadata__ must be an object of texts; write the file again");
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) fail(file, "metadata '{}' is not a text; write it as one", key);
    metadata.emplace(key, text.get<std::string>());
  }
  return metadata;
}

json parse_header(const std::string& file, std::span<const std::byte> bytes) {
  if (bytes.size() < kLengthBytes) {
    fail(file, "{} bytes, a safetensors file has at least {}; the file is truncated, fetch it again", bytes.size(),
         kLengthBytes);
  }
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  const std::uint64_t limit = std::min<std::uint64_t>(bytes.size() - kLengthBytes, kMaxHeaderBytes);
  if (length > limit) {
    fail(file, "header of {} bytes, at most {} fit; the file is truncated or not safetensors, fetch it again", length,
         limit);
  }
  const char* text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  json header = json::parse(text, text + length, nullptr, false);
  if (!header.is_object())
    fail(file, "the header is not a JSON object; the file is damaged or not safetensors, fetch it again");
  return header;
}

template <class Element>
std::vector<Element> copy_elements(const StoredTensor& tensor) {
  std::vector<Element> out(tensor.elements);
  if (!tensor.bytes.empty()) std::memcpy(out.data(), tensor.bytes.data(), tensor.bytes.size());
  return out;
}

bool shape_matches(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& wanted) {
  return std::equal(shape.begin(), shape.end(), wanted.begin(), wanted.end(),
                    [](std::int64_t size, std::int64_t want) { return want < 0 || size == want; });
}

}  // namespace

const char* to_string(StoredType type) { return type_row(type).name; }
std::size_t element_bytes(StoredType type) { return type_row(type).bytes; }

std::vector<std::string> SafeTensors::tensor_names() const {
  std::vector<std::string> names;
  for (const auto& [name, record] : records_) names.push_back(name);
  return names;
}

StoredTensor SafeTensors::tensor(const std::string& tensor) const {
  const auto found = records_.find(tensor);
  if (found == records_.end()) {
    fail(name_, "no tensor '{}', the {} it holds are: {}; use a file that has it", tensor, records_.size(),
         fmt::join(tensor_names(), ", "));
  }
  const Record& record = found->second;
  return {record.type, record.shape, record.elements,
          std::span(bytes_).subspan(record.begin, record.end - record.begin)};
}

StoredTensor SafeTensors::checked(const std::string& tensor, const std::vector<StoredType>& types,
                                  const std::vector<std::int64_t>& shape) const {
  StoredTensor found = this->tensor(tensor);
  if (std::find(types.begin(), types.end(), found.type) == types.end()) {
    std::vector<const char*> names;
    for (StoredType type : types) names.push_back(to_string(type));
    fail(name_, "tensor '{}' is {}, wanted {}; convert it", tensor, to_string(found.type), fmt::join(names, " or "));
  }
  if (!shape_matches(found.shape, shape)) {
    const bool open = std::find(shape.begin(), shape.end(), -1) != shape.end();
    fail(name_, "tensor '{}' has shape {}, wanted {}{}; check the file's metadata", tensor, found.shape, shape,
         open ? " (-1: any size)" : "");
  }
  return found;
}

std::vector<float> SafeTensors::floats(const std::string& tensor, const std::vector<std::int64_t>& shape) const {
  const StoredTensor found = checked(tensor, {StoredType::f32, StoredType::bf16}, shape);
  if (found.type == StoredType::f32) return copy_elements<float>(found);
  std::vector<float> out;
  out.reserve(found.elements);
  for (std::uint16_t bits : copy_elements<std::uint16_t>(found))
    out.push_back(std::bit_cast<float>(std::uint32_t{bits} << 16));
  return out;
}

std::vector<std::int32_t> SafeTensors::ints(const std::string& tensor, const std::vector<std::int64_t>& shape) const {
  return copy_elements<std::int32_t>(checked(tensor, {StoredType::i32}, shape));
}

std::vector<std::uint16_t> SafeTensors::halves(const std::string& tensor,
                                               const std::vector<std::int64_t>& shape) const {
  return copy_elements<std::uint16_t>(checked(tensor, {StoredType::i16, StoredType::u16, StoredType::bf16}, shape));
}

std::vector<std::uint8_t> SafeTensors::octets(const std::string& tensor, const std::vector<std::int64_t>& shape) const {
  return copy_elements<std::uint8_t>(checked(tensor, {StoredType::u8}, shape));
}

const std::string& SafeTensors::metadata(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) fail(name_, "metadata has no '{}'; add it to __metadata__", key);
  return found->second;
}

std::int64_t SafeTensors::metadata_int(const std::string& key, std::int64_t low, std::int64_t high) const {
  const std::string& text = metadata(key);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    fail(name_, "metadata '{}' is '{}', allowed are integers from {} to {}; correct it", key, text, low, high);
  }
  return value;
}

double SafeTensors::metadata_double(const std::string& key) const {
  const std::string& text = metadata(key);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) || value <= 0) {
    fail(name_, "metadata '{}' is '{}', allowed are numbers above 0; correct it", key, text);
  }
  return value;
}

SafeTensors parse_safetensors(std::vector<std::byte> bytes, std::string name) {
  const json header = parse_header(name, bytes);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  const std::uint64_t data_start = kLengthBytes + length;
  const std::uint64_t data_bytes = bytes.size() - data_start;

  SafeTensors out;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> spans;
  for (const auto& [tensor, value] : header.items()) {
    if (tensor == "__metadata__") {
      out.metadata_ = parse_metadata(name, value);
      continue;
    }
    if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") || !value.contains("data_offsets")) {
      fail(name, "tensor '{}' needs dtype, shape and data_offsets; write the file again", tensor);
    }
    SafeTensors::Record record;
    record.type = parse_type(name, tensor, value["dtype"]);
    record.shape = parse_shape(name, tensor, value["shape"]);
    record.elements = count_elements(name, tensor, record.shape);
    const auto [begin, end] = parse_offsets(name, tensor, value["data_offsets"], data_bytes);
    const std::uint64_t wanted = static_cast<std::uint64_t>(record.elements) * element_bytes(record.type);
    if (end - begin != wanted) {
      fail(name, "tensor '{}' of shape {} {} has {} bytes, wanted {}; the file is damaged, fetch it again", tensor,
           record.shape, to_string(record.type), end - begin, wanted);
    }
    record.begin = data_start + begin;
    record.end = data_start + end;
    spans.emplace_back(begin, end);
    out.records_.emplace(tensor, std::move(record));
  }

  std::sort(spans.begin(), spans.end());
  std::uint64_t covered = 0;
  for (const auto& [begin, end] : spans) {
    if (begin != covered && begin != end) {
      fail(name, "data byte {} is followed by a tensor at {}: tensors overlap or leave a hole; write the file again",
           covered, begin);
    }
    covered = std::max(covered, end);
  }
  if (covered != data_bytes) {
    fail(name, "{} data bytes, the tensors take {}; the file is damaged, fetch it again", data_bytes, covered);
  }
  out.name_ = std::move(name);
  out.bytes_ = std::move(bytes);
  return out;
}

SafeTensors load_safetensors(const std::string& path) {
  const InputFile file(path);
  if (file.bytes() > kMaxFileBytes)
    fail(path, "{} bytes, at most {} are read; split the file", file.bytes(), kMaxFileBytes);
  std::vector<std::byte> bytes(file.bytes());
  if (file.read(bytes.data(), file.bytes()) != file.bytes())
    fail(path, "gave fewer than its {} bytes; fetch it again", file.bytes());
  return parse_safetensors(std::move(bytes), path);
}

}  // namespace kv4::checks
