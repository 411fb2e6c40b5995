#!/usr/bin/env python3
"""Does what a tutorial says: writes its files, applies its diffs, runs its commands, looks for its output.

    tests/tutorial/run_tutorial.py BUILD_DIR docs/tutorial/FILE.md...

Fenced blocks of a tutorial: ```LANGUAGE FILE``` is a piece of FILE, ```diff``` changes files of the tree, ```sh``` is run, and every
line of ```output``` stands in what that printed. A tutorial with a diff or a file below src/ runs in a copy of the tree,
others in an empty folder with an installed kv4. `python` is KV4_PYTHON where that is set.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)(?: +(\S+))?\n(.*?)^```$", re.S | re.M)


def change(folder, diff):
    """Applies hunks without line numbers: ' ' and '-' lines are found one after the other, '+' lines go in there."""
    path, hunks = None, []
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            path = folder / line[6:]
        elif line.startswith("@@"):
            hunks.append((path, []))
        elif line and not line.startswith("--- "):
            hunks[-1][1].append(line)
    for path, lines in hunks:
        before = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
        after = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
        text = path.read_text()
        if text.count(before) != 1:
            raise SystemExit(f"{path.relative_to(folder)} has {text.count(before)} places like:\n{before}")
        path.write_text(text.replace(before, after))


def run(tutorial, build, prefix):
    blocks = BLOCK.findall(tutorial.read_text())
    inside = any(language == "diff" or name.startswith("src/") for language, name, _ in blocks)
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp) / "tutorial"
        if inside:
            folder.mkdir()
            for part in ("include", "src"):
                shutil.copytree(ROOT / part, folder / part)
            shutil.copytree(build / "include", folder / "include", dirs_exist_ok=True)  # version.h
        else:
            folder.mkdir()
        library = next(prefix.rglob("libkv4.so")).parent
        tools = [str(prefix / "bin")] + [str(Path(python).parent) for python in [os.environ.get("KV4_PYTHON")] if python]
        environment = dict(os.environ, PKG_CONFIG_PATH=str(library / "pkgconfig"), LD_LIBRARY_PATH=str(library),
                           PATH=":".join(tools + [os.environ["PATH"]]))
        printed = ""
        for language, name, text in blocks:
            if name:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(text)
            elif language == "diff":
                change(folder, text)
            elif language == "sh":
                done = subprocess.run(["bash", "-euc", text], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True, timeout=600)
                printed += done.stdout
                if done.returncode != 0:
                    raise SystemExit(f"{tutorial.name}: exit code {done.returncode} of\n{text}\n{done.stdout[-3000:]}")
            elif language == "output":
                for line in text.splitlines():
                    if line not in printed:
                        raise SystemExit(f"{tutorial.name}: '{line}' was not printed, but\n{printed}")
        if not printed:
            raise SystemExit(f"{tutorial.name} runs nothing")
        print(f"{tutorial.name}: {printed.strip().splitlines()[-1]}")


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    build = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as temp:
        prefix = Path(temp) / "kv4"
        subprocess.run(["cmake", "--install", build, "--prefix", prefix], check=True, stdout=subprocess.DEVNULL)
        for tutorial in sys.argv[2:]:
            run(Path(tutorial), build, prefix)


if __name__ == "__main__":
    main()
