"""LMCache's storage in a ChunkStore, by its native plugin adapter:

    {"type": "native_plugin", "module_path": "kv4.lmcache", "class_name": "Client",
     "adapter_params": {"directory": "/var/cache/lmcache", "disk_bytes": 100000000000}}

A loaded object is exactly the bytes that were stored under its key, and as long as the buffer for it; everything else is
a miss. docs/storage.md has the promises.
"""
from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

from ._kv4 import ChunkAction, ChunkResults, ChunkStatus, ChunkStore, ChunkStoreOptions, TiersOptions, read_key_file

#: Longer keys are stored under their hash.
MAX_KEY_BYTES = 256

#: (batch, whether all of it succeeded, why not, per key or None)
Completion = tuple[int, bool, str, "list[bool] | None"]


def _key(text: str) -> bytes:
    key = text.encode()
    return key if 1 <= len(key) <= MAX_KEY_BYTES else b"\0sha256:" + hashlib.sha256(key).digest()


class Client:
    """A native client of LMCache. Calls return at once, from any thread; buffers are LMCache's until their completion."""

    def __init__(self, *, directory: str = "", disk_bytes: int = 64 << 30, host_bytes: int = 0, servers: Sequence[str] = (),
                 key_file: str = "", space: str = "lmcache", timeout: float = 10.0, **tiers: Any) -> None:
        """directory, disk_bytes, host_bytes, servers and `tiers`: of kv4.TiersOptions. key_file: see kv4.read_key_file().
        space: stores of other spaces share nothing. timeout: seconds that a batch takes at most."""
        self._timeout = timeout
        self._rooms: dict[int, list[int]] = {}  # of loads under way: bytes of each buffer
        self._lock = threading.Lock()  # a load may end before its rooms are noted
        keys = read_key_file(key_file) if key_file else []
        options = TiersOptions(directory=directory, disk_bytes=disk_bytes, host_bytes=host_bytes, servers=list(servers), keys=keys, **tiers)
        self._store: ChunkStore | None = ChunkStore(ChunkStoreOptions(tiers=options, space=space.encode(), value_follows_key=True))
        self._event_fd = self._store.event_fd()

    def event_fd(self) -> int:
        """Readable while there are completions to drain."""
        return self._event_fd

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        return self._open().put([_key(key) for key in keys], [memoryview(b).cast("B") for b in buffers], timeout=self._timeout)

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        views = [memoryview(b).cast("B") for b in buffers]
        with self._lock:
            batch = self._open().get([_key(key) for key in keys], views, timeout=self._timeout)
            self._rooms[batch] = [len(view) for view in views]
        return batch

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        return self._open().exists([_key(key) for key in keys], timeout=self._timeout)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        return self._open().remove([_key(key) for key in keys], timeout=self._timeout)

    def drain_completions(self) -> list[Completion]:
        with self._lock:
            if self._store is None:
                return []
            return [self._completion(results) for results in self._store.drain()]

    def close(self) -> None:
        """Writes what waits, and ends. Batches that are under way have no completion any more."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _open(self) -> ChunkStore:
        if self._store is None:
            raise ValueError("the client is closed")
        return self._store

    def _completion(self, results: ChunkResults) -> Completion:
        good = [status == ChunkStatus.ok for status in results.statuses]
        if results.action == ChunkAction.get:  # a shorter value would leave a part of its buffer as it was
            good = [ok and size == room for ok, size, room in zip(good, results.bytes, self._rooms.pop(results.batch))]
        answered = all(status in (ChunkStatus.ok, ChunkStatus.missing) for status in results.statuses)
        succeeded = answered if results.action == ChunkAction.exists else all(good)
        if results.action == ChunkAction.put:
            return results.batch, succeeded, self._reason(results), None
        return results.batch, succeeded, self._reason(results), good

    @staticmethod
    def _reason(results: ChunkResults) -> str:
        bad = sorted({status.name for status in results.statuses if status != ChunkStatus.ok})
        return ", ".join(bad)
