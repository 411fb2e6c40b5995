#!/usr/bin/env python3
"""The decode loop from another language: kv4.h through ctypes, no compiler and no package needed.

    tests/c_api/ctypes_test.py BUILD_DIR/lib/libkv4.so
"""
import ctypes as c
import random
import sys
import tempfile
from array import array
from pathlib import Path

KV4_OK, KV4_SHORT_OF_REQUESTS, KV4_BAD_ARGUMENT = 0, 1, -2
FLOAT, SIGNED = (2, 32), (0, 32)


class Tensor(c.Structure):  # kv4_tensor, DLPack's DLTensor
    _fields_ = [("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32), ("ndim", c.c_int32),
                ("dtype_code", c.c_uint8), ("dtype_bits", c.c_uint8), ("dtype_lanes", c.c_uint16),
                ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64)]


TensorPointer = c.POINTER(Tensor)


class Options(c.Structure):  # the fields of kv4_cache_options that this caller knows, as its size tells
    _fields_ = [("size", c.c_size_t), ("row_format", c.c_char_p), ("index_format", c.c_char_p), ("hca_mode", c.c_char_p),
                ("arrangement", c.c_char_p)]


class MoreOptions(Options):  # another caller's fields; it is older than the library, too
    _fields_ = [("hadamard", c.c_int32), ("index_global_scale", c.c_float), ("pending_dtype", c.c_char_p), ("page_alignment", c.c_int32),
                ("block_tokens", c.c_int32), ("max_rewind_tokens", c.c_int32), ("draft_layers", c.c_int32), ("num_layers", c.c_int32),
                ("layers", c.POINTER(c.c_int32)), ("max_requests", c.c_int32), ("spare_slots", c.c_int32), ("max_context", c.c_int64),
                ("num_blocks", c.c_int64), ("max_step_tokens", c.c_int32), ("index_tile_tokens", c.c_int32),
                ("prefix_enabled", c.c_int32), ("num_snapshots", c.c_int32), ("max_events", c.c_int64), ("weights_id", c.c_char_p),
                ("eviction", c.c_char_p), ("snapshots", c.c_char_p)]


class Key(c.Structure):  # kv4_cache_key
    _fields_ = [("bytes", c.c_uint8 * 32)]


class TiersOptions(c.Structure):  # the fields of kv4_tiers_options that this caller knows
    _fields_ = [("size", c.c_size_t), ("host_bytes", c.c_int64), ("directory", c.c_char_p), ("disk_bytes", c.c_int64),
                ("segment_bytes", c.c_int64), ("host_threads", c.c_int32), ("disk_threads", c.c_int32),
                ("servers", c.POINTER(c.c_char_p)), ("num_servers", c.c_int64), ("user", c.c_char_p), ("password", c.c_char_p),
                ("allowed_servers", c.POINTER(c.c_char_p)), ("num_allowed_servers", c.c_int64), ("tls_ca_file", c.c_char_p),
                ("tls_certificate_file", c.c_char_p), ("tls_key_file", c.c_char_p), ("remote_ttl_ms", c.c_int64),
                ("keys", c.POINTER(Key)), ("num_keys", c.c_int64)]


class Prompt(c.Structure):
    _fields_ = [("size", c.c_size_t), ("token_ids", c.POINTER(c.c_int32)), ("num_tokens", c.c_int64), ("tenant", c.c_int32),
                ("salt", c.c_char_p), ("salt_length", c.c_size_t)]


class Admission(c.Structure):
    _fields_ = [("size", c.c_size_t), ("request", c.c_int32), ("usable_tokens", c.c_int64), ("resume_at", c.c_int64)]


class TierReport(c.Structure):  # its first fields
    _fields_ = [("size", c.c_size_t), ("name", c.c_char_p), ("protection", c.c_char_p), ("hits", c.c_int64)]


PROGRESS = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_int64, c.c_int64)


class Weights(c.Structure):
    _fields_ = [("size", c.c_size_t)] + [(name, TensorPointer) for name in (
        "position_bias", "norm_weight", "index_position_bias", "index_norm_weight", "raw_norm_weight")]


class AppendInputs(c.Structure):
    _fields_ = [("size", c.c_size_t)] + [(name, TensorPointer) for name in (
        "raw_kv", "kv", "gate", "index_kv", "index_gate")] + [("raw_is_projection", c.c_int32)]


class AttendInputs(c.Structure):
    _fields_ = [("size", c.c_size_t), ("q", TensorPointer), ("sink", TensorPointer), ("topk", TensorPointer),
                ("softmax_scale", c.c_float), ("inverse_rope", c.c_int32)]


class StepItem(c.Structure):
    _fields_ = [("size", c.c_size_t), ("request", c.c_int32), ("count", c.c_int32), ("token_ids", c.POINTER(c.c_int32)), ("position", c.c_int64)]


class Step(c.Structure):
    _fields_ = [("size", c.c_size_t), ("id", c.c_int64), ("num_tokens", c.c_int32), ("num_items", c.c_int32), ("group", c.c_int32)]


class Identity(c.Structure):
    _fields_ = [("size", c.c_size_t), ("weights_id", c.c_char_p), ("salt", c.c_void_p), ("salt_length", c.c_size_t),
                ("tenant", c.c_uint64), ("block_extra", c.c_void_p), ("num_block_extra", c.c_int64)]


def tensor(numbers, *shape, kind=FLOAT, at=0):
    """A view of an array; it keeps the array alive."""
    held = (c.c_int64 * len(shape))(*shape)
    out = Tensor(numbers.buffer_info()[0] + at * numbers.itemsize, 1, 0, len(shape), kind[0], kind[1], 1, held, None, 0)
    out.held = held
    return c.pointer(out)


def sized(struct, **fields):
    return struct(size=c.sizeof(struct), **fields)


class Cache:
    def __init__(self, library, options):
        self.lib = library
        self.handle = c.c_void_p()
        flash, model = c.c_void_p(), c.c_void_p()
        self.call("kv4_model_preset", b"v4-flash", c.byref(flash))
        self.call("kv4_model_with_layers", flash, (c.c_int32 * 2)(0, 2), 2, c.byref(model))
        self.call("kv4_cache_new", model, c.byref(options), None, c.byref(self.handle))
        self.lib.kv4_model_free(model)
        self.lib.kv4_model_free(flash)
        generator = random.Random(5)
        self.bias = array("f", (generator.gauss(0, 1) for _ in range(128 * 512)))
        self.norm = array("f", [1.0] * 512)
        self.weights = sized(Weights, position_bias=tensor(self.bias, 128, 512), norm_weight=tensor(self.norm, 512))
        self.call("kv4_cache_bind_weights", self.handle, 1, c.byref(self.weights))
        self.rows = array("f", (generator.gauss(0, 1) for _ in range(300 * 1024)))

    def call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        assert status == KV4_OK, f"{name}: {status} {self.lib.kv4_last_error().decode()}"

    def forward(self, request, count):
        """The next tokens of a request; the input of a position is the same for every request."""
        at = c.c_int64()
        self.call("kv4_cache_length", self.handle, request, 0, c.byref(at))
        ids = (c.c_int32 * count)(*range(at.value, at.value + count))
        item, step = sized(StepItem, request=request, count=count, token_ids=ids, position=at.value), sized(Step)
        self.call("kv4_cache_prepare_forward", self.handle, c.byref(item), c.c_int64(1), 0, c.byref(step))
        row = tensor(self.rows, count, 512, at=at.value * 512)
        self.call("kv4_cache_append", self.handle, 0, c.byref(sized(AppendInputs, raw_kv=row)))
        self.call("kv4_cache_append", self.handle, 1, c.byref(sized(AppendInputs, raw_kv=row, kv=row, gate=row)))
        out = array("f", bytes(4 * count * 2 * 512))
        q = tensor(self.rows, count, 2, 512)
        self.call("kv4_cache_attend", self.handle, 1, c.byref(sized(AttendInputs, q=q)), tensor(out, count, 2, 512), None)
        self.call("kv4_cache_commit", self.handle, c.byref(step))
        return out[-1024:]

    def image(self, request):
        size = c.c_int64()
        self.call("kv4_cache_image_bytes", self.handle, request, c.byref(size))
        out = (c.c_ubyte * size.value)()
        self.call("kv4_cache_export_image", self.handle, request, out, c.c_size_t(size.value))
        return bytes(out)

    def admit(self):
        request = c.c_int32()
        self.call("kv4_cache_admit", self.handle, c.byref(request))
        return request.value


def tiers(library):
    """A prompt's blocks, sealed on a disk: the next cache finds them, and one without the key does not."""
    options = MoreOptions()
    library.kv4_cache_options_init(c.byref(options), c.c_size_t(c.sizeof(options)))
    options.prefix_enabled, options.weights_id, options.snapshots, options.max_context = 1, b"w", b"full", 1024
    prompt_ids = (c.c_int32 * 260)(*range(260))
    prompt = sized(Prompt, token_ids=prompt_ids, num_tokens=260, salt=b"tenant", salt_length=6)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "keys"
        key_file.write_text("5a" * 32 + "\n")
        key_file.chmod(0o600)
        keys, count = (Key * 4)(), c.c_int64()
        assert library.kv4_read_key_file(str(key_file).encode(), keys, c.c_int64(4), c.byref(count)) == KV4_OK
        assert count.value == 1 and bytes(keys[0].bytes) == b"\x5a" * 32
        for known in (keys, keys, (Key * 1)()):
            cache = Cache(library, options)
            below = TiersOptions()
            library.kv4_tiers_options_init(c.byref(below), c.c_size_t(c.sizeof(below)))
            below.directory, below.segment_bytes = str(Path(folder) / "store").encode(), 4 << 20
            below.keys, below.num_keys = c.cast(known, c.POINTER(Key)), 1
            handle, tiered, reached = c.c_void_p(), c.c_void_p(), c.c_int32()
            cache.call("kv4_tiers_new", cache.handle, c.byref(below), c.byref(handle))
            cache.call("kv4_tiered_prefix_new", cache.handle, handle, None, c.byref(tiered))
            told = []
            progress = PROGRESS(lambda user, done, total: told.append((done, total)) or 1)
            admission = sized(Admission)
            cache.call("kv4_tiered_prefix_admit", tiered, c.byref(prompt), c.c_int64(20000), progress, None, c.byref(admission))
            found.append(admission.resume_at)
            assert all(total == 2 for _, total in told)
            cache.forward(admission.request, 259 - admission.resume_at)
            found.append(cache.forward(admission.request, 1))
            cache.call("kv4_tiered_prefix_save_all", tiered, c.c_int64(60000), None, None)
            cache.call("kv4_tiers_close", handle, c.c_int64(60000), c.byref(reached))
            assert reached.value == 2, "not durable"
            reports = (TierReport * 1)(sized(TierReport))
            cache.call("kv4_tiers_get_reports", handle, reports, c.c_int64(1), c.byref(count))
            assert (reports[0].name, reports[0].protection) == (b"disk", b"sealed")
            library.kv4_tiered_prefix_free(tiered)
            library.kv4_tiers_free(handle)
            library.kv4_cache_free(cache.handle)
    assert found[0::2] == [0, 256, 0], found[0::2]
    assert found[1] == found[3] == found[5], "attention differs"


def main():
    library = c.CDLL(sys.argv[1])
    library.kv4_last_error.restype = c.c_char_p
    library.kv4_version.restype = c.c_char_p
    for name in ("kv4_model_free", "kv4_cache_free", "kv4_tiers_free", "kv4_tiered_prefix_free"):
        getattr(library, name).argtypes = [c.c_void_p]
    assert library.kv4_abi_version() == 2

    options = sized(Options, row_format=b"bf16", index_format=b"mxfp4", hca_mode=b"online", arrangement=b"layer_major")
    cache = Cache(library, options)
    whole, chunked = cache.admit(), cache.admit()
    cache.forward(whole, 259)
    last = cache.forward(whole, 1)
    for count in (1, 127, 100, 31):
        cache.forward(chunked, count)
    assert cache.forward(chunked, 1) == last, "attention of chunks differs"
    assert any(last), "attention is zero"
    assert cache.image(chunked) == cache.image(whole), "chunks differ"

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "chat.kv4s").encode()
        identity = sized(Identity, weights_id=b"weights")
        cache.call("kv4_cache_save_session_file", cache.handle, whole, c.byref(identity), path, None, None)
        other = Cache(library, options)  # another cache, as in another process
        restored = c.c_int32()
        other.call("kv4_cache_restore_session_file", other.handle, c.byref(identity), path, None, None, c.byref(restored))
    assert other.forward(restored.value, 5) == cache.forward(whole, 5), "a restored session goes on differently"
    assert other.image(restored.value) == cache.image(whole)

    requests = [other.admit() for _ in range(15)]
    assert library.kv4_cache_admit(other.handle, c.byref(restored)) == KV4_SHORT_OF_REQUESTS
    assert library.kv4_cache_release(other.handle, 12345) == KV4_BAD_ARGUMENT
    assert b"12345" in library.kv4_last_error()
    assert len(set(requests)) == 15
    library.kv4_cache_free(other.handle)
    library.kv4_cache_free(cache.handle)
    tiers(library)
    print(f"kv4 {library.kv4_version().decode()} through ctypes: chunks, sessions, shortages, errors and tiers as in C++")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main()
