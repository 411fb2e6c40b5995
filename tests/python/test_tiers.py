"""Contexts below the device: they survive a restart and return in parts, and no byte is wrong."""
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

import kv4
from small_cache import SmallCache

TOKENS = list(range(70))  # 4 full blocks of 16
PREFIX = kv4.PrefixOptions(enabled=True, weights_id="w", num_snapshots=8, snapshots=kv4.SnapshotPolicy(kind="full"))


class TieredCache:
    """The small cache with tiers below it; `answer` returns the computed and found parts of TOKENS."""

    def __init__(self, tiers=None, **options):
        self.cache = SmallCache(prefix=PREFIX, max_step_tokens=96)
        self.manager = self.cache.manager
        options = {"segment_bytes": 1 << 20, "disk_bytes": 16 << 20, **options}
        self.tiers = tiers or kv4.Tiers(self.manager.schema(), kv4.TiersOptions(**options), self.manager.backend())
        self.tiered = kv4.TieredPrefix(self.manager, self.tiers, kv4.TieredOptions(load_bytes=1 << 20, save_bytes=1 << 20))

    def answer(self, tokens=TOKENS, admission=None):
        admission = admission or self.manager.admit(kv4.Prompt(tokens))
        self.cache.feed(admission.request, len(tokens) - admission.resume_at)
        state = self.cache.state(admission.request)
        self.manager.release(admission.request)
        return admission.resume_at, state


def test_contexts_outlive_the_process(tmp_path):
    program = """
import sys, zlib
from test_tiers import *
here = TieredCache(directory=sys.argv[1])
admission = here.tiered.admit(kv4.Prompt(TOKENS), timeout=20)
found = here.tiered.statistics().loaded_blocks
resume_at, state = here.answer(admission=admission)
assert here.tiered.save_all(timeout=20)
assert here.tiers.close() == [kv4.FlushStatus.durable]
print(found, resume_at, zlib.crc32(repr(state).encode()))
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    answers = []
    for _ in range(2):
        result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=environment)
        assert result.returncode == 0 and not result.stderr, result.stderr
        answers.append(result.stdout.split())
    assert answers[0][:2] == ["0", "0"] and answers[1][:2] == ["4", "64"]
    assert answers[0][2] == answers[1][2]  # the same bytes, computed or loaded


def test_admit_loads_and_admits(tmp_path):
    first = TieredCache(host_bytes=4 << 20)
    _, state = first.answer()
    assert first.tiered.save_all()
    second = TieredCache(first.tiers)
    seen = []
    admission = second.tiered.admit(kv4.Prompt(TOKENS), timeout=20, progress=lambda done, total: seen.append((done, total)))
    assert (admission.usable_tokens, admission.resume_at) == (64, 64)
    assert all(total == 4 for _, total in seen)
    assert second.answer(admission=admission) == (64, state)
    assert second.tiered.admit(kv4.Prompt(TOKENS, salt="others")).usable_tokens == 0
    late = TieredCache(first.tiers)
    assert late.tiered.admit(kv4.Prompt(TOKENS), timeout=0).usable_tokens == 0
    with pytest.raises(kv4.ArgumentError, match="timeout"):
        late.tiered.admit(kv4.Prompt(TOKENS), timeout=-1)
    while True:
        try:
            late.manager.admit()
        except kv4.ShortageError:
            break
    with pytest.raises(kv4.ShortageError):
        late.tiered.admit(kv4.Prompt(TOKENS))
    assert late.tiered.statistics().loaded_blocks == 0

    third = TieredCache(first.tiers)
    load = third.tiered.start_load(kv4.Prompt(TOKENS), timeout=20)
    while not load.advance():
        time.sleep(0.001)
    assert third.answer(admission=load.admit()) == (64, state)
    load.cancel()
    with pytest.raises(kv4.StateError, match="cancelled"):
        load.admit()


def test_a_load_between_steps(tmp_path):
    first = TieredCache(host_bytes=4 << 20, directory=tmp_path)
    _, state = first.answer()
    assert first.tiered.save(100) >= 0 and first.tiered.save_all()
    statistics = first.tiered.statistics()
    assert (statistics.offered_blocks, statistics.offered_snapshots, statistics.dropped, statistics.waiting) == (4, 4, 0, 0)

    second = TieredCache(first.tiers)
    load = second.tiered.start_load(kv4.Prompt(TOKENS), timeout=20)
    assert load.wanted_blocks() == 4
    while not load.advance():  # meanwhile others decode
        busy = second.manager.admit()
        second.cache.feed(busy, 1)
        second.manager.release(busy)
    assert load.brought_blocks() == 4
    assert second.answer() == (64, state)
    assert (second.tiered.statistics().loaded_blocks, second.tiered.statistics().loaded_snapshots) == (4, 1)
    assert first.tiers.flush() == [kv4.FlushStatus.kept, kv4.FlushStatus.durable]
    host, disk = first.tiers.report()
    assert host.hits >= 5 and host.stored == disk.stored == 8 and not host.open and not disk.open
    assert disk.tier.records == 8 and disk.tier.capacity_bytes == 16 << 20
    assert "hits=" in repr(host)


def test_cancel_and_progress():
    first = TieredCache(host_bytes=4 << 20)
    first.answer()
    seen = []
    assert not first.tiered.save_all(progress=lambda done, total: seen.append((done, total)) or False)
    assert len(seen) == 1
    assert first.tiered.save_all(progress=lambda *done: seen.append(done)) and seen[-1][0] == seen[-1][1]

    second = TieredCache(first.tiers)
    load = second.tiered.start_load(kv4.Prompt(TOKENS))
    load.cancel()
    assert load.advance() and load.wanted_blocks() == 4
    assert second.tiered.load(kv4.Prompt(TOKENS), progress=lambda done, total: None) == 4
    with pytest.raises(KeyError, match="stop"):
        def broken(done, total):
            raise KeyError("stop")
        first.tiered.save_all(progress=broken)
    with pytest.raises(kv4.StateError, match="callback"):
        first.tiered.save_all(progress=lambda done, total: first.tiers.report())


def test_a_deadline_that_is_over_finds_nothing():
    first = TieredCache(host_bytes=4 << 20)
    first.answer()
    first.tiered.save_all()
    assert TieredCache(first.tiers).tiered.load(kv4.Prompt(TOKENS), timeout=0) == 0
    with pytest.raises(kv4.ArgumentError, match="timeout must be from 0"):
        first.tiered.load(kv4.Prompt(TOKENS), timeout=-1)


def test_a_sealed_disk_needs_its_key(tmp_path):
    key = bytes(range(32))
    first = TieredCache(directory=tmp_path, disk_key=key)
    first.answer()
    first.tiered.save_all()
    assert first.tiers.close() == [kv4.FlushStatus.durable]
    for other, blocks in ((bytes(32), 0), (None, 0), (key, 4)):
        again = TieredCache(directory=tmp_path, disk_key=other)
        assert again.tiered.load(kv4.Prompt(TOKENS)) == blocks
        again.tiers.close()


def test_keys_rotate_and_nothing_else_is_believed(tmp_path):
    old, new = bytes(range(32)), bytes(reversed(range(32)))
    first = TieredCache(directory=tmp_path, keys=[old])
    assert first.tiers.report()[0].protection == kv4.Protection.sealed
    first.answer()
    first.tiered.save_all()
    assert first.tiers.close() == [kv4.FlushStatus.durable]
    for keys, blocks in (([new], 0), ([], 0), ([new, old], 4), ([old], 4)):
        again = TieredCache(directory=tmp_path, keys=keys)
        assert again.tiered.load(kv4.Prompt(TOKENS)) == blocks, keys
        again.tiers.close()


def test_what_no_key_made_is_a_miss_unless_accepted(tmp_path):
    first = TieredCache(directory=tmp_path)
    first.answer()
    first.tiered.save_all()
    first.tiers.close()
    for accept, blocks in ((False, 0), (True, 4)):
        again = TieredCache(directory=tmp_path, keys=[bytes(32)], accept_unauthenticated=accept)
        assert again.tiered.load(kv4.Prompt(TOKENS)) == blocks
        again.tiers.flush()
        assert (again.tiers.report()[0].tier.unauthenticated_records > 0) == (not accept)
        again.tiers.close()


def test_key_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text("00" * 32 + "\n" + "ab" * 32 + "\n")
    path.chmod(0o600)
    assert kv4.read_key_file(path) == [bytes(32), b"\xab" * 32]
    path.chmod(0o640)
    with pytest.raises(kv4.FileError, match="chmod 600"):
        kv4.read_key_file(path)


def test_options_are_checked(tmp_path):
    options = kv4.TiersOptions(close_limit=2.5, servers=["a:1"], directory=tmp_path)
    assert (options.close_limit, options.servers, options.directory, options.disk_key) == (2.5, ["a:1"], str(tmp_path), None)
    options.disk_key = bytes(32)
    assert options.disk_key == bytes(32)
    with pytest.raises(kv4.ArgumentError, match="disk_key must be 32 bytes; got 3"):
        options.disk_key = b"abc"
    options.keys = [bytes(32)]
    assert options.keys == [bytes(32)]
    with pytest.raises(kv4.ArgumentError, match="keys must be 32 bytes; got 3"):
        options.keys = [b"abc"]
    schema = SmallCache().manager.schema()
    with pytest.raises(kv4.ArgumentError, match="no tier is asked for"):
        kv4.Tiers(schema, kv4.TiersOptions())
    with pytest.raises(kv4.ArgumentError, match="host:port"):
        kv4.Tiers(schema, kv4.TiersOptions(servers=["nowhere"]))
    with pytest.raises(kv4.ArgumentError) as refused:
        kv4.Tiers(schema, kv4.TiersOptions(servers=["redis://user:secret@host:port"]))
    assert "secret" not in str(refused.value)
    remote = kv4.TiersOptions(servers=["rediss://a"], allowed_servers=["10.0.0.0/8"], remote_ttl=60, tls_ca_file=tmp_path)
    assert (remote.allowed_servers, remote.remote_ttl, remote.tls_ca_file) == (["10.0.0.0/8"], 60, str(tmp_path))
    with pytest.raises(kv4.ArgumentError, match="prefix.enabled"):
        kv4.TieredPrefix(SmallCache().manager, kv4.Tiers(schema, kv4.TiersOptions(host_bytes=1 << 20)))


@pytest.fixture
def redis_server(tmp_path):
    """A process and its address; on another port where somebody else took the first one meanwhile."""
    if not shutil.which("redis-server"):
        pytest.skip("no redis-server")
    for _ in range(5):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", tmp_path,
                                    "--requirepass", "secret"], stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                yield process, f"127.0.0.1:{port}"
                process.kill()
                process.wait()
                return
            except ConnectionRefusedError:
                if process.poll() is not None:
                    break
                time.sleep(0.05)
        process.kill()
        process.wait()
    raise RuntimeError("redis-server does not start")


def remote_cache(**options):
    try:
        return TieredCache(**options)
    except kv4.StateError as error:
        pytest.skip(str(error))  # built without hiredis


def test_workers_share_a_server_until_it_goes(redis_server):
    process, address = redis_server
    first = remote_cache(servers=[address], password="secret", close_limit=0.1)
    _, state = first.answer()
    assert first.tiered.save_all() and first.tiers.flush() == [kv4.FlushStatus.kept]
    second = remote_cache(servers=[address], password="secret", close_limit=0.1)
    assert second.tiered.load(kv4.Prompt(TOKENS)) == 4
    assert second.answer() == (64, state)
    assert second.tiers.report()[0].hits == 5 and first.tiers.report()[0].tier.connects >= 1
    url = remote_cache(servers=[f"redis://default:secret@{address}/0"], close_limit=0.1)
    assert url.tiered.load(kv4.Prompt(TOKENS)) == 4 and url.tiers.report()[0].failure == ""
    for wrong, reason in (({"password": "wrong"}, "wrong_password"), ({}, "password_needed")):
        cache = remote_cache(servers=[address], close_limit=0.1, **wrong)
        assert cache.tiered.load(kv4.Prompt(TOKENS), timeout=1) == 0
        report = cache.tiers.report()[0]
        assert report.failure == reason and report.failures[reason] >= 1
        assert address in report.failure_detail and f"failure='{reason}'" in repr(report)

    process.kill()
    process.wait()
    third = remote_cache(servers=[address], password="secret", close_limit=0.1)
    assert third.tiered.load(kv4.Prompt(TOKENS), timeout=1) == 0
    assert third.answer() == (0, state)


def test_a_breaker_that_opens_is_told():
    told, records = threading.Event(), []

    def listen(record):
        records.append(record)
        if record.event == "tier.opened":
            told.set()

    kv4.set_log_sink(listen)
    try:
        cache = remote_cache(servers=["127.0.0.1:1"], close_limit=0.1)
        end = time.monotonic() + 60
        while not told.is_set():  # each load is a failed get
            assert time.monotonic() < end
            assert cache.tiered.load(kv4.Prompt(TOKENS), timeout=0.2) == 0
        assert cache.tiers.report()[0].open and cache.tiers.report()[0].times_opened >= 1
    finally:
        kv4.set_log_sink(None)
    assert records[-1].fields["tier"] == cache.tiers.report()[0].name and records[-1].level == kv4.LogLevel.warning


def test_other_threads_run_while_a_load_waits_for_its_deadline():
    stamps, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.005):
            stamps.append(time.monotonic())

    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        cache = remote_cache(servers=[f"127.0.0.1:{silent.getsockname()[1]}"], close_limit=0.1)
        ticker = threading.Thread(target=tick)
        ticker.start()
        start = time.monotonic()
        assert cache.tiered.load(kv4.Prompt(TOKENS), timeout=1) == 0
        end = time.monotonic()
        stop.set()
        ticker.join()
    assert 0.1 < end - start < 10
    assert sum(start < stamp < end for stamp in stamps) >= 5


def test_threads_share_tiers():
    tiers = TieredCache(host_bytes=4 << 20).tiers
    states = []

    def run():
        cache = TieredCache(tiers)  # a backend of its own
        for _ in range(5):
            cache.tiered.load(kv4.Prompt(TOKENS))
            states.append(cache.answer()[1])
            cache.tiered.save_all()
            tiers.flush()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(states) == 20 and all(state == states[0] for state in states)
