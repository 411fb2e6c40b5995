/* Stores of chunks in C: opaque keys and values over tiers, without a cache. The rules at the head of kv4.h hold here,
 * too, and the calls mean what their C++ namesakes in kv4/chunk_store.h mean. Any thread may call a store. */
#ifndef KV4_CHUNKS_H
#define KV4_CHUNKS_H

#include "kv4.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Chunks in host memory, on disk and on servers: kv4::ChunkStore. */
typedef struct kv4_chunk_store kv4_chunk_store;

/* kv4::ChunkStoreOptions. */
typedef struct kv4_chunk_store_options {
  size_t size;
  const kv4_tiers_options* tiers; /* must be set */
  kv4_bytes space;
  int64_t host_page_bytes;
  int64_t max_chunks;
  int32_t value_follows_key;
} kv4_chunk_store_options;

/* Of a batch: kv4::ChunkCall. */
typedef struct kv4_chunk_call {
  size_t size;
  uint64_t tenant;
  int64_t timeout_ms;
} kv4_chunk_call;

/* What became of a chunk: kv4::ChunkStatus. */
typedef enum kv4_chunk_status {
  KV4_CHUNK_STATUS_OK = 0,
  KV4_CHUNK_STATUS_MISSING = 1,
  KV4_CHUNK_STATUS_TOO_SMALL = 2,
  KV4_CHUNK_STATUS_TOO_LARGE = 3,
  KV4_CHUNK_STATUS_NO_SPACE = 4,
  KV4_CHUNK_STATUS_REFUSED = 5,
  KV4_CHUNK_STATUS_FAILED = 6
} kv4_chunk_status;
/* What a batch was: kv4::ChunkAction. */
typedef enum kv4_chunk_action {
  KV4_CHUNK_ACTION_PUT = 0,
  KV4_CHUNK_ACTION_GET = 1,
  KV4_CHUNK_ACTION_EXISTS = 2,
  KV4_CHUNK_ACTION_REMOVE = 3,
  KV4_CHUNK_ACTION_FLUSH = 4
} kv4_chunk_action;
/* The answer of kv4_chunk_store_look_up: kv4::ChunkPresence. */
typedef enum kv4_chunk_presence {
  KV4_CHUNK_PRESENCE_ABSENT = 0,
  KV4_CHUNK_PRESENCE_THERE = 1,
  KV4_CHUNK_PRESENCE_UNKNOWN = 2
} kv4_chunk_presence;

/* The end of a batch: kv4::ChunkResults. */
typedef struct kv4_chunk_results kv4_chunk_results;
/* Its content; lists are valid until kv4_chunk_results_free. */
typedef struct kv4_chunk_results_view {
  size_t size;
  uint64_t batch;
  int32_t action;          /* kv4_chunk_action */
  int64_t count;           /* of chunks */
  const int32_t* statuses; /* [count] kv4_chunk_status */
  const int64_t* bytes;    /* [count] of values, for a get that is OK or TOO_SMALL; else 0 */
  int64_t num_flushed;     /* of a flush: tiers; else 0 */
  const int32_t* flushed;  /* [num_flushed] kv4_flush_status */
} kv4_chunk_results_view;

/* Counted since the store was made: kv4::ChunkStoreReport. */
typedef struct kv4_chunk_store_report {
  size_t size;
  int64_t puts;
  int64_t gets;
  int64_t hits;
  int64_t exists;
  int64_t removes;
  int64_t flushes;
  int64_t refused;
  int64_t failed;
  int64_t put_bytes;
  int64_t hit_bytes;
  int64_t trimmed_bytes;
  int64_t damaged;
  int64_t open_chunks;
  int64_t memory_in_use;
} kv4_chunk_store_report;

/* Fills in `size`, sizeof(kv4_chunk_store_options), and the defaults. */
KV4_C_API void kv4_chunk_store_options_init(kv4_chunk_store_options* options, size_t size);
/* Fills in `size`, sizeof(kv4_chunk_call), and the defaults. */
KV4_C_API void kv4_chunk_call_init(kv4_chunk_call* call, size_t size);
/* Fills in `size`, sizeof(kv4_chunk_results_view), and zeros. */
KV4_C_API void kv4_chunk_results_view_init(kv4_chunk_results_view* view, size_t size);
/* Fills in `size`, sizeof(kv4_chunk_store_report), and zeros. */
KV4_C_API void kv4_chunk_store_report_init(kv4_chunk_store_report* report, size_t size);

/* The store goes to *out; free it with kv4_chunk_store_free. */
KV4_C_API kv4_status kv4_chunk_store_new(const kv4_chunk_store_options* options, kv4_chunk_store** out);
/* Closes it, within close_limit_ms. NULL: nothing. */
KV4_C_API void kv4_chunk_store_free(kv4_chunk_store* store);
/* Registers memory, which outlives the store; its number goes to *out. */
KV4_C_API kv4_status kv4_chunk_store_add_memory(kv4_chunk_store* store, kv4_memory memory, uint64_t* out);
/* *removed 0: transfers still use it, or there is no such memory. */
KV4_C_API kv4_status kv4_chunk_store_remove_memory(kv4_chunk_store* store, uint64_t memory, int32_t* removed);

/* Begins a batch of `count` chunks; its number goes to *batch. Pieces of all values lie one after the other in
 * `pieces`; num_pieces [count] says how many each has, NULL: one. call NULL: the defaults. */
KV4_C_API kv4_status kv4_chunk_store_put(kv4_chunk_store* store, const kv4_bytes* keys, const kv4_bytes* pieces,
                                         const int64_t* num_pieces, int64_t count, const kv4_chunk_call* call,
                                         uint64_t* batch);
/* The memory of the pieces stays until the batch has ended. */
KV4_C_API kv4_status kv4_chunk_store_get(kv4_chunk_store* store, const kv4_bytes* keys, const kv4_memory* pieces,
                                         const int64_t* num_pieces, int64_t count, const kv4_chunk_call* call,
                                         uint64_t* batch);
/* Begins to ask which keys have a value. */
KV4_C_API kv4_status kv4_chunk_store_exists(kv4_chunk_store* store, const kv4_bytes* keys, int64_t count,
                                            const kv4_chunk_call* call, uint64_t* batch);
/* Begins to remove values. */
KV4_C_API kv4_status kv4_chunk_store_remove(kv4_chunk_store* store, const kv4_bytes* keys, int64_t count,
                                            const kv4_chunk_call* call, uint64_t* batch);
/* Begins to make durable what was put before. */
KV4_C_API kv4_status kv4_chunk_store_flush(kv4_chunk_store* store, const kv4_chunk_call* call, uint64_t* batch);
/* A kv4_chunk_presence for each key into out [count], at once and from memory. */
KV4_C_API kv4_status kv4_chunk_store_look_up(const kv4_chunk_store* store, const kv4_bytes* keys, int64_t count,
                                             uint64_t tenant, int32_t* out);
/* Readable while batches have ended that nobody has taken. */
KV4_C_API kv4_status kv4_chunk_store_event_fd(const kv4_chunk_store* store, int32_t* fd);
/* Waits timeout_ms at most until a batch has ended; KV4_STOPPED: none has. batch 0: any, else that one. */
KV4_C_API kv4_status kv4_chunk_store_take(kv4_chunk_store* store, uint64_t batch, int64_t timeout_ms,
                                          kv4_chunk_results** out);
/* What a batch came to, into *out. */
KV4_C_API kv4_status kv4_chunk_results_get_view(const kv4_chunk_results* results, kv4_chunk_results_view* out);
/* NULL: nothing. */
KV4_C_API void kv4_chunk_results_free(kv4_chunk_results* results);
/* Ends the open batches and closes the tiers, timeout_ms at most. The worst that a tier reached goes to *out. */
KV4_C_API kv4_status kv4_chunk_store_close(kv4_chunk_store* store, int64_t timeout_ms, kv4_flush_status* out);
/* The figures now. */
KV4_C_API kv4_status kv4_chunk_store_get_report(const kv4_chunk_store* store, kv4_chunk_store_report* out);
/* As kv4_tiers_get_reports. */
KV4_C_API kv4_status kv4_chunk_store_get_tier_reports(kv4_chunk_store* store, kv4_tier_report* out, int64_t capacity,
                                                      int64_t* count);

#ifdef __cplusplus
}
#endif

#endif /* KV4_CHUNKS_H */
