"""A model whose layers are on several devices: one manager for each, through one Kv4Cache."""
import copy

import pytest
import torch

import kv4
from kv4.transformers import Kv4Cache, accelerate, rewindable
from devices import needs_gpu
from tiny_model import greedy, kv4_cache, random_tokens, tiny_model


def over_two(model, **options):
    """Layers 0 and 2 with one backend, 1 and 3 with the other."""
    first, second = kv4.make_cpu_backend(1), kv4.make_cpu_backend(2)
    return kv4_cache(model, backend=[first, second, first, second], **options)


def test_two_backends_give_what_one_gives(model):
    tokens, cache, one = random_tokens(1, 300, seed=1), over_two(model), kv4_cache(model)
    assert [manager.schema().options.layers for manager in cache.managers] == [[0, 2], [1, 3]]
    for part in torch.split(tokens, [200, 1, 99], dim=1):
        assert torch.equal(model(part, past_key_values=cache).logits, model(part, past_key_values=one).logits)
    assert [manager.num_requests() for manager in cache.managers] == [1, 1]
    with pytest.raises(kv4.StateError, match="2 managers: take cache.managers"):
        cache.manager
    assert "4 layers on cpu, cpu" in repr(cache)
    cache.reset()
    assert [manager.allocator().num_held() for manager in cache.managers] == [0, 0]


def test_beams_copies_drafts_and_growth(model):
    prompt = random_tokens(1, 20, seed=2).repeat(1, 3)
    beams = lambda its: greedy(model, prompt, num_beams=3, past_key_values=its)
    assert torch.equal(beams(over_two(model, max_batch=3)), beams(kv4_cache(model, max_batch=3)))

    plain = greedy(model, prompt, past_key_values=kv4_cache(model))
    with rewindable(model):
        assert torch.equal(plain, greedy(model, prompt, past_key_values=over_two(model, max_rewind_tokens=6),
                                         prompt_lookup_num_tokens=5))
    for max_batch in (1, 2):
        prefilled = over_two(model, max_batch=max_batch)
        model(prompt[:, :50], past_key_values=prefilled)
        assert torch.equal(plain, greedy(model, prompt, past_key_values=copy.deepcopy(prefilled)))
    growing = over_two(model, max_context=16, grow=True)
    assert torch.equal(plain, greedy(model, prompt, past_key_values=growing))
    assert [manager.num_requests() for manager in growing.managers] == [1, 1]


def test_a_shortage_in_one_changes_none(model):
    cache = over_two(model, max_batch=2, num_blocks=3)
    model(random_tokens(1, 300, seed=3), past_key_values=cache)
    held = [manager.allocator().num_held() for manager in cache.managers]
    with pytest.raises(kv4.ShortageError):
        cache.managers[1].admit(), model(random_tokens(1, 200, seed=4), past_key_values=cache)
    assert [manager.allocator().num_held() for manager in cache.managers] == held
    assert model(random_tokens(1, 1), past_key_values=cache).logits.shape[1] == 1


def test_a_prefix_is_as_long_as_in_the_manager_that_has_least(model):
    prompt = random_tokens(1, 400, seed=5)
    cold = greedy(model, prompt, past_key_values=kv4_cache(model))
    cache = over_two(model, prefix=kv4.PrefixOptions(enabled=True, weights_id="tiny", num_snapshots=4))
    assert cache.begin(prompt) == 0
    assert torch.equal(greedy(model, prompt, past_key_values=cache), cold)
    assert cache.begin(prompt) == 384
    assert torch.equal(greedy(model, prompt, past_key_values=cache), cold)
    cache.reset()
    cache.managers[1].invalidate("tiny")
    assert cache.begin(prompt) == 0
    assert torch.equal(greedy(model, prompt, past_key_values=cache), cold)


def test_a_conversation_of_two_files(model, tmp_path):
    cache, path = over_two(model), tmp_path / "chat.kv4s"
    said = greedy(model, random_tokens(1, 150, seed=6), past_key_values=cache)
    assert cache.save(path) and sorted(file.name for file in tmp_path.iterdir()) == ["chat.kv4s", "chat.kv4s.1"]
    expected = greedy(model, said, past_key_values=cache)
    again = over_two(model)
    model(random_tokens(1, 9), past_key_values=again)
    whole = (tmp_path / "chat.kv4s.1").read_bytes()
    (tmp_path / "chat.kv4s.1").write_bytes(whole[:-100])
    with pytest.raises(kv4.FileError):
        again.restore(path)
    assert again.get_seq_length() == 9
    (tmp_path / "chat.kv4s.1").write_bytes(whole)
    again.restore(path)
    assert torch.equal(greedy(model, said, past_key_values=again), expected)


def test_backends_that_do_not_fit_are_refused(model):
    with pytest.raises(kv4.ArgumentError, match="backend has 1 entries, the model 4 layers"):
        kv4_cache(model, backend=[kv4.make_cpu_backend()])
    for other in ("cpu", 3, [None] * 4, {"cpu": "cpu"}):
        with pytest.raises(kv4.ArgumentError, match="backend is .*; give a kv4.Backend"):
            kv4_cache(model, backend=other)
    assert kv4_cache(model, backend={"cpu": kv4.make_cpu_backend(2)}).manager.backend().threads == 2


@pytest.mark.parametrize("prepare", [lambda model: model, accelerate], ids=["unmodified", "accelerated"])
def test_offloaded_weights(prepare):
    """accelerate keeps them elsewhere, and brings those of a module when it runs."""
    cpu_offload = pytest.importorskip("accelerate").cpu_offload
    tokens, alone = random_tokens(1, 160, seed=8), tiny_model()
    expected = alone(tokens, past_key_values=kv4_cache(alone)).logits
    model = prepare(cpu_offload(tiny_model(), execution_device=torch.device("cpu")))
    assert model.model.layers[1].self_attn.compressor.position_bias.is_meta
    cache = kv4_cache(model)
    logits = [model(part, past_key_values=cache).logits for part in torch.split(tokens, [150, 1, 9], dim=1)]
    assert (torch.cat(logits, 1) - expected).abs().max() < 1e-2
    assert cache.token_ids().tolist() == tokens.tolist()


@needs_gpu
@pytest.mark.parametrize("prepare", [lambda model: model, accelerate], ids=["unmodified", "accelerated"])
def test_a_gpu_and_the_cpu(prepare):
    dispatch_model = pytest.importorskip("accelerate").dispatch_model
    tokens, alone = random_tokens(1, 200, seed=7), tiny_model()
    expected = alone(tokens, past_key_values=kv4_cache(alone)).logits
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": "cpu", "model.layers.3": "cpu",
              "model.norm": 0, "model.hc_head": 0, "model.rotary_emb": 0, "lm_head": 0}
    # Layers 2 and 3 compute on the CPU: their weights are not offloaded from the GPU.
    model = prepare(dispatch_model(tiny_model(), places, main_device="cpu"))
    cache = kv4_cache(model)
    assert [manager.backend().device for manager in cache.managers] == ["cuda:0", "cpu"]
    logits = [model(part.to("cuda"), past_key_values=cache).logits.cpu() for part in torch.split(tokens, [190, 1, 9], dim=1)]
    assert (torch.cat(logits, 1) - expected).abs().max() < 1e-2
    with pytest.raises(kv4.ArgumentError, match="layer 2 is on cpu, its backend on cuda:0"):
        kv4_cache(model, backend=kv4.make_cuda_backend(0))
