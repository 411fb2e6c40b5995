"""The model's attention by kv4's append, index_topk and attend."""
from __future__ import annotations

import types
from typing import Any, TypeVar

import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, apply_rotary_pos_emb

from .cache import Kv4Cache
from .model import whole_model

Model = TypeVar("Model")


@torch.compiler.disable
def _open_layer(cache: Kv4Cache, layer: int, batch: int, count: int) -> None:
    if layer == 0:
        cache.open_step(batch, count)


@torch.compiler.disable
def _attend(cache: Kv4Cache, module: Any, rows: list[torch.Tensor], index: list[torch.Tensor],
            q: torch.Tensor) -> torch.Tensor:
    """Appends and attends. rows: append's arguments; index: index queries and weights, or none.

    q and the result: [batch, count, heads, head_dim].
    """
    tokens, handle = cache.forward.tokens, cache.store.acquire(module.layer_idx)
    handle.append(*(tokens(row) for row in rows))
    topk = handle.index_topk(*(tokens(part) for part in index), k=module.compressor.indexer.index_topk) if index else None
    attended = handle.attend(tokens(q).contiguous(), sink=module.sinks.detach().float(), topk=topk, softmax_scale=module.scaling)
    cache.close_layer(module.layer_idx)
    return cache.forward.with_padding(attended.to(q.dtype)).view(q.shape)


def _forward(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, position_ids: torch.Tensor,
             attention_mask: Any, past_key_values: Any = None, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """DeepseekV4Attention.forward with a Kv4Cache. Only the model's own attention has probabilities."""
    if not isinstance(past_key_values, Kv4Cache) or past_key_values.wants_attentions:
        return DeepseekV4Attention.forward(self, hidden_states, position_embeddings, position_ids, attention_mask,
                                           past_key_values, **kwargs)
    batch, count, _ = hidden_states.shape
    _open_layer(past_key_values, self.layer_idx, batch, count)

    cos, sin = position_embeddings[self.rope_layer_type]
    q_residual = self.q_a_norm(self.q_a_proj(hidden_states))
    q = self.q_b_norm(self.q_b_proj(q_residual).view(batch, count, -1, self.head_dim))
    q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
    kv = apply_rotary_pos_emb(self.kv_norm(self.kv_proj(hidden_states))[:, None], cos, sin)[:, 0]

    compressor, rows, index = self.compressor, [kv], []
    indexer = getattr(compressor, "indexer", None)
    if compressor is not None:
        rows += [compressor.kv_proj(hidden_states), compressor.gate_proj(hidden_states)]
    if indexer is not None:
        rows += [indexer.kv_proj(hidden_states), indexer.gate_proj(hidden_states)]
        index_q = indexer.q_b_proj(q_residual).view(batch, count, -1, indexer.head_dim)
        scorer = indexer.scorer
        index = [apply_rotary_pos_emb(index_q, cos, sin, unsqueeze_dim=2),
                 scorer.weights_proj(hidden_states).float() * (scorer.weights_scaling * scorer.softmax_scale)]
    attended = _attend(past_key_values, self, rows, index, q)
    output = apply_rotary_pos_emb(attended, cos, -sin, unsqueeze_dim=2)
    return self.o_b_proj(self.o_a_proj(output.reshape(batch, count, self.config.o_groups, -1)).flatten(2)), None


def accelerate(model: Model) -> Model:
    """Computes a DeepseekV4ForCausalLM's attention by kv4 where past_key_values is a Kv4Cache; other caches still work.

    Rows of a batch may have different lengths, with padding anywhere; each row has the result that it has alone. A
    forward with output_attentions=True uses the model's own attention.
    """
    for layer in whole_model(model, "accelerate").model.layers:
        attention = layer.self_attn
        # In a model over several devices, forward is a hook that moves tensors and then calls _old_forward.
        name = "_old_forward" if hasattr(attention, "_hf_hook") else "forward"
        setattr(attention, name, types.MethodType(_forward, attention))
    return model
