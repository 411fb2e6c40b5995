#!/usr/bin/env python3
"""tools/performance_report and the document it writes. Last line: `N passed, N failed`."""
import importlib.machinery
import importlib.util
import json
import re
import sys
import tempfile
import xml.dom.minidom
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = Path(__file__).with_name("gpu_bench_sample.json")
MOST_LINES = 200  # of docs/performance.md


def load(name):
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "tools" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module
    sys.dont_write_bytecode = True
    loader.exec_module(module)
    return module


report = load("performance_report")
docs, doxygen = load("build_docs"), load("doxygen_filter")


def equal(got, expected):
    assert got == expected, f"{got!r}, expected {expected!r}"


def refused(call, *parts):
    try:
        call()
    except report.BadInput as error:
        for part in parts:
            assert part in str(error), f"'{part}' is missing in: {error}"
    else:
        raise AssertionError("was not refused")


def sample(folder, name="run.json", **changes):
    """The sample as a file of figures, with the factor `slower` on its times."""
    slower = changes.pop("slower", 1)
    data = json.loads(SAMPLE.read_text()) | {"date": "2026-11-18", "command": "kv4_gpu_bench --json"} | changes
    for row in data["rows"]:
        row["us"] *= slower
    path = Path(folder) / name
    path.write_text(json.dumps(data))
    return path


def test_document_is_what_the_figures_give():
    equal(report.main(["--check"]), 0)


def test_document_is_short():
    lines = (ROOT / "docs" / "performance.md").read_text().splitlines()
    assert len(lines) <= MOST_LINES, f"docs/performance.md has {len(lines)} lines, at most {MOST_LINES}"
    long = [line for line in lines if len(line) > 120 and not line.startswith("|")]
    equal(long, [])


def test_figures_are_measured():
    """Times of other projects' kernels are rows measured in the same run, never typed in."""
    typed = re.compile(r"(FlashMLA|DeepGEMM|SGLang|vLLM)[^;\n]*\d")
    for path in (ROOT / "docs" / "figures").glob("*.json"):
        equal([row["note"] for row in json.loads(path.read_text())["rows"] if typed.search(row.get("note", ""))], [])
    for path in (ROOT / "bench").glob("*.cc"):
        equal((path.name, typed.findall(path.read_text())), (path.name, []))


def test_tables_of_a_run():
    with tempfile.TemporaryDirectory() as folder:
        runs, rows = report.read_figures([sample(folder)])
        equal(report.table_text("runs", runs, rows).splitlines()[2],
              "| NVIDIA H200 | 2026-11-18 | `kv4_gpu_bench --json` | 0123abc |")
        equal(report.table_text("decode_step", runs, rows).splitlines(),
              ["| context | b = 1 | b = 16 |", "| --- | ---: | ---: |", "| 8K | 480 / 65.0 | 990 / 77.0 |"])
        equal(report.table_text("decode_step_launches", runs, rows).splitlines()[2:], ["| 8K | 109 |"])
        equal(report.table_text("append", runs, rows).splitlines()[2:],
              ["| CSA, all due | 2.00 / 0.50 |"])


def test_tables_of_chunks():
    with tempfile.TemporaryDirectory() as folder:
        runs, rows = report.read_figures([sample(folder)])
        tables = {name: report.table_text(name, runs, rows).splitlines()[2:]
                  for name in ("attend_prefill", "index_prefill", "index_prefill_parts", "prefill_step", "append_prefill")}
        equal(tables, {
            "attend_prefill": ["| Flash CSA 640 rows, prefill of 4096, pool of 32K | 891 | 435 | 2.05 | 386 TFLOP/s |",
                               "| Flash SWA 128 | 55.0 | 21.7 | 2.53 | 310 TFLOP/s |"],
            "index_prefill": ["| 4096 tokens x 8192 keys | 1,167 / 387 |"],
            "index_prefill_parts": ["| both, fp8, 4096 tokens x 8192 keys | 1,167 | 387 | 3.02 | 442 TFLOP/s |",
                                    "| fast scores, fp8, 4096 tokens x 8192 keys | 900 | 387 | 2.33 |  |"],
            "prefill_step": ["| of 4096 at 32K | 51,000 | 25,000 | 2.04 |", "| fp8, of 4096 at 32K, index_topk | 24,000 | 8,000 | 3.00 |"],
            "append_prefill": ["| CSA of 32768 | 394 | 104 | 94.0 | 1.11 |"]})


def test_rows_after_an_ordinary_kernel_are_tables_of_their_own():
    with tempfile.TemporaryDirectory() as folder:
        runs, rows = report.read_figures([sample(folder)])
        equal(report.table_text("attend_after", runs, rows).splitlines(),
              ["| after an ordinary kernel | b = 1 |", "| --- | ---: |", "| Flash CSA 640 | 7.10 / 0.12 |"])
        equal(report.table_text("append_after", runs, rows).splitlines()[2:], ["| CSA, all due | 3.00 / 0.50 |"])
        assert "7.10" not in report.table_text("attend", runs, rows)
        assert "3.00" not in report.table_text("append", runs, rows)


def test_columns_are_ordered_by_batch():
    with tempfile.TemporaryDirectory() as folder:
        runs, rows = report.read_figures([sample(folder)])
        equal(report.table_text("attend", runs, rows).splitlines()[0], "| shape and rows | b = 1 | b = 128 |")


def test_runs_of_a_commit_are_a_range():
    with tempfile.TemporaryDirectory() as folder:
        runs, rows = report.read_figures([sample(folder), sample(folder, "again.json", slower=1.1)])
        equal(report.table_text("decode_step", runs, rows).splitlines()[2], "| 8K | 480 to 528 / 65.0 | 990 to 1,089 / 77.0 |")
        refused(lambda: report.read_figures([sample(folder), sample(folder, "other.json", commit="456")]), "456", "0123abc")


def test_cpu_rows():
    with tempfile.TemporaryDirectory() as folder:
        raw, to = Path(folder) / "raw.json", Path(folder) / "cpu.json"
        raw.write_text(json.dumps([{"name": "append/csa", "bytes": 24000, "seconds": 2e-6, "memcpy_ratio": 0.8, "item": "token",
                                    "items": 2, "seconds_per_item": 1e-6},
                                   {"name": "read/attend/csa", "bytes": 0, "seconds": 2e-3, "memcpy_ratio": None, "item": "row",
                                    "items": 2000, "seconds_per_item": 1e-6, "plain_ratio": 70.2, "sgemm_ratio": 1.834}]))
        equal(report.main(["--stamp", str(raw), "--to", str(to)]), 2)
        equal(report.main(["--stamp", str(raw), "--to", str(to), "--device", "EPYC", "--commit", "1", "--date", "2026-11-18",
                           "--command", "kv4 bench --json"]), 0)
        runs, rows = report.read_figures([to])
        equal(report.table_text("cpu_append", runs, rows).splitlines()[2], "| csa | 12,000 | 1.00 us per token | 0.80 |  |")
        equal(report.table_text("cpu", runs, rows).splitlines()[2],
              "| read/attend/csa |  | 1.00 us per row |  | 70 x the plain code, 1.83 of OpenBLAS' sgemm |")


def test_only_tables_change():
    with tempfile.TemporaryDirectory() as folder:
        runs, rows = report.read_figures([sample(folder)])
        document = "before\n\n<!-- table: attend -->\nold\n<!-- end -->\nafter\n"
        made = report.with_tables(document, runs, rows)
        assert made.startswith("before\n\n<!-- table: attend -->\n| shape") and made.endswith("|\n<!-- end -->\nafter\n"), made
        equal(report.with_tables(made, runs, rows), made)
        refused(lambda: report.with_tables("<!-- table: atend -->\n<!-- end -->\n", runs, rows), "no table 'atend'", "attend")
        refused(lambda: report.with_tables("<!-- table: gone -->\n", runs, rows), "end")
        refused(lambda: report.with_tables("<!-- table: moves -->\n<!-- end -->\n", runs, rows), "no row of table 'moves'")


def test_bad_files():
    with tempfile.TemporaryDirectory() as folder:
        refused(lambda: report.read_figures([sample(folder, date="")]), "has no date", "--stamp")
        refused(lambda: report.read_figures([Path(folder) / "none.json"]), "none.json")
        failed = json.loads(SAMPLE.read_text())["rows"][:1]
        failed[0]["failure"] = "3 bytes differ"
        refused(lambda: report.read_figures([sample(folder, rows=failed)]), "3 bytes differ")


def test_check_and_write():
    with tempfile.TemporaryDirectory() as folder:
        figures, document, plot = sample(folder), Path(folder) / "doc.md", Path(folder) / "plot.svg"
        document.write_text("<!-- table: attend -->\n<!-- end -->\n")
        arguments = [str(figures), "--document", str(document), "--plot", str(plot)]
        equal(report.main(["--check", *arguments]), 1)
        assert not plot.exists()
        equal(report.main(arguments), 0)
        equal(report.main(["--check", *arguments]), 0)
        text = plot.read_text()
        xml.dom.minidom.parseString(text)
        assert "8K tokens, b = 16" in text and "990 us, 12.9 x the floor" in text, text
        document.write_text(document.read_text().replace("5.80", "5.81"))
        equal(report.main(["--check", *arguments]), 1)


def test_comments_become_documentation():
    lines = ["// A file.", "#pragma once", "", "// Of nothing.", "", "/// A struct.", "struct S {", "  int a = 0;  // one <thing>",
             "              // and more", "  int b = 0, c = 0;  // both", "};"]
    equal(doxygen.cpp_header(lines),
          ["/// @file", "/// A file.", "#pragma once", "", "// Of nothing.", "", "/// A struct.", "struct S {",
           "  int a = 0;  ///< one \\<thing\\>", "              ///< and more", "  int b = 0;  ///< both", "  int c = 0;  ///< both", "};"])
    equal(doxygen.c_header("/* A file. */\nint f(void); /* one */\n/* two */\nint g(void);\n"),
          "/** @file\n A file. */\nint f(void); /**< one */\n/** two */\nint g(void);\n")


def test_links_and_headings():
    page = ROOT / "docs" / "design.md"
    equal(doxygen.markdown(page, ["## A `kv4` part", "[x](formats.md#a-b) [y](#a-kv4-part) [z](../examples/decode_loop.cc)"]),
          ["## A `kv4` part {#docs_design_a-kv4-part}",
           "[x](#docs_formats_a-b) [y](#docs_design_a-kv4-part) z (`examples/decode_loop.cc`)"])


def test_gaps_of_the_site():
    head = f"{ROOT}/include/kv4/tier.h:1: warning: "
    equal(docs.gaps([head + "Member put(int a)=0 (function) of class kv4::tier::Tier is not documented.",
                     head + "Member tenant (variable) of struct kv4::tier::RecordId is not documented.",
                     head + "Member Tiers(Tiers &&) noexcept (function) of class kv4::Tiers is not documented.", ""]),
          ["include/kv4/tier.h:1: warning: Member put(int a)=0 (function) of class kv4::tier::Tier is not documented."])


def main():
    passed = failed = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            test()
        except Exception as error:  # whatever it is, the others go on
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
        else:
            passed += 1
            print(f"ok      {name}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
