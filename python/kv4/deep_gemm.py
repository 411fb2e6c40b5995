"""DeepGEMM's index scores by kv4's kernels, and everything else of an installed `deep_gemm`: `import kv4.deep_gemm as
deep_gemm`.

Replaced are `fp8_mqa_logits`, `fp8_paged_mqa_logits`, `fp8_fp4_mqa_logits`, `fp8_fp4_paged_mqa_logits` and
`get_paged_mqa_logits_metadata`, in both generations of their signatures: fp8 keys of 32, 64 and 128 channels, fp4 keys
of 128 (mxfp4), 1 to 64 heads, pages of any number of keys.
"""
from __future__ import annotations

import importlib
import sys
from typing import Any, Tuple, Union

import torch
from torch import Tensor

from . import torch as _operators
from .errors import ArgumentError

Queries = Union[Tensor, Tuple[Tensor, "Tensor | None"]]

#: Why nothing but the index scores is here; empty if DeepGEMM is installed.
why_no_deep_gemm = ""


def _load_theirs() -> Any:
    """The installed DeepGEMM. Its import can fail in many ways without a GPU."""
    global why_no_deep_gemm
    theirs = sys.modules.get("deep_gemm")
    if theirs is sys.modules[__name__]:
        return None
    try:
        return importlib.import_module("deep_gemm")
    except Exception as error:
        why_no_deep_gemm = f"{type(error).__name__}: {error}"
        return None


_theirs = _load_theirs()
if _theirs is not None:
    globals().update({name: value for name, value in vars(_theirs).items() if not name.startswith("__")})
    if hasattr(_theirs, "__path__"):
        __path__ = list(_theirs.__path__)  # for submodules that it has not imported


def __getattr__(name: str) -> Any:
    if _theirs is None:
        raise AttributeError(f"kv4.deep_gemm has no {name!r}: only index scores are its own, and deep_gemm cannot be "
                             f"imported ({why_no_deep_gemm})")
    return getattr(_theirs, name)


_ROW_ALIGNMENT = 1024  # bytes between rows of logits


def _queries(q: Queries, call: str) -> tuple[Tensor, Tensor | None, str]:
    """Queries, their scales and the format of queries and keys."""
    values, scales = q if isinstance(q, (tuple, list)) else (q, None)
    if scales is None:
        if values.dtype != torch.float8_e4m3fn:
            raise ArgumentError(f"{call}: q must be float8_e4m3fn, or a pair of fp4 codes and scales; got "
                                f"{values.dtype}")
        return values, None, "fp8"
    if values.dtype not in (torch.int8, torch.uint8) or values.shape[-1] != 64:
        raise ArgumentError(f"{call}: q with scales must be int8 or uint8 [..., 64], two fp4 codes in a byte; got "
                            f"{values.dtype} {list(values.shape)}")
    return values, scales, "mxfp4"


def _new_logits(q: Tensor, tokens: int, columns: int, dtype: torch.dtype, call: str) -> Tensor:
    """Logits with rows of whole 1,024 bytes; the caller gets the first `columns`."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ArgumentError(f"{call}: logits_dtype must be torch.float32 or torch.bfloat16; got {dtype}")
    step = _ROW_ALIGNMENT // dtype.itemsize
    return torch.empty((tokens, max(-(-columns // step), 1) * step), dtype=dtype, device=q.device)


def _check_count(value: Any, name: str, call: str) -> None:
    if not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ArgumentError(f"{call}: {name} must be an int from 0 to 2147483647; got {value!r}")


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None,
) -> Tensor:
    """A plan of the shape that callers expect, int32 [num_sms + 1, 2]. No call of this module reads it."""
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


def fp8_fp4_paged_mqa_logits(
    q: Queries, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor,
    schedule_meta: Tensor | None, max_context_len: int, clean_logits: Any = False,
    logits_dtype: torch.dtype = torch.float32, indices: Tensor | None = None,
) -> Tensor:
    """Logits [b * next_n, max_context_len]; -inf behind each token's context, whatever clean_logits is. `indices` only
    says which rows of q share a request: each has its own row of block_table."""
    call = "fp8_fp4_paged_mqa_logits"
    _check_count(max_context_len, "max_context_len", call)
    values, scales, format = _queries(q, call)
    if values.dim() != 4:
        raise ArgumentError(f"{call}: q must be [b, next_n, heads, channels]; got {list(values.shape)}")
    tokens = values.shape[0] * values.shape[1]
    logits = _new_logits(values, tokens, max_context_len, logits_dtype, call)
    if weights.dtype == torch.bfloat16:
        weights = weights.float()
    _operators.index_scores(values, kv_cache, weights, context_lens, block_table, logits.shape[1], q_scale=scales,
                            format=format, mode="fast", out=logits)
    return logits[:, :max_context_len]


def fp8_paged_mqa_logits(
    q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor,
    schedule_meta: Tensor | None, max_context_len: int, clean_logits: Any = False, indices: Tensor | None = None,
) -> Tensor:
    """`fp8_fp4_paged_mqa_logits` with fp8 queries and float32 logits."""
    return fp8_fp4_paged_mqa_logits((q, None), kv_cache, weights, context_lens, block_table, schedule_meta,
                                    max_context_len)


def fp8_fp4_mqa_logits(
    q: Queries, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seq_len_k_start: Tensor, cu_seq_len_k_end: Tensor,
    clean_logits: Any = True, max_seqlen_k: Any = 0, logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """Logits [tokens, keys], -inf where a token sees no key, whatever clean_logits is; or, with max_seqlen_k > 0,
    [tokens, max_seqlen_k] from each token's first key on."""
    call = "fp8_fp4_mqa_logits"
    if not isinstance(clean_logits, bool):  # the signature without clean_logits: max_seqlen_k, schedule_meta
        clean_logits, max_seqlen_k = True, clean_logits
    _check_count(max_seqlen_k, "max_seqlen_k", call)
    values, scales, format = _queries(q, call)
    keys, key_scales = kv
    columns = max_seqlen_k if max_seqlen_k > 0 else keys.shape[0]
    logits = _new_logits(values, values.shape[0], columns, logits_dtype, call)
    if weights.dtype == torch.bfloat16:
        weights = weights.float()
    _operators.index_scores_rows(values, keys, key_scales, weights, cu_seq_len_k_start, cu_seq_len_k_end,
                                 max_keys=max_seqlen_k, q_scale=scales, format=format, mode="fast", out=logits)
    return logits[:, :columns]


def fp8_mqa_logits(
    q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seq_len_k_start: Tensor, cu_seq_len_k_end: Tensor,
    clean_logits: Any = True, max_seqlen_k: Any = 0,
) -> Tensor:
    """`fp8_fp4_mqa_logits` with fp8 queries and float32 logits."""
    return fp8_fp4_mqa_logits((q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)
