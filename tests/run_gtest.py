#!/usr/bin/env python3
"""Runs a GoogleTest binary in parallel shards and ends with `N passed, N failed, N skipped`.

A shard that crashes, hangs or leaves no result counts as a failure, and so does a filter that matches nothing.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class Shard:
    def __init__(self):
        self.passed, self.failed, self.skipped = 0, 0, 0
        self.times = []  # (seconds, name)
        self.notes = []  # what to show


def show_failures(log, names, shard):
    for name in names:
        start = log.find(f"[ RUN      ] {name}\n")
        end = log.find(f"[  FAILED  ] {name}", start)
        text = log[start:log.find("\n", end)] if start >= 0 and end >= 0 else f"[  FAILED  ] {name}"
        shard.notes.append(text[:8000])


def run_shard(options, index, folder):
    result_path, log_path = folder / f"{index}.json", folder / f"{index}.log"
    environment = dict(os.environ, GTEST_TOTAL_SHARDS=str(options.shards), GTEST_SHARD_INDEX=str(index))
    command = [*options.wrap.split(), options.binary, f"--gtest_filter={options.filter}",
               f"--gtest_output=json:{result_path}", "--gtest_color=no",
               f"--device={options.device}"]
    shard = Shard()
    with open(log_path, "wb") as log_file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    log = log_path.read_text(errors="replace")
    try:
        result = json.loads(result_path.read_text())
    except (OSError, ValueError):
        result = None

    if result is None:  # it never reached its end
        shard.passed = len(re.findall(r"^\[       OK \]", log, re.M))
        shard.skipped = len(re.findall(r"^\[  SKIPPED \]", log, re.M))
        failed = re.findall(r"^\[  FAILED  \] (\S+)", log, re.M)
        shard.failed = len(failed) + 1
        show_failures(log, failed, shard)
        running = re.findall(r"^\[ RUN      \] (.*)", log, re.M)
        how = f"did not end within {options.timeout} s" if code is None else f"ended with {code}"
        tail = "\n".join(log.splitlines()[-60:])
        shard.notes.append(f"{tail}\n{options.binary} {how}" + (f" in {running[-1]}" if running else " before the first test"))
        return shard

    failed = []
    for suite in result["testsuites"]:
        for case in suite["testsuite"]:
            name = f"{case['classname']}.{case['name']}"
            if case.get("failures"):
                failed.append(name)
            elif case["result"] == "SKIPPED":
                shard.skipped += 1
                reason = re.search(re.escape(f"[ RUN      ] {name}") + r"\n(.*?)\[  SKIPPED \]", log, re.S)
                shard.notes.append(f"skipped {name}: " + " ".join((reason.group(1) if reason else "").split())[-300:])
            elif case["result"] == "COMPLETED":
                shard.passed += 1
            shard.times.append((float(case["time"].rstrip("s")), name))
    shard.failed = len(failed)
    show_failures(log, failed, shard)
    if code != 0 and not failed:  # a sanitizer's report at exit, for example
        shard.failed = 1
        shard.notes.append("\n".join(log.splitlines()[-60:]) + f"\n{options.binary} ended with {code} although no test failed")
    return shard


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("--filter", default="*")
    parser.add_argument("--wrap", default="", help="a command to run the binary under")
    parser.add_argument("--device", default="cpu", choices=["cpu", "far", "cuda"], help="what the tests run on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=int, default=900, help="seconds for a shard")
    options = parser.parse_args()
    options.binary = str(Path(options.binary).resolve())
    options.shards = 4 * options.jobs

    if not Path(options.binary).exists():
        print(f"{options.binary} does not exist")
        print("0 passed, 1 failed, 0 skipped")
        return 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        shards = list(pool.map(lambda i: run_shard(options, i, Path(folder)), range(options.shards)))

    for note in (note for shard in shards for note in shard.notes):
        print(note, flush=True)
    passed, failed, skipped = (sum(getattr(s, field) for s in shards) for field in ("passed", "failed", "skipped"))
    if passed + failed + skipped == 0:
        print(f"no test matches {options.filter}")
        failed = 1
    slowest = sorted((time for shard in shards for time in shard.times), reverse=True)[:5]
    print("slowest: " + ", ".join(f"{name} {seconds:.1f} s" for seconds, name in slowest))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
