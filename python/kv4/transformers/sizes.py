"""How large a cache has to be for a call of generate()."""
from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig

import kv4

from .store import Sizes

#: What generate() takes where neither max_new_tokens nor max_length is said.
DEFAULT_NEW_TOKENS = 20


def drafted_tokens(config: GenerationConfig, assisted: bool) -> int:
    """Tokens that assisted generation may take back after one forward."""
    if config.prompt_lookup_num_tokens:
        return int(config.prompt_lookup_num_tokens)
    return int(config.num_assistant_tokens or 0) if assisted else 0


def sizes_for(prompt: tuple[int, int], max_length: int, config: GenerationConfig, assisted: bool) -> Sizes:
    """prompt [rows, columns] before rows are repeated for beams and several sequences; max_length: columns at the end."""
    rows = prompt[0] * max(config.num_beams or 1, config.num_return_sequences or 1)
    rewind = drafted_tokens(config, assisted)
    chunk = min(prompt[1], config.prefill_chunk_size or prompt[1])
    return Sizes(max_batch=rows, max_context=max_length, max_step_tokens=rows * max(chunk, 1 + rewind),
                 max_rewind_tokens=rewind)


def sizes_of_call(model: Any, inputs: Any, generation_config: Any) -> Sizes:
    """From generate()'s arguments, see Kv4Cache.for_generate."""
    tensor = inputs
    if isinstance(inputs, Mapping):
        tensor = next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        raise kv4.ArgumentError("inputs must be token ids [rows, columns], or what a tokenizer gives for them "
                                f"(input_ids, attention_mask); got a {type(inputs).__name__}")
    assisted = False
    if generation_config is None or isinstance(generation_config, Mapping):
        arguments = dict(generation_config or {})
        assisted = arguments.pop("assistant_model", None) is not None
        generation_config = copy.deepcopy(model.generation_config)
        generation_config.update(**arguments)
    rows, columns = tensor.shape[:2]
    if generation_config.max_new_tokens is not None:
        max_length = columns + generation_config.max_new_tokens
    else:
        max_length = generation_config.max_length or columns + DEFAULT_NEW_TOKENS
    return sizes_for((rows, columns), max(max_length, columns + 1), generation_config, assisted)
