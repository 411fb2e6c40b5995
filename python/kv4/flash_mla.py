"""FlashMLA's functions for V4's rows, in all generations of their signatures: `import kv4.flash_mla as flash_mla`.

Sparse decoding over pages of 584-byte rows and sparse prefill over bf16 rows, for 1 to 128 heads. What FlashMLA has
besides (dense attention, V3.2's rows) is refused by name. Nothing is planned: schedule metadata is accepted, and
ignored.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from . import torch as _operators
from .errors import ArgumentError

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

_CHANNELS = 512
_ROW_BYTES = 584
# Rows of FlashMLA that kv4 does not read here, by their bytes.
_OTHER_ROWS = {656: "V3.2's rows of 656 bytes (d_qk 576)", 528: "V4.1's fp8 rows of 528 bytes",
               288: "V4.1's fp4 rows of 288 bytes"}
_LOG2_E = 1.4426950408889634


@dataclasses.dataclass
class FlashMLASchedMeta:
    """What `get_mla_metadata` returns: an empty plan. No call reads or fills it."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty plan and None, for any arguments."""
    return FlashMLASchedMeta(), None


def _refuse(call: str, name: str, rule: str) -> ArgumentError:
    return ArgumentError(f"{call}: {name} {rule}")


def _check_cache(cache: Tensor, name: str) -> None:
    row_bytes = cache.shape[-1]
    if row_bytes != _ROW_BYTES or cache.dim() != 4:
        kind = _OTHER_ROWS.get(row_bytes)
        raise _refuse("flash_mla_with_kvcache", name,
                      f"must be [pages, rows, 1, {_ROW_BYTES}]: V4's rows of {_ROW_BYTES} bytes; got "
                      f"{list(cache.shape)}" + (f": kv4 does not read {kind}" if kind else ""))


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
    tile_scheduler_metadata: Any = None, num_splits: Any = None, softmax_scale: float | None = None,
    causal: bool = False, is_fp8_kvcache: bool | None = None, indices: Tensor | None = None,
    attn_sink: Tensor | None = None, extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None, topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None, enable_batch_invariant: Any = False, use_legacy: Any = False,
    kv_format: str | None = None, descale_q: Tensor | None = None, descale_k: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse decoding: out [b, s_q, h_q, 512] bf16 and lse [b, h_q, s_q] f32, without the sink, +inf without rows."""
    if isinstance(attn_sink, bool):  # SGLang's older order: causal, descale_q, descale_k, is_fp8_kvcache, indices, ...
        descale_q, descale_k, is_fp8_kvcache = is_fp8_kvcache, indices, attn_sink
        indices, attn_sink, extra_k_cache = extra_k_cache, extra_indices_in_kvcache, topk_length
        extra_indices_in_kvcache = extra_topk_length
        topk_length = None if enable_batch_invariant is False else enable_batch_invariant
        extra_topk_length = None if use_legacy is False else use_legacy
        enable_batch_invariant = False
    elif isinstance(enable_batch_invariant, Tensor):  # vLLM's order: out is the next argument
        out, enable_batch_invariant = enable_batch_invariant, False
    if indices is None:
        raise _refuse("flash_mla_with_kvcache", "indices",
                      "must be given: kv4 has no dense attention over a block table")
    if causal:
        raise _refuse("flash_mla_with_kvcache", "causal", "must be False with indices; got True")
    if is_fp8_kvcache is False:
        raise _refuse("flash_mla_with_kvcache", "is_fp8_kvcache", "must be True with indices; got False")
    if enable_batch_invariant:
        raise _refuse("flash_mla_with_kvcache", "enable_batch_invariant", "must be False; got True")
    if kv_format is not None and kv_format != "V4":
        raise _refuse("flash_mla_with_kvcache", "kv_format", f"must be None or 'V4'; got {kv_format!r}")
    if descale_q is not None or descale_k is not None:
        raise _refuse("flash_mla_with_kvcache", "descale_q and descale_k",
                      "must be None: they belong to dense attention over fp8")
    _check_cache(k_cache, "k_cache")
    if extra_k_cache is not None:
        _check_cache(extra_k_cache, "extra_k_cache")
    shape = q.shape
    if len(shape) != 4 or shape[3] != _CHANNELS or head_dim_v != _CHANNELS:
        raise _refuse("flash_mla_with_kvcache", "q and head_dim_v",
                      f"must be [b, s_q, h_q, {_CHANNELS}] and {_CHANNELS}; got {list(shape)} and {head_dim_v}")
    if softmax_scale is None:
        softmax_scale = _CHANNELS ** -0.5
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    _operators._attend(q, k_cache, indices, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length,
                       attn_sink, softmax_scale, "fp8_tile64", "fp8_tile64", True, None, out, lse, None)
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = _CHANNELS, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None, use_legacy: Any = False, return_log2_lse: bool | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sparse prefill: out [s_q, h_q, 512] bf16, max_logits and lse [s_q, h_q] f32, neither with the sink.

    return_log2_lse: True gives both statistics in base 2, False gives None for both.
    """
    if isinstance(use_legacy, Tensor):  # vLLM's order: out is the next argument
        out = use_legacy
    shape = q.shape
    if len(shape) != 3 or shape[2] != _CHANNELS or d_v != _CHANNELS:
        raise _refuse("flash_mla_sparse_fwd", "q and d_v",
                      f"must be [s_q, h_q, {_CHANNELS}] and {_CHANNELS}; got {list(shape)} and {d_v}"
                      + (": kv4 does not take d_qk 576" if shape[-1] == 576 else ""))
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=q.device)
    statistics = None
    if return_log2_lse is not False:
        statistics = torch.empty((2, *shape[:2]), dtype=torch.float32, device=q.device)
    max_logits, lse = (None, None) if statistics is None else statistics.unbind()
    _operators._attend_bf16_rows(q, kv, indices, topk_length, attn_sink, sm_scale, True, out, lse, max_logits)
    if return_log2_lse and statistics is not None:
        statistics.mul_(_LOG2_E)
    return out, max_logits, lse
