#!/usr/bin/env python3
"""Cache keys in the tool: --key-file and KV4_KEY_FILE, and its messages about records without a key.

Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree); an argument runs only tests whose name contains it.
"""
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from running_cache_test import running
from tool import KV4, ROOT, Skipped, equal, kv4, ok, ok_json, refused, run_tests

REPLAY = ["replay", "--generate", "--data", "real", "--limit", "12", "--capacity", "64K"]
SESSION = str(ROOT / "tests/cli/three_tokens.session")


def key_file(folder, *keys, mode=0o600):
    path = Path(folder) / f"keys-{'-'.join(keys)}"
    path.write_text("".join(key * 32 + "\n" for key in keys))
    path.chmod(mode)
    return str(path)


def test_a_store_with_keys():
    with tempfile.TemporaryDirectory() as folder:
        store, mine, other = folder + "/store", key_file(folder, "a1"), key_file(folder, "b2")
        both = key_file(folder, "b2", "a1")
        disk_hits = lambda figures: next(t["hits"] for t in figures["tiers"] if t["name"] == "disk")
        ok(*REPLAY, "--disk", store, "--key-file", mine)
        equal(disk_hits(ok_json(*REPLAY, "--disk", store, "--key-file", other)), 0)
        assert disk_hits(ok_json(*REPLAY, "--disk", store, "--key-file", both)) > 0
        survey = ok_json("store", "inspect", store)
        assert survey["sealed_records"] > 0 and survey["unprotected_records"] == survey["authenticated_records"] == 0, survey
        ok("store", "verify", store)  # damage can be detected without a key
        ok("store", "verify", store, "--key-file", both)
        done = kv4("store", "verify", store, "--key-file", key_file(folder, "c3"))
        assert done.returncode == 1 and "a key that is not among those given" in done.stdout, done
        ok("store", "gc", store, "--key-file", both)
        ok("store", "verify", store, "--key-file", both)


def test_a_store_without_keys():
    with tempfile.TemporaryDirectory() as folder:
        store, mine = folder + "/store", key_file(folder, "a1")
        done = ok(*REPLAY, "--disk", store)
        equal(done.stderr.count("has no cache key"), 1)
        assert "not for who wrote them" in ok("store", "inspect", store).stdout
        done = kv4("store", "verify", store, "--key-file", mine)
        assert done.returncode == 1 and "not authenticated by any key" in done.stdout, done
        refused([*REPLAY, "--disk", store, "--accept-unauthenticated"], "--key-file")
        done = ok(*REPLAY, "--disk", store, "--key-file", mine, "--accept-unauthenticated", "--json")
        assert next(t["hits"] for t in json.loads(done.stdout)["tiers"] if t["name"] == "disk") > 0, done.stdout


def test_key_files_are_checked():
    with tempfile.TemporaryDirectory() as folder:
        refused(["plan", "--key-file", key_file(folder, "a1", mode=0o640)], "chmod 600")
        refused(["plan", "--key-file", folder + "/none"], "cannot be opened")
        refused(["session", "inspect", SESSION, "--key-file", "/dev/zero"], "no regular file")
        environment = dict(os.environ, KV4_KEY_FILE=key_file(folder, "b2", mode=0o604))
        done = subprocess.run([KV4, "plan"], capture_output=True, text=True, env=environment)
        assert done.returncode == 2 and "chmod 600" in done.stderr, done
        environment["KV4_KEY_FILE"] = key_file(folder, "c3")
        figures = subprocess.run([KV4, "plan", "--json"], capture_output=True, text=True, env=environment, check=True)
        equal(json.loads(figures.stdout)["tier_protection"], "sealed")


def test_inspect_says_who_wrote_a_session():
    example = Path(KV4).parent / "examples/keep_context"
    if not example.exists():
        raise Skipped(f"{example} is not built")
    with tempfile.TemporaryDirectory() as folder:
        mine, plain, sealed = key_file(folder, "a1"), folder + "/plain", folder + "/sealed"
        subprocess.run([example, plain], stdout=subprocess.DEVNULL, check=True)
        subprocess.run([example, sealed, mine], stdout=subprocess.DEVNULL, check=True)
        for path, keys, text, protection, authentic in ((plain, [], "There is no cache key", "none", False),
                                                        (sealed, ["--key-file", mine], "It is sealed by one of the given keys", "sealed", True)):
            assert text in ok("inspect", path, *keys).stdout, ok("inspect", path, *keys).stdout
            figures = ok_json("inspect", path, *keys)
            equal((figures["protection"], figures["authentic"]), (protection, authentic))
        refused(["inspect", sealed], "key")
        refused(["inspect", plain, "--key-file", mine], "not authenticated by any key")


def test_inspect_says_how_tiers_are_protected():
    """A line for each tier outside host memory, and in JSON."""
    with tempfile.TemporaryDirectory() as folder:
        mine = key_file(folder, "a1")
        for name, args, text, protection in (("plain", [], "no cache key", "none"), ("sealed", ["--key-file", mine], "sealed", "sealed"),
                                             ("tagged", ["--key-file", mine, "--authenticate"], "authenticated", "authenticated")):
            status = f"{folder}/{name}"
            with running("replay", "--generate", "--data", "real", "--limit", "5000", "--layers", "3", "--capacity", "64K", "--verify", "0", "--host", "8MB",
                         "--disk", f"{folder}/store of {name}", "--status", status, *args) as process:
                deadline = time.time() + 120
                while kv4("inspect", status).returncode != 0:
                    assert time.time() < deadline and process.poll() is None, process.stderr.read()
                    time.sleep(0.1)
                lines = [line for line in ok("inspect", status).stdout.splitlines() if line.startswith("tier ")]
                assert len(lines) == 1 and lines[0].startswith(f"tier disk: {text}"), lines
                tiers = ok_json("inspect", status)["status"]["tiers"]
                equal([(each["name"], each["protection"]) for each in tiers], [("host", "none"), ("disk", protection)])


def test_plan_and_sessions_say_so():
    assert "no cache key" in ok("plan").stdout
    equal(ok_json("plan")["tier_protection"], "none")
    assert "no cache key" in ok("session", "inspect", SESSION).stdout
    equal({name: ok_json("session", "inspect", SESSION)[name] for name in ("protection", "authentic")},
          {"protection": "none", "authentic": False})
    with tempfile.TemporaryDirectory() as folder:
        mine = key_file(folder, "a1")
        refused(["session", "inspect", SESSION, "--key-file", mine], "not authenticated by any key")
        refused(["inspect", SESSION, "--key-file", mine], "not authenticated by any key")
        found = ok_json("session", "inspect", SESSION, "--key-file", mine, "--accept-unauthenticated")
        equal((found["ok"], found["protection"], found["authentic"]), (True, "none", False))
        for command in (["session", "inspect"], ["inspect"]):
            refused([*command, SESSION, "--accept-unauthenticated"], "--key-file")
        assert mine in ok("plan", "--key-file", mine).stdout
    # Sessions of 0.1 can be read.
    equal(ok_json("session", "inspect", str(ROOT / "tests/tier/from_0_1/three_tokens.session"))["tokens"], 3)


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
