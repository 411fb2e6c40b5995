/* kv4 for every language that can call C: opaque handles, status codes, no exception across the border.
 *
 *   kv4_cache_admit -> [kv4_cache_prepare_forward -> kv4_cache_append ... for each layer
 *                       -> kv4_cache_commit | kv4_cache_abort]* -> kv4_cache_release
 *
 * The calls mean what their C++ namesakes in kv4/kv_cache_manager.h, kv4/layer_cache_handle.h, kv4/tiers.h and
 * kv4/tiered_prefix.h mean; comments here name only the differences. Stores of chunks have a header of their own.
 *
 * Names: kv4_TYPE_VERB, where TYPE is the call's first argument, or its result where it makes one:
 * kv4_cache_admit(cache, ...) is KVCacheManager::admit. Five calls are the library's own: kv4_version, kv4_abi_version,
 * kv4_last_error, kv4_set_log_sink, kv4_read_key_file. Enumerators are KV4_ENUM_VALUE, statuses KV4_VALUE. Policies and
 * modes are strings, spelled as in C++, Python and the tool (kv4/names.h).
 *
 * Status: KV4_OK is 0. A shortage is positive: nothing has changed, make room and call again. An error is negative:
 * nothing has changed, and kv4_last_error() describes it, until this thread's next call that fails.
 * Output arguments are written on KV4_OK only.
 *
 * Structs begin with `size` and may grow. Set one up with its init, kv4_T_init(&x, sizeof(x)), which fills in `size`
 * and the defaults; a library older than the caller refuses fields it does not know unless they are zero, a newer one
 * takes their defaults and writes no byte behind them. A size that no version has (not a multiple of 8 from 16 bytes to
 * 64 KiB) is refused. In an array all elements have the size of the first. Ten structs have no size and never change:
 * kv4_tensor and kv4_managed_tensor (DLPack's), kv4_bytes, kv4_memory, kv4_block_key, kv4_cache_key, kv4_plane,
 * kv4_time_histogram, kv4_failure_count, kv4_log_field.
 *
 * Ownership: the caller frees an object that it got through `T** out` with kv4_T_free, which takes NULL. Tensors and
 * strings are read or written during the call only; bound weights and rope tables must outlive the cache. A cache keeps
 * its backend alive; objects made of a cache or of tiers are freed before them.
 *
 * Threads: one thread at a time drives a cache, and one its tiers; a call that overlaps with another thread's is
 * KV4_BAD_STATE and does nothing. Different caches are independent. */
#ifndef KV4_H
#define KV4_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define KV4_C_API __declspec(dllexport)
#else
/* Exported by the shared library. */
#define KV4_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Grows by one when a program built against an older header could misbehave. */
#define KV4_ABI_VERSION 2
/* KV4_ABI_VERSION of the library that is linked. */
KV4_C_API int32_t kv4_abi_version(void);
KV4_C_API const char* kv4_version(void); /* "0.2.0" */

/* Shortages above 0, errors below: see Status above. */
typedef enum kv4_status {
  KV4_OK = 0,
  KV4_SHORT_OF_REQUESTS = 1,
  KV4_SHORT_OF_BLOCKS = 2,
  KV4_SHORT_OF_SLOTS = 3,
  KV4_STOPPED = 4, /* by the caller's progress function, or by a deadline */
  KV4_BAD_CONFIG = -1,
  KV4_BAD_ARGUMENT = -2,
  KV4_BAD_STATE = -3,
  KV4_BAD_FILE = -4,
  KV4_OUT_OF_MEMORY = -5,
  KV4_NO_DEVICE = -6,
  KV4_DEVICE_FAILURE = -7,
  KV4_INTERNAL_ERROR = -8
} kv4_status;

KV4_C_API const char* kv4_status_name(kv4_status status); /* "KV4_OK", ... */
KV4_C_API const char* kv4_last_error(void);               /* of this thread; "" where none was */

/* The log (kv4/log.h). A sink is called by any thread, one call at a time, and must not call kv4; the texts are valid
 * during the call only. NULL: silence, as at the start. */
typedef enum kv4_log_level { KV4_LOG_LEVEL_INFO = 0, KV4_LOG_LEVEL_WARNING = 1, KV4_LOG_LEVEL_ERROR = 2 } kv4_log_level;
/* One detail of an event. */
typedef struct kv4_log_field {
  const char* name;
  const char* value;
} kv4_log_field;
/* Takes one event; `user` is what kv4_set_log_sink was given. */
typedef void (*kv4_log_sink)(void* user, kv4_log_level level, const char* event, const char* message,
                             const kv4_log_field* fields, int64_t num_fields);
/* For all caches of the process, from now on. */
KV4_C_API kv4_status kv4_set_log_sink(kv4_log_sink sink, void* user);

/* Bytes of the caller. */
typedef struct kv4_bytes {
  const void* data;
  size_t length;
} kv4_bytes;

/* Memory of the caller that is written. */
typedef struct kv4_memory {
  void* data;
  size_t length;
} kv4_memory;

/* Told now and then: bytes of a session, blocks of a load, records of a save; 0 stops. NULL: nobody is told. */
typedef int32_t (*kv4_progress)(void* user, int64_t done, int64_t total);

/* A secret of 256 bits that makes authentic what leaves the process: kv4::CacheKey. */
typedef struct kv4_cache_key {
  uint8_t bytes[32];
} kv4_cache_key;

/* Keys of a file, a line of 64 hex digits each, into keys [capacity]; *count is how many there are, also when capacity
 * is too small (KV4_BAD_ARGUMENT then). KV4_BAD_FILE, for example where group or others can read the file. */
KV4_C_API kv4_status kv4_read_key_file(const char* path, kv4_cache_key* keys, int64_t capacity, int64_t* count);

/* ---- Tensors: DLPack's DLTensor, field by field, so (const kv4_tensor*)&managed->dl_tensor is one. ---- */

/* A tensor of the caller: pointer, element type, shape, strides. */
typedef struct kv4_tensor {
  void* data;
  int32_t device_type; /* 1 CPU, 2 CUDA, 3 CUDA pinned: must be memory that the cache's backend can reach */
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code; /* 0 signed, 1 unsigned, 2 float, 4 bfloat */
  uint8_t dtype_bits; /* f32, bf16, i32 and u8 are taken */
  uint16_t dtype_lanes;
  const int64_t* shape;
  const int64_t* strides; /* in elements; NULL: dense, the last dimension fastest */
  uint64_t byte_offset;
} kv4_tensor;

/* DLPack's DLManagedTensor: call deleter(self) once when done. */
typedef struct kv4_managed_tensor {
  kv4_tensor tensor;
  void* manager_ctx;
  void (*deleter)(struct kv4_managed_tensor* self);
} kv4_managed_tensor;

/* ---- Models ---- */

/* The model as its cache sees it. */
typedef struct kv4_model kv4_model;

/* The rows of a layer: a window; window, entries and index keys; window and entries; window, and entries of a layer
 * that may be an earlier one (V4.1). */
typedef enum kv4_layer_kind {
  KV4_LAYER_KIND_SWA = 0,
  KV4_LAYER_KIND_CSA = 1,
  KV4_LAYER_KIND_HCA = 2,
  KV4_LAYER_KIND_SHARED = 3
} kv4_layer_kind;

/* The numbers of a model: kv4::ModelConfig. */
typedef struct kv4_model_info {
  size_t size;
  int32_t num_layers;
  int32_t num_query_heads;
  int32_t head_dim;
  int32_t rope_dim;
  int32_t window;
  int32_t index_heads;
  int32_t index_dim;
  int32_t index_topk;
  int32_t csa_ratio;
  int32_t hca_ratio;
  int64_t max_positions;
} kv4_model_info;

KV4_C_API kv4_status kv4_model_preset(const char* name, kv4_model** out); /* "v4-flash", "v4-pro", "v4.1-flash" */
/* A Hugging Face config.json as text. */
KV4_C_API kv4_status kv4_model_parse(const char* json, size_t length, kv4_model** out);
KV4_C_API kv4_status kv4_model_load(const char* path, kv4_model** out); /* a Hugging Face config.json */
/* NULL: nothing. Caches made of it live on. */
KV4_C_API void kv4_model_free(kv4_model* model);
/* Fills in `size`, sizeof(kv4_model_info), and the defaults. */
KV4_C_API void kv4_model_info_init(kv4_model_info* info, size_t size);
/* Into a struct that kv4_model_info_init has set up. */
KV4_C_API kv4_status kv4_model_get_info(const kv4_model* model, kv4_model_info* info);
/* KV4_BAD_ARGUMENT for a layer that the model does not have. */
KV4_C_API kv4_status kv4_model_layer_kind(const kv4_model* model, int32_t layer, kv4_layer_kind* out);
/* Another model with these layers of V4 in their order: a stack of its own, for trials and tests. */
KV4_C_API kv4_status kv4_model_with_layers(const kv4_model* model, const kv4_layer_kind* kinds, int32_t num_layers,
                                           kv4_model** out);

/* ---- Backends ---- */

/* The device of a cache and its memory. Caches keep it alive. */
typedef struct kv4_backend kv4_backend;

/* threads: how many an operation uses, 1 to 1024. */
KV4_C_API kv4_status kv4_backend_cpu(int32_t threads, kv4_backend** out);
/* stream: a cudaStream_t, or NULL for the default stream. */
KV4_C_API kv4_status kv4_backend_cuda(int32_t device, void* stream, kv4_backend** out);
/* The caller's hold on it ends; NULL: nothing. */
KV4_C_API void kv4_backend_free(kv4_backend* backend);

/* ---- Caches ---- */

/* A cache of one model on one backend: kv4::KVCacheManager. */
typedef struct kv4_cache kv4_cache;

/* kv4::CacheOptions, field by field. */
typedef struct kv4_cache_options {
  size_t size;
  const char* row_format;   /* "fp8_tile64", "fp8_row", "bf16", "fp8_tile32", "nvfp4_row"; "": the model's own */
  const char* index_format; /* "mxfp4", "nvfp4", "fp8", "bf16" */
  const char* hca_mode;     /* "online", "raw" */
  const char* arrangement;  /* "block_major", "layer_major" */
  int32_t hadamard;
  float index_global_scale;
  const char* pending_dtype; /* of compressor inputs: "f32", "bf16" */
  int32_t page_alignment;
  int32_t block_tokens; /* 0: automatic */
  int32_t max_rewind_tokens;
  int32_t draft_layers;
  int32_t num_layers; /* of `layers`; 0: all */
  const int32_t* layers;
  int32_t max_requests;
  int32_t spare_slots;
  int64_t max_context;
  int64_t num_blocks; /* 0: automatic */
  int32_t max_step_tokens;
  int32_t index_tile_tokens;
  /* Prefix cache. */
  int32_t prefix_enabled;
  int32_t num_snapshots;
  int64_t max_events; /* of kv4_cache_read_block_events; older ones are lost, and counted */
  const char* weights_id;
  const char* eviction;  /* "lru", "s3fifo", "density" */
  const char* snapshots; /* "full", "checkpoint", "none" */
  int64_t snapshot_period_tokens;
  int64_t replay_tokens;
  const int64_t* tenant_shares; /* [num_tenants]; NULL: one tenant without a share */
  int32_t num_tenants;
  const char* window_format; /* of window rows alone; "": row_format */
  const char* entry_format;  /* of entries alone; "": row_format */
} kv4_cache_options;

/* The bytes that a cache allocates: kv4::MemoryPlan. */
typedef struct kv4_memory_plan {
  size_t size;
  int64_t block_bytes;
  int64_t state_bytes_per_request;
  int64_t draft_bytes_per_request;
  int64_t blocks;
  int64_t total_bytes;
  double bytes_per_token;
} kv4_memory_plan;

/* Sizes of a cache, and how full it is. */
typedef struct kv4_cache_info {
  size_t size;
  int64_t num_blocks;
  int64_t held_blocks;
  int64_t available_blocks;
  int64_t block_tokens;
  int64_t block_bytes;
  int64_t block_image_bytes;
  int64_t memory_bytes;
  int64_t num_requests;
  uint64_t layout_id;
} kv4_cache_info;

/* Fills in `size`, sizeof(kv4_cache_options), and the defaults. */
KV4_C_API void kv4_cache_options_init(kv4_cache_options* options, size_t size);
/* Fills in `size`, sizeof(kv4_memory_plan), and the defaults. */
KV4_C_API void kv4_memory_plan_init(kv4_memory_plan* plan, size_t size);
/* Fills in `size`, sizeof(kv4_cache_info), and the defaults. */
KV4_C_API void kv4_cache_info_init(kv4_cache_info* info, size_t size);

/* Allocates nothing. options NULL: the defaults. */
KV4_C_API kv4_status kv4_model_plan_memory(const kv4_model* model, const kv4_cache_options* options,
                                           kv4_memory_plan* out);
/* backend NULL: the CPU, one thread. */
KV4_C_API kv4_status kv4_cache_new(const kv4_model* model, const kv4_cache_options* options, kv4_backend* backend,
                                   kv4_cache** out);
/* Frees all memory of the cache; its requests end. NULL: nothing. */
KV4_C_API void kv4_cache_free(kv4_cache* cache);
/* The figures now. */
KV4_C_API kv4_status kv4_cache_get_info(const kv4_cache* cache, kv4_cache_info* info);
/* All blocks as bytes, in place: u8 [memory bytes]. The cache must outlive it. */
KV4_C_API kv4_status kv4_cache_pool(kv4_cache* cache, kv4_managed_tensor** out);

/* Constants of a layer: kv4::LayerWeights; NULL where the layer has none. */
typedef struct kv4_layer_weights {
  size_t size;
  const kv4_tensor* position_bias;
  const kv4_tensor* norm_weight;
  const kv4_tensor* index_position_bias;
  const kv4_tensor* index_norm_weight;
  const kv4_tensor* raw_norm_weight;
} kv4_layer_weights;

/* Fills in `size`, sizeof(kv4_layer_weights), and the defaults. */
KV4_C_API void kv4_layer_weights_init(kv4_layer_weights* weights, size_t size);
/* Constants of a layer, in the backend's memory; not copied. */
KV4_C_API kv4_status kv4_cache_bind_weights(kv4_cache* cache, int32_t layer, const kv4_layer_weights* weights);
/* The engine's own table, fp32 [positions, rope_dim / 2] each; not copied. */
KV4_C_API kv4_status kv4_cache_bind_rope_table(kv4_cache* cache, const kv4_tensor* cos, const kv4_tensor* sin);
/* Work is queued on this cudaStream_t from now on. */
KV4_C_API kv4_status kv4_cache_set_stream(kv4_cache* cache, void* stream);
/* Waits for all queued work; KV4_DEVICE_FAILURE if some of it failed. */
KV4_C_API kv4_status kv4_cache_synchronize(kv4_cache* cache);

/* ---- Requests ---- */

/* Names a request of one cache. */
typedef int32_t kv4_request;
/* The request of a padded item. */
#define KV4_NO_REQUEST (-1)

/* The beginning of a request: kv4::Prompt. */
typedef struct kv4_prompt {
  size_t size;
  const int32_t* token_ids;
  int64_t num_tokens;
  int32_t tenant;
  kv4_bytes salt;
  const kv4_bytes* extra; /* [num_extra], one per block from the first on */
  int64_t num_extra;
} kv4_prompt;

/* A request that begins with a kept prefix: kv4::Admission. */
typedef struct kv4_admission {
  size_t size;
  kv4_request request;
  int64_t usable_tokens;
  int64_t resume_at;
} kv4_admission;

/* Fills in `size`, sizeof(kv4_prompt), and the defaults. */
KV4_C_API void kv4_prompt_init(kv4_prompt* prompt, size_t size);
/* Fills in `size`, sizeof(kv4_admission), and the defaults. */
KV4_C_API void kv4_admission_init(kv4_admission* admission, size_t size);
/* An empty request. */
KV4_C_API kv4_status kv4_cache_admit(kv4_cache* cache, kv4_request* out);
/* A request that shares the longest kept prefix of its prompt. */
KV4_C_API kv4_status kv4_cache_admit_prompt(kv4_cache* cache, const kv4_prompt* prompt, kv4_admission* out);
/* A second request with the same tokens. */
KV4_C_API kv4_status kv4_cache_fork(kv4_cache* cache, kv4_request request, kv4_request* out);
/* Forgets the tokens from `length` on. group 0: the backbone, d + 1: draft stage d. */
KV4_C_API kv4_status kv4_cache_rewind(kv4_cache* cache, kv4_request request, int64_t length, int32_t group);
/* The shortest length that kv4_cache_rewind takes. */
KV4_C_API kv4_status kv4_cache_rewind_floor(const kv4_cache* cache, kv4_request request, int32_t group, int64_t* out);
/* Committed tokens. */
KV4_C_API kv4_status kv4_cache_length(const kv4_cache* cache, kv4_request request, int32_t group, int64_t* out);
/* Ids into out [capacity]; *count is how many there are, also when capacity is too small (KV4_BAD_ARGUMENT then). */
KV4_C_API kv4_status kv4_cache_token_ids(const kv4_cache* cache, kv4_request request, int32_t* out, int64_t capacity,
                                         int64_t* count);
/* Ids of the request's blocks, in the way of kv4_cache_token_ids. */
KV4_C_API kv4_status kv4_cache_blocks(const kv4_cache* cache, kv4_request request, int32_t* out, int64_t capacity,
                                      int64_t* count);
/* Ends the request. */
KV4_C_API kv4_status kv4_cache_release(kv4_cache* cache, kv4_request request);

/* ---- Steps ---- */

/* The next `count` tokens of a request: kv4::StepItem. */
typedef struct kv4_step_item {
  size_t size;
  kv4_request request; /* KV4_NO_REQUEST: padding */
  int32_t count;
  const int32_t* token_ids; /* [count] or NULL */
  int64_t position;         /* -1: not stated */
} kv4_step_item;

/* One forward of a batch. */
typedef struct kv4_step {
  size_t size;
  int64_t id;
  int32_t num_tokens;
  int32_t num_items;
  int32_t group;
} kv4_step;

/* Fills in `size`, sizeof(kv4_step_item), and the defaults. */
KV4_C_API void kv4_step_item_init(kv4_step_item* item, size_t size);
/* Fills in `size`, sizeof(kv4_step), and the defaults. */
KV4_C_API void kv4_step_init(kv4_step* step, size_t size);
/* Opens a step: reserves all that it may write, or changes nothing. */
KV4_C_API kv4_status kv4_cache_prepare_forward(kv4_cache* cache, const kv4_step_item* items, int64_t num_items,
                                               int32_t group, kv4_step* out);
/* The step counts: lengths advance. */
KV4_C_API kv4_status kv4_cache_commit(kv4_cache* cache, const kv4_step* step);
/* The step does not count: everything is as before it. */
KV4_C_API kv4_status kv4_cache_abort(kv4_cache* cache, const kv4_step* step);
/* *out 1: the work of a committed step is done. */
KV4_C_API kv4_status kv4_cache_finished(kv4_cache* cache, const kv4_step* step, int32_t* out);

/* ---- What a layer does inside a step. Optional tensors are NULL. ---- */

/* kv4::AppendInputs: one row per token of the step. */
typedef struct kv4_append_inputs {
  size_t size;
  const kv4_tensor* raw_kv;     /* [tokens, head_dim] */
  const kv4_tensor* kv;         /* CSA, HCA: [tokens, columns] */
  const kv4_tensor* gate;       /* the same */
  const kv4_tensor* index_kv;   /* CSA: [tokens, 2 * index_dim] */
  const kv4_tensor* index_gate; /* the same */
  int32_t raw_is_projection;
} kv4_append_inputs;

/* kv4::FlushInputs: entries made elsewhere. */
typedef struct kv4_flush_inputs {
  size_t size;
  const kv4_tensor* entries;    /* [tokens, head_dim] */
  const kv4_tensor* index_keys; /* CSA: [tokens, index_dim] */
  const kv4_tensor* valid;      /* u8 [tokens] or NULL */
} kv4_flush_inputs;

/* kv4::IndexInputs: index queries, one per token and head. */
typedef struct kv4_index_inputs {
  size_t size;
  const kv4_tensor* q;       /* [tokens, heads, index_dim], or u8 payloads */
  const kv4_tensor* q_scale; /* with payloads */
  const kv4_tensor* weights; /* f32 [tokens, heads] */
  const char* score_mode;    /* "exact", or "fast" within an error bound */
} kv4_index_inputs;

/* kv4::AttendInputs: queries, normed and rotated. */
typedef struct kv4_attend_inputs {
  size_t size;
  const kv4_tensor* q;    /* [tokens, heads, head_dim] */
  const kv4_tensor* sink; /* f32 [heads] or NULL */
  const kv4_tensor* topk; /* i32 [tokens, k] or NULL: all visible entries */
  float softmax_scale;    /* 0: head_dim^-0.5 */
  int32_t inverse_rope;
} kv4_attend_inputs;

/* Fills in `size`, sizeof(kv4_append_inputs), and the defaults. */
KV4_C_API void kv4_append_inputs_init(kv4_append_inputs* inputs, size_t size);
/* Fills in `size`, sizeof(kv4_flush_inputs), and the defaults. */
KV4_C_API void kv4_flush_inputs_init(kv4_flush_inputs* inputs, size_t size);
/* Fills in `size`, sizeof(kv4_index_inputs), and the defaults. */
KV4_C_API void kv4_index_inputs_init(kv4_index_inputs* inputs, size_t size);
/* Fills in `size`, sizeof(kv4_attend_inputs), and the defaults. */
KV4_C_API void kv4_attend_inputs_init(kv4_attend_inputs* inputs, size_t size);

/* Window rows, pending rows, and the entries and index keys that fall due. */
KV4_C_API kv4_status kv4_cache_append(kv4_cache* cache, int32_t layer, const kv4_append_inputs* inputs);
/* The window rows alone. */
KV4_C_API kv4_status kv4_cache_write_swa(kv4_cache* cache, int32_t layer, const kv4_tensor* raw_kv);
/* Entries and index keys made elsewhere. */
KV4_C_API kv4_status kv4_cache_flush_compression(kv4_cache* cache, int32_t layer, const kv4_flush_inputs* inputs);

/* scores f32 [tokens, n]; -infinity where a token sees no entry. */
KV4_C_API kv4_status kv4_cache_index_scores(kv4_cache* cache, int32_t layer, const kv4_index_inputs* inputs,
                                            const kv4_tensor* scores);
/* The k best of given scores: indices, slots i32 [tokens, k], slots or NULL. */
KV4_C_API kv4_status kv4_cache_select_topk(kv4_cache* cache, int32_t layer, const kv4_tensor* scores,
                                           const kv4_tensor* indices, const kv4_tensor* slots);
/* Both in a single call, by exact or by fast scores. */
KV4_C_API kv4_status kv4_cache_index_topk(kv4_cache* cache, int32_t layer, const kv4_index_inputs* inputs,
                                          const kv4_tensor* indices, const kv4_tensor* slots);
/* out [tokens, heads, head_dim]; lse f32 [tokens, heads] or NULL. */
KV4_C_API kv4_status kv4_cache_attend(kv4_cache* cache, int32_t layer, const kv4_attend_inputs* inputs,
                                      const kv4_tensor* out, const kv4_tensor* lse);

/* Chosen entries, decoded: out [tokens, k, head_dim], valid u8 [tokens, k] or NULL. */
KV4_C_API kv4_status kv4_cache_gather_compressed_kv(kv4_cache* cache, int32_t layer, const kv4_tensor* indices,
                                                    const kv4_tensor* out, const kv4_tensor* valid);
/* All entries, decoded: out [items, n, head_dim], lens i32 [items]. */
KV4_C_API kv4_status kv4_cache_gather_all_compressed_kv(kv4_cache* cache, int32_t layer, const kv4_tensor* out,
                                                        const kv4_tensor* lens);
/* All index keys, decoded: out [items, n, index_dim], lens i32 [items]. */
KV4_C_API kv4_status kv4_cache_gather_all_index_keys(kv4_cache* cache, int32_t layer, const kv4_tensor* out,
                                                     const kv4_tensor* lens);
/* Window rows, decoded: out [items, n, head_dim], lens and first i32 [items]. */
KV4_C_API kv4_status kv4_cache_gather_swa_kv(kv4_cache* cache, int32_t layer, const kv4_tensor* out,
                                             const kv4_tensor* lens, const kv4_tensor* first);

/* The places of a layer's rows, for kernels of the caller; valid until the step ends. Row r of block b:
 * data + b * block_stride + r * row_stride, row_bytes long. */
typedef struct kv4_plane {
  uint8_t* data; /* NULL: there is none */
  int64_t block_stride;
  int64_t row_stride;
  int64_t row_bytes;
} kv4_plane;

/* The window of a layer: kv4::SWAView. */
typedef struct kv4_swa_view {
  size_t size;
  kv4_plane payload; /* a block is a state slot, a row is position mod rows */
  kv4_plane rope;
  kv4_plane scale;
  int32_t num_items;
  int32_t rows;
  const int32_t* slots;     /* [num_items], -1: padded */
  const int32_t* positions; /* [num_items, rows], -1: none */
  const int32_t* head;      /* [num_items] */
} kv4_swa_view;

/* Entries (payload, rope, scale) or index keys (payload, scale, global_scale). */
typedef struct kv4_rows_view {
  size_t size;
  kv4_plane payload;
  kv4_plane rope;
  kv4_plane scale;
  kv4_plane global_scale;
  int32_t num_items;
  int32_t rows_per_block;
  int32_t blocks_per_request;
  const int32_t* block_table;  /* [max_requests, blocks_per_request], -1 padded */
  const int32_t* request_rows; /* [num_items] row of block_table, -1: padded */
  const int32_t* lens;         /* [num_items] */
} kv4_rows_view;

/* Fills in `size`, sizeof(kv4_swa_view), and the defaults. */
KV4_C_API void kv4_swa_view_init(kv4_swa_view* view, size_t size);
/* Fills in `size`, sizeof(kv4_rows_view), and the defaults. */
KV4_C_API void kv4_rows_view_init(kv4_rows_view* view, size_t size);
/* The window. */
KV4_C_API kv4_status kv4_cache_read_swa_view(kv4_cache* cache, int32_t layer, kv4_swa_view* out);
/* Entries. */
KV4_C_API kv4_status kv4_cache_read_classical_view(kv4_cache* cache, int32_t layer, kv4_rows_view* out);
/* Index keys. */
KV4_C_API kv4_status kv4_cache_read_indexer_view(kv4_cache* cache, int32_t layer, kv4_rows_view* out);

/* ---- Requests as bytes ---- */

/* Size of the request's image now. */
KV4_C_API kv4_status kv4_cache_image_bytes(const kv4_cache* cache, kv4_request request, int64_t* out);
/* Both exactly as large as they are: image [kv4_cache_image_bytes], blocks [blocks, block_image_bytes]. */
KV4_C_API kv4_status kv4_cache_export_image(const kv4_cache* cache, kv4_request request, void* out, size_t bytes);
/* The request's entries and index keys, block by block. */
KV4_C_API kv4_status kv4_cache_export_blocks(const kv4_cache* cache, kv4_request request, void* out, size_t bytes);

/* The results of kv4_cache_export_image and kv4_cache_export_blocks, and the token ids. */
typedef struct kv4_import {
  size_t size;
  uint64_t layout_id;     /* of the cache that exported (kv4_cache_info) */
  const int64_t* lengths; /* [num_lengths]: backbone, draft stages */
  int64_t num_lengths;
  const int32_t* token_ids;
  int64_t num_tokens;
  kv4_bytes image;
  kv4_bytes blocks;
} kv4_import;

/* Fills in `size`, sizeof(kv4_import), and the defaults. */
KV4_C_API void kv4_import_init(kv4_import* import, size_t size);
/* A new request from exported bytes. */
KV4_C_API kv4_status kv4_cache_import_image(kv4_cache* cache, const kv4_import* import, kv4_request* out);

/* The identity of a session: kv4::SessionIdentity; layout and model come from the cache. The salt keeps tenants'
 * contexts apart and proves nothing: a reader of one session of a tenant can make another that restores. Without one of
 * the keys nobody can. */
typedef struct kv4_session_identity {
  size_t size;
  const char* weights_id;
  kv4_bytes salt;
  uint64_t tenant;
  const kv4_bytes* block_extra; /* [num_block_extra] */
  int64_t num_block_extra;
  const kv4_cache_key* keys; /* [num_keys] the first protects the saved session; one of them made a restored one */
  int64_t num_keys;
  const char* protection; /* of sessions saved with keys: "sealed", "authenticated" */
  int32_t accept_unauthenticated;
  int32_t share_of; /* whose share of a prefix cache the blocks of a restored session count for */
} kv4_session_identity;

/* Fills in `size`, sizeof(kv4_session_identity), and the defaults. */
KV4_C_API void kv4_session_identity_init(kv4_session_identity* identity, size_t size);
/* The request in a file, at any length; it runs on. */
KV4_C_API kv4_status kv4_cache_save_session_file(kv4_cache* cache, kv4_request request,
                                                 const kv4_session_identity* identity, const char* path,
                                                 kv4_progress progress, void* user);
/* A new request from the file. */
KV4_C_API kv4_status kv4_cache_restore_session_file(kv4_cache* cache, const kv4_session_identity* identity,
                                                    const char* path, kv4_progress progress, void* user,
                                                    kv4_request* out);

/* Host memory, pinned for a GPU, with room for one request at a time: set aside to make room, and taken up again. */
typedef struct kv4_preempted kv4_preempted;

/* Host memory that the request needs at its present length. */
KV4_C_API kv4_status kv4_cache_preempted_bytes(const kv4_cache* cache, kv4_request request, int64_t* out);
/* Room of so many bytes; made once and used again. */
KV4_C_API kv4_status kv4_preempted_new(kv4_cache* cache, int64_t bytes, kv4_preempted** out);
/* With the request in it, if there is one. */
KV4_C_API void kv4_preempted_free(kv4_preempted* preempted);
/* Copies the request out and releases it. */
KV4_C_API kv4_status kv4_cache_preempt(kv4_cache* cache, kv4_request request, kv4_preempted* to);
/* Back into a cache of the same layout. */
KV4_C_API kv4_status kv4_cache_resume(kv4_cache* cache, kv4_preempted* from, kv4_request* out);

/* ---- Prefix cache ---- */

/* Counters since the cache was made, then blocks and snapshots kept now. */
typedef struct kv4_prefix_statistics {
  size_t size;
  int64_t prompts;
  int64_t hits;
  int64_t prompt_tokens;
  int64_t usable_tokens;
  int64_t replayed_tokens;
  int64_t stored_blocks;
  int64_t joined_blocks;
  int64_t inserted_blocks;
  int64_t evicted_blocks;
  int64_t saved_snapshots;
  int64_t restored_snapshots;
  int64_t dropped_snapshots;
  uint64_t lost_events;
  int64_t blocks;
  int64_t snapshots;
} kv4_prefix_statistics;

/* An event of a block; KV4_EVENT_KIND_SNAPSHOT: one at its end is kept. */
typedef enum kv4_event_kind {
  KV4_EVENT_KIND_STORED = 0,
  KV4_EVENT_KIND_EVICTED = 1,
  KV4_EVENT_KIND_SNAPSHOT = 2
} kv4_event_kind;

/* The name of a block: SHA-256 over all that decides its bytes. */
typedef struct kv4_block_key {
  uint8_t bytes[32];
} kv4_block_key;

/* A change of the prefix cache: kv4::BlockEvent. */
typedef struct kv4_block_event {
  size_t size;
  kv4_block_key key;
  int32_t kind;
  int32_t inserted;
} kv4_block_event;

/* A block that prompts find by its key: kv4::PrefixBlock. */
typedef struct kv4_prefix_block {
  size_t size;
  int64_t tokens; /* from the start of its chain to its end */
  int32_t tenant;
  int32_t has_snapshot;
} kv4_prefix_block;

/* Fills in `size`, sizeof(kv4_prefix_statistics), and the defaults. */
KV4_C_API void kv4_prefix_statistics_init(kv4_prefix_statistics* statistics, size_t size);
/* Fills in `size`, sizeof(kv4_block_event), and the defaults. */
KV4_C_API void kv4_block_event_init(kv4_block_event* event, size_t size);
/* Fills in `size`, sizeof(kv4_prefix_block), and the defaults. */
KV4_C_API void kv4_prefix_block_init(kv4_prefix_block* block, size_t size);
/* Zeros where the prefix cache is off. */
KV4_C_API kv4_status kv4_cache_get_prefix_statistics(const kv4_cache* cache, kv4_prefix_statistics* out);
/* The oldest events into out [capacity], of which the first is set up; they are gone then. A cache that has a
 * kv4_tiered_prefix gives its events to that one alone. */
KV4_C_API kv4_status kv4_cache_read_block_events(kv4_cache* cache, kv4_block_event* out, int64_t capacity,
                                                 int64_t* count);
/* Prompts find and leave blocks of these weights from now on. */
KV4_C_API kv4_status kv4_cache_set_weights_id(kv4_cache* cache, const char* weights_id);
/* Forgets all that was computed with these weights. */
KV4_C_API kv4_status kv4_cache_invalidate(kv4_cache* cache, const char* weights_id);

/* Keys of all full blocks of a prompt, in the way of kv4_cache_token_ids. */
KV4_C_API kv4_status kv4_cache_block_keys(kv4_cache* cache, const kv4_prompt* prompt, kv4_block_key* out,
                                          int64_t capacity, int64_t* count);
/* *found 1, and out describes the block of the key; out may be NULL. */
KV4_C_API kv4_status kv4_cache_find_block(const kv4_cache* cache, const kv4_block_key* key, kv4_prefix_block* out,
                                          int32_t* found);
/* Size of an image at a block boundary. */
KV4_C_API kv4_status kv4_cache_snapshot_bytes(const kv4_cache* cache, int64_t* out);
/* A prefix block [block_image_bytes]. *found 0: it is not there. */
KV4_C_API kv4_status kv4_cache_read_block(const kv4_cache* cache, const kv4_block_key* key, void* out, size_t bytes,
                                          int32_t* found);
/* The snapshot at its end [kv4_cache_snapshot_bytes], in the same way. */
KV4_C_API kv4_status kv4_cache_read_snapshot(const kv4_cache* cache, const kv4_block_key* key, void* out, size_t bytes,
                                             int32_t* found);
/* Blocks of the prompt that follow those kept [num_blocks], taken as they are; *inserted: as many as there was room
 * for. */
KV4_C_API kv4_status kv4_cache_insert_blocks(kv4_cache* cache, const kv4_prompt* prompt, const kv4_bytes* blocks,
                                             int64_t num_blocks, int64_t* inserted);
/* At the end of a prefix block. *inserted 0: the block is not there, or there is no place. */
KV4_C_API kv4_status kv4_cache_insert_snapshot(kv4_cache* cache, const kv4_block_key* key, kv4_bytes snapshot,
                                               int32_t* inserted);

/* ---- Statistics ---- */

/* Calls by their time: counts[i] of at most kv4_time_histogram_bound(i) seconds and more than the bound before; the
 * last bucket has no bound. Calls that came back count, those with a shortage included. */
typedef struct kv4_time_histogram {
  int64_t counts[23];
  int64_t sum_seconds; /* of all calls, together with sum_ns */
  int64_t sum_ns;      /* below 10^9 */
} kv4_time_histogram;

/* The state of a cache and its counts: kv4::CacheStatistics. */
typedef struct kv4_cache_statistics {
  size_t size;
  int64_t requests; /* this and those up to memory_bytes: now */
  int64_t max_requests;
  int64_t blocks;
  int64_t free_blocks;
  int64_t held_blocks;
  int64_t evictable_blocks;
  int64_t slots;
  int64_t free_slots;
  int64_t memory_bytes;
  int64_t admit_shortages; /* calls that found no room, since the cache was made */
  int64_t prepare_forward_shortages;
  kv4_time_histogram admit;
  kv4_time_histogram prepare_forward;
  kv4_time_histogram session_save;
  kv4_time_histogram session_restore;
  kv4_time_histogram tier_save;
  kv4_time_histogram tier_load;
} kv4_cache_statistics;

KV4_C_API double kv4_time_histogram_bound(int32_t bucket); /* in seconds; infinity from the last bucket on */
/* Fills in `size`, sizeof(kv4_cache_statistics), and the defaults. */
KV4_C_API void kv4_cache_statistics_init(kv4_cache_statistics* statistics, size_t size);
/* The figures now. */
KV4_C_API kv4_status kv4_cache_get_statistics(const kv4_cache* cache, kv4_cache_statistics* out);

/* ---- Tiers: the prefix cache below the device ---- */

/* Host memory, a disk, Redis servers: kv4::Tiers. Caches of one layout may use them in turn. */
typedef struct kv4_tiers kv4_tiers;

/* Which tiers there are, the fastest first: kv4::TiersOptions. */
typedef struct kv4_tiers_options {
  size_t size;
  int64_t host_bytes;    /* 0: no host memory */
  const char* directory; /* "": no disk */
  int64_t disk_bytes;
  int64_t segment_bytes;
  int32_t host_threads;
  int32_t disk_threads;
  const char* const* servers; /* [num_servers] "redis://user:password@host:port", "rediss://...", "host:port" */
  int64_t num_servers;        /* 0: no servers */
  const char* user;
  const char* password;
  const char* const* allowed_servers; /* [num_allowed_servers] that the cluster may name */
  int64_t num_allowed_servers;
  const char* tls_ca_file; /* PEM; "": the system's authorities */
  const char* tls_certificate_file;
  const char* tls_key_file;
  int64_t remote_ttl_ms;     /* 0: servers never forget */
  const kv4_cache_key* keys; /* [num_keys] the first writes, all read */
  int64_t num_keys;
  const kv4_cache_key* disk_key; /* of a store that 0.1 sealed; NULL: none */
  const char* protection;        /* of records written with keys: "sealed", "authenticated" */
  int32_t accept_unauthenticated;
  int64_t max_write_bytes;
  int64_t max_read_bytes;
  int64_t close_limit_ms;
} kv4_tiers_options;

/* The reach of a flush: not known; everything, until the machine or server that keeps it goes away; for good. */
typedef enum kv4_flush_status {
  KV4_FLUSH_STATUS_FAILED = 0,
  KV4_FLUSH_STATUS_KEPT = 1,
  KV4_FLUSH_STATUS_DURABLE = 2
} kv4_flush_status;

/* How many batches failed for a reason, by its name ("wrong_password", ...). */
typedef struct kv4_failure_count {
  const char* reason;
  int64_t count;
} kv4_failure_count;

/* Of one tier, since it was made: kv4::TierReport. Strings and lists are the tiers' own, until the next
 * kv4_tiers_get_reports or kv4_tiers_free. */
typedef struct kv4_tier_report {
  size_t size;
  const char* name;
  const char* protection; /* of written records */
  int64_t hits;
  int64_t misses;
  int64_t failed_gets;
  int64_t damaged;
  int64_t hit_bytes;
  int64_t stored;
  int64_t failed_puts;
  int64_t refused_puts;
  int64_t stored_bytes;
  int64_t promoted;
  int64_t waiting_bytes; /* now */
  int32_t open;          /* now: its circuit breaker; everything misses */
  int64_t times_opened;
  int64_t records; /* this and the next two: -1 where it is not known */
  int64_t payload_bytes;
  int64_t capacity_bytes;
  int64_t evicted_records;
  int64_t set_aside_records;
  int64_t unauthenticated_records;
  const char* failure; /* now: a reason; "": the tier works, as far as is known */
  const char* failure_detail;
  const kv4_failure_count* failures; /* [num_failures] */
  int64_t num_failures;
  kv4_time_histogram get_times;
  kv4_time_histogram put_times;
} kv4_tier_report;

/* Fills in `size`, sizeof(kv4_tiers_options), and the defaults. */
KV4_C_API void kv4_tiers_options_init(kv4_tiers_options* options, size_t size);
/* Fills in `size`, sizeof(kv4_tier_report), and the defaults. */
KV4_C_API void kv4_tier_report_init(kv4_tier_report* report, size_t size);
/* For records of this cache's layout; on a GPU their host memory is pinned for its backend. */
KV4_C_API kv4_status kv4_tiers_new(const kv4_cache* cache, const kv4_tiers_options* options, kv4_tiers** out);
/* Closes them, within close_limit_ms. NULL: nothing. */
KV4_C_API void kv4_tiers_free(kv4_tiers* tiers);
/* Waits until everything before is written, timeout_ms at most. The worst that a tier reached goes to *out. */
KV4_C_API kv4_status kv4_tiers_flush(kv4_tiers* tiers, int64_t timeout_ms, kv4_flush_status* out);
/* The same, and nothing is found or taken any more. */
KV4_C_API kv4_status kv4_tiers_close(kv4_tiers* tiers, int64_t timeout_ms, kv4_flush_status* out);
/* One per tier into out [capacity], of which the first is set up; *count in the way of kv4_cache_token_ids. */
KV4_C_API kv4_status kv4_tiers_get_reports(kv4_tiers* tiers, kv4_tier_report* out, int64_t capacity, int64_t* count);

/* Joins a cache with its tiers: kv4::TieredPrefix. */
typedef struct kv4_tiered_prefix kv4_tiered_prefix;
/* A prompt's blocks on their way to the device: kv4::PrefixLoad. */
typedef struct kv4_prefix_load kv4_prefix_load;

/* Memory and time-outs: kv4::TieredOptions. */
typedef struct kv4_tiered_options {
  size_t size;
  int64_t load_bytes;
  int64_t save_bytes;
  int64_t max_waiting;
  int32_t max_attempts;
} kv4_tiered_options;

/* Counted since the kv4_tiered_prefix was made: kv4::TieredStatistics. */
typedef struct kv4_tiered_statistics {
  size_t size;
  int64_t offered_blocks;
  int64_t offered_snapshots;
  int64_t offered_again;
  int64_t dropped;
  int64_t loaded_blocks;
  int64_t loaded_snapshots;
  int64_t lost_events;
  int64_t waiting;
} kv4_tiered_statistics;

/* Fills in `size`, sizeof(kv4_tiered_options), and the defaults. */
KV4_C_API void kv4_tiered_options_init(kv4_tiered_options* options, size_t size);
/* Fills in `size`, sizeof(kv4_tiered_statistics), and the defaults. */
KV4_C_API void kv4_tiered_statistics_init(kv4_tiered_statistics* statistics, size_t size);
/* Cache and tiers are freed after it. options NULL: the defaults. */
KV4_C_API kv4_status kv4_tiered_prefix_new(kv4_cache* cache, kv4_tiers* tiers, const kv4_tiered_options* options,
                                           kv4_tiered_prefix** out);
/* NULL: nothing. Its loads are freed before it. */
KV4_C_API void kv4_tiered_prefix_free(kv4_tiered_prefix* tiered);
/* A request that begins with the blocks that the cache and its tiers have of the prompt. Waits for tiers timeout_ms at
 * most, or until progress says 0, and begins with the blocks that have come by then. */
KV4_C_API kv4_status kv4_tiered_prefix_admit(kv4_tiered_prefix* tiered, const kv4_prompt* prompt, int64_t timeout_ms,
                                             kv4_progress progress, void* user, kv4_admission* out);
/* The first half of it, for requests that begin otherwise: *brought blocks came. */
KV4_C_API kv4_status kv4_tiered_prefix_load(kv4_tiered_prefix* tiered, const kv4_prompt* prompt, int64_t timeout_ms,
                                            kv4_progress progress, void* user, int64_t* brought);
/* The first half of it beside the steps. */
KV4_C_API kv4_status kv4_tiered_prefix_start_load(kv4_tiered_prefix* tiered, const kv4_prompt* prompt,
                                                  int64_t timeout_ms, kv4_prefix_load** out);
/* Between steps: begins at most max_records; *left are to be offered or on their way. Waits for nothing. */
KV4_C_API kv4_status kv4_tiered_prefix_save(kv4_tiered_prefix* tiered, int64_t max_records, int64_t* left);
/* Until nothing is left; KV4_STOPPED: timeout_ms were over, or progress said 0. */
KV4_C_API kv4_status kv4_tiered_prefix_save_all(kv4_tiered_prefix* tiered, int64_t timeout_ms, kv4_progress progress,
                                                void* user);
/* The counters now. */
KV4_C_API kv4_status kv4_tiered_prefix_get_statistics(const kv4_tiered_prefix* tiered, kv4_tiered_statistics* out);

/* Between steps until *done is 1; waits for nothing. */
KV4_C_API kv4_status kv4_prefix_load_advance(kv4_prefix_load* load, int32_t* done);
/* The request, with what has come by now; the load ends. After a shortage it may be called again. */
KV4_C_API kv4_status kv4_prefix_load_admit(kv4_prefix_load* load, kv4_admission* out);
/* Blocks on the device by now, and asked for in all. */
KV4_C_API kv4_status kv4_prefix_load_progress(const kv4_prefix_load* load, int64_t* brought, int64_t* wanted);
/* Cancels it, where it goes on. NULL: nothing. */
KV4_C_API void kv4_prefix_load_free(kv4_prefix_load* load);

/* ---- A look from outside ---- */

/* A folder where the cache says how it stands, for `kv4 serve-metrics`, and where it can be asked for a request, for
 * `kv4 inspect` (kv4/status_folder.h). Free it before the cache and the tiers. */
typedef struct kv4_status_folder kv4_status_folder;

/* How often the status is written, and of what: kv4::StatusOptions. */
typedef struct kv4_status_options {
  size_t size;
  int64_t interval_ms;       /* the shortest time between two writes */
  kv4_tiers* tiers;          /* whose reports are published, too; NULL: none */
  const kv4_cache_key* keys; /* [num_keys] the first seals the requests that `kv4 inspect` asks for */
  int64_t num_keys;
} kv4_status_options;

/* Fills in `size`, sizeof(kv4_status_options), and the defaults. */
KV4_C_API void kv4_status_options_init(kv4_status_options* options, size_t size);
/* Makes the folder, for the owner alone. options NULL: the defaults. */
KV4_C_API kv4_status kv4_status_folder_new(kv4_cache* cache, const char* directory, const kv4_status_options* options,
                                           kv4_status_folder** out);
/* Between steps and while there is nothing to do, as often as you like. KV4_BAD_FILE: it could not be written, which is
 * no reason to stop. */
KV4_C_API kv4_status kv4_status_folder_publish(kv4_status_folder* folder);
/* Takes the status away. */
KV4_C_API void kv4_status_folder_free(kv4_status_folder* folder);

#ifdef __cplusplus
}
#endif

#endif /* KV4_H */
