"""Arrays in and out: types, strides, devices, and no copies."""
import array

import numpy as np
import pytest

import kv4
from small_cache import SmallCache, bf16_bits, bf16_values


@pytest.fixture
def layer():
    """Layer 0 (a window only) in an open step of 4 tokens."""
    cache = SmallCache(row_format="bf16")
    request = cache.manager.admit()
    cache.manager.prepare_forward([kv4.StepItem(request, [1, 2, 3, 4])])
    return cache.manager.acquire(0)


ROWS = np.random.default_rng(0).standard_normal((4, 80), np.float32)


def window(layer):
    return layer.gather_swa_kv()[0][0]


def test_float32_and_bf16_bits_are_the_same(layer):
    layer.write_swa(ROWS)
    expected = window(layer)
    np.testing.assert_array_equal(expected, bf16_values(bf16_bits(ROWS)))
    layer.write_swa(np.zeros_like(ROWS))
    layer.write_swa(bf16_bits(ROWS))
    np.testing.assert_array_equal(window(layer), expected)


def test_strided_read_only_and_buffer_inputs(layer):
    layer.write_swa(ROWS)
    expected = window(layer)
    wide = np.zeros((4, 200), np.float32)
    wide[:, 7:87] = ROWS
    read_only = ROWS.copy()
    read_only.flags.writeable = False
    buffer = memoryview(array.array("f", ROWS.ravel())).cast("B").cast("f", [4, 80])
    for rows in (wide[:, 7:87], read_only, buffer):
        layer.write_swa(np.zeros_like(ROWS))
        layer.write_swa(rows)
        np.testing.assert_array_equal(window(layer), expected)


def test_outputs_are_written_in_place(layer):
    layer.write_swa(ROWS)
    out, lens, first = np.full((1, 4, 80), 9, np.uint16), np.empty(1, np.int32), np.empty(1, np.int32)
    k, v, returned_lens, _ = layer.gather_swa_kv(out, lens, first)
    assert k is out and v is out and returned_lens is lens
    np.testing.assert_array_equal(out[0], bf16_bits(ROWS))
    assert (lens[0], first[0]) == (4, 0)


@pytest.mark.parametrize("rows, message", [
    (ROWS.astype(np.float64), "raw_kv must be float32.*its dtype is float64"),
    (ROWS.astype(np.float16), "its dtype is float16"),
    (ROWS[:3], r"raw_kv must be f32 or bf16 \[4, 80\].*got f32 \[3, 80\]"),
    (ROWS[:, :79], r"got f32 \[4, 79\]"),
    (ROWS.astype(np.int32), r"got i32 \[4, 80\]"),
    (np.asfortranarray(ROWS), "channels must be dense and rows at least 80 apart; strides are 1, 4"),
    (ROWS[:, ::-1], "strides are 80, -1"),
    (np.zeros((1, 1, 1, 4, 80), np.float32), "raw_kv has 5 dimensions; at most 4"),
    ([1.0, 2.0], "raw_kv must be an array.*got builtins.list"),
])
def test_bad_inputs_are_named(layer, rows, message):
    layer.write_swa(ROWS)
    before = window(layer)
    with pytest.raises(kv4.ArgumentError, match=message):
        layer.write_swa(rows)
    np.testing.assert_array_equal(window(layer), before)


def test_bad_outputs_are_named(layer):
    layer.write_swa(ROWS)
    read_only = np.zeros((1, 4, 80), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(kv4.ArgumentError, match="out must be a writable array.*numpy.ndarray"):
        layer.gather_swa_kv(read_only)
    with pytest.raises(kv4.ArgumentError, match=r"out must be f32 or bf16 \[1, n, 80\]"):
        layer.gather_swa_kv(np.zeros((2, 4, 80), np.float32))
    with pytest.raises(kv4.ArgumentError, match="dense"):
        layer.gather_swa_kv(np.zeros((1, 4, 160), np.float32)[:, :, ::2])


def test_views_are_the_caches_own_memory(layer):
    layer.write_swa(ROWS)
    view = layer.read_swa_view()
    assert view.payload.shape == (6, 11, 160) and view.scale is None and view.rows == 11
    slot = view.slots[0]
    np.testing.assert_array_equal(view.payload[slot, :4].view(np.uint16), bf16_bits(ROWS))
    np.testing.assert_array_equal(view.rope[slot, :4].view(np.uint16), bf16_bits(ROWS)[:, 64:])
    assert view.positions[0].tolist() == [0, 1, 2, 3] + 7 * [-1] and view.head[0] == 4
    layer.write_swa(2 * ROWS)
    np.testing.assert_array_equal(view.payload[slot, :4].view(np.uint16), bf16_bits(2 * ROWS))


def test_views_outlive_their_cache():
    cache = SmallCache(row_format="bf16")
    cache.manager.prepare_forward([kv4.StepItem(cache.manager.admit(), [1, 2, 3, 4])])
    handle = cache.manager.acquire(0)
    handle.write_swa(ROWS)
    payload = handle.read_swa_view().payload
    before = payload.copy()
    del cache, handle
    np.testing.assert_array_equal(payload, before)


def test_token_ids():
    manager = SmallCache().manager
    for ids in ([5, 6], (5, 6), np.array([5, 6], np.int32), np.array([5, 0, 6], np.int64)[::2]):
        request = manager.admit()
        manager.commit(manager.prepare_forward([kv4.StepItem(request, ids)]))
        assert manager.token_ids(request).tolist() == [5, 6]
        manager.release(request)
    for ids, message in ((np.array([1.0, 2.0]), "got float64"), (np.zeros((1, 2), np.int32), "2 dimensions"),
                         (np.array([2**40]), r"token_ids\[0\] = 1099511627776"), (["a"], "builtins.list"),
                         ([2**40], "32 bits")):
        with pytest.raises(kv4.ArgumentError, match=message):
            kv4.StepItem(0, ids)


def test_shapes_that_new_arrays_are_made_from(layer):
    layer.write_swa(ROWS)
    with pytest.raises(kv4.ArgumentError, match=r"q must be \[4, heads, 80\]"):
        layer.attend(ROWS)
    with pytest.raises(TypeError, match="raw_kv: kv4.typing.ArrayLike"):
        layer.write_swa(None)


def test_streams_mean_nothing_on_the_cpu(layer):
    layer.write_swa(ROWS, stream=5)
