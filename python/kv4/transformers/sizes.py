"""The size of the cache that a call of generate() needs."""
from __future__ import annotations

import copy
from collections.abc import Mapping
from numbers import Integral
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode

import kv4

from .store import Sizes

#: Default tokens of the largest forward; longer prompts are worth a chunked prefill.
DEFAULT_STEP_TOKENS = 16384
#: generate()'s default without max_new_tokens and max_length.
DEFAULT_NEW_TOKENS = 20
#: Tokens that an assistant drafts at once if its generation_config has no num_assistant_tokens.
DEFAULT_DRAFTED_TOKENS = 20
#: Schedules that draft two tokens more after each draft that was entirely right.
GROWING_SCHEDULES = ("heuristic", "heuristic_transient")
#: Attributes for the fixed number of drafts of generators: prompt lookup, multi-token prediction, DFlash.
FIXED_DRAFTS = ("num_output_tokens", "num_mtp_layers", "block_size")


def checked_sizes(max_batch: int, max_context: int, max_step_tokens: int | None, max_rewind_tokens: int) -> Sizes:
    """Checks Kv4Cache's arguments and names a bad one; kv4 itself refuses those that are too large."""
    def checked(name: str, value: Any, least: int) -> int:
        if not isinstance(value, Integral) or value < least:
            raise kv4.ArgumentError(f"{name} is {value!r}; it must be an integer from {least} on")
        return int(value)

    rows, tokens = checked("max_batch", max_batch, 1), checked("max_context", max_context, 1)
    if max_step_tokens is None:
        max_step_tokens = min(rows * tokens, DEFAULT_STEP_TOKENS)
    return Sizes(rows, tokens, checked("max_step_tokens", max_step_tokens, 1), checked("max_rewind_tokens", max_rewind_tokens, 0))


class Drafts(NamedTuple):
    """Tokens that assisted generation feeds beyond those known to be right."""

    tokens: int = 0  # maximum at once; as many may have to be taken back
    beyond: int = 0  # columns that drafts may need beyond the finished text


def drafts_of_assistant(tokens: int | None, schedule: str | None, remaining: int) -> Drafts:
    """Drafts of an assistant with the model's tokens, at most as many as generate() wants: `remaining` at first."""
    tokens = DEFAULT_DRAFTED_TOKENS if tokens is None else int(tokens)
    if schedule in GROWING_SCHEDULES:
        made = 0
        while made + tokens + 1 < remaining:  # a right draft gives its tokens and one of the model's
            made, tokens = made + tokens + 1, tokens + 2
        tokens += 1  # a wrong draft shortens the next by one, and growth from there reaches the odd lengths between
    return Drafts(max(0, min(tokens, remaining - 1)))


def drafts_of(generator: Any, remaining: int) -> Drafts:
    """Drafts of a transformers candidate generator while generate() makes `remaining` tokens."""
    for name in FIXED_DRAFTS:
        if (fixed := getattr(generator, name, None)) is not None:
            return Drafts(int(fixed), int(fixed))  # also at the end of the text
    if not hasattr(generator, "num_assistant_tokens") or hasattr(generator, "target_tokenizer"):
        return drafts_of_translation(remaining)
    return drafts_of_assistant(generator.num_assistant_tokens,
                               generator.assistant_generation_config.num_assistant_tokens_schedule, remaining)


def drafts_of_translation(remaining: int) -> Drafts:
    """Drafts of an assistant with other tokens: nothing else bounds the number of the model's tokens in a draft."""
    return Drafts(remaining, 1)


def drafts_of_call(config: GenerationConfig, assistant: Any, translated: bool, remaining: int) -> Drafts:
    if config.get_generation_mode(assistant) != GenerationMode.ASSISTED_GENERATION:
        return Drafts()
    if config.prompt_lookup_num_tokens is not None:
        return Drafts(config.prompt_lookup_num_tokens, config.prompt_lookup_num_tokens)
    if assistant is None:
        return Drafts()  # of the model itself, which generate() says when it begins
    if translated:
        return drafts_of_translation(remaining)
    its = assistant.generation_config
    return drafts_of_assistant(its.num_assistant_tokens, its.num_assistant_tokens_schedule, remaining)


def sizes_for(prompt: tuple[int, int], max_length: int, config: GenerationConfig, drafts: Drafts) -> Sizes:
    """prompt [rows, columns] before rows are repeated for beams and sequences; max_length: columns at the end."""
    rows, columns = prompt[0] * max(config.num_beams or 1, config.num_return_sequences or 1), prompt[1]
    # With drafts, the first forward has the whole prompt and the first drafts.
    chunk = columns + drafts.tokens if drafts.tokens else min(columns, config.prefill_chunk_size or columns)
    return Sizes(max_batch=rows, max_context=max_length + drafts.beyond, max_step_tokens=rows * max(chunk, 1),
                 max_rewind_tokens=drafts.tokens)


def config_of_call(model: Any, given: GenerationConfig | None, arguments: Mapping[str, Any]) -> GenerationConfig:
    """The config that generate() derives: arguments override the given config, which overrides the model's."""
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    config.update(**model.generation_config.to_dict(), defaults_only=True)
    config.update(**arguments)
    return config


def sizes_of_call(model: Any, inputs: Any, generation_config: Any) -> Sizes:
    """Sizes for generate()'s arguments, see Kv4Cache.for_generate."""
    tensor = inputs
    if isinstance(inputs, Mapping):
        tensor = next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        got = f"a tensor {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"a {type(inputs).__name__}"
        raise kv4.ArgumentError("inputs must be token ids [rows, columns], or what a tokenizer gives for them "
                                f"(input_ids, attention_mask); got {got}")
    arguments: dict[str, Any] = {}
    if generation_config is None or isinstance(generation_config, Mapping):
        arguments = dict(generation_config or {})
        generation_config = arguments.pop("generation_config", None)
    if not isinstance(generation_config, (GenerationConfig, type(None))):
        raise kv4.ArgumentError("generation_config must be a GenerationConfig or a dict of generate()'s arguments; got a "
                                f"{type(generation_config).__name__}")
    assistant, translated = arguments.pop("assistant_model", None), arguments.get("assistant_tokenizer") is not None
    config = config_of_call(model, generation_config, arguments)
    rows, columns = tensor.shape[:2]
    if config.max_new_tokens is not None:
        max_length = columns + config.max_new_tokens
    else:
        max_length = config.max_length or columns + DEFAULT_NEW_TOKENS
    drafts = drafts_of_call(config, assistant, translated, max_length - columns)
    return sizes_for((rows, columns), max(max_length, columns + 1), config, drafts)
