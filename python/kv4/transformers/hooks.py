"""Hooks of a model, set once: they tell a Kv4Cache of each forward, and the model of limits of the cache.

All are functions of this module, so that a model with hooks can be copied and pickled.
"""
from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

from . import cache as kv4_cache
from .forward import HOST
from .sizes import drafts_of

FORWARD_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")


def watch(model: DeepseekV4ForCausalLM) -> None:
    backbone = model.model
    if not getattr(backbone, "_kv4_watched", False):
        backbone._kv4_watched = True
        backbone.register_forward_pre_hook(_tell_of_forward, with_kwargs=True)
        backbone.register_forward_hook(_tell_of_end, with_kwargs=True, always_call=True)
        for layer in backbone.layers:
            if layer.self_attn.layer_type == "heavily_compressed_attention":
                layer.self_attn.compressor.register_forward_hook(_hide_missing_entries, with_kwargs=True)
    for hook in (_prepare_cache_for_generation, _get_candidate_generator):
        original = getattr(type(model), hook.__name__, None)
        # An unpickled model has its class's methods as its own attributes under these names.
        if original is not None and getattr(getattr(model, hook.__name__), "__func__", None) is original:
            setattr(model, hook.__name__, types.MethodType(hook, model))


@torch.compiler.disable
def _tell_of_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = {**dict(zip(FORWARD_ARGUMENTS, args)), **kwargs}
    cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
    if not isinstance(cache, kv4_cache.Kv4Cache):
        return None
    given = kwargs.get("inputs_embeds") if ids is None else ids
    if given is None:
        return None  # the model raises the error
    wants_attentions = bool(kwargs.get("output_attentions", module.config.output_attentions))
    told = kv4_cache.Told(ids, kwargs.get("attention_mask"), kwargs.get("position_ids"), given.shape[:2], wants_attentions,
                          kwargs.get("use_cache"))
    if cache.expect(module, told):
        kwargs["position_ids"] = None
    for name, known in (("attention_mask", cache.column_mask), ("position_ids", cache.positions)):
        if kwargs.get(name) is None:
            kwargs[name] = known(given.shape[1], given.device)
    return (), kwargs


@torch.compiler.disable
def _tell_of_end(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = {**dict(zip(FORWARD_ARGUMENTS, args)), **kwargs}.get("past_key_values")
    if isinstance(cache, kv4_cache.Kv4Cache):
        cache.end_forward(module)


@torch.compiler.disable
def _hide_missing_entries(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """The HCA compressor hides no entry from a single query, but here rows may have fewer entries than others."""
    cache = kwargs.get("past_key_values", args[3] if len(args) > 3 else None)
    entries, bias = output
    if bias is not None or not isinstance(cache, kv4_cache.Kv4Cache) or entries.shape[2] == 0:
        return None
    lens = cache.forward.entries(module.compress_rate)
    if min(lens) == max(lens):
        return None
    of_rows = cache.forward.by_row(torch.tensor(lens, device=HOST).to(entries.device))
    missing = torch.arange(entries.shape[2], device=entries.device) >= of_rows[:, None]
    return entries, entries.new_zeros(missing.shape).masked_fill(missing, float("-inf"))[:, None, None]


def _prepare_cache_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
    """generate() calls it once all sizes are known: a cache that is too small raises before the first token."""
    original = type(self)._prepare_cache_for_generation
    told = inspect.signature(original).bind(self, *args, **kwargs).arguments
    cache = told.get("model_kwargs", {}).get("past_key_values")
    if isinstance(cache, kv4_cache.Kv4Cache) and {"generation_config", "batch_size", "max_cache_length"} <= told.keys():
        cache.begin_generation(told["generation_config"], told["batch_size"], told["max_cache_length"],
                               attention_mask=told["model_kwargs"].get("attention_mask"))
    return original(self, *args, **kwargs)


def _get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
    """An assisted generate() calls it before the first forward: only the generator knows the number of drafts."""
    original = type(self)._get_candidate_generator
    generator = original(self, *args, **kwargs)
    told = inspect.signature(original).bind(self, *args, **kwargs).arguments
    cache = told.get("model_kwargs", {}).get("past_key_values")
    if isinstance(cache, kv4_cache.Kv4Cache) and {"generation_config", "input_ids"} <= told.keys():
        cache.begin_drafting(drafts_of(generator, told["generation_config"].max_length - told["input_ids"].shape[1]))
    return generator
