#!/usr/bin/env python3
"""Follows README word for word in a fresh copy of the tree and a fresh login environment; then the tutorials.

    tests/install/first_day.py

Every ```sh``` block of README except ./test is run in the order of the text. README's first program is engine.cc, and
its lines of CMake are the project that builds it. README's command installs the Python module, without CUDA. README's
lines of Python are run with it in the environment that docs/python.md activates.
"""
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tutorial"))
from run_tutorial import reader, run_tutorial  # noqa: E402

TIMEOUT_S = 7200  # a build takes three minutes on two idle cores, and ten times as long on busy ones


def copy_tree(to):
    """Copies the files of a clone: no builds and no ignored files."""
    to.mkdir()
    files = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                           stdout=subprocess.PIPE).stdout
    there = b"\0".join(name for name in files.split(b"\0") if name and (ROOT / name.decode()).exists())
    pack = subprocess.run(["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=there, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x"], cwd=to, input=pack, check=True)


def block(text, language):
    return re.search(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)[1]


class FirstDay:
    def __init__(self, home):
        self.home, self.tree, self.environment = home, home / "src", reader(home)
        copy_tree(self.tree)
        self.readme = (self.tree / "README.md").read_text()

    def do(self, command, **more):
        print(f"$ {command}", flush=True)
        begun = time.monotonic()
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=self.tree, env={**self.environment, **more},
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S)
        print(f"  {time.monotonic() - begun:.0f} s", flush=True)
        if done.returncode != 0:
            raise SystemExit(f"exit code {done.returncode} of\n{command}\n{done.stdout[-4000:]}")
        return done.stdout

    def readme_commands(self):
        (self.tree / "engine.cc").write_text(block(self.readme, "cpp"))
        blocks = re.findall(r"^```sh\n(.*?)^```$", self.readme, re.S | re.M)
        assert len(blocks) >= 3, "README has lost its commands"
        for text in blocks:
            lines = [line for line in text.splitlines() if not line.startswith("./test")]
            printed = self.do("\n".join(lines))
            if lines[0].startswith("./run"):
                self.after_run(printed)

    def after_run(self, printed):
        assert (self.tree / "build/kv4").exists(), printed
        folder = lambda cuda: self.do("tools/build_preset --folder release", **({"KV4_CUDA": cuda} if cuda else {})).strip()
        if "building without CUDA" in printed:
            assert "KV4_CUDA=ON ./run" in printed, printed
            compiled = [path.name for path in (self.tree / "build").rglob("*.cu.o")]
            assert not compiled, f"a build without CUDA compiled GPU kernels, most of a build: {compiled[:5]}"
            assert [folder(cuda) for cuda in ("", "OFF", "ON", "AUTO")] == ["build", "build", "build-cuda", "build-cuda"]
        else:
            assert [folder(cuda) for cuda in ("", "OFF", "ON", "AUTO")] == ["build", "build-cpu", "build", "build"]

    def cmake_project(self):
        project = self.home / "project"
        project.mkdir()
        (project / "engine.cc").write_text(block(self.readme, "cpp"))
        find, link = block(self.readme, "cmake").splitlines()
        (project / "CMakeLists.txt").write_text(
            f"cmake_minimum_required(VERSION 3.25)\nproject(engine CXX)\n{find}\nadd_executable(engine engine.cc)\n{link}\n")
        flag = re.search(r"# with (\S+)", find)[1]
        self.do(f"cmake -S ~/project -B ~/project/build {flag} && cmake --build ~/project/build && ~/project/build/engine")

    def python_module(self):
        install = re.search(r"for Python:\s`([^`]+)`", self.readme)[1]
        activate, *commands = [line.split("  ")[0] for line in block((self.tree / "docs/python.md").read_text(), "").splitlines()]
        assert commands == ["pip install .", "KV4_CUDA=OFF pip install ."], commands
        folder = re.search(r"-m venv (\S+)", activate)[1]
        assert install == f"python3 -m venv {folder} && {folder}/bin/{commands[0]}", install
        assert f"`{commands[0]}`" in (self.tree / "docs/tutorial/3-torch-decode-loop.md").read_text()
        self.do(activate)
        try:
            self.do(f"{folder}/bin/pip download --quiet --no-deps --dest ~/pip nanobind numpy")
        except SystemExit as told:
            print(f"  not installed, since there is no way to PyPI: {told}")
            return
        self.do(install, KV4_CUDA="OFF")  # which is the guide's last line, too
        (self.home / "example.py").write_text(block(self.readme, "python"))
        self.do(f"{activate}\ncd && python example.py && kv4 --version")

    def tutorials(self):
        for tutorial in sorted((self.tree / "docs/tutorial").glob("*.md")):
            if "torch" not in tutorial.name:  # with the wheel
                run_tutorial(tutorial, self.tree / "build", self.home)


def main():
    with tempfile.TemporaryDirectory() as home:
        day = FirstDay(Path(home))
        day.readme_commands()
        day.cmake_project()
        day.python_module()
        day.tutorials()


if __name__ == "__main__":
    main()
