#!/usr/bin/env python3
"""Saved sessions in the tool: contents, decoded rows, damage, other files. Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree); an argument runs only tests whose name contains it.
"""
import gzip
import json
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from cli_test import flip
from tool import KV4, ROOT, Skipped, equal, kv4, ok, ok_json, refused, run_tests


def read_png(path):
    """Width, height and pixels of an RGB image without filters."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        size, kind = int.from_bytes(data[at:at + 4], "big"), data[at + 4:at + 8]
        body = data[at + 8:at + 8 + size]
        equal(int.from_bytes(data[at + 8 + size:at + 12 + size], "big"), zlib.crc32(kind + body))
        chunks[kind] = body
        at += 12 + size
    width, height = (int.from_bytes(chunks[b"IHDR"][i:i + 4], "big") for i in (0, 4))
    pixels = zlib.decompress(chunks[b"IDAT"])
    equal(len(pixels), height * (1 + 3 * width))
    return width, height, pixels


def test_inspect():
    example = Path(KV4).parent / "examples/keep_context"
    if not example.exists():
        raise Skipped(f"{example} is not built")
    with tempfile.TemporaryDirectory() as folder:
        path, svg, png = (Path(folder) / name for name in ("chat.kv4s", "chat.svg", "chat.png"))
        subprocess.run([example, path], capture_output=True, check=True)
        found = ok_json("inspect", str(path), "--svg", str(svg), "--png", str(png))
        equal(found["tokens"], 801)
        parts = {(part["layer"], part["part"]): part for part in found["parts"]}
        equal({place: part["rows"] for place, part in parts.items()},
              {(0, "window"): 128, (1, "window"): 128, (1, "entries"): 200, (1, "keys"): 200, (2, "window"): 128, (2, "entries"): 6,
               # 801 = 200 x 4 + 1 = 6 x 128 + 33: the span before, an open row; maximum, denominator, numerator of 33.
               (1, "pending"): 4 + 1, (1, "pending-keys"): 4 + 1, (2, "pending"): 3})
        # Window inputs are i / 97 for i in 0 to 96; entries are normed, their weight is one.
        assert abs(parts[0, "window"]["rms"] - 0.5755) < 0.01 and parts[0, "window"]["largest"] == 1.0, parts
        assert abs(parts[1, "entries"]["rms"] - 1) < 0.01 and abs(parts[2, "entries"]["rms"] - 1) < 0.01, parts
        assert all(part["not_finite"] == 0 for part in parts.values())
        width, height, pixels = read_png(png)
        equal((width, height), (200 * 4, 200))  # two layers: as high as can be seen
        assert len(set(pixels)) > 20, "a picture of one color"
        text = svg.read_text()
        assert "1 CSA" in text and "2 HCA" in text and "data:image/png;base64," in text, text[:300]

        ok("inspect", str(path), "--layer", "1", "--part", "keys", "--png", str(png))
        equal(read_png(png)[:2], (128 * 2, 200 * 2))
        refused(["inspect", str(path), "--layer", "0", "--part", "keys", "--png", str(png)], "layer 0 has no keys")
        refused(["inspect", str(path), "--part", "values"], "values", "window, entries, keys, pending or pending-keys")
        ok("inspect", str(path), "--layer", "1", "--part", "pending", "--png", str(png))
        # Five rows of kv and gate of both series, of the span before of one: 2,048 channels each, in four lines.
        equal(read_png(png)[:2], (512 * 2, 5 * 4 * 13))
        sound = path.read_bytes()
        flip(path, len(sound) - 5000)
        refused(["inspect", str(path)], "damaged")
        path.write_bytes(sound[:4096])
        refused(["inspect", str(path)], "truncated")


def test_session_by_hand():
    path = str(ROOT / "tests/cli/three_tokens.session")
    found = ok_json("session", "inspect", path)
    assert found["ok"] and found["problems"] == [], found
    equal(found["lengths"], [3])
    equal(found["tenant"], 7)
    equal(found["weights_id"], "weights-1")
    equal(found["layout_id"], "683404534adff250")
    equal(found["bytes"], {"file": 4096, "blocks": 0, "open_block": 2, "image": 3, "snapshot": 0, "token_ids": 12, "extra": 0})
    text = ok("session", "inspect", path).stdout
    assert "3 tokens" in text and "Every record is sound" in text, text


def test_session_of_a_cache():
    example = Path(KV4).parent / "examples/keep_context"
    if not example.exists():
        raise Skipped(f"{example} is not built")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.kv4s"
        done = subprocess.run([example, path], capture_output=True, text=True)
        assert done.returncode == 0 and "the same" in done.stdout, done.stdout
        equal(path.stat().st_mode & 0o777, 0o600)
        found = ok_json("session", "inspect", str(path))
        assert found["ok"] and found["tokens"] == 801 and found["full_blocks"] == found["blocks_found"] == 6, found
        equal(found["bytes"]["file"], path.stat().st_size)
        equal(found["bytes"]["blocks"], 6 * found["bytes"]["open_block"])
        assert "layer 1 group 0 [4 true 512] [4 true 128]" in found["layout"]

        sound = path.read_bytes()
        block = (512 + found["bytes"]["open_block"] + 4095) // 4096 * 4096
        path.write_bytes(sound[:-block])  # the last record is missing
        done = kv4("session", "inspect", str(path))
        assert done.returncode == 1 and "1 of 6 full blocks are missing" in done.stdout, done.stdout
        path.write_bytes(sound)
        flip(path, len(sound) - block + 600)
        found = json.loads(kv4("session", "inspect", str(path), "--json").stdout)
        assert not found["ok"] and "record 6: damaged payload" in found["problems"], found
        path.write_bytes(sound[:len(sound) - 4096])
        done = kv4("session", "inspect", str(path))
        assert done.returncode == 1 and "truncated" in done.stdout, done.stdout


def test_session_refused():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        refused(["session", "inspect", str(path)], "No such file", str(path))
        refused(["session", "inspect", folder], folder)
        refused(["session", "inspect"], "FILE")
        refused(["session"], "subcommand")
        for data, part in ((b"", "empty"), (b"x" * 100, "truncated"), (b"x" * 4096, "not a record")):
            path.write_bytes(data)
            refused(["session", "inspect", str(path)], part)
        for data, kind in ((b"root:x:0:0:root:/root:/bin/sh\n" * 40, "text"), (b'{"a": 1}' + b" " * 5000, "JSON"), (gzip.compress(os.urandom(5000)), "a gzip file"),
                           (b"\x7fELF" + b"\0" * 5000, "a program"), (bytes(range(256)) * 20, "binary data"), (b"\0" * 5000, "zeros"),
                           ((ROOT / "tests/cli/two_records.segment").read_bytes(), "a segment of a disk store")):
            path.write_bytes(data)
            for command in (["session", "inspect"], ["inspect"]):
                refused([*command, str(path)], str(path), f"it is {'a file of ' if kind == 'zeros' else ''}{kind}", "not a session")
        refused(["session", "inspect", "/etc/passwd"], "/etc/passwd", "it is text, not a session")
        path.write_bytes((ROOT / "tests/cli/three_tokens.session").read_bytes())
        flip(path, 600)
        refused(["session", "inspect", str(path)], "damaged payload")
        link = Path(folder) / "link"
        link.symlink_to(ROOT / "tests/cli/three_tokens.session")
        refused(["session", "inspect", str(link)], "link")


if __name__ == "__main__":
    sys.exit(run_tests({name: test for name, test in globals().items() if name != "flip"}))
