#!/usr/bin/env python3
"""NVTX ranges of the calls that use a GPU: every call opens its own, and an attached tool sees it.

    tests/tree/nvtx_ranges.py [BUILD_DIR/tests/kv4_tests]

The tool is a library of this test, which NVTX loads (NVTX_INJECTION64_PATH). Tests built with NVTX show the ranges of a
cache whose memory the host cannot touch, so that no GPU is needed. Last line: `N passed, N failed[, N skipped]`.
"""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "src" / "cache" / name for name in ("layer_cache_handle.cc", "kv_cache_manager.cc", "prefix_blocks.cc")]
# Public calls that reach the device by themselves. Those of a layer are all that its header has beside these accessors.
MANAGER = {"admit", "fork", "prepare_forward", "commit", "abort", "synchronize", "export_image", "export_blocks", "import_image", "read_block",
           "read_snapshot", "insert_blocks", "insert_snapshot"}
ACCESSORS = {"layer", "num_query_heads", "head_dim", "schema"}

TOOL = r"""
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
static nvtxDomainHandle_t create(const char* name) {
  fprintf(stderr, "nvtx domain %s\n", name);
  return (nvtxDomainHandle_t)1;
}
static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  fprintf(stderr, "nvtx push %d %s\n", domain == (nvtxDomainHandle_t)1, event->message.ascii);
  return 0;
}
static int pop(nvtxDomainHandle_t domain) {
  fprintf(stderr, "nvtx pop %d\n", domain == (nvtxDomainHandle_t)1);
  return 0;
}
__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  const NvtxExportTableCallbacks* callbacks = (const NvtxExportTableCallbacks*)get(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable table = 0;
  unsigned int size = 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
  *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
  return 1;
}
"""
PROGRAM = r"""
#include "backend/nvtx_range.h"
int main() {
  const kv4::NvtxRange none("kv4 none", false);
  const kv4::NvtxRange outer("kv4 outer", true);
  { const kv4::NvtxRange inner("kv4 inner", true); }
}
"""


class Skipped(Exception):
    pass


def functions(path):
    """Name and body of every public member function that is written in the file."""
    text = path.read_text()
    for match in re.finditer(r"^[^\s#/}].*?\b(?:LayerCacheHandle|KVCacheManager)::(\w+)\([^;{]*?\{\n(.*?)^\}", text, re.M | re.S):
        yield match[1], match[2]


def check_every_launch_opens_a_range():
    """The calls of kv4/cuda.h for engines with pools of their own."""
    declared = set(re.findall(r"^KV4_API cudaError_t (\w+)\(", (ROOT / "include/kv4/cuda.h").read_text(), re.M))
    assert {"append", "attend", "index_topk"} <= declared, declared
    opened = {}
    for path in sorted((ROOT / "src/backend").rglob("*.cu")):
        for name, line in re.findall(r"^cudaError_t (\w+)\([^;{]*?\{\n(.*)\n", path.read_text(), re.M):
            if name in declared:
                opened.setdefault(name, []).append(line.strip())
    assert opened == {name: [f'const NvtxRange range("kv4 launch {name}", true);'] for name in declared}, opened


def check_every_call_opens_a_range():
    opened, public = {}, set(MANAGER)
    for path in SOURCES:
        for name, body in functions(path):
            if path.name == "layer_cache_handle.cc" and name not in ACCESSORS:
                public.add(name)
            if name in public:
                opened.setdefault(name, []).append(re.findall(r'(?:NvtxRange range|KV4_SCOPE)\("([^"]*)"', body))
    declared = set(re.findall(r"^  \w[\w:<>& ]* (\w+)\(", (ROOT / "include/kv4/layer_cache_handle.h").read_text(), re.M)) - ACCESSORS
    assert {"append", "attend", "index_topk"} <= declared <= public, declared - public
    assert set(opened) == public, public - set(opened)
    for name, bodies in opened.items():
        for ranges in bodies:
            assert ranges == [f"kv4 {name}"], f"{name} opens {ranges}"


def toolkit():
    for folder in sorted(Path("/usr/local").glob("cuda*/include")):
        if (folder / "nvtx3" / "nvToolsExt.h").exists():
            return folder
    raise Skipped("there are no NVTX headers below /usr/local/cuda*")


def build_tool(folder):
    source = Path(folder, "tool.c")
    source.write_text(TOOL)
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{toolkit()}", source, "-o", Path(folder, "tool.so")], check=True)
    return {**os.environ, "NVTX_INJECTION64_PATH": str(Path(folder, "tool.so"))}


def build_program(folder, *flags):
    Path(folder, "program.cc").write_text(PROGRAM)
    subprocess.run(["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/src", *flags, Path(folder, "program.cc"), "-o",
                    Path(folder, "program")], check=True)
    return Path(folder, "program")


def said(command, environment):
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    return [line for line in done.stderr.splitlines() if line.startswith("nvtx ")]


def check_a_tool_sees_ranges():
    with tempfile.TemporaryDirectory() as folder:
        attached, program = build_tool(folder), build_program(folder, f"-I{toolkit()}")
        assert said([program], attached) == ["nvtx domain kv4", "nvtx push 1 kv4 outer", "nvtx push 1 kv4 inner", "nvtx pop 1", "nvtx pop 1"]
        assert said([program], {**os.environ, "NVTX_INJECTION64_PATH": ""}) == []


def check_without_the_headers():
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NVTX_INJECTION64_PATH": "/no/such/tool.so"}
        assert said([build_program(folder)], environment) == []


def check_a_cache_off_the_host():
    """And none of a cache on the host."""
    if len(sys.argv) < 2 or b"nvtxGlobals_v3" not in Path(sys.argv[1]).read_bytes():
        raise Skipped("kv4_tests was built without NVTX")
    with tempfile.TemporaryDirectory() as folder:
        attached = build_tool(folder)
        command = [sys.argv[1], "--gtest_filter=CallTimes.CallsThatComeBackCount"]
        far, near = said([*command, "--device", "far"], attached), said(command, attached)
        for name in ("admit", "prepare_forward", "append", "commit"):
            assert f"nvtx push 1 kv4 {name}" in far, (name, far)
        assert sum(line.startswith("nvtx push") for line in far) == sum(line.startswith("nvtx pop") for line in far), far
        assert near == [], near


def main():
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for name, check in list(globals().items()):
        if not name.startswith("check_"):
            continue
        try:
            check()
            result = "passed"
        except Skipped as reason:
            result = "skipped"
            print(f"skipped {name}: {reason}")
        except Exception as error:
            result = "failed"
            print(f"FAILED  {name}: {type(error).__name__}: {error}")
        counts[result] += 1
    print(f"{counts['passed']} passed, {counts['failed']} failed" + (f", {counts['skipped']} skipped" if counts["skipped"] else ""))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
