"""The tool as tests call it, and a runner of tests that counts them."""
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KV4 = os.environ.get("KV4", str(ROOT / "build" / "kv4"))


class Skipped(Exception):
    """A requirement of a test is missing."""


def kv4(*args, timeout=300):
    return subprocess.run([KV4, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)


def ok(*args):
    done = kv4(*args)
    assert done.returncode == 0, f"kv4 {' '.join(args)}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


def ok_json(*args):
    return json.loads(ok(*args, "--json").stdout)


def refused(args, *parts):
    """Exit 2, nothing on stdout, one line on stderr that names what matters, beside log events; all is returned."""
    done = kv4(*args)
    assert done.returncode == 2, f"kv4 {' '.join(args)}: exit {done.returncode}, expected 2\n{done.stderr}"
    assert done.stdout == "", f"stdout: {done.stdout[:200]}"
    said = [line for line in done.stderr.splitlines() if not re.match(r"(warning|error): [a-z]+\.[a-z_]+: ", line)]
    assert len(said) == 1 and said[0].startswith("error: "), done.stderr
    for part in parts:
        assert part in done.stderr, f"'{part}' is missing in: {done.stderr}"
    return done.stderr


def equal(got, expected):
    assert got == expected, f"{got!r}, expected {expected!r}"


def parse_metrics(text):
    """Names with labels to values; every family has its help and type before it."""
    values, families = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            families.add(line.split()[2])
        elif not line.startswith("# HELP "):
            assert re.fullmatch(r'[a-z0-9_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? \d+(\.\d+)?(e-\d+)?', line), line
            name, value = line.rsplit(" ", 1)
            assert {name.split("{")[0], re.sub("_(bucket|sum|count)$", "", name.split("{")[0])} & families, line
            assert name not in values, line
            values[name] = float(value)
    return values


def run_tests(tests):
    """All functions test_* of a module, or those whose name contains the argument. The last line counts them."""
    if not os.access(KV4, os.X_OK):
        print(f"there is no tool at {KV4}; build it, or set KV4")
        print("0 passed, 1 failed")
        return 1
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    passed = failed = skipped = 0
    for name, test in list(tests.items()):
        if not name.startswith("test_") or wanted not in name:
            continue
        started = time.time()
        try:
            test()
        except Skipped as reason:
            skipped += 1
            print(f"skipped {name}: {reason}", flush=True)
        except Exception as error:  # any error: the other tests still run
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
        else:
            passed += 1
            print(f"ok      {name} ({time.time() - started:.1f} s)", flush=True)
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0
