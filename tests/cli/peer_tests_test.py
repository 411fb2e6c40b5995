#!/usr/bin/env python3
"""tools/peer_tests with pretended checkouts of FlashMLA and DeepGEMM and a pretended kv4: what it runs, leaves out,
counts and says. Needs neither torch nor a GPU. Ends with `N passed, N failed`.

    tests/cli/peer_tests_test.py
"""
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "peer_tests"

# Modules with the names that the files import, and files with the shape of theirs. A "kernel" returns its argument.
KV4 = {
    "__init__.py": "class DeviceFailureError(Exception): pass\n",
    "flash_mla.py": """
        from . import DeviceFailureError
        def kernel(x):
            if x == 13: raise ValueError('kv4 refuses 13')
            if x == 99: raise DeviceFailureError('a kernel that was queued before failed')
            return x
        """,
    "deep_gemm.py": """
        import sys, types
        why_no_deep_gemm = ""
        testing = types.ModuleType("deep_gemm.testing")
        testing.bench_kineto = None
        sys.modules["deep_gemm.testing"] = testing
        __path__ = []
        def scores(x):
            return x
        """,
}

FLASH_MLA = {
    "lib.py": """
        import dataclasses
        import flash_mla
        @dataclasses.dataclass
        class TestParam:
            x: int
            d_qk: int = 512
            num_runs: int = 0
        def run(p):
            print(f"their output of {p.x}")
            return flash_mla.kernel(p.x)
        """,
    "test_flash_mla_sparse_decoding.py": """
        import dataclasses, sys
        import lib
        from lib import TestParam
        @dataclasses.dataclass
        class Result:
            is_correct: bool
            time: float
        def gen_testcase():
            return CASES
        def test_flash_mla(p):
            return Result(lib.run(p) % 10 != 7, 1.0)
        def main():
            for p in gen_testcase():
                result = test_flash_mla(p)
                if not result.is_correct:
                    sys.exit(1)
        CASES = [TestParam(1), TestParam(7), TestParam(13), TestParam(2), TestParam(3, d_qk=576),
                 TestParam(4, num_runs=9), TestParam(5)]
        if __name__ == "__main__":
            main()
        """,
    "test_flash_mla_sparse_prefill.py": """
        import sys
        import lib
        from lib import TestParam
        def run_test(p):
            return lib.run(p) != 7
        if __name__ == "__main__":
            failed = [p for p in [TestParam(1), TestParam(2, d_qk=576), TestParam(3)] if not run_test(p)]
            if failed:
                sys.exit(1)
        """,
}

DEEP_GEMM = {
    "generators.py": "def generate_normal(): pass\n",
    "test_attention.py": """
        import deep_gemm
        from deep_gemm.testing import bench_kineto
        from generators import generate_normal
        def sample_mqa_cases(name, cases):
            return cases
        def test_gemm_skip_head_mid():
            raise RuntimeError("a GEMM must not run")
        def test_mqa_logits():
            for heads, count in sample_mqa_cases("prefill", list(enumerate([3, 7, 4]))):
                assert deep_gemm.scores(count) != 7, "their assertion"
                t, clean_t = bench_kineto(lambda: None, ("mqa_logits", "clean_logits"))
                print(1 / t)
        def test_paged_mqa_logits():
            for count, in sample_mqa_cases("paged", [(1,), (2,)]):
                assert deep_gemm.scores(count) == count
                print(1 / bench_kineto(lambda: None, "paged"))
        if __name__ == "__main__":
            test_gemm_skip_head_mid()
            test_mqa_logits()
            test_paged_mqa_logits()
        """,
}


class PeerTests(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.write("modules/kv4", KV4)

    def write(self, at, files):
        (self.folder / at).mkdir(parents=True)
        for name, text in files.items():
            (self.folder / at / name).write_text(textwrap.dedent(text))
        return self.folder / at

    def run_tool(self, *arguments):
        report = self.folder / "report.json"
        done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments), "--json-file", str(report)],
                              capture_output=True, text=True, timeout=120,
                              env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1",
                                   "PYTHONPATH": str(self.folder / "modules")})
        reports = {r["name"]: r for r in json.loads(report.read_text())} if report.exists() else {}
        return done, reports

    def flash_mla(self, files=FLASH_MLA):
        return self.write("FlashMLA/tests", files).parent

    def test_flash_mla(self):
        done, reports = self.run_tool("--flash-mla", self.flash_mla(), "--anyway")
        decode, prefill = reports["flash_mla_decode"], reports["flash_mla_prefill"]
        self.assertEqual(decode["passed"], 3)
        self.assertEqual([case.partition(",")[0] for case, _ in decode["failures"]],
                         ["TestParam(x=7", "TestParam(x=13"])
        self.assertIn("not correct\ntheir output of 7", decode["failures"][0][1])
        self.assertIn("kv4 refuses 13", decode["failures"][1][1])
        self.assertEqual(sorted(decode["skipped"].values()), [1, 1])
        self.assertTrue(any("d_qk 576" in reason for reason in decode["skipped"]))
        self.assertTrue(any("timed" in reason for reason in decode["skipped"]))
        self.assertEqual((prefill["passed"], prefill["failures"], sum(prefill["skipped"].values())), (2, [], 1))
        self.assertEqual(done.returncode, 1)
        self.assertTrue(done.stdout.endswith("5 passed, 2 failed, 3 skipped\n"), done.stdout)
        self.assertNotIn("their output of 1\n", done.stdout)

    def test_deep_gemm(self):
        checkout = self.write("DeepGEMM/tests", DEEP_GEMM).parent
        done, reports = self.run_tool("--deep-gemm", checkout, "--anyway")
        report = reports["deep_gemm"]
        self.assertEqual(report["passed"], 4)
        self.assertEqual([case for case, _ in report["failures"]], ["test_mqa_logits (1, 7)"])
        self.assertIn("their assertion", report["failures"][0][1])
        self.assertEqual(report["skipped"], {"a GEMM, which kv4 leaves to DeepGEMM": 1})
        self.assertEqual(done.returncode, 1)

    def test_a_run_without_failures(self):
        files = {**FLASH_MLA}
        files["test_flash_mla_sparse_decoding.py"] = files["test_flash_mla_sparse_decoding.py"].replace(
            "TestParam(7), TestParam(13),", "")
        done, reports = self.run_tool("--flash-mla", self.flash_mla(files), "--anyway", "--every", "2", "--show")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(reports["flash_mla_decode"]["passed"], 2)
        self.assertIn("one case in 2 runs (--every)", reports["flash_mla_decode"]["skipped"])
        self.assertIn("their output of 1\n", done.stdout)

    def test_a_lost_gpu_ends_a_file(self):
        files = {**FLASH_MLA}
        files["test_flash_mla_sparse_decoding.py"] = files["test_flash_mla_sparse_decoding.py"].replace(
            "TestParam(7)", "TestParam(99)")
        done, reports = self.run_tool("--flash-mla", self.flash_mla(files), "--anyway")
        decode = reports["flash_mla_decode"]
        self.assertEqual((decode["passed"], len(decode["failures"])), (1, 1))
        self.assertIn("the GPU is lost", decode["unusable"])
        self.assertEqual(reports["flash_mla_prefill"]["passed"], 2)
        self.assertEqual(done.returncode, 1)

    def test_files_that_cannot_run(self):
        (self.folder / "empty").mkdir()
        done, reports = self.run_tool("--flash-mla", self.folder / "empty", "--anyway")
        self.assertEqual(done.returncode, 1)
        self.assertIn("give a checkout", reports["flash_mla_decode"]["unusable"])
        files = {**FLASH_MLA, "lib.py": "import rich_that_is_not_here\n"}
        done, reports = self.run_tool("--flash-mla", self.flash_mla(files), "--anyway")
        self.assertIn("needs rich_that_is_not_here", reports["flash_mla_decode"]["unusable"])
        self.assertTrue(done.stdout.endswith("0 passed, 2 failed, 0 skipped\n"), done.stdout)
        (self.folder / "modules/kv4/deep_gemm.py").write_text("why_no_deep_gemm = 'ImportError: no _C'\n")
        checkout = self.write("DeepGEMM/tests", DEEP_GEMM).parent
        done, reports = self.run_tool("--deep-gemm", checkout, "--anyway")
        self.assertIn("install deep_gemm (ImportError: no _C)", reports["deep_gemm"]["unusable"])

    def test_bad_usage(self):
        for arguments, words in [((), "give --flash-mla DIR or --deep-gemm DIR"),
                                 (("--flash-mla", "x", "--only", "nothing"), "there is no file 'nothing'"),
                                 (("--flash-mla", "x", "--every", "0"), "--every is 0")]:
            done, _ = self.run_tool(*arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn(words, done.stderr)

    def test_it_wants_a_gpu(self):
        (self.folder / "modules/kv4/__init__.py").write_text("why_no_cuda = lambda: 'no GPU here'\n")
        (self.folder / "modules/torch.py").write_text("")
        done, _ = self.run_tool("--flash-mla", self.flash_mla())
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("peer_tests: no GPU here", done.stderr)


if __name__ == "__main__":
    result = unittest.main(exit=False, verbosity=0).result
    failed = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)
