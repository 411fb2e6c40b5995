"""kv4.transformers beside the stock cache of transformers, with a tiny random model on each device that is here."""
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import kv4
from kv4.transformers import Kv4Cache, accelerate, rewindable
from devices import DEVICES, needs_gpu
from forked import in_child
from tiny_model import EXACT, greedy, kv4_cache, random_tokens, tiny_model
from transformers import DynamicCache

ROOT = Path(__file__).resolve().parents[3]

both_ways = pytest.mark.parametrize("prepare", [lambda model: model, accelerate], ids=["unmodified", "accelerated"])


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=["unmodified", "accelerated"])
def model(request, device):
    model = tiny_model().to(device)
    return accelerate(model) if request.param == "accelerated" else model


@pytest.fixture(scope="module")
def accelerated(device):
    return accelerate(tiny_model().to(device))


def step_by_step(model, cache, tokens, chunks):
    """Logits [n, vocabulary] of tokens [1, n], fed in chunks of these sizes."""
    parts = torch.split(tokens, chunks, dim=1)
    return torch.cat([model(part, past_key_values=cache).logits[0] for part in parts])


@pytest.fixture(scope="module")
def stock_tokens(device):
    """A prompt of 60 tokens and 300 chosen after it with the stock cache, and the logits of all.

    Of a model that leaves no entry out: another entry on the edge would be a change larger than some choices' margin.
    """
    model, tokens, logits = tiny_model(index_topk=512).to(device), random_tokens(1, 60, seed=29, device=device), []
    cache, following = DynamicCache(config=model.config), tokens
    for _ in range(300):
        logits.append(model(following, past_key_values=cache).logits[0])
        following = logits[-1][-1:].argmax(-1)[None]
        tokens = torch.cat([tokens, following], dim=1)
    return tokens, torch.cat(logits)


@both_ways
def test_bf16_rows_give_the_stock_caches_logits_and_tokens(prepare, stock_tokens, device):
    model, (tokens, stock) = prepare(tiny_model(index_topk=512).to(device)), stock_tokens
    ours = step_by_step(model, kv4_cache(model), tokens[:, :-1], [60] + [1] * 299)
    assert (ours - stock).abs().max() < 1e-2
    assert ours[59:].argmax(-1).tolist() == tokens[0, 60:].tolist()
    # The past does matter to this model: another one gives other logits.
    other = torch.cat([random_tokens(1, 60, seed=9, device=device), tokens[:, 60:100]], dim=1)
    assert (step_by_step(model, kv4_cache(model), other, [100])[99] - stock[99]).abs().max() > 2e-2


def test_bf16_rows_with_a_selection_of_entries(model):
    tokens = random_tokens(1, 400, seed=13, device=model.device)
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
    tokens = random_tokens(1, 280, seed=1, device=model.device)
    whole = step_by_step(model, kv4_cache(model), tokens, [280])
    parts = step_by_step(model, kv4_cache(model), tokens, [130, 1, 1, 3, 127, 18])
    assert (whole - parts).abs().max() < 1e-3


def test_default_formats_choose_the_same_token(model):
    tokens = random_tokens(1, 500, seed=2, device=model.device)
    stock = step_by_step(model, DynamicCache(config=model.config), tokens, [300, 200])
    default = Kv4Cache(model.config, model, max_context=1024)
    assert default.manager.schema().options.row_format == kv4.Format.fp8_tile64
    ours = step_by_step(model, default, tokens, [300, 200])
    assert (ours.argmax(-1) == stock.argmax(-1)).float().mean() >= 0.98


def padded(prompts, left=True):
    """Prompts [1, n] as a batch, and its mask."""
    columns = max(prompt.shape[1] for prompt in prompts)
    ids = torch.zeros(len(prompts), columns, dtype=torch.long, device=prompts[0].device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        place = slice(columns - prompt.shape[1], columns) if left else slice(0, prompt.shape[1])
        ids[row, place], mask[row, place] = prompt[0], 1
    return ids, mask


@pytest.mark.parametrize("lengths", [(250, 125, 37, 5), (250, 190)], ids=["some padding is in a window", "none is"])
def test_rows_of_different_lengths(model, lengths):
    """Meanwhile the first row gets its second HCA entry; others have none, or get their first."""
    prompts = [random_tokens(1, n, seed=n, device=model.device) for n in lengths]
    ids, mask = padded(prompts)
    details = dict(return_dict_in_generate=True, output_logits=True)
    batch = greedy(model, ids, 12, attention_mask=mask, past_key_values=kv4_cache(model, max_batch=4), **details)
    for row, prompt in enumerate(prompts):
        alone = greedy(model, prompt, 12, past_key_values=DynamicCache(config=model.config), **details)
        assert batch.sequences[row, 250:].tolist() == alone.sequences[0, prompt.shape[1]:].tolist()
        difference = torch.stack(batch.logits)[:, row] - torch.stack(alone.logits)[:, 0]
        assert difference.abs().max() < 1e-2


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padding_without_position_ids(model, left):
    """As one forward or two; in the second, a row that has not begun, and one that has ended."""
    prompts = [random_tokens(1, n, seed=n, device=model.device) for n in (170, 33, 9)]
    ids, mask = padded(prompts, left)
    following = random_tokens(3, 1, seed=17, device=model.device)
    alone = [model(torch.cat([prompt, following[row:row + 1]], dim=1), past_key_values=DynamicCache(config=model.config)).logits[0]
             for row, prompt in enumerate(prompts)]
    for chunks in ([170], [150, 20]):
        cache, parts, columns = kv4_cache(model, max_batch=3), [], 0
        for part in torch.split(ids, chunks, dim=1):
            columns += part.shape[1]
            parts.append(model(part, attention_mask=mask[:, :columns], past_key_values=cache).logits)
        logits = torch.cat(parts, dim=1)
        for row in range(3):
            assert (logits[row][mask[row].bool()] - alone[row][:-1]).abs().max() < 1e-2
        if left:  # the cache knows the first columns of rows
            logits = model(following, past_key_values=cache).logits
            assert max((logits[row, 0] - alone[row][-1]).abs().max() for row in range(3)) < 1e-2


@pytest.mark.parametrize("setting, reset", [(lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
                                            (lambda: torch.set_default_dtype(torch.bfloat16), lambda: torch.set_default_dtype(torch.float32))],
                         ids=["device", "dtype"])
def test_torchs_defaults_do_not_matter(model, setting, reset):
    """Rows of different lengths, one without a token in the last forward; the default formats, with Hadamard."""
    ids, mask = padded([random_tokens(1, n, seed=n, device=model.device) for n in (140, 33)])
    following, rows = random_tokens(2, 1, seed=17, device=model.device), torch.tensor([1, 0])

    def logits(before, after):
        before()
        try:
            cache = Kv4Cache(model.config, model, max_batch=2, max_context=256)
            told = [model(ids, attention_mask=mask, past_key_values=cache).logits, model(following, past_key_values=cache).logits]
            cache.batch_select_indices(rows)
            cache.crop(0)
            last = torch.cat([torch.ones_like(mask[:, :1]), torch.zeros_like(mask[:, :1])])[:2]
            whole = torch.cat([mask.flip(0), torch.ones_like(last), last], dim=1)
            return told + [model(following, attention_mask=whole, past_key_values=cache).logits[:1]]
        finally:
            after()
    for ours, expected in zip(logits(setting, reset), logits(lambda: None, lambda: None)):
        assert torch.equal(ours, expected)


def test_padding_with_embeddings(accelerated):
    """Without token ids, only the mask describes the forward."""
    ids, mask = padded([random_tokens(1, n, seed=n, device=accelerated.device) for n in (140, 33)])
    embeds = accelerated.model.embed_tokens(ids)
    given = [{"input_ids": ids}, {"inputs_embeds": embeds}]
    by_ids, by_embeds = (accelerated(**tokens, attention_mask=mask, past_key_values=kv4_cache(accelerated, max_batch=2)).logits for tokens in given)
    assert torch.equal(by_ids[mask.bool()], by_embeds[mask.bool()])


def test_padding_between_tokens_needs_accelerate(device):
    model = tiny_model().to(device)
    prompts = [random_tokens(1, n, seed=n, device=device) for n in (40, 30)]
    ids, mask = padded(prompts, left=False)
    cache, following = kv4_cache(model, max_batch=2), random_tokens(2, 1, seed=1, device=device)
    model(ids, attention_mask=mask, past_key_values=cache)
    mask = torch.cat([mask, torch.ones_like(following)], dim=1)
    with pytest.raises(kv4.ArgumentError, match=r"rows \[1\] have padding between their tokens.*on the left.*accelerate"):
        model(following, attention_mask=mask, past_key_values=cache)
    together = accelerate(model)(following, attention_mask=mask, past_key_values=cache).logits
    for row, prompt in enumerate(prompts):
        alone = model(torch.cat([prompt, following[row:row + 1]], dim=1), past_key_values=DynamicCache(config=model.config))
        assert (together[row, 0] - alone.logits[0, -1]).abs().max() < 1e-2


def test_positions_that_count_on_from_padding_are_put_right(accelerated):
    """As generate() gives them after prompts that are padded on the right."""
    prompts = [random_tokens(1, n, seed=n, device=accelerated.device) for n in (40, 30)]
    ids, mask = padded(prompts, left=False)
    cache, following = kv4_cache(accelerated, max_batch=2), random_tokens(2, 2, seed=1, device=accelerated.device)
    accelerated(ids, attention_mask=mask, past_key_values=cache)
    for step in range(2):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        told = torch.tensor([[40 + step], [1 + step]], device=accelerated.device)
        together = accelerated(following[:, step:step + 1], attention_mask=mask, position_ids=told, past_key_values=cache).logits
    for row, prompt in enumerate(prompts):
        whole = torch.cat([prompt, following[row:row + 1]], dim=1)
        alone = accelerated(whole, past_key_values=DynamicCache(config=accelerated.config))
        assert (together[row, 0] - alone.logits[0, -1]).abs().max() < 1e-2


@both_ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision(prepare, dtype, device):
    model, tokens = prepare(tiny_model().to(device, dtype)), random_tokens(1, 200, seed=14, device=device)
    stock = step_by_step(model, DynamicCache(config=model.config), tokens, [180] + [1] * 20)
    ours = step_by_step(model, kv4_cache(model), tokens, [180] + [1] * 20)
    assert ours.dtype == dtype and (ours - stock).abs().max() < 0.1
    assert (ours.argmax(-1) == stock.argmax(-1)).float().mean() > 0.9


@needs_gpu
def test_a_decode_waits_for_the_device_once():
    """For the token ids, beyond what the model itself waits for."""
    def waits(model, cache):
        model(random_tokens(1, 200, device="cuda"), past_key_values=cache)
        token = random_tokens(1, 1, device="cuda")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            model(token, past_key_values=cache)
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in told)

    model = tiny_model().to("cuda")
    stock = waits(model, DynamicCache(config=model.config))
    assert waits(model, kv4_cache(model)) <= stock + 1
    assert waits(accelerate(model), kv4_cache(model)) <= stock + 1


@needs_gpu
@both_ways
def test_a_model_on_a_stream_of_its_own(prepare):
    model = prepare(tiny_model().to("cuda"))
    tokens, stream = random_tokens(1, 160, seed=15, device="cuda"), torch.cuda.Stream()
    expected = step_by_step(model, kv4_cache(model), tokens, [150] + [1] * 10)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what comes before on the stream is late
        ours = step_by_step(model, kv4_cache(model), tokens, [150] + [1] * 10)
    stream.synchronize()
    assert (ours - expected).abs().max() < 1e-3


def test_a_forked_process_goes_on(model, device):
    """With a backend of several threads, which the child does not have."""
    if device != "cpu":
        pytest.skip("CUDA does not survive a fork")
    cache = kv4_cache(model, backend=kv4.make_cpu_backend(3))
    ids = random_tokens(1, 50, seed=3)
    start = greedy(model, ids, 5, past_key_values=cache)
    go_on = lambda: greedy(model, start, 10, past_key_values=cache).tolist()
    assert in_child(go_on) == go_on()


def test_beams_fork(model):
    prompt = random_tokens(1, 50, seed=3, device=model.device)
    beams = lambda cache: greedy(model, prompt, 20, num_beams=3, num_return_sequences=3, past_key_values=cache)
    cache = kv4_cache(model, max_batch=3)
    assert torch.equal(beams(cache), beams(DynamicCache(config=model.config)))
    cache.reset()
    assert cache.manager.allocator().num_held() == 0


def test_several_sequences_of_one_prompt(model):
    cache = kv4_cache(model, max_batch=4)
    model(random_tokens(1, 140, seed=4, device=model.device), past_key_values=cache)
    cache.batch_repeat_interleave(4)
    held = cache.manager.allocator().num_held()
    assert held < 4 * len(cache.manager.blocks(cache.requests[0]))  # they share full blocks
    tokens = random_tokens(4, 1, seed=5, device=model.device)
    together = model(tokens, past_key_values=cache).logits
    for row in range(4):
        alone = kv4_cache(model)
        model(random_tokens(1, 140, seed=4, device=model.device), past_key_values=alone)
        assert (model(tokens[row:row + 1], past_key_values=alone).logits - together[row]).abs().max() < 1e-3


def test_assisted_generation(model):
    prompt = random_tokens(1, 30, seed=6, device=model.device).repeat(1, 4)
    plain = greedy(model, prompt, 40, past_key_values=kv4_cache(model))
    lookup = lambda: greedy(model, prompt, 40, past_key_values=kv4_cache(model, max_rewind_tokens=8),
                            prompt_lookup_num_tokens=6)
    with pytest.raises(ValueError, match="stateful"):
        lookup()
    with rewindable(model):
        assert torch.equal(lookup(), plain)
    assert model._is_stateful


def test_rewinding_is_as_if_never_fed(model):
    tokens = random_tokens(1, 200, seed=7, device=model.device)
    cache = kv4_cache(model, max_rewind_tokens=6)
    step_by_step(model, cache, tokens[:, :160], [160])
    step_by_step(model, cache, random_tokens(1, 6, seed=8, device=model.device), [6])
    cache.crop(-6)
    assert cache.get_seq_length() == 160
    rewound = step_by_step(model, cache, tokens[:, 160:], [40])
    straight = step_by_step(model, kv4_cache(model), tokens, [160, 40])[160:]
    assert (rewound - straight).abs().max() < 1e-3


def test_a_conversation_outlives_its_process(model, tmp_path):
    prompt = random_tokens(1, 150, seed=10, device=model.device)
    cache = kv4_cache(model)
    first = greedy(model, prompt, 10, past_key_values=cache)
    assert cache.save(tmp_path / "chat.kv4s", kv4.SessionIdentity("tiny", salt="secret"))
    expected = greedy(model, first, 20, past_key_values=cache)
    accelerated = "accelerate" if "_forward" in repr(model.model.layers[0].self_attn.forward) else ""
    program = f"""
import sys, torch, kv4
from kv4.transformers import Kv4Cache, accelerate
from devices import DEVICES, needs_gpu
from forked import in_child
from tiny_model import tiny_model
model = {accelerated}(tiny_model().to('{model.device}'))
cache = Kv4Cache(model.config, model, max_context=512, **{EXACT!r})
cache.restore(sys.argv[1], kv4.SessionIdentity("tiny", salt="secret"))
ids = torch.cat([cache.token_ids(), torch.tensor([[{int(first[0, -1])}]], device=model.device)], dim=1)
print(model.generate(ids, max_new_tokens=20, do_sample=False, past_key_values=cache)[0].tolist())
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path / "chat.kv4s")], capture_output=True, text=True,
                            env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().splitlines()[-1] == str(expected[0].tolist())


def test_a_prefix_hit_gives_the_same_tokens(model):
    prompt = random_tokens(1, 300, seed=11, device=model.device)
    cold = greedy(model, prompt, 15, past_key_values=kv4_cache(model))
    prefix = kv4.PrefixOptions(enabled=True, weights_id="tiny", num_snapshots=4)
    cache = kv4_cache(model, prefix=prefix)
    assert cache.begin(prompt) == 0
    assert torch.equal(greedy(model, prompt, 15, past_key_values=cache), cold)
    assert cache.begin(prompt) == 256
    assert torch.equal(greedy(model, prompt, 15, past_key_values=cache), cold)
    assert cache.manager.prefix_statistics().hits == 1


def test_a_context_comes_back_from_a_disk(accelerated, tmp_path):
    prompt = random_tokens(1, 300, seed=16, device=accelerated.device)
    prefix = kv4.PrefixOptions(enabled=True, weights_id="tiny", num_snapshots=4)
    answers = []
    for found in (0, 256):
        cache = kv4_cache(accelerated, prefix=prefix)
        with kv4.Tiers(cache.manager.schema(), kv4.TiersOptions(directory=tmp_path)) as tiers:
            tiered = kv4.TieredPrefix(cache.manager, tiers)
            tiered.load(kv4.Prompt(prompt[0].cpu()), timeout=60)
            assert cache.begin(prompt) == found
            answers.append(greedy(accelerated, prompt, 15, past_key_values=cache).tolist())
            assert tiered.save_all(timeout=60)
    assert answers[0] == answers[1]


def test_what_the_cache_cannot_know(accelerated):
    embeds = accelerated.model.embed_tokens(random_tokens(1, 8, device=accelerated.device))
    with pytest.raises(kv4.ArgumentError, match="input_ids"):
        accelerated(inputs_embeds=embeds, past_key_values=kv4_cache(accelerated, prefix=kv4.PrefixOptions(enabled=True)))
    assert accelerated(inputs_embeds=embeds, past_key_values=kv4_cache(accelerated)).logits.shape[1] == 8
    cache = kv4_cache(accelerated)
    accelerated(random_tokens(1, 8, device=accelerated.device), past_key_values=cache)
    with pytest.raises(kv4.ArgumentError, match="2 rows, the cache 1"):
        accelerated(random_tokens(2, 1, device=accelerated.device), past_key_values=cache)


def test_the_memory_goes_with_the_cache(accelerated):
    cache = kv4_cache(accelerated)
    accelerated(random_tokens(1, 8, device=accelerated.device), past_key_values=cache)
    manager = weakref.ref(cache)
    del cache
    assert manager() is None


def test_a_forward_that_failed_leaves_no_trace(accelerated):
    tokens = random_tokens(1, 40, seed=12, device=accelerated.device)
    cache = kv4_cache(accelerated)
    model_norm, accelerated.model.layers[2].post_attention_layernorm = accelerated.model.layers[2].post_attention_layernorm, None
    with pytest.raises(TypeError):
        accelerated(tokens, past_key_values=cache)
    accelerated.model.layers[2].post_attention_layernorm = model_norm
    again = accelerated(tokens, past_key_values=cache).logits
    assert (again - accelerated(tokens, past_key_values=kv4_cache(accelerated)).logits).abs().max() < 1e-6


def test_the_guides_lines_run():
    """Runs with the reader's model and inputs."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)
    lines, = (block for block in blocks if block.startswith("# needs torch and transformers\n"))
    prompt = random_tokens(1, 20, seed=19)
    names = dict(model=tiny_model(), input_ids=prompt, mask=torch.ones_like(prompt), prompt_ids=prompt,
                 continuations=[torch.cat([prompt, random_tokens(1, 3, seed=seed)], dim=1) for seed in (20, 21)])
    exec(compile(lines, "docs/python.md", "exec"), names)
    assert names["cache"].get_seq_length() == 20 + 200 - 1 and len(names["cache"].requests) == 3
    assert names["prompt"].get_seq_length() == 20 and names["prompt"].manager.num_requests() == 1


def test_the_example_runs(device):
    example = ROOT / "examples" / "transformers_generate.py"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    result = subprocess.run([sys.executable, str(example), "--device", device, "--layers", "4", "--hidden", "128",
                             "--context", "200", "--tokens", "4"], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    table = [line.split() for line in result.stdout.splitlines()[-3:]]
    assert [line[0] for line in table] == ["stock", "kv4", "accelerated"]
    assert table[0][3] == "0.00" and float(table[1][3]) > 0 and table[1][3] == table[2][3]  # MB that kv4 holds
