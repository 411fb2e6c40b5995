#!/usr/bin/env python3
"""Does what a tutorial says: writes its files, runs its commands, looks for its output.

    tests/tutorial/run_tutorial.py BUILD_DIR docs/tutorial/FILE.md...

Fenced blocks of a tutorial: ```LANGUAGE FILE``` is a piece of FILE, ```sh``` is run, and every line of ```output``` stands in
what that printed. The reader has installed kv4 to ~/kv4, and no variable is set that the text does not set. A tutorial with a
file below src/ runs in a copy of the tree, others in an empty folder. `python` is KV4_PYTHON where that is set.
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


def reader(home, *tools):
    """The environment of somebody who has just logged in."""
    return {"HOME": str(home), "LANG": "C.UTF-8", "PATH": ":".join([*map(str, tools), "/usr/local/bin:/usr/bin:/bin"])}


def run_tutorial(tutorial, build, home):
    """In the home of a reader who has kv4 in ~/kv4 and this build of it."""
    blocks = BLOCK.findall(tutorial.read_text())
    python = os.environ.get("KV4_PYTHON")
    environment = reader(home, *([Path(python).parent] if python else []))
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp) / "tutorial"
        folder.mkdir()
        if any(name.startswith("src/") for _, name, _ in blocks):
            for part in ("include", "src"):
                shutil.copytree(ROOT / part, folder / part)
            (folder / "build").symlink_to(build)
        printed = ""
        for language, name, text in blocks:
            if name:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(text)
            elif language == "sh":
                done = subprocess.run(["bash", "-euc", text], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
                printed += done.stdout
                if done.returncode != 0:
                    raise SystemExit(f"{tutorial.name}: exit code {done.returncode} of\n{text}\n{done.stdout[-3000:]}")
            elif language == "output":
                for line in text.splitlines():
                    if line not in printed:
                        raise SystemExit(f"{tutorial.name}: '{line}' was not printed, but\n{printed}")
            else:
                raise SystemExit(f"{tutorial.name}: a block of '{language}' without a file's name; nobody tries it")
        if not printed:
            raise SystemExit(f"{tutorial.name} runs nothing")
        print(f"{tutorial.name}: {printed.strip().splitlines()[-1]}")


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    build = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as home:
        subprocess.run(["cmake", "--install", build, "--prefix", f"{home}/kv4"], check=True, stdout=subprocess.DEVNULL)
        for tutorial in sys.argv[2:]:
            run_tutorial(Path(tutorial), build, home)


if __name__ == "__main__":
    main()
