// The tool's decoding of sessions of unknown origin, with digests that fit.
#include "checks/session_rows.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "cache/session_records.h"
#include "schema/image_layout.h"
#include "schema/layout_text.h"

namespace kv4::test {
namespace {

using checks::DecodedRow;
using checks::read_session_rows;

constexpr std::int64_t kTokens = 19;  // two blocks of 8 and an open one of 3

CacheSchema schema_of_two_layers() {
  ModelConfig config;
  config.num_layers = 2;
  config.num_query_heads = config.index_heads = config.index_topk = 1;
  config.index_dim = config.head_dim = 16;
  config.kinds = {LayerKind::swa, LayerKind::hca};
  config.hca_ratio = config.rope_dim = config.window = 8;
  CacheOptions options;
  options.row_format = Format::bf16;
  options.max_requests = 1;
  options.block_tokens = 8;
  config.max_positions = options.max_context = 1 << 20;
  return build_schema(config, options);
}

/// A session without its full blocks, as a file.
struct Forged {
  const CacheSchema schema = schema_of_two_layers();
  const std::string layout = describe_layout(schema);
  std::vector<std::byte> image, open_block, token_ids;
  SessionParts parts;
  std::string path =
      (std::filesystem::temp_directory_path() / ("kv4_forged_" + std::to_string(::getpid()) + ".kv4s")).string();

  explicit Forged(std::int64_t tokens = kTokens) : open_block(static_cast<std::size_t>(schema.block_image_bytes)) {
    parts.block_tokens = 8;
    parts.lengths = {tokens};
    parts.weights_id = "w";
    parts.layout = layout;
    image.resize(static_cast<std::size_t>(image_layout(schema, parts.lengths).bytes));
    token_ids.resize(4 * static_cast<std::size_t>(tokens));
    parts.token_ids = token_ids;
    parts.image = image;
    parts.open_block = open_block;
  }
  Forged(const Forged&) = delete;
  Forged& operator=(const Forged&) = delete;
  ~Forged() { std::filesystem::remove(path); }

  checks::SessionContents read() const {
    std::vector<std::byte> record(static_cast<std::size_t>(tier::kRecordHeaderBytes));
    const std::vector<std::byte> payload = encode_session(parts);
    record.insert(record.end(), payload.begin(), payload.end());
    tier::RecordHeader header;
    header.layout_id = schema.layout_id;
    BlockHasher hasher;
    header.id.key = record_key(session_key(hasher, parts, token_ids_of(parts)));
    finish_record(tier::RecordGuard(), header, record);
    record.resize(static_cast<std::size_t>(tier::whole_blocks(std::ssize(record))));
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(record.data()), static_cast<std::streamsize>(record.size()));
    return read_session_rows(path, {}, [&](const DecodedRow& row) {
      for (const float value : row.values) EXPECT_EQ(value, 0.0f);
    });
  }
  void refused(const std::string& words) const {
    try {
      (void)read();
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_file);
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  }
};

TEST(SessionRows, OneAsItIsWritten) {
  const checks::SessionContents contents = Forged().read();
  EXPECT_EQ(contents.lengths, std::vector<std::int64_t>{kTokens});
  EXPECT_EQ(contents.missing_blocks, 2);
}

// The decoder once took the open block's tokens from the session and read past the end of its bytes.
TEST(SessionRows, BlocksOfAnotherSizeThanTheLayouts) {
  Forged forged(1'000'003);
  for (const std::uint32_t tokens : {7u, 9u, 16u, 1'000'000u, 4'000'000u}) {
    forged.parts.block_tokens = tokens;
    forged.refused("a block has " + std::to_string(tokens) + " tokens; its layout says 8");
  }
}

TEST(SessionRows, AnOpenBlockThatIsNone) {
  Forged none;
  none.parts.open_block = {};
  none.refused("open block has 0 bytes; it is to hold the last 3 of 19 tokens");
  Forged whole(16);
  whole.refused("open block has " + std::to_string(whole.open_block.size()) + " bytes; it is to hold the last 0 of 16");
  Forged shorter;
  shorter.open_block.pop_back();
  shorter.parts.open_block = shorter.open_block;
  shorter.refused("its layout says");
}

TEST(SessionRows, ALongLineIsNotRepeated) {
  const std::string good = Forged().layout, filler(1 << 19, 'y');
  const std::size_t rows = good.find("rows bf16"), last = good.rfind("layer 1");
  ASSERT_TRUE(rows != std::string::npos && last != std::string::npos);
  const std::string layouts[] = {good + "x" + filler + "\n", filler + good,
                                 good.substr(0, rows + 5) + filler + good.substr(rows + 9),
                                 good.substr(0, last) + good.substr(last, good.size() - last - 1) + filler + "\n"};
  for (const std::string& layout : layouts) {
    Forged forged;
    forged.parts.layout = layout;
    try {
      (void)forged.read();
      ADD_FAILURE() << "not refused";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("yyyy"), std::string::npos) << e.what();
      EXPECT_LT(std::string(e.what()).size(), 600u);
    }
  }
}

}  // namespace
}  // namespace kv4::test
