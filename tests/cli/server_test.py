#!/usr/bin/env python3
"""The tool's HTTP server and its clients, good and bad: `kv4 serve-metrics`. Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree); an argument runs only tests whose name contains it.
"""
import http.client
import json
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from running_cache_test import serving
from tool import equal, kv4, ok, parse_metrics, refused, run_tests

SOON = 5  # seconds: less than any time limit of the server, so that nobody has waited for one


def status(**changes):
    """The status of a cache on another machine."""
    return {"format": "kv4 status 1", "model": "m", "process": 1, "interval_ms": 1000, "boot_id": "elsewhere", "boot_ms": 1, **changes}


def publish(folder, **changes):
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "next").write_text(json.dumps(status(**changes)))
    Path(folder, "next").rename(Path(folder, "status.json"))


@contextmanager
def publishing(folder, **changes):
    """A status that changes ten times a second."""
    ends = threading.Event()

    def run():
        number = 0
        while not ends.wait(0.1):
            number += 1
            publish(folder, boot_ms=number, **changes)

    publish(folder, **changes)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def place_of(first):
    return "127.0.0.1", int(first["address"].split(":")[2][:-1])


def ask(place, method="GET", path="/metrics", headers={}, body=None):
    connection = http.client.HTTPConnection(*place, timeout=SOON)
    try:
        connection.request(method, path, headers=headers, body=body)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def clients(stack, place, count, first=b""):
    out = []
    for _ in range(count):
        connection = stack.enter_context(socket.create_connection(place, timeout=SOON))
        connection.sendall(first)
        out.append(connection)
    return out


def test_methods():
    with tempfile.TemporaryDirectory() as folder, serving(folder) as (_, _, first):
        place = place_of(first)
        got, body = ask(place)
        equal(got.status, 200)
        assert got.headers["Content-Type"].startswith("text/plain; version=0.0.4") and b"kv4_up" in body
        head, nothing = ask(place, "HEAD")
        equal((head.status, head.headers["Content-Length"], nothing), (200, str(len(body)), b""))
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"):
            answer, _ = ask(place, method, body=b"x" * 1000 if method in ("POST", "PUT") else None)
            equal((method, answer.status, answer.headers["Allow"]), (method, 405, "GET, HEAD"))
        equal(ask(place, path="/none")[0].status, 404)
        equal(ask(place, "HEAD", path="/none")[0].status, 404)
        equal(ask(place, path="/metrics?x=1")[0].status, 200)
        for path in ("/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//metrics"):
            equal(ask(place, path=path)[0].status, 404)
        assert ask(place, headers={"X": "x" * 100_000})[0].status in (413, 431)
        assert ask(place, path="/" + "x" * 100_000)[0].status in (413, 414, 431)


def test_hosts():
    """A page of another site that gives its name this address does not get figures."""
    with tempfile.TemporaryDirectory() as folder, serving(folder) as (_, _, first):
        place = place_of(first)
        for host, code in (("127.0.0.1", 200), ("localhost:1", 200), ("[::1]:80", 200), ("evil.example", 421), ("127.0.0.1.evil.example:9464", 421), ("", 421)):
            equal((host, ask(place, headers={"Host": host})[0].status), (host, code))
        page, _ = ask(place, path="/")
        assert "default-src 'none'" in page.headers["Content-Security-Policy"] and page.headers["X-Content-Type-Options"] == "nosniff"


def test_slow_clients_keep_nobody_waiting():
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        _, process, first = stack.enter_context(serving(folder))
        place = place_of(first)
        clients(stack, place, 50)                                                      # that say nothing
        slow = clients(stack, place, 50, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n")  # that never finish
        clients(stack, place, 50, b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        for _ in range(3):
            equal(ask(place)[0].status, 200)
            for connection in slow:
                connection.sendall(b"X: y\r\n")
        # More connections than the server has places for: the oldest end.
        clients(stack, place, 600)
        equal(ask(place)[0].status, 200)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        equal(process.wait(60), 0)
        assert time.monotonic() - started < SOON, "clients that are idle were waited for"


def test_client_that_never_reads():
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(publishing(folder, status={"block_states": "f" * 8_000_000}))
        _, process, first = stack.enter_context(serving(folder))
        place = place_of(first)
        deadline = time.time() + 60
        while len(ask(place, path="/state.json")[1]) < 8_000_000:
            assert time.time() < deadline, "a status that changes is not shown"
            time.sleep(0.2)
        clients(stack, place, 40, b"GET /state.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(3):
            equal(ask(place)[0].status, 200)
        peak = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
        assert int(peak.split()[1]) < 300_000, peak  # one copy for all of them
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        equal(process.wait(60), 0)
        assert time.monotonic() - started < SOON, "clients that do not read were waited for"


def test_connections_end():
    """An answer ends its connection: an idle one would only hold its place."""
    with tempfile.TemporaryDirectory() as folder, serving(folder) as (_, _, first):
        with socket.create_connection(place_of(first), timeout=SOON) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b""
            while piece := connection.recv(1 << 16):  # the end comes from the server
                received += piece
            assert b"Connection: close" in received or b"connection: close" in received.lower(), received[:300]


def test_names_of_a_status_are_text():
    """Names that a cache gives cannot become markup, other series or commands of a terminal."""
    bad = '</script><img src=x onerror=alert(1)>"\n\\ \x1b[2J\u009b\u202e'
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        gpu0, gpu1 = str(Path(folder) / "gpu0"), str(Path(folder) / "gpu1")
        stack.enter_context(publishing(gpu0, model=bad, status={"tiers": [{"name": bad, "hits": 1}], "requests": [{"request": 1, "lengths": [5]}]}))
        get, process, first = stack.enter_context(serving(gpu0, gpu1))
        deadline = time.time() + 60
        while 'kv4_up{cache="gpu0"} 1' not in (text := get("metrics")):
            assert time.time() < deadline, text
            time.sleep(0.2)
        escaped = bad.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines = [line for line in text.split("\n") if "tier=" in line]
        assert lines and all(f'tier="{escaped}"' in line and re.search(r" -?\d+$", line) for line in lines), lines[:3]
        page = get("")
        assert "<img" not in page and "&lt;img" in page, page
        assert bad in json.loads(get("gpu0/state.json"))["headline"]
        assert "<img" not in get("gpu0/")
        for args in (("inspect", gpu0), ("inspect", gpu0, "--json"), ("serve-metrics", gpu0, "--once", "--json")):
            shown = ok(*args).stdout
            assert not any(ord(c) < 0x20 and c != "\n" or 0x7f <= ord(c) < 0xa0 or c == "\u202e" for c in shown), (args, shown[:300])


def test_up_does_not_ask_the_wall_clock():
    with tempfile.TemporaryDirectory() as folder:
        gpu0 = str(Path(folder) / "gpu0")
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1000)
        up = lambda: parse_metrics(kv4("serve-metrics", gpu0, "--once").stdout)['kv4_up{cache="gpu0"}']
        for time_ms in (0, 1 << 50, int(time.time() * 1000)):  # whatever a wall clock said
            publish(gpu0, boot_id=boot_id, boot_ms=now, time_ms=time_ms)
            equal(up(), 1)
            publish(gpu0, boot_id=boot_id, boot_ms=now - 60_000, time_ms=time_ms)
            equal(up(), 0)
        # Of a time to come: nobody knows, unless it changes.
        publish(gpu0, boot_id=boot_id, boot_ms=now + 10**9)
        equal(up(), 0)
        with publishing(gpu0):
            equal(up(), 1)


def test_a_status_behind_a_link_is_not_read():
    """The owner of a folder must not make the server read other files for him."""
    with tempfile.TemporaryDirectory() as folder:
        gpu0, gpu1, linked = (Path(folder) / name for name in ("gpu0", "gpu1", "linked"))
        up = lambda path: parse_metrics(kv4("serve-metrics", str(path), "--once").stdout)[f'kv4_up{{cache="{path.name}"}}']
        with publishing(str(gpu0)):
            gpu1.mkdir()
            (gpu1 / "status.json").symlink_to(gpu0 / "status.json")
            linked.symlink_to(gpu0)  # a folder may have another name
            equal((up(gpu0), up(gpu1), up(linked)), (1, 0, 1))
            refused(["inspect", str(gpu1)], "status.json", "symbolic link")


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
