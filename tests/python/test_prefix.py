"""The prefix cache: hits, keys, events, statistics, imported blocks."""
import numpy as np
import pytest

import kv4
from small_cache import SmallCache

TOKENS = list(range(40))


def prefix_cache(**changes):
    prefix = kv4.PrefixOptions(enabled=True, weights_id="w", num_snapshots=8, snapshots=kv4.SnapshotPolicy(kind="full"))
    return SmallCache(prefix=prefix, **changes)


@pytest.fixture
def cache():
    """A cache that has computed TOKENS."""
    cache = prefix_cache()
    admission = cache.manager.admit(kv4.Prompt(TOKENS))
    assert (admission.usable_tokens, admission.resume_at) == (0, 0)
    cache.feed(admission.request, 40)
    cache.manager.release(admission.request)
    return cache


def test_a_hit_has_the_bytes_of_a_computation(cache):
    admission = cache.manager.admit(kv4.Prompt(np.array(TOKENS)))
    assert (admission.usable_tokens, admission.resume_at) == (32, 32)
    cold = prefix_cache()
    other = cold.manager.admit(kv4.Prompt(TOKENS)).request
    cache.feed(admission.request, 8)
    cold.feed(other, 40)
    assert cache.state(admission.request) == cold.state(other)
    statistics = cache.manager.prefix_statistics()
    assert (statistics.prompts, statistics.hits, statistics.usable_tokens) == (2, 1, 32)


def test_salts_weights_and_extras_part_prompts(cache):
    admit = lambda prompt: cache.manager.admit(prompt).usable_tokens
    assert admit(kv4.Prompt(TOKENS, salt=b"\x00other")) == 0
    assert admit(kv4.Prompt(TOKENS, extra=["image 1"])) == 0
    cache.manager.set_weights_id("w2")
    assert admit(kv4.Prompt(TOKENS)) == 0
    cache.manager.set_weights_id("w")
    assert admit(kv4.Prompt(TOKENS)) == 32


def test_invalidate(cache):
    cache.manager.invalidate("w")
    assert cache.manager.admit(kv4.Prompt(TOKENS)).usable_tokens == 0


def test_keys_and_events(cache):
    keys = cache.manager.block_keys(kv4.Prompt(TOKENS))
    assert len(keys) == 2 and all(isinstance(key, bytes) and len(key) == 32 for key in keys)
    kept = cache.manager.find_block(keys[1])
    assert (kept.tokens, kept.has_snapshot, kept.tenant) == (32, True, 0)
    assert cache.manager.find_block(bytes(32)) is None
    events = cache.manager.read_block_events()
    assert [e.key for e in events if e.kind == kv4.BlockEvent.Kind.stored] == keys
    assert cache.manager.read_block_events() == []
    with pytest.raises(kv4.ArgumentError, match="a block key is 32 bytes; got 3"):
        cache.manager.find_block(b"abc")


def test_blocks_go_to_another_worker(cache):
    prompt = kv4.Prompt(TOKENS)
    keys = cache.manager.block_keys(prompt)
    blocks = [np.empty(cache.manager.schema().block_image_bytes, np.uint8) for _ in keys]
    snapshot = np.empty(cache.manager.snapshot_bytes(), np.uint8)
    assert all(cache.manager.read_block(key, block) for key, block in zip(keys, blocks))
    assert cache.manager.read_snapshot(keys[1], snapshot)
    assert not cache.manager.read_block(bytes(32), blocks[0])
    other = prefix_cache()
    assert other.manager.insert_blocks(prompt, blocks) == 2
    assert other.manager.insert_snapshot(keys[1], snapshot.tobytes())
    here, there = cache.manager.admit(prompt), other.manager.admit(prompt)
    assert there.resume_at == 32
    assert cache.state(here.request) == other.state(there.request)


def test_it_is_off_unless_enabled():
    with pytest.raises(kv4.Error, match="prefix"):
        SmallCache().manager.admit(kv4.Prompt(TOKENS))
