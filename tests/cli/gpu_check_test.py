#!/usr/bin/env python3
"""tools/gpu_check --racecheck with a simulated compute-sanitizer and test binary: the results that it accepts. Also its
Python tests, with a simulated Python.

Needs no GPU. Ends with `N passed, N failed`.
"""
import os
import re
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTS = (ROOT / "tests/parity/racecheck.h").read_text()
KERNELS = re.findall(r'"(\w+)"', "".join(re.findall(r"kRacecheck[A-Z]\w*\[\] = \{.*?\};", LISTS, re.S)))

BINARY = r"""#!/bin/bash
case "$*" in
  *--gtest_list_tests*RacecheckBuild*) printf 'RacecheckBuild.\n  %s\n' "$PRETEND_BUILD" ;;
  *--gtest_list_tests*) printf 'RacecheckBuild.\n  X\nRacecheckList.\n  Y\nRacecheckAttend.\n  Runs/a  # GetParam() = a\n  Runs/b\n' ;;
  *Runs/a*) echo "kernels: $PRETEND_KERNELS"; echo "[  PASSED  ] 1 test." ;;
  *) echo "kernels: attend_split_kv<1, false>"; [[ -n "$PRETEND_SLOW" ]] && sleep 30; echo "[  PASSED  ] 1 test." ;;
esac
"""
SANITIZER = r"""#!/bin/bash
echo "$*" >>"$PRETEND_LOG"
while [[ "$1" != */kv4_tests ]]; do shift; done
"$@"
[[ "$*" == *Runs/b* && -n "$PRETEND_REPORT" ]] && echo "========= $PRETEND_REPORT"
echo "========= RACECHECK SUMMARY: ${PRETEND_SUMMARY:-0 hazards displayed (0 errors, 0 warnings)}"
"""


class GpuCheckRacecheck(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name)
        for name, text in (("build/tests/kv4_tests", BINARY), ("bin/compute-sanitizer", SANITIZER)):
            file = self.path / name
            file.parent.mkdir(parents=True)
            file.write_text(text)
            file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def run_it(self, **pretend):
        environment = dict(os.environ, PATH=f"{self.path}/bin:{os.environ['PATH']}", OUT=str(self.path / "out"),
                           PRETEND_LOG=str(self.path / "log"), PRETEND_BUILD="EachThreadArrivesForItself",
                           PRETEND_KERNELS="; ".join(name + "<1>" for name in KERNELS), PRETEND_SLOW="",
                           PRETEND_REPORT="", PRETEND_SUMMARY="")
        for name in ("KV4_RACECHECK_TESTS", "KV4_RACECHECK_JOBS", "KV4_RACECHECK_SECONDS"):
            environment.pop(name, None)
        environment.update(pretend)
        return subprocess.run([ROOT / "tools/gpu_check", "--racecheck", self.path / "build"], env=environment,
                              capture_output=True, text=True, timeout=60)

    def test_clean_runs_of_every_kernel_pass(self):
        result = self.run_it()
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        table = result.stdout[result.stdout.rindex("\npart "):]
        for word in ("RacecheckAttend.Runs/a", "RacecheckAttend.Runs/b", "attend_split_kv<1, false>", "3 passed, 0 failed"):
            self.assertIn(word, table)
        self.assertNotIn("RacecheckList", table)
        for call in (self.path / "log").read_text().splitlines():
            for flag in ("--tool racecheck", "--racecheck-report all", "--error-exitcode", "--device cuda"):
                self.assertIn(flag, call)

    def test_hazards_and_warnings_are_failures(self):
        for pretend in ({"PRETEND_SUMMARY": "3 hazards displayed (3 errors, 0 warnings)"},
                        {"PRETEND_SUMMARY": "1 hazard displayed (0 errors, 1 warning)"},
                        {"PRETEND_REPORT": "Warning: Detected overflow of tracked cuda::barrier structures."},
                        {"PRETEND_REPORT": "Potential invalid __shared__ read of size 4 bytes"}):
            result = self.run_it(**pretend)
            self.assertEqual(result.returncode, 1, f"{pretend}: {result.stdout}")
            self.assertIn("FAILED", result.stdout)

    def test_a_kernel_that_did_not_run_is_a_failure(self):
        result = self.run_it(PRETEND_KERNELS="; ".join(KERNELS[:-1]))
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn(f"not run: {KERNELS[-1]}", result.stdout)

    def test_a_test_that_does_not_end_is_a_failure(self):
        result = self.run_it(PRETEND_SLOW="1", KV4_RACECHECK_SECONDS="1")
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("stopped", result.stdout)

    def test_an_ordinary_build_is_refused(self):
        result = self.run_it(PRETEND_BUILD="OneThreadArrivesForItsWarp")
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertIn("-DKV4_RACECHECK=ON", result.stderr)


BENCH = ROOT / "build" / "kv4_gpu_bench"


@unittest.skipUnless(BENCH.exists(), "no kv4_gpu_bench: a build without CUDA")
class GpuBench(unittest.TestCase):
    def run_it(self, *arguments):
        return subprocess.run([BENCH, *arguments], capture_output=True, text=True, timeout=60,
                              env=dict(os.environ, CUDA_VISIBLE_DEVICES=""))

    def test_groups_are_listed_without_a_gpu(self):
        result = self.run_it("--list")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        groups = [line.split()[0] for line in result.stdout.splitlines()]
        for group in ("index", "index_prefill", "attend", "attend_prefill", "decode_step", "prefill_step"):
            self.assertIn(group, groups)

    def test_without_a_gpu_it_says_why(self):
        result = self.run_it()
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertIn("error: ", result.stderr)

    def test_a_group_that_is_not_there_is_bad_usage(self):
        self.assertEqual(self.run_it("--only", "prefills").returncode, 2)


SLOW = r"""#!/bin/bash
echo "a line" >&2
sleep 30
"""


class GpuCheckLimits(unittest.TestCase):
    def test_a_part_that_does_not_end_is_stopped_and_its_limit_named(self):
        for part, binary, variable in (("tests", "tests/kv4_tests", "KV4_TEST_SECONDS"),
                                       ("bench", "kv4_gpu_bench", "KV4_BENCH_SECONDS")):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "build" / binary
                file.parent.mkdir(parents=True)
                file.write_text(SLOW)
                file.chmod(file.stat().st_mode | stat.S_IXUSR)
                environment = dict(os.environ, OUT=f"{folder}/out", KV4_GPU_PARTS=part) | {variable: "1"}
                result = subprocess.run([ROOT / "tools/gpu_check", f"{folder}/build"], env=environment, capture_output=True,
                                        text=True, timeout=60)
                self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
                self.assertRegex(result.stdout, rf"{part} +stopped +after 1 s \({variable}\)")


PYTHON = r"""#!/bin/bash
echo "$PYTHONPATH $*" >>"$PRETEND_LOG"
case "$1 $2" in
  "-c "*) echo "$PRETEND_WHY"; [[ -z "$PRETEND_WHY" ]] ;;
  *) pwd >>"$PRETEND_LOG"; echo "$PRETEND_LINE"; exit "$PRETEND_CODE" ;;
esac
"""


class GpuCheckPython(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name)
        for name, text in (("build/tests/kv4_tests", BINARY), ("python", PYTHON)):
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def run_it(self, **pretend):
        (self.path / "log").write_text("")
        environment = dict(os.environ, OUT=str(self.path / "out"), KV4_GPU_PARTS="python", KV4_PYTHON=str(self.path / "python"),
                           PRETEND_LOG=str(self.path / "log"), PRETEND_WHY="", PRETEND_CODE="0", PRETEND_LINE="9 passed, 0 failed, 1 skipped")
        environment.pop("PYTHONPATH", None)
        environment.update(pretend)
        result = subprocess.run([ROOT / "tools/gpu_check", self.path / "build"], env=environment, capture_output=True, text=True, timeout=60)
        return result.returncode, re.search(r"^python  .*$", result.stdout, re.M)[0], (self.path / "log").read_text()

    def test_a_build_without_a_module_is_missing(self):
        code, line, log = self.run_it()
        self.assertEqual((code, log), (2, ""))
        self.assertIn("missing", line)

    def test_the_module_of_the_build_and_that_of_a_wheel(self):
        for module, tree in ((self.path / "build/python", ROOT), (self.path / "build/wheel/site", self.path / "build/wheel")):
            module.mkdir(parents=True)
            code, line, log = self.run_it()
            self.assertEqual(code, 0, line)
            self.assertRegex(line, r"passed +9 passed, 0 failed, 1 skipped")
            self.assertIn(f"{module} -m pytest", log)
            self.assertEqual(log.splitlines()[-1], str(tree))

    def test_what_python_says_is_shown(self):
        (self.path / "build/python").mkdir()
        code, line, _ = self.run_it(PRETEND_WHY="No module named 'torch'")
        self.assertEqual(code, 2)
        self.assertRegex(line, "missing +No module named 'torch'")
        code, line, _ = self.run_it(PRETEND_CODE="1", PRETEND_LINE="8 passed, 1 failed, 1 skipped")
        self.assertEqual(code, 1)
        self.assertRegex(line, "FAILED +8 passed, 1 failed")


if __name__ == "__main__":
    outcome = unittest.main(exit=False).result
    bad = len(outcome.failures) + len(outcome.errors)
    print(f"{outcome.testsRun - bad - len(outcome.skipped)} passed, {bad} failed")
    sys.exit(1 if bad else 0)
