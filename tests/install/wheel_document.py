#!/usr/bin/env python3
"""Follows docs/python.md on a built wheel, in an active virtual environment.

    tests/install/wheel_document.py PYTHON WHEELS      of the environment; the folder that tools/build_wheel filled

Runs every line of the text's block except the first, which builds the wheel. kv4 is then installed.
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tutorial"))
from run_tutorial import reader  # noqa: E402


def main():
    python, wheels = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    text = (ROOT / "docs" / "python.md").read_text()
    first, *commands = re.search(r"^```\n(tools/build_wheel wheels.*?)^```$", text, re.S | re.M)[1].splitlines()
    assert len(commands) >= 3, first
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "kv4"], check=True)
    with tempfile.TemporaryDirectory() as temp:
        (Path(temp) / "wheels").symlink_to(wheels)
        for command in commands:
            print(f"$ {command}", flush=True)
            subprocess.run(["bash", "-euc", command], cwd=temp, env=reader(temp, python.parent), check=True, stdin=subprocess.DEVNULL)
    subprocess.run([python, "-c", "import kv4, sys; sys.exit('site-packages' not in kv4.__file__)"], check=True, cwd=wheels)


if __name__ == "__main__":
    main()
