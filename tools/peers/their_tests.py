"""Test files of other projects, run unchanged with kv4's modules in place of theirs.

A file is compiled as it is and runs in two halves: its definitions, then its `if __name__ == "__main__":` block.
Between the halves the function that runs one case is replaced by one that counts: it leaves out cases, calls theirs for
all others, and goes on after a failure, where their own loop may end the process.
"""
import ast
import contextlib
import dataclasses
import io
import os
import random
import sys
import traceback
from collections import Counter
from pathlib import Path

MOST_OUTPUT = 3000  # characters of a failed case's own output that are shown
MOST_FAILURES = 20  # failed cases that are shown


class Unusable(Exception):
    """The file cannot be run here, and why."""


@dataclasses.dataclass
class Report:
    """The outcome of a file's cases."""

    name: str
    every: int = 1       # of the cases that can run, one in so many does
    show: bool = False   # what theirs prints
    passed: int = 0
    failures: list = dataclasses.field(default_factory=list)  # (case, why)
    skipped: Counter = dataclasses.field(default_factory=Counter)  # reason -> cases
    seen: int = 0

    def run(self, case, call, reason=""):
        """Runs a case unless there is a reason not to. call() returns whether it is correct, or raises. Returns whether
        it ran and was correct."""
        if not reason:
            self.seen += 1
            if (self.seen - 1) % self.every != 0:
                reason = f"one case in {self.every} runs (--every)"
        if reason:
            self.skipped[reason] += 1
            return False
        output = io.StringIO()
        try:
            with contextlib.nullcontext() if self.show else contextlib.redirect_stdout(output):
                is_correct = call()
            why = "" if is_correct else "not correct"
        except (Exception, SystemExit) as error:
            why = "".join(traceback.format_exception_only(type(error), error)).strip()
            if is_device_lost(why):
                self.failures.append((case, why))
                raise Unusable(f"the GPU is lost after {case}: {why}") from None
        if why:
            self.failures.append((case, why + "\n" + output.getvalue()[-MOST_OUTPUT:].strip()))
            print(f"FAILED {self.name}: {case}: {why}", file=sys.__stdout__, flush=True)
        else:
            self.passed += 1
        return not why

    def as_dict(self):
        return {"name": self.name, "passed": self.passed, "failures": [list(map(str, f)) for f in self.failures],
                "skipped": dict(self.skipped)}


def is_device_lost(why):
    return "DeviceFailureError" in why or "CUDA error" in why


def load(path):
    """The namespace of a file's definitions, and a function that runs its main block."""
    source = path.read_text()
    tree = ast.parse(source, str(path))
    mains = [i for i, node in enumerate(tree.body) if isinstance(node, ast.If) and "__name__" in ast.dump(node.test)]
    if not mains:
        raise Unusable(f"{path} has no main block")
    first, last = tree.body[: mains[0]], tree.body[mains[0] :]
    namespace = {"__name__": "__main__", "__file__": str(path), "__builtins__": __builtins__}

    def run(body):
        exec(compile(ast.Module(body, []), str(path), "exec"), namespace)

    sys.path.insert(0, str(path.parent))
    try:
        run(first)
    except ImportError as error:
        raise Unusable(f"{path.name} needs {error.name or error}: {error}") from None
    return namespace, lambda: run(last)


def file_of(checkout, name):
    path = Path(checkout) / "tests" / name
    if not path.is_file():
        raise Unusable(f"there is no {path}: give a checkout")
    return path


# --- FlashMLA


def flash_mla_reason(p):
    if p.d_qk != 512:
        return f"d_qk {p.d_qk}: V3.2's rows, which kv4 does not read"
    if p.num_runs > 0:
        return "timed: it looks for a kernel by FlashMLA's name"
    return ""


def flash_mla_decode(checkout, report):
    import kv4.flash_mla

    sys.modules["flash_mla"] = kv4.flash_mla
    names, main = load(file_of(checkout, "test_flash_mla_sparse_decoding.py"))
    theirs, result_type = names["test_flash_mla"], names["Result"]
    nothing = [0.0] * (len(dataclasses.fields(result_type)) - 1)

    def run_one(p):
        report.run(p, lambda: theirs(p).is_correct, flash_mla_reason(p))
        return result_type(True, *nothing)  # their loop goes on

    names["test_flash_mla"] = run_one
    quietly(report, main)


def flash_mla_prefill(checkout, report):
    import kv4.flash_mla

    sys.modules["flash_mla"] = kv4.flash_mla
    names, main = load(file_of(checkout, "test_flash_mla_sparse_prefill.py"))
    theirs = names["run_test"]

    def run_one(p):
        report.run(p, lambda: theirs(p), flash_mla_reason(p))
        return True

    names["run_test"] = run_one
    quietly(report, main)


# --- DeepGEMM


def deep_gemm_scores(checkout, report):
    import kv4.deep_gemm

    if kv4.deep_gemm.why_no_deep_gemm:
        raise Unusable("DeepGEMM's tests use its testing, utils and generators: install deep_gemm "
                       f"({kv4.deep_gemm.why_no_deep_gemm})")
    sys.modules["deep_gemm"] = kv4.deep_gemm
    names, main = load(file_of(checkout, "test_attention.py"))
    names["bench_kineto"] = no_times

    def one_by_one(name):
        theirs = names[name]

        def run_all():
            cases = []
            names["sample_mqa_cases"] = lambda _, every: cases.extend(every) or []
            theirs()
            for case in cases:
                names["sample_mqa_cases"] = lambda _, every, only=case: [only]
                report.run(f"{name} {case}", lambda: theirs() is None)

        names[name] = run_all

    for name in [name for name in names if name.startswith("test_") and callable(names[name])]:
        if name in ("test_mqa_logits", "test_paged_mqa_logits"):
            one_by_one(name)
        elif name in main_calls(names["__file__"]):
            names[name] = lambda name=name: report.run(name, None, "a GEMM, which kv4 leaves to DeepGEMM")
    random.seed(0)
    quietly(report, main)


def no_times(_, names, *args, **kwargs):
    """Their measurement looks for kernels by DeepGEMM's names; a second for each of them does no harm."""
    return 1.0 if isinstance(names, str) else tuple(1.0 for _ in names)


def main_calls(path):
    """Names that a file's main block calls."""
    tree = ast.parse(Path(path).read_text())
    main = next(node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.dump(node.test))
    return {node.func.id for node in ast.walk(main) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def quietly(report, main):
    """Runs a main block; its own verdict does not count, because cases that were left out look correct to it."""
    with contextlib.ExitStack() as stack:
        if not report.show:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        stack.enter_context(contextlib.suppress(SystemExit))
        main()


FILES = {
    "flash_mla_decode": (flash_mla_decode, "flash_mla", "FlashMLA tests/test_flash_mla_sparse_decoding.py"),
    "flash_mla_prefill": (flash_mla_prefill, "flash_mla", "FlashMLA tests/test_flash_mla_sparse_prefill.py"),
    "deep_gemm": (deep_gemm_scores, "deep_gemm", "DeepGEMM tests/test_attention.py"),
}
