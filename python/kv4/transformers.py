"""transformers' DeepSeek-V4 with its cache in kv4.

    cache = Kv4Cache(model.config, model, max_context=32768)
    model.generate(input_ids, past_key_values=cache)          # the model is as it was

    accelerate(model)                                         # the same, attention by kv4's own append, index_topk and attend

A row of the batch is a request. Windows, compressor rows, entries and index keys live in kv4; a forward is a step, which is
committed after the last layer. Needs torch and transformers 5.
"""
import contextlib
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
        super().__init__(layers=[Kv4Layer(me, index) for index in range(config.num_hidden_layers)])
        self.window = config.sliding_window
        if backend is None:
            device = model.device
            backend = kv4.make_cuda_backend(device.index or 0) if device.type == "cuda" else kv4.make_cpu_backend()
        self.manager = kv4.KVCacheManager(
            model_config(config),
            kv4.CacheOptions(max_requests=max_batch, max_context=max_context, spare_slots=max_batch,
                             max_rewind_tokens=max_rewind_tokens,
                             max_step_tokens=max_step_tokens or min(max_batch * max_context, 16384), **options),
            backend)
        self._bind(model, max_context)
        self.requests = []  # by row of the batch
        self.num_columns = 0  # tokens of every row as transformers counts them, padding included
        self._step = None
        self._forward_ids = self._forward_mask = None
        _watch_forwards(model)

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

    def expect(self, input_ids, attention_mask):
        """Told before each forward (by a hook of the model): the token ids, and which columns of the batch are padding."""
        self._forward_ids, self._forward_mask = input_ids, attention_mask

    def open_step(self, batch, count):
        """Prepares the step of a forward of [batch, count] tokens. `real` are the indices of those that are not padding."""
        if self._step is not None:  # a forward before this one did not reach its end
            self.manager.abort(self._step)
            self._step = None
        if not self.requests:
            self.requests = [self.manager.admit() for _ in range(batch)]
        if len(self.requests) != batch:
            raise kv4.ArgumentError(f"the forward has {batch} rows, the cache {len(self.requests)}; reset() it between batches")
        ids, mask = self._forward_ids, self._forward_mask
        if ids is None:
            if self.manager.schema().options.prefix.enabled:
                raise kv4.ArgumentError("a prefix cache needs input_ids: inputs_embeds do not say which prompts are equal")
            ids = torch.zeros(batch, count, dtype=torch.long)
        if mask is None:
            mask = torch.ones(batch, count, dtype=torch.bool)
        if mask.dim() != 2:
            raise kv4.ArgumentError(f"attention_mask must be [batch, columns]; it has {mask.dim()} dimensions")
        ids, mask = ids.expand(batch, count).cpu(), mask[:, -count:].bool().cpu()
        self.real = None if mask.all() else mask.flatten().nonzero().squeeze(1)
        items = [kv4.StepItem(self.requests[row], ids[row][mask[row]]) for row in range(batch) if mask[row].any()]
        self._step = self.manager.prepare_forward(items)
        self._count = count

    def close_layer(self, layer_idx):
        if layer_idx == len(self.layers) - 1:
            self.manager.commit(self._step)
            self._step = None
            self.num_columns += self._count
            self._forward_ids = self._forward_mask = None

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
            for request in self.requests:
                self.manager.rewind(request, self.manager.length(request) - count)
            self.num_columns -= count

    def _rearrange(self, rows):
        """Row i becomes what row rows[i] was: the first of equals takes the request over, the others fork it."""
        old, self.requests = self.requests, [None] * len(rows)
        for row in set(range(len(old))) - set(rows):
            self.manager.release(old[row])
        taken = set()
        for i, row in enumerate(rows):
            self.requests[i] = self.manager.fork(old[row]) if row in taken else old[row]
            taken.add(row)

    def reorder_cache(self, beam_idx):
        self._rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats):
        self._rearrange([row for row in range(len(self.requests)) for _ in range(repeats)])

    def batch_select_indices(self, indices):
        self._rearrange(torch.arange(len(self.requests))[indices.cpu()].tolist())

    def reset(self):
        """Ends all rows. Where the prefix cache is on, their full blocks stay for later prompts."""
        if self._step is not None:
            self.manager.abort(self._step)
            self._step = None
        for request in self.requests:
            self.manager.release(request)
        self.requests, self.num_columns = [], 0

    # What it does beyond that

    def begin(self, input_ids, **prompt):
        """Begins one row with what is kept of its prompt [1, n], and returns how many of its tokens need not be computed.

        Give the whole prompt to generate() afterwards. Needs prefix=kv4.PrefixOptions(enabled=True, ...).
        """
        self.reset()
        admission = self.manager.admit(kv4.Prompt(input_ids.reshape(-1).cpu(), **prompt))
        self.requests, self.num_columns = [admission.request], admission.resume_at
        return admission.resume_at

    def token_ids(self, row=0):
        """The tokens of a row that the cache holds, [1, n]."""
        return torch.from_numpy(self.manager.token_ids(self.requests[row])).long()[None]

    def save(self, path, identity=None, row=0):
        """A row into a file (kv4.save_session_file)."""
        return kv4.save_session_file(self.manager, self.requests[row], identity or kv4.SessionIdentity(), path)

    def restore(self, path, identity=None):
        """One row from a file, in place of all that the cache holds; generate() goes on from token_ids()."""
        self.reset()
        self.requests = [kv4.restore_session_file(self.manager, identity or kv4.SessionIdentity(), path)]
        self.num_columns = self.manager.length(self.requests[0])


class Kv4Layer(CacheLayerMixin):
    """A layer as the unmodified model sees it: it stores what it is given and gives back what kv4 holds.

    The model would pool compressor rows itself. It is given none to pool, and kv4's entries in place of the result.
    """

    is_sliding = True
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache, index):
        super().__init__()
        self.cache, self.index = cache, index
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
            self.cache.open_step(batch, count)
            if self.cache.real is not None:
                raise kv4.ArgumentError("rows of different lengths need kv4.transformers.accelerate(model): the model's "
                                        "own attention sees entries of the longest row in all of them")
        self.batch, self.dtype, self.device = batch, key_states.dtype, key_states.device
        self.handle = self.cache.manager.acquire(self.index)
        self.raw_kv = key_states.detach().reshape(-1, width)
        self.projections = {}
        window_only = self.handle.schema().spec.kind == kv4.LayerKind.swa
        if window_only:
            self.handle.append(self.raw_kv)
        else:  # append follows when the projections are there
            self.handle.write_swa(self.raw_kv)
        rows = self._tensor(self.handle.gather_swa_kv()[0])[:, None]
        if window_only:
            self._close()
        return rows, rows

    def store_compression_weights(self, name, kv, gate):
        """Compressor rows in; none are given back to pool."""
        self.projections[name] = [kv.detach().flatten(0, 1), gate.detach().flatten(0, 1)]
        return kv[:, :0], gate[:, :0], 0

    def update_compressor_states(self, name, compressed):
        """All entries (name "compressor") or index keys ("indexer") out, [batch, n, width]."""
        spec = self.handle.schema().spec
        if spec.kind == kv4.LayerKind.csa and "indexer" not in self.projections:
            # The index projections come later, and append runs again then: a step's rows may be written any number of times.
            width = 2 * self.cache.manager.schema().config.index_dim
            index = [self.raw_kv.new_zeros(len(self.raw_kv), width)] * 2
        else:
            index = self.projections.get("indexer", [])
        self.handle.append(self.raw_kv, *self.projections["compressor"], *index)
        if name == "compressor":
            rows, _, lens = self.handle.gather_all_compressed_kv()
        else:
            rows, lens = self.handle.gather_all_index_keys()
        rows = self._tensor(rows)[:, :int(lens[0])]
        options = self.cache.manager.schema().options
        if name == "indexer" and options.hadamard:
            rows = (rows.float() @ _hadamard(rows.shape[-1], rows.device)).to(self.dtype)
        if name == "indexer" or spec.kind == kv4.LayerKind.hca:
            self._close()
        return rows

    def _tensor(self, array):
        return torch.as_tensor(array, device=self.device).to(self.dtype)

    def _close(self):
        self.raw_kv = self.projections = self.handle = None
        self.cache.close_layer(self.index)


def _hadamard(width, device):
    """The orthonormal Hadamard matrix, its own inverse: index keys are stored transformed."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * width**-0.5


def _watch_forwards(model):
    """Tells a Kv4Cache the token ids and the padding of each forward; once for a model."""
    def tell(module, args, kwargs):
        cache = kwargs.get("past_key_values")
        if isinstance(cache, Kv4Cache):
            cache.expect(kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask"))

    if not getattr(model.model, "_kv4_watched", False):
        model.model.register_forward_pre_hook(tell, with_kwargs=True)
        model.model._kv4_watched = True


def _forward(self, hidden_states, position_embeddings, position_ids, attention_mask, past_key_values=None, **kwargs):
    """DeepseekV4Attention.forward with a Kv4Cache: append, index_topk and attend in place of tensors of rows."""
    if not isinstance(past_key_values, Kv4Cache):
        return DeepseekV4Attention.forward(self, hidden_states, position_embeddings, position_ids, attention_mask,
                                           past_key_values, **kwargs)
    cache, (batch, count, _) = past_key_values, hidden_states.shape
    if self.layer_idx == 0:
        cache.open_step(batch, count)
    real = None if cache.real is None else cache.real.to(hidden_states.device)

    def tokens(tensor):  # [batch, count, ...] -> [real tokens, ...]
        flat = tensor.detach().flatten(0, 1)
        return flat if real is None else flat[real]

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
    if real is not None:
        attended = attended.new_zeros(batch * count, *attended.shape[1:]).index_copy_(0, real, attended)
    output = apply_rotary_pos_emb(attended.view(batch, count, -1, self.head_dim), cos, -sin, unsqueeze_dim=2)
    output = self.o_b_proj(self.o_a_proj(output.reshape(batch, count, self.config.o_groups, -1)).flatten(2))
    cache.close_layer(self.layer_idx)
    return output, None


def accelerate(model):
    """Attention of a DeepseekV4ForCausalLM by kv4 wherever its past_key_values are a Kv4Cache; other caches go on as before.

    Rows of a batch may have different lengths (padded on the left); each gives what it would give alone.
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
