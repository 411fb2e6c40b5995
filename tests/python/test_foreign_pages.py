"""Contexts through the pools of other engines and back."""
import numpy as np
import pytest

import kv4
from small_cache import SmallCache

TOKENS = 45  # two full blocks, an open one, an open span


@pytest.mark.parametrize("planar", [True, False])
def test_there_and_back(planar):
    """Every row of a request is exported to pools in another order, and imported again into empty bytes."""
    cache = SmallCache()
    schema = cache.manager.schema()
    request = cache.manager.admit()
    cache.feed(request, TOKENS)
    blocks, image = cache.manager.export_blocks(request), cache.manager.export_image(request)
    empty, bare = np.zeros_like(blocks), kv4.CanonicalImage(image.layout_id, image.lengths, image.bytes)
    kinds = [(kv4.entry_rows, 1, kv4.RowRole.entry), (kv4.entry_rows, 1, kv4.RowRole.index_key), (kv4.entry_rows, 2, kv4.RowRole.entry)]
    pairs = [tuple(rows(schema, layer, role, memory, TOKENS) for memory in (blocks, empty)) for rows, layer, role in kinds]
    for layer in range(3):
        window = kv4.window_rows(schema, layer, bare.bytes, bare.lengths)
        assert len(window) == 8
        pairs.append((kv4.window_rows(schema, layer, image.bytes, image.lengths), window))
    for ours, back in pairs:
        layout = kv4.planar_pages(ours.row, 4, 64) if planar else kv4.interleaved_pages(ours.row, 4)
        slots = np.random.default_rng(len(ours)).permutation(32)[:len(ours)]
        pool = np.full(8 * layout.page_bytes, 0xAA, np.uint8)
        kv4.copy_to_pages(ours, slots, layout, pool)
        page, row = divmod(int(slots[0]), 4)
        at = page * layout.page_bytes + layout.payload_at + row * layout.payload_stride
        assert (pool[at:at + ours.row.payload_bytes] != 0xAA).any()
        kv4.copy_from_pages(back, list(slots), layout, pool)
    np.testing.assert_array_equal(empty, blocks)
    assert bare == image
    other = SmallCache()
    moved = other.manager.import_image(bare, cache.manager.token_ids(request), empty)
    assert other.state(moved) == cache.state(request)


def test_known_pools():
    schema = kv4.build_schema(kv4.model_preset("v4-flash"), kv4.CacheOptions(layers=[2], index_format="fp8"))
    entries, keys = (page.row for page in schema.layers[0].pages)
    assert (entries.bytes(), keys.bytes()) == (584, 132)
    assert kv4.planar_pages(entries, 64, 576).page_bytes == 65 * 576
    assert kv4.interleaved_pages(entries, 64).page_bytes == 64 * 584


def test_refusals_change_nothing():
    cache = SmallCache()
    schema = cache.manager.schema()
    request = cache.manager.admit()
    cache.feed(request, TOKENS)
    blocks = cache.manager.export_blocks(request)
    rows = kv4.entry_rows(schema, 1, kv4.RowRole.entry, blocks, TOKENS)
    layout = kv4.planar_pages(rows.row, 4)
    pool = np.zeros(3 * layout.page_bytes, np.uint8)
    for slots, message in (([0] * 10, "10 slots for 11 rows"), ([12] * 11, "slot 12"), ([0.5] * 11, "slots"), (np.zeros((11, 1), np.int64), "slots")):
        with pytest.raises(kv4.ArgumentError, match=message):
            kv4.copy_to_pages(rows, slots, layout, pool)
    with pytest.raises(kv4.ArgumentError, match="pool"):
        kv4.copy_to_pages(rows, [0] * 11, layout, bytes(len(pool)))
    with pytest.raises(kv4.ArgumentError, match="index keys"):
        kv4.entry_rows(schema, 2, kv4.RowRole.index_key, blocks, TOKENS)
    with pytest.raises(kv4.ArgumentError, match="image"):
        kv4.window_rows(schema, 0, np.zeros(5, np.uint8), [TOKENS])
    assert not pool.any()
