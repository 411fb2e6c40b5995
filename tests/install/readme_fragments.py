#!/usr/bin/env python3
"""Compiles the parts of programs that README shows, beside its first program, which build_consumer.sh runs.

    tests/install/readme_fragments.py COMPILER FLAG...       syntax only

The names that a part uses from its surroundings are declared here. A line that begins with `...` is omitted code.
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
#: In the order of the text: the code before main(), and the parameters of the function around the part.
SURROUNDINGS = [
    ('#include "kv4/kv_cache_manager.h"', "kv4::CacheOptions options, void* stream, kv4::Expected<kv4::Step> step"),
    ("", "kv4::KVCacheManager& cache, const kv4::Prompt& prompt, kv4::tier::Deadline deadline"),
    ("#include <string>\nvoid make_room(kv4::Shortage);",
     "kv4::KVCacheManager& cache, kv4::RequestId request, std::string tenant_name"),
]


def main():
    _, *parts = re.findall(r"^```cpp\n(.*?)^```$", README.read_text(), re.S | re.M)
    if len(parts) != len(SURROUNDINGS):
        sys.exit(f"README has {len(parts)} parts of programs in C++, and {len(SURROUNDINGS)} have surroundings here")
    for number, (part, (before, parameters)) in enumerate(zip(parts, SURROUNDINGS), start=2):
        lines = [line for line in part.splitlines() if not line.startswith("...")]
        includes = [line for line in lines if line.startswith("#")]
        body = [line for line in lines if not line.startswith("#")]
        with tempfile.NamedTemporaryFile("w", suffix=f"_readme_{number}.cc") as source:
            source.write("\n".join([*includes, before, f"void shown({parameters}) {{", *body, "}", ""]))
            source.flush()
            if subprocess.run([*sys.argv[1:], "-fsyntax-only", source.name]).returncode != 0:
                sys.exit(f"README's block {number} in C++ does not compile:\n{part}")


if __name__ == "__main__":
    main()
