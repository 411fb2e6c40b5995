"""Kv4Cache: a `past_key_values` of transformers whose memory is kv4's."""
from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, TypeVar, Union

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache

import kv4

from .forward import HOST, Forward, Row
from .layer import Kv4Layer
from .model import check_config, model_config, whole_model
from .sizes import Drafts, checked_sizes, sizes_of_call
from .store import Backends, Request, Sizes, Store

#: The advice for use_cache=False with a cache.
NO_CACHE = "leave past_key_values out, or use_cache"

Model = TypeVar("Model")
Path = Union[str, "os.PathLike[str]"]


class Told(NamedTuple):
    """A hook's report on a forward before it begins."""

    input_ids: torch.Tensor | None  # [batch, count]
    attention_mask: Any  # [batch, columns]
    position_ids: torch.Tensor | None  # [batch or 1, count]
    shape: tuple[int, int]  # batch, count
    wants_attentions: bool
    use_cache: bool | None


class Kv4Cache(Cache):
    """A `past_key_values` whose memory is kv4's.

    config         model.config
    model          the DeepseekV4ForCausalLM, which gives the compressors' constants and the rope table
    max_batch      rows at the same time, beams included
    max_context    tokens of the longest row
    max_rewind_tokens  number of drafted tokens that can be taken back (assisted generation)
    max_step_tokens    tokens of the largest forward, all rows together
    backend        kv4.make_cpu_backend(threads), kv4.make_cuda_backend(i); None: the model's device. A model over
                   several devices has one each: {"cpu": ..., "cuda:0": ...}, or a list with one per layer
    grow           more rows or longer ones move to a larger cache, if there is memory for it
    options        any other attribute of kv4.CacheOptions: row_format="bf16", prefix=kv4.PrefixOptions(...), ...
    """

    def __init__(self, config: Any, model: Any, *, max_batch: int = 1, max_context: int = 8192, max_rewind_tokens: int = 0,
                 max_step_tokens: int | None = None, backend: Backends = None, grow: bool = False, **options: Any) -> None:
        from .hooks import watch

        model = whole_model(model, "Kv4Cache")
        check_config(config, model)
        sizes = checked_sizes(max_batch, max_context, max_step_tokens, max_rewind_tokens)
        store = Store(model.model, backend, sizes, options)
        self._set_up(weakref.ref(model.model), store, grow)
        watch(model)

    @classmethod
    def for_generate(cls, model: Any, inputs: Any, generation_config: Any = None, **options: Any) -> Kv4Cache:
        """A cache of the size that `model.generate(inputs, generation_config, past_key_values=cache)` needs.

        inputs             token ids [rows, columns], or a tokenizer's {"input_ids": ..., "attention_mask": ...}
        generation_config  a GenerationConfig; a dict of generate()'s keyword arguments; None: model.generation_config
        options            Kv4Cache's, which override derived values; grow is on

        Raises kv4.OutOfMemoryError without enough memory. A later generate() that needs more grows the cache before its
        first token, or raises then.
        """
        whole = whole_model(model, "Kv4Cache.for_generate")
        derived = vars(sizes_of_call(whole, inputs, generation_config))
        return cls(whole.config, whole, **{**derived, "grow": True, **options})

    def _set_up(self, backbone: Any, store: Store, grow: bool) -> None:
        me = weakref.proxy(self)  # no cycle: the memory is freed with the last reference to the cache
        config = self._living(backbone).config
        super().__init__(layers=[Kv4Layer(me, spec) for spec in kv4.layer_schedule(model_config(config))])
        self.store, self.grow, self.window, self.device = store, grow, config.sliding_window, store.devices[0]
        self.rows: list[Row] = []  # of the batch
        self.num_columns = 0  # tokens of every row as transformers counts them, with padding
        self.forward: Any = None  # the current Forward, or the last
        self.wants_attentions = False
        self._backbone = backbone
        self._generation = Sizes(0, 0, 0, 0)  # the needs of the latest generate()
        self._told: Told | None = None  # on the forward that begins
        self._new_rows = False  # admitted by a forward that has not ended

    def __repr__(self) -> str:
        sizes = self.store.sizes
        return (f"Kv4Cache({len(self.rows)} of {sizes.max_batch} rows, {self.num_columns} of {sizes.max_context} tokens, "
                f"{len(self.layers)} layers on {', '.join(manager.backend().device for manager in self.store.managers)})")

    def __del__(self) -> None:
        # Copies share managers, so freeing the cache's own memory does not end its rows.
        with contextlib.suppress(Exception):
            if self.store.step_of == id(self):
                self.store.abort()
            for row in self.rows:
                self.store.release(row.request)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Kv4Cache:
        """A cache with the same rows, from which another generation can continue. Its rows are forks, which share the
        computed blocks; if max_batch leaves no room for forks, the rows are copied into memory of their own."""
        self._settle()
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        store, request_of = self.store, self.store.fork
        if store.num_requests() + len(self.rows) > store.sizes.max_batch:
            store = self.store.larger(self._living_backbone(), store.sizes)
            request_of = lambda request: store.copy_from(self.store, request)
        copy._set_up(self._backbone, store, self.grow)
        copy.num_columns = self.num_columns
        for row in self.rows:
            copy.rows.append(replace(row, request=request_of(row.request)))
        return copy

    def __copy__(self) -> Kv4Cache:
        return self.__deepcopy__({})

    # Construction

    @property
    def manager(self) -> kv4.KVCacheManager:
        """The manager of a model on one device; else see `managers`."""
        if len(self.store.managers) > 1:
            raise kv4.StateError(f"the model is on several devices and the cache has {len(self.store.managers)} managers: "
                                 "take cache.managers")
        return self.store.managers[0]

    @property
    def managers(self) -> list[kv4.KVCacheManager]:
        """One manager per device."""
        return self.store.managers

    @property
    def requests(self) -> list[int]:
        """The request of each row of the batch in `manager`."""
        return [row.request[self.store.managers.index(self.manager)] for row in self.rows]

    @staticmethod
    def _living(reference: Any) -> Any:
        backbone = reference()
        if backbone is None:
            raise kv4.StateError("the model that this Kv4Cache was made for is gone: keep it as long as the cache")
        return backbone

    def _living_backbone(self) -> Any:
        return self._living(self._backbone)

    # Size

    def begin_generation(self, config: GenerationConfig, batch_size: int, max_length: int, attention_mask: Any = None) -> None:
        """generate() calls it (by a hook of the model) before its first forward. batch_size: before rows are repeated;
        max_length: columns. Makes room, or raises the error that would otherwise stop the generation later."""
        if config.use_cache is False:
            raise kv4.ArgumentError("use_cache=False feeds the whole text again in every forward, and a Kv4Cache would take it "
                                    f"as what follows: {NO_CACHE}")
        padding = 0
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            padding = int((attention_mask == 0).sum(1).min())
        rows = batch_size * max(config.num_beams or 1, config.num_return_sequences or 1)
        self._generation = Sizes(rows, max_length - padding, 0, 0)
        self._make_room(self._generation, "generate()")

    def begin_drafting(self, drafts: Drafts) -> None:
        """Called for an assisted generation, after begin_generation and before the first forward."""
        longest = self._generation.max_context + drafts.beyond
        self._make_room(replace(self._generation, max_context=longest, max_step_tokens=1 + drafts.tokens,
                                max_rewind_tokens=drafts.tokens), f"generate() with drafts of {drafts.tokens} tokens")

    def _make_room(self, needed: Sizes, call: str) -> None:
        others = self.store.num_requests() - len(self.rows)  # rows of copies
        with_copies = replace(needed, max_batch=needed.max_batch + others)
        if self.store.sizes.covers(with_copies):
            return
        if self.grow:
            self._move(self.store.sizes.united(needed))
            return
        lacking = [f"{name} = {wanted}, and the cache has {held}" for name, wanted, held in
                   zip(vars(needed), vars(with_copies).values(), vars(self.store.sizes).values()) if wanted > held]
        message = (f"{call} needs {'; '.join(lacking)}. Nothing has changed. Make the cache with that, or with "
                   "Kv4Cache.for_generate(model, inputs, generation_config), which derives it")
        if with_copies.max_batch > self.store.sizes.max_batch:
            raise kv4.ShortageError(message, kv4.Shortage.requests)
        raise kv4.ArgumentError(message)

    def _move(self, sizes: Sizes) -> None:
        """Moves all rows into a larger store. Copies of the cache keep the old one."""
        store = self.store.larger(self._living_backbone(), sizes)
        moved = [replace(row, request=store.copy_from(self.store, row.request)) for row in self.rows]
        for row in self.rows:
            self.store.release(row.request)
        self.store, self.rows = store, moved

    # A forward

    @torch.compiler.disable
    def expect(self, backbone: Any, told: Told) -> bool:
        """A hook of the model calls it before each forward. It makes the forward's only transfer to the host.

        Returns whether position_ids must be the cache's: generate()'s own ones also count padding on the right.
        """
        if backbone is not self._backbone():
            raise kv4.ArgumentError("this Kv4Cache was made for another model, whose constants its entries are made with: make "
                                    "one with Kv4Cache(model.config, model) for the model that runs")
        self._settle()
        (batch, count), mask = told.shape, told.attention_mask
        if told.use_cache is False:
            raise kv4.ArgumentError(f"use_cache=False, and the cache would keep the forward's tokens all the same: {NO_CACHE}")
        if self.rows and len(self.rows) != batch:
            raise kv4.ArgumentError(f"the forward has {batch} rows, the cache {len(self.rows)}: batch_repeat_interleave(n) makes n "
                                    "of each (for beams, say), batch_select_indices keeps some, reset() ends all")
        if count == 0:
            raise kv4.ArgumentError(f"the forward has no tokens: the cache holds {self.num_columns}, and generate() feeds what the "
                                    "text has beyond them. Give the whole text, longer than that, or reset() the cache first")
        if mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or len(mask) not in (1, batch):
                got = f"a tensor {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
                raise kv4.ArgumentError(f"attention_mask must be a tensor [{batch}, {self.num_columns + count}] (rows, columns); "
                                        f"got {got}")
            if mask.shape[1] != self.num_columns + count:
                self._refuse_mask(told)
            mask = mask[:, -count:]
        ids, mask, positions = _to_host(batch, count, told.input_ids, mask, told.position_ids)
        mask = None if mask is None or mask.all() else mask.bool()
        lengths = self._lengths() or [0] * batch
        own_positions = positions is not None and count == 1 and any(
            row.gap or row.first + length < self.num_columns for row, length in zip(self.rows, lengths))
        if positions is not None and not own_positions:
            self._check_positions(positions, mask, lengths)
        tokens = batch * count if mask is None else int(mask.sum())
        longest = max(length + count for length in lengths) if mask is None else max(
            length + new for length, new in zip(lengths, mask.sum(1).tolist()))
        if self.grow and longest > self.store.sizes.max_context:  # once, not token by token
            longest = max(longest, 2 * self.store.sizes.max_context)
        self._make_room(Sizes(batch, longest, tokens, 0), "the forward")
        self._told, self.wants_attentions = told._replace(input_ids=ids, attention_mask=mask), told.wants_attentions
        return own_positions

    def _refuse_mask(self, told: Told) -> NoReturn:
        """The error for a mask whose columns are not those of the cache and the forward together."""
        (batch, count), columns = told.shape, told.attention_mask.shape[1]
        again = ""
        if columns == count:  # a forward on its own: the check of its positions gives a better message
            mask, positions = _to_host(batch, count, told.attention_mask, told.position_ids)
            if mask is not None and positions is not None:
                self._check_positions(positions, mask.bool(), self._lengths())
            again = ", or reset() the cache first where these are not what follows its tokens"
        raise kv4.ArgumentError(f"attention_mask has {columns} columns; the cache holds {self.num_columns} and the forward adds "
                                f"{count}: give the mask of all {self.num_columns + count} columns{again}")

    def _check_positions(self, positions: torch.Tensor, mask: torch.Tensor | None, lengths: Sequence[int]) -> None:
        real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
        expected = torch.tensor(lengths, device=HOST)[:, None] + real.long().cumsum(1) - 1
        wrong = ((positions != expected) & real).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            raise kv4.ArgumentError(
                f"row {row} of the forward has a token of position {int(positions[row, column])}, which must be "
                f"{int(expected[row, column])}: the cache holds {lengths[row]} tokens of the row. Feed what follows them, or "
                "reset() the cache first. (Assisted generation and use_cache=False feed the prompt from its start, so that the "
                "cache must be empty; crop(-n) takes tokens back)")

    def positions(self, count: int, device: torch.device) -> torch.Tensor | None:
        """position_ids [batch, count] for rows of different lengths: the model counts padding. None: the model's."""
        lengths, mask = self._lengths(), None if self._told is None else self._told.attention_mask
        if mask is None and all(length == self.num_columns for length in lengths):
            return None
        mask = torch.ones(len(lengths), count, device=HOST) if mask is None else mask
        before = torch.tensor(lengths or [0] * len(mask), device=HOST)
        return (before[:, None] + mask.long().cumsum(1) - 1).clamp(min=0).to(device)

    def column_mask(self, count: int, device: torch.device) -> torch.Tensor | None:
        """attention_mask [batch, columns] for a forward without one if rows began in different columns, else None."""
        firsts = [row.first if length else self.num_columns for row, length in zip(self.rows, self._lengths())]
        if not any(firsts):
            return None
        return (torch.arange(self.num_columns + count, device=HOST) >= torch.tensor(firsts, device=HOST)[:, None]).to(device)

    def open_step(self, batch: int, count: int, gaps: bool = True) -> None:
        """Prepares the step of a forward of [batch, count] tokens. `gaps`: padding may lie between a row's tokens."""
        told, self._told = self._told, None
        if told is None or tuple(told.shape) != (batch, count):
            raise kv4.ArgumentError("this Kv4Cache was not told of the forward: it was made for another model. Make one with "
                                    "Kv4Cache(model.config, model) for the model that runs")
        ids, mask = told.input_ids, told.attention_mask
        if ids is None:
            if self.store.managers[0].schema().options.prefix.enabled:
                raise kv4.ArgumentError("a prefix cache needs input_ids: inputs_embeds do not say which prompts are equal")
            ids = torch.zeros(batch, count, dtype=torch.long, device=HOST)
        if not self.rows:
            self._new_rows = True
            for _ in range(batch):
                self.rows.append(Row(self.store.admit()))
        forward = Forward((batch, count), mask, self._lengths(), self.num_columns, self.window)
        with_gaps = [row for item, row in enumerate(forward.rows) if self._has_gap(forward, item)]
        if with_gaps and not gaps:
            raise kv4.ArgumentError(f"rows {with_gaps} have padding between their tokens, where the model's own mask shortens "
                                    "their windows: pad on the left, or use kv4.transformers.accelerate(model)")
        self.store.prepare([(self.rows[row].request, ids[row] if mask is None else ids[row][mask[row]]) for row in forward.rows],
                           self)
        self.forward = forward

    def close_layer(self, layer_idx: int) -> None:
        if layer_idx != len(self.layers) - 1:
            return
        self.store.commit()
        self._new_rows = False
        for item, row in enumerate(self.forward.rows):
            state = self.rows[row]
            state.gap = self._has_gap(self.forward, item)
            if self.forward.lengths[item] == 0:
                state.first = self.num_columns + self.forward.starts[item]
        self.num_columns += self.forward.count

    def end_forward(self, backbone: Any) -> None:
        """A hook of the model calls it after each forward, also after a failed one."""
        if backbone is not self._backbone():
            return
        self._told = None
        if self.store.step_of == id(self):
            self.store.abort()
        if self._new_rows:
            self._release_rows()

    def _settle(self) -> None:
        """Drops a forward that did not end, and the rows that it began."""
        self.store.settle(self)
        self._told = None
        if self._new_rows:
            self._release_rows()

    def _release_rows(self) -> None:
        rows, self.rows, self._new_rows = self.rows, [], False
        for row in rows:
            self.store.release(row.request)

    def _lengths(self) -> list[int]:
        return [self.store.length(row.request) for row in self.rows]

    def _has_gap(self, forward: Forward, item: int) -> bool:
        row, length = self.rows[forward.rows[item]], forward.lengths[item]
        follows = length == 0 or row.first + length == self.num_columns + forward.starts[item]
        return row.gap or not follows or not forward.whole[item]

    # Calls of transformers

    @property
    def is_croppable(self) -> bool:
        return self.store.sizes.max_rewind_tokens > 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.store.sizes.max_context

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        kept = min(self.num_columns, self.window - 1)
        return kept + query_length, self.num_columns - kept

    def crop(self, tokens_to_remove: int) -> None:
        """crop(-n) removes the last n tokens, at most max_rewind_tokens, of all rows or of none."""
        if tokens_to_remove > 0:
            raise kv4.ArgumentError(f"crop({tokens_to_remove}): give the number of tokens to take back as crop(-n)")
        self._settle()
        lengths = self._lengths()
        for number, (row, length) in enumerate(zip(self.rows, lengths)):
            floor = self.store.rewind_floor(row.request)
            if length + tokens_to_remove < floor:
                raise kv4.ArgumentError(
                    f"crop({tokens_to_remove}): row {number} has {length} tokens, of which {length - floor} can be taken back "
                    f"(max_rewind_tokens = {self.store.sizes.max_rewind_tokens}); no row was changed")
        for row, length in zip(self.rows, lengths):
            self.store.rewind(row.request, length + tokens_to_remove)
        if self.rows:
            self.num_columns += tokens_to_remove

    def _rearrange(self, rows: list[int]) -> None:
        """Row i becomes the former row rows[i]. The first of equal rows takes the request, the others fork it."""
        self._settle()
        unknown = [row for row in rows if not 0 <= row < len(self.rows)]
        if unknown:
            raise kv4.ArgumentError(f"there is no row {unknown[0]}; the cache has {len(self.rows)}")
        self._make_room(Sizes(len(rows), 0, 0, 0), f"{len(rows)} rows")
        old, self.rows = self.rows, []
        for row in set(range(len(old))) - set(rows):
            self.store.release(old[row].request)
        taken: set[int] = set()
        try:
            for row in rows:
                self.rows.append(replace(old[row], request=self.store.fork(old[row].request)) if row in taken else old[row])
                taken.add(row)
        except kv4.Error:  # too few blocks: some rows have already ended
            self.rows += [old[row] for row in set(rows) - taken]
            self.reset()
            raise

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rearrange([row for row in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._rearrange(torch.arange(len(self.rows), device=HOST)[indices.cpu()].tolist())

    def reset(self) -> None:
        """Ends all rows. With a prefix cache, their full blocks stay for later prompts."""
        self._settle()
        self._release_rows()
        self.num_columns = 0

    # Further calls

    def begin(self, input_ids: torch.Tensor, **prompt: Any) -> int:
        """Begins one row with the stored prefix of its prompt [1, n]; returns how many tokens need not be computed.

        Give the whole prompt to generate() afterwards. Needs prefix=kv4.PrefixOptions(enabled=True, ...).
        `prompt`: tenant, salt, extra of kv4.Prompt.
        """
        if input_ids.dim() > 1 and input_ids.shape[0] != 1:
            raise kv4.ArgumentError(f"begin() takes one prompt [1, n]; got {list(input_ids.shape)}")
        ids = input_ids.reshape(-1).cpu()
        kv4.Prompt(ids, **prompt)  # raises before rows end
        if not self.store.managers[0].schema().options.prefix.enabled:
            raise kv4.ArgumentError("begin() needs a prefix cache: Kv4Cache(..., prefix=kv4.PrefixOptions(enabled=True))")
        self.reset()
        request, self.num_columns = self.store.admit_prompt(ids, **prompt)
        self.rows = [Row(request)]
        return self.num_columns

    def _request(self, row: int) -> Request:
        if not 0 <= row < len(self.rows):
            raise kv4.ArgumentError(f"there is no row {row}; the cache has {len(self.rows)}")
        return self.rows[row].request

    def token_ids(self, row: int = 0) -> torch.Tensor:
        """The cached tokens of a row, [1, n], on the model's device."""
        tokens: Any = self.store.managers[0].token_ids(self._request(row)[0])
        return torch.from_numpy(tokens).long().to(self.device)[None]

    def save(self, path: Path, identity: kv4.SessionIdentity | None = None, row: int = 0) -> bool:
        """Saves a row to a file (kv4.save_session_file); a model over n devices gives n files: path, path.1, ..."""
        return self.store.save(self._request(row), identity or kv4.SessionIdentity(), path)

    def restore(self, path: Path, identity: kv4.SessionIdentity | None = None) -> None:
        """Replaces all rows by one row from a file; generate() continues from token_ids().

        An error because of the file changes nothing.
        """
        identity = identity or kv4.SessionIdentity()
        self._settle()
        try:
            request = self.store.restore(identity, path)
        except kv4.ShortageError:  # running rows take the room; the file has been checked
            if len(self.store.managers) > 1:
                self.store.check_files(identity, path)
            self.reset()
            request = self.store.restore(identity, path)
        self._release_rows()
        self.rows, self.num_columns = [Row(request)], self.store.length(request)


def _to_host(batch: int, count: int, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Integers [batch or 1, count] on the host; one transfer if they are on one device."""
    given = [tensor.expand(batch, count) for tensor in tensors if tensor is not None]
    if len({tensor.device for tensor in given}) == 1:
        given = list(torch.stack([tensor.long() for tensor in given]).cpu().unbind())
    rest: Iterator[torch.Tensor] = iter(given)
    return [None if tensor is None else next(rest).cpu() for tensor in tensors]


@contextlib.contextmanager
def rewindable(model: Model) -> Iterator[Model]:
    """Within it, generate() accepts assisted generation: the model class does not know that a Kv4Cache can be rewound.

        with rewindable(model):
            model.generate(ids, past_key_values=Kv4Cache(..., max_rewind_tokens=16), prompt_lookup_num_tokens=8)
    """
    whole: Any = whole_model(model, "rewindable")
    before = whole._is_stateful
    whole._is_stateful = False
    try:
        yield model
    finally:
        whole._is_stateful = before
