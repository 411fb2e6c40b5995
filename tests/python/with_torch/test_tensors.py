"""torch tensors in and out, on the CPU and, where there is one, on a GPU: the same bytes as through NumPy."""
import numpy as np
import pytest
import torch

import kv4
from devices import DEVICES, needs_gpu
from small_cache import SmallCache, bf16_bits, small_config, small_options


class TorchCache(SmallCache):
    """The small cache with its constants and inputs as tensors on a device."""

    def __init__(self, device, **changes):
        self.device = device
        backend = kv4.make_cpu_backend() if device == "cpu" else kv4.make_cuda_backend()
        self.manager = kv4.KVCacheManager(small_config(), small_options(**changes), backend)
        rng = np.random.default_rng(7)
        make = lambda *shape: torch.from_numpy(rng.standard_normal(shape, np.float32)).to(device)
        self.manager.bind_weights(1, make(4, 160), make(80), make(4, 64), make(32))
        self.manager.bind_weights(2, make(8, 80), make(80))

    def inputs(self, layer, positions, stream=0):
        arrays = super().inputs(layer, positions, stream)
        return [None if a is None else torch.from_numpy(a.copy()).to(self.device) for a in arrays]


def fed(cache, count=41):
    request = cache.manager.admit()
    for part in (20, 1, count - 21):
        cache.feed(request, part)
    return request


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_give_the_bytes_of_arrays(device):
    with_arrays, with_tensors = SmallCache(), TorchCache(device)
    assert with_tensors.state(fed(with_tensors)) == with_arrays.state(fed(with_arrays))


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_are_tensors_of_the_same_kind(device):
    cache = TorchCache(device, row_format="bf16")
    request = fed(cache)
    cache.manager.prepare_forward([kv4.StepItem(request, torch.tensor([41, 42]))])
    cache.append_all([41, 42])
    handle = cache.manager.acquire(1)
    q = torch.randn(2, 3, 80, generator=torch.Generator().manual_seed(1)).to(device)
    out = handle.attend(q)
    assert isinstance(out, torch.Tensor) and out.device == q.device and out.dtype == torch.float32
    half = handle.attend(q.bfloat16())
    assert half.dtype == torch.bfloat16 and (half.float() - out).abs().max() < 5e-2
    best = handle.index_topk(torch.ones(2, 2, 32, device=device), torch.ones(2, 2, device=device), k=4)
    assert best.dtype == torch.int32 and best.device == q.device
    given = torch.empty_like(q)
    assert handle.attend(q, topk=best, out=given) is given
    view = handle.read_swa_view()
    payload = torch.from_dlpack(view.payload)
    assert payload.device == q.device and payload.shape == (6, 11, 160)
    handle.write_swa(torch.full((2, 80), 2.0, device=device))
    slot = int(torch.from_dlpack(view.slots)[0])
    assert payload[slot, 42 % 11].cpu().numpy().view(np.uint16).tolist() == bf16_bits(np.full(80, 2.0)).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_tensors(device):
    cache = TorchCache(device, row_format="bf16")
    cache.manager.prepare_forward([kv4.StepItem(cache.manager.admit(), [1, 2])])
    rows = torch.randn(2, 80).bfloat16().to(device)
    handle = cache.manager.acquire(0)
    handle.write_swa(rows)
    k, _, _, _ = handle.gather_swa_kv(torch.empty(1, 2, 80, dtype=torch.bfloat16, device=device))
    assert torch.equal(k[0], rows)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_and_types(device):
    cache = TorchCache(device)
    cache.manager.prepare_forward([kv4.StepItem(cache.manager.admit(), [1, 2])])
    handle = cache.manager.acquire(0)
    handle.write_swa(torch.ones(2, 80, device=device, requires_grad=True))
    assert torch.equal(handle.gather_swa_kv(torch.empty(1, 2, 80, device=device))[0].cpu(), torch.ones(1, 2, 80))
    with pytest.raises(kv4.ArgumentError, match="dtype is float64"):
        handle.write_swa(torch.zeros(2, 80, dtype=torch.float64, device=device))


@needs_gpu
def test_devices_are_checked():
    for cache, wrong, message in ((TorchCache("cpu"), "cuda", "on cpu; it is on cuda:0"),
                                  (TorchCache("cuda"), "cpu", "on cuda:0; it is on cpu")):
        cache.manager.prepare_forward([kv4.StepItem(cache.manager.admit(), [1, 2])])
        with pytest.raises(kv4.ArgumentError, match="raw_kv must be where the cache is, " + message):
            cache.manager.acquire(0).write_swa(torch.zeros(2, 80, device=wrong))


@needs_gpu
def test_work_follows_torchs_stream():
    expected = SmallCache()
    expected_state = expected.state(fed(expected))
    cache, stream = TorchCache("cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        request = cache.manager.admit()
        for part in (20, 1, 20):
            torch.cuda._sleep(20_000_000)  # what comes before on the stream is late
            cache.feed(request, part)
    assert cache.state(request) == expected_state


@needs_gpu
def test_calls_are_captured_in_a_graph():
    cache = TorchCache("cuda", row_format="bf16")
    manager, request = cache.manager, cache.manager.admit()
    cache.feed(request, 8)
    raw, q = torch.zeros(1, 80, device="cuda"), torch.ones(1, 3, 80, device="cuda")
    out, graph, stream = torch.empty_like(q), torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def layer():
        handle = manager.acquire(0)
        handle.append(raw)
        handle.attend(q, out=out)

    results = []
    for position in range(8, 12):
        raw.fill_(position)
        step = manager.prepare_forward([kv4.StepItem(request, [position])])
        torch.cuda.synchronize()
        if position == 8:
            layer()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                layer()
        graph.replay()
        torch.cuda.synchronize()
        results.append(out.clone())
        layer()
        torch.cuda.synchronize()
        assert torch.equal(results[-1], out)
        manager.commit(step)
    assert not torch.equal(results[0], results[-1])
