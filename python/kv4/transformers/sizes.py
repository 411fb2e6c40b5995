"""How large a cache has to be for a call of generate()."""
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

#: Tokens of the largest forward where nothing else is said: more is worth a chunked prefill.
DEFAULT_STEP_TOKENS = 16384
#: What generate() takes where neither max_new_tokens nor max_length is said.
DEFAULT_NEW_TOKENS = 20
#: What an assistant drafts at once where its generation_config does not say num_assistant_tokens.
DEFAULT_DRAFTED_TOKENS = 20
#: Schedules of an assistant that draft two tokens more after each draft that was right to its end.
GROWING_SCHEDULES = ("heuristic", "heuristic_transient")
#: Where transformers' generators that draft a fixed number say it: prompt lookup, multi-token prediction, DFlash.
FIXED_DRAFTS = ("num_output_tokens", "num_mtp_layers", "block_size")


def checked_sizes(max_batch: int, max_context: int, max_step_tokens: int | None, max_rewind_tokens: int) -> Sizes:
    """Kv4Cache's arguments, refused by their names; what is too large kv4 says."""
    def checked(name: str, value: Any, least: int) -> int:
        if not isinstance(value, Integral) or value < least:
            raise kv4.ArgumentError(f"{name} is {value!r}; it must be an integer from {least} on")
        return int(value)

    rows, tokens = checked("max_batch", max_batch, 1), checked("max_context", max_context, 1)
    if max_step_tokens is None:
        max_step_tokens = min(rows * tokens, DEFAULT_STEP_TOKENS)
    return Sizes(rows, tokens, checked("max_step_tokens", max_step_tokens, 1), checked("max_rewind_tokens", max_rewind_tokens, 0))


class Drafts(NamedTuple):
    """What assisted generation feeds beyond the tokens that it knows to be right."""

    tokens: int = 0  # at once, at most; as many may have to be taken back
    beyond: int = 0  # columns that drafts may need beyond those of the finished text


def drafts_of_assistant(tokens: int | None, schedule: str | None, remaining: int) -> Drafts:
    """Of an assistant with the model's tokens, which drafts no more than generate() still wants: `remaining` tokens at first."""
    tokens = DEFAULT_DRAFTED_TOKENS if tokens is None else int(tokens)
    if schedule in GROWING_SCHEDULES:
        made = 0
        while made + tokens + 1 < remaining:  # a draft that is right gives its tokens and one of the model's
            made, tokens = made + tokens + 1, tokens + 2
        tokens += 1  # a wrong one makes the next shorter by one, from where growth may come to an odd length between
    return Drafts(max(0, min(tokens, remaining - 1)))


def drafts_of(generator: Any, remaining: int) -> Drafts:
    """Of a candidate generator of transformers' while generate() makes `remaining` tokens."""
    for name in FIXED_DRAFTS:
        if (fixed := getattr(generator, name, None)) is not None:
            return Drafts(int(fixed), int(fixed))  # at the end of the text, too
    if not hasattr(generator, "num_assistant_tokens") or hasattr(generator, "target_tokenizer"):
        return drafts_of_translation(remaining)
    return drafts_of_assistant(generator.num_assistant_tokens,
                               generator.assistant_generation_config.num_assistant_tokens_schedule, remaining)


def drafts_of_translation(remaining: int) -> Drafts:
    """Of an assistant with other tokens: nothing else bounds how many of the model's a draft becomes."""
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
    """prompt [rows, columns] before rows are repeated for beams and several sequences; max_length: columns at the end."""
    rows, columns = prompt[0] * max(config.num_beams or 1, config.num_return_sequences or 1), prompt[1]
    # With drafts the first forward has the whole prompt and the first of them.
    chunk = columns + drafts.tokens if drafts.tokens else min(columns, config.prefill_chunk_size or columns)
    return Sizes(max_batch=rows, max_context=max_length + drafts.beyond, max_step_tokens=rows * max(chunk, 1),
                 max_rewind_tokens=drafts.tokens)


def config_of_call(model: Any, given: GenerationConfig | None, arguments: Mapping[str, Any]) -> GenerationConfig:
    """What generate() makes of them: arguments go before the config given, and that before the model's."""
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    config.update(**model.generation_config.to_dict(), defaults_only=True)
    config.update(**arguments)
    return config


def sizes_of_call(model: Any, inputs: Any, generation_config: Any) -> Sizes:
    """From generate()'s arguments, see Kv4Cache.for_generate."""
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
