#include "kv4/session.h"

#include <algorithm>
#include <map>
#include <memory>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/internal_key.h"
#include "cache/cache_call.h"
#include "cache/manager_impl.h"
#include "cache/session_file.h"
#include "cache/session_format.h"
#include "schema/layout_text.h"

namespace kv4 {
namespace {

using tier::kRecordHeaderBytes;

std::int64_t block_record_bytes(const CacheSchema& schema) { return kRecordHeaderBytes + schema.block_image_bytes; }

/// "'rows bf16 keys mxfp4 ...' there, 'rows fp8_tile64 ...' here": the first line that differs.
std::string first_difference(std::string_view there, std::string_view here) {
  const auto line = [](std::string_view& text) {
    const std::string_view first = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), first.size() + 1));
    return first;
  };
  for (;;) {
    const std::string_view a = line(there), b = line(here);
    if (a != b || (there.empty() && here.empty()))
      return fmt::format("'{}' there, '{}' here", a.substr(0, 200), b.substr(0, 200));
  }
}

/// Throws unless the session's identities fit this cache.
void check_identity(const SessionParts& parts, const CacheSchema& schema, const SessionIdentity& identity) {
  const std::string layout = describe_layout(schema);
  require(parts.layout == layout, ErrorCode::bad_file, "the session is of another layout: {}",
          first_difference(parts.layout, layout));
  const ChainIdentity here = identify_chain(schema, identity.weights_id, identity.salt);
  require(parts.config_digest == here.config_digest, ErrorCode::bad_file,
          "the session is of another model: the digest of its config is {}, this cache's is {}",
          to_hex(parts.config_digest), to_hex(here.config_digest));
  require(parts.rope_digest == here.rope_digest, ErrorCode::bad_file,
          "the session is of other rope frequencies: their digest is {}, this cache's is {}", to_hex(parts.rope_digest),
          to_hex(here.rope_digest));
  require(parts.weights_id == identity.weights_id, ErrorCode::bad_file,
          "the session is of other weights: '{}' there, '{}' here", parts.weights_id.substr(0, 200),
          identity.weights_id);
  require(parts.root == BlockHasher().root(here), ErrorCode::bad_file, "the session has another salt");
}

}  // namespace

// --- out
// ---------------------------------------------------------------------------------------------------------------------

struct SessionSender::Impl {
  KVCacheManager& manager;
  RequestId request;
  std::uint64_t tenant;
  std::shared_ptr<const tier::RecordGuard> guard;
  std::vector<std::int32_t> token_ids;
  std::vector<BlockKey> keys;             // of the full blocks
  std::map<BlockKey, std::size_t> found;  // the same keys' places
  std::vector<std::byte> own_record;

  Impl(KVCacheManager& manager_in, RequestId request_in, const SessionIdentity& identity)
      : manager(manager_in),
        request(request_in),
        tenant(identity.tenant),
        guard(session_guard(identity)),
        token_ids(manager.token_ids(request)) {
    const CacheSchema& schema = manager.schema();
    require(schema.block_image_bytes <= kMaxSessionRecordBytes, ErrorCode::bad_argument,
            "a block of this cache has {} bytes; a session's record has at most {}: make block_tokens ({}) smaller",
            schema.block_image_bytes, kMaxSessionRecordBytes, schema.block_tokens);
    const RequestTable& table = manager.impl(InternalKey()).table;
    const PrefixChain& mark = table[table.row_of(request)].chain;
    require(!mark.approximate && !mark.narrowed, ErrorCode::bad_state,
            "request {} {}, so its bytes are not those of a cold run, and a session would keep them under the keys of "
            "one; preempt it, or compute it without",
            request, mark.approximate ? "was resumed by a bounded replay" : "has a narrowed prefill");
    const CanonicalImage image = manager.export_image(request);
    const std::string layout = describe_layout(schema);
    const ChainIdentity chain = identify_chain(schema, identity.weights_id, identity.salt);
    BlockHasher hasher;

    SessionParts parts;
    parts.block_tokens = static_cast<std::uint32_t>(schema.block_tokens);
    parts.config_digest = chain.config_digest;
    parts.rope_digest = chain.rope_digest;
    parts.root = hasher.root(chain);
    parts.lengths = image.lengths;
    parts.weights_id = identity.weights_id;
    parts.layout = layout;
    require(static_cast<std::int64_t>(identity.block_extra.size()) <= parts.full_blocks(), ErrorCode::bad_argument,
            "extra bytes for {} full blocks; the request has {}", identity.block_extra.size(), parts.full_blocks());
    parts.block_extra.assign(identity.block_extra.begin(), identity.block_extra.end());
    parts.token_ids = std::as_bytes(std::span(token_ids));
    parts.image = image.bytes;
    std::vector<std::byte> open_block;
    if (const std::int64_t tokens = parts.lengths[0] % schema.block_tokens; tokens > 0) {
      open_block.resize(schema.block_image_bytes);
      manager.kv_pool().save_block(manager.blocks(request).back(), static_cast<int>(tokens), open_block);
    }
    parts.open_block = open_block;

    keys = chain_keys(hasher, parts, token_ids);
    for (std::size_t i = 0; i < keys.size(); ++i) found.emplace(keys[i], i);
    // At a boundary the image itself is a snapshot.
    std::vector<std::byte> snapshot;
    if (const auto kept = keys.empty() || open_block.empty() ? std::nullopt : manager.find_block(keys.back());
        kept && kept->has_snapshot) {
      snapshot.resize(manager.snapshot_bytes());
      manager.read_snapshot(keys.back(), snapshot);
    }
    parts.snapshot = snapshot;
    const std::vector<std::byte> payload = encode_session(parts);
    own_record.resize(kRecordHeaderBytes);
    own_record.insert(own_record.end(), payload.begin(), payload.end());
    finish_record(*guard, header(session_key(hasher, parts, token_ids), 0), own_record);
  }

  /// `number`: the record's place in the session; the session's own record has 0.
  tier::RecordHeader header(const BlockKey& key, std::size_t number) const {
    tier::RecordHeader out;
    out.layout_id = manager.schema().layout_id;
    out.id = {tenant, record_key(key)};
    out.sequence = number;
    return out;
  }

  std::int64_t all_bytes() const {
    return static_cast<std::int64_t>(own_record.size()) +
           static_cast<std::int64_t>(keys.size()) * block_record_bytes(manager.schema());
  }

  /// Throws unless the blocks are still those of the keys.
  void check_unchanged() const {
    const std::vector<std::int32_t> now = manager.token_ids(request);
    const std::size_t tokens = keys.size() * manager.schema().block_tokens;
    require(now.size() >= tokens &&
                std::equal(now.begin(), now.begin() + static_cast<std::ptrdiff_t>(tokens), token_ids.begin()),
            ErrorCode::bad_state, "request {} was rewound into the {} tokens that are being sent", request, tokens);
  }
};

SessionSender::SessionSender(KVCacheManager& manager, RequestId request, const SessionIdentity& identity) try {
  const CacheCall call(manager);
  impl_ = std::make_unique<Impl>(manager, request, identity);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}
SessionSender::SessionSender(SessionSender&&) noexcept = default;
SessionSender::~SessionSender() = default;

const std::vector<BlockKey>& SessionSender::keys() const { return impl_->keys; }

void SessionSender::offer(RecordSink& sink) const try {
  const CacheCall call(impl_->manager);
  sink.write(impl_->own_record);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

bool SessionSender::send(std::span<const BlockKey> wanted, RecordSink& sink, const SessionProgress& progress) try {
  const Impl& s = *impl_;
  const CacheCall call(s.manager);
  for (const BlockKey& key : wanted)
    require(s.found.contains(key), ErrorCode::bad_argument, "block {} is not of request {}", to_hex(key), s.request);
  s.check_unchanged();
  const CacheSchema& schema = s.manager.schema();
  const std::vector<BlockId> blocks = s.manager.blocks(s.request);
  std::vector<std::byte> record(block_record_bytes(schema));
  // Blocks that were not asked for count as done.
  std::int64_t done = s.all_bytes() - static_cast<std::int64_t>(wanted.size() * record.size());
  if (progress && !progress(done, s.all_bytes())) return false;
  for (const BlockKey& key : wanted) {
    const std::size_t i = s.found.at(key);
    s.manager.kv_pool().save_block(blocks[i], schema.block_tokens, std::span(record).subspan(kRecordHeaderBytes));
    finish_record(*s.guard, s.header(key, i + 1), record);
    sink.write(record);
    done += static_cast<std::int64_t>(record.size());
    if (progress && !progress(done, s.all_bytes())) return false;
  }
  return true;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

bool write_session(KVCacheManager& manager, RequestId request, const SessionIdentity& identity, RecordSink& sink,
                   const SessionProgress& progress) {
  const CacheCall call(manager);
  SessionSender sender(manager, request, identity);
  sender.offer(sink);
  return sender.send(sender.keys(), sink, progress);
}

bool save_session(KVCacheManager& manager, RequestId request, const SessionIdentity& identity, RecordSink& sink,
                  const SessionProgress& progress) {
  const TimedCall call(manager, &CallTimes::session_save);
  return write_session(manager, request, identity, sink, progress);
}

// --- in
// ----------------------------------------------------------------------------------------------------------------------

struct SessionReceiver::Impl {
  KVCacheManager& manager;
  const SessionIdentity identity;
  const std::shared_ptr<const tier::RecordGuard> guard;
  BlockSource* source;
  std::int64_t num_taken = 0;
  std::vector<std::byte> memory;  // of a sealed record's payload, while it is taken

  std::vector<std::vector<std::byte>> early;  // blocks' records that came before the session's own

  // Set when the offer comes:
  std::vector<std::byte> payload;  // of the session's own record
  SessionParts parts;              // views of it
  std::vector<std::int32_t> token_ids;
  std::vector<BlockKey> keys;             // of the full blocks
  std::map<BlockKey, std::size_t> found;  // the same, by key
  std::vector<std::string_view> extra;    // of the first of them
  enum class Where : std::uint8_t { missing, kept, here };
  std::vector<Where> where;             // [full blocks] kept: by the cache when it was last asked
  std::unique_ptr<std::byte[]> blocks;  // [blocks, block_image_bytes], the open one last
  bool finished = false;

  Impl(KVCacheManager& manager_in, SessionIdentity identity_in, BlockSource* source_in)
      : manager(manager_in), identity(std::move(identity_in)), guard(session_guard(identity)), source(source_in) {}

  std::size_t image_bytes() const { return manager.schema().block_image_bytes; }
  std::span<std::byte> block(std::size_t i) const { return {blocks.get() + i * image_bytes(), image_bytes()}; }
  std::size_t num_blocks() const { return keys.size() + !parts.open_block.empty(); }

  void take(std::span<const std::byte> record) {
    require(!finished, ErrorCode::bad_state, "the session was restored already; take another receiver for another one");
    const auto [header, body] = open_record(*guard, record, memory);
    require(header.id.tenant == identity.tenant, ErrorCode::bad_file,
            "it is tenant {}'s, and was asked for as tenant {}'s", header.id.tenant, identity.tenant);
    if (is_session(body))
      take_own(header, body);
    else if (payload.empty())
      keep_early(body.size(), record);
    else
      take_block(header, body);
  }

  void take_own(const tier::RecordHeader& header, std::span<const std::byte> body) {
    if (!payload.empty()) {
      require(std::equal(body.begin(), body.end(), payload.begin(), payload.end()), ErrorCode::bad_file,
              "it is of another session than the one before");
      return;
    }
    Impl next(manager, identity, source);
    next.open(header, body);
    // Earlier records that do not fit are refused now, and the session with them.
    for (const std::vector<std::byte>& record : early) {
      const auto [block_header, block_body] = open_record(*guard, record, next.memory);
      next.take_block(block_header, block_body);
    }
    next.look_for_kept();
    next.ask_source();
    adopt(std::move(next));
  }

  void open(const tier::RecordHeader& header, std::span<const std::byte> body) {
    const CacheSchema& schema = manager.schema();
    payload.assign(body.begin(), body.end());
    parts = parse_session(payload);
    check_identity(parts, schema, identity);
    require(header.layout_id == schema.layout_id, ErrorCode::bad_file,
            "its header says layout {:016x}, the session is of {:016x}", header.layout_id, schema.layout_id);
    const std::int64_t bytes = kv4::image_bytes(schema, parts.lengths);  // throws if they exceed max_context
    require(static_cast<std::int64_t>(parts.image.size()) == bytes, ErrorCode::bad_file,
            "the session's image has {} bytes; one of {} tokens has {}", parts.image.size(), parts.lengths[0], bytes);
    const std::size_t open_bytes = parts.lengths[0] % schema.block_tokens != 0 ? image_bytes() : 0;
    require(static_cast<int>(parts.block_tokens) == schema.block_tokens && parts.open_block.size() == open_bytes,
            ErrorCode::bad_file, "the session's open block has {} bytes; one of {} tokens has {}",
            parts.open_block.size(), parts.lengths[0], open_bytes);
    require(parts.snapshot.empty() || (static_cast<std::int64_t>(parts.snapshot.size()) == manager.snapshot_bytes() &&
                                       parts.full_blocks() > 0),
            ErrorCode::bad_file, "the session's snapshot has {} bytes after {} blocks; one has {}",
            parts.snapshot.size(), parts.full_blocks(), manager.snapshot_bytes());

    BlockHasher hasher;
    token_ids = token_ids_of(parts);
    require(block_key(header.id.key) == session_key(hasher, parts, token_ids), ErrorCode::bad_file,
            "its key is not that of its tokens");
    keys = chain_keys(hasher, parts, token_ids);
    for (std::size_t i = 0; i < keys.size(); ++i) found.emplace(keys[i], i);
    for (const std::span<const std::byte> one : parts.block_extra)
      extra.emplace_back(reinterpret_cast<const char*>(one.data()), one.size());
    where.assign(keys.size(), Where::missing);
    try {
      blocks = std::make_unique_for_overwrite<std::byte[]>(num_blocks() * image_bytes());
    } catch (const std::bad_alloc&) {
      fail(ErrorCode::out_of_memory, "the machine refused the memory for the session's {} blocks, {} bytes",
           num_blocks(), num_blocks() * image_bytes());
    }
    if (!parts.open_block.empty())
      std::copy(parts.open_block.begin(), parts.open_block.end(), block(keys.size()).begin());
  }

  void keep_early(std::size_t payload_bytes, std::span<const std::byte> record) {
    require(std::ssize(early) < manager.schema().blocks_per_request, ErrorCode::bad_file,
            "{} records came before the session's own; send that one first", early.size());
    require(payload_bytes == image_bytes(), ErrorCode::bad_file,
            "it is neither a session's nor a block's of this cache");
    early.emplace_back(record.begin(), record.end());
  }

  void take_block(const tier::RecordHeader& header, std::span<const std::byte> body) {
    const BlockKey key = block_key(header.id.key);
    const auto at = found.find(key);
    require(at != found.end(), ErrorCode::bad_file, "block {} is not of this session", to_hex(key));
    require(header.layout_id == manager.schema().layout_id && body.size() == image_bytes(), ErrorCode::bad_file,
            "block {} is {} bytes of layout {:016x}; this cache has {} of {:016x}", to_hex(key), body.size(),
            header.layout_id, image_bytes(), manager.schema().layout_id);
    const std::span<std::byte> place = block(at->second);
    if (where[at->second] == Where::here) {
      require(std::equal(body.begin(), body.end(), place.begin()), ErrorCode::bad_file,
              "block {} came before with other bytes", to_hex(key));
      return;
    }
    std::copy(body.begin(), body.end(), place.begin());
    where[at->second] = Where::here;
  }

  void ask_source() {
    if (source == nullptr) return;
    for (std::size_t i = 0; i < keys.size(); ++i)
      if (where[i] == Where::missing && source->get(keys[i], block(i))) where[i] = Where::here;
  }

  Prompt prompt() const { return {token_ids, identity.share_of, identity.salt, extra}; }

  /// {} if the cache would keep the session's blocks under other keys: it has other weights or its own rope table.
  PrefixIdentity chain() {
    PrefixIdentity name = manager.identify_prefix(prompt());
    return name.root == parts.root ? name : PrefixIdentity{};
  }

  void look_for_kept() {
    const bool keeps = chain().weights_generation != 0;
    for (std::size_t i = 0; i < keys.size(); ++i)
      if (where[i] != Where::here) where[i] = keeps && manager.find_block(keys[i]) ? Where::kept : Where::missing;
  }

  std::int64_t num_missing() const { return std::count(where.begin(), where.end(), Where::missing); }

  void adopt(Impl&& next) {
    payload = std::move(next.payload);  // the views of `parts` stay valid: a moved vector keeps its memory
    parts = std::move(next.parts);
    token_ids = std::move(next.token_ids);
    keys = std::move(next.keys);
    found = std::move(next.found);
    extra = std::move(next.extra);
    where = std::move(next.where);
    blocks = std::move(next.blocks);
    early.clear();
  }
};

SessionReceiver::SessionReceiver(KVCacheManager& manager, SessionIdentity identity, BlockSource* blocks) try
    : impl_(std::make_unique<Impl>(manager, std::move(identity), blocks)) {
} catch (const std::bad_alloc&) {
  fail_for_memory();
}
SessionReceiver::SessionReceiver(SessionReceiver&&) noexcept = default;
SessionReceiver::~SessionReceiver() = default;

void SessionReceiver::take(std::span<const std::byte> record) try {
  const CacheCall call(impl_->manager);
  try {
    impl_->take(record);
  } catch (const Error& e) {
    fail(e.code(), "record {} of a session: {}", impl_->num_taken, e.what());
  }
  ++impl_->num_taken;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

bool SessionReceiver::has_offer() const {
  const CacheCall call(impl_->manager);
  return !impl_->payload.empty();
}

Prompt SessionReceiver::prompt() const {
  const CacheCall call(impl_->manager);
  return has_offer() ? impl_->prompt() : Prompt{};
}

std::vector<BlockKey> SessionReceiver::wanted() const try {
  const CacheCall call(impl_->manager);
  if (has_offer()) impl_->look_for_kept();
  std::vector<BlockKey> out;
  for (std::size_t i = 0; i < impl_->keys.size(); ++i)
    if (impl_->where[i] == Impl::Where::missing) out.push_back(impl_->keys[i]);
  return out;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

std::int64_t SessionReceiver::done_bytes() const {
  const Impl& r = *impl_;
  const CacheCall call(r.manager);
  if (r.payload.empty()) return 0;
  return kRecordHeaderBytes + static_cast<std::int64_t>(r.payload.size()) +
         (std::ssize(r.keys) - r.num_missing()) * block_record_bytes(r.manager.schema());
}

std::int64_t SessionReceiver::total_bytes() const {
  const Impl& r = *impl_;
  const CacheCall call(r.manager);
  return done_bytes() + r.num_missing() * block_record_bytes(r.manager.schema());
}

Expected<RequestId> SessionReceiver::finish() try {
  Impl& r = *impl_;
  const CacheCall call(r.manager);
  require(!r.finished, ErrorCode::bad_state, "the session was restored already");
  require(has_offer(), ErrorCode::bad_file, "the session's own record is missing");
  if (const std::vector<BlockKey> missing = wanted(); !missing.empty())
    fail(ErrorCode::bad_file, "{} of the session's {} full blocks are missing; the first is block {}, key {}",
         missing.size(), r.keys.size(), r.found.at(missing[0]), to_hex(missing[0]));
  const ImageView image(r.manager.schema().layout_id, r.parts.lengths, r.parts.image);
  std::vector<std::span<const std::byte>> blocks;
  for (std::size_t i = 0; i < r.num_blocks(); ++i) {
    const bool kept = i < r.keys.size() && r.where[i] == Impl::Where::kept;
    blocks.push_back(kept ? std::span<std::byte>{} : r.block(i));
  }
  const PrefixIdentity chain = r.chain();
  const Expected<RequestId> request = r.manager.import_image(image, r.token_ids, blocks, chain);
  r.finished = static_cast<bool>(request);
  // Without a place for it, a later prompt resumes at an earlier snapshot.
  if (r.finished && chain.weights_generation != 0 && !r.parts.snapshot.empty())
    (void)r.manager.insert_snapshot(r.keys.back(), r.parts.snapshot);
  return request;
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

Expected<RequestId> read_session(KVCacheManager& manager, const SessionIdentity& identity, RecordSource& source,
                                 const SessionProgress& progress) {
  const CacheCall call(manager);
  SessionReceiver receiver(manager, identity);
  for (std::span<const std::byte> record = source.next(); !record.empty(); record = source.next()) {
    receiver.take(record);
    if (progress && receiver.has_offer() && !progress(receiver.done_bytes(), receiver.total_bytes()))
      return Shortage::cancelled;
  }
  return receiver.finish();
}

Expected<RequestId> restore_session(KVCacheManager& manager, const SessionIdentity& identity, RecordSource& source,
                                    const SessionProgress& progress) try {
  const TimedCall call(manager, &CallTimes::session_restore);
  return read_session(manager, identity, source, progress);
} catch (const std::bad_alloc&) {
  fail_for_memory();
}

}  // namespace kv4
