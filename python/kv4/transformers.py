"""transformers' DeepSeek-V4 with its cache in kv4.

    cache = Kv4Cache(model.config, model, max_context=32768)
    model.generate(input_ids, past_key_values=cache)          # the model is as it was

    accelerate(model)                                         # the same, attention by kv4's own append, index_topk and attend

A row of the batch is a request. Windows, compressor rows, entries and index keys live in kv4; a forward is a step, which is
committed after the last layer. Needs torch and transformers 5.
"""
import contextlib
import functools
import json
import types
import weakref

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, apply_rotary_pos_emb

import kv4

__all__ = ["Kv4Cache", "accelerate", "rewindable"]


def model_config(config) -> kv4.ModelConfig:
    """kv4's ModelConfig from a DeepseekV4Config."""
    return kv4.parse_model_config(json.dumps(config.to_dict(), default=str))


ROW_TYPES = (torch.float32, torch.bfloat16)
FORWARD_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")


class Row:
    """A row of the batch: its request, and the column of its first token. `gap`: padding lies between its tokens."""

    def __init__(self, request, first=0, gap=False):
        self.request, self.first, self.gap = request, first, gap


class Forward:
    """A forward of [batch, count] tokens. All that layers need of it is on the host or already on the device: none waits.

    rows, lengths, counts  by item of the step: the row of the batch, its tokens before, its tokens in this forward
    starts, whole          by item: the first column with a token in this forward, and whether its tokens are neighbours
    real                   on the device, the indices of tokens that are not padding; None: all are real
    """

    def __init__(self, batch, count, mask, lengths, num_columns, window, device):
        self.batch, self.count, self.num_columns, self.window, self.device = batch, count, num_columns, window, device
        if mask is None:
            self.rows, self.counts, self.starts, self.whole = list(range(batch)), [count] * batch, [0] * batch, [True] * batch
            self.real = None
        else:
            self.rows = mask.any(1).nonzero().flatten().tolist()
            mask = mask[self.rows]
            tokens, starts = mask.sum(1), mask.int().argmax(1)
            ends = count - mask.flip(1).int().argmax(1)
            self.counts, self.starts, self.whole = tokens.tolist(), starts.tolist(), (ends - starts == tokens).tolist()
            index = torch.arange(batch * count).view(batch, count)
            self.real = index[self.rows][mask].to(device)
        self.lengths = [lengths[row] for row in self.rows]

    def entries(self, ratio):
        """By item: its entries after this forward."""
        return [(length + count) // ratio for length, count in zip(self.lengths, self.counts)]

    def tokens(self, tensor):
        """[batch, count, ...] -> [real tokens, ...], of a type that kv4 takes."""
        flat = tensor.detach().flatten(0, 1)
        if flat.dtype not in ROW_TYPES:
            flat = flat.float()
        return flat if self.real is None else flat[self.real]

    @functools.cached_property
    def _items(self):
        items = torch.zeros(self.batch, dtype=torch.long)
        items[self.rows] = torch.arange(len(self.rows))
        return items.to(self.device)

    def by_row(self, gathered):
        """[items, ...] -> [batch, ...]; for rows without tokens anything, since nobody looks."""
        return gathered if len(self.rows) == self.batch else gathered.index_select(0, self._items)

    @functools.cached_property
    def _window_index(self):
        before = [min(length, self.window - 1) for length in self.lengths]
        most = max(old + new for old, new in zip(before, self.counts))
        kept = min(self.num_columns, self.window - 1)
        if self.real is None and all(count == kept for count in before):
            return None
        index = torch.zeros(self.batch, kept + self.count, dtype=torch.long)
        for item, row in enumerate(self.rows):
            count = before[item] + self.counts[item]
            column = kept + self.starts[item] - before[item]
            index[row, column:column + count] = item * most + torch.arange(count)
        return index.to(self.device)

    def by_column(self, gathered):
        """Window rows [items, n, width] -> [batch, columns of the model's mask, width].

        The mask hides columns in which a row has no token, so that anything may be there.
        """
        return gathered if self._window_index is None else gathered.flatten(0, 1)[self._window_index]


class Kv4Cache(Cache):
    """A `past_key_values` whose bytes are kv4's.

    config         model.config
    model          the DeepseekV4ForCausalLM: compressors' constants and the rope table are its own
    max_batch      rows at the same time, beams included
    max_context    tokens of the longest row
    max_rewind_tokens  how many drafted tokens can be taken back (assisted generation)
    max_step_tokens    tokens of the largest forward, all rows together
    backend        kv4.make_cpu_backend(threads), kv4.make_cuda_backend(i); None: where the model is
    options        any other attribute of kv4.CacheOptions: row_format="bf16", prefix=kv4.PrefixOptions(...), ...
    """

    def __init__(self, config, model, *, max_batch=1, max_context=8192, max_rewind_tokens=0, max_step_tokens=None,
                 backend=None, **options):
        me = weakref.proxy(self)  # no cycle: the memory goes with the last name of the cache
        super().__init__(layers=[Kv4Layer(me, spec) for spec in kv4.layer_schedule(model_config(config))])
        self.window, self.device = config.sliding_window, model.device
        if backend is None:
            on_gpu = self.device.type == "cuda"
            backend = kv4.make_cuda_backend(self.device.index or 0) if on_gpu else kv4.make_cpu_backend()
        self.manager = kv4.KVCacheManager(
            model_config(config),
            kv4.CacheOptions(max_requests=max_batch, max_context=max_context, spare_slots=max_batch,
                             max_rewind_tokens=max_rewind_tokens,
                             max_step_tokens=max_step_tokens or min(max_batch * max_context, 16384), **options),
            backend)
        self._bind(model, max_context)
        self.rows = []  # of the batch
        self.num_columns = 0  # tokens of every row as transformers counts them, padding included
        self.forward = None  # the one under way, or the last
        self._step = None
        self._expected = None
        _watch_forwards(model)

    @property
    def requests(self):
        """By row of the batch."""
        return [row.request for row in self.rows]

    def _bind(self, model, max_context):
        constant = lambda tensor: tensor.detach().to(torch.float32).contiguous()
        for layer in model.model.layers:
            compressor = layer.self_attn.compressor
            if compressor is None:
                continue
            weights = [constant(compressor.position_bias), constant(compressor.kv_norm.weight)]
            if hasattr(compressor, "indexer"):
                weights += [constant(compressor.indexer.position_bias), constant(compressor.indexer.kv_norm.weight)]
            self.manager.bind_weights(layer.self_attn.layer_idx, *weights)
        positions = torch.arange(max_context, device=model.device)[None]
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        cos, sin = model.model.rotary_emb(like, position_ids=positions, layer_type="compress")
        self.manager.bind_rope_table(constant(cos[0]), constant(sin[0]))

    # A forward

    def expect(self, input_ids, attention_mask, count):
        """Told before each forward (by a hook of the model): token ids, and which columns of the batch are padding.

        The one transfer to the host of a forward.
        """
        if attention_mask is not None:
            if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
                raise kv4.ArgumentError("attention_mask must be a tensor [batch, columns]")
            attention_mask = attention_mask[:, -count:].bool()
        if input_ids is not None and attention_mask is not None:
            input_ids, attention_mask = torch.stack([input_ids, attention_mask.to(input_ids)]).cpu().unbind()
        elif input_ids is not None:
            input_ids = input_ids.cpu()
        elif attention_mask is not None:
            attention_mask = attention_mask.cpu()
        mask = None if attention_mask is None or attention_mask.all() else attention_mask.bool()
        self._expected = input_ids, mask

    def positions(self, count, device):
        """position_ids [batch, count] where rows have different lengths: the model would count padding. None: as it counts."""
        lengths, mask = self._lengths(), self._expected[1]
        if mask is None and all(length == self.num_columns for length in lengths):
            return None
        mask = torch.ones(len(lengths), count) if mask is None else mask
        if lengths and len(lengths) != len(mask):
            return None  # open_step says so
        before = torch.tensor(lengths or [0] * len(mask))
        return (before[:, None] + mask.long().cumsum(1) - 1).clamp(min=0).to(device)

    def column_mask(self, count, device):
        """attention_mask [batch, columns] where rows began in different columns, for a forward that has none. None: all real."""
        firsts = [row.first if length else self.num_columns for row, length in zip(self.rows, self._lengths())]
        if not any(firsts):
            return None
        return (torch.arange(self.num_columns + count) >= torch.tensor(firsts)[:, None]).to(device)

    def open_step(self, batch, count, device, gaps=True):
        """Prepares the step of a forward of [batch, count] tokens. `gaps`: padding may lie between a row's tokens."""
        self._abort()
        if not self.rows:
            self.rows = [Row(self.manager.admit()) for _ in range(batch)]
        if len(self.rows) != batch:
            raise kv4.ArgumentError(f"the forward has {batch} rows, the cache {len(self.rows)}; reset() it between batches")
        ids, mask = self._expected or (None, None)
        if ids is None:
            if self.manager.schema().options.prefix.enabled:
                raise kv4.ArgumentError("a prefix cache needs input_ids: inputs_embeds do not say which prompts are equal")
            ids = torch.zeros(batch, count, dtype=torch.long)
        ids = ids.expand(batch, count)
        forward = Forward(batch, count, mask, self._lengths(), self.num_columns, self.window, device)
        with_gaps = [row for item, row in enumerate(forward.rows) if self._has_gap(forward, item)]
        if with_gaps and not gaps:
            raise kv4.ArgumentError(f"rows {with_gaps} have padding between their tokens, where the model's own mask shortens "
                                    "their windows: pad on the left, or use kv4.transformers.accelerate(model)")
        self._step = self.manager.prepare_forward(
            [kv4.StepItem(self.rows[row].request, ids[row] if mask is None else ids[row][mask[row]]) for row in forward.rows])
        self.forward = forward

    def close_layer(self, layer_idx):
        if layer_idx != len(self.layers) - 1:
            return
        self.manager.commit(self._step)
        self._step = self._expected = None
        for item, row in enumerate(self.forward.rows):
            state = self.rows[row]
            state.gap = self._has_gap(self.forward, item)
            if self.forward.lengths[item] == 0:
                state.first = self.num_columns + self.forward.starts[item]
        self.num_columns += self.forward.count

    def _abort(self):
        """A forward that did not reach its end."""
        if self._step is not None:
            self.manager.abort(self._step)
            self._step = None

    def _lengths(self):
        return [self.manager.length(row.request) for row in self.rows]

    def _has_gap(self, forward, item):
        row, length = self.rows[forward.rows[item]], forward.lengths[item]
        follows = length == 0 or row.first + length == self.num_columns + forward.starts[item]
        return row.gap or not follows or not forward.whole[item]

    # What transformers does with a cache

    def get_seq_length(self, layer_idx=0):
        return self.num_columns

    def get_max_length(self, layer_idx=None):
        return self.manager.schema().options.max_context

    def get_mask_sizes(self, query_length, layer_idx):
        kept = min(self.num_columns, self.window - 1)
        return kept + query_length, self.num_columns - kept

    def crop(self, tokens_to_remove):
        """Takes the last tokens of every row back, at most max_rewind_tokens."""
        count = abs(tokens_to_remove)
        if count:
            for row, length in zip(self.rows, self._lengths()):
                self.manager.rewind(row.request, length - count)
            self.num_columns -= count

    def _rearrange(self, rows):
        """Row i becomes what row rows[i] was: the first of equals takes the request over, the others fork it."""
        old, self.rows = self.rows, []
        for row in set(range(len(old))) - set(rows):
            self.manager.release(old[row].request)
        taken = set()
        for row in rows:
            request = self.manager.fork(old[row].request) if row in taken else old[row].request
            self.rows.append(Row(request, old[row].first, old[row].gap))
            taken.add(row)

    def reorder_cache(self, beam_idx):
        self._rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats):
        self._rearrange([row for row in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices):
        self._rearrange(torch.arange(len(self.rows))[indices.cpu()].tolist())

    def reset(self):
        """Ends all rows. Where the prefix cache is on, their full blocks stay for later prompts."""
        self._abort()
        for row in self.rows:
            self.manager.release(row.request)
        self.rows, self.num_columns = [], 0

    # What it does beyond that

    def begin(self, input_ids, **prompt):
        """Begins one row with what is kept of its prompt [1, n], and returns how many of its tokens need not be computed.

        Give the whole prompt to generate() afterwards. Needs prefix=kv4.PrefixOptions(enabled=True, ...).
        """
        self.reset()
        admission = self.manager.admit(kv4.Prompt(input_ids.reshape(-1).cpu(), **prompt))
        self.rows, self.num_columns = [Row(admission.request)], admission.resume_at
        return admission.resume_at

    def token_ids(self, row=0):
        """The tokens of a row that the cache holds, [1, n], where the model is."""
        return torch.from_numpy(self.manager.token_ids(self.rows[row].request)).long().to(self.device)[None]

    def save(self, path, identity=None, row=0):
        """A row into a file (kv4.save_session_file)."""
        return kv4.save_session_file(self.manager, self.rows[row].request, identity or kv4.SessionIdentity(), path)

    def restore(self, path, identity=None):
        """One row from a file, in place of all that the cache holds; generate() goes on from token_ids()."""
        self.reset()
        self.rows = [Row(kv4.restore_session_file(self.manager, identity or kv4.SessionIdentity(), path))]
        self.num_columns = self.manager.length(self.rows[0].request)


class Kv4Layer(CacheLayerMixin):
    """A layer as the unmodified model sees it: it stores what it is given and gives back what kv4 holds.

    The model would pool compressor rows itself. It is given none to pool, and kv4's entries in place of the result.
    """

    is_sliding = True
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache, spec):
        super().__init__()
        self.cache, self.index, self.kind = cache, spec.layer, spec.kind
        self.ratio = spec.rows[0].ratio if spec.rows else None
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states):
        pass

    def get_mask_sizes(self, query_length):
        return self.cache.get_mask_sizes(query_length, self.index)

    def get_seq_length(self):
        return self.cache.get_seq_length()

    def get_max_length(self):
        return self.cache.get_max_length()

    def update(self, key_states, value_states, *args, **kwargs):
        """Window rows in [batch, 1, n, head_dim]; those that queries see out."""
        batch, _, count, width = key_states.shape
        if self.index == 0:
            self.cache.open_step(batch, count, key_states.device, gaps=False)
        forward = self.cache.forward
        self.dtype, self.projections = key_states.dtype, {}
        self.handle = self.cache.manager.acquire(self.index)
        self.raw_kv = forward.tokens(key_states[:, 0])
        window_only = self.kind == kv4.LayerKind.swa
        if window_only:
            self.handle.append(self.raw_kv)
        else:  # append follows when the projections are there
            self.handle.write_swa(self.raw_kv)
        most = max(min(length, forward.window - 1) + count for length, count in zip(forward.lengths, forward.counts))
        rows = forward.by_column(self._gathered(self.handle.gather_swa_kv, most, width))[:, None]
        if window_only:
            self._close()
        return rows, rows

    def store_compression_weights(self, name, kv, gate):
        """Compressor rows in; none are given back to pool."""
        self.projections[name] = [self.cache.forward.tokens(kv), self.cache.forward.tokens(gate)]
        return kv[:, :0], gate[:, :0], 0

    def update_compressor_states(self, name, compressed):
        """All entries (name "compressor") or index keys ("indexer") out, [batch, n, width]."""
        options = self.cache.manager.schema().options
        if self.kind == kv4.LayerKind.csa and "indexer" not in self.projections:
            # The index projections come later, and append runs again then: a step's rows may be written any number of times.
            width = 2 * self.cache.manager.schema().config.index_dim
            index = [self.raw_kv.new_zeros(len(self.raw_kv), width)] * 2
        else:
            index = self.projections.get("indexer", [])
        self.handle.append(self.raw_kv, *self.projections["compressor"], *index)
        gather = self.handle.gather_all_compressed_kv if name == "compressor" else self.handle.gather_all_index_keys
        most = max(self.cache.forward.entries(self.ratio))
        rows = self.cache.forward.by_row(self._gathered(gather, max(most, 1), compressed.shape[-1])[:, :most])
        if name == "indexer" and options.hadamard:
            rows = (rows.float() @ _hadamard(rows.shape[-1], rows.device)).to(self.dtype)
        if name == "indexer" or self.kind == kv4.LayerKind.hca:
            self._close()
        return rows

    def _gathered(self, gather, most, width):
        """[items, most, width] of the model's type, on its device."""
        dtype = self.dtype if self.dtype in ROW_TYPES else torch.float32
        rows = self.raw_kv.new_empty(len(self.cache.forward.rows), most, width, dtype=dtype)
        gather(rows)
        return rows.to(self.dtype)

    def _close(self):
        self.raw_kv = self.projections = self.handle = None
        self.cache.close_layer(self.index)


@functools.lru_cache(maxsize=8)
def _hadamard(width, device):
    """The orthonormal Hadamard matrix, its own inverse: index keys are stored transformed."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * width**-0.5


def _watch_forwards(model):
    """Hooks of a model, set once: what a Kv4Cache has to know, and what the model cannot know of it."""
    def tell(module, args, kwargs):
        kwargs = {**dict(zip(FORWARD_ARGUMENTS, args)), **kwargs}
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        if not isinstance(cache, Kv4Cache):
            return None
        given = kwargs["inputs_embeds"] if ids is None else ids
        cache.expect(ids, kwargs.get("attention_mask"), given.shape[1])
        for name, known in (("attention_mask", cache.column_mask), ("position_ids", cache.positions)):
            if kwargs.get(name) is None:
                kwargs[name] = known(given.shape[1], given.device)
        return (), kwargs

    def hide_missing_entries(module, args, kwargs, output):
        # From a single query the HCA compressor hides nothing; here rows may have fewer entries than others.
        cache = kwargs.get("past_key_values", args[3] if len(args) > 3 else None)
        entries, bias = output
        if bias is not None or not isinstance(cache, Kv4Cache) or entries.shape[2] == 0:
            return None
        lens = cache.forward.entries(module.compress_rate)
        if min(lens) == max(lens):
            return None
        lens = cache.forward.by_row(torch.tensor(lens).to(entries.device))
        missing = torch.arange(entries.shape[2], device=entries.device) >= lens[:, None]
        return entries, entries.new_zeros(missing.shape).masked_fill(missing, float("-inf"))[:, None, None]

    if getattr(model.model, "_kv4_watched", False):
        return
    model.model._kv4_watched = True
    model.model.register_forward_pre_hook(tell, with_kwargs=True)
    for layer in model.model.layers:
        if layer.self_attn.layer_type == "heavily_compressed_attention":
            layer.self_attn.compressor.register_forward_hook(hide_missing_entries, with_kwargs=True)


def _forward(self, hidden_states, position_embeddings, position_ids, attention_mask, past_key_values=None, **kwargs):
    """DeepseekV4Attention.forward with a Kv4Cache: append, index_topk and attend in place of tensors of rows."""
    if not isinstance(past_key_values, Kv4Cache):
        return DeepseekV4Attention.forward(self, hidden_states, position_embeddings, position_ids, attention_mask,
                                           past_key_values, **kwargs)
    cache, (batch, count, _) = past_key_values, hidden_states.shape
    if self.layer_idx == 0:
        cache.open_step(batch, count, hidden_states.device)
    tokens, real = cache.forward.tokens, cache.forward.real

    cos, sin = position_embeddings[self.rope_layer_type]
    q_residual = self.q_a_norm(self.q_a_proj(hidden_states))
    q = self.q_b_norm(self.q_b_proj(q_residual).view(batch, count, -1, self.head_dim))
    q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
    kv = apply_rotary_pos_emb(self.kv_norm(self.kv_proj(hidden_states))[:, None], cos, sin)[:, 0]

    handle, compressor, topk = cache.manager.acquire(self.layer_idx), self.compressor, None
    projections = [] if compressor is None else [compressor.kv_proj(hidden_states), compressor.gate_proj(hidden_states)]
    indexer = getattr(compressor, "indexer", None)
    if indexer is not None:
        projections += [indexer.kv_proj(hidden_states), indexer.gate_proj(hidden_states)]
    handle.append(tokens(kv), *(tokens(p) for p in projections))
    if indexer is not None:
        index_q = indexer.q_b_proj(q_residual).view(batch, count, -1, indexer.head_dim)
        index_q = apply_rotary_pos_emb(index_q, cos, sin, unsqueeze_dim=2)
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden_states).float() * (scorer.weights_scaling * scorer.softmax_scale)
        topk = handle.index_topk(tokens(index_q), tokens(weights), k=indexer.index_topk)
    attended = handle.attend(tokens(q).contiguous(), sink=self.sinks.detach().float(), topk=topk, softmax_scale=self.scaling)
    attended = attended.to(hidden_states.dtype)
    if real is not None:
        attended = attended.new_zeros(batch * count, *attended.shape[1:]).index_copy_(0, real, attended)
    output = apply_rotary_pos_emb(attended.view(batch, count, -1, self.head_dim), cos, -sin, unsqueeze_dim=2)
    output = self.o_b_proj(self.o_a_proj(output.reshape(batch, count, self.config.o_groups, -1)).flatten(2))
    cache.close_layer(self.layer_idx)
    return output, None


def accelerate(model):
    """Attention of a DeepseekV4ForCausalLM by kv4 wherever its past_key_values are a Kv4Cache; other caches go on as before.

    Rows of a batch may have different lengths, padded anywhere; each gives what it would give alone.
    """
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(_forward, layer.self_attn)
    return model


@contextlib.contextmanager
def rewindable(model):
    """Inside, generate() accepts assisted generation: a Kv4Cache can be rewound, which the model class does not know.

        with rewindable(model):
            model.generate(ids, past_key_values=Kv4Cache(..., max_rewind_tokens=16), prompt_lookup_num_tokens=8)
    """
    before = model._is_stateful
    model._is_stateful = False
    try:
        yield model
    finally:
        model._is_stateful = before
