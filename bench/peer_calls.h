/* Raw operations of kv4 for tools/peer_bench: it calls them with ctypes on the tensors that it gives to other projects'
 * kernels. Every field has 8 bytes, in the order of PeerAttend and PeerIndex of that script. Addresses are on the
 * device, or of host memory where `on_host` is 1. A call returns 0, a cudaError_t, or -1 if kv4 refuses it. The library
 * owns only a CPU backend. Calls of several threads may overlap on the device, not on the host. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV4_PEER_API __attribute__((visibility("default")))

/* Rows of fp8_tile64: block b, row r at base + b * stride; first 576 B of each row, then 8 B of each. */
typedef struct kv4_peer_attend {
  int64_t on_host, stream;
  int64_t num_tokens, num_requests, num_heads;
  double softmax_scale;
  int64_t q, sink, out, lse;             /* bf16 [tokens, heads, 512], f32 [heads], as q, f32 [tokens, heads] or 0 */
  int64_t records;                       /* i32 [tokens, 8]: kv4/params.h, StepRecord */
  int64_t block_table, blocks_per_request; /* i32 [requests, blocks_per_request] of pages of entries */
  int64_t ring, ring_scales, ring_stride; /* window rows: slot s at + s * ring_stride, 128 rows */
  int64_t scratch, scratch_scales;       /* window rows of a chunk's own tokens, or 0 */
  int64_t pages, page_stride, page_rows; /* entries; pages 0: none */
  int64_t ratio;
  int64_t chosen, num_chosen;            /* i32 [tokens, num_chosen], or 0: all visible entries */
  int64_t workspace, workspace_bytes;
} kv4_peer_attend;

/* Index keys of 128 channels: a page has the payloads of all its rows, then 4 B of each. */
typedef struct kv4_peer_index {
  int64_t on_host, stream;
  int64_t num_tokens, num_requests, num_heads;
  int64_t format;                        /* 0 fp8 (128 + 4 B), 1 mxfp4 (64 + 4 B) */
  int64_t q, q_scale, q_row_stride;      /* encoded as keys are: u8 [tokens, heads * payload], u8 [tokens, heads * 4] */
  int64_t weights;                       /* f32 [tokens, heads] */
  int64_t records, block_table, blocks_per_request;
  int64_t pages, page_stride, page_rows;
  int64_t ratio;
  int64_t scores, score_stride;          /* f32, of kv4_peer_index_scores and kv4_peer_select_topk */
  int64_t fast;                          /* 1: ScoreMode::fast */
  int64_t top, indices;                  /* i32 [tokens, top] */
  int64_t workspace, workspace_bytes;
} kv4_peer_index;

KV4_PEER_API int kv4_peer_attend_call(const kv4_peer_attend* call);
KV4_PEER_API int kv4_peer_index_scores(const kv4_peer_index* call);
KV4_PEER_API int kv4_peer_index_topk(const kv4_peer_index* call);
KV4_PEER_API int kv4_peer_select_topk(const kv4_peer_index* call);
/* The message of kv4's last refusal. */
KV4_PEER_API const char* kv4_peer_refusal(void);
/* Sizes of the two structs: a script of another version sees the difference. */
KV4_PEER_API int64_t kv4_peer_attend_struct_bytes(void);
KV4_PEER_API int64_t kv4_peer_index_struct_bytes(void);
/* The workspace with room to stage rows: `entries` of each request at most. */
KV4_PEER_API int64_t kv4_peer_attend_workspace_bytes(int64_t tokens, int64_t requests, int64_t entries);
/* The workspace that a cache plans for this number of keys and tokens. */
KV4_PEER_API int64_t kv4_peer_index_workspace_bytes(int64_t max_keys, int64_t tokens);
KV4_PEER_API const char* kv4_peer_version(void);
/* 1: the library was built with CUDA. */
KV4_PEER_API int kv4_peer_has_cuda(void);

#ifdef __cplusplus
}
#endif
