"""Assisted generation: with any drafter, the cache has room for rejected drafts, or generate() raises at its start."""
import pytest
import torch

import kv4
from kv4.transformers import Kv4Cache, rewindable
from kv4.transformers.sizes import Drafts, drafts_of, drafts_of_assistant
from tiny_model import EXACT, VOCABULARY, greedy, kv4_cache, random_tokens
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM


def assistant(**says):
    """A random Llama with the model's tokens, which agrees with it by chance alone, and never stops a draft early."""
    torch.manual_seed(1)
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=None)).eval()
    llama.generation_config.update(assistant_confidence_threshold=0.0, **says)
    return llama


def assisted(model, ids, count, cache, **arguments):
    with rewindable(model):
        return greedy(model, ids, count, past_key_values=cache, **arguments)


def rewinds_of(cache):
    """Tokens of every crop() from now on."""
    crop, counts = cache.crop, []
    cache.crop = lambda tokens: (counts.append(-tokens), crop(tokens))
    return counts


@pytest.mark.parametrize("says", [dict(num_assistant_tokens=30), dict(num_assistant_tokens=5), dict()], ids=str)
def test_a_cache_of_derived_sizes(model, says):
    """What the assistant's generation_config says counts, not the model's."""
    ids, drafted = random_tokens(1, 20, seed=1), says.get("num_assistant_tokens", 20)
    model.generation_config.num_assistant_tokens = 9
    try:
        cache = Kv4Cache.for_generate(model, ids, {"max_new_tokens": 40, "assistant_model": assistant(**says)}, **EXACT)
        before, rewinds = cache.manager, rewinds_of(cache)
        said = assisted(model, ids, 40, cache, assistant_model=assistant(**says))
    finally:
        model.generation_config.num_assistant_tokens = None
    assert torch.equal(said, greedy(model, ids, 40, past_key_values=kv4_cache(model)))
    assert max(rewinds) == drafted and cache.store.sizes.max_rewind_tokens == drafted
    assert cache.manager is before  # it did not have to grow


def test_an_assistant_that_is_not_told_of(model):
    """for_generate() with a GenerationConfig does not see the assistant: the cache grows before the first forward."""
    ids = random_tokens(1, 20, seed=1)
    cache = Kv4Cache.for_generate(model, ids, GenerationConfig(max_new_tokens=40, do_sample=False), **EXACT)
    said = assisted(model, ids, 40, cache, assistant_model=assistant(num_assistant_tokens=30))
    assert torch.equal(said, greedy(model, ids, 40, past_key_values=kv4_cache(model)))


def test_room_that_is_enough_is_accepted(model):
    ids, cache = random_tokens(1, 20, seed=1), kv4_cache(model, max_context=60, max_rewind_tokens=8)
    said = assisted(model, ids, 40, cache, assistant_model=assistant(num_assistant_tokens=5), num_assistant_tokens=30)
    assert torch.equal(said, greedy(model, ids, 40, past_key_values=kv4_cache(model)))
    # The last token is not drafted: however much an assistant would, of four tokens it drafts three.
    cache = kv4_cache(model, max_rewind_tokens=3)
    assert assisted(model, ids, 4, cache, assistant_model=assistant()).shape[1] == 24


def test_too_little_room_is_said_before_the_first_forward(model):
    ids, forwards = random_tokens(1, 20, seed=1), []
    hook = model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        for options, words in ((dict(max_rewind_tokens=8), "max_rewind_tokens = 20, and the cache has 8"),
                               (dict(max_rewind_tokens=32, max_step_tokens=20), "max_step_tokens = 21, and the cache has 20")):
            cache = kv4_cache(model, **options)
            with pytest.raises(kv4.ArgumentError, match=rf"generate\(\) with drafts of 20 tokens needs {words}"):
                assisted(model, ids, 40, cache, assistant_model=assistant())
            assert cache.manager.num_requests() == 0
    finally:
        hook.remove()
    assert not forwards


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient"])
def test_drafts_that_grow(model, schedule):
    """The assistant is the model itself: every draft is right, and the next one longer by two."""
    ids, config = random_tokens(1, 20, seed=1), model.generation_config
    says = dict(num_assistant_tokens=3, num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=0.0)
    before = {name: getattr(config, name) for name in says}
    config.update(**says)
    try:
        cache = Kv4Cache.for_generate(model, ids, {"max_new_tokens": 40, "assistant_model": model}, **EXACT)
        said = assisted(model, ids, 40, cache, assistant_model=model)
    finally:
        config.update(**before)
    assert cache.store.sizes.max_rewind_tokens == 12  # drafts of 3, 5, 7, 9 and 11 tokens, and one to spare
    assert torch.equal(said, greedy(model, ids, 40, past_key_values=kv4_cache(model)))


def test_the_longest_draft():
    def longest(first, remaining):
        """By the rounds of transformers, where the number of right tokens of each is chosen freely."""
        seen, rounds = 0, {(first, remaining)}
        while rounds:
            seen = max([seen, *(min(draft, left - 1) for draft, left in rounds)])
            after = set()
            for draft, left in rounds:
                fed = min(draft, left - 1)
                after |= {(draft + 2 if right == fed else max(1, draft - 1), left - right - 1) for right in range(fed + 1)}
            rounds = {(draft, left) for draft, left in after if left > 0}
        return seen
    for first in (1, 2, 3, 4, 5, 20):
        for remaining in (1, 2, 7, 24, 40, 60, 61, 77):
            drafts = drafts_of_assistant(first, "heuristic", remaining)
            assert 0 <= drafts.tokens - longest(first, remaining) <= 5 and drafts.beyond == 0, (first, remaining)
            assert drafts_of_assistant(first, "constant", remaining) == Drafts(min(first, remaining - 1))


def test_generators_of_other_kinds():
    class Generator:
        pass
    for name in ("num_output_tokens", "num_mtp_layers", "block_size"):
        generator = Generator()
        setattr(generator, name, 7)
        assert drafts_of(generator, 100) == Drafts(7, 7)
    translating = Generator()
    translating.num_assistant_tokens, translating.target_tokenizer = 5, object()
    assert drafts_of(translating, 100) == drafts_of(Generator(), 100) == Drafts(100, 1)


@pytest.mark.parametrize("count", range(8, 14))
def test_a_lookup_near_the_end_of_the_text(model, count):
    """Prompt lookup drafts as much as ever there, beyond the text that is wanted."""
    ids = random_tokens(1, 20, seed=2).repeat(1, 3)
    cache = Kv4Cache.for_generate(model, ids, {"max_new_tokens": count, "prompt_lookup_num_tokens": 9}, grow=False, **EXACT)
    said = assisted(model, ids, count, cache, prompt_lookup_num_tokens=9)
    assert torch.equal(said, greedy(model, ids, count, past_key_values=kv4_cache(model)))


def test_a_lookup_beyond_max_context_is_said_before_the_first_forward(model):
    ids, cache = random_tokens(1, 20, seed=2).repeat(1, 3), kv4_cache(model, max_context=72, max_rewind_tokens=9)
    with pytest.raises(kv4.ArgumentError, match="drafts of 9 tokens needs max_context = 80, and the cache has 72"):
        assisted(model, ids, 12, cache, prompt_lookup_num_tokens=9)
    assert cache.get_seq_length() == 0


def test_beams_do_not_draft(model):
    """transformers ignores prompt_lookup_num_tokens there, with a warning."""
    ids, cache = random_tokens(1, 20, seed=2), kv4_cache(model, max_batch=2)
    assert greedy(model, ids, 4, past_key_values=cache, num_beams=2, prompt_lookup_num_tokens=5).shape == (1, 24)
    sizes = Kv4Cache.for_generate(model, ids, {"num_beams": 2, "prompt_lookup_num_tokens": 5}, **EXACT).store.sizes
    assert sizes.max_rewind_tokens == 0
