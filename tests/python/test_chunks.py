"""Stores of chunks: opaque bytes over host memory, a disk and tiers written in Python."""
import os
import random
import select
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import kv4

OK, MISSING = kv4.ChunkStatus.ok, kv4.ChunkStatus.missing


def make_store(more=(), **tiers):
    tiers = tiers or {"host_bytes": 8 << 20}
    if "directory" in tiers:
        tiers = {"segment_bytes": 1 << 20, "disk_bytes": 16 << 20, **tiers}
    return kv4.ChunkStore(kv4.ChunkStoreOptions(tiers=kv4.TiersOptions(**tiers), space=b"a model"), more)


def put(store, key, value, **call):
    return store.take(store.put([key], [value], **call)).statuses[0]


def get(store, key, size=1 << 16, **call):
    to = np.full(size, 0xEE, np.uint8)
    results = store.take(store.get([key], [to], **call))
    return to[:results.bytes[0]].tobytes() if results.statuses[0] == OK else results.statuses[0]


def test_chunks_survive_their_process(tmp_path):
    program = """
import sys
from test_chunks import *
with make_store(directory=sys.argv[1]) as store:
    print([get(store, b"key %d" % i) == b"value" * i for i in range(5)], put(store, b"key 4", b"value" * 4).name)
    for i in range(4): put(store, b"key %d" % i, b"value" * i)
    assert store.take(store.flush()).flushed == [kv4.FlushStatus.durable]
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    answers = []
    for _ in range(2):
        result = subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], capture_output=True, text=True, env=environment)
        assert result.returncode == 0 and not result.stderr, result.stderr
        answers.append(result.stdout.strip())
    assert answers == ["[False, False, False, False, False] ok", "[True, True, True, True, True] ok"]


def test_batches_buffers_and_pieces(tmp_path):
    with make_store(host_bytes=8 << 20, directory=tmp_path) as store:
        value = bytearray(random.Random(1).randbytes(70_000))
        value[20_000:60_000] = bytes(40_000)
        batch = store.put([b"a", b"b" * 256, b"c"], [value, np.arange(300, dtype=np.uint8), [b"left", memoryview(b"right")]])
        value[:] = bytes(70_000)  # was copied
        assert store.take(batch).all_ok()
        left, right = bytearray(5), np.zeros(10, np.uint8)
        a = np.zeros(80_000, np.uint8)
        results = store.take(store.get([b"c", b"a", b"none", b"b" * 256], [[left, right], a, bytearray(4), bytearray(9)]))
        assert [s.name for s in results.statuses] == ["ok", "ok", "missing", "too_small"]
        assert results.bytes == [9, 70_000, 0, 300] and results.action == kv4.ChunkAction.get
        assert bytes(left) + right.tobytes()[:4] == b"leftright"
        assert a.tobytes()[:20_000] == random.Random(1).randbytes(70_000)[:20_000] and not a[20_000:60_000].any()
        assert store.look_up([b"a", b"none"]) == [True, False]
        assert store.look_up([b"a"], tenant=3) == [False]
        assert store.take(store.remove([b"a"])).all_ok()
        assert store.look_up([b"a"]) == [False] and get(store, b"a") == MISSING
        report = store.report()
        assert [t.name for t in report.tiers] == ["host", "disk"] and report.trimmed_bytes > 39_000 and report.hits == 2
        assert "host, disk" in repr(store)


def test_registered_memory():
    with make_store() as store:
        memory = np.random.default_rng(2).integers(0, 255, 1 << 20, np.uint8)
        original = memory.copy()
        number = store.add_memory(memory)
        keys = [b"%d" % i for i in range(16)]
        parts = [memory[i << 16:(i + 1) << 16] for i in range(16)]
        assert store.take(store.put(keys, parts)).all_ok()
        memory[:] = 0
        assert store.take(store.get(keys[::-1], parts)).all_ok()
        assert all((parts[i] == original[(15 - i) << 16:(16 - i) << 16]).all() for i in range(16))
        assert store.report().memory_in_use == 0
        assert store.remove_memory(number) and not store.remove_memory(number)


def test_event_fd_and_drain():
    with make_store() as store:
        assert select.select([store], [], [], 0)[0] == []
        batches = {store.put([b"%d" % i], [b"v"]) for i in range(20)}
        seen = set()
        while seen != batches:
            assert select.select([store.event_fd()], [], [], 30)[0]
            seen |= {results.batch for results in store.drain()}
        assert not store.wait(timeout=0) and select.select([store], [], [], 0)[0] == []
        assert store.take(batches.pop()) is None  # was taken


class DictTier:
    """A tier of the user's own. `plan` may fail or hold calls."""

    name = "mine"

    def __init__(self):
        self.records, self.held, self.fail = {}, threading.Event(), False
        self.held.set()

    def _begin(self):
        self.held.wait(30)
        if self.fail:
            raise OSError("the tier is away")

    def put(self, records):
        self._begin()
        self.records.update(records)
        return [True] * len(records)

    def get(self, keys):
        self._begin()
        return [self.records.get(key) for key in keys]

    def exists(self, keys):
        self._begin()
        return [key in self.records for key in keys]

    def remove(self, keys):
        self._begin()
        for key in keys:
            self.records.pop(key, None)
        return [True] * len(keys)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_tier_in_python():
    tier = DictTier()
    with make_store([tier], keys=[bytes(32)]) as store:
        secret = b"a secret value" * 100
        assert put(store, b"k", secret) == OK and get(store, b"k") == secret
        (name, record), = tier.records.items()
        assert len(name) == 40 and secret[:50] not in record  # sealed
        assert store.look_up([b"k"]) == [None]  # only the tier can tell
        assert store.take(store.exists([b"k", b"none"])).statuses == [OK, MISSING]
        for damaged in (record[:-1], record[:600], b"", bytes(len(record)), record[:700] + b"?" + record[701:], "no bytes", 5):
            tier.records[name] = damaged
            assert get(store, b"k") in (MISSING, kv4.ChunkStatus.failed), damaged
        tier.records[name] = record
        deadline = time.monotonic() + 30
        while get(store, b"k") != secret:  # answers that are no bytes count as failures: the breaker may be open
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert store.take(store.remove([b"k"])).all_ok() and not tier.records


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_tier_that_fails_or_hangs_blocks_nobody(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: told.append(str(args.exc_value)))
    tier = DictTier()
    with make_store([tier], host_bytes=1 << 20) as store:
        tier.fail = True
        assert put(store, b"a", b"value") == OK and get(store, b"a") == b"value"  # host memory has it
        assert store.take(store.flush()).flushed[1] == kv4.FlushStatus.failed
        assert any("the tier is away" in text for text in told)
        tier.fail = False
        tier.held.clear()
        begin = time.monotonic()
        hit, miss = bytearray(5), bytearray(5)
        both = store.get([b"a", b"none"], [hit, miss], timeout=0.3)
        assert time.monotonic() - begin < 0.25
        results = store.take(both, timeout=30)
        assert results.statuses[0] == OK and bytes(hit) == b"value" and results.statuses[1] != OK
        assert time.monotonic() - begin < 20
        tier.held.set()


def test_a_tier_that_answers_too_little_is_a_failure(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: told.append(str(args.exc_value)))
    tier = DictTier()
    tier.put = lambda records: []
    with make_store([tier], host_bytes=0) as store:
        assert put(store, b"a", b"value") == kv4.ChunkStatus.failed
        assert told == ["mine.put(): a tier's method returned 0 answers to 1 requests"]


def test_bad_input_is_refused():
    with make_store() as store:
        for call, text in [
            (lambda: store.put([b""], [b"v"]), "a key of 0 bytes"),
            (lambda: store.put([b"k" * 257], [b"v"]), "a key of 257 bytes"),
            (lambda: store.put(["k"], [b"v"]), "keys[0] is no bytes object"),
            (lambda: store.put([b"k"], []), "1 keys and 0 values"),
            (lambda: store.put([b"k"], [5]), "values must be"),
            (lambda: store.get([b"k"], [b"read only"]), "writable"),
            (lambda: store.put([b"k"], [b"v"], timeout=-1), "timeout must be from 0"),
            (lambda: store.add_memory(b"read only"), "writable"),
            (lambda: kv4.ChunkStore(kv4.ChunkStoreOptions(tiers=kv4.TiersOptions())), "no tier is asked for"),
            (lambda: make_store([object()]), "name"),
            (lambda: kv4.ChunkStore(kv4.ChunkStoreOptions(tiers=kv4.TiersOptions(host_bytes=1 << 20), max_chunks=0)), "max_chunks is 0"),
        ]:
            with pytest.raises((kv4.ArgumentError, AttributeError)) as error:
                call()
            assert text in str(error.value), (text, str(error.value))
        assert store.report().open_chunks == 0


def test_many_threads():
    with make_store(host_bytes=32 << 20) as store:
        errors = []

        def work(t):
            rng = random.Random(t)
            for i in range(50):
                value = rng.randbytes(rng.randrange(20_000))
                if put(store, b"%d %d" % (t, i), value) != OK or get(store, b"%d %d" % (t, i)) != value:
                    errors.append((t, i))

        threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and store.report().hits == 200
