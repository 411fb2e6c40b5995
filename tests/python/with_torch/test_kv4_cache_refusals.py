"""A Kv4Cache refuses unsupported calls with a message and does not change."""
import copy
import gc
import subprocess
import sys

import pytest
import torch

import kv4
from kv4.transformers import Kv4Cache, accelerate, rewindable
from tiny_model import greedy, kv4_cache, random_tokens, tiny_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


def test_a_batch_larger_than_max_batch_leaks_no_rows(model):
    cache, prompt = kv4_cache(model), random_tokens(1, 20, seed=1)
    for attempt in (lambda: greedy(model, prompt, num_beams=3, past_key_values=cache),
                    lambda: model(random_tokens(2, 8), past_key_values=cache)):
        with pytest.raises(kv4.ShortageError, match=r"max_batch = [23], and the cache has 1") as told:
            attempt()
        assert told.value.shortage == kv4.Shortage.requests
        assert cache.manager.num_requests() == 0
    assert torch.equal(greedy(model, prompt, past_key_values=cache), greedy(model, prompt, past_key_values=kv4_cache(model)))


def test_more_rows_than_max_batch_by_repeating_leave_the_rows_alone(model):
    cache, prompt = kv4_cache(model, max_batch=2), random_tokens(2, 20, seed=1)
    model(prompt, past_key_values=cache)
    with pytest.raises(kv4.ShortageError, match="max_batch = 4, and the cache has 2"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(kv4.ArgumentError, match="no row 2"):
        cache.reorder_cache(torch.tensor([0, 2]))
    assert [cache.manager.length(request) for request in cache.requests] == [20, 20]


def test_a_first_forward_that_failed_leaves_no_rows(model):
    cache = kv4_cache(model, max_batch=2, max_context=64)
    with pytest.raises(kv4.ArgumentError, match="max_context = 65, and the cache has 64"):
        model(random_tokens(1, 65), past_key_values=cache)
    assert cache.manager.num_requests() == 0
    assert model(random_tokens(2, 8), past_key_values=cache).logits.shape[0] == 2


def test_a_prompt_that_is_fed_again_is_refused(model):
    prompt = random_tokens(1, 20, seed=2).repeat(1, 3)
    cache = kv4_cache(model, max_rewind_tokens=8)
    said = greedy(model, prompt, past_key_values=cache)
    held = cache.token_ids()
    with rewindable(model), pytest.raises(kv4.ArgumentError, match=r"position 0, which must be 63: the cache holds 63 tokens"):
        greedy(model, said, past_key_values=cache, prompt_lookup_num_tokens=4)
    assert torch.equal(cache.token_ids(), held)
    with pytest.raises(kv4.ArgumentError, match="must be 63"):
        model(said, position_ids=torch.arange(said.shape[1])[None], past_key_values=cache)
    cache.reset()
    with rewindable(model):
        assert torch.equal(greedy(model, said, past_key_values=cache, prompt_lookup_num_tokens=4),
                           greedy(model, said, past_key_values=kv4_cache(model)))


def test_use_cache_false_with_a_cache_is_refused(model):
    cache, prompt = kv4_cache(model), random_tokens(1, 20, seed=3)
    with pytest.raises(kv4.ArgumentError, match="use_cache=False"):
        greedy(model, prompt, past_key_values=cache, use_cache=False)
    assert cache.get_seq_length() == 0
    for tokens in ({"input_ids": prompt}, {"inputs_embeds": model.model.embed_tokens(prompt)}):
        with pytest.raises(kv4.ArgumentError, match="use_cache=False.*leave past_key_values out"):
            model(**tokens, past_key_values=cache, use_cache=False)
    assert cache.get_seq_length() == 0 and cache.manager.num_requests() == 0
    model(prompt, past_key_values=cache, use_cache=True)


def test_a_text_without_new_tokens_is_refused(model):
    """generate() removes the tokens that the cache has, and here no token remains."""
    cache, prompt = kv4_cache(model), random_tokens(1, 40, seed=3)
    greedy(model, prompt, past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match="the forward has no tokens: the cache holds 43"):
        greedy(model, prompt[:, :20], past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match="the forward has no tokens"):
        model(prompt[:, :0], past_key_values=cache)
    assert cache.get_seq_length() == 43


def test_more_rows_than_the_cache_has_are_refused(model):
    cache, prompt = kv4_cache(model, max_batch=3), random_tokens(1, 20, seed=3)
    said = greedy(model, prompt, past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match=r"3 rows, the cache 1: batch_repeat_interleave\(n\) makes n of each"):
        greedy(model, said, num_beams=3, past_key_values=cache)
    cache.batch_repeat_interleave(3)
    assert torch.equal(greedy(model, said, num_beams=3, past_key_values=cache), greedy(model, said, num_beams=3))


def test_positions_that_skip_tokens_are_refused(model):
    cache = kv4_cache(model, max_batch=2)
    ids, mask = random_tokens(2, 12, seed=4), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    following, mask = random_tokens(2, 1, seed=5), torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    with pytest.raises(kv4.ArgumentError, match="row 1 .* position 12, which must be 7: the cache holds 7 tokens"):
        model(following, attention_mask=mask, position_ids=torch.tensor([[12]]), past_key_values=cache)
    model(following, attention_mask=mask, position_ids=torch.tensor([[12], [7]]), past_key_values=cache)


def test_a_mask_of_other_columns_is_refused(model):
    cache = kv4_cache(model)
    model(random_tokens(1, 12), past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match="attention_mask has 1 columns; the cache holds 12 and the forward adds 1"):
        model(random_tokens(1, 1), attention_mask=torch.ones(1, 1), past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match=r"give the mask of all 13 columns, or reset\(\) the cache first"):
        model(random_tokens(1, 1), attention_mask=torch.ones(1, 1), past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match="give the mask of all 13 columns$"):
        model(random_tokens(1, 1), attention_mask=torch.ones(1, 2), past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match=r"position 0, which must be 12: .* reset\(\) the cache first"):
        model(random_tokens(1, 5), attention_mask=torch.ones(1, 5), position_ids=torch.arange(5)[None], past_key_values=cache)
    for mask, got in ((torch.ones(3, 13), r"a tensor \[3, 13\]"), (torch.ones(1, 1, 1, 13), r"a tensor \[1, 1, 1, 13\]"),
                      ({"full_attention": None}, "a dict")):
        with pytest.raises(kv4.ArgumentError, match=rf"attention_mask must be a tensor \[1, 13\].*got {got}"):
            model(random_tokens(1, 1), attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 12


def test_another_model_is_refused(model):
    cache, tokens = kv4_cache(model), random_tokens(1, 8)
    twin_without_hooks, twin_with_hooks = tiny_model(), tiny_model()
    kv4_cache(twin_with_hooks)
    fewer = tiny_model()
    fewer.model.layers = fewer.model.layers[:2]
    for other in (twin_without_hooks, twin_with_hooks, fewer, accelerate(tiny_model())):
        with pytest.raises(kv4.ArgumentError, match="made for another model"):
            other(tokens, past_key_values=cache)
        assert cache.get_seq_length() == 0 and cache.manager.num_requests() == 0
    model(tokens, past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match="made for another model"):
        twin_without_hooks(tokens, past_key_values=cache)
    assert cache.get_seq_length() == 8


def test_another_model_is_refused_after_a_forward_that_failed(model):
    """A report on a forward ends with it: a model without hooks reports nothing."""
    cache = kv4_cache(model)
    with pytest.raises(IndexError):
        model(torch.full((1, 8), 10**6), past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match="made for another model"):
        tiny_model()(random_tokens(1, 8), past_key_values=cache)
    assert cache.get_seq_length() == 0 and cache.manager.num_requests() == 0


def test_a_config_of_another_model_is_refused(model):
    config = type(model.config).from_dict({**model.config.to_dict(), "num_hidden_layers": 2})
    with pytest.raises(kv4.ArgumentError, match="num_hidden_layers = 2, the model 4"):
        Kv4Cache(config, model)


def test_models_of_other_kinds_are_refused(model):
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=1))
    for attempt in (lambda: accelerate(llama), lambda: Kv4Cache(llama.config, llama)):
        with pytest.raises(kv4.ArgumentError, match="takes a DeepseekV4ForCausalLM; got a LlamaForCausalLM"):
            attempt()
    for attempt in (lambda: accelerate(model.model), lambda: Kv4Cache(model.config, model.model),
                    lambda: Kv4Cache.for_generate(model.model, random_tokens(1, 4))):
        with pytest.raises(kv4.ArgumentError, match="got a DeepseekV4Model: give the whole model, not its .model"):
            attempt()


@pytest.mark.parametrize("part, named", [
    (lambda model: model.layers[2], r"layers \[2\] are offloaded"),
    (lambda model: model.layers[1].self_attn.compressor, r"layers \[1\] are offloaded"),
    (lambda model: model.layers[3].self_attn.compressor.indexer.kv_norm, r"layers \[3\] are offloaded"),
    (lambda model: model.rotary_emb, "the model's rotary_emb is")],
    ids=["a layer", "a compressor", "a norm", "rope"])
def test_weights_without_values_are_named(part, named):
    model = tiny_model()
    part(model.model).to("meta")
    with pytest.raises(kv4.ArgumentError, match=f"{named}.*on the meta device.*device_map"):
        kv4_cache(model)


def test_croppable_only_with_room_to_rewind(model):
    for rewind in (0, 4):
        cache = kv4_cache(model, max_rewind_tokens=rewind)
        assert cache.is_croppable == (rewind > 0)
        assert all(layer.is_croppable == (rewind > 0) for layer in cache.layers)


def test_crop_takes_tokens_of_all_rows_or_of_none(model):
    cache = kv4_cache(model, max_batch=2, max_rewind_tokens=16)
    ids, mask = random_tokens(2, 40, seed=6), torch.ones(2, 40, dtype=torch.long)
    mask[1, :35] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    lengths = lambda: [cache.manager.length(request) for request in cache.requests]
    with pytest.raises(kv4.ArgumentError, match=r"crop\(-10\): row 1 has 5 tokens.*no row was changed"):
        cache.crop(-10)
    assert lengths() == [40, 5] and cache.get_seq_length() == 40
    with pytest.raises(ValueError, match=r"crop\(-n\)"):
        cache.crop(3)
    cache.crop(0)
    cache.crop(-3)
    assert lengths() == [37, 2] and cache.get_seq_length() == 37


@pytest.mark.parametrize("max_batch", [1, 2], ids=["full", "with room"])
def test_a_damaged_file_leaves_the_conversation(model, max_batch, tmp_path):
    saved, cache = kv4_cache(model), kv4_cache(model, max_batch=max_batch)
    greedy(model, random_tokens(1, 150, seed=7), past_key_values=saved)
    saved.save(tmp_path / "whole")
    damaged = bytearray((tmp_path / "whole").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)

    said = greedy(model, random_tokens(1, 30, seed=8), past_key_values=cache)
    before = cache.token_ids()
    for name, identity in (("damaged", None), ("missing", None), ("whole", kv4.SessionIdentity(salt="another"))):
        with pytest.raises(kv4.Error):
            cache.restore(tmp_path / name, identity)
        assert torch.equal(cache.token_ids(), before) and cache.get_seq_length() == before.shape[1]
    assert torch.equal(greedy(model, said, past_key_values=cache), greedy(model, said, past_key_values=kv4_cache(model)))
    cache.restore(tmp_path / "whole")
    assert torch.equal(cache.token_ids(), saved.token_ids()) and cache.manager.num_requests() == 1


def test_a_file_that_is_too_long_leaves_the_conversation(model, tmp_path):
    saved, cache = kv4_cache(model), kv4_cache(model, max_context=64)
    greedy(model, random_tokens(1, 150, seed=7), past_key_values=saved)
    saved.save(tmp_path / "long")
    model(random_tokens(1, 30, seed=8), past_key_values=cache)
    with pytest.raises(kv4.Error):
        cache.restore(tmp_path / "long")
    assert cache.get_seq_length() == 30 and cache.manager.num_requests() == 1


def test_a_prompt_that_cannot_begin_leaves_the_conversation(model):
    cache = kv4_cache(model)
    model(random_tokens(1, 30, seed=8), past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match="prefix cache"):
        cache.begin(random_tokens(1, 40))
    assert cache.get_seq_length() == 30 and cache.manager.num_requests() == 1


def test_rows_that_are_not_there_are_named(model, tmp_path):
    cache = kv4_cache(model, prefix=kv4.PrefixOptions(enabled=True, weights_id="tiny"))
    for attempt in (cache.token_ids, lambda: cache.save(tmp_path / "chat")):
        with pytest.raises(kv4.ArgumentError, match="there is no row 0; the cache has 0"):
            attempt()
    model(random_tokens(1, 8), past_key_values=cache)
    for row in (1, -1):
        with pytest.raises(kv4.ArgumentError, match=f"there is no row {row}; the cache has 1"):
            cache.token_ids(row)
    with pytest.raises(kv4.ArgumentError, match=r"one prompt \[1, n\]; got \[2, 8\]"):
        cache.begin(random_tokens(2, 8))
    assert cache.get_seq_length() == 8
    assert cache.begin(random_tokens(8)) == 0


def test_attentions_are_given_where_they_are_asked_for():
    model, tokens = accelerate(tiny_model()), random_tokens(1, 140, seed=9)
    cache, stock = kv4_cache(model), DynamicCache(config=model.config)
    model(tokens[:, :130], past_key_values=stock)
    model(tokens[:, :130], past_key_values=cache)
    ours = model(tokens[:, 130:], past_key_values=cache, output_attentions=True)
    theirs = model(tokens[:, 130:], past_key_values=stock, output_attentions=True)
    assert len(ours.attentions) == len(theirs.attentions) == 4
    for mine, its in zip(ours.attentions, theirs.attentions):
        assert mine.shape == its.shape and (mine - its).abs().max() < 1e-2
    again = model(random_tokens(1, 1), past_key_values=cache)
    assert again.attentions is None and cache.get_seq_length() == 141


def test_the_cpu_backend_has_torchs_threads(model):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert kv4_cache(model).manager.backend().threads == 2
    finally:
        torch.set_num_threads(before)
    assert kv4_cache(model, backend=kv4.make_cpu_backend(3)).manager.backend().threads == 3


@pytest.mark.parametrize("name, values, least", [("max_batch", [0, -1, 1.5, None], 1), ("max_context", [0, "8192"], 1),
                                                 ("max_step_tokens", [0, -1], 1), ("max_rewind_tokens", [-1, None], 0)])
def test_sizes_are_refused_by_their_names(model, name, values, least):
    for value in values:
        with pytest.raises(kv4.ArgumentError, match=f"{name} is {value!r}; it must be an integer from {least} on"):
            kv4_cache(model, **{name: value})


def test_inputs_that_are_no_batch_are_named(model):
    for inputs, got in ((random_tokens(20), r"a tensor \[20\]"), ([1, 2], "a list"), ({"text": "x"}, "a dict")):
        with pytest.raises(kv4.ArgumentError, match=rf"inputs must be token ids \[rows, columns\].*got {got}"):
            Kv4Cache.for_generate(model, inputs)
    for config in (20, "greedy", model.config, {"generation_config": 20}):
        with pytest.raises(kv4.ArgumentError, match="generation_config must be a GenerationConfig or a dict.*got a"):
            Kv4Cache.for_generate(model, random_tokens(1, 4), config)


def test_a_model_that_is_gone_is_named():
    model = tiny_model()
    cache = kv4_cache(model)
    del model
    gc.collect()
    with pytest.raises(kv4.StateError, match="the model that this Kv4Cache was made for is gone"):
        copy.deepcopy(cache)


@pytest.mark.parametrize("missing, version, words", [
    ("", "4.57.6", "needs transformers from 5.17 on, before 6; 4.57.6 is installed"),
    ("", "5.16.1", "needs transformers from 5.17 on, before 6; 5.16.1 is installed"),
    ("", "6.0.0.dev0", "needs transformers from 5.17 on, before 6; 6.0.0.dev0 is installed"),
    ("", "6.0rc1", "before 6; 6.0rc1 is installed"),
    ("", "6", "before 6; 6 is installed"),
    ("torch", "5.22.0", "needs torch, which is not installed: pip install"),
    ("transformers", "5.22.0", "needs transformers, which is not installed: pip install")])
def test_what_must_be_installed_is_said(missing, version, words):
    program = f"""
import sys, types
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
for name in {{'torch', 'transformers'}} - {{{missing!r}}}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__version__ = {version!r}
import kv4.transformers
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                            env={"PYTHONPATH": ":".join(p for p in sys.path if p)})
    assert result.returncode != 0 and words in result.stderr.splitlines()[-1], result.stderr
