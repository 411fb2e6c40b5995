/* keep_prefixes.cc through kv4.h: contexts that outlive the process. The next engine finds the saved prefix on disk,
 * sealed with a key, and computes only the new tokens.
 *
 *   keep_prefixes_in_c [DIRECTORY]      DIRECTORY is left behind for 'kv4 store inspect --key-file' */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kv4.h"

enum { kPromptTokens = 3000, kChunk = 256, kWaitMs = 60000 };

static void check(kv4_status status, const char* what) {
  if (status == KV4_OK) return;
  fprintf(stderr, "%s: %s %s\n", what, kv4_status_name(status), status < 0 ? kv4_last_error() : "");
  exit(1);
}

static int32_t token_ids[kPromptTokens];
static float rows[kChunk * 512], bias[128 * 512], norm[512];

/* A window layer and an HCA layer at V4's real sizes; the token ids replace the layers' projections. */
static kv4_cache* open_cache(void) {
  const kv4_layer_kind kinds[] = {KV4_LAYER_KIND_SWA, KV4_LAYER_KIND_HCA};
  kv4_model *flash, *model;
  check(kv4_model_preset("v4-flash", &flash), "model_preset");
  check(kv4_model_with_layers(flash, kinds, 2, &model), "model_with_layers");
  kv4_cache_options options;
  kv4_cache_options_init(&options, sizeof(kv4_cache_options));
  options.max_context = 8192;
  options.prefix_enabled = 1;
  options.weights_id = "example weights 1";
  options.snapshots = "checkpoint";
  kv4_cache* cache;
  check(kv4_cache_new(model, &options, NULL, &cache), "cache_new");
  kv4_model_free(model);
  kv4_model_free(flash);

  const int64_t bias_shape[] = {128, 512}, norm_shape[] = {512};
  const kv4_tensor position_bias = {bias, 1, 0, 2, 2, 32, 1, bias_shape, NULL, 0},
                   norm_weight = {norm, 1, 0, 1, 2, 32, 1, norm_shape, NULL, 0};
  kv4_layer_weights weights;
  kv4_layer_weights_init(&weights, sizeof(kv4_layer_weights));
  weights.position_bias = &position_bias;
  weights.norm_weight = &norm_weight;
  check(kv4_cache_bind_weights(cache, 1, &weights), "bind_weights");
  return cache;
}

/* Computes the missing part of the prompt; returns its number of tokens. */
static int64_t answer(kv4_cache* cache, const kv4_admission* begun) {
  int64_t computed = 0;
  for (int64_t at = begun->resume_at; at < kPromptTokens; computed = at - begun->resume_at) {
    const int32_t count = at + kChunk < kPromptTokens ? kChunk : (int32_t)(kPromptTokens - at);
    for (int32_t t = 0; t < count; ++t)
      for (int i = 0; i < 512; ++i) rows[t * 512 + i] = (float)(token_ids[at + t] % 31) / 31.0f;
    const int64_t shape[] = {count, 512};
    const kv4_tensor row = {rows, 1, 0, 2, 2, 32, 1, shape, NULL, 0};
    const kv4_step_item item = {sizeof(kv4_step_item), begun->request, count, token_ids + at, at};
    kv4_step step;
    kv4_step_init(&step, sizeof(kv4_step));
    check(kv4_cache_prepare_forward(cache, &item, 1, 0, &step), "prepare_forward");
    kv4_append_inputs inputs;
    kv4_append_inputs_init(&inputs, sizeof(kv4_append_inputs));
    inputs.raw_kv = &row;
    check(kv4_cache_append(cache, 0, &inputs), "append");
    inputs.kv = inputs.gate = &row;
    check(kv4_cache_append(cache, 1, &inputs), "append");
    check(kv4_cache_commit(cache, &step), "commit");
    at += count;
  }
  check(kv4_cache_release(cache, begun->request), "release");
  return computed;
}

static void remove_store(const char* directory) {
  DIR* folder = opendir(directory);
  if (folder == NULL) return;
  for (const struct dirent* file = readdir(folder); file != NULL; file = readdir(folder)) {
    char path[4096];
    if (snprintf(path, sizeof(path), "%s/%s", directory, file->d_name) < (int)sizeof(path)) unlink(path);
  }
  closedir(folder);
  rmdir(directory);
}

int main(int argc, char** argv) {
  const char* directory = argc > 1 ? argv[1] : "keep_prefixes_in_c.store";
  for (int i = 0; i < kPromptTokens; ++i) token_ids[i] = i * 7 % 1000;
  for (int i = 0; i < 512; ++i) norm[i] = 1.0f;
  kv4_cache_key key; /* from a file: kv4_read_key_file */
  memset(key.bytes, 7, sizeof(key.bytes));

  int64_t computed[2];
  for (int process = 0; process < 2; ++process) { /* two processes, one after the other */
    kv4_cache* cache = open_cache();
    kv4_tiers_options options;
    kv4_tiers_options_init(&options, sizeof(kv4_tiers_options));
    options.host_bytes = 64 << 20;
    options.directory = directory;
    options.keys = &key;
    options.num_keys = 1;
    kv4_tiers* tiers;
    check(kv4_tiers_new(cache, &options, &tiers), "tiers_new");
    kv4_tiered_prefix* tiered;
    check(kv4_tiered_prefix_new(cache, tiers, NULL, &tiered), "tiered_prefix_new");

    kv4_prompt prompt;
    kv4_prompt_init(&prompt, sizeof(kv4_prompt));
    prompt.token_ids = token_ids;
    prompt.num_tokens = kPromptTokens;
    prompt.salt.data = "a secret of this tenant";
    prompt.salt.length = strlen("a secret of this tenant");
    kv4_admission begun;
    kv4_admission_init(&begun, sizeof(kv4_admission));
    check(kv4_tiered_prefix_admit(tiered, &prompt, 5000, NULL, NULL, &begun), "admit"); /* > 0: no room */
    computed[process] = answer(cache, &begun);
    check(kv4_tiered_prefix_save_all(tiered, kWaitMs, NULL, NULL),
          "save_all"); /* between steps: ..._save(.., 16, ..) */
    kv4_flush_status reached;
    check(kv4_tiers_close(tiers, kWaitMs, &reached), "close");

    kv4_tier_report reports[2];
    kv4_tier_report_init(&reports[0], sizeof(kv4_tier_report));
    int64_t count;
    check(kv4_tiers_get_reports(tiers, reports, 2, &count), "get_reports");
    for (int64_t i = 0; i < count; ++i)
      printf("%s (%s): %lld hits, %lld records stored\n", reports[i].name, reports[i].protection,
             (long long)reports[i].hits, (long long)reports[i].stored);
    kv4_tiered_prefix_free(tiered);
    kv4_tiers_free(tiers);
    kv4_cache_free(cache);
    if (reached == KV4_FLUSH_STATUS_FAILED) return 1;
  }
  printf("%s: %lld of %d tokens computed, after a restart %lld\n", directory, (long long)computed[0], kPromptTokens,
         (long long)computed[1]);
  if (argc < 2) remove_store(directory);
  return computed[0] == kPromptTokens && computed[1] < 128 ? 0 : 1;
}
