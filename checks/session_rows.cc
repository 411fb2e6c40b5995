#include "checks/session_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/group.h"
#include "base/input_file.h"
#include "cache/session_file.h"
#include "codec/codec.h"
#include "schema/image_layout.h"
#include "schema/layout_text.h"

namespace kv4::checks {
namespace {

/// The rows of one kind in a range of bytes.
struct Rows {
  const RowSchema& row;
  std::span<const std::byte> payloads, scales;
  float global = 1.0f;
};

class Decoder {
 public:
  explicit Decoder(const std::function<void(const DecodedRow&)>& take) : take_(take) {}

  void row(const Rows& rows, std::int64_t number, DecodedRow out) {
    const RowSchema& schema = rows.row;
    const auto part = [&](std::span<const std::byte> bytes, int size) { return bytes.subspan(number * size, size); };
    const auto payload = part(rows.payloads, schema.payload_bytes);
    const auto scale = part(rows.scales, schema.scale_bytes);
    values_.resize(schema.width);
    codec::with_codec(schema.format, [&](auto codec) {
      codec.decode(OneLane{}, RowShape{schema.width, schema.tail},
                   reinterpret_cast<const std::uint8_t*>(payload.data()),
                   reinterpret_cast<const std::uint8_t*>(scale.data()), rows.global, values_.data());
    });
    out.values = values_;
    take_(out);
  }

  /// Takes unencoded numbers.
  void numbers(std::span<const std::byte> bytes, DType dtype, DecodedRow out) {
    const std::size_t size = dtype == DType::bf16 ? 2 : 4;
    values_.resize(bytes.size() / size);
    for (std::size_t i = 0; i < values_.size(); ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, bytes.data() + i * size, size);
      values_[i] = std::bit_cast<float>(dtype == DType::bf16 ? bits << 16 : bits);
    }
    out.values = values_;
    take_(out);
  }

 private:
  const std::function<void(const DecodedRow&)>& take_;
  std::vector<float> values_;
};

/// Rows of a block image that cover the block's first `tokens` tokens.
void decode_block(Decoder& decoder, const CacheSchema& schema, std::span<const std::byte> image, std::int64_t block,
                  std::int64_t tokens) {
  require(static_cast<std::int64_t>(image.size()) == schema.block_image_bytes, ErrorCode::bad_file,
          "block {} has {} bytes; its layout says {}", block, image.size(), schema.block_image_bytes);
  require(tokens >= 0 && tokens <= schema.block_tokens, ErrorCode::bad_file,
          "block {} has {} tokens; one of its layout has 0 to {}", block, tokens, schema.block_tokens);
  for (const LayerCacheSchema& layer : schema.layers)
    for (const PageSchema& page : layer.pages) {
      const auto bytes = image.first(page.content_bytes);
      image = image.subspan(bytes.size());
      Rows rows{page.row, bytes, bytes.subspan(page.scale_offset)};
      if (page.global_offset >= 0) std::memcpy(&rows.global, bytes.data() + page.global_offset, sizeof(rows.global));
      for (std::int64_t r = 0; r < tokens / page.kind.ratio; ++r) {
        const std::int64_t index = block * page.rows_per_block + r;
        decoder.row(rows, r,
                    {.layer = &layer.spec,
                     .part = page.kind.role == RowRole::entry ? RowPart::entries : RowPart::keys,
                     .index = index,
                     .position = index * page.kind.ratio,
                     .tokens = page.kind.ratio});
      }
    }
}

void decode_pending(Decoder& decoder, const CacheSchema& schema, std::span<const std::byte> image,
                    const PendingPart& part) {
  const LayerCacheSchema& layer = schema.layers[part.layer];
  const PendingSchema& pending = layer.pending[part.kind];
  const RowKind& kind = layer.pages[part.kind].kind;
  const auto rows = [&](std::int64_t at, std::int64_t count, std::int64_t bytes, DType dtype, std::int64_t first) {
    for (std::int64_t r = 0; r < count; ++r)
      decoder.numbers(image.subspan(at + r * bytes, bytes), dtype,
                      {.layer = &layer.spec,
                       .part = kind.role == RowRole::entry ? RowPart::pending : RowPart::pending_keys,
                       .index = first + r,
                       .position = first + r});
  };
  if (kind.overlap) {
    rows(part.previous_at, part.previous_count, pending.row_bytes / 2, pending.dtype,
         part.open_first - part.previous_count);
    rows(part.open_at, part.open_count, pending.row_bytes, pending.dtype, part.open_first);
  } else if (part.open_count > 0) {
    rows(part.open_at, 3, std::int64_t{4} * kind.width, DType::f32, part.open_first);
  }
}

void decode_image(Decoder& decoder, const CacheSchema& schema, std::span<const std::byte> image,
                  std::span<const std::int64_t> lengths) {
  const ImageLayout layout = image_layout(schema, lengths);
  require(static_cast<std::int64_t>(image.size()) == layout.bytes, ErrorCode::bad_file,
          "the image has {} bytes; its layout says {}", image.size(), layout.bytes);
  for (const WindowPart& part : layout.windows) {
    const LayerCacheSchema& layer = schema.layers[part.layer];
    const Rows rows{layer.window.row, image.subspan(part.payload_at), image.subspan(part.scale_at)};
    for (std::int64_t r = 0; r < part.count; ++r)
      decoder.row(rows, r,
                  {.layer = &layer.spec, .part = RowPart::window, .index = part.first + r, .position = part.first + r});
  }
  for (const PendingPart& part : layout.pending) decode_pending(decoder, schema, image, part);
}

/// Checks that the session's blocks match its layout.
void check_blocks(const SessionParts& parts, const CacheSchema& schema) {
  require(std::int64_t{parts.block_tokens} == schema.block_tokens, ErrorCode::bad_file,
          "the session says that a block has {} tokens; its layout says {}", parts.block_tokens, schema.block_tokens);
  const std::int64_t tokens = parts.lengths[0] % schema.block_tokens;
  require(parts.open_block.empty() == (tokens == 0), ErrorCode::bad_file,
          "the session's open block has {} bytes; it is to hold the last {} of {} tokens", parts.open_block.size(),
          tokens, parts.lengths[0]);
}

/// Names the kind of a file by its first bytes.
const char* kind_of_bytes(std::string_view bytes) {
  constexpr std::pair<std::string_view, const char*> kKinds[] = {{"\x1f\x8b", "a gzip file"},
                                                                 {"\x7f"
                                                                  "ELF",
                                                                  "a program or library"},
                                                                 {"\x89PNG", "a PNG image"},
                                                                 {"PK\x03\x04", "a zip archive"},
                                                                 {"%PDF", "a PDF document"},
                                                                 {"KV4SEG", "a segment of a disk store"},
                                                                 {"KV4IDX", "an index of a disk store"}};
  for (const auto& [begin, kind] : kKinds)
    if (bytes.starts_with(begin)) return kind;
  if (bytes.find_first_not_of('\0') == std::string_view::npos) return "a file of zeros";
  const auto is_text = [](unsigned char c) { return c >= 0x20 || c == '\t' || c == '\n' || c == '\r'; };
  if (!std::all_of(bytes.begin(), bytes.end(), is_text)) return "binary data";
  const std::size_t first = bytes.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && (bytes[first] == '{' || bytes[first] == '[') ? "JSON" : "text";
}

/// Reads as many bytes as a record's header has; fewer from a shorter file, none where it cannot be read.
std::string first_bytes(const std::string& path) try {
  const InputFile file(path);
  std::string bytes(tier::kRecordHeaderBytes, '\0');
  bytes.resize(file.read(bytes.data(), static_cast<std::int64_t>(bytes.size())));
  return bytes;
} catch (const Error&) {
  return "";
}

}  // namespace

std::string what_it_is(const std::string& path) {
  const std::string bytes = first_bytes(path);
  if (bytes.empty()) return "";  // reported already
  const tier::RecordRefusal refusal = tier::parse_header(std::as_bytes(std::span(bytes))).refusal;
  if (refusal != tier::RecordRefusal::foreign && refusal != tier::RecordRefusal::too_short) return "";
  return fmt::format("; it is {}, not a session of save_session_file", kind_of_bytes(bytes));
}

std::string what_it_needs(const std::string& path, bool has_keys) {
  const std::string bytes = first_bytes(path);
  const auto [refusal, header] = tier::parse_header(std::as_bytes(std::span(bytes)));
  const bool sealed = refusal == tier::RecordRefusal::none && header.kind == tier::RecordKind::sealed;
  return sealed && !has_keys ? "; give its key with --key-file or KV4_KEY_FILE" : "";
}

SessionContents read_session_rows(const std::string& path, const SessionIdentity& identity,
                                  const std::function<void(const DecodedRow&)>& take, const ReadProgress& progress) {
  require_regular_file(path);
  const auto files = tier::make_posix_file_system({.direct = false});
  SessionFileSource source(*files, path);
  return read_session_rows(source, identity, take, progress);
}

SessionContents read_session_rows(SessionFileSource& source, const SessionIdentity& identity,
                                  const std::function<void(const DecodedRow&)>& take, const ReadProgress& progress) {
  const auto guard = session_guard(identity);
  std::vector<std::byte> memory;
  Decoder decoder(take);
  SessionContents out;
  std::map<BlockKey, std::int64_t> block_of;  // blocks still to come
  {
    const auto [header, payload] = open_record(*guard, source.next(), memory);
    const SessionParts parts = parse_session(payload);
    out.protection = tier::protection_of(header.kind);
    out.authentic = guard->has_keys() && out.protection != Protection::none;
    out.schema = parse_layout(std::string(parts.layout), parts.lengths[0]);
    check_blocks(parts, out.schema);
    out.lengths = parts.lengths;
    out.weights_id = parts.weights_id;
    BlockHasher hasher;
    const std::vector<BlockKey> keys = chain_keys(hasher, parts, token_ids_of(parts));
    for (std::size_t i = 0; i < keys.size(); ++i) block_of.emplace(keys[i], static_cast<std::int64_t>(i));
    decode_image(decoder, out.schema, parts.image, parts.lengths);
    if (!parts.open_block.empty())
      decode_block(decoder, out.schema, parts.open_block, parts.full_blocks(),
                   parts.lengths[0] % out.schema.block_tokens);
  }
  for (std::span<const std::byte> record = source.next(); !record.empty(); record = source.next()) {
    const auto [header, payload] = open_record(*guard, record, memory);
    const auto found = block_of.find(block_key(header.id.key));
    require(found != block_of.end(), ErrorCode::bad_file, "a record before byte {} is no block of this session",
            source.offset());
    decode_block(decoder, out.schema, payload, found->second, out.schema.block_tokens);
    block_of.erase(found);
    if (progress) progress(source.offset(), source.file_bytes());
  }
  out.missing_blocks = static_cast<std::int64_t>(block_of.size());
  return out;
}

}  // namespace kv4::checks
