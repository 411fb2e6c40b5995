#!/usr/bin/env python3
"""A running cache seen from outside: `kv4 serve-metrics`, `kv4 inspect` on its status folder, a replay's own page.

Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree); an argument runs only tests whose name contains it.
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from tool import KV4, equal, kv4, ok, ok_json, parse_metrics, refused, run_tests


@contextmanager
def running(*args):
    """A kv4 that is ended with the block."""
    process = subprocess.Popen([KV4, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def running_cache(folder):
    """A replay that publishes in `folder` and takes longer than any test."""
    with running("replay", "--generate", "--seed", "3", "--limit", "5000", "--data", "real", "--layers", "4", "--capacity", "64K", "--verify", "0",
                 "--tenants", "2", "--host", "8MB", "--status", folder) as process:
        deadline = time.time() + 120
        while kv4("serve-metrics", folder, "--once").returncode != 0:
            assert time.time() < deadline and process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        yield process


@contextmanager
def serving(*args):
    """`kv4 serve-metrics` on any port: a function that gets a path, and the process."""
    with running("serve-metrics", *args, "--listen", "0", "--json") as process:
        first = json.loads(process.stdout.readline())
        address = first["address"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address), address
        get = lambda path: urllib.request.urlopen(address + path, timeout=60).read().decode()
        yield get, process, first


@contextmanager
def replay_with_page():
    """A finished replay with `--serve`: the process, a function that gets a path, the page's address and last state."""
    with running("replay", "--generate", "--data", "real", "--layers", "3", "--limit", "20", "--capacity", "64K", "--tenants", "2", "--host", "8MB",
                 "--json", "--serve") as process:
        address = re.match(r"live page: (http://127\.0\.0\.1:\d+/)\n", process.stderr.readline()).group(1)
        get = lambda path: urllib.request.urlopen(address + path, timeout=60).read().decode()
        while (line := process.stdout.readline()) != "}\n":  # the end of its result: nothing changes any more, and the page stays
            assert line, process.stderr.read()
        yield process, get, address, json.loads(get("state.json"))


def test_page_of_a_replay():
    with replay_with_page() as (process, get, address, state):
        assert state["headline"].startswith("20 of 20 requests, block hit rate 0.") and state["requests"] == [], state
        equal(len(state["blocks"]), 512)
        equal(state["blocks"].count("h") + state["blocks"].count("k") + state["blocks"].count("f"), 512)
        equal(parse_metrics(get("metrics"))['kv4_tenant_share_blocks{tenant="0"}'], 256)
        assert "http" not in get("")  # nothing from elsewhere
        try:
            get("no/such/page")
            raise AssertionError("a page that is not there")
        except urllib.error.HTTPError as error:
            equal(error.code, 404)
        port = address.split(":")[2][:-1]
        refused(["replay", "--generate", "--data", "real", "--serve", port], "--serve", port)
        process.send_signal(signal.SIGTERM)
        equal(process.wait(60), 0)
    refused(["replay", "--generate", "--serve"], "--serve", "--data real")


def test_metrics_of_a_running_cache():
    with tempfile.TemporaryDirectory() as folder:
        gpu0, away = str(Path(folder) / "gpu0"), str(Path(folder) / "gpu 1")
        with running_cache(gpu0):
            values = parse_metrics(ok("serve-metrics", gpu0, "--once").stdout)
            equal(sum(values[f'kv4_blocks{{cache="gpu0",state="{state}"}}'] for state in ("free", "held", "evictable")), 512)
            equal(values['kv4_tenant_share_blocks{cache="gpu0",tenant="1"}'], 256)
            assert values['kv4_requests{cache="gpu0"}'] > 0 and values['kv4_up{cache="gpu0"}'] == 1, values
            with serving(gpu0, away) as (get, process, first):
                equal([(cache["name"], cache["up"]) for cache in first["caches"]], [("gpu0", True), ("gpu-1", False)])
                before = parse_metrics(get("metrics"))
                equal((before['kv4_up{cache="gpu0"}'], before['kv4_up{cache="gpu-1"}']), (1, 0))
                assert not any("gpu-1" in name for name in before if not name.startswith("kv4_up")), before
                deadline = time.time() + 120
                name = 'kv4_prompt_tokens_total{cache="gpu0",result="usable"}'
                while parse_metrics(get("metrics"))[name] <= before[name]:  # it goes on
                    assert time.time() < deadline
                    time.sleep(0.2)
                state = json.loads(get("gpu0/state.json"))
                assert len(state["blocks"]) == 512 and state["requests"] and state["tiers"][0]["name"] == "host", state
                assert "prompts' tokens" in state["headline"], state["headline"]
                assert "nobody publishes" in json.loads(get("gpu-1/state.json"))["headline"]
                assert 'href="gpu0/"' in get("") and "<!doctype html>" in get("gpu0/")
                try:
                    get("gpu2/")
                    raise AssertionError("a page that is not there")
                except urllib.error.HTTPError as error:
                    equal(error.code, 404)
                port = first["address"].split(":")[2][:-1]
                refused(["serve-metrics", gpu0, "--listen", port], "--listen", port, "in use")
                process.send_signal(signal.SIGTERM)
                equal(process.wait(60), 0)
        # The process was killed: what it said is old after a while, and no figure of a cache then.
        path = Path(gpu0) / "status.json"
        status = json.loads(path.read_text())
        status["boot_ms"] -= 60_000
        path.write_text(json.dumps(status))
        done = kv4("serve-metrics", gpu0, "--once")
        equal((done.returncode, parse_metrics(done.stdout)), (1, {'kv4_up{cache="gpu0"}': 0}))


def test_requests_of_a_running_cache():
    """One that is sure to run on is inspected by tests/python/test_status.py."""
    with tempfile.TemporaryDirectory() as folder:
        folder = str(Path(folder) / "status")
        with running_cache(folder):
            listed = ok("inspect", folder).stdout
            assert "requests run" in listed and "shared" in listed, listed
            refused(["inspect", folder, "--request", "2000000000"], "2000000000", "does not run")
            # Nobody else may publish there.
            refused(["replay", "--generate", "--limit", "5", "--data", "real", "--layers", "3", "--status", folder], folder, "in use")
        refused(["inspect", folder + "/none"], "none")
        file = Path(folder, "file")
        file.write_text("no session")
        refused(["inspect", str(file), "--request", "1"], "--request", str(file))


def test_refused():
    with tempfile.TemporaryDirectory() as folder:
        refused(["inspect", folder], folder, "nobody publishes")
        refused(["inspect", folder, "--request", "1"], folder, "nobody publishes")
        equal(os.listdir(folder), [])
        for text in ("{", "[]", '{"format": "kv4 status 9"}', '{"format": "kv4 status 1", "status": {"requests": 7}}'):
            Path(folder, "status.json").write_text(text)
            refused(["inspect", folder], "status.json", "no status of a cache")
    refused(["serve-metrics"], "DIR")
    refused(["serve-metrics", "/a/x", "/b/x", "--once"], "/a/x", "/b/x", "'x'")
    refused(["serve-metrics", "/a/x", "--listen", "no such host:1"], "--listen", "no such host")
    refused(["replay", "--generate", "--status", "/tmp/x"], "--status", "--data real")


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
