#!/usr/bin/env python3
"""Pages and pictures that the tool writes, as text and state: units, colors, series, names from outside, runs that end.
live_page_test.py has them in a browser. Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree); an argument runs only tests whose name contains it.
"""
import functools
import html
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

from cli_test import TINY_FORMATS, Redis, tiny_config
from running_cache_test import running
from session_test import read_png
from tool import KV4, Skipped, equal, ok, ok_json, run_tests

NO_UNIT = re.compile(r"\d[KMGT] B\b")  # "7.073G B"


def charts(text):
    """Titles to the data that the page's script draws."""
    found = re.findall(r"<figcaption>(.*?)</figcaption>.*?<script type=\"application/json\">(.*?)</script>", text, re.S)
    return {html.unescape(title): json.loads(data) for title, data in found}


def colors(chart):
    """The color of each thing by name."""
    if chart["type"] == "bars":
        parts = [part for bar in chart["bars"] for part in bar["parts"]]
    else:
        parts = [series for panel in chart["panels"] for series in panel["series"]]
    return {(part["name"], part["color"]) for part in parts}


@functools.cache
def written_pages():
    """The pages of a plan, a replay without bytes, and one with bytes."""
    with tempfile.TemporaryDirectory() as folder:
        return write_pages(folder)


def write_pages(folder):
    plan, replay, real = (Path(folder) / name for name in ("plan.html", "replay.html", "real.html"))
    ok("plan", "--context", "128K", "--requests", "16", "--draft-layers", "1", "--html", str(plan))
    ok("replay", "--generate", "--seed", "7", "--limit", "500", "--capacity", "1M", "--tenants", "3", "--report", str(replay))
    ok("replay", "--generate", "--data", "real", "--layers", "4", "--limit", "40", "--capacity", "32K", "--verify", "0", "--host", "4MB",
       "--disk", folder + "/store", "--report", str(real))
    return [page.read_text() for page in (plan, replay, real)]


def test_units_colors_and_series():
    pages = written_pages()
    for page in pages:
        assert not NO_UNIT.search(page) and "http" not in page, NO_UNIT.search(page)
        equal(re.findall(r"<(?:link|img|iframe)\b|\bsrc=|@import|url\((?!#)", page), [])
        assert len(page) < 200_000, len(page)
    plan, replay, real = map(charts, pages)
    assert "7.07 GB" in pages[0] and "824 MB" in pages[0] and "451 KB" in pages[0]
    for title, chart in {**plan, **real}.items():
        if "ytes" in title:
            equal((title, chart["unit"], chart["label"].split()[0]), (title, "bytes", "bytes"))
    # A thing has one color wherever it is, and its chart no other thing of that color; a chart has no series twice.
    color_of = {}
    for chart in (*plan.values(), *replay.values(), *real.values()):
        for name, color in colors(chart):
            equal(color_of.setdefault(name, color), color)
        equal(len({color for _, color in colors(chart)}), len(colors(chart)))
    for page in pages:
        variables = dict(re.findall(r"(--[\w-]+): light-dark\((#\w{6}), #\w{6}\)", page))
        for color in color_of.values():
            assert color[4:-1] in variables, color
    assert color_of["CSA entries"] != color_of["index keys"] and "var(--other)" not in color_of.values(), color_of
    # On one page no two things have one color, not even in different charts.
    for page in pages:
        variables = dict(re.findall(r"(--[\w-]+): light-dark\((#\w{6}), #\w{6}\)", page))
        drawn = {color for chart in charts(page).values() for _, color in colors(chart)}
        equal(len({variables[color[4:-1]] for color in drawn}), len(drawn))
    # Every series of a chart is in its legend, or named beside its bar.
    for page in pages:
        for figure in re.findall(r"<figure class=\"chart.*?</figure>", page, re.S):
            data, legend = next(iter(charts(figure).values())), re.findall(r"</i>(.*?)</li>", figure)
            named = legend + [bar["name"] for bar in data.get("bars", [])]
            assert all(html.escape(name) in named or name in named for name, _ in colors(data)), (named, colors(data))


def test_series_do_not_hide_each_other():
    pages = written_pages()
    for text in pages[1:]:
        found = charts(text)
        over_time = next(chart for title, chart in found.items() if title.startswith("Blocks"))
        asked, evicted = over_time["panels"]
        equal((asked["marks"], [series["name"] for series in asked["series"]]), ("stack", ["found", "computed"]))
        equal([series["name"] for series in evicted["series"]], ["evicted"])
        # Policies side by side: also where all find the same.
        capacity, = found["Block hit rate against capacity, by policy"]["panels"]
        equal((capacity["marks"], [series["name"] for series in capacity["series"]]), ("groups", ["lru", "s3fifo", "density"]))
        assert found["Block hit rate against capacity, by policy"]["x"]["bytes_per_token"] > 0
        for chart in found.values():
            for panel in chart.get("panels", []):
                if panel["marks"] == "lines":
                    equal([series["dashed"] for series in panel["series"]], [False, True][:len(panel["series"])])
        # Means by policy, and percentiles of this replay, each in a chart of its own.
        policies = {bar["name"] for bar in found["Tokens computed again per hit, by snapshot policy (mean)"]["bars"]}
        equal(policies, {"full", "checkpoint (8192)", "none, exact replay"})
        equal([bar["name"] for bar in found["Tokens computed again per hit, percentiles of this replay"]["bars"]], ["p50", "p90", "p99", "most"])


def test_skipped_requests_have_their_place():
    """A replay with bytes skips requests longer than the cache: x still grows, and they have no rate."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "real.html"
        figures = json.loads(ok("replay", "--generate", "--data", "real", "--layers", "3", "--limit", "120", "--capacity", "16K", "--verify", "0", "--json",
                                "--report", str(page)).stdout)
        assert figures["skipped_requests"] > 20, figures
        assert f"<td>requests skipped, longer than the cache</td><td>{figures['skipped_requests']}</td>" in page.read_text()
        chart = charts(page.read_text())["Block hit rate over time"]
        x, each = chart["x"]["values"], chart["panels"][0]["series"][0]["values"]
        assert all(a < b for a, b in zip(x, x[1:])) and x[-1] == 120 and None in each, x


def test_a_tier_of_unknown_size():
    """The contents of a remote tier are unknown: the page has no bar of -1 bytes."""
    with tempfile.TemporaryDirectory() as folder, Redis() as redis:
        page = Path(folder) / "page.html"
        figures = ok_json("replay", "--generate", "--data", "real", "--layers", "3", "--limit", "10", "--capacity", "32K", "--verify", "0", "--host", "1MB",
                          "--remote", f"127.0.0.1:{redis.port}", "--report", str(page))
        host, remote = figures["tiers"]
        assert host["records"] > 0 and host["bytes"] > 0, host
        equal((remote["records"], remote["bytes"]), (None, None))
        names = [bar["name"] for bar in charts(page.read_text())["Bytes by tier"]["bars"]]
        equal(names, ["device, kept", "host, kept", "host, stored", "host, found", "remote, stored", "remote, found"])
        assert "<td>capacity in bytes, in blocks of v4-flash (3 layers)</td>" in page.read_text()


def test_names_are_text():
    """The name of a trace is foreign input."""
    bad = "</script><img src=x onerror=alert(1)>\"'&.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        trace, page = Path(folder) / bad.replace("/", "_"), Path(folder) / "page.html"
        trace.write_text('{"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n' * 3)
        ok("replay", str(trace), "--report", str(page))
        text = page.read_text()
        assert "<img" not in text and "&lt;img src=x" in text, text[:500]
        # A model's name stands in the data of charts, too.
        config = Path(tiny_config(folder))
        config.write_text(json.dumps(json.loads(config.read_text()) | {"_name_or_path": bad}))
        ok("replay", str(trace), "--report", str(page), "--capacity", "1K", "--config", str(config), *TINY_FORMATS)
        text = page.read_text()
        assert "<img" not in text and bad in charts(text)["Block hit rate against capacity, by policy"]["x"]["bytes_of"], text[:500]
        ok("plan", "--config", str(config), *TINY_FORMATS, "--context", "2K", "--html", str(page))
        assert "<img" not in page.read_text() and "&lt;img" in page.read_text()


def state_of(address):
    return json.loads(urllib.request.urlopen(address + "state.json", timeout=60).read())


def replay(*more, layers="3"):
    return running("replay", "--generate", "--data", "real", "--layers", layers, "--capacity", "16K", "--verify", "0", "--serve", *more)


def address_of(process):
    return re.match(r"live page: (http://127\.0\.0\.1:\d+/)\n", process.stderr.readline()).group(1)


def test_finished_replay():
    """Skipped requests count as done: a replay ends at all requests."""
    with replay("--limit", "60", "--json") as process:
        address = address_of(process)
        result = ""
        while not result.endswith("\n}\n"):
            result += process.stdout.readline()
        result, state = json.loads(result), state_of(address)
        assert result["skipped_requests"] > 0, result
        equal(state["state"], "finished")
        assert state["headline"].startswith("60 of 60 requests") and f"{result['skipped_requests']} skipped" in state["headline"], state["headline"]
        equal((state["updates"], state["rate_at"][-1], len(state["rates"])), (60, 60, 60))
        page = urllib.request.urlopen(address, timeout=60).read().decode()
        assert "http" not in page and not NO_UNIT.search(page)
        assert "['tier', 'found', 'not found', 'stored', 'kept']" in page  # headings of the table of tiers
        process.send_signal(signal.SIGTERM)
        equal(process.wait(60), 0)


def test_interrupted_replay():
    """An open page gets the last state before the process ends; the process waits for that, but not long."""
    with replay("--limit", "100000") as process:
        address, seen, ready = address_of(process), [], threading.Event()

        def look():  # as a page does, but more often
            try:
                while not seen or seen[-1]["state"] == "running":
                    seen.append(state_of(address))
                    if "blocks" in seen[-1]:
                        ready.set()
            except OSError:
                ready.set()

        looker = threading.Thread(target=look)
        looker.start()
        assert ready.wait(120)
        process.send_signal(signal.SIGINT)
        looker.join(120)
        equal(seen[-1]["state"], "interrupted")
        assert "the replay was interrupted" in seen[-1]["headline"] and "of 100,000 requests" in seen[-1]["headline"], seen[-1]["headline"]
        equal(process.wait(60), 130)


def test_many_rates_end_with_the_last():
    with replay("--limit", "450", "--json", layers="2") as process:
        address = address_of(process)
        while process.stdout.readline() != "}\n":
            pass
        state = state_of(address)
        assert len(state["rates"]) <= 400 and state["rate_at"][-1] == 450, state["rate_at"][-3:]
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_heat_maps():
    example = Path(KV4).parent / "examples/keep_context"
    if not example.exists():
        raise Skipped(f"{example} is not built")
    with tempfile.TemporaryDirectory() as folder:
        path, svg, png = (str(Path(folder) / name) for name in ("chat.kv4s", "chat.svg", "chat.png"))
        subprocess.run([example, path], capture_output=True, check=True)
        for more in ([], ["--part", "window"], ["--layer", "1"], ["--layer", "1", "--part", "pending"], ["--layer", "2", "--part", "entries"], ["--layer", "1", "--part", "keys"]):
            ok("inspect", path, *more, "--svg", svg, "--png", png)
            width, height, _ = read_png(Path(png))
            assert width <= 4 * height and height <= 4 * width and width >= 200, (more, width, height)
            text = Path(svg).read_text()
            legend = re.findall(r"<rect x=\"926\"[^>]*/><text[^>]*>([^<]*)</text>", text)
            assert len(set(legend)) == len(legend) == 9 and legend[-1] == "nothing", legend
            data = json.loads(re.search(r"const map = (\{.*\});\n", text).group(1))
            equal(len(data["values"]), data["columns"] * len(data["labels"]))
            if not more:  # 801 tokens: CSA entries cover all up to 799, HCA ones up to 767, and nothing is drawn behind
                equal((data["first"], data["last"]), (0, 799))
                for row, covered in enumerate((800, 768)):
                    values = data["values"][row * data["columns"]:(row + 1) * data["columns"]]
                    equal([value is not None for value in values], [column * 800 < covered * data["columns"] for column in range(data["columns"])])
            assert data["columns"] <= 1024 and data["row"] in ("layer", "row"), data["columns"]


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
