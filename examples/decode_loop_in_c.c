/* The decode loop of decode_loop.cc through kv4.h: prefill in chunks, decode, drafts taken back, a branch, a saved
 * session. */
#include <stdio.h>
#include <stdlib.h>

#include "kv4.h"

enum { kMaxTokens = 512, kHeads = 2, kTopk = 16 };

static void check(kv4_status status, const char* what) {
  if (status == KV4_OK) return;
  fprintf(stderr, "%s: %s %s\n", what, kv4_status_name(status), status < 0 ? kv4_last_error() : "");
  exit(1);
}

/* A dense tensor on the host; the shape must live as long as the tensor. */
static kv4_tensor host_tensor(void* data, uint8_t code, uint8_t bits, int32_t ndim, const int64_t* shape) {
  const kv4_tensor tensor = {data, 1, 0, ndim, code, bits, 1, shape, NULL, 0};
  return tensor;
}

static float numbers[kMaxTokens * 1024], queries[kMaxTokens * kHeads * 512], result[kMaxTokens * kHeads * 512];
static int32_t best[kMaxTokens * kTopk], token_ids[kMaxTokens];
static float bias[128 * 1024], norm[512];

static void bind(kv4_cache* cache) {
  const int64_t csa_shape[] = {4, 1024}, index_shape[] = {4, 256}, hca_shape[] = {128, 512}, wide[] = {512},
                narrow[] = {128};
  const kv4_tensor csa_bias = host_tensor(bias, 2, 32, 2, csa_shape),
                   index_bias = host_tensor(bias, 2, 32, 2, index_shape),
                   hca_bias = host_tensor(bias, 2, 32, 2, hca_shape), row_norm = host_tensor(norm, 2, 32, 1, wide),
                   key_norm = host_tensor(norm, 2, 32, 1, narrow);
  kv4_layer_weights weights;
  kv4_layer_weights_init(&weights, sizeof(kv4_layer_weights));
  weights.position_bias = &csa_bias;
  weights.norm_weight = &row_norm;
  weights.index_position_bias = &index_bias;
  weights.index_norm_weight = &key_norm;
  check(kv4_cache_bind_weights(cache, 1, &weights), "bind_weights");
  kv4_layer_weights_init(&weights, sizeof(kv4_layer_weights));
  weights.position_bias = &hca_bias;
  weights.norm_weight = &row_norm;
  check(kv4_cache_bind_weights(cache, 2, &weights), "bind_weights");
}

/* The next `count` tokens of a request through all three layers. */
static void forward(kv4_cache* cache, kv4_request request, int32_t count) {
  const kv4_step_item item = {sizeof(kv4_step_item), request, count, token_ids, -1};
  kv4_step step;
  kv4_step_init(&step, sizeof(kv4_step));
  check(kv4_cache_prepare_forward(cache, &item, 1, 0, &step),
        "prepare_forward"); /* > 0: no room, nothing has changed */

  const int64_t narrow[] = {count, 512}, wide[] = {count, 1024}, index[] = {count, 256},
                q_shape[] = {count, kHeads, 512}, index_q[] = {count, kHeads, 128}, index_w[] = {count, kHeads},
                topk_shape[] = {count, kTopk};
  const kv4_tensor row = host_tensor(numbers, 2, 32, 2, narrow), kv = host_tensor(numbers, 2, 32, 2, wide),
                   index_kv = host_tensor(numbers, 2, 32, 2, index), q = host_tensor(queries, 2, 32, 3, q_shape),
                   iq = host_tensor(queries, 2, 32, 3, index_q), iw = host_tensor(queries, 2, 32, 2, index_w),
                   topk = host_tensor(best, 0, 32, 2, topk_shape), out = host_tensor(result, 2, 32, 3, q_shape);
  kv4_append_inputs append;
  kv4_append_inputs_init(&append, sizeof(kv4_append_inputs));
  append.raw_kv = &row;
  check(kv4_cache_append(cache, 0, &append), "append");
  append.kv = append.gate = &row;
  check(kv4_cache_append(cache, 2, &append), "append");
  append.kv = append.gate = &kv;
  append.index_kv = append.index_gate = &index_kv;
  check(kv4_cache_append(cache, 1, &append), "append");

  kv4_index_inputs indexer;
  kv4_index_inputs_init(&indexer, sizeof(kv4_index_inputs));
  indexer.q = &iq;
  indexer.weights = &iw;
  check(kv4_cache_index_topk(cache, 1, &indexer, &topk, NULL), "index_topk");
  kv4_attend_inputs attend;
  kv4_attend_inputs_init(&attend, sizeof(kv4_attend_inputs));
  attend.q = &q;
  check(kv4_cache_attend(cache, 0, &attend, &out, NULL), "attend");
  check(kv4_cache_attend(cache, 2, &attend, &out, NULL), "attend");
  attend.topk = &topk;
  check(kv4_cache_attend(cache, 1, &attend, &out, NULL), "attend");
  check(kv4_cache_commit(cache, &step), "commit");
}

int main(void) {
  for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); ++i) numbers[i] = (float)(i % 97) / 97.0f;
  for (size_t i = 0; i < sizeof(queries) / sizeof(*queries); ++i) queries[i] = 0.1f;
  for (size_t i = 0; i < 512; ++i) norm[i] = 1.0f;
  for (int i = 0; i < kMaxTokens; ++i) token_ids[i] = 42;

  kv4_model *flash, *model;
  const kv4_layer_kind kinds[] = {KV4_LAYER_KIND_SWA, KV4_LAYER_KIND_CSA,
                                  KV4_LAYER_KIND_HCA}; /* one layer of each kind at V4's real sizes */
  check(kv4_model_preset("v4-flash", &flash), "model_preset");
  check(kv4_model_with_layers(flash, kinds, 3, &model), "model_with_layers");
  kv4_cache_options options;
  kv4_cache_options_init(&options, sizeof(kv4_cache_options));
  options.max_requests = 4;
  options.max_rewind_tokens = 4;
  kv4_cache* cache;
  check(kv4_cache_new(model, &options, NULL, &cache), "cache_new");
  bind(cache);

  kv4_request request, branch;
  check(kv4_cache_admit(cache, &request), "admit");
  forward(cache, request, 500);
  forward(cache, request, 300);
  forward(cache, request, 4);                                /* a decoded token and three drafts */
  check(kv4_cache_rewind(cache, request, 802, 0), "rewind"); /* two drafts were wrong */
  check(kv4_cache_fork(cache, request, &branch), "fork");
  forward(cache, branch, 1);

  kv4_session_identity identity;
  kv4_session_identity_init(&identity, sizeof(kv4_session_identity));
  identity.weights_id = "example weights 1";
  const char* path = "decode_loop_in_c.kv4s";
  kv4_request restored;
  check(kv4_cache_save_session_file(cache, request, &identity, path, NULL, NULL), "save_session_file");
  check(kv4_cache_restore_session_file(cache, &identity, path, NULL, NULL, &restored), "restore_session_file");
  remove(path);
  forward(cache, restored, 1);

  int64_t bytes_a = 0, bytes_b = 0;
  check(kv4_cache_image_bytes(cache, branch, &bytes_a), "image_bytes");
  check(kv4_cache_image_bytes(cache, restored, &bytes_b), "image_bytes");
  unsigned char* a = malloc((size_t)bytes_a);
  unsigned char* b = malloc((size_t)bytes_b);
  check(kv4_cache_export_image(cache, branch, a, (size_t)bytes_a), "export_image");
  check(kv4_cache_export_image(cache, restored, b, (size_t)bytes_b), "export_image");
  int same = bytes_a == bytes_b;
  for (int64_t i = 0; same && i < bytes_a; ++i) same = a[i] == b[i];
  printf("kv4 %s: a branch and a restored session after their next token: %lld bytes of state, %s\n", kv4_version(),
         (long long)bytes_a, same ? "the same" : "DIFFERENT");
  free(a);
  free(b);
  kv4_cache_free(cache);
  kv4_model_free(model);
  kv4_model_free(flash);
  return same ? 0 : 1;
}
