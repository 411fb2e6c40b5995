#!/usr/bin/env python3
"""Checks the shape of the tree (docs/design.md): allowed includes, and calls that the library never makes."""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A folder of src/ includes only itself and those to its left.
ORDER = ["base", "codec", "schema", "ops", "backend", "pool", "prefix", "tier", "cache", "c_api"]
# Around the library, each folder includes include/, src/, itself and the folders named here, no other of the tree.
AROUND = {"checks": set(), "bench": {"checks", "tests"}, "cli": {"checks", "bench"}}
MAX_LINES = 900
C_HEADERS = ("kv4.h", "kv4_chunks.h")
SOURCE = {".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".cmake"}
CXX = {".h", ".cc", ".cu", ".cuh"}
VAGUE_NAME = re.compile(r"(^|[_.-])(utils?|common|misc|helpers?)($|[_.-])")

STANDARD_HEADERS = set("""
algorithm any array atomic barrier bit bitset cassert cctype cerrno cfenv cfloat charconv chrono cinttypes climits clocale cmath
codecvt compare complex concepts condition_variable coroutine csetjmp csignal cstdarg cstddef cstdint cstdio cstdlib cstring ctime
cuchar cwchar cwctype deque exception execution filesystem format forward_list fstream functional future initializer_list iomanip
ios iosfwd iostream istream iterator latch limits list locale map memory memory_resource mutex new numbers numeric optional ostream
queue random ranges ratio regex scoped_allocator semaphore set shared_mutex source_location span sstream stack stdexcept stop_token
streambuf string string_view syncstream system_error thread tuple type_traits typeindex typeinfo unordered_map unordered_set utility
valarray variant vector version stddef.h stdint.h stdio.h stdlib.h string.h
""".split())

# Calls the library never makes: it does not print, exit, or read the environment.
FORBIDDEN = [
    (re.compile(r"\bstd::(cout|cerr|clog|wcout|wcerr)\b"), "prints"),
    (re.compile(r"(?<![\w.>])(?:std::|::)?(v?f?printf|f?puts|f?putc|putchar|perror)\s*\("), "prints"),
    (re.compile(r"\bfmt::(print|println|vprint)\b"), "prints"),
    (re.compile(r"\bstd::(exit|_Exit|quick_exit|abort|terminate)\s*\("), "ends the process"),
    (re.compile(r"(?<![\w.>:])(exit|_exit|_Exit|quick_exit)\s*\("), "ends the process"),
    (re.compile(r"\b(secure_)?getenv\s*\("), "reads the environment"),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')

problems = []


def report(path, line, text):
    where = path.relative_to(ROOT)
    problems.append(f"{where}:{line}: {text}" if line else f"{where}: {text}")


def without_comments_and_strings(text):
    """The same lines with comments and the insides of literals blanked."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def folder_of(path):
    """base, codec, ... for a file below src/, else None."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "src" and len(parts) > 2 else None


def includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1) == "<", match.group(2)


def check_public(path):
    """Public headers and examples: the standard library and kv4/ only; cuda.h is the one door to CUDA."""
    for number, angled, name in includes(path):
        cuda = path.name == "cuda.h" and name == "cuda_runtime_api.h"
        if angled and name not in STANDARD_HEADERS and not cuda:
            report(path, number, f"includes <{name}>, which is not of the standard library")
        if not angled and not name.startswith("kv4/") and name not in C_HEADERS:
            report(path, number, f'includes "{name}", which is not a public header')


def check_library(path):
    folder = folder_of(path)
    if folder not in ORDER:
        report(path, 0, f"not in a folder of src/ ({', '.join(ORDER)})")
        return
    for number, angled, name in includes(path):
        if angled:
            if name == "iostream":
                report(path, number, "includes <iostream>: the library does not print")
            continue
        if name.startswith("kv4/") or name in C_HEADERS:
            continue
        target = next((p for p in (path.parent / name, ROOT / "src" / name) if p.exists()), None)
        other = folder_of(target.resolve()) if target else None
        if other is None:
            report(path, number, f'includes "{name}", which is neither below src/ nor kv4/')
        elif other not in ORDER or ORDER.index(other) > ORDER.index(folder):
            report(path, number, f'{folder}/ includes "{name}", but {other}/ is not to the left of {folder}/')
    for number, line in enumerate(without_comments_and_strings(path.read_text()).splitlines(), 1):
        for pattern, what in FORBIDDEN:
            match = pattern.search(line)
            if match:
                report(path, number, f"the library {what}: {match.group().strip()}")


def check_around(path):
    """checks/, bench/ and cli/: may use the library's internals, and each other only one way."""
    folder = path.relative_to(ROOT).parts[0]
    for number, angled, name in includes(path):
        if angled or name.startswith("kv4/") or name in C_HEADERS:
            continue
        places = (path.parent / name, ROOT / "src" / name, ROOT / name, ROOT / "tests" / name)
        target = next((p.resolve() for p in places if p.exists()), None)
        top = target.relative_to(ROOT).parts[0] if target else None
        if top is None:
            report(path, number, f'includes "{name}", which is nowhere in the tree')
        elif top not in {folder, "src"} | AROUND[folder]:
            report(path, number, f'{folder}/ includes "{name}" of {top}/')


def tree_files():
    for top in sorted(ROOT.iterdir()):
        if top.name.startswith((".", "build")):
            continue
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def main():
    count = 0
    for path in tree_files():
        relative = path.relative_to(ROOT)
        for part in relative.parts:
            if VAGUE_NAME.search(part.lower()):
                report(path, 0, f"'{part}' says nothing about what is inside")
        if path.suffix not in SOURCE and path.name != "CMakeLists.txt":
            continue
        count += 1
        lines = path.read_text().count("\n")
        if lines > MAX_LINES:
            report(path, 0, f"{lines} lines, more than {MAX_LINES}")
        if path.suffix in CXX and relative.parts[0] in ("include", "examples"):
            check_public(path)
        if path.suffix in CXX and relative.parts[0] == "src":
            check_library(path)
        if path.suffix in CXX and relative.parts[0] in AROUND:
            check_around(path)
    if not count:
        problems.append(f"no source files found below {ROOT}")
    for problem in problems:
        print(problem)
    print(f"{count} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
