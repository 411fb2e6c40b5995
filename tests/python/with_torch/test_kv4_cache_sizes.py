"""Caches that size themselves, grow, and are copied."""
import copy
import gc
import pickle
import threading

import pytest
import torch

import kv4
import kv4.transformers.store
from kv4.transformers import Kv4Cache, rewindable
from tiny_model import EXACT, greedy, kv4_cache, random_tokens, tiny_model
from transformers import GenerationConfig

def test_sizes_are_derived_from_the_call():
    model, ids = tiny_model(), random_tokens(2, 40)
    sizes = lambda *call, **options: vars(Kv4Cache.for_generate(model, *call, **EXACT, **options).store.sizes)
    config = GenerationConfig(max_new_tokens=10, num_beams=3)
    assert sizes(ids, config) == dict(max_batch=6, max_context=50, max_step_tokens=240, max_rewind_tokens=0)
    tokenized = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert sizes(tokenized, {"max_length": 64, "do_sample": True, "num_return_sequences": 2})["max_batch"] == 4
    assert sizes(tokenized, {"max_length": 64})["max_context"] == 64
    assert sizes(ids)["max_context"] == 60  # generate() makes 20 tokens where nothing is said
    assert sizes(ids[:1], GenerationConfig(max_new_tokens=8, prompt_lookup_num_tokens=5)) == dict(
        max_batch=1, max_context=53, max_step_tokens=45, max_rewind_tokens=5)  # the first forward has drafts, too
    assert sizes(ids, {"max_new_tokens": 8, "prefill_chunk_size": 16})["max_step_tokens"] == 32
    assert sizes(ids, {"max_new_tokens": 8}, max_batch=7)["max_batch"] == 7
    assert sizes({"inputs_embeds": torch.zeros(3, 5, 128)}, {"max_new_tokens": 8})["max_batch"] == 3
    with pytest.raises(kv4.ArgumentError, match=r"token ids \[rows, columns\].*got a list"):
        sizes([1, 2, 3])


def test_sizes_are_those_of_the_merged_config():
    """generate() takes from model.generation_config what the config that it is given leaves open."""
    model, ids = tiny_model(), random_tokens(1, 20, seed=1)
    model.generation_config.update(num_beams=3, max_new_tokens=50)
    config = GenerationConfig(do_sample=False)
    for given in (config, {"do_sample": False}, {"generation_config": config}):
        sizes = Kv4Cache.for_generate(model, ids, given, **EXACT).store.sizes
        assert (sizes.max_batch, sizes.max_context) == (3, 70)
    assert config.num_beams is None and config.max_new_tokens is None
    sizes = Kv4Cache.for_generate(model, ids, {"generation_config": GenerationConfig(num_beams=2), "max_new_tokens": 5}, **EXACT).store.sizes
    assert (sizes.max_batch, sizes.max_context) == (2, 25)
    cache = Kv4Cache.for_generate(model, ids, config, grow=False, **EXACT)
    model.generate(ids, generation_config=config, past_key_values=cache)
    assert cache.get_seq_length() == 69


@pytest.mark.parametrize("arguments", [dict(), dict(num_beams=3), dict(do_sample=True, num_return_sequences=2)], ids=str)
def test_a_cache_of_derived_sizes_is_enough(model, arguments):
    ids, config = random_tokens(2, 40, seed=1), GenerationConfig(max_new_tokens=12, **arguments)
    cache = Kv4Cache.for_generate(model, ids, config, **EXACT)
    model.generate(ids, generation_config=config, past_key_values=cache)
    assert cache.get_seq_length() == 51


def test_a_cache_of_derived_sizes_for_drafts(model):
    ids, config = random_tokens(1, 20, seed=2).repeat(1, 3), GenerationConfig(max_new_tokens=12, prompt_lookup_num_tokens=5)
    cache = Kv4Cache.for_generate(model, ids, config, **EXACT)
    with rewindable(model):
        said = model.generate(ids, generation_config=config, past_key_values=cache)
    assert torch.equal(said, greedy(model, ids, 12, past_key_values=kv4_cache(model)))


def test_a_longer_turn_grows_the_cache(model):
    ids = random_tokens(1, 30, seed=3)
    cache = Kv4Cache.for_generate(model, ids, {"max_new_tokens": 4}, **EXACT)
    said = greedy(model, ids, past_key_values=cache)
    before = cache.manager
    again = greedy(model, said, 60, past_key_values=cache)
    assert cache.manager is not before and cache.store.sizes.max_context >= 93
    assert torch.equal(again, greedy(model, said, 60, past_key_values=kv4_cache(model)))
    cache.reset()
    beams = lambda its: greedy(model, ids, 6, num_beams=3, past_key_values=its)
    assert torch.equal(beams(cache), beams(kv4_cache(model, max_batch=3)))


def test_forwards_grow_the_cache(model):
    tokens, cache = random_tokens(1, 60, seed=4), kv4_cache(model, max_context=8, grow=True)
    parts = [model(part, past_key_values=cache).logits for part in torch.split(tokens, [6] + [1] * 24 + [30], dim=1)]
    whole = model(tokens, past_key_values=kv4_cache(model)).logits
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-3
    assert cache.manager.num_requests() == 1
    cache.batch_repeat_interleave(3)
    assert model(random_tokens(3, 1), past_key_values=cache).logits.shape[0] == 3


def test_what_does_not_fit_is_said_before_the_first_token(model):
    ids, cache, forwards = random_tokens(1, 30, seed=5), kv4_cache(model, max_context=40), []
    hook = model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(kv4.ArgumentError, match=r"generate\(\) needs max_context = 49, and the cache has 40.*for_generate"):
            greedy(model, ids, 20, past_key_values=cache)
        with pytest.raises(kv4.ArgumentError, match="max_rewind_tokens = 5, and the cache has 0"), rewindable(model):
            greedy(model, ids, 4, past_key_values=cache, prompt_lookup_num_tokens=5)
    finally:
        hook.remove()
    assert not forwards
    assert greedy(model, ids, 11, past_key_values=cache).shape[1] == 41  # the last token is not fed


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_hooks_of_a_copied_model(copied):
    model = tiny_model()
    kv4_cache(model)
    twin, ids = copied(model), random_tokens(1, 30, seed=5)
    cache = kv4_cache(twin, max_context=40)
    assert torch.equal(greedy(twin, ids, 8, past_key_values=cache), greedy(model, ids, 8, past_key_values=kv4_cache(model)))
    cache.reset()
    with pytest.raises(kv4.ArgumentError, match=r"generate\(\) needs max_context = 49"):
        greedy(twin, ids, 20, past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match="drafts of 5 tokens needs max_rewind_tokens = 5"), rewindable(twin):
        greedy(twin, ids, 4, past_key_values=cache, prompt_lookup_num_tokens=5)


def test_no_memory_is_said_at_the_start(model, monkeypatch):
    ids = random_tokens(1, 30, seed=6)
    cache = Kv4Cache.for_generate(model, ids, {"max_new_tokens": 4}, **EXACT)
    said = greedy(model, ids, past_key_values=cache)
    monkeypatch.setattr(kv4.transformers.store, "free_bytes", lambda device: 1000)
    with pytest.raises(kv4.OutOfMemoryError, match=r"max_batch = 1 rows and max_context = 333 tokens needs .* are free"):
        greedy(model, said, 300, past_key_values=cache)
    with pytest.raises(MemoryError, match="max_context = 34 "):
        Kv4Cache.for_generate(model, ids, {"max_new_tokens": 4}, **EXACT)
    monkeypatch.undo()
    assert cache.get_seq_length() == 33
    assert torch.equal(greedy(model, said, 8, past_key_values=cache), greedy(model, said, 8, past_key_values=kv4_cache(model)))


def test_more_than_the_machine_has_is_refused(model):
    with pytest.raises(kv4.OutOfMemoryError, match="are free: lower one of them"):
        kv4_cache(model, max_batch=60_000, max_context=1_000_000)


@pytest.mark.parametrize("max_batch", [1, 4], ids=["into memory of its own", "by fork"])
def test_a_prefilled_prompt_is_used_again(model, max_batch):
    prompt, prefilled = random_tokens(1, 150, seed=7), kv4_cache(model, max_batch=max_batch)
    model(prompt, past_key_values=prefilled)
    for seed in range(5):
        ids, cache = torch.cat([prompt, random_tokens(1, 5, seed=seed)], dim=1), copy.deepcopy(prefilled)
        assert (cache.manager is prefilled.manager) == (max_batch > 1)
        assert torch.equal(greedy(model, ids, past_key_values=cache), greedy(model, ids, past_key_values=kv4_cache(model)))
    assert prefilled.get_seq_length() == 150 and torch.equal(prefilled.token_ids(), prompt)
    del cache
    gc.collect()
    assert prefilled.manager.num_requests() == 1  # copies release their rows


def test_copies_share_blocks_and_count_for_max_batch(model):
    cache = kv4_cache(model, max_batch=3)
    model(random_tokens(1, 300, seed=8), past_key_values=cache)
    held = cache.manager.allocator().num_held()
    copies = [copy.deepcopy({"past": cache})["past"], copy.copy(cache)]
    assert cache.manager.allocator().num_held() < 2 * held
    with pytest.raises(kv4.ShortageError, match="max_batch = 4, and the cache has 3"):
        cache.batch_repeat_interleave(2)
    copies[0].reset()
    cache.batch_repeat_interleave(2)
    assert copies[1].get_seq_length() == 300


def test_a_copy_of_an_empty_cache(model):
    cache = copy.deepcopy(kv4_cache(model))
    assert model(random_tokens(1, 8), past_key_values=cache).logits.shape[1] == 8


def test_a_copy_outlives_its_origin(model):
    cache, tokens = kv4_cache(model, max_batch=2), random_tokens(1, 40, seed=9)
    model(tokens[:, :39], past_key_values=cache)
    twin = copy.deepcopy(cache)
    del cache
    gc.collect()
    logits = model(tokens[:, 39:], past_key_values=twin).logits
    assert (logits[:, -1] - model(tokens, past_key_values=kv4_cache(model)).logits[:, -1]).abs().max() < 1e-3


def test_a_forward_that_failed_in_a_copy_does_not_stop_the_other(model):
    cache, tokens = kv4_cache(model, max_batch=2), random_tokens(1, 40, seed=10)
    model(tokens[:, :39], past_key_values=cache)
    twin = copy.deepcopy(cache)
    norm, model.model.layers[2].post_attention_layernorm = model.model.layers[2].post_attention_layernorm, None
    with pytest.raises(TypeError):
        model(tokens[:, 39:], past_key_values=cache)
    model.model.layers[2].post_attention_layernorm = norm
    logits = [model(tokens[:, 39:], past_key_values=its).logits for its in (twin, cache)]
    assert torch.equal(*logits)

    model.model.layers[2].post_attention_layernorm = None
    with pytest.raises(TypeError):
        model(tokens[:, 39:], past_key_values=twin)
    model.model.layers[2].post_attention_layernorm = norm
    del twin
    gc.collect()
    assert cache.manager.num_requests() == 1


def test_copies_with_one_memory_take_turns(model):
    """While a forward runs, another thread gets words for the copy that shares its memory, and changes nothing."""
    cache, tokens = kv4_cache(model, max_batch=4), random_tokens(1, 40, seed=10)
    model(tokens[:, :39], past_key_values=cache)
    twin, dropped, apart = copy.deepcopy(cache), [copy.deepcopy(cache)], copy.deepcopy(kv4_cache(model))
    threads, told = [], []

    def elsewhere():
        torch.set_grad_enabled(False)
        for attempt in (lambda: model(tokens[:, 39:], past_key_values=twin), twin.reset, lambda: copy.deepcopy(twin)):
            try:
                told.append(attempt())
            except kv4.StateError as error:
                told.append(str(error))
        dropped.clear()
        told.append(model(tokens, past_key_values=apart).logits[:, -1])

    def run_elsewhere(*_):
        if not threads:
            threads.append(threading.Thread(target=elsewhere))
            threads[0].start()
            threads[0].join()

    hook = model.model.layers[2].register_forward_pre_hook(run_elsewhere)
    try:
        logits = model(tokens[:, 39:], past_key_values=cache).logits
    finally:
        hook.remove()
    assert len(told) == 4 and all("a copy of this Kv4Cache is under way in another thread" in words for words in told[:3])
    assert (logits[:, -1] - told[3]).abs().max() < 1e-3
    assert torch.equal(logits, model(tokens[:, 39:], past_key_values=twin).logits)
    assert cache.manager.num_requests() == 2


def test_it_says_what_it_is(model):
    cache = kv4_cache(model, max_batch=2)
    model(random_tokens(1, 8), past_key_values=cache)
    assert repr(cache) == "Kv4Cache(1 of 2 rows, 8 of 512 tokens, 4 layers on cpu)"


def test_a_compiled_model(model):
    tokens = random_tokens(1, 40, seed=11)
    compiled = torch.compile(model, backend="eager")
    cache = Kv4Cache(model.config, compiled, max_context=64, **EXACT)
    ours = torch.cat([compiled(part, past_key_values=cache).logits for part in torch.split(tokens, [37, 1, 1, 1], dim=1)], 1)
    torch.compiler.reset()
    assert (ours - model(tokens, past_key_values=kv4_cache(model)).logits).abs().max() < 1e-3
