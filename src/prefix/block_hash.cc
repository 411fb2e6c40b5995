#include "prefix/block_hash.h"

#include <fmt/ranges.h>
#include <openssl/evp.h>

#include <bit>
#include <utility>

#include "base/check.h"
#include "schema/layout_text.h"
#include "schema/rope.h"

namespace kv4 {

static_assert(std::endian::native == std::endian::little, "token ids are hashed as they lie in memory");

/// One hash at a time: begin, add ..., end. A value of variable length follows its length.
struct BlockHasher::Engine {
  EVP_MD* algorithm = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  EVP_MD_CTX* context = EVP_MD_CTX_new();

  ~Engine() {
    EVP_MD_CTX_free(context);
    EVP_MD_free(algorithm);
  }
  static void check(int result) { require(result == 1, ErrorCode::bad_state, "OpenSSL cannot compute SHA-256"); }

  void begin(std::string_view purpose) {
    check(EVP_DigestInit_ex2(context, algorithm, nullptr));
    add(purpose.data(), purpose.size());
  }
  void add(const void* bytes, std::size_t size) { check(EVP_DigestUpdate(context, bytes, size)); }
  void add_number(std::uint64_t value) { add(&value, sizeof value); }
  void add_counted(const void* bytes, std::size_t size) {
    add_number(size);
    add(bytes, size);
  }
  Sha256 end() {
    Sha256 out;
    check(EVP_DigestFinal_ex(context, out.data(), nullptr));
    return out;
  }
};

BlockHasher::BlockHasher() : engine_(std::make_unique<Engine>()) {
  require(engine_->algorithm != nullptr && engine_->context != nullptr, ErrorCode::bad_state,
          "OpenSSL offers no SHA-256; keys of blocks need it");
}
BlockHasher::~BlockHasher() = default;

BlockKey BlockHasher::root(const ChainIdentity& identity) {
  engine_->begin("kv4root\n");
  engine_->add_number(kCacheFormatVersion);
  engine_->add(identity.config_digest.data(), identity.config_digest.size());
  engine_->add(identity.rope_digest.data(), identity.rope_digest.size());
  engine_->add(identity.layout_digest.data(), identity.layout_digest.size());
  engine_->add_counted(identity.weights_id.data(), identity.weights_id.size());
  engine_->add_counted(identity.tenant_salt.data(), identity.tenant_salt.size());
  return engine_->end();
}

BlockKey BlockHasher::block(const BlockKey& parent, std::span<const std::int32_t> token_ids,
                            std::span<const std::byte> extra) {
  engine_->begin("kv4block");
  engine_->add(parent.data(), parent.size());
  engine_->add_counted(token_ids.data(), token_ids.size_bytes());
  engine_->add_counted(extra.data(), extra.size());
  return engine_->end();
}

BlockKey BlockHasher::snapshot(const BlockKey& block_key) {
  static constexpr std::string_view kWhat = "kv4 snapshot";
  return block(block_key, {}, std::as_bytes(std::span(kWhat)));
}

Sha256 BlockHasher::digest(std::string_view bytes) {
  engine_->begin(bytes);
  return engine_->end();
}

std::string to_hex(const BlockKey& key) {
  std::string out;
  for (const std::uint8_t byte : key) out += fmt::format("{:02x}", byte);
  return out;
}

Sha256 digest_config(const ModelConfig& c) {
  std::string text = fmt::format(
      "kv4 config 1\nheads {} head {} rope {} window {}\nindex heads {} width {} topk {}\nratios {} {} eps {}\nlayers",
      c.num_query_heads, c.head_dim, c.rope_dim, c.window, c.index_heads, c.index_dim, c.index_topk, c.csa_ratio,
      c.hca_ratio, c.rms_eps);
  for (const LayerKind kind : c.kinds) text += fmt::format(" {}", to_string(kind));
  if (c.shares_entries()) {
    const EntrySharing& sharing = c.sharing;
    text += fmt::format("\nratios {}\nowners {}\nindex sources {}\ncandidates {} {} {}", fmt::join(sharing.ratios, " "),
                        fmt::join(sharing.owners, " "), fmt::join(sharing.index_sources, " "),
                        sharing.candidate_source, sharing.candidate_block_size, sharing.candidate_topk_blocks);
  }
  return BlockHasher().digest(text);
}

Sha256 digest_rope(const ModelConfig& config) {
  std::string bytes;
  for (const RopeSpec* rope : {&config.rope_main, &config.rope_compress}) {
    const std::vector<double> frequencies = rope_frequencies(*rope, config.rope_dim);
    bytes.append(reinterpret_cast<const char*>(frequencies.data()), frequencies.size() * sizeof(double));
  }
  return BlockHasher().digest(bytes);
}

ChainIdentity identify_chain(const CacheSchema& schema, std::string weights_id, std::string tenant_salt) {
  return {.config_digest = digest_config(schema.config),
          .rope_digest = digest_rope(schema.config),
          .layout_digest = BlockHasher().digest(describe_layout(schema)),
          .weights_id = std::move(weights_id),
          .tenant_salt = std::move(tenant_salt)};
}

}  // namespace kv4
