"""A cache of a small model, with inputs that are a function of (request, layer, position)."""
import numpy as np

import kv4

KINDS = [kv4.LayerKind.swa, kv4.LayerKind.csa, kv4.LayerKind.hca]


def small_config():
    """Widths that every format can tile; window 8, CSA 4, HCA 8."""
    return kv4.ModelConfig(
        name="small", num_layers=3, kinds=KINDS, num_query_heads=3, head_dim=80, rope_dim=16, window=8, index_heads=2,
        index_dim=32, index_topk=2, hca_ratio=8, max_positions=4096,
        rope_compress=kv4.RopeSpec(theta=160000.0, yarn=True, factor=16.0))


def small_options(**changes):
    fields = dict(block_tokens=16, max_rewind_tokens=3, max_requests=4, spare_slots=2, max_context=96, num_blocks=20,
                  max_step_tokens=64)
    return kv4.CacheOptions(**{**fields, **changes})


def bf16_bits(x):
    """float32 as bfloat16, in uint16: round to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


class SmallCache:
    """A manager with its weights bound; `feed` puts tokens through all layers."""

    columns = {0: (0, 0), 1: (160, 64), 2: (80, 0)}  # of kv and gate, of index_kv and index_gate

    def __init__(self, backend=None, **changes):
        self.manager = kv4.KVCacheManager(small_config(), small_options(**changes), backend)
        rng = np.random.default_rng(7)
        make = lambda *shape: rng.standard_normal(shape, np.float32)
        self.manager.bind_weights(1, make(4, 160), make(80), make(4, 64), make(32))
        self.manager.bind_weights(2, make(8, 80), make(80))

    def inputs(self, layer, positions, stream=0):
        """append's arguments for these positions."""
        kv, index = self.columns[layer]
        row = lambda p: np.random.default_rng([stream, layer, p]).standard_normal(80 + 2 * kv + 2 * index, np.float32)
        rows = np.stack([row(p) for p in positions])
        cuts = np.cumsum([80, kv, kv, index])
        return [part if part.shape[1] else None for part in np.split(rows, cuts, axis=1)]

    def append_all(self, positions, stream=0):
        for layer in range(3):
            self.manager.acquire(layer).append(*self.inputs(layer, positions, stream))

    def feed(self, request, count, stream=0):
        start = self.manager.length(request)
        positions = range(start, start + count)
        step = self.manager.prepare_forward([kv4.StepItem(request, [p + 1000 * stream for p in positions])])
        self.append_all(positions, stream)
        self.manager.commit(step)

    def state(self, request):
        """Everything observable of a request, as bytes."""
        return (self.manager.export_image(request).bytes.tobytes(), self.manager.export_blocks(request).tobytes(),
                self.manager.token_ids(request).tolist())
