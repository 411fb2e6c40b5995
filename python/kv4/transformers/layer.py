"""A layer of the cache as the unmodified model sees it."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

import kv4

from .forward import ROW_TYPES

if TYPE_CHECKING:
    from .cache import Kv4Cache


class Kv4Layer(CacheLayerMixin):
    """Stores the model's rows in kv4 and returns kv4's rows.

    The stock model pools compressor rows itself. Here it gets no rows to pool, and kv4's entries instead of the result.
    """

    is_sliding = True
    supports_early_init = False

    def __init__(self, cache: Kv4Cache, spec: kv4.LayerSpec) -> None:
        super().__init__()
        self.cache, self.index, self.kind = cache, spec.layer, spec.kind
        self.ratio = spec.rows[0].ratio if spec.rows else None
        self.is_initialized = True

    @property
    def is_croppable(self) -> bool:
        return self.cache.is_croppable

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, self.index)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return self.cache.get_max_length()

    @torch.compiler.disable
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes window rows [batch, 1, n, head_dim] and returns those that queries see."""
        batch, _, count, width = key_states.shape
        if self.index == 0:
            self.cache.open_step(batch, count, gaps=False)
        forward = self.cache.forward
        self.dtype, self.projections = key_states.dtype, {}
        self.handle = self.cache.store.acquire(self.index)
        self.raw_kv = forward.tokens(key_states[:, 0])
        window_only = self.kind == kv4.LayerKind.swa
        if window_only:
            self.handle.append(self.raw_kv)
        else:  # append runs once the projections are there
            self.handle.write_swa(self.raw_kv)
        rows = forward.by_column(self._gathered(self.handle.gather_swa_kv, forward.num_window_rows(), width))[:, None]
        if window_only:
            self._close()
        return rows, rows

    @torch.compiler.disable
    def store_compression_weights(self, name: str, kv: torch.Tensor,
                                  gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Takes compressor rows and returns none to pool."""
        self.projections[name] = [self.cache.forward.tokens(kv), self.cache.forward.tokens(gate)]
        return kv[:, :0], gate[:, :0], 0

    @torch.compiler.disable
    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Returns all entries (name "compressor") or index keys ("indexer"), [batch, n, width]."""
        schema = self.cache.store.managers[0].schema()
        if self.kind == kv4.LayerKind.csa and "indexer" not in self.projections:
            # When the index projections come, append runs again: a step's rows may be written several times.
            width = 2 * schema.config.index_dim
            index = [self.raw_kv.new_zeros(len(self.raw_kv), width)] * 2
        else:
            index = self.projections.get("indexer", [])
        self.handle.append(self.raw_kv, *self.projections["compressor"], *index)
        gather = self.handle.gather_all_compressed_kv if name == "compressor" else self.handle.gather_all_index_keys
        most = max(self.cache.forward.entries(self.ratio))
        rows = self.cache.forward.by_row(self._gathered(gather, max(most, 1), compressed.shape[-1])[:, :most])
        if name == "indexer" and schema.options.hadamard:
            rows = (rows.float() @ _hadamard(rows.shape[-1], rows.device)).to(self.dtype)
        if name == "indexer" or self.kind == kv4.LayerKind.hca:
            self._close()
        return rows

    def _gathered(self, gather: Any, most: int, width: int) -> torch.Tensor:
        """[items, most, width] of the model's type and device."""
        dtype = self.dtype if self.dtype in ROW_TYPES else torch.float32
        rows = self.raw_kv.new_empty(len(self.cache.forward.rows), most, width, dtype=dtype)
        gather(rows)
        return rows.to(self.dtype)

    def _close(self) -> None:
        self.raw_kv = self.projections = self.handle = None
        self.cache.close_layer(self.index)


@functools.lru_cache(maxsize=8)
def _hadamard(width: int, device: torch.device) -> torch.Tensor:
    """The orthonormal Hadamard matrix, its own inverse: index keys are stored transformed."""
    matrix = torch.ones(1, 1, device=device, dtype=torch.float32)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * width**-0.5
