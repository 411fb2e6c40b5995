#!/usr/bin/env python3
"""The packages that tools/install_dependencies installs, with simulated dpkg and apt.

Last line: `N passed, N failed`.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cli"))
from tool import equal, run_tests  # noqa: E402

# State and name of installed packages, as dpkg-query prints them; all other tools fail.
DPKG_QUERY = """#!/bin/bash
cat "$INSTALLED"
"""
APT_GET = """#!/bin/bash
echo "$*" >>"$ASKED"
"""


def asked(group, *installed):
    """The packages and flags of the call of apt-get; none and none without a call."""
    with tempfile.TemporaryDirectory() as temp:
        temp = Path(temp)
        (temp / "bin").mkdir()
        tools = {"dpkg-query": DPKG_QUERY, "apt-get": APT_GET, "dpkg": "#!/bin/bash\n", "sudo": "#!/bin/bash\n[[ $1 == -n ]] && shift\n\"$@\"\n"}
        for name in ("g++", "cmake", "ninja", "pkg-config", "python3", "clang++-14", "redis-server", "chromium", "zsh", "fish", "dpkg-shlibdeps"):
            tools[name] = "#!/bin/bash\nexit 1\n"
        for name, text in tools.items():
            (temp / "bin" / name).write_text(text)
            (temp / "bin" / name).chmod(0o755)
        (temp / "installed").write_text("".join(line + "\n" for line in installed))
        (temp / "asked").write_text("")
        environment = {**os.environ, "PATH": f"{temp}/bin:/usr/bin:/bin", "INSTALLED": f"{temp}/installed", "ASKED": f"{temp}/asked"}
        environment.pop("KV4_NO_INSTALL", None)
        done = subprocess.run([ROOT / "tools/install_dependencies", group], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        equal(done.returncode, 0)
        calls = [line.split(" install ")[1].split() for line in (temp / "asked").read_text().splitlines() if " install " in line]
        words = calls[0] if calls else []
        return {w for w in words if not w.startswith("-")}, {w for w in words if w.startswith("-")}


def test_run_asks_for_what_it_builds_with():
    """Asks neither for packages of tests nor for upgrades of installed ones."""
    packages, flags = asked("run")
    assert {"g++", "cmake", "libhwy-dev", "libfmt-dev", "libcli11-dev"} <= packages, packages
    assert not packages & {"libgtest-dev", "python3", "python3-dev", "redis-server", "clang-14", "chromium"}, packages
    equal(flags, {"--no-install-recommends", "--no-upgrade"})


def test_groups_contain_each_other():
    run, test, everything = (asked(group)[0] for group in ("run", "test", "all"))
    assert run < test < everything


def test_what_is_there_is_left_alone():
    """Also accepts packages that the user holds back or has marked for removal."""
    packages, _ = asked("run", "ii libhwy-dev", "hi libfmt-dev", "ri libssl-dev", "rc zlib1g-dev")
    assert not packages & {"libhwy-dev", "libfmt-dev", "libssl-dev"}, packages
    assert "zlib1g-dev" in packages, packages  # removed, only its configuration is left


def test_no_call_when_nothing_is_missing():
    packages, _ = asked("run")
    equal(asked("run", *(f"ii {name}" for name in packages)), (set(), set()))


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
