#!/usr/bin/env python3
"""./run's decision about CUDA without a driver, with a simulated build. Last line: `N passed, N failed`."""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cli"))
from tool import Skipped, equal, run_tests  # noqa: E402

BUILD_PRESET = """#!/bin/bash
if [[ $1 == --folder ]]; then echo build; else echo "KV4_CUDA=${KV4_CUDA:-}" >>asked; fi
"""


def run(configured=None, **environment):
    """./run's output and its KV4_CUDA, in a tree whose build was configured with this KV4_CUDA (none: no build)."""
    if any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/dxg")):
        raise Skipped("there is a driver")
    with tempfile.TemporaryDirectory() as tree:
        tree = Path(tree)
        for name in ("tools", "build", "bin"):
            (tree / name).mkdir()
        shutil.copy(ROOT / "run", tree / "run")
        for name, text in (("tools/install_dependencies", "#!/bin/bash\n"), ("tools/build_preset", BUILD_PRESET), ("build/kv4", "#!/bin/bash\n"),
                           ("bin/nvidia-smi", "#!/bin/bash\nexit 1\n")):
            (tree / name).write_text(text)
            (tree / name).chmod(0o755)
        if configured is not None:
            (tree / "build/CMakeCache.txt").write_text(f"CMAKE_BUILD_TYPE:STRING=Release\nKV4_CUDA:STRING={configured}\n")
        kept = {name: value for name, value in os.environ.items() if name != "KV4_CUDA"}
        done = subprocess.run([tree / "run"], env={**kept, "PATH": f"{tree}/bin:/usr/bin:/bin", **environment}, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True)
        equal((done.returncode, done.stderr), (0, ""))
        return done.stdout, (tree / "asked").read_text().strip()


def test_each_build_without_cuda_says_so():
    """Not only the first."""
    for configured in (None, "OFF"):
        printed, asked = run(configured)
        assert "building without CUDA" in printed and "KV4_CUDA=ON ./run" in printed, (configured, printed)
        equal((configured, asked), (configured, "KV4_CUDA=OFF"))


def test_a_build_with_cuda_stays_one():
    for configured in ("ON", "AUTO"):
        equal((configured, *run(configured)), (configured, "", "KV4_CUDA="))


def test_what_is_asked_for_is_built():
    for wish in ("ON", "OFF", "AUTO"):
        equal((wish, *run("OFF", KV4_CUDA=wish)), (wish, "", f"KV4_CUDA={wish}"))


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
