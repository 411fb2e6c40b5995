"""Operators on torch tensors that the caller owns: attention, index scores and rows of paged V4 pools, without a
manager.

docs/torch.md is the guide. Every operator takes the place of its tensors: CPU tensors run the CPU backend at once, CUDA
tensors are queued on torch's current stream. Nothing waits for the GPU, and no allocation depends on values, so calls
can be captured in CUDA graphs; `torch.compile(fullgraph=True)` keeps them as operators `kv4::...`.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _kv4

__all__ = [
    "append", "attend", "attend_bf16_rows", "attend_workspace", "gather", "index_scores", "index_scores_rows",
    "index_topk", "select_topk", "set_cpu_threads",
]

_calls: Any = _kv4
_library = torch.library.Library("kv4", "DEF")


def _define(schema: str) -> Any:
    """Registers `kv4::name` with the function of that name for both backends, and a fake of it."""
    name = schema.partition("(")[0]
    _library.define(schema + " -> ()", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    call = getattr(_calls, f"_tensor_{name}")
    for backend in ("CPU", "CUDA"):
        _library.impl(name, call, backend)
    torch.library.register_fake(f"kv4::{name}", lambda *args: None, lib=_library)
    return getattr(torch.ops.kv4, name).default


_attend = _define(
    "attend(Tensor q, Tensor cache, Tensor indices, Tensor? lens, Tensor? extra_cache, Tensor? extra_indices, "
    "Tensor? extra_lens, Tensor? sink, float softmax_scale, str format, str extra_format, bool lse_of_rows, "
    "Tensor(a!)? workspace, Tensor(b!) out, Tensor(c!)? lse, Tensor(d!)? max_logits)")
_attend_bf16_rows = _define(
    "attend_bf16_rows(Tensor q, Tensor rows, Tensor indices, Tensor? lens, Tensor? sink, float softmax_scale, "
    "bool lse_of_rows, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? max_logits)")
_append = _define("append(Tensor rows, Tensor(a!) cache, Tensor slots, str format)")
_gather = _define("gather(Tensor cache, Tensor slots, str format, Tensor(a!) out, Tensor(b!)? valid)")
_index_scores = _define(
    "index_scores(Tensor q, Tensor? q_scale, Tensor cache, Tensor weights, Tensor lens, Tensor block_table, "
    "str format, bool hadamard, str score_mode, Tensor(a!) logits)")
_index_topk = _define(
    "index_topk(Tensor q, Tensor? q_scale, Tensor cache, Tensor weights, Tensor lens, Tensor block_table, "
    "str format, bool hadamard, str score_mode, Tensor(a!) indices, Tensor(b!)? slots)")
_select_topk = _define("select_topk(Tensor scores, Tensor lens, Tensor(a!) indices)")
_index_scores_rows = _define(
    "index_scores_rows(Tensor q, Tensor? q_scale, Tensor keys, Tensor? key_scales, Tensor weights, Tensor begins, "
    "Tensor ends, str format, str score_mode, bool is_compact, Tensor(a!) logits)")

_LSE_MODES = {"all": False, "rows": True}


def _lse_of_rows(mode: str) -> bool:
    if mode not in _LSE_MODES:
        raise ValueError(f"lse_mode must be 'all' (with the sink) or 'rows' (without it); got {mode!r}")
    return _LSE_MODES[mode]


def set_cpu_threads(threads: int) -> None:
    """How many threads an operator on CPU tensors uses, the caller's included; 1 at first. No result depends on it."""
    _calls._tensor_set_cpu_threads(threads)


def attend_workspace(device: torch.device | str | int | None = None) -> Tensor:
    """A workspace for `attend`: with it more CTAs can share a token with a long list. Make it before a CUDA graph is
    captured. Calls that share one must be queued one after the other."""
    return torch.zeros(_calls._tensor_attend_workspace_bytes(), dtype=torch.uint8, device=device)


def attend(
    q: Tensor, cache: Tensor, indices: Tensor, softmax_scale: float, *, lens: Tensor | None = None,
    extra_cache: Tensor | None = None, extra_indices: Tensor | None = None, extra_lens: Tensor | None = None,
    sink: Tensor | None = None, format: str = "fp8_tile64", extra_format: str | None = None, lse_mode: str = "all",
    workspace: Tensor | None = None, out: Tensor | None = None, lse: Tensor | None = None,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each token over the rows that its lists name; K = V. Returns `out` and `lse`.

    q              bf16 or f32 [tokens, heads, channels], or [b, s_q, heads, channels]
    cache          [pages, rows, bytes of a row] or [pages, rows, 1, bytes]: all payloads of a page, then all its scales
    indices        i32 [tokens, n] or [b, s_q, n]: page * rows + row; anything outside of the pool names no row
    lens           i32 [tokens] or [b]: how many indices of a token count
    extra_...      a second pool with its own list
    sink           f32 [heads]: a logit that takes part in the softmax and adds no value; -inf: none
    lse_mode       "all": lse has the sink in it, -inf without rows and sink; "rows": without it, +inf without rows
    out            bf16 or f32 like q; lse f32 like q without channels; max_logits likewise, the largest scaled logit
    """
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    _attend(q, cache, indices, lens, extra_cache, extra_indices, extra_lens, sink, softmax_scale, format,
            format if extra_format is None else extra_format, _lse_of_rows(lse_mode), workspace, out, lse, max_logits)
    return out, lse


def attend_bf16_rows(
    q: Tensor, rows: Tensor, indices: Tensor, softmax_scale: float, *, lens: Tensor | None = None,
    sink: Tensor | None = None, lse_mode: str = "all", out: Tensor | None = None, lse: Tensor | None = None,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` over bf16 rows [n, channels] or [n, 1, channels] in one piece: q [tokens, heads, channels], indices
    [tokens, k] or [tokens, 1, k]."""
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    _attend_bf16_rows(q, rows, indices, lens, sink, softmax_scale, _lse_of_rows(lse_mode), out, lse, max_logits)
    return out, lse


def append(rows: Tensor, cache: Tensor, slots: Tensor, *, format: str = "fp8_tile64") -> None:
    """Encodes rows, bf16 or f32 [tokens, channels], normed and rotated, into slots i32 or i64 [tokens] of a pool. The
    slots of a call differ; one outside of the pool skips its row. Also for index keys (mxfp4, fp8, bf16), as they are
    to be stored."""
    _append(rows, cache, slots, format)


def gather(
    cache: Tensor, slots: Tensor, channels: int = 512, *, format: str = "fp8_tile64",
    dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None, valid: Tensor | None = None,
) -> Tensor:
    """Rows of a pool by slot, decoded: slots i32 or i64 of any shape give [..., channels]; a slot outside of the pool
    gives zeros. valid (bool, the shape of slots): whether a slot named a row."""
    if out is None:
        out = torch.empty((*slots.shape, channels), dtype=dtype, device=cache.device)
    _gather(cache, slots, format, out, valid)
    return out


def _tokens(q: Tensor) -> int:
    return q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]


def index_scores(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, block_table: Tensor, max_keys: int, *,
    q_scale: Tensor | None = None, format: str = "fp8", hadamard: bool = False, mode: str = "exact",
    dtype: torch.dtype = torch.float32, out: Tensor | None = None,
) -> Tensor:
    """Index scores of each token and key: sum over heads of weight * relu(q . key), [tokens, max_keys] f32 or bf16;
    -inf where a token sees no key.

    q            bf16 or f32 [tokens, heads, channels] or [b, s_q, heads, channels], encoded here as keys are; or
                 encoded: fp8 as float8_e4m3fn with q_scale f32 (None: 1), mxfp4 as uint8 with q_scale (a byte per 32
                 channels)
    cache        [pages, rows, bytes of a key] or [pages, rows, 1, bytes]: all payloads of a page, then all its scales
    weights      f32 [tokens, heads]
    lens         i32 [b]: keys that a request's last token sees, each token before it one less; or [b, s_q]
    block_table  i32 [b, blocks]: pages of a request; an id outside of the pool stands for page 0
    mode         "exact": the bits of docs/formats.md on every backend; "fast": within its error bound
    """
    if out is None:
        out = torch.empty((_tokens(q), max_keys), dtype=dtype, device=q.device)
    _index_scores(q, q_scale, cache, weights, lens, block_table, format, hadamard, mode, out)
    return out


def index_topk(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, block_table: Tensor, k: int, *,
    q_scale: Tensor | None = None, format: str = "fp8", hadamard: bool = False, mode: str = "exact",
    out: Tensor | None = None, slots: Tensor | None = None,
) -> Tensor:
    """`index_scores` and `select_topk` in one call; the scores stay inside. slots i32 [tokens, k], if given, gets
    page * rows + row of each key, -1 filled."""
    if out is None:
        out = torch.empty((_tokens(q), k), dtype=torch.int32, device=q.device)
    _index_topk(q, q_scale, cache, weights, lens, block_table, format, hadamard, mode, out, slots)
    return out


def select_topk(scores: Tensor, lens: Tensor, k: int, *, out: Tensor | None = None) -> Tensor:
    """The k best of the first lens[token] scores of each row, f32 [tokens, n]: i32 [tokens, k], in no order, -1 filled.
    Of equal scores the smaller index wins; NaN is the lowest. k from 1 to 2048."""
    if out is None:
        out = torch.empty((scores.shape[0], k), dtype=torch.int32, device=scores.device)
    _select_topk(scores, lens, out)
    return out


_KEY_PAGE = 64  # keys of a page of keys that lie in one piece; kernels load whole pages


def index_scores_rows(
    q: Tensor, keys: Tensor, key_scales: Tensor | None, weights: Tensor, begins: Tensor, ends: Tensor, *,
    max_keys: int = 0, q_scale: Tensor | None = None, format: str = "fp8", mode: str = "exact",
    dtype: torch.dtype = torch.float32, out: Tensor | None = None,
) -> Tensor:
    """Index scores over keys in one piece: q [tokens, heads, channels], keys [n, bytes], key_scales [n]. A token sees
    keys begins[token] to ends[token] - 1. [tokens, n], -inf elsewhere; or, with max_keys, [tokens, max_keys] from each
    token's first key on."""
    count = keys.shape[0]
    if out is None:
        out = torch.empty((q.shape[0], max_keys if max_keys > 0 else count), dtype=dtype, device=q.device)
    if keys.is_cuda and count % _KEY_PAGE != 0:
        missing = _KEY_PAGE - count % _KEY_PAGE
        keys = torch.nn.functional.pad(keys.view(torch.uint8), (0, 0, 0, missing))
        if key_scales is not None:
            key_scales = torch.nn.functional.pad(key_scales, (0, missing))
    _index_scores_rows(q, q_scale, keys, key_scales, weights, begins, ends, format, mode, max_keys > 0, out)
    return out
