"""repr() of the module's classes: records by their attributes, others by their current state."""
from __future__ import annotations

import enum
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .errors import Error

#: Attributes whose value must not appear in a log.
SECRET = ("password", "key", "salt")
#: Limits of shown elements of a list and characters of a text.
MAX_SHOWN = 8
MAX_TEXT = 64

STATES: dict[str, Callable[[Any], str]] = {
    "KVCacheManager": lambda cache: (f"{cache.num_requests()} of {cache.schema().options.max_requests} requests, "
                                     f"{cache.memory_bytes()} bytes on {cache.backend().device}"),
    "CacheSchema": lambda schema: (f"{len(schema.layers)} layers, blocks of {schema.block_tokens} tokens and "
                                   f"{schema.block_bytes} bytes, slots of {schema.slot_bytes} bytes"),
    "BlockAllocator": lambda allocator: f"{allocator.num_held()} blocks held, {allocator.num_free()} free",
    "PagedKVPool": lambda pool: f"{pool.memory_bytes()} bytes",
    "StateCachePool": lambda pool: f"{pool.memory_bytes()} bytes",
    "HostMemory": lambda memory: f"{len(memory.bytes())} bytes",
    "PreemptedRequest": lambda request: "empty" if request.empty() else f"lengths {request.lengths()}",
    "PrefixLoad": lambda load: f"{load.brought_blocks()} of {load.wanted_blocks()} blocks",
    "LayerCacheHandle": lambda handle: f"layer {handle.layer()}",
    "Tiers": lambda tiers: ", ".join(report.name for report in tiers.report()),
    "ChunkStore": lambda store: ", ".join(report.name for report in store.report().tiers),
    "TieredPrefix": lambda tiered: f"{tiered.statistics().waiting} waiting, {tiered.statistics().loaded_blocks} blocks loaded",
    "SessionSender": lambda sender: f"{len(sender.keys())} full blocks",
    "SessionReceiver": lambda receiver: f"{receiver.done_bytes()} of {receiver.total_bytes()} bytes",
}


def _shown(name: str, value: Any) -> str:
    if isinstance(value, (str, bytes)) and value and any(word in name for word in SECRET):
        return "..."
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):
        value = re.sub("//.*@", "//...@", value, flags=re.DOTALL)  # a URL with its password, which may have / and @
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return repr(value[:MAX_TEXT]) + "..."
    if isinstance(value, (list, tuple)):
        more = ", ..." if len(value) > MAX_SHOWN else ""
        return "[" + ", ".join(_shown(name, element) for element in value[:MAX_SHOWN]) + more + "]"
    if hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def _record_repr(self: Any) -> str:
    names = [name for name, member in vars(type(self)).items() if isinstance(member, property)]
    return f"{type(self).__name__}({', '.join(f'{name}={_shown(name, getattr(self, name))}' for name in names)})"


def _state_repr(self: Any) -> str:
    state, told = STATES.get(type(self).__name__), ""
    if state is not None:
        try:
            told = " " + state(self)
        except Error:  # calls are refused, for example in a callback
            told = " in use"
    return f"<kv4.{type(self).__name__}{told}>"


def add_representations(module: ModuleType) -> None:
    """Gives repr() to every class without its own."""
    for kind in vars(module).values():
        if not isinstance(kind, type) or "__repr__" in vars(kind) or issubclass(kind, enum.Enum):
            continue
        is_record = any(isinstance(member, property) for member in vars(kind).values()) and kind.__name__ not in STATES
        kind.__repr__ = _record_repr if is_record else _state_repr  # type: ignore[method-assign]
