"""Pools and the allocator on their own."""
import numpy as np
import pytest

import kv4
from small_cache import SmallCache, small_config, small_options

SCHEMA = kv4.build_schema(small_config(), small_options())


def test_paged_pool():
    pool = kv4.PagedKVPool(SCHEMA, kv4.make_cpu_backend())
    assert pool.memory_bytes() == 20 * SCHEMA.block_bytes == pool.base().size
    image = np.random.default_rng(3).integers(0, 256, SCHEMA.block_image_bytes, np.uint8)
    pool.load_block(4, image)
    pool.copy_block(4, 5)
    saved = pool.save_block(5, tokens=16)
    np.testing.assert_array_equal(saved, pool.save_block(4, 16, out=np.empty_like(saved)))
    assert saved.any() and not pool.save_block(6, 16).any()
    with pytest.raises(kv4.ArgumentError, match="image"):
        pool.load_block(4, image.astype(np.int32))
    with pytest.raises(kv4.Error):
        pool.copy_block(4, 20)


def test_state_pool():
    pool = kv4.StateCachePool(SCHEMA, kv4.make_cpu_backend())
    assert pool.num_slots() == pool.num_free() == 6
    assert pool.memory_bytes() >= pool.base().size == 6 * SCHEMA.slot_bytes
    slots = [pool.acquire_slot() for _ in range(6)]
    assert sorted(slots) == list(range(6)) and pool.acquire_slot() is None
    memory = pool.base()
    memory[slots[0]] = 7
    pool.reset_slot(slots[0])
    assert not memory[slots[0]].any()
    pool.release_slot(slots[1])
    with pytest.raises(kv4.Error):
        pool.reset_slot(slots[1])


def test_state_images_move_between_pools():
    cache = SmallCache(hca_mode="raw")
    request = cache.manager.admit()
    cache.feed(request, 24)  # no HCA span is open
    image = cache.manager.export_image(request)
    pool = kv4.StateCachePool(SCHEMA, kv4.make_cpu_backend())
    pool.check(image)
    slot, other = pool.acquire_slot(), pool.acquire_slot()
    pool.restore(slot, image)
    pool.copy_slot(slot, other)
    assert pool.save(other, [24]) == image
    with pytest.raises(kv4.ArgumentError):
        pool.check(kv4.CanonicalImage(image.layout_id, [25], image.bytes))


def test_allocator():
    allocator = kv4.BlockAllocator(2)
    a, b = allocator.allocate(), allocator.allocate()
    assert allocator.allocate() is None and allocator.num_held() == 2
    allocator.retain(a)
    assert allocator.is_immutable(a) and allocator.reference_count(a) == 2
    allocator.publish(b)
    allocator.release(b)
    assert allocator.num_evictable() == 1 and allocator.allocate() == b


def test_backends():
    assert kv4.make_cpu_backend(2).device == "cpu" and kv4.cpu_target()
    with pytest.raises(kv4.ArgumentError, match="1.*1024"):
        kv4.make_cpu_backend(0)
    if kv4.why_no_cuda():
        with pytest.raises(kv4.NoDeviceError):
            kv4.make_cuda_backend()
