"""Reading the cache: gathers, views, index_topk and attend against NumPy."""
import numpy as np
import pytest

import kv4
from small_cache import SmallCache, bf16_bits, bf16_values

TOKENS, TOTAL = 5, 42  # of the last step, and in all


@pytest.fixture
def cache():
    """bf16 rows and keys; the last step is open, all layers appended."""
    cache = SmallCache(row_format="bf16", index_format="bf16", hadamard=False)
    request = cache.manager.admit()
    cache.feed(request, TOTAL - TOKENS)
    cache.manager.prepare_forward([kv4.StepItem(request, range(TOTAL - TOKENS, TOTAL))])
    cache.append_all(range(TOTAL - TOKENS, TOTAL))
    return cache


def random(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_entries_by_gather_and_by_view(cache):
    for layer, ratio in ((1, 4), (2, 8)):
        handle = cache.manager.acquire(layer)
        k, v, lens = handle.gather_all_compressed_kv()
        assert k is v and k.shape == (1, TOTAL // ratio, 80) and lens.tolist() == [TOTAL // ratio]
        view = handle.read_classical_view()
        blocks = view.block_table[view.request_rows[0]]
        rows = [view.payload[blocks[j // view.rows_per_block], j % view.rows_per_block] for j in range(lens[0])]
        np.testing.assert_array_equal(bf16_values(np.stack(rows).view(np.uint16)), k[0])
        assert np.shares_memory(view.payload, cache.manager.kv_pool().base())

        chosen = np.array([[0, 3, -1, 99]] * TOKENS, np.int32)
        valid = np.empty((TOKENS, 4), np.uint8)
        some, _ = handle.gather_compressed_kv(chosen, valid=valid)
        np.testing.assert_array_equal(some[:, :2], np.stack([k[0, [0, 3]]] * TOKENS))
        assert not some[:, 2:].any() and valid.tolist() == [[1, 1, 0, 0]] * TOKENS


def test_index_keys_scores_and_topk(cache):
    handle = cache.manager.acquire(1)
    keys, lens = handle.gather_all_index_keys()
    view = handle.read_indexer_view()
    assert keys.shape == (1, 10, 32) and view.global_scale is None and view.lens.tolist() == lens.tolist() == [10]
    q, weights = random(TOKENS, 2, 32), random(TOKENS, 2)
    scores = handle.index_scores(q, weights)
    expected = (np.maximum(bf16_values(bf16_bits(q)) @ keys[0].T, 0) * weights[:, :, None]).sum(1)
    for token in range(TOKENS):
        seen = (TOTAL - TOKENS + token + 1) // 4
        np.testing.assert_allclose(scores[token, :seen], expected[token, :seen], atol=1e-4)
        assert (scores[token, seen:] == -np.inf).all()
    np.testing.assert_array_equal(handle.index_scores(q, weights, mode="fast"), scores)  # bf16 keys: no other sums
    best = handle.index_topk(q, weights, k=3)
    slots = np.empty((TOKENS, 3), np.int32)
    np.testing.assert_array_equal(np.sort(handle.select_topk(scores, k=3, slots=slots)), np.sort(best))
    np.testing.assert_array_equal(np.sort(best), np.sort(np.argsort(-scores, kind="stable")[:, :3]))
    assert (slots >= 0).all()
    np.testing.assert_array_equal(np.sort(handle.index_topk(q, weights, k=3, mode=kv4.ScoreMode.fast)), np.sort(best))
    with pytest.raises(kv4.ArgumentError, match="'quick'"):
        handle.index_topk(q, weights, mode="quick")
    assert handle.index_topk(q, weights).shape == (TOKENS, 2)  # the model's index_topk
    with pytest.raises(kv4.ArgumentError, match="k must be from 1 to 2048; got 0"):
        handle.index_topk(q, weights, k=0)
    with pytest.raises(kv4.Error):
        cache.manager.acquire(2).index_topk(q, weights)


@pytest.mark.parametrize("layer, ratio", [(0, None), (1, 4), (2, 8)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_attend(cache, layer, ratio, with_sink):
    handle = cache.manager.acquire(layer)
    window, _, lens, first = handle.gather_swa_kv()
    q, sink = random(TOKENS, 3, 80), random(3, seed=2) if with_sink else None
    lse = np.empty((TOKENS, 3), np.float32)
    out = handle.attend(q, sink=sink, lse=lse)
    assert out.dtype == np.float32
    entries = handle.gather_all_compressed_kv()[0][0] if ratio else np.empty((0, 80), np.float32)
    for token in range(TOKENS):
        position = TOTAL - TOKENS + token
        rows = [window[0, position - 7 - first[0]:position + 1 - first[0]]]
        if ratio:
            rows.append(entries[:(position + 1) // ratio])
        rows = np.concatenate(rows)
        scores = q[token] @ rows.T * 80**-0.5
        weights, total = np.exp(scores), np.exp(scores).sum(1)
        if with_sink:
            total += np.exp(sink)
        np.testing.assert_allclose(out[token], weights @ rows / total[:, None], atol=1e-4)
        np.testing.assert_allclose(lse[token], np.log(total), atol=1e-4)

    as_bf16 = handle.attend(bf16_bits(q), sink=sink)
    assert as_bf16.dtype == np.uint16
    np.testing.assert_allclose(bf16_values(as_bf16), out, atol=2e-2)
    given = np.empty((TOKENS, 3, 80), np.float32)
    assert handle.attend(q, sink=sink, out=given) is given
    np.testing.assert_array_equal(given, out)


def test_attend_over_chosen_entries(cache):
    handle = cache.manager.acquire(1)
    q = random(TOKENS, 3, 80)
    every = np.tile(np.arange(10, dtype=np.int32), (TOKENS, 1))
    np.testing.assert_allclose(handle.attend(q, topk=every), handle.attend(q), atol=1e-6)
    assert np.abs(handle.attend(q, topk=every[:, :1].copy()) - handle.attend(q)).max() > 1e-3


def test_entries_made_elsewhere():
    cache = SmallCache(row_format="bf16")
    step = cache.manager.prepare_forward([kv4.StepItem(cache.manager.admit(), range(8))])
    handle = cache.manager.acquire(1)
    handle.write_swa(random(8, 80))
    entries, valid = random(8, 80, seed=3), np.array([1] * 7 + [0], bool)
    handle.flush_compression(entries, random(8, 32), valid)
    k, _, lens = handle.gather_all_compressed_kv()
    assert lens.tolist() == [2]
    np.testing.assert_array_equal(k[0, 0], bf16_values(bf16_bits(entries[3])))
    assert not k[0, 1].any()
    cache.manager.commit(step)


def test_handle_facts(cache):
    handle = cache.manager.acquire(1)
    assert (handle.layer(), handle.num_query_heads(), handle.head_dim()) == (1, 3, 80)
    assert handle.schema().spec.kind == kv4.LayerKind.csa
