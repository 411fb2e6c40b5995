// Requests as bytes: images, sessions and preempted requests.
#include "kv4/session.h"

#include <string>

#include "c_api/handles.h"

using namespace kv4::c_api;

namespace {

kv4_session_identity identity_defaults() {
  auto value = sized<kv4_session_identity>();
  value.weights_id = "";
  value.protection = kv4::to_string(kv4::SessionIdentity().protection);
  return value;
}

std::span<std::byte> writable(void* out, size_t bytes) {
  kv4::require(out != nullptr || bytes == 0, kv4::ErrorCode::bad_argument, "out is NULL and should have {} bytes",
               bytes);
  return {static_cast<std::byte*>(out), bytes};
}

kv4::SessionIdentity identity_of(const kv4_session_identity* given) {
  const kv4_session_identity in = read_struct(given, identity_defaults(), "identity");
  kv4::SessionIdentity out{.weights_id = std::string(c_text(in.weights_id, "identity.weights_id")),
                           .salt = std::string(text(in.salt, "identity.salt")),
                           .tenant = in.tenant,
                           .share_of = in.share_of,
                           .keys = keys_of(in.keys, in.num_keys, "identity.keys"),
                           .protection = kv4::parse_protection(c_text(in.protection, "identity.protection")),
                           .accept_unauthenticated = in.accept_unauthenticated != 0};
  for (const kv4_bytes& extra : list(in.block_extra, in.num_block_extra, "identity.block_extra")) {
    const std::span<const std::byte> span = bytes(extra, "identity.block_extra");
    out.block_extra.emplace_back(span.begin(), span.end());
  }
  return out;
}

}  // namespace

kv4_status kv4_cache_image_bytes(const kv4_cache* cache, kv4_request request, int64_t* out) {
  return guarded([&] { require_set(out, "out") = manager(cache).image_bytes(request); });
}

kv4_status kv4_cache_export_image(const kv4_cache* cache, kv4_request request, void* out, size_t bytes) {
  return guarded([&] { manager(cache).export_image(request, writable(out, bytes)); });
}

kv4_status kv4_cache_export_blocks(const kv4_cache* cache, kv4_request request, void* out, size_t bytes) {
  return guarded([&] { manager(cache).export_blocks(request, writable(out, bytes)); });
}

void kv4_import_init(kv4_import* import, size_t size) { init_struct(import, size, sized<kv4_import>()); }

kv4_status kv4_cache_import_image(kv4_cache* cache, const kv4_import* import, kv4_request* out) {
  return guarded([&] {
    require_set(out, "out");
    const kv4_import in = read_struct(import, sized<kv4_import>(), "import");
    const kv4::ImageView image(in.layout_id, list(in.lengths, in.num_lengths, "import.lengths"),
                               bytes(in.image, "import.image"));
    return give(manager(cache).import_image(image, list(in.token_ids, in.num_tokens, "import.token_ids"),
                                            bytes(in.blocks, "import.blocks")),
                out);
  });
}

void kv4_session_identity_init(kv4_session_identity* identity, size_t size) {
  init_struct(identity, size, identity_defaults());
}

kv4_status kv4_cache_save_session_file(kv4_cache* cache, kv4_request request, const kv4_session_identity* identity,
                                       const char* path, kv4_progress progress, void* user) {
  return guarded([&] {
    const bool saved = kv4::save_session_file(manager(cache), request, identity_of(identity),
                                              std::string(c_text(path, "path")), progress_of(progress, user));
    return saved ? KV4_OK : KV4_STOPPED;
  });
}

kv4_status kv4_cache_restore_session_file(kv4_cache* cache, const kv4_session_identity* identity, const char* path,
                                          kv4_progress progress, void* user, kv4_request* out) {
  return guarded([&] {
    require_set(out, "out");
    return give(kv4::restore_session_file(manager(cache), identity_of(identity), std::string(c_text(path, "path")),
                                          progress_of(progress, user)),
                out);
  });
}

kv4_status kv4_cache_preempted_bytes(const kv4_cache* cache, kv4_request request, int64_t* out) {
  return guarded([&] { require_set(out, "out") = kv4::preempted_bytes(manager(cache), request); });
}

kv4_status kv4_preempted_new(kv4_cache* cache, int64_t bytes, kv4_preempted** out) {
  return guarded([&] {
    const kv4_cache& of = require_set(cache, "cache");
    give_new(out, [&] { return new kv4_preempted{kv4::PreemptedRequest(kv4::HostMemory(of.backend.backend, bytes))}; });
  });
}

void kv4_preempted_free(kv4_preempted* preempted) { delete preempted; }

kv4_status kv4_cache_preempt(kv4_cache* cache, kv4_request request, kv4_preempted* to) {
  return guarded([&] { kv4::preempt(manager(cache), request, require_set(to, "to").request); });
}

kv4_status kv4_cache_resume(kv4_cache* cache, kv4_preempted* from, kv4_request* out) {
  return guarded([&] {
    require_set(out, "out");
    return give(kv4::resume(manager(cache), require_set(from, "from").request), out);
  });
}
