"""Rows of a batch, and the facts of one forward that the layers need."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: The device of lengths and indices, whatever torch.set_default_device is.
HOST = torch.device("cpu")
#: Types of rows that kv4 takes.
ROW_TYPES = (torch.float32, torch.bfloat16)


@dataclass
class Row:
    """A row of the batch: its request (an id in each manager), and the column of its first token."""

    request: tuple[int, ...]
    first: int = 0
    gap: bool = False  # padding lies between its tokens


class Forward:
    """A forward of [batch, count] tokens. Layers find its data on the host or already on the device, so none waits.

    rows, lengths, counts  per item of the step: the row of the batch, its tokens before, its tokens in this forward
    starts, whole          per item: the first column with a token in this forward, and whether its tokens are adjacent
    real                   the indices of tokens that are not padding; None: all tokens are real
    """

    def __init__(self, shape: tuple[int, int], mask: torch.Tensor | None, lengths: Sequence[int], num_columns: int,
                 window: int) -> None:
        (self.batch, self.count), self.num_columns, self.window = shape, num_columns, window
        self.real: torch.Tensor | None = None
        if mask is None:
            self.rows, self.counts = list(range(self.batch)), [self.count] * self.batch
            self.starts, self.whole = [0] * self.batch, [True] * self.batch
        else:
            self.rows = mask.any(1).nonzero().flatten().tolist()
            mask = mask[self.rows]
            tokens, starts = mask.sum(1), mask.int().argmax(1)
            ends = self.count - mask.flip(1).int().argmax(1)
            self.counts, self.starts, self.whole = tokens.tolist(), starts.tolist(), (ends - starts == tokens).tolist()
            self.real = torch.arange(self.batch * self.count, device=HOST).view(self.batch, self.count)[self.rows][mask]
        self.lengths = [lengths[row] for row in self.rows]
        self._on_device: dict[tuple[str, torch.device], torch.Tensor] = {}

    def entries(self, ratio: int) -> list[int]:
        """Entries of each item after this forward."""
        return [(length + count) // ratio for length, count in zip(self.lengths, self.counts)]

    def tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, count, ...] -> [real tokens, ...], of a type that kv4 takes."""
        flat = tensor.detach().flatten(0, 1)
        if flat.dtype not in ROW_TYPES:
            flat = flat.float()
        return flat if self.real is None else flat[self._on("real", self.real, flat.device)]

    def with_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """[real tokens, ...] -> [batch * count, ...]; zeros for padding."""
        if self.real is None:
            return tokens
        index = self._on("real", self.real, tokens.device)
        return tokens.new_zeros(self.batch * self.count, *tokens.shape[1:]).index_copy_(0, index, tokens)

    def by_row(self, gathered: torch.Tensor) -> torch.Tensor:
        """[items, ...] -> [batch, ...]; rows without tokens may have any values, which are not read."""
        if len(self.rows) == self.batch:
            return gathered
        items = torch.zeros(self.batch, dtype=torch.long, device=HOST)
        items[self.rows] = torch.arange(len(self.rows), device=HOST)
        return gathered.index_select(0, self._on("items", items, gathered.device))

    def by_column(self, gathered: torch.Tensor) -> torch.Tensor:
        """Window rows [items, n, width] -> [batch, columns of the model's mask, width].

        The mask hides columns in which a row has no token, so they may have any values.
        """
        if self._window_index is None:
            return gathered
        return gathered.flatten(0, 1)[self._on("window", self._window_index, gathered.device)]

    def num_window_rows(self) -> int:
        """Largest number of window rows of an item: those before it that its queries see, and its own."""
        return max(old + new for old, new in zip(self._before(), self.counts))

    def _before(self) -> list[int]:
        return [min(length, self.window - 1) for length in self.lengths]

    @functools.cached_property
    def _window_index(self) -> torch.Tensor | None:
        before, kept = self._before(), min(self.num_columns, self.window - 1)
        if self.real is None and all(count == kept for count in before):
            return None
        most = self.num_window_rows()
        index = torch.zeros(self.batch, kept + self.count, dtype=torch.long, device=HOST)
        for item, row in enumerate(self.rows):
            count = before[item] + self.counts[item]
            column = kept + self.starts[item] - before[item]
            index[row, column:column + count] = item * most + torch.arange(count, device=HOST)
        return index

    def _on(self, name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The copy of a host tensor on a device, made once."""
        key = name, device
        if key not in self._on_device:
            self._on_device[key] = tensor.to(device)
        return self._on_device[key]
