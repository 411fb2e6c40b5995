// Keys against values of another implementation, and every input that must change them.
#include "prefix/block_hash.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace {

using kv4::BlockHasher;
using kv4::BlockKey;
using kv4::ChainIdentity;
using kv4::to_hex;

std::vector<std::int32_t> tokens(std::int32_t first) {
  std::vector<std::int32_t> out(128);
  std::iota(out.begin(), out.end(), first);
  return out;
}

ChainIdentity example() {
  BlockHasher hasher;
  return {.config_digest = hasher.digest("config"),
          .rope_digest = hasher.digest("rope"),
          .layout_digest = hasher.digest("layout"),
          .weights_id = "weights-1",
          .tenant_salt = "tenant"};
}

// Python's hashlib over the tables of docs/formats.md:
//   def counted(b): return struct.pack('<Q', len(b)) + b
//   d = lambda t: hashlib.sha256(t).digest()
//   root = d(b'kv4root\n' + struct.pack('<Q', 1) + d(b'config') + d(b'rope') + d(b'layout')
//            + counted(b'weights-1') + counted(b'tenant'))
//   first = d(b'kv4block' + root + counted(struct.pack('<128i', *range(128))) + counted(b''))
//   second = d(b'kv4block' + first + counted(struct.pack('<128i', *range(-64, 64))) + counted(b'lora-7'))
TEST(BlockHash, EqualsHashlib) {
  BlockHasher hasher;
  const BlockKey root = hasher.root(example());
  EXPECT_EQ(to_hex(root), "0d1467d08a6da30e0fea8955329f2a260c6543a9e5489c3f1bed56be9f345b15");
  const BlockKey first = hasher.block(root, tokens(0));
  EXPECT_EQ(to_hex(first), "bf74843182184b76b49b40efb59081efb388794a2f5933c18d7268d40c1e43cc");
  const std::string extra = "lora-7";
  EXPECT_EQ(to_hex(hasher.block(first, tokens(-64), std::as_bytes(std::span(extra)))),
            "9e4466e24670fda32b921b83b9b5ae60d2132b175cfc55968d6e6c6c3ac87bbf");
}

TEST(BlockHash, EveryPartOfTheRootCounts) {
  BlockHasher hasher;
  std::set<BlockKey> roots;
  const auto add = [&](auto&& change) {
    ChainIdentity identity = example();
    change(identity);
    EXPECT_TRUE(roots.insert(hasher.root(identity)).second);
  };
  add([](ChainIdentity&) {});
  add([](ChainIdentity& i) { i.config_digest[31] ^= 1; });
  add([](ChainIdentity& i) { i.rope_digest[0] ^= 1; });
  add([](ChainIdentity& i) { i.layout_digest[7] ^= 1; });
  add([](ChainIdentity& i) { i.weights_id = "weights-2"; });
  add([](ChainIdentity& i) { i.tenant_salt = "tenant2"; });
  add([](ChainIdentity& i) { i.tenant_salt.clear(); });
  // The same letters, divided differently.
  add([](ChainIdentity& i) { i.weights_id = "weights-1t", i.tenant_salt = "enant"; });
}

TEST(BlockHash, EveryPartOfABlockCounts) {
  BlockHasher hasher;
  const BlockKey root = hasher.root(example());
  std::set<BlockKey> keys;
  const auto add = [&](const BlockKey& parent, const std::vector<std::int32_t>& ids, const std::string& extra) {
    EXPECT_TRUE(keys.insert(hasher.block(parent, ids, std::as_bytes(std::span(extra)))).second);
  };
  add(root, tokens(0), "");
  add(hasher.block(root, tokens(0)), tokens(0), "");
  for (std::size_t i = 0; i < 128; ++i) {
    std::vector<std::int32_t> changed = tokens(0);
    changed[i] ^= 1 << (i % 32);
    add(root, changed, "");
  }
  add(root, tokens(0), "a");
  add(root, tokens(0), std::string("\0", 1));
  // Token bytes moved over to the extra bytes.
  std::vector<std::int32_t> shorter = tokens(0);
  shorter.pop_back();
  add(root, shorter, std::string("\x7f\0\0\0", 4));
}

TEST(BlockHash, IdentityFollowsTheSchema) {
  const kv4::ModelConfig flash = kv4::model_preset("v4-flash");
  const auto root = [](const kv4::ModelConfig& config, const kv4::CacheOptions& options) {
    return BlockHasher().root(identify_chain(build_schema(config, options), "w", "s"));
  };
  const kv4::CacheOptions plain;
  const BlockKey key = root(flash, plain);

  kv4::CacheOptions same = plain;  // the place of the bytes does not matter
  same.arrangement = kv4::Arrangement::layer_major;
  same.page_alignment = 576;
  same.max_rewind_tokens = 3;
  same.hca_mode = kv4::HcaMode::raw;
  EXPECT_EQ(root(flash, same), key);

  std::set<BlockKey> keys{key};
  const auto differs = [&](const kv4::ModelConfig& config, const kv4::CacheOptions& options) {
    EXPECT_TRUE(keys.insert(root(config, options)).second);
  };
  kv4::CacheOptions other = plain;
  other.row_format = kv4::Format::bf16;
  differs(flash, other);
  other = plain;
  other.hadamard = false;
  differs(flash, other);
  differs(kv4::model_preset("v4-pro"), plain);
  kv4::ModelConfig changed = flash;  // not in the layout, but later layers' inputs depend on it
  changed.index_topk /= 2;
  differs(changed, plain);
  changed = flash;
  changed.rope_compress.theta *= 2;
  differs(changed, plain);
}

}  // namespace
