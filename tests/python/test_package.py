"""The package itself: names, stubs, and the guide's examples."""
import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kv4
from small_cache import SmallCache

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


def test_every_object_says_what_it_is():
    for name, kind in vars(kv4._kv4).items():
        assert not isinstance(kind, type) or kind.__repr__ is not object.__repr__, name
    config = kv4.model_preset("v4-flash")
    options = kv4.CacheOptions(layers=[2], max_requests=2, max_context=256, entry_format="fp8_tile64")
    assert "max_requests=2" in repr(options) and "row_format=None" in repr(options) and "layers=[2]" in repr(options) and "entry_format=fp8_tile64" in repr(options)
    assert "kinds=[swa, swa, csa, hca, csa, hca, csa, hca, ...]" in repr(config)
    cache = kv4.KVCacheManager(config, options, kv4.make_cpu_backend(2))
    request = cache.admit()
    assert re.fullmatch(r"<kv4.KVCacheManager 1 of 2 requests, \d+ bytes on cpu>", repr(cache))
    assert repr(cache.backend()) == "<kv4.Backend cpu, 2 threads>"
    assert repr(kv4.StepItem(request, [1, 2, 3])) == "StepItem(request=0, count=3, token_ids=int32[3], position=-1)"
    assert repr(cache.prepare_forward([kv4.StepItem(request, [1])])).startswith("Step(id=")
    for thing in (cache.acquire(2), cache.schema(), cache.allocator(), cache.kv_pool(), cache.state_pool()):
        assert re.fullmatch(rf"<kv4.{type(thing).__name__}.*>", repr(thing))
    assert repr(cache.acquire(2)) == "<kv4.LayerCacheHandle layer 2>"
    assert repr(kv4.SessionReceiver(cache, kv4.SessionIdentity("w"))) == "<kv4.SessionReceiver 0 of 0 bytes>"
    secret = repr([kv4.TiersOptions(password="geheim", disk_key=bytes(range(32)), keys=[bytes(range(32))],
                                    servers=["rediss://me:geheim@host:1"]), kv4.SessionIdentity("w", salt="geheim", keys=[bytes(range(32))])])
    assert "geheim" not in secret and "\\x" not in secret and "password=..." in secret
    odd = repr(kv4.TiersOptions(servers=["redis://me:ge/h@eim@host:1"]))  # a password may contain both by mistake
    assert "eim" not in odd and "//...@host:1" in odd, odd


def test_tiers_say_which_they_are(tmp_path):
    options = kv4.CacheOptions(layers=[2], max_requests=1, max_context=256, prefix=kv4.PrefixOptions(enabled=True, weights_id="w"))
    cache = kv4.KVCacheManager(kv4.model_preset("v4-flash"), options)
    tiers = kv4.Tiers(cache.schema(), kv4.TiersOptions(host_bytes=16 << 20, directory=tmp_path / "kept"))
    tiered = kv4.TieredPrefix(cache, tiers)
    for _ in range(2):
        assert (repr(tiers), repr(tiered)) == ("<kv4.Tiers host, disk>", "<kv4.TieredPrefix 0 waiting, 0 blocks loaded>")
        tiers.close()


def test_a_callback_may_show_the_cache_that_calls_it():
    """Calls repr() as a log or debugger would, where the cache's own calls are refused."""
    cache, shown = SmallCache(), []
    request = cache.manager.admit()
    cache.feed(request, 20)
    sender = kv4.SessionSender(cache.manager, request, kv4.SessionIdentity("w"))
    sender.offer(lambda record: shown.append((repr(cache.manager), repr(sender))))
    assert shown == [("<kv4.KVCacheManager in use>", "<kv4.SessionSender 1 full blocks>")]


def test_documents_install_a_wheel_file_or_the_tree():
    """Never installs by the bare name: the kv4 of PyPI is another project."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *PACKAGE.glob("**/*.py")]
    commands = [line.strip() for path in documents for line in path.read_text().splitlines() if "pip install" in line]
    assert len(commands) >= 5, commands
    for command in commands:
        wanted = re.split("[#`]", command.split("pip install", 1)[1])[0]
        names = re.split(r"[\s'\"]+", re.sub(r"kv4(\[\w+\])? @ \S+", "", wanted))
        assert not any(re.fullmatch(r"kv4(\[\w+\])?([=<>~!].*)?", name) for name in names), command


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


def test_a_wheel_brings_the_command_and_says_whose_it_is():
    try:
        wheel = importlib.metadata.distribution("kv4")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not a wheel: the package of a build tree")
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert wheel.metadata.get_all("Project-URL") and "transformers" in wheel.metadata.get_all("Provides-Extra")
    assert any("transformers" in requirement and "extra" in requirement for requirement in wheel.requires)
    installed = [str(file.locate()) for file in wheel.files if file.match("bin/kv4") and file.parts[0] != "kv4"]
    if not installed:
        pytest.skip("the wheel was unpacked, not installed: it has no command")
    result = subprocess.run([*installed, "--version"], capture_output=True, text=True)
    assert result.returncode == 0 and kv4.__version__ in result.stdout


def test_a_wheel_brings_what_it_needs():
    """Libraries besides the C runtime; a GPU's driver is opened at first use. Bundled libhwy needs a C++ runtime."""
    try:
        files = importlib.metadata.files("kv4")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not a wheel: the package of a build tree")
    if not shutil.which("readelf"):
        pytest.skip("no readelf")
    programs = [file for file in files if Path(file.locate()).is_file() and Path(file.locate()).read_bytes()[:4] == b"\x7fELF"]
    own = [file for file in programs if file.name == "kv4" or file.name.startswith("_kv4.")]
    assert len(own) == 2, programs  # the tool and the module
    for program in programs:
        dynamic = subprocess.run(["readelf", "-d", program.locate()], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)) - {file.name for file in programs}
        runtime = r"(lib(c|m|dl|rt|pthread|gcc_s)|ld-linux.*)\.so" if program in own else r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux.*)\.so"
        assert all(re.match(runtime, name) for name in needed), f"{program} needs {needed}"


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
