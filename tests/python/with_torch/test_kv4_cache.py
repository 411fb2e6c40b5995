"""kv4.transformers beside the stock cache of transformers, on the CPU with a tiny random model."""
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
torch.set_grad_enabled(False)

import kv4
from kv4.transformers import Kv4Cache, accelerate, rewindable
from tiny_model import random_tokens, tiny_model
from transformers import DynamicCache

EXACT = dict(row_format="bf16", index_format="bf16", hadamard=False)


@pytest.fixture(scope="module", params=["unmodified", "accelerated"])
def model(request):
    return accelerate(tiny_model()) if request.param == "accelerated" else tiny_model()


@pytest.fixture(scope="module")
def accelerated():
    return accelerate(tiny_model())


def kv4_cache(model, **options):
    return Kv4Cache(model.config, model, **{"max_context": 1024, **EXACT, **options})


def step_by_step(model, cache, tokens, chunks):
    """Logits [n, vocabulary] of tokens [1, n], fed in chunks of these sizes."""
    parts = torch.split(tokens, chunks, dim=1)
    return torch.cat([model(part, past_key_values=cache).logits[0] for part in parts])


def greedy(model, ids, count, **arguments):
    return model.generate(ids, max_new_tokens=count, do_sample=False, **arguments)


@pytest.fixture(scope="module")
def stock_tokens():
    """A prompt of 60 tokens and 300 chosen after it with the stock cache, and the logits of all.

    Of a model that leaves no entry out: another entry on the edge would be a change larger than some choices' margin.
    """
    model, tokens, logits = tiny_model(index_topk=512), random_tokens(1, 60, seed=29), []
    cache, following = DynamicCache(config=model.config), tokens
    for _ in range(300):
        logits.append(model(following, past_key_values=cache).logits[0])
        following = logits[-1][-1:].argmax(-1)[None]
        tokens = torch.cat([tokens, following], dim=1)
    return tokens, torch.cat(logits)


@pytest.mark.parametrize("prepare", [lambda model: model, accelerate], ids=["unmodified", "accelerated"])
def test_bf16_rows_give_the_stock_caches_logits_and_tokens(prepare, stock_tokens):
    model, (tokens, stock) = prepare(tiny_model(index_topk=512)), stock_tokens
    ours = step_by_step(model, kv4_cache(model), tokens[:, :-1], [60] + [1] * 299)
    assert (ours - stock).abs().max() < 1e-2
    assert ours[59:].argmax(-1).tolist() == tokens[0, 60:].tolist()
    # What the past holds does matter to this model: another one gives other logits.
    other = torch.cat([random_tokens(1, 60, seed=9), tokens[:, 60:100]], dim=1)
    assert (step_by_step(model, kv4_cache(model), other, [100])[99] - stock[99]).abs().max() > 2e-2


def test_bf16_rows_with_a_selection_of_entries(model):
    tokens = random_tokens(1, 400, seed=13)
    stock = step_by_step(model, DynamicCache(config=model.config), tokens, [360] + [1] * 40)
    assert (step_by_step(model, kv4_cache(model), tokens, [360] + [1] * 40) - stock).abs().max() < 1e-2


@pytest.mark.parametrize("prepare", [lambda model: model, accelerate], ids=["unmodified", "accelerated"])
def test_a_bfloat16_model(prepare):
    model, tokens = prepare(tiny_model().bfloat16()), random_tokens(1, 250, seed=14)
    stock = step_by_step(model, DynamicCache(config=model.config), tokens, [250]).float()
    ours = step_by_step(model, kv4_cache(model), tokens, [230] + [1] * 20).float()
    assert (ours - stock).abs().max() < 5e-2  # logits up to 2.5 have steps of 2^-7 to 2^-6
    assert (ours.argmax(-1) == stock.argmax(-1)).float().mean() >= 0.98


def test_chunks_do_not_matter(model):
    tokens = random_tokens(1, 280, seed=1)
    whole = step_by_step(model, kv4_cache(model), tokens, [280])
    parts = step_by_step(model, kv4_cache(model), tokens, [130, 1, 1, 3, 127, 18])
    assert (whole - parts).abs().max() < 1e-3


def test_default_formats_choose_the_same_token(model):
    tokens = random_tokens(1, 500, seed=2)
    stock = step_by_step(model, DynamicCache(config=model.config), tokens, [300, 200])
    default = Kv4Cache(model.config, model, max_context=1024)
    assert default.manager.schema().options.row_format == kv4.Format.fp8_tile64
    ours = step_by_step(model, default, tokens, [300, 200])
    assert (ours.argmax(-1) == stock.argmax(-1)).float().mean() >= 0.98


def test_rows_of_different_lengths(accelerated):
    prompts = [random_tokens(1, n, seed=n) for n in (150, 37, 5)]
    ids = torch.zeros(3, 150, dtype=torch.long)
    mask = torch.zeros(3, 150, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 150 - prompt.shape[1]:] = prompt
        mask[row, 150 - prompt.shape[1]:] = 1
    details = dict(return_dict_in_generate=True, output_logits=True)
    batch = greedy(accelerated, ids, 12, attention_mask=mask, past_key_values=kv4_cache(accelerated, max_batch=3), **details)
    for row, prompt in enumerate(prompts):
        alone = greedy(accelerated, prompt, 12, past_key_values=DynamicCache(config=accelerated.config), **details)
        assert batch.sequences[row, 150:].tolist() == alone.sequences[0, prompt.shape[1]:].tolist()
        difference = torch.stack(batch.logits)[:, row] - torch.stack(alone.logits)[:, 0]
        assert difference.abs().max() < 1e-2


def test_the_unmodified_model_refuses_padding():
    model = tiny_model()
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    cache = kv4_cache(model, max_batch=2)
    with pytest.raises(kv4.ArgumentError, match="accelerate"):
        model(random_tokens(2, 8), attention_mask=mask, past_key_values=cache)
    cache.reset()
    assert model(random_tokens(2, 8), past_key_values=cache).logits.shape[:2] == (2, 8)


def test_beams_fork(model):
    prompt = random_tokens(1, 50, seed=3)
    beams = lambda cache: greedy(model, prompt, 20, num_beams=3, num_return_sequences=3, past_key_values=cache)
    cache = kv4_cache(model, max_batch=3)
    assert torch.equal(beams(cache), beams(DynamicCache(config=model.config)))
    cache.reset()
    assert cache.manager.allocator().num_held() == 0


def test_several_sequences_of_one_prompt(model):
    cache = kv4_cache(model, max_batch=4)
    model(random_tokens(1, 140, seed=4), past_key_values=cache)
    cache.batch_repeat_interleave(4)
    held = cache.manager.allocator().num_held()
    assert held < 4 * len(cache.manager.blocks(cache.requests[0]))  # they share full blocks
    tokens = random_tokens(4, 1, seed=5)
    together = model(tokens, past_key_values=cache).logits
    for row in range(4):
        alone = kv4_cache(model)
        model(random_tokens(1, 140, seed=4), past_key_values=alone)
        assert (model(tokens[row:row + 1], past_key_values=alone).logits - together[row]).abs().max() < 1e-3


def test_assisted_generation(model):
    prompt = random_tokens(1, 30, seed=6).repeat(1, 4)
    plain = greedy(model, prompt, 40, past_key_values=kv4_cache(model))
    lookup = lambda: greedy(model, prompt, 40, past_key_values=kv4_cache(model, max_rewind_tokens=8),
                            prompt_lookup_num_tokens=6)
    with pytest.raises(ValueError, match="stateful"):
        lookup()
    with rewindable(model):
        assert torch.equal(lookup(), plain)
    assert model._is_stateful


def test_rewinding_is_as_if_never_fed(model):
    tokens = random_tokens(1, 200, seed=7)
    cache = kv4_cache(model, max_rewind_tokens=6)
    step_by_step(model, cache, tokens[:, :160], [160])
    step_by_step(model, cache, random_tokens(1, 6, seed=8), [6])
    cache.crop(-6)
    assert cache.get_seq_length() == 160
    rewound = step_by_step(model, cache, tokens[:, 160:], [40])
    straight = step_by_step(model, kv4_cache(model), tokens, [160, 40])[160:]
    assert (rewound - straight).abs().max() < 1e-3


def test_a_conversation_outlives_its_process(model, tmp_path):
    prompt = random_tokens(1, 150, seed=10)
    cache = kv4_cache(model)
    first = greedy(model, prompt, 10, past_key_values=cache)
    assert cache.save(tmp_path / "chat.kv4s", kv4.SessionIdentity("tiny", salt="secret"))
    expected = greedy(model, first, 20, past_key_values=cache)
    accelerated = "accelerate" if "_forward" in repr(model.model.layers[0].self_attn.forward) else ""
    program = f"""
import sys, torch, kv4
from kv4.transformers import Kv4Cache, accelerate
from tiny_model import tiny_model
model = {accelerated}(tiny_model())
cache = Kv4Cache(model.config, model, max_context=512, **{EXACT!r})
cache.restore(sys.argv[1], kv4.SessionIdentity("tiny", salt="secret"))
ids = torch.cat([cache.token_ids(), torch.tensor([[{int(first[0, -1])}]])], dim=1)
print(model.generate(ids, max_new_tokens=20, do_sample=False, past_key_values=cache)[0].tolist())
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path / "chat.kv4s")], capture_output=True, text=True,
                            env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().splitlines()[-1] == str(expected[0].tolist())


def test_a_prefix_hit_gives_the_same_tokens(model):
    prompt = random_tokens(1, 300, seed=11)
    cold = greedy(model, prompt, 15, past_key_values=kv4_cache(model))
    prefix = kv4.PrefixOptions(enabled=True, weights_id="tiny", num_snapshots=4)
    cache = kv4_cache(model, prefix=prefix)
    assert cache.begin(prompt) == 0
    assert torch.equal(greedy(model, prompt, 15, past_key_values=cache), cold)
    assert cache.begin(prompt) == 256
    assert torch.equal(greedy(model, prompt, 15, past_key_values=cache), cold)
    assert cache.manager.prefix_statistics().hits == 1


def test_what_the_cache_cannot_know(accelerated):
    embeds = accelerated.model.embed_tokens(random_tokens(1, 8))
    with pytest.raises(kv4.ArgumentError, match="input_ids"):
        accelerated(inputs_embeds=embeds, past_key_values=kv4_cache(accelerated, prefix=kv4.PrefixOptions(enabled=True)))
    assert accelerated(inputs_embeds=embeds, past_key_values=kv4_cache(accelerated)).logits.shape[1] == 8
    cache = kv4_cache(accelerated)
    accelerated(random_tokens(1, 8), past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match="2 rows, the cache 1"):
        accelerated(random_tokens(2, 1), past_key_values=cache)


def test_the_memory_goes_with_the_cache(accelerated):
    cache = kv4_cache(accelerated)
    accelerated(random_tokens(1, 8), past_key_values=cache)
    manager = weakref.ref(cache)
    del cache
    assert manager() is None


def test_a_forward_that_failed_leaves_no_trace(accelerated):
    tokens = random_tokens(1, 40, seed=12)
    cache = kv4_cache(accelerated)
    model_norm, accelerated.model.layers[2].post_attention_layernorm = accelerated.model.layers[2].post_attention_layernorm, None
    with pytest.raises(TypeError):
        accelerated(tokens, past_key_values=cache)
    accelerated.model.layers[2].post_attention_layernorm = model_norm
    again = accelerated(tokens, past_key_values=cache).logits
    assert (again - accelerated(tokens, past_key_values=kv4_cache(accelerated)).logits).abs().max() < 1e-6


def test_the_example_runs():
    example = Path(__file__).resolve().parents[3] / "examples" / "transformers_generate.py"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    result = subprocess.run([sys.executable, str(example), "--layers", "4", "--hidden", "128", "--context", "200",
                             "--tokens", "4"], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[-3:]] == ["stock", "kv4", "accelerated"]
