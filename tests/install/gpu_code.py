#!/usr/bin/env python3
"""Compares the GPU code in a built library with the documents.

    tests/install/gpu_code.py BUILD_DIR/lib/libkv4.so
    tests/install/gpu_code.py --list BUILD_DIR/lib/libkv4.so      status 1: it was built without CUDA

nvcc puts the code of each source file into the section .nv_fatbin: a header, and an entry for each target.
"""
import re
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAGIC = 0xBA55ED50
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of the entries behind it
ENTRY = struct.Struct("<HHIQ")   # kind, version, bytes of the entry's header, bytes of the code behind it
ARCHITECTURE_AT = 28             # of an entry's header: 32 bits, 90 for sm_90a
KINDS = {1: "PTX", 2: "code"}
#: The documents' statements: (document, kind, words with the architecture).
SAID = [
    ("README.md", "code", r"code for sm_(\d+)a, PTX for"),
    ("README.md", "PTX", r"PTX for sm_(\d+), which newer GPUs compile"),
    ("README.md", "PTX", r"a GPU from sm_(\d+) on at run time"),
    ("docs/python.md", "code", r"kernels for sm_(\d+)a and PTX for"),
    ("docs/python.md", "PTX", r"PTX for sm_(\d+) on"),
]


def carried(library):
    """(kind, architecture) -> number of source files with it; empty: no GPU code."""
    sections = subprocess.run(["readelf", "-SW", library], check=True, capture_output=True, text=True).stdout
    found = re.search(r"\.nv_fatbin\s+PROGBITS\s+\w+\s+(\w+)\s+(\w+)", sections)
    if not found:
        return Counter()
    offset, size = (int(number, 16) for number in found.groups())
    data, at, out = Path(library).read_bytes()[offset:offset + size], 0, Counter()
    while at + HEADER.size <= len(data):
        magic, _, header_bytes, entries_bytes = HEADER.unpack_from(data, at)
        if magic != MAGIC:  # padding
            at += 8
            continue
        at, end = at + header_bytes, at + header_bytes + entries_bytes
        while at < end:
            kind, _, header_bytes, code_bytes = ENTRY.unpack_from(data, at)
            architecture, = struct.unpack_from("<I", data, at + ARCHITECTURE_AT)
            out[KINDS[kind], architecture] += 1
            at += header_bytes + code_bytes
    return out


def main():
    library = sys.argv[-1]
    targets = carried(library)
    if sys.argv[1] == "--list":
        print("\n".join(f"{kind} for sm_{architecture}: {count} source files" for (kind, architecture), count in targets.items()))
        return 0 if targets else 1
    assert targets, f"{library} was built without CUDA"
    named = set()
    for document, kind, words in SAID:
        said = re.search(words, (ROOT / document).read_text())
        assert said, f"{document} no longer says what GPU code there is: {words}"
        named.add((kind, int(said[1])))
        assert (kind, int(said[1])) in targets, f"{document}: '{said[0]}', and {library} has {dict(targets)}"
    assert named == set(targets), f"{library} has {dict(targets)}, of which the documents name {named}"
    assert len(set(targets.values())) == 1, f"source files without one of the targets: {dict(targets)}"
    print(f"{library}: {dict(targets)}, as the documents say")
    return 0


if __name__ == "__main__":
    sys.exit(main())
