"""Requests that outlive their cache and their process."""
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kv4
from small_cache import SmallCache

IDENTITY = kv4.SessionIdentity(weights_id="w", salt="secret", tenant=3)


@pytest.fixture
def cache():
    cache = SmallCache()
    cache.request = cache.manager.admit()
    cache.feed(cache.request, 37)
    return cache


def test_another_process_goes_on(cache, tmp_path):
    path = tmp_path / "chat.kv4s"
    assert kv4.save_session_file(cache.manager, cache.request, IDENTITY, path)
    program = """
import sys
import kv4
from small_cache import SmallCache
cache = SmallCache(hca_mode="raw")
identity = kv4.SessionIdentity(weights_id="w", salt=b"secret", tenant=3)
request = kv4.restore_session_file(cache.manager, identity, sys.argv[1])
cache.feed(request, 20)
sys.stdout.buffer.write(cache.manager.export_blocks(request).tobytes())
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    result = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, env=environment)
    assert result.returncode == 0, result.stderr.decode()
    cache.feed(cache.request, 20)
    assert result.stdout == cache.manager.export_blocks(cache.request).tobytes()


def test_who_may_restore(cache, tmp_path):
    path = tmp_path / "chat.kv4s"
    kv4.save_session_file(cache.manager, cache.request, IDENTITY, path)
    for other in (kv4.SessionIdentity("w2", "secret", 3), kv4.SessionIdentity("w", "", 3),
                  kv4.SessionIdentity("w", "secret", 4)):
        with pytest.raises(kv4.FileError):
            kv4.restore_session_file(SmallCache().manager, other, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(kv4.FileError):
        kv4.restore_session_file(SmallCache().manager, IDENTITY, path)
    with pytest.raises(kv4.Error, match="nowhere"):
        kv4.restore_session_file(cache.manager, IDENTITY, tmp_path / "nowhere")


def test_keys_say_who_wrote_it(cache, tmp_path):
    path = tmp_path / "chat.kv4s"

    def identity(keys, **more):
        return kv4.SessionIdentity(weights_id="w", salt="secret", tenant=3, keys=keys, **more)

    kv4.save_session_file(cache.manager, cache.request, identity([bytes(32)]), path)
    for keys in ([], [b"x" * 32]):
        with pytest.raises(kv4.FileError, match="key"):
            kv4.restore_session_file(SmallCache().manager, identity(keys), path)
    kv4.restore_session_file(SmallCache().manager, identity([b"x" * 32, bytes(32)]), path)
    kv4.save_session_file(cache.manager, cache.request, IDENTITY, path)
    with pytest.raises(kv4.FileError, match="not authenticated"):
        kv4.restore_session_file(SmallCache().manager, identity([bytes(32)]), path)
    kv4.restore_session_file(SmallCache().manager, identity([bytes(32)], accept_unauthenticated=True), path)


def test_streams_and_progress(cache):
    records, seen = [], []
    assert kv4.save_session(cache.manager, cache.request, IDENTITY, records.append, lambda *done: seen.append(done))
    assert len(records) == 3 and seen[-1][0] == seen[-1][1]
    other = SmallCache()
    assert kv4.restore_session(other.manager, IDENTITY, iter(records), lambda done, total: False) is None
    views = [np.frombuffer(record, np.uint8) for record in records]
    restored = kv4.restore_session(other.manager, IDENTITY, views)
    assert other.state(restored) == cache.state(cache.request)
    assert not kv4.save_session(cache.manager, cache.request, IDENTITY, records.append, lambda done, total: False)
    with pytest.raises(kv4.FileError):
        kv4.restore_session(other.manager, IDENTITY, records[1:2])


def test_what_callbacks_raise_comes_out(cache):
    def broken(record):
        raise KeyError("disk full")
    with pytest.raises(KeyError, match="disk full"):
        kv4.save_session(cache.manager, cache.request, IDENTITY, broken)
    with pytest.raises(kv4.StateError, match="callback"):
        kv4.save_session(cache.manager, cache.request, IDENTITY, lambda record: cache.manager.length(cache.request))
    with pytest.raises(kv4.ArgumentError, match="a record must be"):
        kv4.restore_session(cache.manager, IDENTITY, ["text"])
    assert cache.manager.length(cache.request) == 37


def test_hand_over_sends_what_is_not_there(cache):
    other, records, asked = SmallCache(), [], []
    sender = kv4.SessionSender(cache.manager, cache.request, IDENTITY)
    blocks = cache.manager.export_blocks(cache.request)

    def first_block(key):
        asked.append(key)
        return blocks[0] if key == sender.keys()[0] else None

    receiver = kv4.SessionReceiver(other.manager, IDENTITY, first_block)
    sender.offer(records.append)
    receiver.take(records[0])
    assert receiver.has_offer() and asked == sender.keys() and receiver.wanted() == sender.keys()[1:]
    with pytest.raises(kv4.FileError):
        receiver.finish()
    sender.send(receiver.wanted(), records.append)
    receiver.take(records[1])
    assert len(records) == 2 and receiver.done_bytes() == receiver.total_bytes()
    assert other.state(receiver.finish()) == cache.state(cache.request)


def test_size_of_a_context_as_readme_says(tmp_path):
    """All 43 layers of V4-Flash: the file's bytes per block, and of the state, which is smallest at whole blocks."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    block, least, most = re.search(r"takes ([\d,]+) bytes per 128 tokens, and ([\d.]+) to ([\d.]+) MB once", text).groups()
    block = int(block.replace(",", ""))
    config = kv4.model_preset("v4-flash")
    cache = kv4.KVCacheManager(config, kv4.CacheOptions(max_requests=1, max_context=512))
    x, one = np.zeros((128, 1024), np.float32), np.ones(512, np.float32)
    wide, narrow, index = x, x[:, :512].copy(), x[:, :256].copy()
    for layer, kind in enumerate(config.kinds):
        if kind == kv4.LayerKind.csa:
            cache.bind_weights(layer, wide[:4], one, index[:4], one[:128])
        elif kind == kv4.LayerKind.hca:
            cache.bind_weights(layer, narrow, one)
    request, sizes = cache.admit(), {}
    for count in (128, 128, 3):
        step = cache.prepare_forward([kv4.StepItem(request, range(count))])
        of = {kv4.LayerKind.swa: [narrow], kv4.LayerKind.csa: [narrow, wide, wide, index, index],
              kv4.LayerKind.hca: [narrow] * 3}
        for layer, kind in enumerate(config.kinds):
            cache.acquire(layer).append(*(rows[:count] for rows in of[kind]))
        cache.commit(step)
        kv4.save_session_file(cache, request, kv4.SessionIdentity(weights_id="w"), tmp_path / "s.kv4s")
        sizes[cache.length(request)] = (tmp_path / "s.kv4s").stat().st_size
    assert sizes[256] - sizes[128] == block
    assert f"{(sizes[128] - block) / 1e6:.1f}" == least
    assert f"{(sizes[259] - 2 * block) / 1e6:.1f}" == most


def test_sizes_of_v4_flash_as_the_documents_say():
    """Bytes of a token, a block and a snapshot: in README beside other projects', in docs/operations.md exactly."""
    schema = kv4.build_schema(kv4.model_preset("v4-flash"), kv4.CacheOptions())
    plan, snapshot = kv4.plan_memory(schema), kv4.image_bytes(schema, [schema.block_tokens])
    readme, operations = ((Path(__file__).parents[2] / name).read_text() for name in ("README.md", "docs/operations.md"))
    for line in (f"| V4-Flash, bytes per token | {plan.bytes_per_token:,.0f} |", f"| step of prefix hits, tokens | {schema.block_tokens} |",
                 f"| a kept boundary that a hit resumes at | {snapshot / 1e6:.1f} MB |"):
        assert line in readme, line
    for line in (f"| a block of {schema.block_tokens} tokens | {plan.block_bytes:,} ({plan.bytes_per_token:,.0f} per token) |",
                 f"| a snapshot | {snapshot:,} |"):
        assert line in operations, line
