"""LMCache's client: what its adapter calls, and what it must never be given."""
import ctypes
import glob
import random
import select
import time

import pytest

import kv4
from kv4.lmcache import Client


def view(size, fill=0xEE):
    """A buffer as LMCache makes them: a ctypes array over memory of its allocator."""
    return memoryview((ctypes.c_ubyte * size)(*([fill] * size)))


def completion(client, batch):
    poller = select.poll()
    poller.register(client.event_fd(), select.POLLIN)
    assert poller.poll(30_000)
    (one,) = client.drain_completions()
    assert one[0] == batch
    return one[1:]


def fill(buffer, data):
    buffer.cast("B")[:] = data
    return buffer


@pytest.fixture
def client(tmp_path):
    client = Client(directory=str(tmp_path / "store"), disk_bytes=16 << 20, segment_bytes=1 << 20, timeout=5)
    yield client
    client.close()


def test_objects_come_back_whole_or_not_at_all(client):
    keys = [f"model@00000001@0@{i:064x}" for i in range(8)] + ["long " * 100, "salted@1@0@ff@\u00e4"]
    values = [random.Random(i).randbytes(30_000 + i) for i in range(10)]
    batch = client.submit_batch_set(keys, [fill(view(len(v)), v) for v in values])
    assert completion(client, batch) == (True, "", None)
    rooms = [view(len(v)) for v in values]
    assert completion(client, client.submit_batch_get(keys, rooms)) == (True, "", [True] * 10)
    assert [bytes(room) for room in rooms] == values
    ok, why, loaded = completion(client, client.submit_batch_get([keys[0], "none", keys[1], keys[2]],
                                                                 [view(30_000), view(10), view(30_002), view(30_001)]))
    assert not ok and "missing" in why and "too_small" in why
    assert loaded == [True, False, False, False]  # absent, another size, too little room
    assert completion(client, client.submit_batch_exists(keys[:2] + ["none"])) == (True, "missing", [True, True, False])
    assert completion(client, client.submit_batch_delete(keys[:1])) == (True, "", [True])
    assert completion(client, client.submit_batch_exists(keys[:2])) == (True, "missing", [False, True])
    assert client.drain_completions() == []


def test_objects_outlive_the_client_and_damage_is_a_miss(tmp_path):
    options = {"directory": str(tmp_path / "store"), "disk_bytes": 16 << 20, "segment_bytes": 1 << 20}
    value = random.Random(3).randbytes(50_000)
    client = Client(**options)
    assert completion(client, client.submit_batch_set(["a", "b"], [fill(view(50_000), value)] * 2))[0]
    client.close()
    (segment,) = glob.glob(str(tmp_path / "store" / "segment-*"))
    with open(segment, "r+b") as file:
        file.seek(8192 + 4096 + 1234)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    client = Client(**options)
    rooms = [view(50_000), view(50_000)]
    assert completion(client, client.submit_batch_get(["a", "b"], rooms))[2] == [False, True]
    assert bytes(rooms[1]) == value
    client.close()


def test_a_closed_client_refuses(client):
    client.close()
    client.close()
    assert client.drain_completions() == []
    with pytest.raises(ValueError, match="closed"):
        client.submit_batch_exists(["a"])


def test_another_space_shares_nothing(tmp_path):
    Client(directory=str(tmp_path), segment_bytes=1 << 20, disk_bytes=16 << 20, space="one").close()
    client = Client(directory=str(tmp_path), segment_bytes=1 << 20, disk_bytes=16 << 20, space="one")
    assert completion(client, client.submit_batch_set(["a"], [view(10)]))[0]
    client.close()
    with pytest.raises(kv4.FileError, match="layout"):
        Client(directory=str(tmp_path), segment_bytes=1 << 20, disk_bytes=16 << 20, space="two")


class Object:
    """As the adapter sees an object of LMCache."""

    def __init__(self, data):
        self.byte_array = fill(view(len(data)), data)


def test_in_lmcaches_own_adapter(tmp_path):
    plugin = pytest.importorskip("lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter")
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry

    config = plugin.NativePluginL2AdapterConfig.from_dict(
        {"module_path": "kv4.lmcache", "class_name": "Client",
         "adapter_params": {"directory": str(tmp_path / "store"), "segment_bytes": 1 << 20, "disk_bytes": 64 << 20}})
    keys = [ObjectKey(chunk_hash=bytes([i]) * 32, model_name="a/model", kv_rank=1) for i in range(9)]
    values = [random.Random(i).randbytes(100_000) for i in range(8)]

    def answer(poll):
        deadline = time.monotonic() + 30
        while not (result := poll()):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return result

    def bits(task, query, count):
        bitmap = answer(lambda: query(task))
        return [bitmap.test(i) for i in range(count)]

    adapter = create_l2_adapter_from_registry(config)
    adapter.submit_store_task(keys[:8], [Object(value) for value in values])
    answer(adapter.pop_completed_store_tasks)
    adapter.close()
    adapter = create_l2_adapter_from_registry(config)
    assert bits(adapter.submit_lookup_and_lock_task(keys, {}), adapter.query_lookup_and_lock_result, 9) == [True] * 8 + [False]
    objects = [Object(bytes(100_000)) for _ in range(7)] + [Object(bytes(100_001))]
    assert bits(adapter.submit_load_task(keys[:8], objects), adapter.query_load_result, 8) == [True] * 7 + [False]
    assert [bytes(o.byte_array) for o in objects[:7]] == values[:7]
    adapter.delete(keys[:2])
    assert bits(adapter.submit_lookup_and_lock_task(keys, {}), adapter.query_lookup_and_lock_result, 9) == [False] * 2 + [True] * 6 + [False]
    adapter.close()
