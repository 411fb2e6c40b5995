#!/usr/bin/env python3
"""Policies and modes have one spelling: that of the C++ enumerators is what C, Python and the tool take and list.

    tests/tree/spelling_test.py BUILD_DIR        Python is compared where BUILD_DIR/python can be imported

Last line: `N passed, N failed[, N skipped]`.
"""
import ctypes as c
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADERS = "\n".join(path.read_text() for path in sorted((ROOT / "include" / "kv4").glob("*.h")))
C_HEADER = re.sub(r"/\*.*?\*/", "", (ROOT / "include" / "kv4.h").read_text(), flags=re.S)


def enumerators(name):
    """Of a C++ enumeration in the public headers; for a nested one the name of its struct and its own."""
    text = HEADERS
    if "::" in name:
        outer, name = name.split("::")
        text = text[re.search(rf"struct {outer} \{{", text).start():]
    body = re.search(rf"enum class {name} : [\w:]+ \{{(.*?)\}}", text, flags=re.S)[1]
    return re.findall(r"^\s*(\w+)", re.sub(r"//[^\n]*", "", body).replace(",", "\n"), flags=re.M)


def c_enumerators(name):
    prefix = "KV4_" if name == "kv4_status" else name.upper() + "_"
    body = re.search(rf"typedef enum {name} \{{(.*?)\}}", C_HEADER, flags=re.S)[1]
    return [value.removeprefix(prefix).lower() for value in re.findall(r"(\w+) = ", body)]


class CWords:
    """What kv4.h says a string may be: it lists the words where one is unknown."""

    def __init__(self, library):
        self.lib = c.CDLL(str(library))
        self.lib.kv4_last_error.restype = c.c_char_p
        flash = c.c_void_p()
        self.model, self.cache = c.c_void_p(), c.c_void_p()
        assert self.lib.kv4_model_preset(b"v4-flash", c.byref(flash)) == 0
        assert self.lib.kv4_model_with_layers(flash, (c.c_int32 * 1)(0), 1, c.byref(self.model)) == 0
        assert self.lib.kv4_cache_new(self.model, None, None, c.byref(self.cache)) == 0, self.lib.kv4_last_error()

    def of(self, struct, field):
        """The words of a string field: everything else has its default."""
        at = self.offset(struct, field)
        memory = (c.c_uint8 * 4096)()
        getattr(self.lib, f"{struct}_init")(memory, c.c_size_t(self.size(struct)))
        wrong = c.create_string_buffer(b"wrong word")
        c.memmove(c.addressof(memory) + at, c.byref(c.c_void_p(c.addressof(wrong))), 8)
        out = (c.c_uint8 * 4096)()
        status = {
            "kv4_cache_options": lambda: self.lib.kv4_model_plan_memory(self.model, memory, self.plan()),
            "kv4_tiers_options": lambda: self.lib.kv4_tiers_new(self.cache, memory, out),
            "kv4_session_identity": lambda: self.lib.kv4_cache_save_session_file(self.cache, 0, memory, b"/no/such", None, None),
            "kv4_index_inputs": lambda: self.lib.kv4_cache_index_scores(self.cache, 0, memory, None),
        }[struct]()
        words = self.lib.kv4_last_error().decode()
        assert status == -2 and "'wrong word' is unknown" in words, (struct, field, status, words)
        return words.split("use one of: ")[1].split(", ")

    def plan(self):
        out = (c.c_uint8 * 4096)()
        self.lib.kv4_memory_plan_init(out, c.c_size_t(self.size("kv4_memory_plan")))
        return out

    def size(self, struct):
        return int(re.search(rf"^struct {struct} (\d+)$", (ROOT / "tests" / "c_api" / "abi.txt").read_text(), flags=re.M)[1])

    def offset(self, struct, field):
        for line in (ROOT / "tests" / "c_api" / "abi.txt").read_text().splitlines():
            if line.startswith(f"{struct}.{field} "):
                return int(line.split()[1])
        raise AssertionError(f"abi.txt has no {struct}.{field}")


def tool_words(tool, *arguments):
    """What the tool says an option may be."""
    result = subprocess.run([tool, *arguments, "wrong_word"], capture_output=True, text=True)
    said = re.search(r"it may be ([^;\n]*)", result.stderr)
    assert result.returncode != 0 and said, (arguments, result.stderr)
    return re.split(r", | or ", said[1].strip())


def main():
    build = Path(sys.argv[1])
    words, tool = CWords(build / "lib" / "libkv4.so"), str(build / "kv4")
    sys.path.insert(0, str(build / "python"))
    try:
        import kv4
    except ImportError:
        kv4 = None
    checks = {
        "Format": [words.of("kv4_cache_options", "row_format"), words.of("kv4_cache_options", "index_format"),
                   [*tool_words(tool, "plan", "--rows"), *tool_words(tool, "plan", "--keys")]],
        "HcaMode": [words.of("kv4_cache_options", "hca_mode"), tool_words(tool, "plan", "--hca")],
        "Arrangement": [words.of("kv4_cache_options", "arrangement"), tool_words(tool, "plan", "--arrangement")],
        "EvictionKind": [words.of("kv4_cache_options", "eviction"), tool_words(tool, "replay", "--generate", "--policy")],
        "SnapshotPolicy::Kind": [
            words.of("kv4_cache_options", "snapshots"),
            [word for word in tool_words(tool, "replay", "--generate", "--snapshots") if ":" not in word]],
        "ScoreMode": [words.of("kv4_index_inputs", "score_mode")],
        "Protection": [words.of("kv4_tiers_options", "protection"), words.of("kv4_session_identity", "protection")],
        "BlockEvent::Kind": [c_enumerators("kv4_event_kind")],
        "FlushStatus": [c_enumerators("kv4_flush_status")],
        "LogLevel": [c_enumerators("kv4_log_level")],
        "LayerKind": [c_enumerators("kv4_layer_kind")],
    }
    failed = 0

    def compare(what, seen, wanted):
        nonlocal failed
        if sorted(set(seen)) != sorted(wanted):
            print(f"{what}: {seen}, the C++ enumerators are {wanted}")
            failed += 1

    for name, lists in checks.items():
        wanted = enumerators(name)
        for seen in lists:
            compare(name, seen, wanted)
        if kv4:
            member = kv4
            for part in name.split("::"):
                member = getattr(member, part)
            compare(f"{name} in Python", [value.name for value in member], wanted)
    compare("pending_dtype", words.of("kv4_cache_options", "pending_dtype"), tool_words(tool, "plan", "--pending"))
    if kv4:
        compare("DType in Python", [value.name for value in kv4.DType], enumerators("DType"))
    print(f"{len(checks) + 2 - failed} passed, {failed} failed" + ("" if kv4 else ", 1 skipped (no Python module)"))
    return min(failed, 1)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main())
