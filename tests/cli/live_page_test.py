#!/usr/bin/env python3
"""The tool's pages in use, in Debian's Chromium through playwright. Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree).
"""
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from metrics_test import full_status
from running_cache_test import replay_with_page, running, running_cache, serving
from server_test import publishing
from tool import KV4, Skipped, equal, ok, run_tests

TIMEOUT_MS = 120_000  # a machine may be busy
expect.set_options(timeout=TIMEOUT_MS)


@contextmanager
def open_page(address, width=1280):
    """A browser page that must report no errors and send requests only to the tool."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
                                         timeout=TIMEOUT_MS)
        page, problems, asked = browser.new_page(viewport={"width": width, "height": 900}), [], []
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: problems.append(error))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        yield page
        equal(problems, [])
        assert all(url.startswith((address, "data:")) for url in asked), asked
        browser.close()


def test_live_page_of_a_running_cache():
    with tempfile.TemporaryDirectory() as folder:
        folder = str(Path(folder) / "gpu0")
        with running_cache(folder), serving(folder) as (_, server, first), open_page(first["address"]) as page:
            expect(page.locator("#status")).to_contain_text("prompts' tokens were found")
            expect(page.locator("#map i")).to_have_count(512)
            expect(page.locator("#tiers tr")).to_have_count(2)
            expect(page.locator("#tenants tr")).to_have_count(3)
            assert page.locator("#requests tr").count() >= 2
            # Hovering over the map names and marks a block.
            block = page.locator("#map i.held").first.element_handle()  # this element, even if it changes
            block.hover()
            assert re.fullmatch(r"block \d+: (held by a request|kept, evictable|free)", block.get_attribute("title"))
            equal(block.evaluate("cell => getComputedStyle(cell).outlineStyle"), "solid")
            # The page updates by itself, and reports when the server is gone.
            updates = int(page.get_attribute("body", "data-updates"))
            for _ in range(2):  # without a text for the page to evaluate: its policy forbids that
                now = page.get_attribute("body", "data-updates")
                expect(page.locator("body")).not_to_have_attribute("data-updates", now)
            points = page.get_attribute("#rate", "points").split()
            assert len(points) > updates, points
            assert re.search(r"memory\d+(\.\d+)? MB", page.locator("#cache").text_content()), page.locator("#cache").text_content()
            server.terminate()
            expect(page.locator("#status")).to_contain_text("nobody serves this page any more")
            expect(page.locator("#state")).to_have_text("connection lost")


def test_nobody_publishes_yet():
    """A page without a cache does not claim to be live."""
    with tempfile.TemporaryDirectory() as folder:
        folder = str(Path(folder) / "gpu0")
        Path(folder).mkdir()
        with serving(folder) as (_, _, first), open_page(first["address"]) as page:
            expect(page.locator("#status")).to_contain_text("nobody publishes in")
            expect(page.locator("#state")).to_have_text("waiting")
            with publishing(folder, status=full_status()):
                expect(page.locator("#state")).to_have_text("live")


def test_a_size_that_is_not_known():
    with tempfile.TemporaryDirectory() as folder:
        folder = str(Path(folder) / "gpu0")
        with publishing(folder, status=full_status()), serving(folder) as (_, _, first), open_page(first["address"]) as page:
            expect(page.locator("#tiers tr")).to_have_count(5)
            expect(page.locator("#tiers tr").nth(2)).to_contain_text("500 B")
            expect(page.locator("#tiers tr").nth(3)).to_contain_text("not known")


def hover_at(page, plot, share, height=0.4):
    """Of the plot's width: the margin on the left is for labels."""
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] * height)
    return plot.locator(".tip")


def drag(page, plot, begin, end, height=0.4):
    hover_at(page, plot, begin, height)
    page.mouse.down()
    hover_at(page, plot, (begin + end) / 2, height)
    hover_at(page, plot, end, height)
    page.mouse.up()


def shown_range(plot):
    return float(plot.get_attribute("data-low")), float(plot.get_attribute("data-high"))


def test_finished_and_lost_replays():
    """Of a replay that skips requests; then the server is gone, and the page goes on saying that all is done."""
    with running("replay", "--generate", "--data", "real", "--layers", "3", "--limit", "60", "--capacity", "16K", "--verify", "0", "--serve") as process:
        address = re.match(r"live page: (\S+)", process.stderr.readline()).group(1)
        with open_page(address) as page:
            expect(page.locator("#state")).to_have_text("finished")
            expect(page.locator("#status")).to_contain_text("60 of 60 requests")
            tip = hover_at(page, page.locator("#rates .plot"), 0.5)
            assert re.search(r"requests: \d+.*found: [\d.]+ %", tip.text_content()), tip.text_content()
            process.kill()
            process.wait()
            page.wait_for_timeout(2500)  # more than two updates
            expect(page.locator("#state")).to_have_text("finished")
    with running("replay", "--generate", "--data", "real", "--layers", "3", "--limit", "100000", "--capacity", "16K", "--verify", "0", "--serve") as process:
        address = re.match(r"live page: (\S+)", process.stderr.readline()).group(1)
        with open_page(address) as page:
            expect(page.locator("#state")).to_have_text("live")
            expect(page.locator("#map i").first).to_be_attached()
            process.send_signal(signal.SIGINT)  # the process ends, and the page has its last state
            expect(page.locator("#state")).to_have_text("interrupted")
            equal(process.wait(60), 130)
    with running("replay", "--generate", "--data", "real", "--layers", "3", "--limit", "100000", "--capacity", "16K", "--verify", "0", "--serve") as process:
        address = re.match(r"live page: (\S+)", process.stderr.readline()).group(1)
        with open_page(address) as page:
            expect(page.locator("#map i").first).to_be_attached()
            process.kill()
            expect(page.locator("#state")).to_have_text("connection lost")
            expect(page.locator("#status")).to_contain_text("of 100,000 requests")


def test_hover_and_zoom():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay.html"
        ok("replay", "--generate", "--seed", "7", "--limit", "500", "--capacity", "256K", "--report", str(path))
        with open_page(path.as_uri()) as page:
            plots = {figure.locator("figcaption").text_content(): figure.locator(".plot") for figure in page.locator("figure.chart").all()}
            blocks = next(plot for title, plot in plots.items() if title.startswith("Blocks"))
            blocks.scroll_into_view_if_needed()
            # All series are shown at the pointer, and none elsewhere.
            words = hover_at(page, blocks, 0.7).text_content()
            assert all(re.search(rf"{name}: [\d,]+", words) for name in ("requests", "found", "computed", "evicted")), words
            page.mouse.move(1, 1)
            expect(blocks.locator(".tip")).to_be_hidden()
            # A drag shows its range, labels included; a double click shows all again.
            whole = shown_range(blocks)
            equal(whole, (5, 500))
            drag(page, blocks, 0.4, 0.6)
            low, high = shown_range(blocks)
            assert whole[0] < low < high < whole[1] and high - low < 0.3 * (whole[1] - whole[0]), (low, high)
            labels = [float(text) for text in blocks.locator("svg text.middle").all_text_contents() if text.isdigit()]
            assert len(labels) >= 3 and low <= min(labels) < max(labels) <= high, labels
            expect(blocks.locator(".reset")).to_be_visible()
            box = blocks.bounding_box()
            page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            equal(shown_range(blocks), whole)
            drag(page, blocks, 0.4, 0.6)
            blocks.locator(".reset").click()
            equal(shown_range(blocks), whole)
            # The same by keys.
            blocks.focus()
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            assert "requests: 10" in blocks.locator(".tip").text_content(), blocks.locator(".tip").text_content()
            page.keyboard.press("+")
            assert shown_range(blocks)[1] < whole[1], shown_range(blocks)
            page.keyboard.press("0")
            equal(shown_range(blocks), whole)
            # Every chart answers the pointer and zooms.
            for title, plot in plots.items():
                plot.scroll_into_view_if_needed()
                assert hover_at(page, plot, 0.5, 0.3).text_content(), title
                whole = shown_range(plot)
                drag(page, plot, 0.45, 0.8, 0.3)
                assert shown_range(plot) != whole, title


def test_series_are_visible_and_have_one_color():
    """Every series of a chart on the page has pixels of its own, also where policies find the same."""
    with tempfile.TemporaryDirectory() as folder:
        pages = [Path(folder) / name for name in ("real.html", "plan.html")]
        ok("replay", "--generate", "--data", "real", "--layers", "3", "--limit", "30", "--capacity", "32K", "--verify", "0", "--host", "1MB", "--report", str(pages[0]))
        ok("plan", "--context", "128K", "--requests", "16", "--html", str(pages[1]))
        seen = {}
        for path in pages:
            with open_page(path.as_uri()) as page:
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    drawn = page.evaluate("""() => [...document.querySelectorAll('figure.chart')].map(figure => [...figure.querySelectorAll('.series')].map(mark => {
                        const style = getComputedStyle(mark), box = mark.getBBox();
                        return {name: mark.dataset.name, tag: mark.tagName, color: mark.tagName == 'polyline' ? style.stroke : style.fill, wide: box.width, high: box.height, x: box.x, y: box.y};
                    }))""")
                    for figure in drawn:
                        for mark in figure:
                            equal(seen.setdefault((scheme, mark["name"]), mark["color"]), mark["color"])
                            assert mark["color"].startswith("rgb("), mark
                        boxes = [mark for mark in figure if mark["tag"] == "rect"]
                        for i, a in enumerate(boxes):  # bars: beside each other
                            for b in boxes[:i]:
                                apart = a["x"] >= b["x"] + b["wide"] - 1.01 or b["x"] >= a["x"] + a["wide"] - 1.01 or a["y"] >= b["y"] + b["high"] or b["y"] >= a["y"] + a["high"]
                                assert apart or min(a["high"], b["high"]) == 0, (a, b)
                        names = {mark["name"] for mark in figure}
                        if "evicted" in names:
                            areas = {mark["name"]: mark for mark in figure}
                            assert areas["evicted"]["tag"] == "polygon" and names == {"found", "computed", "evicted"}, names
                words = page.locator("svg text").all_text_contents()
                assert not any(re.search(r"\d[KMGT] B$", word) for word in words), words
                if path.name == "plan.html":
                    assert any(re.fullmatch(r"\d+ GB", word) for word in words) and "7.07 GB" in words, words


def test_pages_fit_a_telephone():
    with tempfile.TemporaryDirectory() as folder:
        pages = [Path(folder) / name for name in ("replay.html", "plan.html")]
        ok("replay", "--generate", "--limit", "300", "--capacity", "256K", "--tenants", "2", "--report", str(pages[0]))
        ok("plan", "--html", str(pages[1]))
        for path in pages:
            with open_page(path.as_uri(), width=400) as page:
                equal(page.evaluate("document.documentElement.scrollWidth"), 400)
                smallest = page.evaluate("Math.min(...[...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect().height))")
                assert smallest >= 10, smallest


def test_heat_map():
    example = Path(KV4).parent / "examples/keep_context"
    if not example.exists():
        raise Skipped(f"{example} is not built")
    with tempfile.TemporaryDirectory() as folder:
        session, svg = str(Path(folder) / "chat.kv4s"), Path(folder) / "chat.svg"
        subprocess.run([example, session], capture_output=True, check=True)
        ok("inspect", session, "--svg", str(svg))
        with open_page(svg.as_uri()) as page:
            area = page.locator("#area").bounding_box()
            assert area["width"] <= 5 * area["height"], area
            page.mouse.move(area["x"] + area["width"] * 0.5, area["y"] + area["height"] * 0.25)
            words = page.locator("#tip").text_content()
            assert re.fullmatch(r"layer 1 CSA, position 39\d to \d+, block 3: rms [01]\.\d+", words), words
            before = page.get_attribute("#area", "viewBox")
            page.mouse.down()
            page.mouse.move(area["x"] + area["width"] * 0.75, area["y"] + area["height"] * 0.25, steps=3)
            page.mouse.up()
            low, _, columns, _ = map(float, page.get_attribute("#area", "viewBox").split())
            assert 95 <= low <= 105 and 45 <= columns <= 55, (low, columns)
            page.keyboard.press("0")
            equal(page.get_attribute("#area", "viewBox"), before)


def test_page_of_a_replay():
    with replay_with_page() as (_, _, address, state), open_page(address) as page:
        expect(page.locator("body")).to_have_attribute("data-updates", str(state["updates"]))
        expect(page.locator("#status")).to_have_text(state["headline"])
        equal(page.locator("#map i[title^='block ']").count(), 512)
        equal(len(page.get_attribute("#rate", "points").split()), len(state["rates"]))
        for table, cell in (("tiers", "host"), ("cache", "blocks evicted"), ("tenants", "256")):
            assert page.locator(f"#{table} td", has_text=cell).count() > 0, (table, cell)


def test_plan_page():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.html"
        ok("plan", "--context", "128K", "--requests", "4", "--html", str(path))
        with open_page(path.as_uri()) as page:
            expect(page.locator("svg").first).to_be_visible()
            equal(page.evaluate("document.body.dataset.plots"), str(page.locator("svg").count()))


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
