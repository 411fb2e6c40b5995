"""The log: a thread of its own delivers it, whatever the callable does."""
import os
import subprocess
import sys
import threading

import pytest

import kv4
from small_cache import SmallCache


@pytest.fixture
def speak(tmp_path):
    """speak(): opens a store, which is one event."""
    schema, counter = SmallCache().manager.schema(), iter(range(1000))

    def open_store():
        options = kv4.TiersOptions(directory=tmp_path / str(next(counter)), segment_bytes=1 << 20, disk_bytes=4 << 20,
                                   keys=[bytes(32)])
        kv4.Tiers(schema, options).close()

    yield open_store
    kv4.set_log_sink(None)


def test_records(speak, tmp_path):
    records = []
    kv4.set_log_sink(records.append)
    speak()
    kv4.set_log_sink(None)  # everything is delivered before this returns
    speak()
    (record,) = records
    assert (record.level, record.event) == (kv4.LogLevel.info, "store.opened")
    assert record.fields["directory"] == str(tmp_path / "0") and record.fields["records"] == "0"
    assert record.message and "store.opened" in repr(record)


def test_what_it_raises_does_no_harm(speak, monkeypatch):
    raised, seen = [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: raised.append(args.exc_type))

    def broken(record):
        seen.append(record.event)
        raise KeyError("log")

    kv4.set_log_sink(broken)
    speak()
    speak()
    kv4.set_log_sink(None)
    assert seen == ["store.opened"] * 2 and raised == [KeyError] * 2


def test_it_may_call_kv4_and_end_itself(speak):
    ended, calls = threading.Event(), []

    def once(record):
        calls.append(kv4.compute_block_budget(SmallCache().manager.schema(), requests=1, context=32).blocks)
        speak()  # an event from inside: it is not delivered
        kv4.set_log_sink(None)
        ended.set()

    kv4.set_log_sink(once)
    speak()
    assert ended.wait(20)
    speak()
    assert len(calls) == 1


def test_one_listener_after_another(speak):
    first, second = [], []
    kv4.set_log_sink(first.append)
    speak()
    kv4.set_log_sink(second.append)
    speak()
    kv4.set_log_sink(None)
    assert len(first) == len(second) == 1
    with pytest.raises(TypeError):
        kv4.set_log_sink(3)


def test_the_interpreter_may_end(tmp_path):
    program = """
import sys, time
import kv4
from small_cache import SmallCache
def slow(record):
    time.sleep(0.2)
    print(record.event)
kv4.set_log_sink(slow)
tiers = kv4.Tiers(SmallCache().manager.schema(), kv4.TiersOptions(directory=sys.argv[1], segment_bytes=1 << 20, disk_bytes=4 << 20))
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=environment,
                            timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "store.opened\ntier.no_key\n", "")
