#include "tier/remote_tier.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/log.h"
#include "tier/redis_cluster.h"

namespace kv4::tier {
namespace {

std::span<const std::byte> bytes_of(const redisReply& reply) {
  return {reinterpret_cast<const std::byte*>(reply.str), reply.len};
}

class RemoteTier final : public Tier {
 public:
  RemoteTier(const RemoteOptions& options, const RedisCluster::Shared& shared)
      : options_(options),
        failures_(shared.failures),
        readers_(options, shared, RedisFailures::Side::reads),
        writers_(options, shared, RedisFailures::Side::writes) {}

  const char* name() const override { return "remote"; }
  void put(std::span<PutRequest> requests, Deadline deadline) override;
  void get(std::span<GetRequest> requests, Deadline deadline) override;
  void exists(std::span<ExistsRequest> requests, Deadline deadline) override;
  void remove(std::span<RemoveRequest> requests, Deadline deadline) override;
  FlushStatus flush(Deadline) override { return FlushStatus::kept; }  // a put is stored when the server has it
  TierStats stats() override;
  TierFailure failure() const override { return failures_->now(); }

 private:
  struct Encoded {
    std::string name;
    std::array<std::byte, kRecordHeaderBytes> header;
    std::unique_ptr<std::byte[]> sealed;  // ciphertext; null: the payload is stored as it is
    std::span<const std::byte> payload;   // as stored
  };

  RedisOperation operation(const std::string& name, std::function<RedisCommand()> command,
                           std::function<bool(const redisReply&)> done) const {
    return {redis_slot(name), std::move(command), std::move(done)};
  }
  /// nullopt: the record could not be protected.
  std::optional<Encoded> encode(const PutRequest& request);
  void take(GetRequest& request, const redisReply& reply);
  /// Parses a stored value; refuses it unless it was put under this id, by a cache of this layout.
  ParsedHeader parse(const RecordId& id, std::span<const std::byte> value) const;
  void note_unauthenticated(RecordRefusal refusal);

  RemoteOptions options_;
  std::shared_ptr<RedisFailures> failures_;
  RedisCluster readers_, writers_;  // connections for gets, and for changes
  // The time, so that sequences also grow over restarts of the process.
  std::uint64_t next_sequence_ =
      static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  std::atomic<std::int64_t> set_aside_records_{0}, unauthenticated_records_{0};
};

std::optional<RemoteTier::Encoded> RemoteTier::encode(const PutRequest& request) {
  RecordHeader header;
  header.layout_id = options_.layout_id;
  header.id = request.id;
  header.set_label(request.label);
  header.length = static_cast<std::int64_t>(request.payload.size());
  header.sequence = next_sequence_++;
  Encoded encoded{redis_name(options_.layout_id, request.id), {}, nullptr, request.payload};
  if (options_.guard->kind() == RecordKind::sealed) {
    encoded.sealed = std::make_unique_for_overwrite<std::byte[]>(request.payload.size());
    encoded.payload = {encoded.sealed.get(), request.payload.size()};
  }
  if (!options_.guard->protect(header, request.payload, {encoded.sealed.get(), encoded.payload.size()}))
    return std::nullopt;
  header.payload_digest = digest128(encoded.payload);
  encode_header(header, encoded.header);
  return encoded;
}

void RemoteTier::put(std::span<PutRequest> requests, Deadline deadline) {
  std::vector<Encoded> encoded;
  std::vector<RedisOperation> operations;
  const std::string ttl_ms = std::to_string(std::chrono::floor<std::chrono::milliseconds>(options_.ttl).count());
  const std::string_view expiry[] = {"PX", ttl_ms};
  const std::span<const std::string_view> more(expiry, options_.ttl > Duration(0) ? std::size(expiry) : 0);
  encoded.reserve(requests.size());
  for (PutRequest& request : requests) {
    const bool fits = static_cast<std::int64_t>(request.payload.size()) <= options_.max_payload_bytes;
    request.status = fits ? PutStatus::failed : PutStatus::too_large;
    if (!fits) continue;
    std::optional<Encoded> made = encode(request);
    if (!made) continue;
    const Encoded& record = encoded.emplace_back(std::move(*made));
    operations.push_back(operation(
        record.name,
        [&record, more] {
          return redis_command({"SET", record.name}, record.header, record.payload, more);
        },
        [&request](const redisReply& reply) {
          if (reply.type == REDIS_REPLY_STATUS) request.status = PutStatus::stored;
          if (reply.type == REDIS_REPLY_ERROR && text_of(reply).starts_with("OOM"))
            request.status = PutStatus::no_space;
          return reply.type == REDIS_REPLY_STATUS;
        }));
  }
  writers_.run(operations, deadline);
}

void RemoteTier::get(std::span<GetRequest> requests, Deadline deadline) {
  std::vector<RedisOperation> operations;
  for (GetRequest& request : requests) {
    request.status = GetStatus::failed;
    request.bytes = 0;
    const std::string key = redis_name(options_.layout_id, request.id);
    operations.push_back(operation(
        key,
        [key] {
          return redis_command({"GET", key});
        },
        [this, &request](const redisReply& reply) {
          take(request, reply);
          return reply.type == REDIS_REPLY_STRING || reply.type == REDIS_REPLY_NIL;
        }));
  }
  readers_.run(operations, deadline);

  operations.clear();
  for (const GetRequest& request : requests) {
    if (request.status != GetStatus::damaged) continue;
    ++set_aside_records_;
    const std::string key = redis_name(options_.layout_id, request.id);
    operations.push_back(operation(
        key,
        [key] {
          return redis_command({"UNLINK", key});
        },
        [](const redisReply& reply) { return reply.type == REDIS_REPLY_INTEGER; }));
  }
  if (!operations.empty()) readers_.run(operations, deadline);
}

ParsedHeader RemoteTier::parse(const RecordId& id, std::span<const std::byte> value) const {
  ParsedHeader parsed = parse_header(value);
  if (parsed.refusal != RecordRefusal::none) return parsed;
  if (parsed.header.kind == RecordKind::dead) parsed.refusal = RecordRefusal::dead;
  if (parsed.header.id != id) parsed.refusal = RecordRefusal::other_record;
  if (parsed.header.layout_id != options_.layout_id) parsed.refusal = RecordRefusal::other_layout;
  return parsed;
}

/// This cache does not believe the record and does not remove it: another cache may believe it.
void RemoteTier::note_unauthenticated(RecordRefusal refusal) {
  if (unauthenticated_records_++ > 0) return;
  speak([&] {
    log(LogLevel::warning, "tier.unauthenticated",
        fmt::format("the remote tier has records that are not believed: {}", to_string(refusal)),
        {{"tier", "remote"}, {"reason", to_string(refusal)}});
  });
}

void RemoteTier::take(GetRequest& request, const redisReply& reply) {
  if (reply.type == REDIS_REPLY_NIL) request.status = GetStatus::missing;
  // A value of another type is damage as well: another program wrote it.
  if (reply.type == REDIS_REPLY_ERROR && text_of(reply).starts_with("WRONGTYPE")) request.status = GetStatus::damaged;
  if (reply.type != REDIS_REPLY_STRING) return;
  const std::span<const std::byte> value = bytes_of(reply);
  const ParsedHeader parsed = parse(request.id, value);
  const RecordHeader& header = parsed.header;
  if (parsed.refusal != RecordRefusal::none || std::ssize(value) != header.header_bytes() + header.length) {
    request.status = GetStatus::damaged;
    return;
  }
  const std::span<const std::byte> stored = value.subspan(header.header_bytes());
  const std::int64_t bytes = payload_bytes(header.version, header.kind, header.length);
  request.bytes = bytes;
  const bool fits = std::ssize(request.to) >= bytes;
  std::vector<std::byte> own(fits ? 0 : bytes);  // checked here, because a forged length is not reported
  const std::span<std::byte> payload = fits ? request.to.first(bytes) : std::span(own);
  RecordRefusal refusal = options_.guard->open(header, stored, payload);
  // Checks the copy, because the caller uses the copy. A sealed payload was verified when it was opened.
  if (refusal == RecordRefusal::none && header.kind != RecordKind::sealed &&
      digest128(payload) != header.payload_digest) {
    std::fill(payload.begin(), payload.end(), std::byte{0});
    refusal = RecordRefusal::damaged_payload;
  }
  if (refusal != RecordRefusal::none) request.bytes = 0;
  switch (refusal) {
    case RecordRefusal::none:
      request.status = fits ? GetStatus::found : GetStatus::too_small;
      request.coding = header.coding();
      break;
    case RecordRefusal::unauthenticated:
    case RecordRefusal::wrong_key:
      request.status = GetStatus::missing;
      note_unauthenticated(refusal);
      break;
    default: request.status = GetStatus::damaged;
  }
}

void RemoteTier::exists(std::span<ExistsRequest> requests, Deadline deadline) {
  std::vector<RedisOperation> operations;
  const std::string last = std::to_string(kRecordHeaderBytes - 1);
  for (ExistsRequest& request : requests) {
    request = {request.id};
    const std::string key = redis_name(options_.layout_id, request.id);
    operations.push_back(operation(
        key,
        [key, &last] {
          return redis_command({"GETRANGE", key, "0", last});
        },
        [this, &request](const redisReply& reply) {
          request.answered = reply.type == REDIS_REPLY_STRING;
          if (!request.answered) return false;
          const ParsedHeader parsed = parse(request.id, bytes_of(reply));
          const RecordHeader& header = parsed.header;
          if (parsed.refusal == RecordRefusal::none && options_.guard->believes(header.kind))
            request.bytes = payload_bytes(header.version, header.kind, header.length);
          return true;
        }));
  }
  readers_.run(operations, deadline);
}

void RemoteTier::remove(std::span<RemoveRequest> requests, Deadline deadline) {
  std::vector<RedisOperation> operations;
  for (RemoveRequest& request : requests) {
    request = {request.id};
    const std::string key = redis_name(options_.layout_id, request.id);
    operations.push_back(operation(
        key,
        [key] {
          return redis_command({"UNLINK", key});
        },
        [&request](const redisReply& reply) {
          request.answered = reply.type == REDIS_REPLY_INTEGER;
          request.removed = request.answered && reply.integer > 0;
          return request.answered;
        }));
  }
  writers_.run(operations, deadline);
}

TierStats RemoteTier::stats() {
  TierStats stats;
  stats.records = stats.payload_bytes = stats.capacity_bytes = TierStats::kUnknown;
  stats.set_aside_records = set_aside_records_;
  stats.unauthenticated_records = unauthenticated_records_;
  stats.connects = readers_.connects() + writers_.connects();
  stats.redirects = readers_.redirects() + writers_.redirects();
  return stats;
}

}  // namespace

std::string why_no_remote_tier() { return ""; }

std::unique_ptr<Tier> make_remote_tier(const RemoteOptions& options) {
  require(!options.servers.empty(), ErrorCode::bad_argument, "a remote tier needs a server");
  require(options.max_payload_bytes > 0 && options.max_payload_bytes < (std::int64_t{512} << 20) - kRecordHeaderBytes,
          ErrorCode::bad_argument, "max_payload_bytes is {}; a Redis string holds 512 MiB with the header",
          options.max_payload_bytes);
  require(options.user.empty() || !options.password.empty(), ErrorCode::bad_argument,
          "a user without a password; give both");
  require(options.tls || options.tls_files.empty(), ErrorCode::bad_argument,
          "files for TLS, but the servers have none; write rediss:// for them");
  require(options.ttl == Duration(0) || (options.ttl >= kLeastTtl && options.ttl <= kMaxTtl), ErrorCode::bad_argument,
          "remote_ttl of {} s; it may be 0.001 s to {} s, or 0 for none",
          std::chrono::duration<double>(options.ttl).count(),
          std::chrono::floor<std::chrono::seconds>(kMaxTtl).count());
  RedisCluster::Shared shared;
  shared.admission = std::make_shared<RedisAdmission>(options);
  if (options.tls) shared.tls = std::make_shared<RedisTls>(options);
  shared.failures = std::make_shared<RedisFailures>();
  RemoteOptions guarded = options;
  if (!guarded.guard) guarded.guard = std::make_shared<RecordGuard>();
  return std::make_unique<RemoteTier>(guarded, shared);
}

}  // namespace kv4::tier
