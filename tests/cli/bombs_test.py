#!/usr/bin/env python3
"""Small inputs that ask for much memory: every command that reads a file refuses them, or stays below a peak.

Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree); an argument runs only tests whose name contains it.
"""
import ctypes
import ctypes.util
import gzip
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from running_cache_test import serving
from tool import KV4, ROOT, Skipped, equal, parse_metrics, run_tests

MB = 1 << 20
MOST = 8 << 30  # of addresses, so that a tool without bounds fails before the machine does
SECONDS = 60    # of CPU time and of the clock: ends a tool that waits or reads for ever
PEAK = 200 * MB


def limit_child():
    resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def run_bounded(*args, peak=PEAK):
    """Exit code, stdout and stderr of the tool, whose resident memory was never more than `peak`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen([KV4, *args], stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=limit_child)
        alarm = subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; kill -9 {process.pid}"])
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            alarm.kill()
            alarm.wait()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        printed, said = out.read(MB).decode(errors="replace"), err.read(MB).decode(errors="replace")
    used = usage.ru_maxrss * 1024
    what = f"kv4 {' '.join(args)}: exit {process.returncode}, {used // MB} MB\n{said[-500:]}"
    assert process.returncode >= 0, what + "it was ended"
    assert used <= peak, what + f"at most {peak // MB} MB expected"
    return process.returncode, printed, said


def refused(*args, words, peak=PEAK):
    code, printed, said = run_bounded(*args, peak=peak)
    assert code == 2 and printed == "" and said.startswith("error: ") and said.count("\n") == 1, (args, code, said[-500:])
    assert len(said) < 3000, f"{len(said)} bytes of message"
    for word in words:
        assert word in said, f"'{word}' is missing in: {said[-500:]}"


def write(folder, name, data):
    path = Path(folder) / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


def sparse(folder, name, size, head=b""):
    path = Path(folder) / name
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)
    return str(path)


# ---- traces

HEAD = json.dumps({"format": "weka128_rle v1", "block_tokens": 1}) + "\n"


def run_length(session, tokens, runs):
    return json.dumps({"s": session, "t": 0, "i": tokens, "o": 0, "r": runs}) + "\n"


def test_trace_that_unpacks():
    with tempfile.TemporaryDirectory() as folder:
        # 1,300 bytes: each line names new ids.
        for ids in (1 << 24, 1 << 20, 1 << 16):
            text = HEAD + "".join(run_length(i, ids, [[i << 31, ids]]) for i in range(16))
            assert len(text) < 1300, len(text)
            refused("replay", write(folder, "trace", text), words=["trace:2", str(ids) if ids <= 1 << 22 else "'i'"])
        ids = 1 << 15  # the limit
        text = HEAD + "".join(run_length(i, ids, [[i << 31, ids]]) for i in range(16))
        equal(run_bounded("replay", write(folder, "trace", text), "--json", peak=600 * MB)[0], 0)
        # More different blocks than a replay keeps; a capacity bounds them.
        text = HEAD + "".join(run_length(i, ids, [[i << 31, ids]]) for i in range(132))
        refused("replay", write(folder, "trace", text), words=["different blocks", "--capacity"])
        equal(run_bounded("replay", write(folder, "trace", text), "--capacity", "1M", "--json", peak=600 * MB)[0], 0)


def test_trace_lines():
    with tempfile.TemporaryDirectory() as folder:
        good = json.dumps({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]})
        for filler in ("[" * MB, '{"a":' * (MB // 5), '"' + "x" * 2 * MB, "1" * 2 * MB):
            refused("replay", write(folder, "trace", good + "\n" + filler), words=["trace:2"])
        for value in ("9" * 1000, "1e400", "-1", '"\\u001b[2J"', "[" * 1000 + "]" * 1000):
            refused("replay", write(folder, "trace", good.replace("600", value)), words=["trace:1"])


def test_trace_gzip():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.gz"
        with gzip.open(path, "wb", compresslevel=9) as file:  # 300 MB of one line
            for _ in range(300):
                file.write(b" " * MB)
        assert path.stat().st_size < MB
        refused("replay", str(path), words=["trace.gz:1", "line of more than"])
        path.write_bytes(gzip.compress(b'{"timestamp": 0}\n') * 1000 + b"garbage")
        refused("replay", str(path), words=["trace.gz:1"])


# ---- files that are none

def test_fifos_and_devices():
    with tempfile.TemporaryDirectory() as folder:
        fifo = str(Path(folder) / "fifo")
        os.mkfifo(fifo)
        end = str(Path(folder) / "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(end)
        for path, word in ((fifo, "FIFO"), ("/dev/zero", "device"), (folder, "folder"), (end, "")):
            for args in (("replay", path), ("session", "inspect", path), ("plan", "--config", path), ("run", "--config", path)):
                refused(*args, words=[path, word])
        refused("inspect", fifo, words=[fifo, "FIFO"])
        refused("inspect", "/dev/zero", words=["/dev/zero", "device"])
        vectors = Path(folder) / "vectors"
        vectors.mkdir()
        for place in (fifo, "/dev/zero"):
            (vectors / "codecs.safetensors").symlink_to(place)
            refused("golden", str(vectors), words=["codecs.safetensors", "regular file"])
            (vectors / "codecs.safetensors").unlink()


def test_sparse_files():
    with tempfile.TemporaryDirectory() as folder:
        refused("replay", sparse(folder, "trace", 1 << 40), words=["trace:1"])
        refused("session", "inspect", sparse(folder, "s", 1 << 40), words=["not a"])
        refused("inspect", sparse(folder, "s", 1 << 40), words=["not a"])
        refused("plan", "--config", sparse(folder, "c", 1 << 40, b"{"), words=["1099511627776", "config.json"])
        vectors = Path(folder) / "vectors"
        vectors.mkdir()
        for size in (1 << 40, (1 << 32) - 1):
            sparse(vectors, "codecs.safetensors", size, (90_000_000).to_bytes(8, "little"))
            refused("golden", str(vectors), words=["codecs.safetensors", str(size)])
        sparse(vectors, "codecs.safetensors", 100 * MB, (90_000_000).to_bytes(8, "little"))
        refused("golden", str(vectors), words=["header of 90000000 bytes"])


def test_config_bombs():
    with tempfile.TemporaryDirectory() as folder:
        for text in ("[" * 900_000, '{"a":' * 180_000, '{"num_hidden_layers": 1e308}', '{"model_type": "' + "x" * 900_000 + '"}'):
            refused("plan", "--config", write(folder, "config.json", text), words=[])


# ---- sessions

class Digest128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def digests():
    """XXH3 of 64 and of 128 bits, of the system's library."""
    found = ctypes.util.find_library("xxhash")
    if found is None:
        raise Skipped("there is no libxxhash to make digests with")
    library = ctypes.CDLL(found)
    library.XXH3_64bits.restype, library.XXH3_128bits.restype = ctypes.c_uint64, Digest128
    for call in (library.XXH3_64bits, library.XXH3_128bits):
        call.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def wide(data):
        digest = library.XXH3_128bits(data, len(data))
        return digest.low.to_bytes(8, "little") + digest.high.to_bytes(8, "little")
    return lambda data: library.XXH3_64bits(data, len(data)).to_bytes(8, "little"), wide


def record_header(length, payload=None):
    """A header like three_tokens.session's, for a payload of `length` bytes with the digest of `payload` if given."""
    narrow, wide = digests()
    header = bytearray((ROOT / "tests/cli/three_tokens.session").read_bytes()[:512])
    header[32:48] = 2 * length.to_bytes(8, "little")
    if payload is not None:
        header[384:400] = wide(payload)
    header[504:512] = narrow(bytes(header[:504]))
    return bytes(header)


def session_payload(length, image, lengths=1):
    """The fixed part, lengths and zeros: 4 tokens ids for each 4 bytes that are left by the image."""
    fixed = bytearray((ROOT / "tests/cli/three_tokens.session").read_bytes()[512:512 + 144])
    fixed[112:128] = b"".join(n.to_bytes(4, "little") for n in (lengths, 0, 0, 0))
    fixed[128:144] = image.to_bytes(8, "little") + bytes(8)
    tokens = (length - 144 - 8 * lengths - image) // 4
    return bytes(fixed) + tokens.to_bytes(8, "little") + bytes(8 * (lengths - 1))


def test_session_bombs():
    """Files of one block whose fitting headers announce more bytes than the files have."""
    with tempfile.TemporaryDirectory() as folder:
        most = 64 << 20  # kMaxSessionRecordBytes
        for length, words, peak in ((1 << 30, ["1073741824", str(most)], 60), (most + 1, [str(most + 1), str(most)], 60), (most, ["damaged"], 200), (1 << 20, ["damaged"], 60)):
            head = record_header(length) + session_payload(length, length - 512)
            for command in (["session", "inspect"], ["inspect"]):
                refused(*command, sparse(folder, "s", 4096 * ((length + 512 + 4095) // 4096), head), words=words, peak=peak * MB)
        # Existing bytes are read; more parts than bytes are refused.
        for image in (1 << 20, 1 << 40, (1 << 64) - 1):
            payload = session_payload(8192, 0) + b"x" * (8192 - 152)
            payload = payload[:128] + image.to_bytes(8, "little") + payload[136:]
            data = record_header(8192, payload) + payload
            refused("session", "inspect", write(folder, "s", data + bytes(-len(data) % 4096)), words=["the image", str(image)], peak=60 * MB)


# ---- status folders

def status(**changes):
    return json.dumps({"format": "kv4 status 1", "model": "m", "process": 1, "interval_ms": 1000, **changes})


def hostile_statuses(folder):
    """Names of folders with a status that must be refused."""
    tier = {"name": "host"}
    texts = {"nested": '{"format": "kv4 status 1", "status": ' + "[" * 5_000_000, "values": status(x=[0] * 4_000_000),
             "objects": '{' + ",".join(f'"{i}":0' for i in range(1_500_000)) + "}", "twice": status(status={"tiers": [tier, tier]}),
             "tiers": status(status={"tiers": [{"name": str(i)} for i in range(1000)]}), "huge": status(status={"cache": {"requests": 10**300}}),
             "float": status(status={"cache": {"requests": 1e300}}), "interval": status(interval_ms=1 << 50), "torn": status()[:-9],
             "name": status(model="x" * 10_000), "bytes": b"\xff\xfe\x00"}
    for name, text in texts.items():
        (Path(folder) / name).mkdir()
        write(folder, f"{name}/status.json", text)
    for name, place in (("zero", "/dev/zero"), ("fifo", None), ("3GB", None)):
        (Path(folder) / name).mkdir()
        path = Path(folder) / name / "status.json"
        if place:
            path.symlink_to(place)
        elif name == "fifo":
            os.mkfifo(path)
        else:
            sparse(path.parent, "status.json", 3 << 30, b'"')
    return [str(path) for path in sorted(Path(folder).iterdir())]


def test_status_bombs():
    with tempfile.TemporaryDirectory() as folder:
        folders = hostile_statuses(folder)
        code, printed, _ = run_bounded("serve-metrics", *folders, "--once")
        equal((code, parse_metrics(printed)), (1, {f'kv4_up{{cache="{Path(name).name}"}}': 0 for name in folders}))
        for name in folders:
            refused("inspect", name, words=["status.json"])


def test_status_bombs_do_not_end_the_server():
    with tempfile.TemporaryDirectory() as folder:
        folders = hostile_statuses(folder)
        with serving(*folders) as (get, process, _):
            for _ in range(3):
                equal(set(parse_metrics(get("metrics")).values()), {0})
            peak = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
            assert int(peak.split()[1]) * 1024 <= PEAK, peak


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
