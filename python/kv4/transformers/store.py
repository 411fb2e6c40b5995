"""The managers behind a cache: one per device with layers of the model. A request has an id in each manager."""
from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union

import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Model

import kv4

from .memory import free_bytes, in_words
from .model import layer_constants, layer_devices, model_config, rope_table

Request = tuple[int, ...]  # by manager
#: None: the model's device; one for all layers; by device ("cpu", "cuda:0", torch.device); or one per layer.
Backends = Union[None, kv4.Backend, Mapping[Any, kv4.Backend], Sequence[kv4.Backend]]
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """The capacity of a cache."""

    max_batch: int
    max_context: int
    max_step_tokens: int
    max_rewind_tokens: int

    def covers(self, other: Sizes) -> bool:
        return self.united(other) == self

    def united(self, other: Sizes) -> Sizes:
        """The larger of both in every respect."""
        return Sizes(*(max(mine, its) for mine, its in zip(vars(self).values(), vars(other).values())))


def default_backend(device: torch.device) -> kv4.Backend:
    """The backend for a torch device; on a CPU with as many threads as torch."""
    if device.type == "cuda":
        return kv4.make_cuda_backend(device.index or 0)
    if device.type == "cpu":
        return kv4.make_cpu_backend(torch.get_num_threads())
    raise kv4.ArgumentError(f"the model is on {device}; kv4 has backends for cpu and cuda")


def _device_name(device: Any) -> str:
    device = torch.device(device)
    return f"cuda:{device.index or 0}" if device.type == "cuda" else str(device.type)


def backends_of_layers(devices: Sequence[torch.device], given: Backends) -> list[kv4.Backend]:
    """The backend of each layer."""
    if given is None or isinstance(given, Mapping):
        known = {_device_name(device): backend for device, backend in (given or {}).items()}
        for device in devices:
            known.setdefault(_device_name(device), default_backend(device))
        given = [known[_device_name(device)] for device in devices]
    if isinstance(given, kv4.Backend):
        given = [given] * len(devices)
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(its, kv4.Backend) for its in given):
        raise kv4.ArgumentError(f"backend is {given!r}; give a kv4.Backend (kv4.make_cpu_backend(), kv4.make_cuda_backend(0)), one "
                                'for each device ({"cpu": ..., "cuda:0": ...}) or for each layer, or none')
    if len(given) != len(devices):
        raise kv4.ArgumentError(f"backend has {len(given)} entries, the model {len(devices)} layers: give one for each layer")
    for layer, (backend, device) in enumerate(zip(given, devices)):
        if _device_name(device) != backend.device:
            raise kv4.ArgumentError(f"layer {layer} is on {device}, its backend on {backend.device}: give a backend for each "
                                    'device ({"cpu": ..., "cuda:0": ...}), or none')
    return list(given)


class Store:
    """Requests and steps of all managers together: a call changes all managers or none."""

    def __init__(self, backbone: DeepseekV4Model, given: Backends, sizes: Sizes, options: Mapping[str, Any]) -> None:
        self.sizes, self._options = sizes, dict(options)
        self.devices = layer_devices(backbone)  # by layer
        self._backends = backends_of_layers(self.devices, given)
        self.step: list[kv4.Step] | None = None
        self.step_of = 0  # id() of the cache that prepared the step: copies share a store
        self.step_thread = threading.current_thread()  # prepared the step
        self._preparing = threading.Lock()
        self.manager_of: dict[int, int] = {}  # by layer
        self.managers: list[kv4.KVCacheManager] = []
        for backend in dict.fromkeys(self._backends):
            layers = [layer for layer, its in enumerate(self._backends) if its is backend]
            self.manager_of.update((layer, len(self.managers)) for layer in layers)
            self.managers.append(self._make_manager(backbone, backend, layers))

    def larger(self, backbone: DeepseekV4Model, sizes: Sizes) -> Store:
        """An empty store for the same layers."""
        return Store(backbone, self._backends, sizes, self._options)

    def _make_manager(self, backbone: DeepseekV4Model, backend: kv4.Backend, layers: list[int]) -> kv4.KVCacheManager:
        sizes, config = self.sizes, model_config(backbone.config)
        # The rope table is the model's own and extends beyond its max_position_embeddings.
        config.max_positions = max(config.max_positions, sizes.max_context)
        options = kv4.CacheOptions(**{
            "max_requests": sizes.max_batch, "max_context": sizes.max_context, "spare_slots": sizes.max_batch,
            "max_rewind_tokens": sizes.max_rewind_tokens, "max_step_tokens": sizes.max_step_tokens,
            "layers": layers if len(layers) < len(self.devices) else [], **self._options})
        device = self.devices[layers[0]]
        needed, free = kv4.plan_memory(kv4.build_schema(config, options)).total_bytes, free_bytes(device)
        if free is not None and needed > free:
            raise kv4.OutOfMemoryError(
                f"a cache of max_batch = {sizes.max_batch} rows and max_context = {sizes.max_context} tokens needs "
                f"{in_words(needed)} on {device}, of which {in_words(free)} are free: lower one of them")
        manager = kv4.KVCacheManager(config, options, backend)
        for layer in layers:
            if weights := layer_constants(backbone.layers[layer].self_attn):
                manager.bind_weights(layer, *weights)
        manager.bind_rope_table(*rope_table(backbone, sizes.max_context, device))
        return manager

    def _all(self, call: Callable[[int, kv4.KVCacheManager], T], undo: Callable[[kv4.KVCacheManager, T], object]) -> list[T]:
        """call(i, manager i) for all managers; if one raises, the calls before it are undone."""
        done: list[T] = []
        try:
            for number, manager in enumerate(self.managers):
                done.append(call(number, manager))
        except BaseException:
            for manager, value in zip(self.managers, done):
                undo(manager, value)
            raise
        return done

    # Requests

    def num_requests(self) -> int:
        return self.managers[0].num_requests()

    def admit(self) -> Request:
        return tuple(self._all(lambda _, manager: manager.admit(), kv4.KVCacheManager.release))

    def admit_prompt(self, token_ids: torch.Tensor, **fields: Any) -> tuple[Request, int]:
        """The request and its number of prompt tokens, the same in all managers. `fields`: kv4.Prompt's."""
        while True:
            prompt = kv4.Prompt(token_ids, **fields)
            admissions = self._all(lambda _, manager: manager.admit(prompt),
                                   lambda manager, admission: manager.release(admission.request))
            lengths = [admission.resume_at for admission in admissions]
            if min(lengths) == max(lengths):
                return tuple(admission.request for admission in admissions), lengths[0]
            # Some managers have evicted blocks that others have. Each round shortens the hit; one token remains.
            for manager, admission in zip(self.managers, admissions):
                manager.release(admission.request)
            token_ids = token_ids[:min(lengths) + 1]

    def fork(self, request: Request) -> Request:
        return tuple(self._all(lambda number, manager: manager.fork(request[number]), kv4.KVCacheManager.release))

    def release(self, request: Request) -> None:
        for manager, number in zip(self.managers, request):
            manager.release(number)

    def rewind(self, request: Request, length: int) -> None:
        for manager, number in zip(self.managers, request):
            manager.rewind(number, length)

    def rewind_floor(self, request: Request) -> int:
        return max(manager.rewind_floor(number) for manager, number in zip(self.managers, request))

    def length(self, request: Request) -> int:
        return self.managers[0].length(request[0])

    def copy_from(self, other: Store, request: Request) -> Request:
        """Copies a request of another store of the same layers, as bytes."""
        def copied(number: int, manager: kv4.KVCacheManager) -> int:
            source = other.managers[number]
            if source.length(request[number]) == 0:
                return manager.admit()
            return manager.import_image(source.export_image(request[number]), source.token_ids(request[number]),
                                        source.export_blocks(request[number]))
        return tuple(self._all(copied, kv4.KVCacheManager.release))

    # Steps

    def prepare(self, items: Sequence[tuple[Request, torch.Tensor]], cache: object) -> None:
        with self._preparing:
            self.settle(cache)
            self.step = self._all(
                lambda number, manager: manager.prepare_forward([kv4.StepItem(its[number], ids) for its, ids in items]),
                kv4.KVCacheManager.abort)
            self.step_of, self.step_thread = id(cache), threading.current_thread()

    def settle(self, cache: object) -> None:
        """Aborts a step that `cache` left open, or a copy of it whose thread cannot continue it."""
        other = self.step is not None and self.step_of != id(cache) and self.step_thread is not threading.current_thread()
        if other and self.step_thread.is_alive():
            raise kv4.StateError("a forward of a copy of this Kv4Cache is under way in another thread. Copies share memory and "
                                 "take turns: run one forward at a time, or make the cache with max_batch = its rows, so that "
                                 "each copy has memory of its own")
        self.abort()

    def commit(self) -> None:
        for manager, step in zip(self.managers, self.step or []):
            manager.commit(step)
        self.step = None

    def abort(self) -> None:
        for manager, step in zip(self.managers, self.step or []):
            manager.abort(step)
        self.step = None

    def acquire(self, layer: int) -> kv4.LayerCacheHandle:
        return self.managers[self.manager_of[layer]].acquire(layer)

    # Session files: one for each manager

    def files(self, path: Any) -> list[Path]:
        path = Path(path)
        return [path] + [path.with_name(f"{path.name}.{number}") for number in range(1, len(self.managers))]

    def save(self, request: Request, identity: kv4.SessionIdentity, path: Any) -> bool:
        return all([kv4.save_session_file(manager, number, identity, file)
                    for manager, number, file in zip(self.managers, request, self.files(path))])

    def check_files(self, identity: kv4.SessionIdentity, path: Any) -> None:
        """Raises the errors of restore() other than shortages."""
        for manager, file in zip(self.managers, self.files(path)):
            try:
                request = kv4.restore_session_file(manager, identity, file)
            except kv4.ShortageError:  # raised after all records have been checked
                continue
            if request is not None:
                manager.release(request)

    def restore(self, identity: kv4.SessionIdentity, path: Any) -> Request:
        files = self.files(path)
        restored = lambda number, manager: kv4.restore_session_file(manager, identity, files[number])
        request = tuple(self._all(restored, kv4.KVCacheManager.release))
        tokens = [manager.token_ids(number).tolist() for manager, number in zip(self.managers, request)]
        if any(its != tokens[0] for its in tokens):
            self.release(request)
            raise kv4.FileError(f"{', '.join(map(str, files))} are of different conversations")
        return request
