"""The package itself: names, stubs, and the guide's examples."""
import ast
import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import kv4

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(kv4.__file__).parent


def test_names_of_the_design():
    for name in ("PagedKVPool", "StateCachePool", "KVCacheManager", "LayerCacheHandle", "build_schema",
                 "compute_block_budget", "SWAView", "ClassicalView", "IndexerView", "CacheOptions", "ModelConfig"):
        assert hasattr(kv4, name), name
    for name in ("append", "write_swa", "flush_compression", "gather_compressed_kv", "gather_all_compressed_kv",
                 "gather_swa_kv", "read_swa_view", "read_classical_view", "read_indexer_view", "index_topk", "attend"):
        assert hasattr(kv4.LayerCacheHandle, name), name
    for name in ("Tiers", "TieredPrefix", "PrefixLoad", "set_log_sink"):
        assert hasattr(kv4, name), name
    for name in ("reset_slot", "memory_bytes"):
        assert hasattr(kv4.StateCachePool, name), name
    assert re.fullmatch(r"\d+\.\d+\.\d+", kv4.__version__)


def test_all_names_every_public_name():
    native = {name for name in vars(kv4._kv4) if not name.startswith("_")}
    errors = {name for name in vars(kv4.errors) if name.endswith("Error")}
    assert set(kv4.__all__) == native | errors | {"NO_REQUEST", "__version__"}
    assert len(kv4.__all__) == len(set(kv4.__all__))


def test_stubs_know_every_name():
    assert (PACKAGE / "py.typed").exists()
    stub = ast.parse((PACKAGE / "_kv4.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    for name, value in vars(kv4._kv4).items():
        if name.startswith("_"):
            continue
        assert name in (classes if isinstance(value, type) else functions), name
    methods = {node.name for node in classes["LayerCacheHandle"].body if isinstance(node, ast.FunctionDef)}
    assert methods >= {name for name in vars(kv4.LayerCacheHandle) if not name.startswith("_")}


def test_public_calls_are_documented():
    for kind in (kv4.LayerCacheHandle, kv4.KVCacheManager, kv4.Tiers, kv4.TieredPrefix):
        assert kind.__doc__
    for name in ("save", "save_all", "load", "start_load"):
        assert getattr(kv4.TieredPrefix, name).__doc__.count("\n") >= 1
    for name in ("append", "write_swa", "flush_compression", "index_topk", "attend", "gather_swa_kv"):
        assert "[tokens" in getattr(kv4.LayerCacheHandle, name).__doc__ or "[items" in getattr(kv4.LayerCacheHandle, name).__doc__


def test_a_wheel_brings_what_it_needs():
    """Beside the C and C++ runtimes, and for a GPU its driver, which is opened when it is used."""
    try:
        files = importlib.metadata.files("kv4")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not a wheel: the package of a build tree")
    if not shutil.which("readelf"):
        pytest.skip("no readelf")
    libraries = [file for file in files if ".so" in file.name]
    assert libraries
    for library in libraries:
        dynamic = subprocess.run(["readelf", "-d", library.locate()], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)) - {file.name for file in libraries}
        assert all(re.match(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux.*)\.so", name) for name in needed), needed


@pytest.mark.parametrize("document", ["docs/python.md", "README.md"])
def test_examples_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    assert blocks
    names = {}
    for number, block in enumerate(blocks):
        if block.startswith("# needs "):  # torch, a GPU: shown, run elsewhere
            continue
        exec(compile(block, f"{document}, example {number}", "exec"), names)
    kv4.set_log_sink(None)
