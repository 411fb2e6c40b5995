#!/usr/bin/env python3
"""Compares what programs are linked against, exported functions and the layout of structs, with tests/c_api/abi.txt, and
the names and structs of kv4.h and kv4_chunks.h with their own rules.

    tests/c_api/abi_check.py BUILD_DIR/lib/libkv4.so [--update]

A line that is gone or changed breaks programs that exist: give it back, or raise the version's MINOR and KV4_ABI_VERSION
and begin anew with --update. New functions, and new fields at the end of structs that begin with `size`, break nobody:
record them with --update.
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADERS = [ROOT / "include" / "kv4.h", ROOT / "include" / "kv4_chunks.h"]
RECORDED = Path(__file__).with_name("abi.txt")
# The library's own calls; every other one is kv4_TYPE_VERB.
OWN_CALLS = {"kv4_version", "kv4_abi_version", "kv4_last_error", "kv4_set_log_sink", "kv4_read_key_file"}
# Structs that never change and have no `size` field.
FIXED = {"kv4_tensor": 48, "kv4_managed_tensor": 64, "kv4_bytes": 16, "kv4_memory": 16, "kv4_block_key": 32, "kv4_cache_key": 32, "kv4_plane": 32,
         "kv4_time_histogram": 200, "kv4_failure_count": 16, "kv4_log_field": 16}


def whole():
    return "\n".join(header.read_text() for header in HEADERS)


def code():
    return re.sub(r"/\*.*?\*/", "", whole(), flags=re.S)


def version():
    """The versions in CMakeLists.txt, which pyproject.toml reads, too."""
    return re.search(r"project\(kv4 VERSION (\d+)\.(\d+)\.(\d+)", (ROOT / "CMakeLists.txt").read_text()).groups()


def broken_rules():
    """Checks the rules for names and sizes at the head of kv4.h."""
    text, problems = code(), []
    functions = set(re.findall(r"\b(kv4_\w+)\(", text))
    structs = dict(re.findall(r"typedef struct (\w+) \{(.*?)\n\}", text, flags=re.S))
    types = set(re.findall(r"typedef (?:struct|enum) (kv4_\w+)", text))
    for function in sorted(functions - OWN_CALLS):
        if not any(function.startswith(name + "_") for name in types):
            problems.append(f"{function} begins with no type's name")
    for name, body in structs.items():
        sized = body.split(";")[0].strip() == "size_t size"
        if sized == (name in FIXED):
            problems.append(f"{name} {'has a size and is in the list of those without' if sized else 'does not begin with its size'}")
        if sized and f"{name}_init" not in functions:
            problems.append(f"{name} has no {name}_init")
    for name, body in re.findall(r"typedef enum (\w+) \{(.*?)\}", text, flags=re.S):
        prefix = "KV4_" if name == "kv4_status" else name.upper() + "_"
        problems += [f"{value} of {name} does not begin with {prefix}"
                     for value in re.findall(r"(\w+)\s*=", body) if not value.startswith(prefix)]
    return problems


def exported(library):
    listing = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return sorted(line.split()[2] for line in listing.splitlines() if re.search(r" T kv4_\w+$", line))


def layouts():
    """`struct.field offset size` of every struct of the header, by the compiler."""
    text = code()
    lines = []
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\n\}", text, flags=re.S):
        lines.append(f'printf("struct {name} %zu\\n", sizeof({name}));')
        for declaration in body.split(";"):
            field = re.search(r"\(\*(\w+)\)\(|(\w+)(?:\[\d+\])?\s*$", declaration.strip())
            if field:
                at = f"{name}, {field[1] or field[2]}"
                lines.append(f'printf("{name}.{field[1] or field[2]} %zu %zu\\n", offsetof({at}), '
                             f"sizeof((({name}*)0)->{field[1] or field[2]}));")
    for name, body in re.findall(r"typedef enum (\w+) \{(.*?)\}", text, flags=re.S):
        lines += [f'printf("{name}.{value} %d\\n", {value});' for value in re.findall(r"(\w+)\s*=", body)]
    program = '#include <stdio.h>\n#include "kv4_chunks.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0; }\n"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "layout.c", Path(folder) / "layout"
        source.write_text(program)
        subprocess.run(["cc", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{HEADERS[0].parent}", source, "-o", binary],
                       check=True)
        return subprocess.run([binary], check=True, capture_output=True, text=True).stdout.splitlines()


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    functions = exported(sys.argv[1])
    declared = sorted(set(re.findall(r"\b(kv4_\w+)\(", code())))
    if functions != declared:
        print("declared but not exported:", sorted(set(declared) - set(functions)))
        print("exported but not declared:", sorted(set(functions) - set(declared)))
        return 1
    told = {name for comment in re.findall(r"/\*.*?\*/", whole(), flags=re.S) for name in re.findall(r"\bkv4_[a-z0-9_]+\b", comment)}
    if unknown := {name for name in told if name not in code()}:
        print("comments name what there is not:", sorted(unknown))
        return 1
    if problems := broken_rules():
        print("\n".join(problems))
        return 1
    layout = layouts()
    for name, size in FIXED.items():
        if f"struct {name} {size}" not in layout:
            print(f"{name} has other bytes than {size}, and must never change")
            return 1
    abi = re.search(r"#define KV4_ABI_VERSION (\d+)", whole())[1]
    major, minor, patch = version()
    if f'/* "{major}.{minor}.{patch}" */' not in whole():
        print(f"kv4.h shows another version than {major}.{minor}.{patch}")
        return 1
    now = [f"version {major}.{minor}, KV4_ABI_VERSION {abi}"] + [f"function {name}" for name in functions] + layout
    if "--update" in sys.argv:
        RECORDED.write_text("\n".join(now) + "\n")
        return 0
    before = RECORDED.read_text().splitlines()
    gone, new = [line for line in before if line not in now], [line for line in now if line not in before]
    for line in gone:
        print(f"gone or changed: {line}")
    for line in new:
        print(f"new: {line}")
    if gone or new:
        print(__doc__)
        return 1
    print(f"{len(functions)} functions and {len(layout)} struct and enum places as recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
