"""Requests and steps: the C++ tests' properties of the bytes, through Python."""
import numpy as np
import pytest

import kv4
from small_cache import SmallCache


@pytest.fixture
def cache():
    return SmallCache()


def test_chunked_is_whole(cache):
    whole, chunked = cache.manager.admit(), cache.manager.admit()
    cache.feed(whole, 37)
    for count in (20, 1, 4, 12):
        cache.feed(chunked, count)
    assert cache.manager.length(chunked) == 37
    assert cache.state(chunked) == cache.state(whole)


def test_rewind_abort_and_fork(cache):
    request, fresh = cache.manager.admit(), cache.manager.admit()
    cache.feed(request, 30)
    cache.feed(request, 3, stream=1)
    assert cache.manager.rewind_floor(request) == 30
    cache.manager.rewind(request, 30)
    step = cache.manager.prepare_forward([kv4.StepItem(request, [7, 7])])
    cache.append_all([30, 31], stream=2)
    cache.manager.abort(step)
    cache.feed(fresh, 30)
    assert cache.state(request) == cache.state(fresh)
    branch = cache.manager.fork(request)
    cache.feed(branch, 9, stream=3)
    assert cache.state(request) == cache.state(fresh)
    assert cache.manager.blocks(branch)[0] == cache.manager.blocks(request)[0]
    for each in (request, fresh, branch):
        cache.manager.release(each)
    assert cache.manager.num_requests() == 0 and cache.manager.allocator().num_held() == 0


def test_threads_give_the_same_bytes(cache):
    other = SmallCache(kv4.make_cpu_backend(threads=3))
    a, b = cache.manager.admit(), other.manager.admit()
    cache.feed(a, 40)
    other.feed(b, 40)
    assert cache.state(a) == other.state(b)


def test_shortage(cache):
    requests = [cache.manager.admit() for _ in range(4)]
    with pytest.raises(kv4.ShortageError) as caught:
        cache.manager.admit()
    assert caught.value.shortage == kv4.Shortage.requests and caught.value.code == "shortage"
    assert isinstance(caught.value, kv4.Error)
    for request in requests[:3]:
        for count in (60, 36):
            cache.feed(request, count)
    with pytest.raises(kv4.ShortageError) as caught:
        cache.feed(requests[3], 40)
    assert caught.value.shortage == kv4.Shortage.blocks
    assert cache.manager.length(requests[3]) == 0


def test_wrong_order_and_wrong_ids(cache):
    manager = cache.manager
    request = manager.admit()
    with pytest.raises(kv4.StateError):
        manager.acquire(0)
    step = manager.prepare_forward([kv4.StepItem(request, [1])])
    with pytest.raises(kv4.StateError):
        manager.prepare_forward([kv4.StepItem(request, [1])])
    handle = manager.acquire(0)
    manager.abort(step)
    with pytest.raises(kv4.StateError, match="step"):
        handle.write_swa(np.zeros((1, 80), np.float32))
    with pytest.raises(kv4.StateError):
        handle.gather_swa_kv()
    with pytest.raises(kv4.ArgumentError):
        manager.length(999)
    with pytest.raises(kv4.ArgumentError):
        manager.prepare_forward([kv4.StepItem(request, [1], position=5)])
    with pytest.raises(TypeError):
        manager.prepare_forward(request)


def test_batch_with_padding(cache):
    manager = cache.manager
    alone, other = manager.admit(), manager.admit()
    cache.feed(alone, 12)
    cache.feed(other, 5, stream=1)
    batch = [manager.fork(alone), manager.fork(other)]
    cache.feed(alone, 1)
    step = manager.prepare_forward([kv4.StepItem(batch[0], [12]), kv4.StepItem(count=2), kv4.StepItem(batch[1], [1005])])
    assert (step.num_tokens, step.num_items) == (4, 3)
    for layer in range(3):
        first, second = cache.inputs(layer, [12, 0, 0]), cache.inputs(layer, [5], stream=1)
        manager.acquire(layer).append(*(None if a is None else np.concatenate([a, b]) for a, b in zip(first, second)))
    manager.commit(step)
    assert manager.finished(step)
    assert cache.state(batch[0]) == cache.state(alone)


def test_draft_stages_have_their_own_length():
    cache = SmallCache(draft_layers=1)
    request = cache.manager.admit()
    cache.feed(request, 6)
    step = cache.manager.prepare_forward([kv4.StepItem(request, count=2)], group=1)
    cache.manager.acquire(3).write_swa(np.ones((2, 80), np.float32))
    cache.manager.commit(step)
    assert (cache.manager.length(request), cache.manager.length(request, group=1)) == (6, 2)


def test_images_travel(cache):
    request = cache.manager.admit()
    cache.feed(request, 37)
    image, blocks = cache.manager.export_image(request), cache.manager.export_blocks(request)
    schema = cache.manager.schema()
    assert blocks.shape == (3, schema.block_image_bytes) and image.lengths == [37]
    assert len(image.bytes) == cache.manager.image_bytes(request) == kv4.image_bytes(schema, [37])
    memory = kv4.HostMemory(cache.manager.backend(), len(image.bytes))
    cache.manager.export_image(request, memory.bytes())
    np.testing.assert_array_equal(memory.bytes(), image.bytes)
    with pytest.raises(kv4.ArgumentError, match=f"out must be {blocks.size} bytes; it is 5"):
        cache.manager.export_blocks(request, np.empty(5, np.uint8))

    other = SmallCache(kv4.make_cpu_backend(threads=2), hca_mode="raw", arrangement="layer_major")
    copy = kv4.CanonicalImage(image.layout_id, image.lengths, image.bytes.tobytes())
    assert copy == image
    restored = other.manager.import_image(copy, cache.manager.token_ids(request), blocks)
    cache.feed(request, 20)
    other.feed(restored, 20)
    assert cache.state(request) == other.state(restored)
    with pytest.raises(kv4.ArgumentError):
        other.manager.import_image(kv4.CanonicalImage(image.layout_id + 1, [37], image.bytes), np.arange(37), blocks)


def test_preemption(cache):
    manager = cache.manager
    request = manager.admit()
    cache.feed(request, 25)
    before = cache.state(request)
    aside = kv4.PreemptedRequest(manager.backend(), kv4.preempted_bytes(manager, request))
    kv4.preempt(manager, request, aside)
    assert manager.num_requests() == 0 and not aside.empty() and aside.lengths() == [25]
    assert cache.state(kv4.resume(manager, aside)) == before
    assert aside.empty()


def test_memory_is_what_the_plan_says(cache):
    manager = cache.manager
    plan = kv4.plan_memory(manager.schema())
    assert manager.memory_bytes() == plan.total_bytes
    assert manager.kv_pool().memory_bytes() == plan.blocks * plan.block_bytes
